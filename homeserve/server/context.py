"""What the application gives the server: the one door through which HTTP reaches the rest of the process.

The server is up before there is a model, so that `/health` can tell how far the load is. Until then everything that a
load makes is None here; the application sets the attributes before its state turns to `ready`, and the routes that need
them refuse (503 `loading`) while the state is `loading`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

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


@dataclass
class ServerContext:
    """Settings and state of the running application. Mutable: the application fills it in while it loads."""

    settings: Settings
    state: Callable[[], str]
    """loading | ready | draining | recovering (a `State`)."""
    load: Callable[[], LoadProgress]
    engine: Engine | None = None
    tokenizer: Tokenizer | None = None
    templates: TemplateHost | None = None
    grammars: GrammarHost | None = None
    dialect: Dialect | None = None
    model: ModelInfo | None = None
    fleet: Fleet | None = None
    ranks: RankPlan | None = None
    """What each rank of the fleet is."""
    no_drafts: str = ""
    """Why nothing is drafted; empty where drafts are made."""
    budget: MeasuredBudget | None = None
    corridor: CorridorSampler | None = None
