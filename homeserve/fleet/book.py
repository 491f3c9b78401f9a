"""Which plans are out, who has answered them, and who is late. Pure: time arrives as an argument.

    issue(plan) ─▶ open ─▶ answer(result) from every rank in order ─▶ completed, in order of seq

A plan is complete when every rank has answered it, those that it does not name included (they only pass it): its place
in the log is free then, so whoever is told of a completed plan also has the credit for the next one, and credit never
comes back unannounced. Completed plans are handed on in order of `seq`.

A rank is late when it owes an answer and has shown no sign of life for the time allowed: neither an answer nor load
progress, counted from the moment when it came to owe one. Progress is what counts, not the age of a plan.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from homeserve.errors import WireError
from homeserve.wire.records import Plan, PlanKind, Result


@dataclass
class _Open:
    seq: int
    epoch: int
    kind: PlanKind
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
    """Rank `rank` owes an answer and has been silent for `silent_s`."""

    rank: int
    silent_s: float


class PlanBook:
    """The plans in flight of one fleet life."""

    def __init__(self, ranks: int) -> None:
        self._open: deque[_Open] = deque()
        self._acked = [0] * ranks
        self._heard = [0.0] * ranks
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
        return next((Debt(seq, entry.kind) for entry in self._open if entry.seq == seq), None)

    def issue(self, plan: Plan, now: float) -> None:
        """A plan was written to the log."""
        for rank, acked in enumerate(self._acked):
            if acked == self.issued:  # it owed nothing until now
                self._heard[rank] = now
        self.issued = plan.seq
        self._open.append(_Open(plan.seq, plan.epoch, PlanKind(plan.kind), plan.ranks, missing=len(self._acked)))

    def alive(self, rank: int, now: float) -> None:
        """A sign of life that answers no plan."""
        self._heard[rank] = now

    def answer(self, rank: int, result: Result, now: float) -> list[tuple[int, tuple[Result, ...]]]:
        """Take a rank's answer; returns the plans that are complete now. Raises WireError if it answers out of turn."""
        due = self._acked[rank] + 1
        if result.rank != rank or result.seq != due or due > self.issued:
            raise WireError(
                f"rank {rank} answered plan {result.seq} as rank {result.rank} where {due} of {self.issued} was due"
            )
        self._acked[rank] = due
        self._heard[rank] = now
        plan = next((entry for entry in self._open if entry.seq == due), None)
        assert plan is not None, "a plan that a rank owes is open"
        plan.missing -= 1
        if plan.ranks >> rank & 1:
            if result.epoch != plan.epoch:
                raise WireError(f"rank {rank} answered plan {due} in epoch {result.epoch}, not {plan.epoch}")
            plan.results.append(result)
        return self._completed()

    def late(self, now: float, allowed_s: float) -> Late | None:
        """The rank that has been silent longest, if that is too long."""
        silent = [(now - self._heard[rank], rank) for rank, acked in enumerate(self._acked) if acked < self.issued]
        if not silent:
            return None
        silent_s, rank = max(silent)
        if silent_s < allowed_s:
            return None
        return Late(rank, silent_s)

    def next_check(self, allowed_s: float) -> float | None:
        """When some rank will be late if nothing is heard of it; None if nothing is owed."""
        owing = [self._heard[rank] for rank, acked in enumerate(self._acked) if acked < self.issued]
        return min(owing) + allowed_s if owing else None

    def _completed(self) -> list[tuple[int, tuple[Result, ...]]]:
        done = []
        while self._open and not self._open[0].missing:
            plan = self._open.popleft()
            done.append((plan.seq, tuple(sorted(plan.results, key=lambda result: result.rank))))
        return done
