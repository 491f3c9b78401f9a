"""The text of an answer while it comes, for readers that are generators.

A reader that takes a text character by character reads the same however the text was cut. Written as a generator, it
simply waits where it needs the next one: `char = yield from cursor.next()`, "" at the end of the text. Where only a few
characters mean anything, `run` takes all others that are there at once; what a reader makes of them must not depend on
how many that were.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

_T = TypeVar("_T")
Reading = Generator[None, None, _T]
Say = Callable[[str], None]


class Cursor:
    """`feed` adds text, `end` says that none will come."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        self._ended = True

    def next(self) -> Reading[str]:
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        char = self._text[self._at]
        self._at += 1
        return char

    def run(self, pattern: re.Pattern[str]) -> str:
        """What fits `pattern` of the text that is there; waits for nothing."""
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found[0]

    def back(self, text: str) -> None:
        """Give back what was read last; the end of the text stays where it is."""
        if text:
            self._text = text + self._text[self._at :]
            self._at = 0

    def past_space(self, say: Say | None = None) -> Reading[str]:
        """The next character that is no space; `say` hears the spaces."""
        while (char := (yield from self.next())).isspace():
            if say is not None:
                say(char)
        return char

    def until(
        self, marks: tuple[str, ...], say: Say, closing: Callable[[], tuple[str, ...]] | None = None
    ) -> Reading[str]:
        """The first of `marks` that is complete, "" at the end. `say` hears everything before it, as soon as it can be
        the beginning of none. `closing`: those that were to come here; what the text ends with is no text where it
        begins one of them."""
        plain = _without("".join(mark[0] for mark in marks))
        held = ""
        while True:
            if not held and (run := self.run(plain)):
                say(run)
            char = yield from self.next()
            if not char:
                break
            held += char
            while held and held not in marks and not any(mark.startswith(held) for mark in marks):
                say(held[0])
                held = held[1:]
            if held in marks:
                return held
        if held and not any(mark.startswith(held) for mark in (closing() if closing else ())):
            say(held)
        return ""


@lru_cache(maxsize=256)
def _without(chars: str) -> re.Pattern[str]:
    """Characters that are none of these."""
    return re.compile(f"[^{re.escape(chars)}]+") if chars else re.compile(r"(?s:.+)")
