"""Which models are in: a state machine that is told what happens, and says what to do.

A model goes round

    unloaded ─▶ loading ─▶ loaded ─▶ unloading ─▶ unloaded
                   └──▶ failed ◀───────┘

A *lease* is a request that a model computes; while it has one, nothing but force unloads it. A *demand* is a model
that is out and wanted, with the tickets of all that wait for it: however many they are, it is loaded once. Demands are
served in the order in which they came, one at a time:

    held      the model is on its way out, and has to be gone first
    opening   it is found, fetched if need be, and read: beside everything else, because a fetch may take an hour
    queued    its turn comes when the one before it is in, refused, or given up by everybody who waited
    looking   somebody finds out by planning which of the others have to leave: first those that are leaving already,
              then idle ones, then busy ones, each kind from the one used longest ago on, and none whose memory would
              not be needed. Nothing has been unloaded yet
    clearing  those leave: an idle one at once, a busy one when its requests have ended. It gets no new ones ahead of
              the demand, so that nobody starves; they become a demand of their own, behind this one
    loading   it comes in, whoever still waits for it

While one is clearing, the next one in the queue may overtake it, if it fits beside everybody who is in and the one that
waits will still fit afterwards: so who waits for a busy model is in nobody's way.

What would not fit even alone is refused before anybody had to leave. A ticket that has waited `wait_s` for others to
leave is refused; so is one too many (`waiting_max`).

Pure: the time is told (seconds of one clock), planning and loading are done by whoever executes the acts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class ModelState(StrEnum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"


class Stage(StrEnum):
    """Of a demand."""

    HELD = "held"
    OPENING = "opening"
    QUEUED = "queued"
    LOOKING = "looking"
    CLEARING = "clearing"
    LOADING = "loading"


_GOING = (Stage.LOOKING, Stage.CLEARING, Stage.LOADING)
"""Stages of the one demand that is past the queue."""
_OWN_TIME = (Stage.OPENING, Stage.LOOKING, Stage.LOADING)
"""Stages that are no waiting for others: nobody's time runs out."""


class Why(StrEnum):
    """Why a ticket is refused."""

    DOES_NOT_FIT = "does_not_fit"
    FAILED = "failed"
    BUSY = "busy"
    """The others did not leave in time."""
    FULL = "full"
    """Too many wait already."""
    UNLOADED = "unloaded"
    """Somebody ended the load."""
    DRAINING = "draining"


@dataclass(frozen=True)
class Grant:
    """The ticket has a lease."""

    ticket: int
    key: str


@dataclass(frozen=True)
class Refuse:
    ticket: int
    key: str
    why: Why
    reason: str = ""
    others: tuple[str, ...] = ()
    """Who did not leave in time."""


@dataclass(frozen=True)
class Open:
    """Find the model and read it; to be answered by `opened` or `load_failed`."""

    key: str


@dataclass(frozen=True)
class Look:
    """Find out which of `others` have to leave before `key` fits, of those that come first as few as possible; to be
    answered by `looked` with this `look`, or by `load_failed`.

    With `ahead`: whether it fits beside all of `others` (none has to leave, else None), and `ahead` beside it when
    those in `leaving` have left.
    """

    key: str
    others: tuple[str, ...]
    look: int
    ahead: str = ""
    leaving: tuple[str, ...] = ()


@dataclass(frozen=True)
class Load:
    key: str


@dataclass(frozen=True)
class CancelLoad:
    """Nobody wants it any more, from opening on. While it is loading, `load_failed` is to be told all the same."""

    key: str


@dataclass(frozen=True)
class Unload:
    """`cut`: there may be leases, which get the time of a drain and no more."""

    key: str
    cut: bool = False


Act = Grant | Refuse | Open | Look | Load | CancelLoad | Unload


@dataclass
class Entry:
    """One model. `last_used`: when a lease of it last began or ended, or its load ended; None: never."""

    key: str
    ttl_s: float = 0.0
    """How long it may be idle; 0: for ever."""
    state: ModelState = ModelState.UNLOADED
    reason: str = ""
    """Why it failed."""
    last_used: float | None = None
    leases: int = 0
    ended_by: str | None = None
    """While it is unloaded because it failed: what of."""


@dataclass
class Demand:
    key: str
    since: float
    tickets: dict[int, float] = field(default_factory=dict)
    """Ticket -> since when it waits."""
    asked: bool = False
    """Somebody wants it in without a request of its own."""
    stage: Stage = Stage.HELD
    leaving: tuple[str, ...] = ()
    """Who has to leave."""
    closed: tuple[str, ...] = ()
    """Who gets no new lease ahead of it."""
    look: int = 0
    overtakes: bool = False
    passed: bool = False
    """It cannot overtake as things are."""

    @property
    def wanted(self) -> bool:
        return self.asked or bool(self.tickets)


class Residency:
    """Every method is an event, and returns what to do about it, in order."""

    def __init__(self, ttl_s: Mapping[str, float], *, wait_s: float, waiting_max: int) -> None:
        """`ttl_s`: of each model, by its key."""
        self.entries = {key: Entry(key, ttl) for key, ttl in ttl_s.items()}
        self._wait_s = wait_s
        self._waiting_max = waiting_max
        self._demands: list[Demand] = []
        self._looks = 0
        self._draining = False

    # ------------------------------------------------------------------------------------------------------- requests

    def ask(self, key: str, ticket: int, now: float) -> list[Act]:
        """A request wants a lease of `key`."""
        if self._is_open(key):
            return [self._grant(ticket, key, now)]
        if self._draining:
            return [Refuse(ticket, key, Why.DRAINING)]
        if self.waiting >= self._waiting_max:
            return [Refuse(ticket, key, Why.FULL)]
        self._demand(key, now).tickets[ticket] = now
        return self._advance(now)

    def release(self, key: str, now: float) -> list[Act]:
        """A lease has ended."""
        entry = self.entries[key]
        entry.leases -= 1
        entry.last_used = now
        if not entry.leases and entry.state is ModelState.LOADED:
            self._look_again(key)  # an idle one leaves before a busy one is waited for
        return self._advance(now)

    def leave(self, key: str, ticket: int, now: float) -> list[Act]:
        """A request does not wait any more."""
        demand = self._demand_of(key)
        if demand is not None:
            demand.tickets.pop(ticket, None)
        return self._advance(now)

    def begin(self, key: str, now: float) -> None:
        """A load begins that nobody has asked for: the server's first."""
        demand = self._demand(key, now)
        demand.asked, demand.stage, self.entries[key].state = True, Stage.LOADING, ModelState.LOADING

    # ------------------------------------------------------------------------------------------------------ operators

    def load(self, key: str, now: float) -> list[Act]:
        """Somebody wants `key` in, whether a request comes or not."""
        if self._draining or self._is_open(key):
            return []
        demand = self._demand(key, now)
        demand.asked, demand.since = True, now
        return self._advance(now)

    def unload(self, key: str, now: float, *, force: bool) -> list[Act]:
        """Somebody wants `key` out. Without `force` nothing happens to a model that loads, or has leases; see
        `in_use`."""
        entry = self.entries[key]
        if entry.state is ModelState.FAILED:
            entry.state, entry.reason = ModelState.UNLOADED, ""
        demand = self._demand_of(key)
        if entry.state is ModelState.LOADING and force and demand is not None:
            if demand.stage is Stage.LOADING:
                return [CancelLoad(key)]
            return [CancelLoad(key), *self._fail(demand, Why.UNLOADED, "", now)]
        if entry.state is ModelState.LOADED and (force or not entry.leases):
            return [self._unload(entry), *self._advance(now)]
        return []

    def in_use(self, key: str) -> bool:
        """Whether only force unloads it."""
        entry = self.entries[key]
        return entry.state is ModelState.LOADING or (entry.state is ModelState.LOADED and entry.leases > 0)

    # -------------------------------------------------------------------------------------------------- what came of it

    def opened(self, key: str, now: float) -> list[Act]:
        """The model is there and can be read."""
        demand = self._demand_of(key)
        if demand is not None and demand.stage is Stage.OPENING:
            demand.stage = Stage.QUEUED
        return self._advance(now)

    def looked(self, look: int, leaving: tuple[str, ...] | None, reason: str, now: float) -> list[Act]:
        """These others have to leave; None: it does not fit even alone, and `reason` has the arithmetic."""
        demand = next((each for each in self._demands if each.look == look and each.stage is Stage.LOOKING), None)
        if demand is None:
            return []
        if demand.overtakes and leaving is None:
            demand.stage, demand.overtakes, demand.passed = Stage.QUEUED, False, True
            return self._advance(now)
        if demand.overtakes:
            return [self._load(demand), *self._advance(now)]
        if leaving is None:
            return self._fail(demand, Why.DOES_NOT_FIT, reason, now)
        demand.stage, demand.leaving, demand.closed = Stage.CLEARING, leaving, leaving
        return self._advance(now)

    def loaded(self, key: str, now: float) -> list[Act]:
        """A load has ended, and the model is in."""
        entry = self.entries[key]
        entry.state, entry.reason, entry.last_used = ModelState.LOADED, "", now
        self._others_are_in()
        return self._advance(now)

    def load_failed(self, key: str, reason: str, now: float, *, why: Why = Why.FAILED) -> list[Act]:
        """It cannot be found, read, planned for or loaded, and nothing of it is left. `why` UNLOADED: it was cancelled
        on request."""
        demand = self._demand_of(key)
        if demand is None or demand.stage is Stage.HELD:
            return self._advance(now)
        return self._fail(demand, why, reason, now)

    def gave_up(self, key: str, reason: str, now: float) -> list[Act]:
        """A loaded model cannot go on."""
        entry = self.entries[key]
        if entry.state is not ModelState.LOADED:
            return []
        entry.ended_by = reason
        return [self._unload(entry), *self._advance(now)]

    def unloaded(self, key: str, now: float) -> list[Act]:
        """A model is out, with all that it held."""
        entry = self.entries[key]
        entry.state, entry.reason, entry.ended_by = (
            (ModelState.UNLOADED, "", None) if entry.ended_by is None else (ModelState.FAILED, entry.ended_by, None)
        )
        self._others_are_in()
        self._look_again(key)  # perhaps nobody else has to leave any more
        return self._advance(now)

    def tick(self, now: float) -> list[Act]:
        """Time has passed."""
        acts: list[Act] = []
        for demand in self._demands:
            if demand.stage in _OWN_TIME:
                continue
            late = [ticket for ticket, since in demand.tickets.items() if now - since >= self._wait_s]
            for ticket in late:
                del demand.tickets[ticket]
                acts.append(Refuse(ticket, demand.key, Why.BUSY, others=self._in_the_way(demand)))
            demand.asked = demand.asked and now - demand.since < self._wait_s
        acts += [self._unload(entry) for entry in self.entries.values() if self._idle_since(entry, now) is not None]
        return acts + self._advance(now)

    def drain(self, now: float) -> list[Act]:
        """Nothing is loaded any more, and nobody waits for it."""
        self._draining = True
        acts: list[Act] = []
        for demand in self._demands:
            acts += [Refuse(ticket, demand.key, Why.DRAINING) for ticket in demand.tickets]
            demand.tickets, demand.asked = {}, False
            if demand.stage is Stage.LOADING:
                acts.append(CancelLoad(demand.key))
        return acts + self._advance(now)

    # -------------------------------------------------------------------------------------------------------- questions

    @property
    def waiting(self) -> int:
        """Tickets that wait."""
        return sum(len(demand.tickets) for demand in self._demands)

    def waiting_for(self, key: str) -> int:
        return sum(len(demand.tickets) for demand in self._demands if demand.key == key)

    def used_last(self) -> str:
        """The model that whoever names none means: the one used last, else the first."""
        used = [entry for entry in self.entries.values() if entry.last_used is not None]
        return max(used, key=lambda entry: entry.last_used or 0.0).key if used else next(iter(self.entries))

    def by_use(self) -> list[str]:
        """Loaded models, the one used last first."""
        loaded = [entry for entry in self.entries.values() if entry.state is ModelState.LOADED]
        return [entry.key for entry in sorted(loaded, key=lambda entry: -(entry.last_used or 0.0))]

    def next_due(self) -> float | None:
        """When `tick` has something to do next; None: not before another event."""
        due = [entry.last_used + entry.ttl_s for entry in self._with_ttl() if entry.last_used is not None]
        for demand in self._demands:
            if demand.stage not in _OWN_TIME:
                due += [since + self._wait_s for since in demand.tickets.values()]
                due += [demand.since + self._wait_s] if demand.asked else []
        return min(due, default=None)

    # ----------------------------------------------------------------------------------------------------------- inside

    def _is_open(self, key: str) -> bool:
        """Whether a request for it gets a lease at once."""
        head = self._head()
        return self.entries[key].state is ModelState.LOADED and (head is None or key not in head.closed)

    def _head(self) -> Demand | None:
        """The demand whose turn it is: the one that is past the queue, else the first in it."""
        going = sorted((each for each in self._demands if each.stage in _GOING), key=lambda each: each.overtakes)
        return going[0] if going else next((each for each in self._demands if each.stage is Stage.QUEUED), None)

    def _others_are_in(self) -> None:
        """Whoever could not overtake may be able to now."""
        for demand in self._demands:
            demand.passed = False

    def _overtaking(self) -> bool:
        return any(each.overtakes for each in self._demands)

    def _look_again(self, key: str) -> None:
        """Something has changed at `key` while a demand waits for others. Whoever was closed for it stays so meanwhile,
        and `key` too: what is idle now is idle when the answer comes."""
        head = self._head()
        if head is not None and head.stage is Stage.CLEARING and key not in head.leaving and not self._overtaking():
            head.stage, head.closed = Stage.QUEUED, (*head.leaving, key)

    def _demand_of(self, key: str) -> Demand | None:
        return next((demand for demand in self._demands if demand.key == key), None)

    def _demand(self, key: str, now: float) -> Demand:
        found = self._demand_of(key)
        if found is None:
            found = Demand(key, now)
            self._demands.append(found)
        return found

    def _grant(self, ticket: int, key: str, now: float) -> Grant:
        entry = self.entries[key]
        entry.leases += 1
        entry.last_used = now
        return Grant(ticket, key)

    def _unload(self, entry: Entry) -> Unload:
        entry.state = ModelState.UNLOADING
        return Unload(entry.key, cut=entry.leases > 0)

    def _advance(self, now: float) -> list[Act]:
        """Drops what nobody wants, grants what is open, and takes the demand whose turn it is as far as it goes."""
        acts: list[Act] = []
        for demand in [each for each in self._demands if not each.wanted and each.stage is not Stage.LOADING]:
            self._demands.remove(demand)
            if demand.stage is not Stage.HELD:
                self.entries[demand.key].state = ModelState.UNLOADED
                acts.append(CancelLoad(demand.key))
        for demand in [each for each in self._demands if self._is_open(each.key)]:
            acts += [self._grant(ticket, demand.key, now) for ticket in demand.tickets]
            self._demands.remove(demand)
        for demand in self._demands:
            if demand.stage is Stage.HELD and not self._is_in(self.entries[demand.key]):
                demand.stage, self.entries[demand.key].state = Stage.OPENING, ModelState.LOADING
                acts.append(Open(demand.key))
        head = self._head()
        if head is None:
            return acts
        acts += self._step(head)
        return acts + self._overtake(head) if head.stage is Stage.CLEARING else acts

    def _step(self, head: Demand) -> list[Act]:
        """What the demand whose turn it is needs now."""
        if head.stage is Stage.QUEUED:
            self._looks += 1
            head.stage, head.look, head.leaving = Stage.LOOKING, self._looks, ()
            return [Look(head.key, self._others(head.key), head.look)]
        if head.stage is not Stage.CLEARING:
            return []
        others = [self.entries[key] for key in head.leaving]
        acts: list[Act] = [
            self._unload(other) for other in others if other.state is ModelState.LOADED and not other.leases
        ]
        if not any(self._is_in(other) for other in others) and not self._overtaking():
            acts.append(self._load(head))
        return acts

    def _load(self, demand: Demand) -> Load:
        demand.stage, self.entries[demand.key].reason = Stage.LOADING, ""
        return Load(demand.key)

    def _overtake(self, head: Demand) -> list[Act]:
        """Somebody looks whether the next one in the queue can come in beside those that are in."""
        queue = [each for each in self._demands if each.stage is Stage.QUEUED and not each.passed]
        able = (each for each in queue if each.key not in head.leaving)  # it has just made room for the one that waits
        demand = None if self._overtaking() else next(able, None)
        if demand is None:
            return []
        self._looks += 1
        demand.stage, demand.overtakes, demand.look, demand.leaving = Stage.LOOKING, True, self._looks, ()
        return [Look(demand.key, self._others(demand.key), demand.look, head.key, head.leaving)]

    def _others(self, key: str) -> tuple[str, ...]:
        """Those that are in, in the order in which they have to leave."""
        inside = [entry for entry in self.entries.values() if entry.key != key and self._is_in(entry)]
        kinds = {ModelState.UNLOADING: 0}
        inside.sort(key=lambda entry: (kinds.get(entry.state, 1), entry.leases > 0, entry.last_used or 0.0))
        return tuple(entry.key for entry in inside)

    def _is_in(self, entry: Entry) -> bool:
        return entry.state in (ModelState.LOADED, ModelState.UNLOADING)

    def _in_the_way(self, demand: Demand) -> tuple[str, ...]:
        """What a demand waits for."""
        head = self._head()
        if demand is not head and head is not None:
            return (head.key,)
        return tuple(key for key in demand.leaving if self._is_in(self.entries[key])) or (demand.key,)

    def _fail(self, demand: Demand, why: Why, reason: str, now: float) -> list[Act]:
        self._demands.remove(demand)
        entry, failed = self.entries[demand.key], why is not Why.UNLOADED
        entry.state, entry.reason = (ModelState.FAILED, reason) if failed else (ModelState.UNLOADED, "")
        acts: list[Act] = [Refuse(ticket, demand.key, why, reason) for ticket in demand.tickets]
        return acts + self._advance(now)

    def _with_ttl(self) -> list[Entry]:
        return [
            entry
            for entry in self.entries.values()
            if entry.ttl_s and entry.state is ModelState.LOADED and not entry.leases
        ]

    def _idle_since(self, entry: Entry, now: float) -> float | None:
        """Since when it is idle, where that is longer than it may be."""
        if entry not in self._with_ttl() or entry.last_used is None:
            return None
        return entry.last_used if now - entry.last_used >= entry.ttl_s else None
