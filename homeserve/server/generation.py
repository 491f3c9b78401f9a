"""The sequences of one request: submitted together, read together, aborted together.

The rule: however the reader leaves (the last token, an error, a client that hung up, a cancelled handler), every
sequence that is still open is aborted before the `async with` block ends. Nothing of a request outlives its handler.

One sequence is read directly. Several are read by one task each, which holds at most one event: what comes meanwhile
gathers in the engine's stream, where it is bounded, and arrives as one later event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from homeserve.engine.request import FinishReason, GenerateCall, TokenEvent

if TYPE_CHECKING:
    from homeserve.engine.engine import Engine
    from homeserve.engine.stream import TokenStream


class Generation:
    """Open sequences of one request, as an async context manager. Entering submits (and may raise what `submit` raises:
    then none stays open)."""

    def __init__(self, engine: Engine, calls: Sequence[GenerateCall]) -> None:
        self._engine = engine
        self._calls = calls
        self.streams: list[TokenStream] = []
        self._events: dict[int, TokenEvent] = {}
        self._arrived = asyncio.Event()
        self._taken = asyncio.Event()
        self._pumps: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None

    async def __aenter__(self) -> Generation:
        try:
            for call in self._calls:
                self.streams.append(self._engine.submit(call))
        except BaseException:
            self._abort_all()
            raise
        if len(self.streams) > 1:
            self._pumps = [asyncio.create_task(self._pump(i)) for i in range(len(self.streams))]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abort_all()
        for pump in self._pumps:
            pump.cancel()
        if self._pumps:
            await asyncio.gather(*self._pumps, return_exceptions=True)

    async def next_events(self) -> list[tuple[int, TokenEvent]]:
        """What came since the last call, at most one event per sequence; waits for at least one."""
        if not self._pumps:
            return [(0, await anext(self.streams[0]))]
        await self._arrived.wait()
        if self._failure is not None:
            raise self._failure
        self._arrived.clear()
        events, self._events = sorted(self._events.items(), key=_index), {}
        taken, self._taken = self._taken, asyncio.Event()
        taken.set()
        return events

    def only_stream(self) -> TokenStream | None:
        """That of a request that is one sequence: its events may be listened to. None where there are several."""
        return self.streams[0] if len(self.streams) == 1 else None

    def end(self, index: int) -> None:
        """This sequence has said enough (a stop string matched)."""
        self._engine.abort(self.streams[index], FinishReason.STOP)

    def _abort_all(self) -> None:
        for stream in self.streams:
            self._engine.abort(stream)

    async def _pump(self, index: int) -> None:
        try:
            async for event in self.streams[index]:
                self._events[index] = event
                taken = self._taken
                self._arrived.set()
                await taken.wait()
        except BaseException as failure:
            self._failure = failure
            self._arrived.set()
            raise


def _index(item: tuple[int, TokenEvent]) -> int:
    return item[0]
