"""The models of one process: which are in, and who holds them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from budget.facts import Box
from homeserve.errors import HomeserveError, Loading, UnknownModel
from homeserve.memory import MemoryWatch
from homeserve.resident import LoadWatcher, Resident
from homeserve.server.context import Loaded, LoadProgress
from homeserve.settings import Settings


class ModelHost:
    """Implements `server.context.Models`."""

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        watcher: LoadWatcher,
        memory: MemoryWatch,
        read_box: Callable[[], Box],
    ) -> None:
        self.first = Resident(settings, environ, watcher, memory, read_box)

    @property
    def progress(self) -> LoadProgress:
        """Of the first load."""
        return self.first.progress

    @property
    def loaded(self) -> Sequence[Loaded]:
        return [self.first.loaded] if self.first.loaded is not None else []

    @asynccontextmanager
    async def lease(self, asked: str | None) -> AsyncIterator[Loaded]:
        loaded = self.first.loaded
        if loaded is None:
            raise Loading()
        if asked and asked != loaded.model.id:
            raise UnknownModel(asked, (loaded.model.id,))
        yield loaded

    @property
    def recovering(self) -> bool:
        """Whether the ranks of the model used last are started again."""
        return bool(self.loaded) and self.loaded[0].engine.state == "recovering"

    async def load_first(self, box: Box) -> Loaded:
        return await self.first.load(box)

    async def wait_failed(self) -> HomeserveError:
        """Returns the reason when the engine gave up; waits for ever otherwise."""
        assert self.first.loaded is not None
        engine = self.first.loaded.engine
        await engine.gave_up.wait()
        assert engine.failure is not None
        return engine.failure

    async def drain(self, timeout_s: float, hurry: asyncio.Event) -> None:
        await self.first.drain(timeout_s, hurry)

    async def stop(self) -> None:
        await self.first.stop()
