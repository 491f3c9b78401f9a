"""What the application gives the server: the one door through which HTTP reaches the rest of the process.

The server is up before there is a model, so that `/health` can tell how far the load is. What a load makes is one
value, `Loaded`, in which nothing is missing; a model that is not in has none. Handlers get theirs by a lease
(`Models.lease`): as long as it is open, the model stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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


class Models(Protocol):
    """The models of this server, in and out."""

    @property
    def loaded(self) -> Sequence[Loaded]:
        """Those that are in, the one used last first."""

    def lease(self, asked: str | None) -> AbstractAsyncContextManager[Loaded]:
        """The model called `asked` (None: the one used last), which stays in until the lease is closed. Raises
        UnknownModel."""


@dataclass
class ServerContext:
    """Settings and state of the running application. Mutable: the application fills it in while it loads."""

    settings: Settings
    state: Callable[[], str]
    """loading | ready | draining | recovering (a `State`)."""
    load: Callable[[], LoadProgress]
    models: Models
    corridor: CorridorSampler | None = None
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
