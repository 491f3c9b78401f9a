"""The emulation of cards itself: meetings at both widths, and that each mistake which it is there for is found."""

from __future__ import annotations

import numpy as np
import pytest
import simt_rig as rig
from gpu_cases import Array, nothing

from backends.gpu.launch import Launch, Symbol, params

PROBE = rig.SIMT / "probe.cu"
WIDTHS: dict[int, rig.Vendor] = {32: "cuda", 64: "hip"}
BUILD_S = 600  # the first test of a library compiles it

pytestmark = [
    pytest.mark.timeout(BUILD_S),
    pytest.mark.skipif(rig.compiler() is None, reason="no C++ compiler"),
]
widths = pytest.mark.parametrize("warp", WIDTHS)


def launch(warp: int, name: str, grid: int, threads: int, *args: Array | float, shared: int = 0) -> Launch:
    entry = rig.load(PROBE, WIDTHS[warp], warp).entries[name]
    told = ", ".join(f"{'' if kind == 'pointer' else kind} {each}" for kind, each in entry.params)
    symbol = Symbol(name, PROBE.stem, name, params(told), threads)
    words = tuple(rig.address(each) if isinstance(each, np.ndarray) else each for each in args)
    return Launch(symbol, (grid, 1, 1), words, shared=shared)


def run(warp: int, *launches: Launch, backwards: bool = False) -> None:
    rig.load(PROBE, WIDTHS[warp], warp).run(*launches, backwards=backwards)


def under(sanitizer: rig.Sanitizer, warp: int, one: Launch, *arrays: Array) -> None:
    rig.sanitized(rig.build(PROBE, WIDTHS[warp], warp, sanitizer=sanitizer), [one], arrays)


@widths
@pytest.mark.parametrize("backwards", [False, True])
def test_lanes_and_blocks_get_from_each_other_what_they_ask_for(warp: int, backwards: bool) -> None:
    threads, blocks = 4 * warp if warp == 32 else 2 * warp, 3
    count = threads * blocks
    values = np.random.default_rng(5).integers(-50, 50, count).astype(np.float32)  # sums are exact in any order
    who, words = nothing((count, 4), np.int32), nothing((count, 4), np.uint32)
    sums, votes = nothing((count, 5)), nothing((count,), np.uint64)
    run(warp, launch(warp, "meetings", blocks, threads, values, who, sums, words, votes), backwards=backwards)

    i = np.arange(count)
    lane, first = i % warp, i // warp * warp
    np.testing.assert_array_equal(who, np.stack([i % threads, lane, i % threads // warp, 0 * i], 1))
    of_warp, of_eight, of_block = (values.reshape(-1, n) for n in (warp, 8, threads))
    expected = [of_warp.sum(1), of_warp.max(1), of_eight.sum(1), of_block.sum(1), of_block.max(1)]
    np.testing.assert_array_equal(sums, np.stack([np.repeat(each, count // len(each)) for each in expected], 1))
    np.testing.assert_array_equal(words[:, 0], first + (3 * lane + 1) % warp)
    np.testing.assert_array_equal(words[:, 1], first + (lane ^ 5))
    np.testing.assert_array_equal(words[:, 2], first + np.where(lane + 3 < warp, lane + 3, lane))
    left, right = ((i * 0x01030507).astype(np.int32), (-i).astype(np.int32))
    products = left.view(np.int8).astype(np.int32) * right.view(np.int8)
    np.testing.assert_array_equal(words[:, 3].view(np.int32), products.reshape(-1, 4).sum(1) + 7)
    bits = (of_warp > 0).astype(np.uint64) << np.arange(warp, dtype=np.uint64)
    np.testing.assert_array_equal(votes, np.repeat(bits.sum(1, dtype=np.uint64), warp))


def test_halves_are_ieee_halves() -> None:
    rng = np.random.default_rng(1)
    some = rng.integers(0, 1 << 32, 60_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    near = (np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32) + 0x1000).view(
        np.float32
    )
    values = np.concatenate([some, near, np.float32([65519.996, 65520, 2**-25, 2**-25 * 1.001, 0, -0.0, np.inf])])
    narrow, wide = nothing((values.size,), np.uint16), nothing((65536,))
    run(32, launch(32, "halves", 1, 64, values, narrow, wide, values.size))
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    known = ~np.isnan(values)
    np.testing.assert_array_equal(narrow[known], expected.view(np.uint16)[known])
    assert np.isnan(narrow.view(np.float16)[~known]).all()
    np.testing.assert_array_equal(wide, np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32))


@widths
def test_atomics_and_wide_arguments(warp: int) -> None:
    total, sums = np.zeros(1, np.uint64), np.zeros(1, np.float32)
    run(warp, launch(warp, "count_all", 5, 64, total, sums, -(1 << 40), 0xFFFFFFFF))
    assert int(total[0]) == (320 * (0xFFFFFFFF - (1 << 40))) % (1 << 64)
    assert sums[0] == 160


@widths
def test_every_barrier_is_one(warp: int) -> None:
    out = nothing((256,), np.int32)
    for backwards in (False, True):
        run(warp, launch(warp, "fifty_barriers", 1, 256, out), backwards=backwards)
        np.testing.assert_array_equal(out, (np.arange(256) + 25) % 256)


@widths
def test_block_memory_that_nobody_wrote_is_no_number(warp: int) -> None:
    out = nothing((2, 64))
    run(warp, launch(warp, "not_written", 2, 32, out, shared=128))
    assert (out[0] == 1).all()
    assert np.isnan(out[1]).all()


TILES = {
    "mma16": ("cuda", 32, "TILES_MMA16"),
    "mma8": ("cuda", 32, "TILES_MMA8"),
    "wmma gfx11": ("hip", 32, "TILES_WMMA11"),
    "wmma gfx12": ("hip", 32, "TILES_WMMA12"),
    "mfma": ("hip", 64, "TILES_MFMA"),
    "plain 32": ("cuda", 32, "TILES_PLAIN"),
    "plain 64": ("hip", 64, "TILES_PLAIN"),
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("cores", TILES)
def test_tiles_multiply_by_the_layout_of_each_matrix_core(cores: str, turned: bool) -> None:
    vendor, warp, define = TILES[cores]
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-20, 20, (16, 16)).astype(np.float16) for _ in range(2))  # exact in single precision
    out = nothing((16, 16))
    one = launch(warp, "tiles", 1, warp, a, b, out, int(turned))
    rig.load(PROBE, vendor, warp, define).run(one)  # type: ignore[arg-type]
    np.testing.assert_array_equal(out, a.astype(np.float32) @ (b.T if turned else b).astype(np.float32))


ASTRAY = {
    0: r"divergence.*lanes 0-6: wait in shuffle at probe\.cu:\d+.*lanes 7-\d+: wait in ballot at probe\.cu:\d+",
    1: r"deadlock.*warp 0: wait in block_barrier at probe\.cu:\d+.*warp 1: have left the kernel",
    2: r"deadlock.*lanes 0-4: wait in shuffle at probe\.cu:\d+.*lane 5: have left the kernel",
    3: r"divergence.*warp 0: wait in block_barrier at probe\.cu:\d+.*warps? 1(-3)?: wait in block_barrier",
    4: r"shuffle from lane \d+ of \d+ at probe\.cu:\d+ by thread \d+ \(warp \d, lane \d+\) of astray, block",
    5: r"16 bytes at an address that is no multiple of 16 at probe\.cu:\d+ by thread \d+",
}


@widths
@pytest.mark.parametrize("how", ASTRAY)
def test_whoever_goes_astray_is_named(warp: int, how: int) -> None:
    out = nothing((128,), np.uint32)
    for backwards in (False, True):
        with pytest.raises(rig.Fault, match=f"(?s){ASTRAY[how]}"):
            run(warp, launch(warp, "astray", 1, 128, out, how), backwards=backwards)
    run(warp, launch(warp, "astray", 1, 128, out, -1))  # and nothing is left of it
    np.testing.assert_array_equal(out, np.arange(128))


@widths
@pytest.mark.parametrize(("where", "at"), [(0, 24), (0, -1), (1, 16), (1, -2)])
def test_a_write_beside_block_memory_is_found_without_a_sanitizer(warp: int, where: int, at: int) -> None:
    with pytest.raises(rig.Fault, match="out of bounds: a write (behind|before)"):
        run(warp, launch(warp, "overrun", 1, 32, nothing((4,)), where, at, shared=64))
    run(warp, launch(warp, "overrun", 1, 32, nothing((4,)), where, 15, shared=64))


def test_a_launch_that_no_card_would_take_is_refused() -> None:
    out = nothing((4,))
    with pytest.raises(rig.Fault, match="a block of 64 threads, where the entry says at most 32"):
        run(32, launch(32, "not_written", 1, 64, out, shared=128))
    with pytest.raises(ValueError, match="takes 1 arguments, not 2"):
        launch(32, "not_written", 1, 32, out, 1)


@pytest.mark.parametrize(("where", "size"), [(0, 24), (1, 16), (2, 4)])
def test_an_access_past_an_array_is_found_by_the_address_sanitizer(where: int, size: int) -> None:
    out = nothing((4,))
    under("address", 32, launch(32, "overrun", 1, 32, out, where, 3, shared=64), out)
    assert (out[3] == 1) == (where == 2)
    with pytest.raises(rig.Report, match=r"(?s)heap-buffer-overflow.*WRITE of size 4.*probe\.cu"):
        under("address", 32, launch(32, "overrun", 1, 32, out, where, size, shared=64), out)


@widths
@pytest.mark.parametrize(("how", "ordered"), [(0, True), (1, False), (2, True), (3, False), (4, False)])
def test_a_race_within_a_block_is_found_by_the_thread_sanitizer(warp: int, how: int, ordered: bool) -> None:
    out = nothing((128,))
    one = launch(warp, "neighbour", 1, 128, out, how)
    if ordered:
        under("thread", warp, one, out)
        beside = np.arange(128) ^ 1 if how == 2 else (np.arange(128) + warp) % 128
        np.testing.assert_array_equal(out, beside)
    else:
        with pytest.raises(rig.Report, match=r"(?s)data race.*probe\.cu"):
            under("thread", warp, one, out)


@widths
def test_sums_of_a_block_are_no_race(warp: int) -> None:
    threads = 2 * warp
    values = np.arange(threads, dtype=np.float32)
    who, words = nothing((threads, 4), np.int32), nothing((threads, 4), np.uint32)
    sums, votes = nothing((threads, 5)), nothing((threads,), np.uint64)
    one = launch(warp, "meetings", 1, threads, values, who, sums, words, votes)
    under("thread", warp, one, values, who, sums, words, votes)
    np.testing.assert_array_equal(sums[:, 3:], np.tile([values.sum(), values.max()], (threads, 1)))


def test_a_race_between_blocks_is_found_by_the_thread_sanitizer() -> None:
    out = np.zeros(1, np.float32)
    under("thread", 32, launch(32, "blocks_meet", 3, 32, out, 1), out)
    assert out[0] == 3
    with pytest.raises(rig.Report, match=r"(?s)data race.*probe\.cu"):
        under("thread", 32, launch(32, "blocks_meet", 3, 32, out, 0), out)


def test_an_address_in_no_array_of_the_case_is_refused() -> None:
    out = nothing((4,))
    with pytest.raises(ValueError, match="is in no buffer of the case"):
        under("address", 32, launch(32, "overrun", 1, 32, nothing((4,)), 2, 0), out)
