"""Models that are in and stay: what handlers need of the host of models, without one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from homeserve.errors import Loading, ModelInUse, UnknownModel
from homeserve.server.context import Loaded, LoadProgress, ModelInfo, ModelTold, ServerContext
from homeserve.settings import Settings
from homeserve.text.dialects import NO_DIALECT

TINY = ModelInfo("tiny", "/models/tiny.gguf", "llama", "Q4_1", 256)


def loaded(**parts: Any) -> Loaded:
    """A loaded model of `parts`; what a test does not name is there and does nothing."""
    nothing: dict[str, Any] = {
        "settings": Settings(),
        "model": TINY,
        "tokenizer": None,
        "templates": None,
        "grammars": None,
        "dialect": NO_DIALECT,
        "fleet": SimpleNamespace(ranks=[]),
        "ranks": None,
        "budget": None,
    }
    return Loaded(**(nothing | parts))


class Standing:
    """Implements `server.context.Models`."""

    def __init__(self, *models: Loaded) -> None:
        self.loaded = list(models)

    @asynccontextmanager
    async def lease(self, asked: str | None) -> AsyncIterator[Loaded]:
        if not self.loaded:
            raise Loading()
        found = next((each for each in self.loaded if asked in (None, each.model.id)), None)
        if found is None:
            raise UnknownModel(asked or "", tuple(each.model.id for each in self.loaded))
        yield found

    def tell(self) -> list[ModelTold]:
        return [ModelTold(each.model.id, "loaded", info=each.model) for each in self.loaded]

    def begin_load(self, asked: str) -> ModelTold:
        return self._told(asked)

    def begin_unload(self, asked: str, *, force: bool) -> ModelTold:
        raise ModelInUse(self._told(asked).id, 1)

    def _told(self, asked: str) -> ModelTold:
        every = self.tell()
        found = next((each for each in every if each.id == asked), None)
        if found is None:
            raise UnknownModel(asked, tuple(each.id for each in every))
        return found


def standing(*models: Loaded, state: str = "ready", settings: Settings | None = None) -> ServerContext:
    """The context of a server with these models."""
    stage = LoadProgress("reading weights", 3, 10)
    return ServerContext(settings or Settings(), lambda: state, lambda: stage, Standing(*models))
