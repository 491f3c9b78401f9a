"""Which plans are out, who has answered them, and who is late. Pure: time arrives as an argument.

    issue(plan) ─▶ open ─▶ answer(result) from every rank in order ─▶ completed, in order of seq

A plan is complete when every rank has answered it, those that it does not name included (they only pass it): its place
in the log is free then, so whoever is told of a completed plan also has the credit for the next one, and credit never
comes back unannounced. Completed plans are handed on in order of `seq`.

Progress is what counts, not the age of a plan, and it counts for all: ranks wait for one another inside a plan, so as
long as one of them moves (answers, loads, takes part in another exchange) the others may be waiting for it. A plan is
late when answers are owed and nobody has moved for the time allowed, counted from the moment when something came to be
owed; or when one answer takes longer than a limit that no honest plan reaches. Then the rank furthest behind is told,
which is where the search for the one that holds the others up begins.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from homeserve.errors import WireError
from homeserve.wire.records import Plan, PlanKind, Result


@dataclass
class _Open:
    seq: int
    epoch: int
    kind: int
    ranks: int
    results: list[Result] = field(default_factory=list)
    missing: int = 0


@dataclass(frozen=True)
class Debt:
    """The next plan that a rank has to answer."""

    seq: int
    kind: PlanKind

    @property
    def text(self) -> str:
        return f"plan {self.seq} ({self.kind.name.lower()})"


@dataclass(frozen=True)
class Late:
    """Rank `rank` is the one furthest behind. `silent_s`: since when nobody has moved, or, where `endless`, since when
    one answer is owed although ranks move."""

    rank: int
    silent_s: float
    endless: bool = False

    @property
    def text(self) -> str:
        if self.endless:
            return f"has not answered for {self.silent_s:.1f} s"
        return f"gave no sign for {self.silent_s:.1f} s"


class PlanBook:
    """The plans in flight of one fleet life."""

    def __init__(self, ranks: int) -> None:
        self._open: deque[_Open] = deque()
        self._acked = [0] * ranks
        self._owes_since = [0.0] * ranks
        self._moved_at = 0.0
        self.issued = 0

    @property
    def ranks(self) -> int:
        return len(self._acked)

    @property
    def in_flight(self) -> int:
        """Plans that some rank has not answered or passed."""
        return self.issued - min(self._acked)

    def last_seq(self, rank: int) -> int:
        """The last plan that the rank answered."""
        return self._acked[rank]

    def debt(self, rank: int) -> Debt | None:
        """What the rank owes first; None if it has answered all that was issued."""
        seq = self._acked[rank] + 1
        return Debt(seq, PlanKind(self._of(seq).kind)) if seq <= self.issued else None

    def issue(self, plan: Plan, now: float) -> None:
        """A plan was written to the log."""
        for rank, acked in enumerate(self._acked):
            if acked == self.issued:  # it owed nothing until now
                self._owes_since[rank] = now
        if not self.in_flight:
            self._moved_at = now
        self.issued = plan.seq
        self._open.append(_Open(plan.seq, plan.epoch, plan.kind, plan.ranks, missing=len(self._acked)))

    def alive(self, now: float) -> None:
        """Some rank moved, without answering a plan."""
        self._moved_at = now

    def pardon(self, now: float) -> None:
        """Nobody looked until now: all time starts again."""
        self._moved_at = now
        self._owes_since = [now] * self.ranks

    def answer(self, rank: int, result: Result, now: float) -> list[tuple[int, tuple[Result, ...]]]:
        """Take a rank's answer; returns the plans that are complete now. Raises WireError if it answers out of turn."""
        due = self._acked[rank] + 1
        if result.rank != rank or result.seq != due or due > self.issued:
            raise WireError(
                f"rank {rank} answered plan {result.seq} as rank {result.rank} where {due} of {self.issued} was due"
            )
        self._acked[rank] = due
        self._owes_since[rank] = self._moved_at = now
        plan = self._of(due)
        plan.missing -= 1
        if plan.ranks >> rank & 1:
            if result.epoch != plan.epoch:
                raise WireError(f"rank {rank} answered plan {due} in epoch {result.epoch}, not {plan.epoch}")
            plan.results.append(result)
        return self._completed()

    @property
    def loading(self) -> bool:
        """A load is the next answer of some rank."""
        return any((debt := self.debt(rank)) is not None and debt.kind is PlanKind.LOAD for rank in self.owing)

    @property
    def owing(self) -> list[int]:
        """The ranks that owe an answer."""
        return [rank for rank, acked in enumerate(self._acked) if acked < self.issued]

    def silent_s(self, now: float) -> float:
        """Since when nobody has moved; 0 where nothing is owed."""
        return now - self._moved_at if self.in_flight else 0.0

    def late(self, now: float, allowed_s: float, limit_s: float = math.inf) -> Late | None:
        """The rank furthest behind, if nobody has moved for `allowed_s` or it owes one answer for `limit_s`."""
        owing = self.owing
        if not owing:
            return None
        behind = min(owing, key=lambda rank: (self._acked[rank], self._owes_since[rank], rank))
        silent_s = now - self._moved_at
        if silent_s >= allowed_s:
            return Late(behind, silent_s)
        owes_s = now - min(self._owes_since[rank] for rank in owing)
        return Late(behind, owes_s, endless=True) if owes_s >= limit_s else None

    def next_check(self, allowed_s: float, limit_s: float = math.inf) -> float | None:
        """When somebody will be late if nobody moves; None if nothing is owed."""
        owing = self.owing
        if not owing:
            return None
        return min(self._moved_at + allowed_s, min(self._owes_since[rank] for rank in owing) + limit_s)

    def _of(self, seq: int) -> _Open:
        """The open plan `seq`: one that a rank owes is open, and numbers have no gaps."""
        return self._open[seq - self._open[0].seq]

    def _completed(self) -> list[tuple[int, tuple[Result, ...]]]:
        done = []
        while self._open and not self._open[0].missing:
            plan = self._open.popleft()
            if len(plan.results) > 1:
                plan.results.sort(key=_rank)
            done.append((plan.seq, tuple(plan.results)))
        return done


def _rank(result: Result) -> int:
    return result.rank
