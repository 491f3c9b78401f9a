"""Values that are not written as JSON, written as JSON: bare keys, other quotes, Python's words and brackets.

    {days:2,place:<|"|>Köln<|"|>}    →    {"days": 2, "place": "Köln"}
    (place='Köln', deep=[1, None])   →    {"place": "Köln", "deep": [1, null]}

The JSON comes out as the value comes in. What is cut off stays cut off.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from homeserve.text.cursor import Cursor, Reading, Say
from homeserve.text.marks import STAND_INS

PYTHON_CHARS_MAX = 1 << 16
"""Longer texts are not tried as Python literals."""
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_CLOSERS = {"{": "}", "(": "}", "[": "]"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_IN_QUOTES = re.compile(f"[^\"'\\\\{STAND_INS}]+")
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def in_string(text: str) -> str:
    """Text as it stands between the quotes of a JSON string."""
    escaped = json.dumps(text, ensure_ascii=False)[1:-1]
    return "".join(f"\\u{ord(c):04x}" if 0xD800 <= ord(c) <= 0xDFFF else c for c in escaped)


def as_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, RecursionError."""
    return json.loads(text, parse_constant=_no_number)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def word(text: str) -> str:
    """A bare word as JSON: one of Python's or JSON's, a number, else a string."""
    text = text.strip()
    if text in _WORDS:
        return _WORDS[text]
    try:
        if isinstance(as_json(text), int | float):
            return text
    except (ValueError, RecursionError):
        pass
    return f'"{in_string(text)}"'


def python_literal(text: str) -> str | None:
    """A Python literal as JSON; None for what is none, or has no JSON."""
    if len(text) > PYTHON_CHARS_MAX:
        return None
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


class LooseValues:
    """Reads them from `cursor`. `quote` stands around texts, beside Python's two quotes."""

    def __init__(self, cursor: Cursor, quote: str = "") -> None:
        self._cursor = cursor
        self._quote = quote

    def container(self, opened: str, say: Say) -> Reading[bool]:
        """From behind `opened`, one of ( [ {, to its end. A parenthesis holds `key=value` and is written as an object.
        False where the text ended, or a mark came, before the value did."""
        closers = [_CLOSERS[opened]]
        wants_key, comma = opened != "[", False
        say("[" if opened == "[" else "{")
        while True:
            char = yield from self._cursor.past_space()
            if not char or (char in STAND_INS and char != self._quote):
                self._cursor.back(char)
                return False
            if char in "}])":
                say(closers.pop())
                if not closers:
                    return True
                wants_key, comma = False, False
                continue
            if char == ",":
                wants_key, comma = closers[-1] == "}", True
                continue
            if char in ":=":
                continue
            if comma:
                say(", ")
                comma = False
            if char in "{[(" and not wants_key:
                # Within a value, a parenthesis is a tuple.
                inner = "[" if char == "(" else char
                closers.append(_CLOSERS[inner])
                wants_key = inner == "{"
                say(inner)
                continue
            if not (yield from self._scalar(char, say, key=wants_key)):
                return False
            if wants_key:
                say(": ")
                wants_key = False

    def _scalar(self, char: str, say: Say, *, key: bool) -> Reading[bool]:
        if self._quote and char == self._quote[0]:
            opened = char
            while opened != self._quote and self._quote.startswith(opened):
                char = yield from self._cursor.next()
                opened += char
                if not char:
                    break
            if opened == self._quote:
                return (yield from self._quoted(say))
            self._cursor.back(opened[1:])
            char = opened[0]
        if char in "\"'":
            return (yield from self._string(char, say))
        return (yield from self._bare(char, say, key=key))

    def _quoted(self, say: Say) -> Reading[bool]:
        """Up to the next `quote`; nothing is escaped in it."""
        say('"')
        found = yield from self._cursor.until((self._quote,), lambda text: say(in_string(text)), lambda: (self._quote,))
        if found:
            say('"')
        return bool(found)

    def _string(self, quote: str, say: Say) -> Reading[bool]:
        say('"')
        while True:
            if plain := self._cursor.run(_IN_QUOTES):
                say(in_string(plain))
            if not (char := (yield from self._cursor.next())):
                return False
            if char == quote:
                say('"')
                return True
            if char in STAND_INS:
                break
            if char == "\\":
                char = yield from self._escaped()
            if char:
                say(in_string(char))
        self._cursor.back(char)
        return False

    def _escaped(self) -> Reading[str]:
        """What an escape stands for; itself where it stands for nothing."""
        char = yield from self._cursor.next()
        if char in _HEX_DIGITS and char:
            digits = ""
            while len(digits) < _HEX_DIGITS[char]:
                digit = yield from self._cursor.next()
                if not digit or digit not in "0123456789abcdefABCDEF":
                    self._cursor.back(digit)
                    return f"\\{char}{digits}"
                digits += digit
            code = int(digits, 16)
            return chr(code) if code <= 0x10FFFF else f"\\{char}{digits}"
        if not char:
            return "\\"
        return _ESCAPES.get(char, char if char in "\\'\"/" else f"\\{char}")

    def _bare(self, char: str, say: Say, *, key: bool) -> Reading[bool]:
        text = ""
        ends = ":=,}])" if key else ",}])"
        while char and char not in ends and char not in STAND_INS:
            text += char
            char = yield from self._cursor.next()
        self._cursor.back(char)
        if not char:
            say(text)
            return False
        say(f'"{in_string(text.strip())}"' if key else word(text))
        return True
