"""Markdown that comes piece by piece, cut into blocks: those that are finished, and the one that is still open.

A finished block is printed once and stays; only the open one is drawn again when more of it comes. So a long answer
costs no more to show than a short one, and what has been read does not move. A block ends at an empty line outside of a
fence (of a list only when something else follows it), at the end of a fence, and where it has become so long that it is
not drawn as a whole any more: so does a line that finds no end. Pure.
"""

from __future__ import annotations

import re

BLOCK_CHARS_MAX = 4000
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_ITEM = re.compile(r" {0,3}([-*+]|\d{1,9}[.)])( |$)")


class Blocks:
    """`feed` text as it comes; `open` is what is not finished; `rest` at the end."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        """Whole lines of the open block, with their ends."""
        self._line = ""
        self._fence = ""
        """What opened the fence that the open block is in; empty outside."""
        self._opening = ""
        """The line that did."""
        self._chars = 0
        self._gap = False
        """Whether the open block is a list and ends in an empty line: an item, or what belongs to one, may follow."""

    @property
    def open(self) -> str:
        return "".join(self._lines) + self._line

    def feed(self, text: str) -> list[str]:
        """Blocks that are finished with `text`."""
        finished: list[str] = []
        *whole, self._line = (self._line + text).split("\n")
        for line in whole:
            self._take(line, finished)
        while len(self._line) > BLOCK_CHARS_MAX:
            line, self._line = _cut(self._line)
            self._take(line, finished)
        return finished

    def rest(self) -> str:
        """What is open at the end; nothing is open behind it."""
        left = self.open
        self._lines, self._line, self._fence, self._chars, self._gap = [], "", "", 0, False
        return left

    def _take(self, line: str, finished: list[str]) -> None:
        fence = _FENCE.match(line)
        if self._gap and line.strip() and not (line.startswith("  ") or _ITEM.match(line)):
            self._end(finished)
        if self._fence:
            self._add(line)
            if fence and fence[1].startswith(self._fence) and not line.strip().strip(self._fence[0]):
                self._fence = ""
                self._end(finished)
            elif self._chars > BLOCK_CHARS_MAX:
                self._end(finished, behind=f"{self._fence}\n")
                self._add(self._opening)
        elif fence:
            self._end(finished)
            self._fence, self._opening = fence[1], line
            self._add(line)
        elif not line.strip():
            if self._lines and _ITEM.match(self._lines[0]):
                self._add("")
                self._gap = True
            else:
                self._end(finished)
        else:
            self._gap = False
            self._add(line)
            if self._chars > BLOCK_CHARS_MAX:
                self._end(finished)

    def _add(self, line: str) -> None:
        self._lines.append(f"{line}\n")
        self._chars += len(line) + 1

    def _end(self, finished: list[str], behind: str = "") -> None:
        if self._lines:
            finished.append("".join(self._lines) + behind)
        self._lines, self._chars, self._gap = [], 0, False


def _cut(line: str) -> tuple[str, str]:
    """At the last space of what fits, if there is one."""
    at = line.rfind(" ", 1, BLOCK_CHARS_MAX) + 1 or BLOCK_CHARS_MAX
    return line[:at], line[at:]
