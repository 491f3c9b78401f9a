"""Products of few rows on a card, emulated: what the cases of gpu_cases/linear.py do not show. A row's bits are its
own, in every variant, at both widths, forwards and backwards; teams of each size; the largest sums; NaN."""

from __future__ import annotations

import os
from dataclasses import replace

import gpu_weights as weights
import numpy as np
import pytest
import simt_rig as rig
from gpu_cases import Array, aligned, nothing

from backends.gpu.ops import linear as ops
from backends.gpu.ops.quants import MATRICES, tag
from backends.quant import QuantType

SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "0", 16)
RIGS: tuple[tuple[rig.Vendor, int], ...] = (("cuda", 32), ("hip", 64))
widths = pytest.mark.parametrize(("vendor", "warp"), RIGS, ids=[f"{vendor}{warp}" for vendor, warp in RIGS])
types = pytest.mark.parametrize("quant", MATRICES, ids=tag)


def product(
    whole: weights.Matrix, x: Array, vendor: rig.Vendor, warp: int, *,
    variant: int = 0, team: int = 0, backwards: bool = False,
) -> Array:  # fmt: skip
    acts = weights.acts(whole.quant, aligned(x))
    out = nothing((len(x), whole.rows))
    launch = ops.linear_few(
        whole.quant, rig.address(out), rig.address(whole.planes), acts.at,
        rows=len(x), outs=whole.rows, cols=whole.cols, variant=variant,
    )  # fmt: skip
    if team:
        per_block = ops.THREADS // team * ops.OUTS_OF_TEAM
        launch = replace(launch, args=(*launch.args[:-1], team), grid=(-(-whole.rows // per_block), *launch.grid[1:]))
    rig.load("linear_few", vendor, warp).run(launch, backwards=backwards)
    return out


def normal(rng: np.random.Generator, rows: int, cols: int) -> Array:
    return rng.standard_normal((rows, cols)).astype(np.float32)


@types
def test_a_row_has_the_same_bits_in_every_variant_and_at_both_widths(quant: QuantType) -> None:
    rng = np.random.default_rng(SEED)
    cols = 768 if quant.block_len > 1 else 203
    whole, x = weights.matrix(quant, 21, cols, rng), normal(rng, 9, cols)
    want = product(whole, x, "cuda", 32, variant=8)
    for vendor, warp in RIGS:
        for variant in ops.VARIANTS:
            got = product(whole, x, vendor, warp, variant=variant, backwards=True)
            assert (got.view(np.uint32) == want.view(np.uint32)).all(), (warp, variant)
    alone = product(whole, x[4:5], "hip", 64)
    assert (alone.view(np.uint32) == want[4:5].view(np.uint32)).all()


@widths
@pytest.mark.parametrize("cols", [32, 576, 640, 1568])
def test_teams_of_each_size_agree_whatever_is_left_over(vendor: rig.Vendor, warp: int, cols: int) -> None:
    rng = np.random.default_rng(SEED + cols)
    for quant in (QuantType.Q4_0, QuantType.Q5_1, QuantType.Q8_0, QuantType.MXFP4, QuantType.F16):
        whole, x = weights.matrix(quant, 37, cols, rng), normal(rng, 2, cols)
        for team in (8, 16, 32):
            acts = weights.acts(quant, aligned(x)).value
            weights.close(product(whole, x, vendor, warp, team=team), acts, whole.meaning)


@widths
@pytest.mark.parametrize("fill", [0x00, 0x80, 0x7F, 0xFF])
def test_the_largest_sums_fit(vendor: rig.Vendor, warp: int, fill: int) -> None:
    """All quants alike and activations of one magnitude and sign, or of turns: no integer overflows. Q6_K with its
    scales: -128 times -32 times 32512."""
    x = np.stack([np.full(256, 3.0), np.full(256, -3.0), np.where(np.arange(256) % 2, 3.0, -3.0)]).astype(np.float32)
    for quant in MATRICES:
        if quant.block_len == 1:
            continue
        whole = weights.matrix(quant, 5, 256, np.random.default_rng(SEED))
        blocks = whole.file.reshape(5, -1, quant.block_bytes).copy()
        kept = sorted(at + i for at in weights.HALVES_AT[quant.name] for i in range(2))
        own = {QuantType.MXFP4: (0,), QuantType.NVFP4: (0, 1, 2, 3), QuantType.IQ1_M: (49, 51, 53, 55)}.get(quant, ())
        filled = np.full_like(blocks, fill)
        filled[:, :, [*kept, *own]] = blocks[:, :, [*kept, *own]]
        full = weights.of_blocks(quant, filled.reshape(5, -1), 256)
        weights.close(product(full, x, vendor, warp), weights.acts(quant, aligned(x)).value, full.meaning)


@widths
@pytest.mark.parametrize("quant", [QuantType.Q4_K, QuantType.Q8_0, QuantType.F32], ids=tag)
def test_what_is_no_number_is_seen_in_its_row_alone(vendor: rig.Vendor, warp: int, quant: QuantType) -> None:
    rng = np.random.default_rng(SEED)
    whole, x = weights.matrix(quant, 9, 512, rng), normal(rng, 4, 512)
    want = product(whole, x, vendor, warp)
    x[2, 300] = np.nan
    got = product(whole, x, vendor, warp)
    assert np.isnan(got[2]).all()
    others = [0, 1, 3]
    assert (got[others] == want[others]).all()


@widths
@pytest.mark.parametrize("cols", [1, 3, 4, 7, 8, 130])
def test_rows_of_floats_of_any_length_and_place(vendor: rig.Vendor, warp: int, cols: int) -> None:
    rng = np.random.default_rng(SEED + cols)
    for quant in (QuantType.F32, QuantType.F16, QuantType.BF16):
        whole, x = weights.matrix(quant, 11, cols, rng), normal(rng, 3, cols)
        weights.close(product(whole, x, vendor, warp), x.astype(np.float64), whole.meaning)


@widths
@pytest.mark.parametrize("quant", [QuantType.Q5_K, QuantType.IQ4_NL, QuantType.BF16], ids=tag)
def test_an_expert_has_the_bits_of_its_matrix_alone(vendor: rig.Vendor, warp: int, quant: QuantType) -> None:
    """Bits and not only numbers: lanes share an expert's row as `linear_few` does where its team is the same."""
    rng = np.random.default_rng(SEED)
    height, cols = 7, 512
    tensor, x = weights.matrix(quant, 3 * height, cols, rng), normal(rng, 2, cols)
    acts = weights.acts(quant, aligned(x))
    chosen, out = aligned(np.array([2, 0, 1, 2], np.int32)), nothing((4, height))
    launch = ops.experts_few(
        quant, rig.address(out), rig.address(tensor.planes), acts.at, rig.address(chosen),
        ops.ExpertRows(tensor.rows, cols, height, 0, height), pairs=4, share=2, held=(0, 3),
    )  # fmt: skip
    rig.load("experts_few", vendor, warp).run(launch)
    for pair, expert in enumerate(chosen):
        rows = slice(expert * height, (expert + 1) * height)
        file = np.ascontiguousarray(tensor.file[rows])
        own = weights.Matrix(quant, file, tensor.meaning[rows], weights.packed(quant, file, cols))
        want = product(own, x[pair // 2 : pair // 2 + 1], vendor, warp, team=int(launch.args[-1]))
        assert (out[pair].view(np.uint32) == want[0].view(np.uint32)).all(), pair
