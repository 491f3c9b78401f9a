"""Token ids to text, a few at a time, never breaking a code point.

Tokens spell bytes, and a token may end in the middle of a code point: what is not complete yet is kept until the next
push. Any way of cutting the ids into pushes gives the same text.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from typing import Protocol

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Spells(Protocol):
    """The part of a Tokenizer that is used here."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    def token_bytes(self, token: int) -> bytes: ...


class Detokenizer:
    """Text of the ids pushed so far. With `skip_special`, control tokens are no part of it, but for those in `shown`:
    each stands in the text as the character that is given for it, whatever it spells."""

    def __init__(self, tokenizer: Spells, skip_special: bool = True, shown: Mapping[int, str] | None = None) -> None:
        self._tokenizer = tokenizer
        self._shown = dict(shown or {})
        self._stand_ins = frozenset(self._shown.values())
        self._skip = tokenizer.special_ids if skip_special else frozenset[int]()
        self._utf8 = _Utf8("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that became complete with `ids`; bytes that cannot be UTF-8 come out as U+FFFD."""
        return "".join([self.push_one(token) for token in ids])

    def push_one(self, token: int) -> str:
        """The same of one id."""
        stand_in = self._shown.get(token)
        if stand_in is not None:
            # What was kept never became a character.
            return self.finish() + stand_in
        if token in self._skip:
            return ""
        text = self._utf8.decode(self._tokenizer.token_bytes(token))
        if not self._stand_ins:
            return text
        # A model may spell such a character; then it stands for nothing.
        return "".join("\ufffd" if char in self._stand_ins else char for char in text)

    def finish(self) -> str:
        """What is still kept: U+FFFD where a code point never became complete. The object can be used anew."""
        text = self._utf8.decode(b"", True)
        self._utf8.reset()
        return text
