"""What a scrape reads of engines and fleets, taken on the loop.

Counters never fall: what an engine has counted stays counted when its model is unloaded. `Past` sees which engines are
in, at every request and every scrape, and keeps the last word of each that has gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from homeserve.engine.draft_counts import DraftTotals
from homeserve.engine.flip_totals import FlipTotals

if TYPE_CHECKING:
    from homeserve.engine.engine import EngineSnapshot
    from homeserve.engine.speculation import Drafting
    from homeserve.fleet.spec import RankStatus
    from homeserve.server.context import Loaded, ServerContext

_COUNTED = (
    "finished",
    "aborted",
    "failed",
    "prompt_tokens",
    "generated_tokens",
    "prefix_lookups",
    "prefix_hits",
    "prefix_hit_tokens",
    "preemptions",
    "plans_acked",
)
"""Counters of the engine's snapshot."""


@dataclass
class Totals:
    """Counters of engines, summed."""

    counts: Counter[str] = field(default_factory=Counter)
    """By the name in the engine's snapshot."""
    restarts: Counter[int] = field(default_factory=Counter)
    """Rank -> restarts."""
    flips: FlipTotals | None = None
    """None: no layout could change."""
    drafts: DraftTotals | None = None
    """None: nothing could be drafted."""

    def add(self, other: Totals) -> None:
        self.counts.update(other.counts)
        self.restarts.update(other.restarts)
        if other.flips is not None:
            self.flips = self.flips or FlipTotals()
            self.flips.add_all(other.flips)
        if other.drafts is not None:
            self.drafts = self.drafts or DraftTotals()
            self.drafts.carried.add(other.drafts.carried)
            self.drafts.uncarried.add(other.drafts.uncarried)

    @classmethod
    def of(cls, loaded: Loaded) -> Totals:
        engine, snapshot = loaded.engine, loaded.engine.snapshot()
        return cls(
            Counter({name: getattr(snapshot, name) for name in _COUNTED}),
            Counter({index: rank.restarts for index, rank in enumerate(loaded.fleet.ranks)}),
            engine.flip_totals,
            cls.drafted(engine.drafting),
        )

    @staticmethod
    def drafted(drafting: Drafting) -> DraftTotals | None:
        """What an engine's rounds have brought; None where nothing can be drafted."""
        if not drafting.most:
            return None
        made = DraftTotals()
        made.carried.add(drafting.carried)
        made.uncarried.add(drafting.uncarried)
        return made


@dataclass(frozen=True)
class ModelReading:
    """A model that is in, now."""

    id: str
    snapshot: EngineSnapshot
    ranks: tuple[RankStatus, ...]
    kv_type: str
    prefix_cache: bool


@dataclass(frozen=True)
class Device:
    """Bytes of memory free on one device; None: not known."""

    number: int
    floor: int
    free: int | None
    least: int | None
    """Since the start."""


@dataclass(frozen=True)
class Reading:
    """What a scrape reads."""

    state: str = ""
    states: tuple[tuple[str, str], ...] = ()
    """(model id, its state) of every model, in or out."""
    models: tuple[ModelReading, ...] = ()
    """Those that are in, the one used last first."""
    totals: dict[str, Totals] = field(default_factory=dict)
    """By model id, of those that are in and those that were."""
    devices: tuple[Device, ...] = ()
    refused: dict[str, int] = field(default_factory=dict)
    """Requests that a rate limit refused, by the limit; empty where there is none."""

    @property
    def sum(self) -> Totals | None:
        """Over all models; None: there was none yet."""
        if not self.totals:
            return None
        made = Totals()
        for each in self.totals.values():
            made.add(each)
        return made


class Past:
    """Which engines were seen, and what those that are gone have counted, by model id."""

    def __init__(self) -> None:
        self._seen: dict[int, Loaded] = {}
        self._gone: dict[str, Totals] = {}

    def see(self, loaded: Sequence[Loaded]) -> None:
        """These models are in."""
        if len(loaded) == len(self._seen) and all(id(each.engine) in self._seen for each in loaded):
            return
        now = {id(each.engine): each for each in loaded}
        for key, each in self._seen.items():
            if key not in now:
                self._gone.setdefault(each.model.id, Totals()).add(Totals.of(each))
        self._seen = now

    def totals(self, loaded: Sequence[Loaded]) -> dict[str, Totals]:
        """By model id, of what is gone and of what is in."""
        self.see(loaded)
        made: dict[str, Totals] = {}
        for name, totals in (*self._gone.items(), *((each.model.id, Totals.of(each)) for each in loaded)):
            made.setdefault(name, Totals()).add(totals)
        return made


def reading_of(context: ServerContext, past: Past, refused: dict[str, int]) -> Reading:
    """What a scrape reads now. On the loop."""
    loaded = context.loaded
    return Reading(
        state=context.state(),
        states=tuple((each.id, each.state) for each in context.models.tell()),
        models=tuple(_model(each) for each in loaded),
        totals=past.totals(loaded),
        devices=_devices(context.corridor),
        refused=refused,
    )


def _model(loaded: Loaded) -> ModelReading:
    settings = loaded.settings
    ranks = tuple(loaded.fleet.ranks)
    return ModelReading(loaded.model.id, loaded.engine.snapshot(), ranks, settings.kv_type, settings.prefix_cache)


def _devices(corridor: Any) -> tuple[Device, ...]:
    return () if corridor is None else tuple(Device(*each) for each in corridor.levels())
