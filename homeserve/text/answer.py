"""What an answer consists of: text, thought, and calls of tools, in the order in which they come.

    TextStream ──text──▶ AnswerReader ──parts──▶ the client's own form of them

The reader knows the model's formats (`homeserve.text.dialects`). It holds back what may be the beginning of a mark, and
gives out everything else at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Protocol

import msgspec
from msgspec.structs import replace


class PartKind(Enum):
    TEXT = "text"
    THOUGHT = "thought"
    CALL = "call"


class Part(msgspec.Struct, frozen=True):
    """What an answer gained: some text, some of a thought, or some of a call's arguments (JSON, as text).

    `call` numbers the calls of an answer from 0, -1 for what is none. The first part of a call has `name` and `id`, and
    may have no `text` yet.
    """

    kind: PartKind
    text: str = ""
    call: int = -1
    name: str = ""
    id: str = ""


class AnswerReader(Protocol):
    """Splits the text of one answer."""

    @property
    def called(self) -> bool:
        """Whether a call has begun."""
        ...

    @property
    def calling(self) -> bool:
        """Whether the text ends inside a call."""
        ...

    @property
    def thinking(self) -> bool:
        """Whether the text ends inside a thought."""
        ...

    @property
    def done(self) -> bool:
        """Whether the answer has all that it may have, whatever the model goes on to write."""
        ...

    @property
    def shown(self) -> Mapping[int, str]:
        """Control tokens that the reader has to see, and the character that stands for each (`homeserve.text.marks`).
        All others are no part of the text."""
        ...

    def push(self, text: str) -> list[Part]:
        """The parts that became certain with `text`."""
        ...

    def finish(self) -> list[Part]:
        """The rest, at the end of the answer; a call that was cut off ends where it was cut."""
        ...


class PlainReader:
    """Everything is text."""

    called = False
    calling = False
    thinking = False
    done = False
    shown: Mapping[int, str] = {}

    def push(self, text: str) -> list[Part]:
        return [Part(PartKind.TEXT, text)] if text else []

    def finish(self) -> list[Part]:
        return []


def merged(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Neighbours of one kind (and of one call) as one part."""
    parts = tuple(parts)
    if len(parts) < 2:
        return parts
    made: list[tuple[Part, list[str]]] = []
    for part in parts:
        if made and made[-1][0].kind is part.kind and made[-1][0].call == part.call:
            made[-1][1].append(part.text)
        else:
            made.append((part, [part.text]))
    return tuple(first if len(texts) == 1 else replace(first, text="".join(texts)) for first, texts in made)
