"""How an answer is written: the seam between what was generated and each API's JSON.

A `Shape` belongs to one answer and keeps what its events need between them. It only builds plain values; `respond`
sends them. The events of a stream are, in order: those of `begin`, those of `piece` for each piece of each choice,
those of `end`; after an error that of `error`, and nothing behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from homeserve.errors import RequestError
from homeserve.server.bodies import encode
from homeserve.server.choice import Piece


class Event(NamedTuple):
    """One server-sent event: its JSON, and its name where the API gives events names."""

    data: dict[str, Any]
    name: str = ""


def frame(event: Event) -> bytes:
    """As it goes over the wire."""
    name = b"event: " + event.name.encode() + b"\n" if event.name else b""
    return name + b"data: " + encode(event.data) + b"\n\n"


def frames_of_text(event: Event, mark: str) -> Callable[[str], bytes]:
    """Writes `event` with another text in the place of `mark`, behind which it has nothing that looks like it."""
    before, found, behind = frame(event).rpartition(encode(mark))
    assert found, "the event has the mark"
    return lambda text: before + encode(text) + behind


class Counts(msgspec.Struct, frozen=True):
    """Tokens of the prompts (each once), of the answers, of the prompts that were cached, and of thoughts."""

    prompt: int
    completion: int
    cached: int
    thought: int = 0


class Told:
    """What an answer tells of its own making: `counts` as of now, `timing` the `homeserve` block. Most events ask for
    neither, and pay for neither."""

    def __init__(self, count: Callable[[], Counts], timing: Callable[[], dict[str, Any]]) -> None:
        self._count = count
        self.timing = timing

    @property
    def counts(self) -> Counts:
        return self._count()


class Shape(Protocol):
    ends_with_done: bool
    """Whether a stream ends with `data: [DONE]`."""

    def body(self, pieces: Sequence[Piece], told: Told) -> dict[str, Any]:
        """The whole answer from one Piece per choice."""
        ...

    def begin(self, told: Told) -> list[Event]:
        """Before the first token."""
        ...

    def piece(self, index: int, piece: Piece, told: Told) -> list[Event]:
        """What a piece of choice `index` makes; none if there is nothing to tell."""
        ...

    def text_frames(self) -> Callable[[str], bytes] | None:
        """Of a stream of one choice that has begun: what writes a piece that is text and nothing else, as `piece` and
        `frame` would, at once. None where a piece tells more, or this shape has no such way."""
        ...

    def end(self, told: Told) -> list[Event]:
        """When every choice has ended."""
        ...

    def error(self, error: RequestError) -> Event:
        """An answer that fails after its stream has begun."""
        ...

    def ping(self) -> Event | None:
        """What keeps a silent stream open; None: a comment line."""
        ...
