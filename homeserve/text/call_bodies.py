"""Calls of tools as they are written, character by character, into name and arguments.

A call begins once its name is certain; until then nothing is given out, and what turns out to be no call is given back
as the text that it is. From then on arguments come out as they come in: JSON as it is written, everything else turned
into JSON on the way. Nothing that a model writes is an error here: what is broken or cut off comes out as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from homeserve.text.argument_types import TEXT, argument, types_of
from homeserve.text.call_objects import Calls, ObjectReader, Tentative
from homeserve.text.cursor import Cursor, Reading, Say
from homeserve.text.dialects import CallBody, CallForm, TagForm
from homeserve.text.loose_values import LooseValues, in_string
from homeserve.text.marks import STAND_INS, Marks, visible

NAME_CHARS_MAX = 256
"""A longer name is none."""
_HEADER_ID = re.compile(r"(?:functions\.)?(?P<name>.+?):\d+\Z")


def written_in(form: CallForm, marks: Marks) -> CallForm:
    """The form with its marks as they stand in the text."""
    tag = form.tag and TagForm(
        marks.written(form.tag.opens),
        marks.written(form.tag.key_closes),
        marks.written(form.tag.value_opens),
        marks.written(form.tag.closes),
        form.tag.padded,
        form.tag.says_type,
    )
    opens, closes, between, id_mark, quote = map(
        marks.written, (form.opens, form.closes, form.between, form.id_mark, form.quote)
    )
    section = (marks.written(form.section[0]), marks.written(form.section[1]))
    return replace(
        form, opens=opens, closes=closes, between=between, id_mark=id_mark, quote=quote, section=section, tag=tag
    )


class CallReader:
    """Reads what stands behind the mark that opens a call. `tools`: the schema of each tool's parameters."""

    def __init__(self, form: CallForm, cursor: Cursor, calls: Calls, tools: Mapping[str, Any]) -> None:
        self._form = form
        self._cursor = cursor
        self._calls = calls
        self._tools = tools
        self._loose = LooseValues(cursor, form.quote)
        self._kept = Tentative(cursor, calls)
        self._objects = ObjectReader(form, cursor, self._kept, calls, tools)

    def read(self) -> Reading[str]:
        """What was read and is no part of a call, which is text. May leave a closing mark unread."""
        self._kept.reset()
        match self._form.body:
            case CallBody.JSON_OBJECT | CallBody.JSON_LIST:
                yield from self._objects.read()
            case CallBody.EXPRESSIONS:
                yield from self._expressions()
            case _:
                yield from self._named()
        return self._kept.text

    # --------------------------------------------------------------------------------------- the name, then arguments

    def _named(self) -> Reading[None]:
        form = self._form
        header = yield from self._header()
        if header is None:
            return
        head, _, id = header.partition(form.id_mark) if form.id_mark else (header, "", "")
        name = visible(head).strip()
        if form.header_id:
            id = name
            found = _HEADER_ID.match(name)
            name = found["name"] if found else name.removeprefix("functions.")
        if not name:
            return
        self._kept.begin(name, visible(id).strip())
        match form.body:
            case CallBody.NAME_THEN_TAGS:
                yield from self._tags(types_for=self._tools.get(name))
            case CallBody.NAME_THEN_BRACES:
                if (yield from self._loose.container("{", self._calls.arguments)):
                    self._calls.ended()
            case _:
                if (yield from self._json_arguments()):
                    self._calls.ended()

    def _header(self) -> Reading[str | None]:
        """What stands before the arguments. None where it cannot be a name, or a list of objects was read instead."""
        form = self._form
        ends = self._header_ends()
        header = ""
        while char := (yield from self._kept.next()):
            if not header and char.isspace():
                continue
            if form.body is CallBody.NAME_THEN_JSON and char in "[{" and not form.between.startswith(char):
                self._kept.back(char)
                if header:
                    return header
                yield from self._objects.read()
                return None
            header += char
            end = next((mark for mark in ends if header.endswith(mark)), None)
            if end is not None:
                if end != form.between and form.body is CallBody.NAME_THEN_TAGS:
                    self._kept.back(end)
                return header.removesuffix(end)
            if len(header) > NAME_CHARS_MAX or not self._may_be_header(header, ends):
                self._kept.back(char)
                return None
        return None

    def _may_be_header(self, header: str, ends: Sequence[str]) -> bool:
        """Names have no line ends and no marks, but for the beginning of what ends the name."""
        form = self._form
        if header[-1] in STAND_INS and header[-1] not in form.id_mark + "".join(ends):
            return False
        line_end = header.find("\n")
        return line_end < 0 or any(end.startswith(header[line_end:]) for end in ends)

    def _header_ends(self) -> tuple[str, ...]:
        """What ends the name. Where the format has no mark for that, the first argument does, or the call's end."""
        form = self._form
        if form.body is CallBody.NAME_THEN_BRACES:
            return ("{",)
        if form.between:
            return (form.between,)
        assert form.tag is not None, "a name without a mark behind it has tags behind it"
        return (form.tag.opens, form.closes, "\n")

    def _json_arguments(self) -> Reading[bool]:
        char = yield from self._cursor.past_space()
        self._cursor.back(char)
        if char and (char in STAND_INS or self._form.closes.lstrip().startswith(char)):
            self._calls.arguments("{}")
            return True
        return (yield from self._objects.value(self._calls.arguments)) if char else False

    def _tags(self, types_for: Any) -> Reading[None]:
        """Tags of arguments up to the call's end. What stands between them is text of the answer, behind the call: the
        parts of one call are not parted."""
        between: list[str] = []
        self._calls.arguments("{")
        if (yield from self._arguments_in_tags(types_for, between.append)):
            self._calls.arguments("}")
            self._calls.ended()
        self._calls.text("".join(between))

    def _arguments_in_tags(self, types_for: Any, say: Say) -> Reading[bool]:
        """Whether the call came to its end. `say` hears what stands between tags."""
        form, tag = self._form, self._form.tag
        assert tag is not None, "a form of tags has one"
        ends = tuple(mark for mark in (tag.opens, form.closes, form.section[1]) if mark)
        first = True
        while True:
            found = yield from self._cursor.until(ends, say, lambda: ends)
            if not found:
                return False
            if found != tag.opens:
                if found != form.closes:
                    self._cursor.back(found)
                return True
            key: list[str] = []
            if not (yield from self._cursor.until((tag.key_closes,), key.append)):
                self._calls.arguments("".join(key))
                return False
            skipped: list[str] = []
            if tag.value_opens and not (yield from self._cursor.until((tag.value_opens,), skipped.append)):
                return False
            name = visible("".join(key)).strip()
            self._calls.arguments(f'{"" if first else ", "}"{in_string(name)}": ')
            first = False
            types = _said_types("".join(skipped)) or types_of(types_for, name)
            if not (yield from self._tag_value(tag, types)):
                return False

    def _tag_value(self, tag: TagForm, types: frozenset[str]) -> Reading[bool]:
        char = (yield from self._cursor.next()) if tag.padded else "\n"
        if char != "\n":
            self._cursor.back(char)
        ends = (tag.closes, "\n" + tag.closes) if tag.padded else (tag.closes,)
        if types == TEXT:
            self._calls.arguments('"')
            found = yield from self._cursor.until(
                ends, lambda text: self._calls.arguments(in_string(visible(text))), lambda: ends
            )
            if found:
                self._calls.arguments('"')
        else:
            value: list[str] = []
            found = yield from self._cursor.until(ends, value.append, lambda: ends)
            text = visible("".join(value))
            self._calls.arguments(argument(text, types) if found else text)
        return bool(found)

    # ---------------------------------------------------------------------------------------------------- expressions

    def _expressions(self) -> Reading[None]:
        char = yield from self._kept.past_space()
        if char == "[":
            char = yield from self._kept.past_space()
        if char in ("{", '"'):
            self._kept.back(char)
            yield from self._objects.read()
            return
        while char and char not in STAND_INS and char != "]" and self._calls.may_begin:
            name = char
            while (
                (char := (yield from self._kept.next()))
                and (char.isalnum() or char in "_-.:/")
                and len(name) < NAME_CHARS_MAX
            ):
                name += char
            if char != "(":
                self._kept.back(char)
                return
            self._kept.begin(name)
            if not (yield from self._loose.container("(", self._calls.arguments)):
                return
            self._calls.ended()
            char = yield from self._cursor.past_space()
            if char == ",":
                char = yield from self._cursor.past_space()
            self._kept.reset(char)
        if char == "]":
            self._kept.reset()
            return
        self._kept.back(char)


def _said_types(skipped: str) -> frozenset[str]:
    """By a tag's own word; empty where it has none."""
    if 'string="true"' in skipped:
        return TEXT
    return frozenset({"json"}) if 'string="false"' in skipped else frozenset()
