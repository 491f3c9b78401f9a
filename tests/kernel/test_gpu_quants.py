"""Packed types on a card, emulated: what the cases of gpu_cases/quants.py do not show by chance. Every value that a
field can have, pieces of any order, activations that are no numbers."""

from __future__ import annotations

import os

import gpu_weights as weights
import grid_tables
import numpy as np
import pytest
import simt_rig as rig
from gpu_cases import aligned, nothing
from gpu_cases.quants import embed_case, pack_case, quantize_case

from backends.gpu.launch import Launch
from backends.gpu.ops import quants as ops
from backends.gpu.ops.buffers import Rows
from backends.quant import QuantType

SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "0", 16)
RIGS: tuple[tuple[rig.Vendor, int], ...] = (("cuda", 32), ("hip", 64))
widths = pytest.mark.parametrize(("vendor", "warp"), RIGS, ids=[f"{vendor}{warp}" for vendor, warp in RIGS])


def run(launch: Launch, vendor: rig.Vendor, warp: int) -> None:
    rig.load(launch.symbol.file, vendor, warp).run(launch)


def dequantised(whole: weights.Matrix, vendor: rig.Vendor, warp: int) -> weights.Array:
    out = nothing(whole.meaning.shape)
    launch = ops.dequantize(
        whole.quant, rig.address(out), rig.address(whole.planes), whole.rows, whole.cols, count=whole.rows, half=False
    )
    run(launch, vendor, warp)
    return out


def test_tables_are_those_of_the_gguf_package() -> None:
    assert (rig.KERNELS / "grids.h").read_text() == grid_tables.text()


@widths
@pytest.mark.parametrize("quant", ops.PACKED, ids=ops.tag)
def test_every_byte_at_every_place_means_what_the_file_says(vendor: rig.Vendor, warp: int, quant: QuantType) -> None:
    """Row r: each byte that is no scale is (r + its place) * 37 mod 256, so that it takes 64 different values."""
    rows, cols = 64, quant.block_len
    whole = weights.matrix(quant, rows, cols, np.random.default_rng(SEED))
    kept = {at + i for at in weights.HALVES_AT[quant.name] for i in range(2)}
    kept |= {QuantType.MXFP4: {0}, QuantType.NVFP4: {0, 1, 2, 3}, QuantType.IQ1_M: {49, 51, 53, 55}}.get(quant, set())
    file = whole.file.copy()
    for place in range(quant.block_bytes):
        if place not in kept:
            file[:, place] = (np.arange(rows) + place) * 37 % 256
    exact = weights.of_blocks(quant, file, cols)
    np.testing.assert_array_equal(dequantised(exact, vendor, warp), exact.meaning)


@widths
def test_every_scale_of_the_floats_of_four_bits(vendor: rig.Vendor, warp: int) -> None:
    """MXFP4: from 2^-127, which is no normal float, to 2^127, where six and four are infinite; NVFP4: 0, subnormal, no
    number."""
    for quant, codes in ((QuantType.MXFP4, np.arange(255)), (QuantType.NVFP4, np.arange(128))):
        file = np.random.default_rng(SEED).integers(0, 256, (len(codes), quant.block_bytes), dtype=np.uint8)
        file[:, : 1 if quant is QuantType.MXFP4 else 4] = codes[:, None]
        with np.errstate(over="ignore"):
            exact = weights.of_blocks(quant, file, quant.block_len)
        np.testing.assert_array_equal(dequantised(exact, vendor, warp), exact.meaning)


@widths
@pytest.mark.parametrize("quant", [QuantType.Q3_K, QuantType.Q5_1, QuantType.NVFP4, QuantType.BF16], ids=ops.tag)
def test_pieces_may_come_in_any_order(vendor: rig.Vendor, warp: int, quant: QuantType) -> None:
    case = pack_case(quant, np.random.default_rng(SEED), warp)
    for launch in reversed(case.launches):
        run(launch, vendor, warp)
    case.check()


@widths
def test_a_whole_table_has_every_token(vendor: rig.Vendor, warp: int) -> None:
    for quant in (QuantType.Q6_K, QuantType.F16):
        case = embed_case(quant, np.random.default_rng(SEED + 1), warp)
        run(case.launches[0], vendor, warp)
        case.check()


@widths
def test_extreme_activations_are_exact_or_seen(vendor: rig.Vendor, warp: int) -> None:
    """The ends of a block's range, a block of zeros, one too small for a reciprocal, a huge one; and what is no
    number makes its block's scale so, and leaves the others alone."""
    x = np.random.default_rng(SEED).standard_normal((2, 288)).astype(np.float32)
    x[0, 0:32] = np.where(np.arange(32) % 2, 3.0, -3.0)
    x[0, 32:64] = 0.0
    x[0, 64:96] = 1e-31
    x[0, 96] = 1e38
    x[1, 40], x[1, 70], x[1, 100] = np.nan, np.inf, -np.inf
    case = quantize_case(np.random.default_rng(SEED), warp, x)
    run(case.launches[0], vendor, warp)
    case.check()
    _, hi, lo, scale, sums = case.arrays
    values = 256.0 * hi[0] + lo[0]
    assert (np.abs(values[0:32]) == 32512).all() and (values[32:96] == 0).all()
    assert np.isfinite(scale[0]).all() and (np.isfinite(scale[1]) == [True, False, False, False] + [True] * 5).all()
    assert (np.isfinite(sums[1]).reshape(-1, 2).all(axis=1) == np.isfinite(scale[1])).all()


@widths
def test_rows_need_no_alignment(vendor: rig.Vendor, warp: int) -> None:
    x = aligned(np.random.default_rng(SEED).standard_normal(1 + 3 * 97).astype(np.float32))
    rows = np.stack([x[1 + 97 * r : 1 + 97 * r + 96] for r in range(3)])
    want = weights.quantised(rows)
    got = weights.Quantised(*(nothing(each.shape, each.dtype) for each in want))
    run(ops.quantize_rows(Rows(rig.address(x) + 4, 97), got.at, 3, 96), vendor, warp)
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine, theirs)
