"""Attention divided over ranks by heads and by rows is the undivided one, whoever keeps which row."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from ranks import Group, on_paper
from split_attention import Case, bind_rank, bind_whole, random_case, rank_batch, whole_batch

from backends.base import Batch, OpenOptions
from backends.quant import QuantType
from backends.reference.backend import ReferenceBackend
from backends.reference.compute import attend, attend_some, merge_parts
from backends.reference.program import ReferenceProgram

SEEDS = range(28)
DOUBLE, SINGLE = "float64", "float32"
ERROR = {DOUBLE: 1e-12, SINGLE: 5e-6}


@cache
def device(dtype: str) -> ReferenceBackend:
    return ReferenceBackend(OpenOptions(extra={"dtype": dtype}))


def whole(case: Case, dtype: str) -> list[np.ndarray]:
    """What the undivided layer gives for each plan."""
    program = bind_whole(case, device(dtype), kind_of(dtype))
    assert isinstance(program, ReferenceProgram)
    return [program.run_from(whole_batch(case, plan), {})["out"] for plan in range(len(case.plans))]


def divided(case: Case, dtype: str, group: Group) -> list[list[np.ndarray]]:
    """What each rank gives for each plan."""
    programs = [bind_rank(case, device(dtype), acts, kind_of(dtype)) for acts in group.acts]

    def step(rank: int) -> list[np.ndarray]:
        program = programs[rank]
        assert isinstance(program, ReferenceProgram)
        return [program.run_from(rank_batch(case, plan, rank), {})["out"] for plan in range(len(case.plans))]

    return group.together(step)


def kind_of(dtype: str) -> QuantType:
    return QuantType.F64 if dtype == DOUBLE else QuantType.F32


@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE])
@pytest.mark.parametrize("seed", SEEDS)
def test_divided_attention_is_the_undivided_one(seed: int, dtype: str) -> None:
    case = random_case(seed)
    expected = whole(case, dtype)
    for gave in divided(case, dtype, on_paper(case.ranks, seed=seed)):
        for wanted, got in zip(expected, gave, strict=True):
            assert got.dtype == np.dtype(dtype)
            assert np.abs(got - wanted).max() < ERROR[dtype]


def test_the_cases_are_those_that_are_meant() -> None:
    cases = [random_case(seed) for seed in SEEDS]
    assert any(0 in case.own for case in cases)
    assert any(len(case.owners(lane)) < case.ranks for case in cases for lane in range(3))
    assert any(len(case.owners(lane)) == case.ranks > 1 for case in cases for lane in range(3))
    for vector in ((30, 17, 17), (28, 26, 20)):
        assert any(case.vector == vector and max(case.lengths) < sum(vector) for case in cases)
    for features in ((False, False), (True, False), (False, True), (True, True)):
        assert any((case.sinks, case.gated) == features for case in cases)
    assert {bool(case.window) for case in cases} == {bool(case.softcap) for case in cases} == {True, False}


def test_every_rank_gives_the_same_bits() -> None:
    case = random_case(3)
    first, *others = divided(case, SINGLE, on_paper(case.ranks))
    assert others
    for other in others:
        assert all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_request_on_one_rank_alone_has_the_same_bits_as_undivided() -> None:
    """Where the other ranks have no row, their -inf takes nothing away and adds nothing."""
    case = random_case(1)
    case = replace(case, pages=((0, 1), (4, 5), (8, 9)), lengths=(9, 30, 31), sinks=False, softcap=0.0)
    case = replace(case, plans=(((0, 0, 9), (2, 0, 16)), ((1, 0, 30),), ((2, 16, 31),)))
    assert case.vector == (2, 1, 1) and all(case.owners(lane) == {0} for lane in range(3))
    for gave in divided(case, DOUBLE, on_paper(3)):
        for wanted, got in zip(whole(case, DOUBLE), gave, strict=True):
            assert np.abs(got - wanted).max() < 1e-15


def test_a_plan_without_rows_exchanges_nothing() -> None:
    case = random_case(2)
    group = on_paper(case.ranks)
    programs = [bind_rank(case, device(SINGLE), acts) for acts in group.acts]
    none, table = np.zeros(0, np.int32), np.zeros((1, 3, 4), np.int32)
    empty = Batch(none, none, np.zeros((1, 0), np.int32), none, table, none)
    for logits in group.run(programs, empty):
        assert logits.shape == (0, case.heads * case.head_dim)
    assert not any(acts.counts() for acts in group.acts)


# --------------------------------------------------------------------------------------------------------- the merge


@pytest.mark.parametrize("shift", [-2000.0, -100.0, 0.0, 100.0, 2000.0])
@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE])
def test_the_merge_is_exact_however_large_the_scores_are(shift: float, dtype: str) -> None:
    """All scores moved by one number leave a softmax as it is, though their exp may be no float at all."""
    random = np.random.default_rng(4)
    q, k, v = random.standard_normal((4, 8)), random.standard_normal((11, 2, 8)), random.standard_normal((11, 2, 8))
    wanted = attend(q, k, v, 0.4)
    parts = [attend_some(q, k[at], v[at], 0.4) for at in (slice(0, 4), slice(4, 4), slice(4, 5), slice(5, 11))]
    outs = np.stack([out for out, _ in parts])[None].astype(dtype)
    lses = np.stack([lse + shift for _, lse in parts])[None].astype(dtype)
    got = merge_parts(outs, lses)
    assert np.abs(got[0] - wanted).max() < {DOUBLE: 1e-12, SINGLE: 2e-3 if abs(shift) > 1000 else 1e-4}[dtype]


def test_a_sink_takes_its_share_of_the_merged_sum() -> None:
    """By the formula: two ranks and a sink, whose logits are ln 3, ln 5 and ln 2."""
    outs = np.array([[[[1.0, 10.0]], [[2.0, 20.0]]]])
    lses = np.log(np.array([[[3.0], [5.0]]]))
    merged = merge_parts(outs, lses, np.log(np.array([2.0])))
    assert merged[0, 0] == pytest.approx([(3 * 1 + 5 * 2) / 10, (30 + 100) / 10], rel=1e-14)
    assert merge_parts(outs, lses)[0, 0] == pytest.approx([13 / 8, 130 / 8], rel=1e-14)


@pytest.mark.parametrize("sinks", [None, np.array([0.5, -3.0])])
def test_without_any_row_on_any_rank_the_result_is_zero(sinks: np.ndarray | None) -> None:
    empty = attend_some(np.ones((2, 4)), np.zeros((0, 1, 4)), np.zeros((0, 1, 4)), 1.0)
    assert not empty[0].any() and np.isneginf(empty[1]).all()
    outs, lses = (np.stack([part, part, part])[None] for part in empty)
    assert not merge_parts(outs, lses, sinks).any()
