"""Calls that are JSON objects: name and arguments among the keys, in any order.

Arguments come out as they are written once the name is known. Where the name comes last they wait for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from homeserve.text.cursor import Cursor, Reading, Say
from homeserve.text.dialects import CallForm
from homeserve.text.marks import STAND_INS

_KEYS = frozenset({"name", "arguments", "parameters", "id", "type", "function"})
"""How a call may begin that stands there without any mark."""
_IN_QUOTES = re.compile(f'[^"\\\\{STAND_INS}]+')
_BETWEEN = re.compile(rf'[^"{{}}\[\]<{STAND_INS}]+')
"""What means nothing within a JSON string, and within an object or a list."""


class Calls(Protocol):
    """Where calls go. `may_begin`: whether the answer may have one more."""

    @property
    def may_begin(self) -> bool: ...
    def begin(self, name: str, id: str = "") -> None: ...
    def arguments(self, text: str) -> None: ...
    def ended(self) -> None: ...
    def text(self, text: str) -> None: ...


class Tentative:
    """The text of what may be a call, kept until it is one."""

    def __init__(self, cursor: Cursor, calls: Calls) -> None:
        self._cursor = cursor
        self._calls = calls
        self._read: list[str] = []

    def reset(self, text: str = "") -> None:
        self._read = list(text)

    @property
    def text(self) -> str:
        return "".join(self._read)

    def keep(self, text: str) -> None:
        self._read.append(text)

    def next(self) -> Reading[str]:
        char = yield from self._cursor.next()
        self._read.append(char)
        return char

    def past_space(self) -> Reading[str]:
        char = yield from self._cursor.past_space(self.keep)
        self._read.append(char)
        return char

    def back(self, text: str) -> None:
        """Give back the last characters that were read, "" for the end."""
        del self._read[len(self._read) - max(1, len(text)) :]
        self._cursor.back(text)

    def begin(self, name: str, id: str = "") -> None:
        """It is a call."""
        self._calls.begin(name.encode("utf-8", "replace").decode(), id)
        self._read = []


class ObjectReader:
    """Reads objects one behind the other. `tools` has the names that calls without marks are known by."""

    def __init__(self, form: CallForm, cursor: Cursor, kept: Tentative, calls: Calls, tools: Mapping[str, Any]) -> None:
        self._form = form
        self._cursor = cursor
        self._kept = kept
        self._calls = calls
        self._tools = tools

    def read(self) -> Reading[None]:
        """Objects one behind the other, with or without a list around them."""
        char = yield from self._kept.past_space()
        if char == "[":
            char = yield from self._kept.past_space()
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
            self._kept.reset("{")
        self._kept.back(char)

    def _object(self) -> Reading[bool]:
        """One call from behind its brace. False where it is none, or broken."""
        found = _Found()
        whole = yield from self._pairs(found, nested=False)
        if found.name is None or not self._is_known(found.name):
            return False
        if not found.begun:
            self._kept.begin(found.name)
            if found.held:
                self._calls.arguments(found.held)
        if whole and not found.told and not found.held:
            self._calls.arguments("{}")
        if whole:
            self._kept.reset()
            self._calls.ended()
        return whole

    def _is_known(self, name: str) -> bool:
        """Any name is a call's within marks; without, an answer may be JSON that is none."""
        return bool(self._form.opens) or name in self._tools

    def _pairs(self, found: _Found, *, nested: bool) -> Reading[bool]:
        """Keys and values of an object; a nested one is what OpenAI's own form has under `function`."""
        while True:
            char = yield from self._kept.past_space()
            if char == ",":
                continue
            if char == "}":
                return True
            if char != '"':
                self._kept.back(char)
                return False
            key = yield from self._json_string()
            colon = yield from self._kept.past_space()
            if key is None or colon != ":":
                self._kept.back(colon)
                return False
            if not self._form.opens and found.name is None and key not in _KEYS:
                return False
            char = yield from self._kept.past_space()
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
                self._kept.begin(found.name)
                found.begun = True
                self._calls.arguments(found.held)
            return True
        if key in (form.arguments_key, "arguments", "parameters") and not found.told and not found.held:
            return (yield from self._argument_value(found, char))
        if key == "function" and char == "{" and not nested:
            return (yield from self._pairs(found, nested=True))
        self._kept.back(char)
        return (yield from self.value(self._kept.keep))

    def _argument_value(self, found: _Found, char: str) -> Reading[bool]:
        """Streamed where the name is known and the value is an object; else held until it is whole."""
        self._kept.back(char)
        if found.name is not None and not found.begun and self._is_known(found.name):
            self._kept.begin(found.name)
            found.begun = True
        if found.begun and char in ("{", "["):
            found.told = True
            return (yield from self.value(self._calls.arguments))
        value: list[str] = []

        def hold(text: str) -> None:
            value.append(text)
            if not found.begun:
                self._kept.keep(text)

        whole = yield from self.value(hold)
        found.held = _object_text("".join(value)) if whole else "".join(value)
        if found.begun:
            self._calls.arguments(found.held)
            found.told = True
        return whole

    def _json_string(self) -> Reading[str | None]:
        """From behind its quote; None where it does not end."""
        text = ""
        while char := (yield from self._kept.next()):
            if char == '"':
                return _decoded(text)
            if char in STAND_INS:
                break
            text += char
            if char == "\\":
                text += yield from self._kept.next()
        self._kept.back(char)
        return None

    def value(self, say: Say) -> Reading[bool]:
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


class _Found:
    """What is known of a call that is an object: `held` arguments came before the name, `told` ones were given out."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.held = ""
        self.begun = False
        self.told = False


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
