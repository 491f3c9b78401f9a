"""A lane's embedding on its rank: which rows it is of, in which order they are added, and what a plan may not ask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import Batch, Limits
from homeserve.wire.records import POOLINGS, LaneRows, NewLane, Plan, PlanKind, Sample, Sampling, pack_ints
from homeserve.worker.lanes import AWAITED, UNKNOWN, Group, LaneRefused, Lanes
from homeserve.worker.pooled import Pooled
from homeserve.worker.pooling import NO_LENGTH, pool

HIDDEN = 5


class Program:
    """Hidden states are a function of the position; `asked` counts."""

    def __init__(self, states: np.ndarray) -> None:
        self.states, self.asked = states, 0

    def hidden(self, batch: Batch) -> np.ndarray:
        self.asked += 1
        return self.states[batch.positions]


def states(rows: int, seed: int = 1) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, HIDDEN)) * 3).astype(np.float32)


def lanes(*, draws: bool = True) -> Lanes:
    return Lanes(Limits(rows=64, logit_rows=2, lanes=3, lane_pages=4), vocab=100, pool_pages=(20,), draws=draws)


def rows(
    lane: int, start: int, count: int, *, sample: bool = False, pages: tuple[int, ...] = (), **more: Any
) -> LaneRows:
    return LaneRows(lane, lane + 10, start, pack_ints(range(count)), pack_ints(pages), sample=sample, **more)


def plan(*of: LaneRows, new: tuple[NewLane, ...] = ()) -> Plan:
    return Plan(1, 0, PlanKind.MIXED, 1, (), new, of)


def run(table: Lanes, work: Plan, program: Any) -> tuple[tuple[Sample, ...], list[Group]]:
    table.check(work)
    table.apply(work)
    batch, groups = table.batch(work.rows)
    for group in groups:
        table.advance(group)
    return pool(table, program, batch, groups) if table.draws else (), groups


def new(lane: int, pooling: str, length: int = 20) -> NewLane:
    return NewLane(lane, lane + 10, length, Sampling(), pooling=pooling)


def wanted(of: np.ndarray, pooling: str) -> np.ndarray:
    exact = of.astype(np.float64)
    vector = {"mean": exact.mean(axis=0), "last": exact[-1], "cls": exact[0]}[pooling]
    return (vector / np.linalg.norm(vector)).astype(np.float32)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_an_embedding_is_of_the_rows_that_its_pooling_names(pooling: str) -> None:
    of, table = states(20), lanes()
    program = Program(of)
    assert run(table, plan(rows(0, 0, 9, pages=(1, 2)), new=(new(0, pooling),)), program)[0] == ()
    assert run(table, plan(rows(0, 9, 4)), program)[0] == ()
    (sample,), (group,) = run(table, plan(rows(0, 13, 7, sample=True)), program)
    np.testing.assert_allclose(np.frombuffer(sample.embedding, "<f4"), wanted(of, pooling), rtol=1e-6)
    assert (sample.token, sample.position, sample.request, sample.failed) == (-1, 20, 10, "")
    assert (group.draws, group.logit_count) == (0, 0)
    assert program.asked == {"mean": 3, "last": 1, "cls": 1}[pooling], "states are asked for where they are needed"


@settings(max_examples=40)
@given(cuts=st.lists(st.integers(1, 19), max_size=6, unique=True), seed=st.integers(0, 99))
def test_chunks_change_no_bit_of_a_mean(cuts: list[int], seed: int) -> None:
    of = states(20, seed) * np.float32(10.0) ** np.random.default_rng(seed).integers(-6, 6, (20, 1)).astype(np.float32)
    whole, parts = Pooled("mean"), Pooled("mean")
    whole.add(of)
    for part in np.split(of, sorted(cuts)):
        parts.add(part)
    assert whole.embedding() == parts.embedding()


def test_lanes_of_a_plan_have_their_own_rows() -> None:
    of, table = states(20), lanes()
    found, groups = run(
        table,
        plan(
            rows(0, 0, 5, sample=True, pages=(1,)),
            rows(1, 0, 3, sample=True, pages=(2,)),
            rows(2, 0, 4, pages=(3,)),
            new=(new(0, "mean"), NewLane(1, 11, 3, Sampling()), new(2, "last")),
        ),
        Program(of),
    )
    assert [(group.draws, group.logit_count) for group in groups] == [(0, 0), (1, 1), (0, 0)]
    (sample,) = found
    np.testing.assert_allclose(np.frombuffer(sample.embedding, "<f4"), wanted(of[:5], "mean"), rtol=1e-6)


def test_a_plan_without_embeddings_asks_for_no_states() -> None:
    program = Program(states(4))
    work = plan(rows(0, 0, 3, sample=True, pages=(1,)), new=(NewLane(0, 10, 3, Sampling()),))
    assert run(lanes(), work, program)[0] == () and program.asked == 0


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_states_without_a_length_fail_their_lane_alone(bad: float) -> None:
    of, table = states(20), lanes()
    of[:3] = bad
    new_ones = (new(0, "last"), new(1, "last"))
    first, second = run(
        table, plan(rows(0, 0, 3, sample=True, pages=(1,)), rows(1, 0, 4, sample=True, pages=(2,)), new=new_ones),
        Program(of),
    )[0]  # fmt: skip
    assert (first.embedding, first.failed) == (b"", NO_LENGTH)
    assert second.embedding and not second.failed


def test_a_rank_that_does_not_draw_awaits_no_token_of_it() -> None:
    table = lanes(draws=False)
    new_ones = (new(0, "mean"), NewLane(1, 11, 3, Sampling()))
    run(table, plan(rows(0, 0, 3, sample=True, pages=(1,)), rows(1, 0, 3, sample=True, pages=(2,)), new=new_ones), None)
    assert (table[0].last_token, table[1].last_token) == (UNKNOWN, AWAITED)
    assert table[0].pooled is None, "and gathers nothing"


@pytest.mark.parametrize(("pooling", "of", "why"), [
    ("max", rows(0, 0, 3, pages=(1,)), "none of mean, last, cls"),
    ("mean", rows(0, 16, 3, pages=(1, 2)), "mean pooling needs the rows before 16"),
    ("cls", rows(0, 16, 3, pages=(1, 2)), "cls pooling needs the rows before 16"),
    ("mean", LaneRows(0, 10, 0, b"", pack_ints([1]), sample=True), "nothing is drawn for a lane with pooling"),
    ("last", rows(0, 0, 3, pages=(1,), prompt_logprobs=0), "neither drafts nor logits"),
])  # fmt: skip
def test_what_cannot_be_is_refused(pooling: str, of: LaneRows, why: str) -> None:
    with pytest.raises(LaneRefused, match=why):
        lanes().check(plan(of, new=(new(0, pooling),)))


def test_the_last_state_may_come_behind_a_cached_prefix() -> None:
    of, table = states(20), lanes()
    (sample,), _ = run(table, plan(rows(0, 16, 4, sample=True, pages=(1, 2)), new=(new(0, "last"),)), Program(of))
    np.testing.assert_allclose(np.frombuffer(sample.embedding, "<f4"), wanted(of, "last"), rtol=1e-6)


def test_rows_of_embeddings_take_no_room_among_logits() -> None:
    table = lanes()
    new_ones = tuple(new(lane, "last") for lane in range(3))
    table.check(plan(*(rows(lane, 0, 3, sample=True, pages=(lane,)) for lane in range(3)), new=new_ones))
