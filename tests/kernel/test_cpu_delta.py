"""Delta nets against the reference backend in double precision: every shape, chunking, batch and slot."""

from __future__ import annotations

from dataclasses import replace

import kernel_rig as rig
import numpy as np
import pytest

from backends.base import (
    Batch,
    Buffer,
    DeltaNet,
    Linear,
    LinearPart,
    Op,
    PoolParts,
    StateLayer,
    StatePart,
    StatePool,
    Weight,
)
from backends.cpu.backend import CpuProgram
from backends.cpu.memory import floats_at

# key heads, value heads, key dim, value dim, convolution, tiled: real ones are multiples of 16, the rest has odd tails.
SHAPES = (
    (2, 4, 16, 32, 4, False),
    (2, 4, 16, 32, 4, True),
    (1, 3, 8, 20, 2, False),
    (3, 3, 7, 5, 4, True),
    (2, 6, 33, 48, 3, True),
    (1, 1, 64, 17, 1, False),
)
LANES = 4
TOKENS = 64

Shape = tuple[int, int, int, int, int, bool]


class Case:
    """One delta net whose inputs are rows of tables: token t brings row t of each."""

    def __init__(self, shape: Shape, seed: int = 0, layers: int = 1) -> None:
        key_heads, value_heads, key_dim, value_dim, kernel, tiled = shape
        random = np.random.default_rng(seed)
        channels, values = 2 * key_heads * key_dim + value_heads * value_dim, value_heads * value_dim
        self.views: list[rig.TensorView] = []
        self.ops: list[Op] = []

        def given(name: str, width: int, size: float = 1.0) -> Buffer:
            feed, table, buffer = rig.feed(name, size * random.standard_normal((TOKENS, width)).astype(np.float32))
            self.ops.append(feed)
            self.views.append(table)
            return buffer

        def weight(name: str, values: rig.F32) -> Weight:
            self.views.append(rig.table_of(name, values))
            return Weight(name, *values.shape)

        def normal(rows: int, cols: int) -> rig.F32:
            return random.standard_normal((rows, cols)).astype(np.float32)

        mixed, z = given("mixed", channels), given("z", values)
        beta, alpha = given("beta", value_heads, 2.0), given("alpha", value_heads, 3.0)
        for layer in range(layers):
            self.out = Buffer(f"out{layer}", values)
            self.ops.append(
                DeltaNet(
                    *(mixed, z, beta, alpha, self.out, layer),
                    conv=weight(f"conv{layer}", normal(channels, kernel)),
                    dt_bias=weight(f"dt{layer}", normal(1, value_heads)),
                    a=weight(f"a{layer}", -np.exp(normal(1, value_heads) - 1)),
                    norm=weight(f"norm{layer}", normal(1, value_dim)),
                    key_heads=key_heads,
                    value_heads=value_heads,
                    key_dim=key_dim,
                    value_dim=value_dim,
                    kernel=kernel,
                    eps=1e-6,
                    tiled=tiled,
                )
            )
        self.states = StatePool((StateLayer(channels, kernel, value_heads, key_dim, value_dim),) * layers, 6)

    def bind(self, level: str, threads: int = 2) -> CpuProgram:
        return rig.bind(rig.backend(level, threads), self.ops, self.views, states=self.states, lanes=LANES)

    def oracle(self) -> rig.Oracle:
        return rig.Oracle(self.ops, self.views, states=self.states)


def batch_of(*runs: tuple[int, int, int], states: tuple[int, ...] = (5, 0, 3, 1)) -> Batch:
    """Runs of (lane, first position, rows). The token of a row is told by lane and position, so that a sequence is the
    same however it is cut."""
    lanes, positions = [], []
    for lane, first, rows in runs:
        lanes += [lane] * rows
        positions += range(first, first + rows)
    tokens = [(17 * lane + position) % TOKENS for lane, position in zip(lanes, positions, strict=True)]
    number = [np.array(values, np.int32) for values in (tokens, positions, positions, lanes)]
    number[2] = number[2][None]
    tables = np.zeros((1, LANES, 4), np.int32)
    return Batch(*number, tables, np.zeros(0, np.int32), np.array(states, np.int32))


PLANS = (
    batch_of((1, 0, 5), (0, 0, 1), (3, 0, 9)),
    batch_of((0, 1, 1), (3, 9, 1), (1, 5, 2)),
    batch_of((3, 10, 17), (2, 0, 3)),
    batch_of((2, 3, 1), (1, 7, 1), (0, 2, 1), (3, 27, 1)),
    batch_of((1, 0, 4), (3, 28, 2)),
)
"""Prompts and single rows of four sequences; lane 1 begins anew in the last, over what its slot holds."""


@pytest.mark.parametrize("shape", SHAPES)
def test_delta_net_equals_the_reference_in_mixed_batches(level: str, shape: Shape) -> None:
    case = Case(shape)
    program, oracle = case.bind(level), case.oracle()
    for plan in PLANS:
        got, want = program.run(plan), oracle.run(plan, case.out.name)
        # The norm divides by the size of a head's result: errors are told in units of the largest output.
        rig.close_to(got, want, np.full_like(want, np.abs(want).max()), 2e-5)
    program.close()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_however_it_is_cut_batched_and_threaded(level: str, shape: Shape) -> None:
    case = Case(shape)
    program = case.bind(level)
    whole = program.run(batch_of((1, 0, 29))).copy()
    program.close()
    for threads in (1, 2, 5):
        for cuts in ((1, 2, 3, 5, 12, 6), (3, 1, 1, 1, 1, 22), (28, 1)):
            program = case.bind(level, threads)
            first = 0
            for index, rows in enumerate(cuts):
                beside = ((0, first, rows),) if index % 2 else ((3, first, rows), (2, 0, 1))
                got = program.run(batch_of((1, first, rows), *beside))[:rows]
                assert np.array_equal(rig.bits(got), rig.bits(whole[first : first + rows])), (threads, cuts, index)
                first += rows
            program.close()


def test_states_are_copied_between_slots_in_order(level: str) -> None:
    """Two sequences change places through a third slot: each goes on in the other's slot, to the bit."""
    case = Case(SHAPES[0], layers=2)
    program = case.bind(level)
    start, rest = batch_of((0, 0, 5), (1, 0, 3)), batch_of((0, 5, 4), (1, 3, 2))
    program.run(start)
    straight = program.run(rest).copy()
    program.run(start)
    program.copy_states([(5, 2), (0, 5), (2, 0), (4, 4)])
    swapped = replace(rest, states=np.array((0, 5, 3, 1), np.int32))
    assert np.array_equal(rig.bits(straight), rig.bits(program.run(swapped)))
    program.close()


def test_a_slot_that_does_not_exist_is_refused_before_anything_is_copied(level: str) -> None:
    case = Case(SHAPES[0])
    program = case.bind(level)
    program.run(batch_of((0, 0, 5)))
    for pairs in ([(5, 0), (0, 6)], [(-1, 0)], [(6, 0)]):
        with pytest.raises(ValueError, match="state slot"):
            program.copy_states(pairs)
    program.close()


def test_a_rank_without_recurrent_layers_has_nothing_to_copy(level: str) -> None:
    """Every rank is told what to save and restore, those of a pipeline that have other layers alone as well."""
    case = Case(SHAPES[0])
    program = rig.bind(rig.backend(level, 1), case.ops[:1], case.views, states=StatePool(), lanes=LANES)
    program.copy_states([(0, 7), (7, 1)])
    program.close()


def test_wrong_slots_lanes_and_gaps_are_refused(level: str) -> None:
    case = Case(SHAPES[0])
    program = case.bind(level)
    for bad in (
        batch_of((0, 0, 1), states=(6, 0, 1, 2)),
        batch_of((0, 0, 1), states=(-1, 0, 1, 2)),
        batch_of((0, 0, 1), (1, 0, 1), states=(2, 2, 1, 0)),  # two lanes with one state
        batch_of((0, 0, 1), (1, 0, 1), (0, 1, 1)),  # a lane in two runs
        batch_of((0, 0, 2), (0, 3, 1)),  # a gap
        batch_of((0, 4, 1), (0, 4, 1)),  # a row twice
        batch_of((4, 0, 1)),
        batch_of((0, 0, 1), states=(1, 2)),
    ):
        with pytest.raises(ValueError):
            program.run(bad)
    assert program.run(batch_of((0, 0, 1), (1, 0, 1), states=(2, 3, 2, 2))).shape[0] == 2  # idle lanes may share
    program.close()


def test_states_are_a_line_of_their_own_with_the_bytes_of_the_formula(level: str) -> None:
    case = Case(SHAPES[0], layers=3)
    program = case.bind(level)
    key_heads, value_heads, key_dim, value_dim, kernel, _ = SHAPES[0]
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    each = 3 * 4 * ((kernel - 1) * channels + value_heads * key_dim * value_dim)
    assert program.memory_lines()["state"] == 6 * each
    (region,) = [region for region in program.memory_regions() if region.line == "state"]
    assert region.bytes == 6 * each
    program.close()


def test_a_packed_projection_takes_the_output_as_if_it_were_alone(level: str) -> None:
    """The net quantises its own output for the Linear behind it: the same bits as a step of its own."""
    view, meaning = rig.weights_of("Q4_K", 48, 256)
    wide = Case((2, 8, 16, 32, 4, True))
    head = Linear(wide.out, (LinearPart(Weight(view.name, 48, 256), Buffer("y", 48)),))
    program = rig.bind(rig.backend(level), [*wide.ops, head], [*wide.views, view], states=wide.states, lanes=LANES)
    plain = wide.bind(level)
    for plan in PLANS:
        mixed = plain.run(plan).copy()
        seen = rig.int16_rounded(mixed)
        scale = np.abs(seen) @ np.abs(meaning.astype(np.float64)).T
        rig.close_to(program.run(plan), seen @ meaning.astype(np.float64).T, scale, 4e-6)
    program.close()
    plain.close()


def test_extreme_gates_stay_finite(level: str) -> None:
    """Decay to nothing and to nearly one, gates far beyond where exp overflows."""
    case = Case(SHAPES[0])
    for index, view in enumerate(case.views):
        if view.name in ("beta.table", "alpha.table"):
            values = view.data.view(np.float32).reshape(TOKENS, -1) * np.float32(100)
            case.views[index] = rig.table_of(view.name, values)
    program, oracle = case.bind(level), case.oracle()
    for plan in PLANS:
        got, want = program.run(plan), oracle.run(plan, case.out.name)
        rig.close_to(got, want, np.full_like(want, np.abs(want).max()), 5e-5)
    program.close()


WIDER = ((3, 1), (2, 0), (7, 4))
"""Key heads of the model, and which of them is the first of the op's: in the middle, at the beginning, at the end."""


@pytest.mark.parametrize(("more", "first"), WIDER)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_part_of_a_wider_state_has_the_bits_of_one_alone(level: str, shape: Shape, more: int, first: int) -> None:
    """Nothing else of the wider state is touched, by runs or by copies of slots, and what is copied is all of it."""
    case = Case(shape, layers=2)
    key_heads, value_heads, key_dim, value_dim, kernel, _ = shape
    share = value_heads // key_heads
    whole = StateLayer(
        case.states.layers[0].channels + more * (2 * key_dim + share * value_dim),
        *(kernel, value_heads + more * share, key_dim, value_dim),
    )
    other = StateLayer(32, 2, 1, 8, 16)
    device = rig.backend(level, 2)
    pools = device.pools(rig.NO_KV, StatePool((whole, other, whole), 6), lambda *_: None)
    (region,) = (each for each in pools.memory_regions() if each.line == "state")
    floats = floats_at(region.address, region.bytes // 4)
    floats[:] = np.nan
    parts = PoolParts(pools, (), (StatePart(2, first), StatePart(0, first)))
    named = {view.name: view for view in case.views}
    limits = rig.Limits(64, 64, LANES, 4)
    program = device.bind(case.ops, named, rig.NO_KV, limits, lambda *_: None, case.states, parts=parts)
    alone = case.bind(level)
    for plan in PLANS:
        assert np.array_equal(rig.bits(program.run(plan)), rig.bits(alone.run(plan)))
        for each in (program, alone):
            each.copy_states([(0, 2), (5, 0)])
    own = 2 * ((kernel - 1) * case.states.layers[0].channels + value_heads * key_dim * -(-value_dim // 16) * 16)
    held = np.count_nonzero(~np.isnan(floats.reshape(6, -1)), axis=1)
    assert held.tolist() == [own, own, own, own, 0, own], "slots that lanes have, and the one that was copied to"
    program.close()
    alone.close()
    assert np.count_nonzero(~np.isnan(floats)) == 5 * own
    pools.close()


def test_a_pool_that_does_not_fit_the_op_is_refused(level: str) -> None:
    case = Case(SHAPES[0])
    (layer,) = case.states.layers
    for pool in (
        StatePool(),
        StatePool((layer,), 0),
        StatePool((StateLayer(layer.channels + 1, *SHAPES[0][4:5], 4, 16, 32),), 2),
    ):
        with pytest.raises(ValueError, match="state layer"):
            rig.bind(rig.backend(level), case.ops, case.views, states=pool)
