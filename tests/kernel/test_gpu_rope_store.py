"""RopeStore on a card, emulated: angles, norms, and the pool's bytes."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace

import kernel_rig as cpu
import numpy as np
import pytest
import simt_rig as rig
from gpu_cases import Array, Case, address, aligned
from gpu_cases.attention import Turned, rope_case
from gpu_pages import F8

from backends.base import Attention, Batch, Buffer, KvLayer, KvPool, Op, RopeStore
from backends.gpu.ops import attention as ops
from backends.quant import QuantType

SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "0", 16)
RIGS: tuple[tuple[rig.Vendor, int], ...] = (("cuda", 32), ("hip", 64))
widths = pytest.mark.parametrize(("vendor", "warp"), RIGS, ids=[f"{vendor}{warp}" for vendor, warp in RIGS])


def run(case: Case, vendor: rig.Vendor, warp: int) -> None:
    for launch in case.launches:
        rig.load(launch.symbol.file, vendor, warp).run(launch)


ASKED = {
    "halves": Turned("f16"),
    "pairs": Turned("f16", interleaved=True),
    "in part": Turned("f16", dims=96, pairs=16),
    "not at all": Turned("f16", pairs=0),
    "a gate behind each query": Turned("f16", gap=64),
    "without norms": Turned("f16", normed=False),
    "v normed": Turned("f32", v_norm=True),
    "k is v": Turned("bf16", same=True),
    "k is v, normed": Turned("f32", same=True, v_norm=True),
    "no query heads": Turned("f16", heads=0),
    "no rows of its own": Turned("f16", kv_heads=0),
    "odd head": Turned("f16", dims=20, pairs=10),
    "odd head of bytes": Turned("f8", dims=40, pairs=3),
    "large head": Turned("q8_0", dims=512, pairs=256),
    "three blocks of scales": Turned("q8_0", dims=96, pairs=48),
    "latent rows": Turned("f16", dims=576, kv_heads=1, pairs=32, interleaved=True, latent=512),
    "latent rows of blocks": Turned("q8_0", dims=96, kv_heads=1, pairs=16, latent=64),
    "many heads": Turned("q8_0", heads=13, kv_heads=5),
}


@widths
@pytest.mark.parametrize("name", ASKED)
def test_heads_are_normed_turned_and_stored(vendor: rig.Vendor, warp: int, name: str) -> None:
    print(f"HOMESERVE_TEST_SEED={SEED:x}")
    case = rope_case(np.random.default_rng(SEED), warp, ASKED[name])
    run(case, vendor, warp)
    case.check()


def stored(vendor: rig.Vendor, warp: int, kv: str, values: Array) -> None:
    """Rows of one head of V, and that what the pool gets of them is what `gpu_pages` says."""
    rows, dims = values.shape
    asked = Turned(kv, dims, 0, 1, rows, 0, normed=False, values=values.astype(np.float32))
    case = rope_case(np.random.default_rng(0), warp, asked)
    run(case, vendor, warp)
    case.check()


@widths
def test_f8_rounds_to_the_nearest_even(vendor: rig.Vendor, warp: int) -> None:
    sizes = F8[:127].astype(np.float32)
    middles = (sizes[:-1] + sizes[1:]) / 2
    near = [np.nextafter(middles, np.float32(to)) for to in (0, 1e9)]
    far = np.array([449, 463.9, 480, 1e9, np.inf, np.nan, 1e-30, 0], np.float32)
    all_of = np.concatenate([sizes, middles, *near, far])
    all_of = np.concatenate([all_of, -all_of])
    stored(vendor, warp, "f8", np.resize(all_of, (8, 144)))


@widths
@pytest.mark.parametrize("kv", ("f16", "bf16"))
def test_halves_round_to_the_nearest_even(vendor: rig.Vendor, warp: int, kv: str) -> None:
    bits = np.random.default_rng(SEED).integers(0, 2**32, (16, 64), np.uint32)
    bits[:8] &= 0xFFFFF000  # ties
    bits[:4] |= 0x1000
    values = bits.view(np.float32)
    stored(vendor, warp, kv, np.where(np.isnan(values), np.float32(np.inf), values))


@widths
def test_q8_0_takes_its_scale_from_the_largest(vendor: rig.Vendor, warp: int) -> None:
    random = np.random.default_rng(SEED)
    values = random.standard_normal((16, 96)) * 10.0 ** random.uniform(-4, 4, (16, 1))
    values[3, 32:64] = 0.0
    values[4, :32] = np.arange(32) * 4.0 + 2.0  # the largest is 126: steps of 126 / 127
    stored(vendor, warp, "q8_0", values)


@widths
@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
def test_q8_0_does_not_hide_what_is_no_number(vendor: rig.Vendor, warp: int, bad: float) -> None:
    values = np.ones((1, 64), np.float32)
    values[0, 37] = bad
    asked = Turned("q8_0", 64, 0, 1, 1, 0, normed=False, values=values)
    case = rope_case(np.random.default_rng(0), warp, asked)
    run(case, vendor, warp)
    pool = case.arrays[4]  # V: pages of 2 x 16 scales, then 16 slots
    scales = pool.reshape(4, -1)[:, :64].copy().view(np.float16).reshape(4, 2, 16)
    used = ~(pool.reshape(4, -1)[:, :64].copy().view(np.uint16).reshape(4, 2, 16) == 0xFFFF)
    assert used.sum() == 2
    assert sorted(np.isnan(scales[used]).tolist()) == [False, True]


@widths
@pytest.mark.parametrize("kv", ops.KV_TYPES)
def test_the_pool_is_that_of_the_cpu_to_the_bit(vendor: rig.Vendor, warp: int, kv: str) -> None:
    """The same rows into the same slots: what a flip carries is the same whoever wrote it."""
    random, rows, heads, dims = np.random.default_rng(SEED), 9, 3, 64
    k, v = (
        (random.standard_normal((rows, heads * dims)) * 10.0 ** random.uniform(-3, 2, (rows, 1))).astype(np.float32)
        for _ in range(2)
    )
    slots = random.permutation(4 * 16)[:rows].astype(np.int32)
    at = np.arange(rows, dtype=np.int32)
    op_q, table_q, q = cpu.feed("q", np.ones((rows, heads * dims), np.float32))
    op_k, table_k, of_k = cpu.feed("k", k)
    op_v, table_v, of_v = cpu.feed("v", v)
    ops_of: list[Op] = [op_q, op_k, op_v, RopeStore(q, of_k, of_v, 0, heads, heads, dims, None)]
    ops_of.append(Attention(q, Buffer("out", heads * dims), 0, heads, heads, dims, 1.0))
    pool = KvPool((KvLayer(heads, dims),), 4 * 16, QuantType[ops.KV_TYPES[kv]])
    program = cpu.bind(
        cpu.backend(cpu.tested_levels()[-1]), ops_of, [table_q, table_k, table_v], pool, rows, 1, 1, rows
    )
    lanes = at, (slots // 16)[None, :, None].astype(np.int32)
    program.run(Batch(at, slots % 16, slots[None], *lanes, np.zeros(0, np.int32)))
    (region,) = (each for each in program.memory_regions() if each.line == "kv")
    there = np.frombuffer(ctypes.string_at(region.address, region.bytes), np.uint8)

    pools = [np.zeros(each.size // 2, np.uint8) for each in (there, there)]
    own = [aligned(each) for each in (np.ones((rows, 1), np.float32), k, v, *pools, at, slots)]
    shape = ops.RopeShape(kv, rows, 0, heads, dims, dims, 1, 4)
    run(Case(ops.rope_store(shape, ops.RopeMemory(*map(address, own), turns=0)), (), lambda: None), vendor, warp)
    program.close()
    assert np.array_equal(np.concatenate(own[3:5]), there)


@widths
def test_angles_are_exact_at_far_positions(vendor: rig.Vendor, warp: int) -> None:
    """Against arithmetic of 80 bits or more: one position's error is that of the last rounding, here as at 0."""
    frequencies = (1.0, 0.75, 1.0e-2, 3.3e-5)
    positions = np.array([0, 1, 4095, 999_999, 1_048_575, 2_000_003], np.int32)
    q = aligned(np.tile(np.array([1, 1, 1, 1, 0, 0, 0, 0], np.float32), (len(positions), 1)))
    turns = aligned(ops.rope_turns(frequencies))
    at = aligned(positions)
    shape = ops.RopeShape("f16", len(positions), 1, 0, 8, 8, 8, 1, pairs=4)
    memory = ops.RopeMemory(address(q), 0, 0, 0, 0, address(at), 0, address(turns))
    for launch in ops.rope_store(shape, memory):
        rig.load("rope_store", vendor, warp).run(launch)
    angles = positions.astype(np.longdouble)[:, None] * np.array(frequencies, np.longdouble)
    want = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float64)
    np.testing.assert_allclose(q, want, rtol=0, atol=1.5e-7)


def test_turns_are_fractions_of_a_turn() -> None:
    assert ops.rope_turns([2 * np.pi / 4]).tolist() == [pytest.approx(2**62, rel=1e-15)]
    assert ops.rope_turns([]).shape == (0,)


def test_nothing_to_do_is_no_launch() -> None:
    shape = ops.RopeShape("f16", 0, 2, 1, 64, 64, 128, 4)
    nowhere = ops.RopeMemory(*[0] * 8)
    assert ops.rope_store(shape, nowhere) == ()
    assert ops.rope_store(replace(shape, rows=2, heads=0, kv_heads=0), nowhere) == ()
