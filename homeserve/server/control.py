"""Names of control tokens in what a message says, a tool's description or an argument of the template (documents to
answer from): they are text there, and must not open or close a turn. Descriptions and documents count as much as
messages: agents pass on those of tool servers that strangers run, and pages that strangers wrote.

A template weaves all of it into one prompt, in which nobody can tell any more whether `<|im_end|>` was written by the
template or by a user. So before rendering, each such name in any of them is broken by a mark, a character that stands
in no text (a Unicode noncharacter that these do not have). Templates trim and join texts, but they carry the
mark along. What is whole in the rendered prompt is the template's own. The prompt is cut there, where the tokenizer
would cut it too; the pieces in between that have a mark lose it and are encoded with control tokens not obeyed.

Conversations without such names are not touched, and are encoded in one go as ever.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from homeserve.errors import InvalidField

INLINE_CHARS = 4096
_MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
_REASONING = frozenset({"<think>", "</think>"})
"""Templates cut the reasoning out of an assistant's earlier messages by these, so they stay whole in them."""


@dataclass(frozen=True)
class Marked:
    """What the template is given; `mark` None: nothing had to be broken."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    arguments: dict[str, Any]
    mark: str | None


class ControlTexts:
    """The names of a model's control tokens, and where they stand in texts."""

    def __init__(self, texts: Iterable[str]) -> None:
        # A name of one character cannot be broken; a vocabulary that has one means the character.
        self._texts = frozenset(text for text in texts if len(text) > 1)
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        starts = sorted({text[:2] for text in self._texts})
        # A look-ahead, because names may overlap.
        self._start = re.compile("(?=" + "|".join(map(re.escape, starts)) + ")") if starts else None

    async def mark(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> Marked:
        """All with each name in their texts broken; off the loop where they may be long. Raises InvalidField."""
        if (
            not tools
            and not any(isinstance(value, dict | list) for value in (arguments or {}).values())
            and sum(len(message["content"]) for message in messages) <= INLINE_CHARS
            and not any("tool_calls" in message or "reasoning_content" in message for message in messages)
        ):
            return self.marked(messages, None, arguments)
        return await asyncio.to_thread(self.marked, messages, tools, arguments)

    def marked(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> Marked:
        tools, given = tools or [], dict(arguments or {})
        try:
            texts = list(_texts_of([messages, tools, list(given.values())]))
            if not any(True for text in texts for _ in self._found(text)):
                return Marked(messages, tools, given, None)
            mark = next((mark for mark in _MARKS if not any(mark in text for text in texts)), None)
            if mark is None:
                raise InvalidField("messages", "have every noncharacter of Unicode and names of control tokens")
            broken = [self._broken_message(message, mark) for message in messages]
            none = frozenset[str]()
            given = {name: self._broken(value, mark, none) for name, value in given.items()}
            return Marked(broken, self._broken(tools, mark, none), given, mark)
        except RecursionError:
            raise InvalidField("messages", "are nested too deeply") from None

    def pieces(self, text: str, mark: str) -> list[tuple[str, bool]]:
        """A rendered prompt as (text, whether control tokens in it are obeyed), without marks, to be encoded in turn.
        Cut only next to a control token of the template, and only around what has a mark."""
        pieces: list[tuple[str, bool]] = []
        done = begin = 0  # what is handed out; where the last name ended
        for at, end in [*self._whole(text), (len(text), len(text))]:
            if text.find(mark, begin, at) >= 0:
                pieces += [(text[done:begin], True), (text[begin:at].replace(mark, ""), False)]
                done = at
            begin = end
        pieces.append((text[done:], True))
        return [piece for piece in pieces if piece[0]]

    def _broken_message(self, message: dict[str, Any], mark: str) -> dict[str, Any]:
        kept = _REASONING if message["role"] == "assistant" else frozenset[str]()
        return {name: value if name == "role" else self._broken(value, mark, kept) for name, value in message.items()}

    def _broken(self, value: Any, mark: str, kept: frozenset[str]) -> Any:
        if isinstance(value, str):
            parts, done = [], 0
            for at, end in self._found(value):
                if value[at:end] not in kept:
                    parts.append(value[done : at + 1])
                    done = at + 1
            return mark.join([*parts, value[done:]])
        if isinstance(value, dict):
            return {self._broken(key, mark, kept): self._broken(item, mark, kept) for key, item in value.items()}
        if isinstance(value, list):
            return [self._broken(item, mark, kept) for item in value]
        return value

    def _found(self, text: str) -> Iterator[tuple[int, int]]:
        """[start, end) of the longest name at every place where one begins; they may overlap."""
        if self._start is None:
            return
        for match in self._start.finditer(text):
            at = match.start()
            length = next((n for n in self._lengths if text[at : at + n] in self._texts), 0)
            if length:
                yield at, at + length

    def _whole(self, text: str) -> Iterator[tuple[int, int]]:
        """Names as the tokenizer takes them: from the left, the longest, none inside another."""
        free = 0
        for at, end in self._found(text):
            if at >= free:
                free = end
                yield at, end


def _texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts_of(key)
            yield from _texts_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts_of(item)
