"""Characters one at a time, for readers that are generators.

A reader that sees a text character by character reads the same however the text was cut. Written as a generator, it
simply waits where it needs the next one: `char = yield from cursor.next()`, "" at the end of the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import TypeVar

_T = TypeVar("_T")
Reading = Generator[None, str, _T]
Say = Callable[[str], None]


class Cursor:
    """What was read and given back comes again before what is sent."""

    def __init__(self) -> None:
        self._kept: deque[str] = deque()

    def next(self) -> Reading[str]:
        if self._kept:
            return self._kept.popleft()
        return (yield)

    def back(self, text: str) -> None:
        """Give back characters; "" gives back the end of the text."""
        if text:
            self._kept.extendleft(reversed(text))
        else:
            self._kept.appendleft("")

    def past_space(self, say: Say | None = None) -> Reading[str]:
        """The next character that is no space; `say` hears the spaces."""
        while (char := (yield from self.next())).isspace():
            if say is not None:
                say(char)
        return char

    def until(self, marks: tuple[str, ...], say: Say) -> Reading[str]:
        """The first of `marks` that is complete, "" at the end. `say` hears everything before it, as soon as it can be
        the beginning of none."""
        firsts = {mark[0] for mark in marks}
        held = ""
        while char := (yield from self.next()):
            if not held and char not in firsts:
                say(char)
                continue
            held += char
            while held and held not in marks and not any(mark.startswith(held) for mark in marks):
                say(held[0])
                held = held[1:]
            if held in marks:
                return held
        for char in held:
            say(char)
        return ""
