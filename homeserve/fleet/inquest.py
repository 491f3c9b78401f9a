"""From the first sign that a life cannot go on to what is said of it: who is named, for which plan, on what evidence.

    a process ended, a report is damaged, a plan was refused ──▶ the name is known ─────────┐
    nobody moves for the plan timeout ──▶ look ──┬──▶ whom do they all wait for? ───▶ name ─┼─▶ folder ─▶ Loss
    a rank waited for another in vain ──▶ look ──┘                (blame)                   ┘

Looking comes first and takes everyone, because the ranks change nothing while they wait for each other, and one that
was stopped goes on once it was looked at. The first name that is found stays; a rank that dies or refuses while others
only starve is a name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from homeserve.fleet.blame import Culprit, Wait, culprit, standing
from homeserve.fleet.book import Debt, Late, PlanBook
from homeserve.fleet.capture import STOPPED, Captures, RankEvidence, Sight
from homeserve.fleet.spec import Loss

SETTLE_S = 1.0
"""After a rank gave up waiting: for the word of another one, or its end, to get here."""


class Inquest:
    """One life's."""

    def __init__(self, book: PlanBook, captures: Captures) -> None:
        self.verdict: asyncio.Future[Loss] = asyncio.get_running_loop().create_future()
        """Who is named; the evidence is added afterwards."""
        self._book = book
        self._captures = captures
        self._wait_s = SETTLE_S
        self._waits: dict[int, Wait] = {}
        """What ranks said that gave up,"""
        self._stood: dict[int, Wait] = {}
        """and what the memory of their exchanges says."""
        self._halted: frozenset[int] | None = None
        """Ranks that cannot run and owe an answer, once they were looked at;"""
        self._stopped: frozenset[int] = frozenset()
        """those of them that a signal has stopped."""
        self._owed: dict[int, Debt] = {}
        """What each owed before it was looked at: one that was stopped goes on for its stack."""
        self._first = -1
        self._silence = ""

    def name(self, loss: Loss) -> None:
        """This is the one. What comes later is a consequence."""
        if not self.verdict.done():
            self.verdict.set_result(loss)

    def has_heard(self, rank: int) -> bool:
        """Rank `rank` has said whom it waited for."""
        return rank in self._waits

    def accuse(self, rank: int, wait: Wait) -> None:
        """Rank `rank` waited in vain."""
        self._waits.setdefault(rank, wait)
        if self._first < 0:
            self._first = rank
        self._judge()

    def miss(self, late: Late) -> None:
        """Nobody moves."""
        self._first, self._silence = late.rank, late.text
        self._wait_s = 0.0
        self._judge()

    async def run(
        self, ranks: Sequence[RankEvidence], rest: Callable[[], tuple[list[dict[str, Any]], dict[str, Any]]]
    ) -> Loss:
        """Look, wait until somebody is named, write the folder. `rest` gives plans and rings."""
        plans, rings = rest()
        owed = {rank.rank: self._book.debt(rank.rank) for rank in ranks}
        self._owed = {rank: debt for rank, debt in owed.items() if debt is not None}
        if rings["acts"] is not None:
            self._stood = standing(rings["acts"], {rank: debt.seq for rank, debt in self._owed.items()})
        sights = await self._captures.look(ranks)
        ended = {rank.rank for rank in ranks if rank.pid is None}
        stopped = {sight.rank for sight in sights if sight.state == STOPPED}
        self._halted = frozenset((ended | stopped) & self._owed.keys())
        self._stopped = self._halted - ended
        self._judge()
        if not self.verdict.done():
            await asyncio.wait({self.verdict}, timeout=self._wait_s)
        if not self.verdict.done():
            self._judge(last=True)
        loss = self.verdict.result()
        folder = await self._captures.write(self._event(loss), plans, _with_states(rings, sights), sights)
        return replace(loss, folder=folder)

    def _judge(self, *, last: bool = False) -> None:
        """Name somebody if it is certain who, or if this is the last word."""
        if self._halted is None or self._first < 0 or self.verdict.done():
            return
        answered = [self._book.last_seq(rank) for rank in range(self._book.ranks)]
        found = culprit(self._first, self._stood | self._waits, self._halted, answered)
        if found.certain or last:
            self.name(self._loss(found))

    def _loss(self, found: Culprit) -> Loss:
        halted = found.rank in (self._halted or ())
        debt = self._owed.get(found.rank) if halted else self._book.debt(found.rank)
        stopped = found.rank in self._stopped
        words = ["was stopped"] if stopped else ["has ended"] if halted else []
        if found.waits and found.waits[-1][1].peer == found.rank:
            waiting, wait = found.waits[-1]
            words.append(f"kept rank {waiting} waiting in plan {wait.seq} ({wait.reason})")
        elif found.rank != self._first:
            words.append("kept the others waiting")
        if self._silence:
            words.append(self._silence)
        owed = f" while it owed {debt.text}" if debt is not None else ""
        seq = debt.seq if debt is not None else found.waits[-1][1].seq if found.waits else None
        return Loss(found.rank, " and ".join(words) + owed, seq=seq, outside=stopped)

    def _event(self, loss: Loss) -> dict[str, Any]:
        waits = [
            {"rank": rank, "seq": wait.seq, "for": wait.peer, "reason": wait.reason}
            for rank, wait in sorted((self._stood | self._waits).items())
        ]
        return {"rank": loss.rank, "seq": loss.seq, "why": f"rank {loss.rank} {loss.why}", "waits": waits}


def _with_states(rings: dict[str, Any], sights: Sequence[Sight]) -> dict[str, Any]:
    states = {sight.rank: sight.state for sight in sights}
    ranks = [{**rank, "state": states.get(rank["rank"], "")} for rank in rings["ranks"]]
    return {**rings, "ranks": ranks}
