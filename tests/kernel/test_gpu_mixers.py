"""Norms, activations, routing and the sum of experts on a card, emulated: every case at each width, and what a case
alone cannot show: that a row's bits are its own, that a fused result has the bits of the plain one, who wins among
equals."""

from __future__ import annotations

import os
from collections.abc import Sequence

import gpu_buffers as buffers
import numpy as np
import pytest
import simt_rig as rig
from gpu_cases import address, aligned, mixers, nothing

from backends.base import Routing
from backends.gpu.launch import Launch
from backends.gpu.ops import mixers as ops
from backends.gpu.ops import quants
from backends.gpu.ops.buffers import NONE, Planes, Rows

SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "0", 16)
RIGS: tuple[tuple[rig.Vendor, int], ...] = (("cuda", 32), ("hip", 64))
widths = pytest.mark.parametrize(("vendor", "warp"), RIGS, ids=[f"{vendor}{warp}" for vendor, warp in RIGS])
PLAIN = sorted(name for name in mixers.CASES if not name.startswith(("delta", "join", "copy")))


def run(launches: Sequence[Launch], vendor: rig.Vendor, warp: int, *, backwards: bool = False) -> None:
    for launch in launches:
        rig.load(launch.symbol.file, vendor, warp).run(launch, backwards=backwards)


@widths
@pytest.mark.parametrize("name", PLAIN)
def test_each_case_equals_the_reference(vendor: rig.Vendor, warp: int, name: str) -> None:
    for seed in (SEED, SEED + 1, SEED + 2):
        case = mixers.CASES[name](np.random.default_rng(seed), warp)
        run(case.launches, vendor, warp, backwards=bool(seed % 2))
        case.check()


@widths
@pytest.mark.parametrize("width", [4, 31, 1000, 9000])
def test_a_norm_of_a_row_has_the_same_bits_among_any_others(vendor: rig.Vendor, warp: int, width: int) -> None:
    rng = np.random.default_rng(SEED)
    weight = aligned(rng.standard_normal(width).astype(np.float32))
    src = aligned(rng.standard_normal((3, width)).astype(np.float32))
    together, alone = nothing((3, width)), nothing((3, width))
    wide = Rows(address(src), width)
    run([ops.norm(3, width, wide, address(weight), 1e-6, Rows(address(together), width))], vendor, warp)
    for row in range(3):
        one, out = Rows(address(src) + 4 * row * width, 77), Rows(address(alone) + 4 * row * width, 99)
        run([ops.norm(1, width, one, address(weight), 1e-6, out)], vendor, warp)
    assert np.array_equal(together.view(np.uint32), alone.view(np.uint32))


@widths
@pytest.mark.parametrize("op", ["norm", "silu", "gelu", "swiglu_oai"])
def test_a_fused_result_is_quantised_as_by_itself(vendor: rig.Vendor, warp: int, op: str) -> None:
    """To the bit, planes, scales and sums; with a block of zeros, and one that is no number."""
    rng = np.random.default_rng(SEED + 5)
    rows, width = 3, 1120
    first, second = (buffers.filled(rng, rows, width) for _ in range(2))
    first.rows[1, 64:96] = second.rows[1, 64:96] = 0
    if op != "norm":
        first.rows[2, 320] = np.nan
    out, weight = buffers.empty(rng, rows, width), aligned(rng.standard_normal(width).astype(np.float32))
    fused, to = buffers.planes(rows, width)
    plain, at = buffers.planes(rows, width)
    if op == "norm":
        launch = ops.norm(rows, width, first.at, address(weight), 1e-6, out.at, second.at, to)
    else:
        launch = ops.gated_activation(rows, width, op, first.at, second.at, out.at, to)
    run([launch, quants.quantize_rows(out.at, at, rows, width)], vendor, warp)
    for one, other in zip(fused, plain, strict=True):
        assert np.array_equal(one.view(np.uint8), other.view(np.uint8))
    assert not fused[2][1, 2] and not fused[0][1, 64:96].any()
    assert op == "norm" or not np.isfinite(fused[2][2, 10])


def _routed(logits: np.ndarray, routing: Routing, vendor: rig.Vendor, warp: int) -> tuple[np.ndarray, np.ndarray]:
    logits = aligned(np.ascontiguousarray(logits, np.float32))
    ids, weights = nothing((len(logits), routing.used), np.int32), nothing((len(logits), routing.used))
    at = Rows(address(logits), routing.experts)
    run([ops.route(len(logits), routing, at, address(ids), address(weights))], vendor, warp)
    return ids, weights


@widths
@pytest.mark.parametrize("func", ops.ROUTE_FUNCS)
@pytest.mark.parametrize("experts", [40, 300])
def test_of_equal_experts_the_first_are_chosen(vendor: rig.Vendor, warp: int, func: str, experts: int) -> None:
    """Also where zeros of both signs are equal."""
    logits = np.zeros((2, experts), np.float32)
    logits[0, ::2] = -0.0
    logits[1, [experts - 1, 7, 39]] = 2
    ids, weights = _routed(logits, Routing(experts, 8, func), vendor, warp)
    assert ids[0].tolist() == list(range(8))
    assert (
        ids[1].tolist()
        == sorted({7, 39, experts - 1}) + [each for each in range(8) if each != 7][: 8 - len({7, 39, experts - 1})]
    )
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)


@widths
def test_logits_that_are_no_numbers_choose_experts_that_there_are(vendor: rig.Vendor, warp: int) -> None:
    logits = np.full((5, 50), np.nan, np.float32)
    logits[1] = np.inf
    logits[2] = -np.inf
    logits[3, 20:] = -np.nan
    logits.view(np.uint32)[4] = 0xFFFFFFFF
    for func in ops.ROUTE_FUNCS:
        ids, _ = _routed(logits, Routing(50, 16, func), vendor, warp)
        assert (np.diff(np.sort(ids, axis=1)) > 0).all() and 0 <= ids.min() <= ids.max() < 50


def test_more_experts_than_lanes_hold_are_refused() -> None:
    for routing in (Routing(513, 8), Routing(512, 33), Routing(4, 5), Routing(8, 0)):
        with pytest.raises(ValueError, match="can be chosen"):
            ops.route(1, routing, NONE, 0, 0)


def test_rows_that_are_no_whole_blocks_are_not_quantised() -> None:
    with pytest.raises(ValueError, match="blocks of 32"):
        ops.norm(1, 48, NONE, 0, 1e-6, NONE, planes=Planes(1, 1, 1, 1))
