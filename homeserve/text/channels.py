"""Answers of the Harmony format, which are messages in channels.

    <|channel|>analysis<|message|>…<|end|>                                            a thought
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>      a call
    <|start|>assistant<|channel|>commentary<|message|>…<|end|>                        text: what it is about to do
    <|start|>assistant<|channel|>final<|message|>…                                    the answer's text

The recipient may also stand before the channel (` to=functions.NAME<|channel|>commentary json`). The prompt ends within
the first header. `<|call|>` and `<|return|>` end the answer, and mostly do not come here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from homeserve.text.answer import PartKind
from homeserve.text.cursor import Cursor, Reading
from homeserve.text.dialects import CHANNEL, CHANNEL_MARKS, MESSAGE, START
from homeserve.text.marks import STAND_INS, Marks
from homeserve.text.parts_made import PartsMade

HEADER_CHARS_MAX = 256
"""A longer header is none; what was taken for one is text."""
_RECIPIENT = re.compile(rf"to=(?:functions\.)?([^\s<{STAND_INS}]+)")
_THOUGHT_CHANNEL = "analysis"


class ChannelsReader:
    """`tools` None: calls are not read."""

    def __init__(
        self, marks: Marks, cursor: Cursor, parts: PartsMade, prompt: str, tools: Mapping[str, Any] | None
    ) -> None:
        self._cursor = cursor
        self._parts = parts
        self._reads_calls = tools is not None
        self._prompt = prompt.rstrip()
        self._start, self._channel, self._message = (marks.written(mark) for mark in (START, CHANNEL, MESSAGE))
        self._ends = tuple(marks.written(mark) for mark in CHANNEL_MARKS if mark not in (CHANNEL, MESSAGE))
        self._headers = (self._channel, self._start, " to=", "to=")

    def read(self) -> Reading[None]:
        header = self._opened_header()
        mark = ""
        if header is None:
            mark = yield from self._beginning()
        while True:
            if header is None:
                header = yield from self._header(mark)
            if header is None:
                break
            mark = yield from self._body(header)
            header = None
            if not mark or not self._parts.may_begin:
                break
            if mark != self._start:
                mark = yield from self._between()
        self._parts.end()

    def _opened_header(self) -> str | None:
        """The header that the prompt has finished for the answer."""
        header, message, begun = self._prompt.rpartition(START)[2].partition(MESSAGE)
        if not message or any(mark in begun for mark in CHANNEL_MARKS):
            return None
        return header.replace(CHANNEL, self._channel)

    def _beginning(self) -> Reading[str]:
        """Whether a header comes, or text: of a model that does not keep to the format. The mark behind such text."""
        begun = ""
        while char := (yield from self._cursor.next()):
            begun += char
            if any(header == begun for header in self._headers):
                self._cursor.back(begun)
                return self._start
            if not any(header.startswith(begun) for header in self._headers):
                break
        if not char:
            self._parts.text(begun)
            return ""
        self._cursor.back(begun)
        self._parts.holds_space = False
        mark = yield from self._cursor.until((self._start, self._channel), self._parts.text)
        self._parts.holds_space = True
        if mark:
            self._cursor.back(mark)
        return self._start if mark else ""

    def _between(self) -> Reading[str]:
        """From one message to the next. What stands there is text."""
        mark = yield from self._cursor.until((self._start, self._channel), self._parts.text)
        if mark == self._channel:
            self._cursor.back(mark)
        return self._start if mark else ""

    def _header(self, mark: str) -> Reading[str | None]:
        """Up to the message; None at the end of the answer, where a header that was cut off says nothing."""
        if not mark:
            return None
        header: list[str] = []
        while True:
            char = yield from self._cursor.next()
            if not char:
                return None
            header.append(char)
            text = "".join(header)
            if text.endswith(self._message):
                return text.removesuffix(self._message)
            if len(text) > HEADER_CHARS_MAX:
                self._cursor.back(text)
                return ""

    def _body(self, header: str) -> Reading[str]:
        """The message; the mark that ends it."""
        _, _, behind = header.rpartition(self._channel)
        channel = behind.split()[0] if behind.split() else ""
        recipient = _RECIPIENT.search(header)
        if recipient is not None and self._reads_calls:
            self._parts.turn_to(PartKind.TEXT)
            self._parts.begin(recipient[1])
            first = yield from self._cursor.past_space()
            self._cursor.back(first)
            mark = yield from self._cursor.until(self._ends, self._parts.arguments, lambda: self._ends)
            if mark:
                self._parts.ended()
            return mark
        self._parts.turn_to(PartKind.THOUGHT if channel == _THOUGHT_CHANNEL else PartKind.TEXT)
        mark = yield from self._cursor.until(self._ends, self._parts.text)
        if mark:
            self._parts.turn_to(PartKind.TEXT)
        return mark
