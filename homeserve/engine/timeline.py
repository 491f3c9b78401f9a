"""Who was busy when: of the last plans, when each rank began, how long it computed and how long it waited. Pure.

A rank's time on a plan begins when it takes the plan and has two parts: waiting for other ranks inside the plan, and
computing. Which came when within the plan is not told; a rank of the pipeline layout waits first, for its input.

A plan's *share* of the time is what speeds and costs are made of (`rates`, `draft_costs`). It ends with the slowest
rank, and begins

    where the plan before it ended    if it follows that one: it was issued while others were in flight, or as soon as
                                      the last of them was back. What lies between is the price of not running ahead
    where its first rank began        otherwise, or where the plan before it ended if that was later: what nobody asked
                                      for anything in is nobody's time

So chunks that follow each other through a pipeline are counted at the pace at which they come out, one alone with all
it took, and a round of drafting with the pause in front of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

import msgspec

from homeserve.wire.records import LaneRows, PlanKind, Result

PLANS_KEPT = 256


RankTimes = tuple[int, int, int, int]
"""(rank, began, busy, waited) in microseconds; `began` by the system's monotonic clock, `busy` without `waited`."""


def span(ranks: Sequence[RankTimes]) -> tuple[int, int]:
    """When the first rank began and the last one ended; (0, 0) without any."""
    if len(ranks) == 1:
        ((_, began, busy, waited),) = ranks
        return began, began + busy + waited
    began = min((began for _, began, _, _ in ranks), default=0)
    return began, max((began + busy + waited for _, began, busy, waited in ranks), default=0)


class PlanTimes(msgspec.Struct, frozen=True):
    """One plan. `ranks`: of each that ran it."""

    life: int
    """How many lives of the fleet ended before this one: `seq` starts again with each."""
    seq: int
    kind: PlanKind
    rows: int
    prompt_rows: int
    ranks: tuple[RankTimes, ...]
    drafts: int = 0
    drawn: int = 0
    """Tokens that it drew: with drafts more than rows that decode."""
    seconds: float = 0.0
    """Its share of the time; 0: its ranks told nothing."""

    @property
    def began(self) -> int:
        return span(self.ranks)[0]

    @property
    def end(self) -> int:
        return span(self.ranks)[1]

    def as_json(self) -> dict[str, Any]:
        ranks = [
            [rank, began / 1000, round(busy / 1000, 3), round(waited / 1000, 3)]
            for rank, began, busy, waited in self.ranks
        ]
        head = {"life": self.life, "seq": self.seq, "kind": self.kind.name.lower()}
        rows = {"rows": self.rows, "prompt_rows": self.prompt_rows, "drafts": self.drafts, "drawn": self.drawn}
        return {**head, **rows, "ranks": ranks}


class Pace:
    """Shares of plans, in the order of their answers."""

    def __init__(self) -> None:
        self._before = 0
        self._life = -1

    def seconds(self, life: int, ranks: Sequence[RankTimes], follows: bool) -> float:
        """`ranks` as in `PlanTimes`; `follows`: it was issued while others were in flight, or as soon as they were
        back. 0 where no rank told a time."""
        began, end = span(ranks)
        before = self._before if life == self._life else 0
        start = before if before and follows else max(began, before)
        self._before, self._life = end, life
        return (end - start) / 1e6 if end > began else 0.0


class Timeline:
    """The last `PLANS_KEPT` plans with rows, in the order of their answers."""

    def __init__(self) -> None:
        self._flight: dict[int, tuple[PlanKind, int, int, int, bool]] = {}
        self._pace = Pace()
        self._just_answered = False
        self._plans: deque[PlanTimes] = deque(maxlen=PLANS_KEPT)
        self._life = 0
        self._answered = 0

    def issued(self, seq: int, kind: PlanKind, rows: Sequence[LaneRows], prompt_rows: int | None = None) -> None:
        """`prompt_rows`: as many of the rows; without it, those that bring tokens."""
        if rows:
            prompt = sum(len(each.tokens) // 4 for each in rows) if prompt_rows is None else prompt_rows
            drafts = sum(each.drafts for each in rows)
            follows = self._just_answered or bool(self._flight)
            self._flight[seq] = (kind, sum(max(1, len(each.tokens) // 4) for each in rows), prompt, drafts, follows)

    def answered(self, seq: int, results: Sequence[Result]) -> float:
        """Returns the plan's share of the time in seconds; 0: unknown, or it had no rows. What is issued from here to
        `settled` follows it."""
        plan = self._flight.pop(seq, None)
        self._just_answered = plan is not None
        if plan is None:
            return 0.0
        ranks = tuple((r.rank, r.began_us, max(0, r.busy_us - r.waited_us), r.waited_us) for r in results)
        kind, rows, prompt, drafts, follows = plan
        drawn = sum(sample.token >= 0 for result in results[-1:] for sample in result.samples)
        seconds = self._pace.seconds(self._life, ranks, follows)
        self._plans.append(PlanTimes(self._life, seq, kind, rows, prompt, ranks, drafts, drawn, seconds))
        self._answered += 1
        return seconds

    def settled(self) -> None:
        """All that follows the last answer at once was issued."""
        self._just_answered = False

    def lost(self) -> None:
        """The fleet's life ended."""
        self._flight.clear()
        self._just_answered = False
        self._life += 1

    def recent(self) -> tuple[PlanTimes, ...]:
        """Oldest first."""
        return tuple(self._plans)

    def since(self, answered: int) -> tuple[int, tuple[PlanTimes, ...]]:
        """How many were answered so far, and those behind the first `answered` of them that are still kept."""
        fresh = min(self._answered - answered, len(self._plans))
        return self._answered, tuple(islice(self._plans, len(self._plans) - fresh, None))
