"""Calls of tools as they are written, character by character, into name and arguments.

A call begins once its name is certain; until then nothing is given out, and what turns out to be no call is given back
as the text that it is. From then on arguments come out as they come in: JSON as it is written, everything else turned
into JSON on the way. Nothing that a model writes is an error here: what is broken or cut off comes out as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from homeserve.text.argument_types import TEXT, argument, types_of
from homeserve.text.cursor import Cursor, Reading, Say
from homeserve.text.dialects import CallBody, CallForm, TagForm
from homeserve.text.loose_values import LooseValues, in_string
from homeserve.text.marks import STAND_INS, Marks, visible

NAME_CHARS_MAX = 256
"""A longer name is none."""
_KEYS = frozenset({"name", "arguments", "parameters", "id", "type", "function"})
"""How a call may begin that stands there without any mark."""
_IN_QUOTES = re.compile(f'[^"\\\\{STAND_INS}]+')
_BETWEEN = re.compile(rf'[^"{{}}\[\]<{STAND_INS}]+')
"""What means nothing within a JSON string, and within an object or a list."""
_HEADER_ID = re.compile(r"(?:functions\.)?(?P<name>.+?):\d+\Z")


class Calls(Protocol):
    """Where calls go. `may_begin`: whether the answer may have one more."""

    @property
    def may_begin(self) -> bool: ...
    def begin(self, name: str, id: str = "") -> None: ...
    def arguments(self, text: str) -> None: ...
    def ended(self) -> None: ...
    def text(self, text: str) -> None: ...


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
        self._raw: list[str] = []  # of a call that has not begun

    def read(self) -> Reading[str]:
        """ "" where at least one call has begun; else what was read, which is text. May leave a closing mark unread."""
        self._raw = []
        match self._form.body:
            case CallBody.JSON_OBJECT | CallBody.JSON_LIST:
                yield from self._objects()
            case CallBody.EXPRESSIONS:
                yield from self._expressions()
            case _:
                yield from self._named()
        return "".join(self._raw)

    # ------------------------------------------------------------------------------------------ helpers of all bodies

    def _keep(self, text: str) -> None:
        self._raw.append(text)

    def _next(self) -> Reading[str]:
        char = yield from self._cursor.next()
        self._raw.append(char)
        return char

    def _past_space(self) -> Reading[str]:
        char = yield from self._cursor.past_space(self._keep)
        self._raw.append(char)
        return char

    def _give_back(self, char: str) -> None:
        """The last character that was read, "" for the end."""
        if self._raw:
            self._raw.pop()
        self._cursor.back(char)

    def _begin(self, name: str, id: str = "") -> None:
        self._calls.begin(name.encode("utf-8", "replace").decode(), id)
        self._raw = []

    # --------------------------------------------------------------------------------------------------- JSON objects

    def _objects(self) -> Reading[None]:
        """Objects one behind the other, with or without a list around them."""
        char = yield from self._past_space()
        if char == "[":
            char = yield from self._past_space()
        while char == "{" and self._calls.may_begin:
            if not (yield from self._object()):
                return
            space: list[str] = []
            char = yield from self._cursor.past_space(space.append)
            if char in ",;" and char:
                char = yield from self._cursor.past_space()
            if char == "]":
                return
            if char != "{":
                self._cursor.back(char)
                if space:
                    self._cursor.back("".join(space))
                return
            self._raw = ["{"]
        self._give_back(char)

    def _object(self) -> Reading[bool]:
        """One call from behind its brace. False where it is none, or broken."""
        found = _Found()
        whole = yield from self._pairs(found, nested=False)
        if found.name is None or not self._is_known(found.name):
            return False
        if not found.begun:
            self._begin(found.name)
            if found.held:
                self._calls.arguments(found.held)
        if whole and not found.told and not found.held:
            self._calls.arguments("{}")
        if whole:
            self._raw = []
            self._calls.ended()
        return whole

    def _is_known(self, name: str) -> bool:
        """Any name is a call's within marks; without, an answer may be JSON that is none."""
        return bool(self._form.opens) or name in self._tools

    def _pairs(self, found: _Found, *, nested: bool) -> Reading[bool]:
        """Keys and values of an object; a nested one is what OpenAI's own form has under `function`."""
        while True:
            char = yield from self._past_space()
            if char == ",":
                continue
            if char == "}":
                return True
            if char != '"':
                self._give_back(char)
                return False
            key = yield from self._json_string()
            colon = yield from self._past_space()
            if key is None or colon != ":":
                self._give_back(colon)
                return False
            if not self._form.opens and found.name is None and key not in _KEYS:
                return False
            char = yield from self._past_space()
            if not (yield from self._pair(found, key, char, nested=nested)):
                return False

    def _pair(self, found: _Found, key: str, char: str, *, nested: bool) -> Reading[bool]:
        form = self._form
        if not form.name_key and found.name is None:
            found.name = key
            return (yield from self._argument_value(found, char))
        if key == form.name_key and char == '"' and found.name is None:
            found.name = yield from self._json_string()
            if found.name is None:
                return False
            if found.held and self._is_known(found.name):
                self._begin(found.name)
                found.begun = True
                self._calls.arguments(found.held)
            return True
        if key in (form.arguments_key, "arguments", "parameters") and not found.told and not found.held:
            return (yield from self._argument_value(found, char))
        if key == "function" and char == "{" and not nested:
            return (yield from self._pairs(found, nested=True))
        self._give_back(char)
        return (yield from self._json_value(self._keep))

    def _argument_value(self, found: _Found, char: str) -> Reading[bool]:
        """Streamed where the name is known and the value is an object; else held until it is whole."""
        self._give_back(char)
        if found.name is not None and not found.begun and self._is_known(found.name):
            self._begin(found.name)
            found.begun = True
        if found.begun and char in ("{", "["):
            found.told = True
            return (yield from self._json_value(self._calls.arguments))
        value: list[str] = []

        def hold(text: str) -> None:
            value.append(text)
            if not found.begun:
                self._keep(text)

        whole = yield from self._json_value(hold)
        found.held = _object_text("".join(value)) if whole else "".join(value)
        if found.begun:
            self._calls.arguments(found.held)
            found.told = True
        return whole

    def _json_string(self) -> Reading[str | None]:
        """From behind its quote; None where it does not end."""
        text = ""
        while char := (yield from self._next()):
            if char == '"':
                return _decoded(text)
            if char in STAND_INS:
                break
            text += char
            if char == "\\":
                text += yield from self._next()
        self._give_back(char)
        return None

    def _json_value(self, say: Say) -> Reading[bool]:
        """One value as it is written, up to where it ends: only strings and nesting are looked at. False where the text
        ended, or a mark came, before the value did."""
        depth, quoted, written = 0, False, False
        while True:
            plain = self._cursor.run(_IN_QUOTES) if quoted else self._cursor.run(_BETWEEN) if depth else ""
            if plain:
                say(plain)
            char = yield from self._cursor.next()
            if not char or char in STAND_INS or (char == "<" and not quoted):
                break
            if quoted:
                say(char)
                if char == "\\":
                    char = yield from self._cursor.next()
                    if not char or char in STAND_INS:
                        break
                    say(char)
                elif char == '"':
                    quoted = False
                    if depth == 0:
                        return True
                continue
            if depth == 0 and (char in ",]}" or (written and char.isspace())):
                self._cursor.back(char)
                return written
            if depth == 0 and char.isspace():
                continue
            say(char)
            written = True
            quoted = char == '"'
            depth += (char in "{[") - (char in "}]")
            if depth == 0 and char in "}]":
                return True
        self._cursor.back(char)
        return False

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
        self._begin(name, visible(id).strip())
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
        while char := (yield from self._next()):
            if not header and char.isspace():
                continue
            if form.body is CallBody.NAME_THEN_JSON and char in "[{" and not form.between.startswith(char):
                self._give_back(char)
                if header:
                    return header
                yield from self._objects()
                return None
            header += char
            end = next((mark for mark in ends if header.endswith(mark)), None)
            if end is not None:
                if end != form.between and form.body is CallBody.NAME_THEN_TAGS:
                    del self._raw[-len(end) :]
                    self._cursor.back(end)
                return header.removesuffix(end)
            if len(header) > NAME_CHARS_MAX or not self._may_be_header(header, ends):
                self._give_back(char)
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
        return (yield from self._json_value(self._calls.arguments)) if char else False

    def _tags(self, types_for: Any) -> Reading[None]:
        """Tags of arguments up to the call's end; what stands between them is text of the answer."""
        form, tag = self._form, self._form.tag
        assert tag is not None, "a form of tags has one"
        self._calls.arguments("{")
        first = True
        while True:
            ends = tuple(mark for mark in (tag.opens, form.closes, form.section[1]) if mark)
            found = yield from self._cursor.until(ends, self._between_tags)
            if not found:
                return
            if found != tag.opens:
                if found != form.closes:
                    self._cursor.back(found)
                break
            key: list[str] = []
            if not (yield from self._cursor.until((tag.key_closes,), key.append)):
                self._calls.arguments("".join(key))
                return
            skipped: list[str] = []
            if tag.value_opens and not (yield from self._cursor.until((tag.value_opens,), skipped.append)):
                return
            name = visible("".join(key)).strip()
            self._calls.arguments(f'{"" if first else ", "}"{in_string(name)}": ')
            first = False
            types = _said_types("".join(skipped)) or types_of(types_for, name)
            if not (yield from self._tag_value(tag, types)):
                return
        self._calls.arguments("}")
        self._calls.ended()

    def _between_tags(self, text: str) -> None:
        if not text.isspace():
            self._calls.text(text)

    def _tag_value(self, tag: TagForm, types: frozenset[str]) -> Reading[bool]:
        char = (yield from self._cursor.next()) if tag.padded else "\n"
        if char != "\n":
            self._cursor.back(char)
        ends = (tag.closes, "\n" + tag.closes) if tag.padded else (tag.closes,)
        if types == TEXT:
            self._calls.arguments('"')
            found = yield from self._cursor.until(ends, lambda text: self._calls.arguments(in_string(visible(text))))
            if found:
                self._calls.arguments('"')
        else:
            value: list[str] = []
            found = yield from self._cursor.until(ends, value.append)
            text = visible("".join(value))
            self._calls.arguments(argument(text, types) if found else text)
        return bool(found)

    # ---------------------------------------------------------------------------------------------------- expressions

    def _expressions(self) -> Reading[None]:
        char = yield from self._past_space()
        if char == "[":
            char = yield from self._past_space()
        if char in ("{", '"'):
            self._give_back(char)
            yield from self._objects()
            return
        while char and char not in STAND_INS and char != "]" and self._calls.may_begin:
            name = char
            while (
                (char := (yield from self._next())) and (char.isalnum() or char in "_-.") and len(name) < NAME_CHARS_MAX
            ):
                name += char
            if char != "(":
                self._give_back(char)
                return
            self._begin(name)
            if not (yield from self._loose.container("(", self._calls.arguments)):
                return
            self._calls.ended()
            char = yield from self._cursor.past_space()
            if char == ",":
                char = yield from self._cursor.past_space()
            self._raw = [char]
        if char == "]":
            self._raw = []
            return
        self._give_back(char)


class _Found:
    """What is known of a call that is an object: `held` arguments came before the name, `told` ones were given out."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.held = ""
        self.begun = False
        self.told = False


def _said_types(skipped: str) -> frozenset[str]:
    """By a tag's own word; empty where it has none."""
    if 'string="true"' in skipped:
        return TEXT
    return frozenset({"json"}) if 'string="false"' in skipped else frozenset()


def _decoded(text: str) -> str:
    try:
        made = json.loads(f'"{text}"', strict=False)
    except (ValueError, RecursionError):
        return text
    return made if isinstance(made, str) else text


def _object_text(value: str) -> str:
    """Arguments as an object's text: some models write it into a string, or null for none."""
    if value == "null":
        return "{}"
    if value.startswith('"'):
        inner = _decoded(value[1:-1])
        if inner.lstrip().startswith("{"):
            return inner.encode("utf-8", "replace").decode()
    return value
