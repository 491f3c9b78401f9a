"""One of three real ranks fails in the middle of a plan with drafts: the loss names it, and the next life answers the
same. (Each plan has exchanges after every step of drafting, so the others soon wait for the one that is gone.)
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "flip"))

from flip_fleet import PATIENCE_S, Play, poison

from homeserve.fleet import Fleet
from homeserve.wire.records import LaneRows, PlanKind, pack_ints

Run = Callable[[Callable[[], Awaitable[None]]], None]
COUNTER = Path(__file__).parents[1] / "data" / "counter.gguf"
RANGES = ((0, 2), (2, 4), (4, 6))
SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
SEED = int(os.environ.get("HOMESERVE_TEST_SEED", "0") or "0", 16)
RANKS, DRAFTS, COUNT = 3, 3, 21
WANTED = b" 87 88 89 90 91 92 93"
STEPS = (("draft", 1), ("draft", 6), ("verify", 1), ("verify", 4))
"""The second step of a second round; before the rows of a first one, and before those that count of a second."""


def cases() -> list[tuple[int, str, int, str]]:
    every = [(rank, *step, action) for rank in range(RANKS) for step in STEPS for action in ("kill", "refuse")]
    chance = random.Random(SEED)
    actions = chance.sample(("kill", "kill", "refuse", "refuse"), len(STEPS))
    drawn = [(chance.randrange(RANKS), *step, action) for step, action in zip(STEPS, actions, strict=True)]
    return every if SLOW else drawn


def fleet(captures: Path, **more: Any) -> Play:
    more = {"layout": "tensor", "drafts": DRAFTS, "kv_type": "f32"} | more
    play = Play(COUNTER, RANKS, ranges=RANGES, captures=str(captures), **more)
    play.spec = replace(play.spec, plan_timeout_s=2.0)  # those that wait for a rank that said no are given up soon
    play.fleet = Fleet(play.spec, play)
    return play


async def counted(play: Play) -> bytes:
    """Of a request that drafts beside one that does not."""
    play.begin(1, 0, list(b"count 86:"))
    play.begin(2, 2, list(b"count 730:"), temperature=0.9, seed=3)
    await play.run(64)
    while len(play.answer(1)) < COUNT:
        await play.run(64, drafts={1: min(DRAFTS, COUNT - len(play.answer(1)) - 1)})
    return bytes(play.answer(1))


@pytest.mark.parametrize(("rank", "step", "nth", "action"), cases())
def test_a_rank_lost_in_a_round_is_named_and_the_next_life_answers_the_same(
    run_once: Run, tmp_path: Path, rank: int, step: str, nth: int, action: str
) -> None:
    async def main() -> None:
        async with fleet(tmp_path, fault=f"rank={rank},step={step},nth={nth},action={action}") as play:
            with pytest.raises(AssertionError):
                await counted(play)
            (loss,) = play.losses
            assert loss.rank == rank, loss
            assert action == "kill" or f"({step}, {nth})" in loss.why, loss
            await play.again()
            assert await counted(play) == WANTED[:COUNT] and play.requests[1].rounds[0] == (3, 3)

    run_once(main)


def test_a_rank_that_draws_nan_ends_the_life_at_once(run_once: Run, tmp_path: Path) -> None:
    """It tells nobody what it drew. The others, which would wait for that longer than this test does, are not waited
    for; the next life answers the same."""

    async def main() -> None:
        play = fleet(tmp_path)
        play.spec = replace(play.spec, plan_timeout_s=2 * PATIENCE_S)
        play.fleet = Fleet(play.spec, play)
        async with play:
            play.begin(1, 0, list(b"count 86:"))
            await play.run(64)
            await play.run(1, drafts={1: DRAFTS})
            assert play.requests[1].rounds == [(DRAFTS, DRAFTS)]
            assert isinstance(play.fleet, Fleet)
            ((pid, regions),) = [(pid, regions) for rank, pid, regions in play.fleet.regions() if rank == RANKS - 1]
            poison((pid, address, size) for line, address, size in regions if line == "weights")
            with pytest.raises(AssertionError):
                await play.run(1, drafts={1: DRAFTS})
            (loss,) = play.losses
            assert loss.rank == RANKS - 1 and "NaN" in loss.why, loss
            await play.again()
            assert await counted(play) == WANTED[:COUNT]

    run_once(main)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_slow_rank_in_a_round_is_no_loss(run_once: Run, tmp_path: Path, rank: int) -> None:
    async def main() -> None:
        async with fleet(tmp_path, fault=f"rank={rank},step=draft,nth=5,action=delay:300") as play:
            assert await counted(play) == WANTED[:COUNT] and not play.losses

    run_once(main)


def test_drafts_in_the_pipeline_layout_of_several_ranks_are_refused_with_the_reason(
    run_once: Run, tmp_path: Path
) -> None:
    async def main() -> None:
        async with fleet(tmp_path, layout="pipeline") as play:
            play.begin(1, 0, list(b"count 86:"))
            await play.run(64)
            known = play.requests[1].tokens[-1]
            rows = LaneRows(0, 1, 9, pack_ints([known]), sample=True, drafts=1)
            play.fleet.issue(PlanKind.MIXED, epoch=0, rows=(rows,))
            with pytest.raises(AssertionError):
                await play.answered(-1)
            assert "1 drafts, and nothing is drafted here in this layout" in play.losses[0].why

    run_once(main)


def test_steps_of_drafting_are_timed_on_every_rank_and_the_block_is_counted_where_it_lies(
    run_once: Run, tmp_path: Path
) -> None:
    """In the pipeline layout on the last rank, in the tensor layout on all of them."""

    async def main() -> None:
        async with fleet(tmp_path) as play:
            play.begin(1, 0, list(b"count 86:"))
            await play.run(64)
            known, pages = play.requests[1].tokens[-1], pack_ints([])
            rows = LaneRows(0, 1, 9, pack_ints([known]), pages, sample=True, drafts=3)
            results = await play.answered(play.fleet.issue(PlanKind.MIXED, epoch=0, rows=(rows,)))
            assert all(0 < result.draft_us < result.busy_us for result in results)
            play.requests[1].told = False
            census = await play.answered(play.fleet.issue(PlanKind.CENSUS, epoch=0))
            assert [[pool.pool for pool in result.census] for result in census] == [["kv", "draft"]] * RANKS
            assert all(pool.lanes == ((0, 1, 1),) for result in census for pool in result.census)
            await play.flip()
            census = await play.answered(play.fleet.issue(PlanKind.CENSUS, epoch=play.epoch))
            assert [[pool.pool for pool in result.census] for result in census] == [["kv"], ["kv"], ["kv", "draft"]]

    run_once(main)
