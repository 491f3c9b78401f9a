"""What a fleet is made of, whom it tells, and what it says of a rank."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from budget.host import allowed_threads
from budget.ranks import ActSizes as ActSizes
from homeserve.layouts.ranks import RankDevice
from homeserve.wire.records import Result

EXCHANGE_SPARE_S = 5.0
"""By how much a rank waits longer for another one than the engine does."""

LoadProgressCallback = Callable[[str, int, int], None]
"""stage, done bytes, total bytes (0: unknown): summed over all ranks (`homeserve.fleet.stages`)."""


EXCHANGE_PLANS = 256
"""Plans over which the waits of exchanges are told."""


@dataclass(frozen=True)
class FleetSpec:
    """One fleet. `plans_in_flight` is the size of the plan log; `threads` 0 leaves it to the backend, `isa` "" too."""

    ranks: int
    backend: str
    device_index: int
    threads: int
    isa: str
    plans_in_flight: int
    plan_timeout_s: float
    slot_bytes: int
    """Upper bound of an encoded plan; the slots of the log are made to hold it."""
    report_slot_bytes: int
    """Upper bound of an encoded result."""
    fault: str = ""
    """A fault for tests (homeserve.wire.faults), given to the first life of the rank that it names."""
    capture_dir: str | None = None
    log_level: str = "INFO"
    start_timeout_s: float = 60.0
    cores: tuple[tuple[int, ...], ...] = ()
    """For each rank the hardware threads that its threads are pinned to; empty: none is pinned."""
    acts: ActSizes | None = None
    """Of the shared memory for what ranks exchange; None with one rank."""
    unified: bool = False
    """Whether the ranks hold weights and KV rows together."""
    weights_copy: bool = False
    """Whether the ranks hold one copy of the weights together, from which each fills its own at a flip."""
    transit_bytes: int = 0
    """The most that one flip may carry from rank to rank; 0: nothing moves."""
    spin_us: int = 0
    """How long a wait for another rank spins before it sleeps: only where each thread has a core of its own."""
    load_silence_s: float = 60.0
    """How long no rank may tell anything new of its load, on cores of its own; see `load_allowed_s`."""
    devices: tuple[RankDevice, ...] = ()
    """What each rank opens; empty: every rank `backend` and `device_index`."""

    def device(self, rank: int) -> RankDevice:
        """What rank `rank` opens."""
        return self.devices[rank] if self.devices else RankDevice(self.backend, self.device_index)

    @property
    def plan_allowed_s(self) -> float:
        """How long there may be no sign of life while answers are owed."""
        return self.plan_timeout_s * self.patience

    @property
    def load_allowed_s(self) -> float:
        """The same while ranks load: stages of a load tell of nothing for longer than a plan computes."""
        return max(self.plan_timeout_s, self.load_silence_s) * self.patience

    @property
    def plan_limit_s(self) -> float:
        """How long one answer may take whatever moves: as if every rank took all that is allowed, one by one."""
        return self.plan_allowed_s * (self.ranks + 1)

    @property
    def exchange_allowed_s(self) -> float:
        """How long a rank waits for another one inside a plan: longer than the engine, which sees who waits for whom,
        so this one is for a rank whose engine does not look."""
        return self.plan_limit_s + EXCHANGE_SPARE_S

    @property
    def patience(self) -> float:
        """How much longer than on cores of its own a rank may take: more threads than this process may use share
        them."""
        return max(1.0, math.ceil(self.ranks * max(1, self.threads) / len(allowed_threads())))


@dataclass(frozen=True)
class Loss:
    """Why a life cannot go on. `rank` -1: it was ended from here."""

    rank: int
    why: str
    oom: bool = False
    seq: int | None = None
    """The plan that it owed."""
    folder: str | None = None
    """Where the evidence of a hang lies."""
    outside: bool = False
    """No request can have been the reason: the process was stopped, or asked to end by a signal."""
    device: bool = False
    """The rank's card is lost. (A request may have been the reason: a kernel that went astray loses a card.)"""
    crash: bool = False
    """The process of a rank on a card crashed: in its driver, most likely."""

    @property
    def told(self) -> str:
        """In full, for the log and the events."""
        return f"{self.why}; evidence: {self.folder}" if self.folder else self.why


class FleetListener(Protocol):
    """Who is told. Both are called on the loop."""

    def on_results(self, seq: int, results: tuple[Result, ...]) -> None:
        """Every rank is past plan `seq`, so its credit is back; these are the answers of those that it names, in order
        of rank. Comes in order of `seq`."""
        ...

    def on_lost(self, loss: Loss) -> None:
        """A loaded fleet is unusable since `rank` died or hung. Comes once; no results follow it until a restart."""
        ...


class Exchanges:
    """What one rank's answers have told of its exchanges with others since the load."""

    def __init__(self) -> None:
        self.calls: int | None = None
        self.moved_bytes: int | None = None
        self._means: deque[float] = deque(maxlen=EXCHANGE_PLANS)

    def count(self, result: Result) -> None:
        if not result.exchanges:
            return
        calls = sum(entry[1] for entry in result.exchanges)
        more = calls - (self.calls or 0)
        if more > 0:
            self._means.append(result.waited_us / more)
        self.calls, self.moved_bytes = calls, sum(entry[2] for entry in result.exchanges)

    def shown(self) -> dict[str, float | None]:
        """How many there were, and of the last plans the median and the 99th percentile of the mean wait of one
        exchange, in microseconds. None before the first plan, and where a rank exchanges nothing."""
        means = sorted(self._means)

        def at(share: float) -> float | None:
            return round(means[int(share * (len(means) - 1))], 1) if means else None

        return {"count": self.calls, "us_p50": at(0.5), "us_p99": at(0.99)}


@dataclass(frozen=True)
class RankStatus:
    """One rank as `status` shows it. None: not known (yet)."""

    rank: int
    pid: int | None
    device: str | None
    backend: str
    isa: str | None
    threads: int | None
    restarts: int
    last_seq: int
    layers: list[int] | None
    busy_ms: float
    """Computing,"""
    waited_ms: float
    """waiting for other ranks inside plans,"""
    idle_ms: float
    """and waiting for plans."""
    rss_mib: float | None
    lines_mib: dict[str, float]
    copied_bytes: int | None
    """Moved between ranks since the load: written by this one into exchanges, and received in messages."""
    collectives: dict[str, float | None] = field(default_factory=lambda: Exchanges().shown())
