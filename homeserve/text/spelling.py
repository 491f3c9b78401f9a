"""How tokens spell bytes: the reverse of encoding, one token at a time.

Streaming needs bytes, not text: a token may end in the middle of a code point. Two spellings exist.
- bytes: each character stands for one byte, in the alphabet that GPT-2 introduced (printable bytes are themselves, the
  others lie from U+0100 on);
- text: ▁ is a space, `<0xXX>` one byte, everything else its UTF-8.
Control and user-defined tokens are spelled as they read in both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _alphabet() -> dict[int, int]:
    """Code point of the GPT-2 alphabet -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: byte for byte in printable}
    others = (byte for byte in range(256) if byte not in table.values())
    return table | {0x100 + index: byte for index, byte in enumerate(others)}


_TO_BYTE = _alphabet()
_OUTSIDE = re.compile("[^" + re.escape("".join(map(chr, _TO_BYTE))) + "]")


class Spelling:
    """Bytes of tokens, worked out on first use. `literal` are the ids that are spelled as they read."""

    def __init__(self, tokens: Sequence[str], literal: frozenset[int], byte_alphabet: bool) -> None:
        self._tokens = tokens
        self._literal = literal
        self._byte_alphabet = byte_alphabet
        self._bytes: list[bytes | None] = [None] * len(tokens)

    def __getitem__(self, token: int) -> bytes:
        """The token's bytes; empty for an id past the vocabulary (models pad theirs to a round size)."""
        if not 0 <= token < len(self._bytes):
            return b""
        spelled = self._bytes[token]
        if spelled is None:
            spelled = self._bytes[token] = self._spell(token)
        return spelled

    def _spell(self, token: int) -> bytes:
        text = self._tokens[token]
        if token in self._literal:
            return text.encode("utf-8", "replace")
        if self._byte_alphabet:
            # A token with a character outside the alphabet was stored as plain text by its maker.
            plain = _OUTSIDE.search(text) is not None
            return text.encode("utf-8", "replace") if plain else text.translate(_TO_BYTE).encode("latin-1")
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes.fromhex(byte[1]) if byte else text.replace("▁", " ").encode("utf-8", "replace")
