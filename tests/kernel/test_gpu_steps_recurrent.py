"""Recurrent layers as launches on a card, emulated, against the reference: several layers of a slot over several
batches, held lanes, chained joins, copies of slots; and what of a pool a program may have."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import gpu_delta
import numpy as np
import pytest
import simt_rig as rig
from gpu_buffers import check_planes, planes
from gpu_places import DOUBLE, F64, NO_KV, Book, normal, run

from backends import states as layout
from backends.base import (
    Batch,
    Buffer,
    DeltaNet,
    JoinHidden,
    KvPool,
    Limits,
    PoolParts,
    StateLayer,
    StatePart,
    StatePool,
    Weight,
)
from backends.gpu import held as holding
from backends.gpu import states as card_states
from backends.gpu.ops import delta
from backends.gpu.steps import recurrent
from backends.reference.held import join_chained
from backends.reference.program import ReferenceProgram

SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "0", 16)
RIGS: tuple[tuple[rig.Vendor, int], ...] = (("cuda", 32), ("hip", 64))
widths = pytest.mark.parametrize(("vendor", "warp"), RIGS, ids=[f"{vendor}{warp}" for vendor, warp in RIGS])

SLOTS, LANES, HELD, ROWS = gpu_delta.SLOTS, gpu_delta.LANES, 16, 80


def delta_op(layer: int, shape: delta.DeltaShape) -> DeltaNet:
    values = shape.value_heads * shape.value_dim

    def named(name: str, width: int) -> Buffer:
        return Buffer(f"{name} {layer}", width)

    def weight(name: str, rows: int, cols: int) -> Weight:
        return Weight(f"{name} {layer}", rows, cols)

    return DeltaNet(
        *(named("mixed", shape.channels), named("z", values), named("beta", shape.value_heads)),
        *(named("alpha", shape.value_heads), named("out", values), layer),
        conv=weight("conv", shape.channels, shape.kernel),
        dt_bias=weight("dt", 1, shape.value_heads),
        a=weight("a", 1, shape.value_heads),
        norm=weight("norm", 1, shape.value_dim),
        key_heads=shape.key_heads,
        value_heads=shape.value_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        kernel=shape.kernel,
        eps=shape.eps,
        tiled=shape.tiled,
    )


JOIN = JoinHidden(Buffer("left", 40), Buffer("right", 33), Buffer("joined", 42), 1, 5, 26)
OPS = (
    delta_op(0, delta.DeltaShape(1, 2, 12, 20, 4, 1e-6)),
    JOIN,
    delta_op(2, delta.DeltaShape(2, 4, 7, 32, 3, 1e-6, tiled=True)),
)
"""A net, a join and another net, one behind the other in a slot; the second one quantises its result by itself."""


def pool_of(*ops: DeltaNet | JoinHidden) -> StatePool:
    return StatePool(
        tuple(
            StateLayer(op.end - op.first, 2, 0, 0, 0)
            if isinstance(op, JoinHidden)
            else StateLayer(layout.channels_of(op), op.kernel, op.value_heads, op.key_dim, op.value_dim)
            for op in ops
        ),
        SLOTS,
    )


def sources_of(op: DeltaNet | JoinHidden) -> tuple[Buffer, ...]:
    return (op.left, op.right) if isinstance(op, JoinHidden) else (op.mixed, op.z, op.beta, op.alpha)


def book_of(rng: np.random.Generator, *ops: DeltaNet | JoinHidden) -> Book:
    """With random weights, states that are zero, and room for held rows."""
    book = Book(Limits(ROWS, ROWS, LANES, 1, HELD), pool_of(*ops), HELD)
    for op in ops:
        if isinstance(op, DeltaNet):
            for weight in (op.conv, op.dt_bias, op.norm):
                book.add_vector(weight, normal(rng, weight.rows, weight.cols))
            book.add_vector(op.a, -np.exp(normal(rng, 1, op.a.cols) - 1))
    book.prepare(*ops)
    return book


POOL = pool_of(*OPS)


class Layers:
    """`OPS` on a card and on the reference, whose states go from batch to batch."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng((SEED, seed))
        self.book = book_of(self.rng, *OPS)
        self.oracle = ReferenceProgram(OPS, self.book.dense, NO_KV, self.book.limits, DOUBLE, POOL)
        self.lanes = holding.HeldLanes()

    def run(self, batch: Batch, vendor: rig.Vendor, warp: int, *, backwards: bool = False) -> None:
        """On both; results are compared."""
        rows = len(batch.tokens)
        given = {each.name: normal(self.rng, rows, each.width) for op in OPS for each in sources_of(op)}
        for op in OPS:
            for buffer in sources_of(op):
                self.book.give(buffer, given[buffer.name])
            self.book.rows_of(op.out)[...] = np.nan
        shape = self.book.take(batch)
        for op in OPS:
            run(recurrent.launches(op, self.book, shape), vendor, warp, backwards=backwards)
        self.lanes.forget()
        if (batch.hold >= 0).any():
            self.lanes.note(batch.hold, batch.states, batch.lanes, batch.positions)
        want = self.oracle.run_from(batch, {name: each.astype(np.float64) for name, each in given.items()})
        for op in OPS:
            got = self.book.rows_of(op.out)
            gpu_delta.close(got[:rows], want[op.out.name].astype(np.float64), 0 if isinstance(op, JoinHidden) else 2e-5)
            assert np.isnan(got[rows:]).all(), "rows that the batch does not have"
        self.check()

    def accept(self, kept: Sequence[tuple[int, int]], vendor: rig.Vendor, warp: int) -> None:
        lanes = self.lanes.taken(kept)
        self.book.batches["accepts"] = holding.accepts_of(lanes)
        run(holding.accepts(OPS, self.book, len(lanes)), vendor, warp)
        self.oracle.accept(kept)
        self.check()

    def copy(self, pairs: Sequence[tuple[int, int]], vendor: rig.Vendor, warp: int) -> None:
        at = np.array(pairs, np.int32)
        run(recurrent.copies(self.book, rig.address(at), len(pairs)), vendor, warp)
        self.oracle.copy_states(pairs)
        self.check()

    def check(self) -> None:
        """Every slot has what the reference's has; padding stays zero."""
        for layer, shape in enumerate(POOL.layers):
            at = layout.layer_at(POOL, layer)
            window, matrices = at + (shape.kernel - 1) * shape.channels, at + layout.window_floats(shape)
            got = self.book.pool[:, at:window].reshape(SLOTS, shape.kernel - 1, -1)
            np.testing.assert_array_equal(got, self.oracle.states.conv[layer].astype(np.float32))
            assert not self.book.pool[:, window:matrices].any()
            blocks = self.book.pool[:, matrices : at + layout.layer_floats(shape)]
            if not shape.heads:
                continue
            heads = blocks.reshape(SLOTS, shape.heads, -1, shape.key_dim, 16).transpose(0, 1, 3, 2, 4)
            heads = heads.reshape(SLOTS, shape.heads, shape.key_dim, -1)
            gpu_delta.close(heads[..., : shape.value_dim], self.oracle.states.matrix[layer].astype(np.float64), 2e-5)
            assert not heads[..., shape.value_dim :].any()
        self.book.check()


@widths
def test_layers_of_a_slot_go_on_from_batch_to_batch(vendor: rig.Vendor, warp: int) -> None:
    """A prompt by chunks beside single rows; then all rows go one by one; then a lane begins anew."""
    layers = Layers(0)
    batch_of = gpu_delta.batch_of
    plans = (
        batch_of((1, 0, 40), (0, 0, 1), (2, 0, 3)),
        batch_of((0, 1, 2), (1, 40, 1), (2, 3, 70)),
        batch_of((2, 73, 1), (1, 0, 5)),
    )
    for index, plan in enumerate(plans):
        layers.run(plan, vendor, warp, backwards=bool(index % 2))
    forms = [layers.book.take(plan) for plan in plans]
    assert [(shape.chunks, shape.single) for shape in forms] == [(1, 3), (2, 2), (0, 5)]


@widths
def test_of_held_lanes_the_rows_that_count_become_part_of_the_states(vendor: rig.Vendor, warp: int) -> None:
    layers = Layers(1)
    layers.run(gpu_delta.batch_of((0, 0, 5), (1, 0, 1), (2, 0, 3)), vendor, warp)
    hold = gpu_delta.batch_of((1, 1, 4), (0, 5, 3), (2, 3, 1), hold=(0, 9, -1))
    layers.run(hold, vendor, warp)
    layers.accept([(0, 1), (1, 3)], vendor, warp)
    layers.run(hold_of_one := gpu_delta.batch_of((0, 6, 2), (1, 4, 1), hold=(4, -1, -1)), vendor, warp)
    layers.accept([(0, 0)], vendor, warp)
    layers.run(hold_of_one, vendor, warp)
    layers.accept([(0, 2)], vendor, warp)
    with pytest.raises(ValueError, match="not held"):
        layers.lanes.taken([(0, 1)])


def test_held_rows_of_a_lane_that_begins() -> None:
    """Nothing of what the slot held before counts."""
    layers = Layers(2)
    layers.run(gpu_delta.batch_of((0, 0, 6)), "cuda", 32)
    layers.run(gpu_delta.batch_of((0, 0, 4), hold=(12, -1, -1)), "cuda", 32)
    layers.accept([(0, 2)], "cuda", 32)


@widths
def test_slots_are_copied_in_the_order_that_was_asked_for(vendor: rig.Vendor, warp: int) -> None:
    layers = Layers(3)
    layers.run(gpu_delta.batch_of((0, 0, 2), (1, 0, 1), (2, 0, 3)), vendor, warp)
    layers.copy([(4, 1), (0, 4), (1, 0), (2, 2), (2, 3)], vendor, warp)
    assert recurrent.copies(layers.book, 0, 0) == ()
    assert recurrent.copies(Book(layers.book.limits), 1, 1) == (), "no recurrent layers"


@widths
@pytest.mark.parametrize("value_dim", [16, 32], ids=["behind the net", "by its norm"])
def test_the_next_matrix_reads_what_a_net_gives_quantised(vendor: rig.Vendor, warp: int, value_dim: int) -> None:
    """Where a head is no whole block of 32 columns, a launch more does it."""
    rng = np.random.default_rng(SEED)
    op, batch = delta_op(0, delta.DeltaShape(1, 2, 12, value_dim, 4, 1e-6)), gpu_delta.batch_of((1, 0, 3), (0, 0, 1))
    book = book_of(rng, op)
    for buffer in sources_of(op):
        book.give(buffer, normal(rng, 4, buffer.width))
    arrays, at = planes(4, op.out.width)
    launches = recurrent.launches(op, book, book.take(batch), at)
    assert (launches[-1].symbol.name == "quantize_rows") == (value_dim == 16)
    run(launches, vendor, warp)
    check_planes(arrays, book.rows_of(op.out)[:4].astype(np.float64))
    book.check()


@widths
def test_steps_of_drafting_go_along_the_chain(vendor: rig.Vendor, warp: int) -> None:
    """The first row of a lane starts from its slot, a later one from a row of the step before."""
    layers = Layers(5)
    layers.run(gpu_delta.batch_of((0, 0, 2), (1, 0, 1), (2, 0, 3)), vendor, warp)
    chained = replace(JOIN, chained=True)
    before: F64 = np.zeros((0, JOIN.right.width))
    for batch in (
        gpu_delta.batch_of((0, 2, 1), (1, 1, 1), (2, 0, 1), chain=(-1, -1, -1)),
        gpu_delta.batch_of((2, 1, 1), (0, 3, 1), (1, 2, 1), chain=(2, 0, -1)),
    ):
        rows = len(batch.tokens)
        left = normal(layers.rng, rows, JOIN.left.width)
        layers.book.give(JOIN.left, left)
        layers.book.give(JOIN.right, before.astype(np.float32))
        run(recurrent.launches(chained, layers.book, layers.book.take(batch)), vendor, warp)
        want = join_chained(chained, layers.oracle.states, batch, left.astype(np.float64), {"right": before})
        np.testing.assert_array_equal(layers.book.rows_of(JOIN.out)[:rows], want.astype(np.float32))
        layers.check()
        before = normal(layers.rng, rows, JOIN.right.width).astype(np.float64)


def test_without_rows_there_is_nothing_to_do() -> None:
    layers = Layers(6)
    shape = layers.book.take(gpu_delta.batch_of((0, 0, 1)))
    for op in OPS:
        assert recurrent.launches(op, layers.book, replace(shape, rows=0)) == ()
        assert recurrent.accepts(op, layers.book, 0) == ()
    narrow = replace(JOIN, end=JOIN.first, out=Buffer("none", 0))
    assert recurrent.launches(narrow, layers.book, shape) == ()
    assert recurrent.kept(narrow) == recurrent.kept(replace(JOIN, chained=True)) == (0, 0)


def test_scratch_is_enough_for_the_chunks_of_any_batch() -> None:
    rng = np.random.default_rng(SEED)
    least = delta.CHUNK_LEAST
    for rows, lanes in ((31, 3), (32, 3), (80, 3), (200, 2), (200, 3), (130, 1)):
        most = delta.most_chunks(rows, lanes)
        found = 0
        for _ in range(300):
            counts = [least] * min(lanes, rows // least)
            left = rows - sum(counts)
            for lane in range(len(counts)):
                more = int(rng.integers(0, left + 1)) if lane < len(counts) - 1 else left
                counts[lane], left = counts[lane] + more, left - more
            runs = [(lane, 64 * lane + int(rng.choice([0, 63, 40])), count) for lane, count in enumerate(counts)]
            found = max(found, len(delta.lane_runs(gpu_delta.batch_of(*runs), 3).chunks) if runs else 0)
        assert found <= most <= found + lanes - 1, (rows, lanes)


def test_what_is_kept_of_a_row_is_known_by_layer() -> None:
    sizes = holding.kept_bytes((*OPS, replace(JOIN, chained=True)), 3)
    assert sizes == {op.layer: tuple(12 * floats for floats in recurrent.kept(op)) for op in OPS}
    assert holding.kept_bytes(OPS, 0) == {}


class NoPools:
    """Pools of which only the shape is asked for."""

    kv: KvPool = NO_KV
    states: StatePool = POOL


@pytest.mark.parametrize(
    ("own", "parts"),
    [
        (POOL, (StatePart(0), StatePart(2), StatePart(1))),
        (POOL, (StatePart(0), StatePart(1, 4), StatePart(2))),
        (StatePool(POOL.layers[:2], SLOTS), (StatePart(0), StatePart(1))),
        (StatePool((replace(POOL.layers[0], heads=1), *POOL.layers[1:]), SLOTS), tuple(map(StatePart, range(3)))),
    ],
    ids=["another order", "a part of the columns", "some layers", "some heads"],
)
def test_a_part_of_the_states_is_refused(own: StatePool, parts: tuple[StatePart, ...]) -> None:
    with pytest.raises(ValueError, match="hold together in one memory are not supported on cards yet"):
        card_states.check_parts(PoolParts(NoPools(), (), parts), own)  # type: ignore[arg-type]


def test_all_of_the_states_are_taken() -> None:
    pools = NoPools()
    card_states.check_parts(PoolParts(pools, (), tuple(map(StatePart, range(3)))), POOL)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="takes 9 state slots"):
        parts = PoolParts(pools, (), tuple(map(StatePart, range(3))))  # type: ignore[arg-type]
        card_states.check_parts(parts, StatePool(POOL.layers, 9))
    with pytest.raises(ValueError, match="2 parts of states for 3"):
        card_states.check_parts(PoolParts(pools, (), (StatePart(0), StatePart(1))), POOL)  # type: ignore[arg-type]


def test_heads_that_no_kernel_has_registers_for_are_refused_at_bind() -> None:
    op = replace(OPS[0], key_dim=300)
    with pytest.raises(ValueError, match="at most 256"):
        recurrent.scratch(op, Book(Limits(4, 4, 1, 1)).context(4))
