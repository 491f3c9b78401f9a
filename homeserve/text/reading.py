"""Splits the text of an answer into text, thought and calls, in the formats of the model that writes it.

    TextStream ──text, control tokens as stand-ins──▶ DialectReader ──parts──▶

The reader is a generator that takes one character after the other, so the parts do not depend on how the text was cut.
It holds back what may be the beginning of a mark, the space in front of one, and a call whose name is not known yet.

Rules, where the formats leave it open:
- Space around thoughts and calls belongs to the format, not to the text.
- A mark that is a control token counts everywhere; one that is spelled opens a thought only where no text came before,
  since a text may speak of it.
- A call inside a thought is a call, and the thought goes on behind it. Models do that, and mean it.
- What only looked like a call is text. What is cut off stays cut off; of a closing mark nothing stays.
- Nothing is lost but marks and the space around them.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from typing import Any

from homeserve.text.answer import Part, PartKind
from homeserve.text.call_bodies import CallReader, written_in
from homeserve.text.channels import ChannelsReader
from homeserve.text.cursor import Cursor, Reading
from homeserve.text.dialects import Dialect
from homeserve.text.marks import STAND_INS, Marks
from homeserve.text.parts_made import PartsMade

_ALPHABET = string.ascii_letters + string.digits
_SHORT_LEN, _LONG_LEN = 9, 24
_READ = object()
"""What a reading that has come to its end gives."""


def call_id(*, short: bool) -> str:
    """An id that a call is told by: OpenAI's form, or the nine letters and digits that some templates insist on."""
    drawn = "".join(secrets.choice(_ALPHABET) for _ in range(_SHORT_LEN if short else _LONG_LEN))
    return drawn if short else f"call_{drawn}"


class DialectReader:
    """Reads one answer. `prompt`: the end of what came before it, which may have opened a thought or a message.

    `tools`: the JSON schema of each offered tool's parameters by its name; None: calls are not read, and are text like
    everything else. `parallel` False: the answer ends with its first call.
    """

    def __init__(
        self,
        dialect: Dialect,
        marks: Marks | None = None,
        *,
        prompt: str = "",
        tools: Mapping[str, Any] | None = None,
        parallel: bool = True,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self._marks = marks or Marks()
        self._cursor = Cursor()
        short = dialect.call is not None and dialect.call.short_ids
        self._parts = PartsMade(new_id or (lambda: call_id(short=short)), several=parallel)
        if dialect.in_channels:
            reading = ChannelsReader(self._marks, self._cursor, self._parts, prompt, tools).read()
        else:
            reading = _Formats(dialect, self._marks, self._cursor, self._parts, prompt, tools).read()
        self._reading: Reading[None] | None = reading
        self._go_on()

    @property
    def shown(self) -> Mapping[int, str]:
        return self._marks.shown

    @property
    def called(self) -> bool:
        return self._parts.calls > 0

    @property
    def calling(self) -> bool:
        return self._parts.calling

    @property
    def thinking(self) -> bool:
        return self._parts.kind is PartKind.THOUGHT

    @property
    def done(self) -> bool:
        """Whether the answer has all that it may have, whatever comes."""
        return self._reading is None

    def push(self, text: str) -> list[Part]:
        self._cursor.feed(text)
        self._go_on()
        return self._parts.take()

    def finish(self) -> list[Part]:
        self._cursor.end()
        self._go_on()
        return self._parts.take()

    def _go_on(self) -> None:
        """Read what is there."""
        if self._reading is not None and next(self._reading, _READ) is _READ:
            self._reading = None


class _Formats:
    """All formats but channels."""

    def __init__(
        self,
        dialect: Dialect,
        marks: Marks,
        cursor: Cursor,
        parts: PartsMade,
        prompt: str,
        tools: Mapping[str, Any] | None,
    ) -> None:
        self._cursor = cursor
        self._parts = parts
        self._in_thought = dialect.starts_in_thought(prompt)
        thought = dialect.thought
        self._thought = (marks.written(thought.opens), marks.written(thought.closes)) if thought else ("", "")
        self._form = written_in(dialect.call, marks) if dialect.call and tools is not None else None
        self._calls = CallReader(self._form, cursor, parts, tools or {}) if self._form else None
        self._owed = False
        parts.holds_space = bool(thought or self._form)

    def read(self) -> Reading[None]:
        if self._in_thought:
            yield from self._read_thought()
        while True:
            if self._form is not None and not self._form.opens and not self._parts.said:
                yield from self._bare_call()
            mark = yield from self._cursor.until(self._text_marks(), self._parts.text, self._due)
            if not mark:
                break
            if mark == self._thought[0]:
                if self._parts.said and mark[0] not in STAND_INS:
                    self._parts.text(mark)
                else:
                    yield from self._read_thought()
            else:
                yield from self._at_mark(mark)
            if not self._parts.may_begin:
                break
        self._parts.end()

    def _text_marks(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self._thought[0], *self._call_marks()) if mark)

    def _call_marks(self) -> tuple[str, ...]:
        form = self._form
        if form is None:
            return ()
        return (form.opens, form.section[0], *self._closing())

    def _closing(self) -> tuple[str, ...]:
        """Marks that close calls that were read."""
        return (self._form.closes, self._form.section[1]) if self._form is not None and self._owed else ()

    def _due(self) -> tuple[str, ...]:
        """Those of them that nothing but space stands before."""
        return () if self._parts.said else self._closing()

    def _read_thought(self) -> Reading[None]:
        self._parts.turn_to(PartKind.THOUGHT)
        while True:
            marks = tuple(mark for mark in (self._thought[1], *self._call_marks()) if mark)
            mark = yield from self._cursor.until(marks, self._parts.text, lambda: (self._thought[1], *self._due()))
            if not mark:
                return  # cut off: it ends inside the thought
            if mark == self._thought[1]:
                self._parts.turn_to(PartKind.TEXT)
                return
            yield from self._at_mark(mark)
            if not self._parts.may_begin:
                return

    def _at_mark(self, mark: str) -> Reading[None]:
        """At a mark of calls: its section's, its own, or one that closes a call that was read."""
        form = self._form
        assert form is not None, "without calls no such mark is looked for"
        if mark == form.opens:
            yield from self._call(mark)
        elif mark == form.section[0]:
            yield from self._section(mark)
        else:
            self._parts.mark_passed()

    def _section(self, mark: str) -> Reading[None]:
        """What opens a section is a mark only where a call follows."""
        form = self._form
        assert form is not None
        read: list[str] = [mark]
        char = yield from self._cursor.past_space(read.append)
        at = 0
        while char and char == form.opens[at]:
            at += 1
            if at == len(form.opens):
                yield from self._call("".join(read) + form.opens)
                return
            char = yield from self._cursor.next()
        self._cursor.back(char)
        self._parts.text("".join(read) + form.opens[:at])

    def _call(self, opened: str) -> Reading[None]:
        assert self._calls is not None
        before = self._parts.calls
        text = yield from self._calls.read()
        if self._parts.calls > before:
            self._owed = True
            self._parts.mark_passed()
            self._parts.text(text)
        else:
            self._parts.text(opened + text)

    def _bare_call(self) -> Reading[None]:
        """Calls that stand there without a mark: the answer begins with an object, or goes on with one."""
        while True:
            space: list[str] = []
            char = yield from self._cursor.past_space(space.append)
            while char and char in STAND_INS + (";" if self._parts.calls else ""):
                char = yield from self._cursor.past_space(space.append)
            self._cursor.back(char)
            if char != "{" or not self._parts.may_begin:
                self._parts.text("".join(space))
                return
            before = self._parts.calls
            yield from self._call("".join(space))
            if self._parts.calls == before:
                return
