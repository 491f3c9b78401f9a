"""A census: what the engine's pools hold, beside what the ranks know of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from homeserve.engine.pages import PageCensus
from homeserve.engine.scheduler import Scheduler
from homeserve.engine.states import StateCensus
from homeserve.wire.records import Result


@dataclass(frozen=True)
class Census:
    """What the engine's side was when the plan was issued."""

    pages: tuple[PageCensus, ...]
    of_rank: list[tuple[PageCensus, ...]]
    """What each rank keeps of them; empty where every rank has all."""
    states: StateCensus | None
    holdings: list[tuple[int, str, int]]
    idle: bool

    @staticmethod
    def of(scheduler: Scheduler) -> Census:
        return Census(
            scheduler.census(),
            scheduler.census_by_rank(),
            scheduler.state_census(),
            scheduler.holdings(),
            scheduler.idle,
        )

    def answer(self, results: Sequence[Result], shared_memory: list[str]) -> dict[str, Any]:
        """The JSON of `/v1/homeserve/census`: `ok` when nothing is missing and both sides agree."""
        keys = {lane: request for lane, request, _ in self.holdings}
        held = {lane: count for lane, _, count in self.holdings}
        ranks = []
        for result in results:
            launches = {"launches": None if result.launches is None else dict(result.launches)}
            for pool in result.census:
                leaks = [
                    {"page": None, "request": keys.get(lane, str(request)), "pages": count - held.get(lane, 0)}
                    for lane, request, count in pool.lanes
                    if count > held.get(lane, 0)
                ]
                kept = self.of_rank[result.rank] if self.of_rank else self.pages
                for pages in kept:  # a table is as long in every group: what leaks is told once
                    told = [] if pages.window else leaks
                    ranks.append({"rank": result.rank, "pool": pool.pool, **asdict(pages), "leaks": told} | launches)
            if self.states is not None:
                entry = {"rank": result.rank, "pool": "state", **asdict(self.states), "protected": 0, "leaks": []}
                ranks.append(entry | launches)
        whole = all(p.free + p.live + p.cached + p.protected == p.capacity for p in self.pages)
        clean = whole and not any(r["leaks"] for r in ranks)
        live = sum(pages.live + pages.protected for pages in self.pages)
        live += self.states.live if self.states is not None else 0
        return {
            "schema": 1,
            "idle": self.idle,
            "ok": clean and not (self.idle and live),
            "ranks": ranks,
            "shared_memory": shared_memory,
        }


def lanes_problem(lanes: Mapping[int, tuple[int, int]], results: Sequence[Result]) -> str:
    """How the ranks' lanes differ from `lanes` (lane -> sequence, entries of its table); empty where they do not."""
    for result in results:
        if not result.census:
            return f"rank {result.rank} counts no pool"
        for pool in result.census:
            found = {lane: (request, pages) for lane, request, pages in pool.lanes}
            for lane in sorted(found.keys() | lanes.keys()):
                if found.get(lane) != lanes.get(lane):
                    return f"rank {result.rank}, lane {lane}: {found.get(lane)} of {lanes.get(lane)} (request, pages)"
    return ""
