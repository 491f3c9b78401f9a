"""What the application gives the server: the one door through which HTTP reaches the rest of the process.

The server is up before there is a model, so that `/health` can tell how far the load is. What a load makes is one
value, `Loaded`, in which nothing is missing; a model that is not in has none. Handlers get theirs by a lease
(`Models.lease`): as long as it is open, the model stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from homeserve.server.bounds import Bounds

if TYPE_CHECKING:
    from homeserve.corridor import CorridorSampler
    from homeserve.engine.engine import Engine
    from homeserve.fleet import Fleet
    from homeserve.layouts.ranks import RankPlan
    from homeserve.measure import MeasuredBudget
    from homeserve.settings import Settings
    from homeserve.text.dialects import Dialect
    from homeserve.text.grammars import GrammarHost
    from homeserve.text.templates import TemplateHost
    from homeserve.text.tokenizer import Tokenizer


class State(StrEnum):
    """Life of the application as clients see it."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    RECOVERING = "recovering"


@dataclass(frozen=True)
class LoadProgress:
    """How far the load is. None where not known yet."""

    stage: str
    done_bytes: int | None = None
    total_bytes: int | None = None


@dataclass(frozen=True)
class ModelInfo:
    """The model that is served. `context` is the most tokens that one request may have, prompt and answer together."""

    id: str
    path: str
    arch: str
    quant: str
    context: int
    vocab: int = 0
    """Rows of the model's embedding: no token id of it is as large. 0: as many as the tokenizer has."""
    pooling: str = ""
    """How its files say that its states become an embedding; empty: they say nothing."""
    created: int = 0
    """Seconds of the epoch; what `/v1/models` calls `created`."""


@dataclass(frozen=True)
class Loaded:
    """One loaded model with everything that its load made."""

    settings: Settings
    """Of this model, with `devices` as they came out."""
    model: ModelInfo
    engine: Engine
    tokenizer: Tokenizer
    templates: TemplateHost
    grammars: GrammarHost
    dialect: Dialect
    """How the model writes thoughts and calls."""
    fleet: Fleet
    ranks: RankPlan
    """What each rank of the fleet is."""
    budget: MeasuredBudget
    no_drafts: str = ""
    """Why nothing is drafted; empty where drafts are made."""

    @property
    def bounds(self) -> Bounds:
        """A tokenizer may know more tokens than the model has rows for (added ones), or fewer (padding)."""
        limits = self.engine.limits
        vocab = min(self.model.vocab or self.tokenizer.vocab_size, self.tokenizer.vocab_size)
        return Bounds(vocab, self.engine.token_limit, limits.running + limits.waiting)


MODEL_STATES = ("unloaded", "loading", "loaded", "unloading", "failed")
"""Of one model (`homeserve.residency.ModelState`)."""


@dataclass(frozen=True)
class ModelTold:
    """How one model is, in or out."""

    id: str
    state: str
    """One of `MODEL_STATES`."""
    reason: str | None = None
    """Why it failed."""
    last_used: float | None = None
    """Seconds of the epoch; None: never."""
    ttl_s: float = 0.0
    """Idle for so long it is unloaded; 0: never for that."""
    running: int = 0
    """Requests that hold it."""
    waiting: int = 0
    """Requests that wait for it."""
    info: ModelInfo | None = None
    """As it was loaded last; None: it was not yet."""
    progress: LoadProgress | None = None
    """Of its load, while it is loading."""
    planned: Mapping[str, int] = field(default_factory=dict)
    """Bytes that its plan promises it on each device, by the device's id, while it is in."""


class Models(Protocol):
    """The models of this server, in and out."""

    @property
    def loaded(self) -> Sequence[Loaded]:
        """Those that are in, the one used last first."""

    def lease(self, asked: str | None) -> AbstractAsyncContextManager[Loaded]:
        """The model called `asked` (None: the one used last), loaded if need be; it stays in until the lease is closed.
        Raises UnknownModel; DoesNotFit, ModelLoadFailed, ModelUnloaded; ModelWaits, QueueFull, Draining."""

    def tell(self) -> Sequence[ModelTold]:
        """Every model whose name is known, in or out."""

    def begin_load(self, asked: str) -> ModelTold:
        """Bring it in, if it is out; returns at once. Raises UnknownModel."""

    def begin_unload(self, asked: str, *, force: bool) -> ModelTold:
        """Let it out, if it is in; returns at once. Raises UnknownModel, ModelInUse."""


@dataclass
class ServerContext:
    """Settings and state of the running application. Mutable: the application fills it in while it loads."""

    settings: Settings
    state: Callable[[], str]
    """loading | ready | draining | recovering (a `State`)."""
    load: Callable[[], LoadProgress]
    models: Models
    corridor: CorridorSampler | None = None
    on_models: list[Callable[[], None]] = field(default_factory=list)
    """Who wants to hear when other models are in than before; whoever keeps one that is out, keeps its memory."""
    still_takes: Callable[[], bool] = lambda: False
    """While draining: whether requests are still taken (`--drain-delay-s`)."""
    started: float = field(default_factory=time.time)
    """Seconds of the epoch."""

    @property
    def loaded(self) -> Sequence[Loaded]:
        """The models that are in, the one used last first."""
        return self.models.loaded

    @property
    def first(self) -> Loaded | None:
        """The model used last, of those that are in."""
        return next(iter(self.models.loaded), None)
