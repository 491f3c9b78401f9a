"""Experts as launches on a card, emulated, against the reference: choice by choice and grouped, all experts or those of
a rank, matrices of all sorts of types."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import gpu_delta
import gpu_weights
import numpy as np
import pytest
import simt_rig as rig
from gpu_places import DOUBLE, F64, NO_KV, Book, normal, run

from backends.base import Batch, Buffer, ExpertMatrix, Experts, Limits, Routing, Weight
from backends.gpu.launch import Launch
from backends.gpu.ops import many
from backends.gpu.ops.buffers import Rows
from backends.gpu.ops.quants import MATRICES, tag
from backends.gpu.steps import experts
from backends.gpu.steps.base import BatchShape
from backends.quant import QuantType
from backends.reference.program import ReferenceProgram

SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "0", 16)
RIGS: tuple[tuple[rig.Vendor, int], ...] = (("cuda", 32), ("hip", 64))
widths = pytest.mark.parametrize(("vendor", "warp"), RIGS, ids=[f"{vendor}{warp}" for vendor, warp in RIGS])
SMALL = tuple(quant for quant in MATRICES if quant.block_len <= 32)
ROOM = {"few": 1e-3, "many": 1e-2}
"""What results may be off by, of the largest one: quantised to 16 bits, or to halves."""


def width_of(rng: np.random.Generator, *quants: QuantType) -> int:
    """Columns that matrices of these types may have: whole blocks of each, of floats any number."""
    longest = max(quant.block_len for quant in quants)
    if longest == 1:
        return int(rng.integers(5, 90))
    return longest * int(rng.integers(1, 1 + max(1, 96 // longest)))


def experts_op(
    rng: np.random.Generator, types: Sequence[QuantType], *, fused: bool, biased: bool, held: tuple[int, int] | None
) -> tuple[Experts, dict[str, QuantType]]:
    """A random op, and the type of each of its tensors: gate, up and down, or those of gate and up in one."""
    gate_type, up_type, down_type = (types[0], types[0], types[2]) if fused else types
    src, inner, width = width_of(rng, gate_type, up_type), width_of(rng, down_type), int(rng.integers(3, 70))
    count = int(rng.integers(4, 8)) if held is None else 6
    here = count if held is None else held[1] - held[0]
    routing = Routing(
        count,
        int(rng.integers(2, 4)),
        str(rng.choice(["softmax", "sigmoid", "chosen"])),
        normalise=bool(rng.integers(2)),
        scale=1.5,
        selection=Weight("selection", 1, count) if rng.integers(2) else None,
        gains=Weight("gains", 1, count) if rng.integers(2) else None,
    )

    def matrix(name: str, height: int, cols: int, first: int, pitch: int) -> ExpertMatrix:
        bias = Weight(f"{name} bias", 1, here * pitch) if biased else None
        return ExpertMatrix(Weight(name, here * pitch, cols), height, pitch, first, bias)

    own = "gate and up" if fused else "gate", "gate and up" if fused else "up"
    pitch = 2 * inner if fused else inner
    gate, up = matrix(own[0], inner, src, 0, pitch), matrix(own[1], inner, src, pitch - inner, pitch)
    down = matrix("down", width, inner, 0, width)
    kind = str(rng.choice(["silu", "gelu", "swiglu_oai"]))
    op = Experts(Buffer("src", src), Buffer("logits", count), Buffer("out", width), routing, gate, up, down, kind, held)
    return op, {own[0]: gate_type, own[1]: up_type, "down": down_type}


class Expert:
    """An op with random weights, in a book whose scratch is for `rows` rows at most."""

    def __init__(self, rng: np.random.Generator, op: Experts, types: dict[str, QuantType], rows: int) -> None:
        self.rng, self.op = rng, op
        self.book = Book(Limits(rows, rows, 1, 1))
        for matrix in (op.gate, op.up, op.down):
            weight = matrix.weight
            if weight.name not in self.book.matrices:
                made = gpu_weights.matrix(types[weight.name], weight.rows, weight.cols, rng)
                self.book.matrices[weight.name] = made
            if matrix.bias is not None:
                self.book.add_vector(matrix.bias, normal(rng, matrix.bias.cols))
        for vector in (op.routing.selection, op.routing.gains):
            if vector is not None:
                self.book.add_vector(vector, normal(rng, vector.cols))
        self.book.add_scratch(experts.scratch(op, self.book.context(rows)))

    def launches(self, rows: int) -> tuple[tuple[Launch, ...], F64]:
        """Of a batch of so many random rows, and what it should give."""
        src, logits = normal(self.rng, rows, self.op.src.width), normal(self.rng, rows, self.op.routing.experts)
        self.book.give(self.op.src, src)
        self.book.give(self.op.logits, logits)
        oracle = ReferenceProgram((self.op,), self.book.dense, NO_KV, self.book.limits, DOUBLE)
        given = {"src": src.astype(np.float64), "logits": logits.astype(np.float64)}
        want = oracle.run_from(plain_batch(rows), given)["out"]
        shape = BatchShape(rows, rows, 1)
        return experts.launches(self.op, self.book, shape), want.astype(np.float64)

    def close(self, want: F64) -> None:
        got = self.book.rows_of(self.op.out)
        room = ROOM["few" if experts.is_few(len(want)) else "many"] * np.abs(want).max()
        np.testing.assert_allclose(got[: len(want)], want, rtol=0, atol=room)
        assert np.isnan(got[len(want) :]).all(), "rows that the batch does not have"
        self.book.check()


def plain_batch(rows: int) -> Batch:
    return gpu_delta.batch_of((0, 0, rows))


@widths
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("held", [None, (2, 5)], ids=["all", "held"])
@pytest.mark.parametrize("fused", [False, True], ids=["three", "fused"])
def test_experts_equal_the_reference(
    vendor: rig.Vendor, warp: int, fused: bool, held: tuple[int, int] | None, biased: bool
) -> None:
    """Choice by choice and grouped, floats and packed matrices beside one another, the same memory used again."""
    rng = np.random.default_rng((SEED, fused, held is None, biased))
    types = [SMALL[int(each)] for each in rng.integers(0, len(SMALL), 3)]
    op, quants = experts_op(rng, types, fused=fused, biased=biased, held=held)
    made = Expert(rng, op, quants, 20)
    for rows in (int(rng.integers(1, 5)), int(rng.integers(9, 21))):
        launches, want = made.launches(rows)
        run(launches, vendor, warp, backwards=bool(rows % 2))
        made.close(want)
        made.book.rows_of(op.out)[...] = np.nan


@widths
@pytest.mark.parametrize("first", [0, 1, 2])
def test_one_of_three_matrices_is_of_floats(vendor: rig.Vendor, warp: int, first: int) -> None:
    rng = np.random.default_rng((SEED, first))
    types = [QuantType.Q8_0, QuantType.Q8_0, QuantType.Q8_0]
    types[first] = QuantType.F16
    op, quants = experts_op(rng, types, fused=False, biased=True, held=None)
    made = Expert(rng, op, quants, 9)
    for rows in (2, 9):
        launches, want = made.launches(rows)
        run(launches, vendor, warp)
        made.close(want)
        made.book.rows_of(op.out)[...] = np.nan


@pytest.mark.parametrize("quant", MATRICES, ids=tag)
def test_experts_of_every_type(quant: QuantType) -> None:
    """As gate and up or as down, beside some other type; the widths of warps take turns."""
    index = MATRICES.index(quant)
    rng = np.random.default_rng((SEED, index))
    other = SMALL[int(rng.integers(len(SMALL)))]
    types = [quant, quant, other] if rng.integers(2) else [other, other, quant]
    op, quants = experts_op(rng, types, fused=bool(rng.integers(2)), biased=False, held=None)
    made = Expert(rng, op, quants, 10)
    for rows in (2, 10):
        launches, want = made.launches(rows)
        run(launches, *RIGS[index % 2])
        made.close(want)
        made.book.rows_of(op.out)[...] = np.nan


@widths
def test_what_the_op_before_quantised_is_not_quantised_again(vendor: rig.Vendor, warp: int) -> None:
    rng = np.random.default_rng(SEED)
    op, quants = experts_op(rng, [QuantType.Q4_0] * 3, fused=False, biased=False, held=None)
    made = Expert(rng, op, quants, 3)
    launches, want = made.launches(3)
    src = made.book.rows_of(op.src)
    given = gpu_weights.quantised(np.ascontiguousarray(src))
    found = experts.launches(op, made.book, BatchShape(3, 3, 1), given.at)
    names = [launch.symbol.name for launch in launches]
    assert [launch.symbol.name for launch in found] == [name for name in names if name != "quantize_rows"]
    run(found, vendor, warp)
    made.close(want)


def test_experts_that_are_all_elsewhere_add_nothing() -> None:
    """Choices of a row that only other ranks have, where the scratch still has an earlier batch's lines."""
    rng = np.random.default_rng(SEED)
    op, quants = experts_op(rng, [QuantType.F32] * 3, fused=False, biased=True, held=(2, 5))
    op = replace(op, routing=Routing(6, 2))
    for rows in (2, 12):
        made = Expert(rng, op, quants, rows)
        launches, _ = made.launches(rows)
        run(launches, "cuda", 32)
        made.book.give(op.logits, np.tile(np.array([9, 8, 0, 0, 0, 7], np.float32), (rows, 1)))
        run(launches, "cuda", 32)
        assert not made.book.rows_of(op.out).any()
        made.book.check()


def test_the_form_is_chosen_by_the_rows_of_a_batch() -> None:
    rng = np.random.default_rng(SEED)
    op, quants = experts_op(rng, [QuantType.Q4_0] * 3, fused=False, biased=False, held=None)
    made = Expert(rng, op, quants, 40)
    few, many_rows = (
        {launch.symbol.file for launch in made.launches(rows)[0]} for rows in (experts.FEW_ROWS, experts.FEW_ROWS + 1)
    )
    assert "experts_few" in few and "experts_many" not in few
    assert "experts_many" in many_rows and "experts_few" not in many_rows
    assert experts.launches(op, made.book, BatchShape(0, 0, 1)) == ()
    names = set(experts.scratch(op, made.book.context(experts.FEW_ROWS)))
    assert experts.HALVES not in names, "a program of few rows has no memory for the other form"


def test_scratch_is_enough_for_every_number_of_rows() -> None:
    """Tiles are fewer with larger blocks, but their count does not grow evenly."""
    rng = np.random.default_rng(SEED)
    op, _ = experts_op(rng, [QuantType.F32] * 3, fused=False, biased=False, held=(2, 5))
    for rows in (9, 30, 64, 65, 200, 400):
        size = experts._many_scratch(op, rows)[experts.TILES]
        for fewer in range(1, rows + 1):
            choices = many.Choices(0, np.dtype(np.int32), fewer, op.routing.used, 2, 5)
            assert 16 * many.tile_count(choices, many.expert_block(choices)) <= size


def test_more_pairs_than_a_grid_has_rows_take_more_launches() -> None:
    op, _ = experts_op(np.random.default_rng(SEED), [QuantType.F32] * 3, fused=False, biased=False, held=None)
    gate, up = Rows(1 << 20, 64), Rows(1 << 28, 64)
    first, second = experts._activation(op, 80000, gate, up)
    assert (first.grid[1], second.grid[1]) == (65535, 80000 - 65535)
    names = [param.name for param in second.symbol.params]
    found = dict(zip(names, second.args, strict=True))
    assert found["gate"] == found["out"] == (1 << 20) + 65535 * 64 * 4
    assert found["up"] == (1 << 28) + 65535 * 64 * 4


WRONG_EXPERTS: tuple[tuple[Callable[[Experts], Experts], str], ...] = (
    (lambda op: replace(op, routing=Routing(513, 2)), "experts"),
    (lambda op: replace(op, routing=replace(op.routing, used=0)), "cannot be chosen"),
    (lambda op: replace(op, held=(2, 9)), "cannot be held"),
    (lambda op: replace(op, logits=Buffer("logits", 3)), "wide for"),
    (lambda op: replace(op, gate=replace(op.gate, first=1)), "rows for"),
    (lambda op: replace(op, out=Buffer("out", 1)), "do not lead"),
)


@pytest.mark.parametrize("index", range(len(WRONG_EXPERTS)))
def test_experts_that_do_not_fit_are_refused_at_bind(index: int) -> None:
    wrong, message = WRONG_EXPERTS[index]
    op, _ = experts_op(np.random.default_rng(SEED), [QuantType.F32] * 3, fused=False, biased=False, held=(2, 5))
    with pytest.raises(ValueError, match=message):
        experts.scratch(wrong(op), Book(Limits(4, 4, 1, 1)).context(4))


def test_routing_that_no_kernel_takes_is_refused_at_bind() -> None:
    """Ids and logits fit; there are more experts than lanes hold."""
    op, _ = experts_op(np.random.default_rng(SEED), [QuantType.F32] * 3, fused=False, biased=False, held=(2, 5))
    op = replace(op, logits=Buffer("logits", 600), routing=Routing(600, 2))
    with pytest.raises(ValueError, match="at most 32 of 512"):
        experts.scratch(op, Book(Limits(4, 4, 1, 1)).context(4))
