"""Who was busy when: of the last plans, when each rank began, how long it computed and how long it waited. Pure.

A rank's time on a plan begins when it takes the plan and has two parts: waiting for other ranks inside the plan, and
computing. Which came when within the plan is not told; a rank of the pipeline layout waits first, for its input.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from homeserve.wire.records import LaneRows, PlanKind, Result

PLANS_KEPT = 256


@dataclass(frozen=True)
class PlanTimes:
    """One plan. `ranks`: (rank, began, busy, waited) of each that ran it, in microseconds; `began` by the system's
    monotonic clock, `busy` without `waited`."""

    life: int
    """How many lives of the fleet ended before this one: `seq` starts again with each."""
    seq: int
    kind: PlanKind
    rows: int
    prompt_rows: int
    ranks: tuple[tuple[int, int, int, int], ...]
    drafts: int = 0
    drawn: int = 0
    """Tokens that it drew: with drafts more than rows that decode."""

    def as_json(self) -> dict[str, Any]:
        ranks = [
            [rank, began / 1000, round(busy / 1000, 3), round(waited / 1000, 3)]
            for rank, began, busy, waited in self.ranks
        ]
        head = {"life": self.life, "seq": self.seq, "kind": self.kind.name.lower()}
        rows = {"rows": self.rows, "prompt_rows": self.prompt_rows, "drafts": self.drafts, "drawn": self.drawn}
        return {**head, **rows, "ranks": ranks}


class Timeline:
    """The last `PLANS_KEPT` plans with rows, in the order of their answers."""

    def __init__(self) -> None:
        self._flight: dict[int, tuple[PlanKind, int, int, int]] = {}
        self._plans: deque[PlanTimes] = deque(maxlen=PLANS_KEPT)
        self._life = 0
        self._answered = 0

    def issued(self, seq: int, kind: PlanKind, rows: Sequence[LaneRows], prompt_rows: int | None = None) -> None:
        """`prompt_rows`: as many of the rows; without it, those that bring tokens."""
        if rows:
            prompt = sum(len(each.tokens) // 4 for each in rows) if prompt_rows is None else prompt_rows
            drafts = sum(each.drafts for each in rows)
            self._flight[seq] = (kind, sum(max(1, len(each.tokens) // 4) for each in rows), prompt, drafts)

    def answered(self, seq: int, results: Sequence[Result]) -> None:
        plan = self._flight.pop(seq, None)
        if plan is not None:
            ranks = tuple((r.rank, r.began_us, max(0, r.busy_us - r.waited_us), r.waited_us) for r in results)
            kind, rows, prompt, drafts = plan
            drawn = sum(sample.token >= 0 for result in results[-1:] for sample in result.samples)
            self._plans.append(PlanTimes(self._life, seq, kind, rows, prompt, ranks, drafts, drawn))
            self._answered += 1

    def lost(self) -> None:
        """The fleet's life ended."""
        self._flight.clear()
        self._life += 1

    def recent(self) -> tuple[PlanTimes, ...]:
        """Oldest first."""
        return tuple(self._plans)

    def since(self, answered: int) -> tuple[int, tuple[PlanTimes, ...]]:
        """How many were answered so far, and those behind the first `answered` of them that are still kept."""
        fresh = min(self._answered - answered, len(self._plans))
        return self._answered, tuple(islice(self._plans, len(self._plans) - fresh, None))
