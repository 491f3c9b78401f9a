"""Products of many rows on a card, emulated: what the cases of gpu_cases/many.py do not show. The same bits in blocks
of either size and among any other rows; activations that no half can hold; every layout of lanes; ids of the wrong
type.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import gpu_cases
import numpy as np
import pytest
import simt_rig as rig
from gpu_cases import Array, address, aligned, many, nothing
from gpu_weights import matrix

from backends.gpu.launch import Launch
from backends.gpu.ops import many as ops
from backends.quant import QuantType

SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "0", 16)
RIGS: tuple[tuple[rig.Vendor, int], ...] = (("cuda", 32), ("hip", 64))
widths = pytest.mark.parametrize(("vendor", "warp"), RIGS, ids=[f"{vendor}{warp}" for vendor, warp in RIGS])
OTHER_LAYOUTS: tuple[tuple[rig.Vendor, int, str], ...] = (
    ("cuda", 32, "TILES_MMA8"),
    ("cuda", 32, "TILES_PLAIN"),
    ("hip", 32, "TILES_WMMA11"),
    ("hip", 32, "TILES_WMMA12"),
    ("hip", 64, "TILES_PLAIN"),
)
UNTYPED = ("halve_rows", "group_rows", "sum_rows")


def run(launches: Sequence[Launch], vendor: rig.Vendor, warp: int, *defines: str) -> None:
    for launch in launches:
        of_type = [f"QUANT={launch.symbol.quant}"] if launch.symbol.quant else []
        rig.load(launch.symbol.file, vendor, warp, *of_type, *defines).run(launch)


def rows_through(vendor: rig.Vendor, warp: int, x: Array, quant: QuantType, block: int) -> tuple[Array, Array]:
    """What a random matrix of 37 outputs makes of the rows x [rows, cols]; and the matrix."""
    rows, cols = x.shape
    w = matrix(quant, 37, cols, np.random.default_rng(SEED))
    halves, scales, out = nothing((rows, ops.padded(cols)), np.uint16), nothing((rows,)), nothing((rows, 37))
    x = aligned(x)
    where = ops.Halved(address(halves), address(scales), cols)
    of = ops.Matrix(quant, address(w.planes), 37, cols)
    launches = (
        *ops.halve(where, address(x), rows, cols),
        *ops.linear(of, where, rows, address(out), 37, block=block),
    )
    run(launches, vendor, warp)
    return out, w.meaning.astype(np.float64)


@widths
@pytest.mark.parametrize("name", sorted(name for name in many.CASES if name.startswith(UNTYPED)))
def test_each_case_equals_the_reference(vendor: rig.Vendor, warp: int, name: str) -> None:
    for seed in range(SEED, SEED + 5):
        case = many.CASES[name](np.random.default_rng(seed), warp)
        run(case.launches, vendor, warp)
        case.check()


@widths
@pytest.mark.parametrize("op", ["linear_many", "experts_many"])
@pytest.mark.parametrize("quant", ["f16", "q4_k"])
def test_products_are_within_what_halves_round(vendor: rig.Vendor, warp: int, op: str, quant: str) -> None:
    for name in (name for name in many.CASES if name.startswith(f"{op}_{quant}_")):
        case = many.CASES[name](np.random.default_rng(SEED), warp)
        run(case.launches, vendor, warp)
        case.check()


def test_no_thread_overtakes_another() -> None:
    """A step's part of x and W is stored when all warps have multiplied the one before, and read when all is stored."""
    rng = np.random.default_rng(SEED)
    case = many.product(QuantType.Q4_K, 32, rng, rows=3, outs=5, cols=768)
    gpu_cases.run(case, "cuda", 32, sanitizer="thread", whole=False)


@pytest.mark.parametrize(
    ("vendor", "warp", "layout"), OTHER_LAYOUTS, ids=[f"{v}{w}-{layout}" for v, w, layout in OTHER_LAYOUTS]
)
def test_products_in_every_layout_of_lanes(vendor: rig.Vendor, warp: int, layout: str) -> None:
    for name in ("linear_many_f16_r32", "linear_many_f16_r128"):
        case = many.CASES[name](np.random.default_rng(SEED), warp)
        run(case.launches, vendor, warp, layout)
        case.check()


@widths
def test_a_row_has_the_same_bits_in_either_block_and_among_any_others(vendor: rig.Vendor, warp: int) -> None:
    x = np.random.default_rng(SEED).standard_normal((40, 288)).astype(np.float32)
    x[7] = np.nan
    together, _ = rows_through(vendor, warp, x, QuantType.F16, 32)
    wide, _ = rows_through(vendor, warp, x, QuantType.F16, 128)
    some, _ = rows_through(vendor, warp, x[33:36], QuantType.F16, 32)
    assert np.array_equal(together.view(np.uint32), wide.view(np.uint32))
    assert np.array_equal(together[33:36].view(np.uint32), some.view(np.uint32))
    assert np.isnan(together[7]).all() and np.isfinite(np.delete(together, 7, axis=0)).all()


@widths
def test_activations_may_be_larger_than_any_half(vendor: rig.Vendor, warp: int) -> None:
    x = np.random.default_rng(SEED).standard_normal((3, 64)).astype(np.float32)
    x *= np.array([[1e-20], [1e6], [1e30]], np.float32)
    out, w = rows_through(vendor, warp, x, QuantType.F16, 32)
    wide = x.astype(np.float64)
    assert (np.abs(out - wide @ w.T) <= many.rounded(wide, w)).all()


def test_blocks_are_wide_from_where_that_pays() -> None:
    assert [ops.block_rows(rows) for rows in (1, 64, 65, 4096)] == [32, 32, 128, 128]
    few = ops.Choices(0, np.dtype(np.int32), 512, 8, 0, 128)
    assert ops.expert_block(few) == 32
    assert ops.expert_block(ops.Choices(0, np.dtype(np.int32), 512, 8, 0, 8)) == 128
    assert ops.tile_count(few, 32) == (4096 + 128 * 31) // 32
    assert ops.tile_count(ops.Choices(0, np.dtype(np.int32), 1, 2, 0, 128), 32) == 2


def test_ids_of_64_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="int64, the kernels read int32"):
        ops.Choices(0, np.dtype(np.int64), 4, 2, 0, 8)
    with pytest.raises(ValueError, match="1024"):
        ops.Choices(0, np.dtype(np.int32), 4, 2, 0, 1025)


def test_shapes_that_do_not_fit_are_refused() -> None:
    narrow, choices = ops.Halved(256, 512, 64), ops.Choices(0, np.dtype(np.int32), 4, 2, 0, 3)
    weights = ops.Matrix(QuantType.F16, 256, 30, 32)
    groups = ops.Groups(choices, 256, 512, 32)
    with pytest.raises(ValueError, match="rows of 64"):
        ops.linear(weights, narrow, 4, 256, 30)
    with pytest.raises(ValueError, match="rows of 64"):
        ops.experts(ops.Stack(weights, 10, 10), narrow, groups, 256, 10, shared=True)
    with pytest.raises(ValueError, match="30 rows for 3 experts of 9"):
        ops.experts(ops.Stack(weights, 9, 9), ops.Halved(256, 512, 32), groups, 256, 10, shared=True)
    with pytest.raises(ValueError, match="no part"):
        ops.sum_rows(256, (), 4)


def test_nothing_is_launched_for_no_rows() -> None:
    x, none = ops.Halved(256, 512, 32), ops.Choices(0, np.dtype(np.int32), 0, 2, 0, 3)
    weights, groups = ops.Matrix(QuantType.F16, 256, 30, 32), ops.Groups(none, 256, 512, 32)
    assert ops.halve(x, 256, 0, 32) == ops.linear(weights, x, 0, 256, 30) == ops.group(groups) == ()
    assert ops.experts(ops.Stack(weights, 10, 10), x, groups, 256, 10, shared=True) == ops.sum_rows(256, [512], 0) == ()
