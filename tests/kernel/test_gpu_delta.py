"""Recurrent layers on a card, emulated: sequences over several batches, row by row and by chunks; that a row's bits are
its own; held lanes, and what becomes of them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import gpu_delta
import gpu_recurrent
import numpy as np
import pytest
import simt_rig as rig
from gpu_buffers import check_planes
from gpu_delta import Net, Run, batch_of, close

from backends.gpu.launch import Launch
from backends.gpu.ops import delta
from backends.gpu.ops.delta import DeltaShape

SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "0", 16)
RIGS: tuple[tuple[rig.Vendor, int], ...] = (("cuda", 32), ("hip", 64))
widths = pytest.mark.parametrize(("vendor", "warp"), RIGS, ids=[f"{vendor}{warp}" for vendor, warp in RIGS])


def _named(shape: DeltaShape) -> str:
    return f"{shape.key_heads}-{shape.value_heads}x{shape.key_dim}x{shape.value_dim}{'-tiled' * shape.tiled}"


# key heads, value heads, key dim, value dim, convolution, tiled: real ones are multiples of 16, the rest has odd tails.
SHAPES = (
    DeltaShape(2, 4, 16, 32, 4, 1e-6),
    DeltaShape(2, 4, 16, 32, 4, 1e-6, tiled=True),
    DeltaShape(1, 3, 8, 20, 2, 1e-6),
    DeltaShape(3, 3, 7, 5, 4, 1e-6, tiled=True),
    DeltaShape(1, 1, 64, 17, 1, 1e-6),
    DeltaShape(1, 2, 100, 48, 3, 1e-6, tiled=True),
    DeltaShape(1, 1, 128, 40, 4, 1e-6),
    DeltaShape(1, 1, 190, 33, 4, 1e-6),
)
PLANS = (
    batch_of((1, 0, 5), (0, 0, 1), (2, 0, 40)),
    batch_of((0, 1, 1), (2, 40, 1), (1, 5, 2)),
    batch_of((2, 41, 65), (1, 7, 3)),
    batch_of((1, 0, 4), (2, 106, 2)),
)
"""Prompts and single rows of three sequences; lane 1 begins anew in the last, over what its slot holds."""


def run(launches: Sequence[Launch], vendor: rig.Vendor, warp: int, *, backwards: bool = False) -> None:
    for launch in launches:
        rig.load(launch.symbol.file, vendor, warp).run(launch, backwards=backwards)


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint32)


@widths
@pytest.mark.parametrize("chunk_least", [0, 33, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=_named)
def test_sequences_equal_the_reference(vendor: rig.Vendor, warp: int, shape: DeltaShape, chunk_least: int) -> None:
    """All rows one by one, long runs by chunks, all by chunks."""
    net = Net(np.random.default_rng(SEED), shape)
    for index, plan in enumerate(PLANS):
        step = net.run(plan, chunk_least=chunk_least, wider=3 * (index % 2))
        run(step.launches, vendor, warp, backwards=bool(index % 2))
        close(step.out, step.want, 2e-5)
    net.check_states(2e-5)


@widths
@pytest.mark.parametrize("name", sorted(gpu_recurrent.CASES))
def test_each_case_equals_the_reference(vendor: rig.Vendor, warp: int, name: str) -> None:
    for seed in (SEED, SEED + 1):
        case = gpu_recurrent.CASES[name](np.random.default_rng(seed), warp)
        run(case.launches, vendor, warp, backwards=bool(seed % 2))
        case.check()


@widths
def test_gates_beyond_all_bounds_stay_finite(vendor: rig.Vendor, warp: int) -> None:
    """Decay to nothing and to nearly one, by rows and by chunks."""
    for chunk_least in (0, 1):
        net = Net(np.random.default_rng(SEED), SHAPES[0])
        for plan in PLANS:
            mixed, z, beta, alpha = net.rows(len(plan.lanes))
            step = net.run(plan, (mixed, z, 100 * beta, 100 * alpha), chunk_least=chunk_least)
            run(step.launches, vendor, warp)
            close(step.out, step.want, 5e-5)


@widths
def test_keys_that_all_point_one_way(vendor: rig.Vendor, warp: int) -> None:
    """The worst that a chunk's system of equations can be: every row changes what the one before wrote."""
    net = Net(np.random.default_rng(SEED), DeltaShape(1, 1, 16, 16, 1, 1e-6))
    plan = batch_of((1, 0, 64))
    mixed, z, beta, alpha = net.rows(64)
    mixed[:, :32] = mixed[0, :32]
    step = net.run(plan, (mixed, z, np.full_like(beta, 9), np.full_like(alpha, -9)), chunk_least=1)
    run(step.launches, vendor, warp)
    close(step.out, step.want, 1e-4)
    net.check_states(1e-4)


def _sequence(
    net: Net, given: Sequence[np.ndarray], cuts: Sequence[int], chunk_least: int, vendor: rig.Vendor, warp: int
) -> np.ndarray:
    """`given` rows of lane 1 in pieces, every other one beside other lanes."""
    outs, first = [], 0
    for index, rows in enumerate(cuts):
        parts = [each[first : first + rows] for each in given]
        beside = ((0, 0, 2), (1, first, rows)) if index % 2 else ((1, first, rows),)
        if index % 2:
            parts = [np.concatenate([more, each]) for more, each in zip(net.rows(2), parts, strict=True)]
        step = net.run(batch_of(*beside), parts, chunk_least=chunk_least, oracle=False)
        run(step.launches, vendor, warp)
        outs.append(step.out[-rows:])
        first += rows
    return np.concatenate(outs)


@widths
def test_a_row_has_the_same_bits_however_it_is_cut_and_batched(vendor: rig.Vendor, warp: int) -> None:
    """Row by row at any cut; by chunks where a prompt is cut at multiples of 64."""
    for shape in (SHAPES[1], SHAPES[3]):
        given = Net(np.random.default_rng(SEED), shape).rows(150)
        for chunk_least, all_cuts in ((0, ((1, 2, 3, 30, 114), (3, 1, 1, 145))), (20, ((64, 86), (128, 22)))):
            net = Net(np.random.default_rng(SEED), shape)
            whole = _sequence(net, given, (150,), chunk_least, vendor, warp)
            state = net.states[0].copy()
            for cuts in all_cuts:
                net = Net(np.random.default_rng(SEED), shape)
                got = _sequence(net, given, cuts, chunk_least, vendor, warp)
                assert np.array_equal(bits(got), bits(whole)), (chunk_least, cuts)
                assert np.array_equal(bits(net.states[0]), bits(state)), "lane 1 has slot 0"


def _held(net: Net, plan: gpu_delta.Batch, given: Sequence[np.ndarray], vendor: rig.Vendor, warp: int) -> Run:
    step = net.run(plan, given, oracle=False)
    run(step.launches, vendor, warp)
    return step


@widths
@pytest.mark.parametrize("begin", [0, 9])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3], SHAPES[6]], ids=_named)
def test_what_counts_of_a_held_lane_leaves_the_bits_of_a_run_of_it_alone(
    vendor: rig.Vendor, warp: int, shape: DeltaShape, begin: int
) -> None:
    """For every number of rows; meanwhile nothing of the slot is written, and the outputs are those of a plain run."""
    start = batch_of((0, 0, 9), (1, 0, 5))
    first = Net(np.random.default_rng(SEED), shape).rows(14)
    rows = Net(np.random.default_rng(SEED + 1), shape).rows(7)
    for counted in range(6):
        held, plain = (Net(np.random.default_rng(SEED), shape) for _ in range(2))
        for net in (held, plain):
            _held(net, start, first, vendor, warp)
        before = held.states.copy()
        plan = batch_of((1, 5, 2), (0, begin, 5), hold=(7, -1, -1))
        step = _held(held, plan, rows, vendor, warp)
        assert np.array_equal(bits(held.states[4]), bits(before[4])), "lane 0 has slot 4"
        launch, _accepts = held.accept(plan, [(0, counted)])
        run([launch], vendor, warp)
        alone = _held(plain, batch_of((1, 5, 2)), [each[:2] for each in rows], vendor, warp)
        assert np.array_equal(bits(step.out[:2]), bits(alone.out))
        if counted:
            alone = _held(plain, batch_of((0, begin, counted)), [each[2 : 2 + counted] for each in rows], vendor, warp)
            assert np.array_equal(bits(step.out[2 : 2 + counted]), bits(alone.out))
        assert np.array_equal(bits(held.states), bits(plain.states)), counted


@widths
def test_the_result_is_quantised_as_the_next_matrix_reads_it(vendor: rig.Vendor, warp: int) -> None:
    net = Net(np.random.default_rng(SEED), SHAPES[0])
    step = net.run(batch_of((2, 0, 3), (0, 0, 1)), quantised=True)
    run(step.launches, vendor, warp)
    close(step.out, step.want, 2e-5)
    check_planes(step.planes, step.out.astype(np.float64))


def test_chunks_end_where_positions_are_multiples_of_64() -> None:
    found = delta.lane_runs(batch_of((2, 60, 140), (0, 7, 31), (1, 64, 40)), 4, 32)
    assert found.runs[:, :6].tolist() == [
        [140, 31, 4, -1, -1, 7],
        [171, 40, 0, -1, 4, 64],
        [0, 140, 2, -1, 0, 60],
        [0, 0, 0, -1, -1, 0],
    ]
    assert found.chunks.tolist() == [[2, 0, 4, 0], [2, 4, 64, 0], [2, 68, 64, 0], [2, 132, 8, 0], [1, 171, 40, 0]]
    assert found.rows == 31


def test_of_many_prompts_the_longest_go_by_chunks() -> None:
    lanes = delta.CHUNKED_LANES + 3
    counts = [32 + 5 * (lane % 4) for lane in range(lanes)]
    runs = [(lane, 63, count) for lane, count in enumerate(counts)]
    found = delta.lane_runs(batch_of(*runs, states=range(lanes)), lanes, 32)
    chunked = found.runs[:, 4] >= 0
    assert chunked.sum() == delta.CHUNKED_LANES and found.rows == 32 == max(np.array(counts)[~chunked])
    assert len(found.chunks) <= delta.most_chunks(sum(counts), lanes) < delta.CHUNKED_LANES * 3 + sum(counts) // 64
    assert set(found.chunks[:, 0]) == set(np.flatnonzero(chunked))


def test_held_lanes_go_row_by_row() -> None:
    found = delta.lane_runs(batch_of((0, 0, 40), (1, 0, 40), hold=(-1, 3, -1)), 3, 32)
    assert found.runs[:2, 3:5].tolist() == [[-1, 0], [3, -1]] and found.rows == 40
    assert delta.lane_runs(batch_of((0, 0, 400)), 3, 0).rows == 400


def test_heads_that_no_kernel_has_registers_for_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 256"):
        DeltaShape(1, 1, 257, 16, 4, 1e-6)
