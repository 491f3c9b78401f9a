"""Token ids to text, a few at a time, never breaking a code point.

Tokens spell bytes, and a token may end in the middle of a code point: what is not complete yet is kept until the next
push. Any way of cutting the ids into pushes gives the same text.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Spells(Protocol):
    """The part of a Tokenizer that is used here."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    def token_bytes(self, token: int) -> bytes: ...


class Detokenizer:
    """Text of the ids pushed so far. With `skip_special`, control tokens are no part of it."""

    def __init__(self, tokenizer: Spells, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset[int]()
        self._utf8 = _Utf8("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that became complete with `ids`; bytes that cannot be UTF-8 come out as U+FFFD."""
        spelled = b"".join(self._tokenizer.token_bytes(token) for token in ids if token not in self._skip)
        return self._utf8.decode(spelled)

    def finish(self) -> str:
        """What is still kept: U+FFFD where a code point never became complete. The object can be used anew."""
        text = self._utf8.decode(b"", True)
        self._utf8.reset()
        return text
