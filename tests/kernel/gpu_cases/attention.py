"""Cases of backends.gpu.ops.attention: random sequences in random pages, against attention in double precision."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import gpu_pages
import numpy as np

from backends.gpu.ops import attention as ops
from backends.reference.compute import attend, attend_some, head_norm, merge_parts, rotate, sigmoid
from gpu_cases import Array, Case, Maker, address, aligned, nothing

PAGE = 16


@dataclass(frozen=True)
class Asked:
    """An Attention op, and what sequences it is asked for: (length, rows at its end)."""

    kv: str
    dims: int
    heads: int = 4
    kv_heads: int = 2
    sequences: tuple[tuple[int, int], ...] = ((150, 1), (20, 2))
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    gated: bool = False
    partial: bool = False
    part_pages: int = 8
    tile_rows: int = 4
    scale: float = 0.0
    """0: one over the root of dims."""


@dataclass
class Filled:
    """`Asked` in memory."""

    asked: Asked
    rng: np.random.Generator
    arrays: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        a, rng = self.asked, self.rng
        rows = sum(rows for _, rows in a.sequences)
        self.positions = np.concatenate([np.arange(end - rows, end, dtype=np.int32) for end, rows in a.sequences])
        self.lanes = np.repeat(np.arange(len(a.sequences), dtype=np.int32), [rows for _, rows in a.sequences])
        lane_pages = max(-(-end // PAGE) for end, _ in a.sequences)
        self.pool_pages = len(a.sequences) * lane_pages + 1
        self.tables = rng.permutation(self.pool_pages)[: len(a.sequences) * lane_pages].astype(np.int32)
        self.tables = self.tables.reshape(-1, lane_pages)
        # What nobody wrote is no number.
        self.k, self.v = (np.full((self.pool_pages * PAGE, a.kv_heads, a.dims), np.nan, np.float32) for _ in range(2))
        for lane, (end, _) in enumerate(a.sequences):
            slots = self.slots(lane, 0, end)
            for rows_of in (self.k, self.v):
                rows_of[slots] = rng.standard_normal((end, a.kv_heads, a.dims)).astype(np.float32)
        for lane, (end, rows_here) in enumerate(a.sequences):  # nor what no window shows
            if a.window and end - rows_here - a.window > PAGE:
                self.tables[lane, : (end - rows_here - a.window) // PAGE] = -7
        if a.partial:
            self.tables[rng.random(self.tables.shape) < 0.5] = -1
        q_step = a.dims * (2 if a.gated else 1)
        self.q = rng.standard_normal((rows, a.heads, q_step)).astype(np.float32)
        self.sinks = rng.standard_normal(a.heads).astype(np.float32) if a.sinks else None
        self.out = nothing((rows, a.heads * a.dims + (a.heads if a.partial else 0)))
        self.shape = ops.Shape(
            *(a.kv, a.heads, a.kv_heads, a.dims, a.scale or a.dims**-0.5, q_step, a.heads * q_step, self.out.shape[1]),
            *(lane_pages, self.pool_pages, a.window, a.softcap, a.gated, a.partial),
        )

    def slots(self, lane: int, first: int, end: int) -> Array:
        at = np.arange(first, end)
        pages = self.tables[lane][at // PAGE]
        return (pages * PAGE + at % PAGE)[pages >= 0]

    def take(self, array: Array) -> int:
        """The address of an aligned copy that the case keeps."""
        self.arrays.append(aligned(array))
        return address(self.arrays[-1])

    def memory(self, tiles: Array, parts: tuple[int, int]) -> ops.Memory:
        self.arrays.append(self.out)
        pool = self.take(gpu_pages.keys(self.asked.kv, self.k)), self.take(gpu_pages.values(self.asked.kv, self.v))
        places = (*pool, *(self.take(each) for each in (self.tables, self.positions, self.lanes, tiles)))
        left = [nothing((max(each, 4),)) for each in parts]
        self.arrays += left
        sinks = 0 if self.sinks is None else self.take(self.sinks)
        return ops.Memory(address(self.out), self.take(self.q), *places, *map(address, left), sinks)

    def check(self, tolerance: float) -> None:
        a = self.asked
        k, v = (gpu_pages.kept(a.kv, each) for each in (self.k, self.v))
        queries, heads = self.q[..., : a.dims].astype(np.float64), a.heads * a.dims
        for row, position in enumerate(self.positions):
            end = int(position) + 1
            seen = self.slots(int(self.lanes[row]), max(0, end - a.window) if a.window else 0, end)
            rows = queries[row], k[seen], v[seen], self.shape.scale, a.softcap
            logs = None
            if a.partial:
                want, logs = attend_some(*rows)
            else:
                want = attend(*rows, None if self.sinks is None else self.sinks.astype(np.float64))
            if a.gated:
                want = want * sigmoid(self.q[row, :, a.dims :].astype(np.float64))
            got = self.out[row, :heads].reshape(a.heads, a.dims)
            np.testing.assert_allclose(got, want, rtol=0, atol=tolerance, err_msg=f"row {row} at {position} of {a}")
            if logs is not None:
                np.testing.assert_allclose(self.out[row, heads:], logs, rtol=0, atol=4 * tolerance)


def _random(rng: np.random.Generator, asked: Asked) -> Asked:
    """Other lengths, heads and tails from the same op."""
    group = int(rng.integers(1, 6))
    kv_heads = int(rng.integers(1, 3))
    sequences = tuple((int(rng.integers(4, 200)), int(rng.integers(1, 4))) for _ in range(2))
    return replace(asked, heads=group * kv_heads, kv_heads=kv_heads, sequences=sequences)


def few_case(rng: np.random.Generator, warp: int, asked: Asked) -> Case:
    filled = Filled(asked, rng)
    cut = ops.cut_tiles(filled.lanes, asked.tile_rows)
    # One more tile without rows, as a recorded graph has.
    tiles, parts = ops.Tiles(len(cut) + 1, asked.tile_rows), ops.parts(asked.part_pages, filled.shape, asked.tile_rows)
    cut = np.concatenate([cut, np.zeros((1, 2), np.int32)])
    memory = filled.memory(cut, ops.part_floats(filled.shape, tiles, parts))
    launches = ops.few(filled.shape, memory, tiles, parts)
    return Case(launches, tuple(filled.arrays), lambda: filled.check(2e-5))


def many_case(rng: np.random.Generator, warp: int, asked: Asked, *, parts: bool = False) -> Case:
    filled = Filled(asked, rng)
    cut = ops.cut_tiles(filled.lanes, asked.tile_rows)
    tiles = ops.Tiles(len(cut) + 1, asked.tile_rows)
    cut = np.concatenate([cut, np.zeros((1, 2), np.int32)])
    split = ops.parts(asked.part_pages, filled.shape, asked.tile_rows) if parts else None
    memory = filled.memory(cut, ops.part_floats(filled.shape, tiles, split) if split else (0, 0))
    launches = ops.many(filled.shape, memory, tiles, split)
    return Case(launches, tuple(filled.arrays), lambda: filled.check(halves_tolerance(filled.shape)))


def halves_tolerance(shape: ops.Shape) -> float:
    """Of products of halves. A query's parts are rounded by up to 2^-11 of themselves, so a score of `dims` products of
    normal numbers is off by some scale * sqrt(dims) * 2^-12, and a weight by as much of itself: with the usual scale,
    1 / sqrt(dims), 2.4e-4, no more than the rounding of the weights themselves. A larger scale makes it larger."""
    return 4e-3 * max(1.0, shape.scale * shape.dims**0.5 / 4)


def _many(rng: np.random.Generator, warp: int, kv: str, dims: int) -> Case:
    return many_case(rng, warp, replace(_random(rng, Asked(kv, dims)), tile_rows=32))


def latent_case(rng: np.random.Generator, warp: int, kv: str, *, parts: bool = False) -> Case:
    """One kv head whose values are the first dims of its keys. No op is that yet, so the oracle stands here: scores
    over all dims, softmax, weights times the first LATENT of them."""
    heads = int(rng.integers(3, 10))
    filled = Filled(Asked(kv, ops.LATENT + ops.LATENT_ROPE, heads, 1, ((70, 1), (int(rng.integers(5, 40)), 5))), rng)
    shape = replace(filled.shape, dims=ops.LATENT, out_stride=heads * ops.LATENT)
    cut = ops.cut_tiles(filled.lanes, 4)
    tiles = ops.Tiles(len(cut), 4)
    split = ops.parts(8, shape, tiles.rows) if parts else None
    filled.out = nothing((len(filled.lanes), heads, ops.LATENT))
    memory = filled.memory(cut, ops.part_floats(shape, tiles, split) if split else (0, 0))

    def check() -> None:
        k = gpu_pages.kept(kv, filled.k)
        for row, (lane, position) in enumerate(zip(filled.lanes, filled.positions, strict=True)):
            seen = k[filled.slots(int(lane), 0, int(position) + 1), 0]
            scores = filled.q[row].astype(np.float64) @ seen.T * shape.scale
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            want = weights / weights.sum(axis=1, keepdims=True) @ seen[:, : ops.LATENT]
            np.testing.assert_allclose(filled.out[row], want, rtol=0, atol=4e-3)

    return Case(ops.latent(shape, memory, tiles, split), tuple(filled.arrays), check)


def _few(rng: np.random.Generator, warp: int, kv: str, dims: int) -> Case:
    return few_case(rng, warp, _random(rng, Asked(kv, dims)))


@dataclass(frozen=True)
class Turned:
    """A RopeStore op. `gap`: floats behind each query; `same`: v is the buffer of k."""

    kv: str
    dims: int = 64
    heads: int = 3
    kv_heads: int = 2
    rows: int = 3
    pairs: int = 32
    interleaved: bool = False
    normed: bool = True
    v_norm: bool = False
    gap: int = 0
    same: bool = False
    values: Array | None = None
    """v instead of random numbers."""
    latent: int = 0
    """Dims in front that do not turn, and that k's norm is over; then there is no V."""


def rope_case(rng: np.random.Generator, warp: int, a: Turned) -> Case:
    frequencies = tuple(float(10_000.0 ** (-i / max(a.pairs, 1))) for i in range(a.pairs))
    q = rng.standard_normal((a.rows, a.heads, a.dims + a.gap)).astype(np.float32)
    k, v = (rng.standard_normal((a.rows, a.kv_heads, a.dims)).astype(np.float32) for _ in range(2))
    v = v if a.values is None else a.values.reshape(v.shape)
    positions = rng.integers(0, 2_000_000, a.rows).astype(np.int32)
    slots = rng.permutation(4 * PAGE)[: a.rows].astype(np.int32)
    norms = [rng.standard_normal(a.dims).astype(np.float32) for _ in range(2)] if a.normed else [None, None]

    def turned(x: Array, weight: Array | None, normed: int) -> Array:
        wide = x.astype(np.float64)
        if weight is not None:
            wide[..., :normed] = head_norm(wide[..., :normed], weight[:normed].astype(np.float64), 1e-5)
        behind = rotate(wide[..., a.latent :], positions, frequencies, 1.25, interleaved=a.interleaved)
        return np.concatenate([wide[..., : a.latent], behind], axis=2)

    want_q, want_k = turned(q[..., : a.dims], norms[0], a.dims), turned(k, norms[1], a.latent or a.dims)
    pools = [nothing((len(lay(a.kv, np.zeros((4 * PAGE, a.kv_heads, a.dims), np.float32))),), np.uint8) for lay in LAYS]
    own_q, own_k = aligned(q), aligned(k)
    own_v = own_k if a.same else aligned(v)
    rest = [aligned(each) for each in (positions, slots, ops.rope_turns(frequencies), *norms) if each is not None]
    step = a.dims + a.gap
    numbers = (a.kv, a.rows, a.heads, a.kv_heads, a.dims, step, a.heads * step, 4, a.pairs, a.interleaved)
    behind = {"turn_first": a.latent, "norm_dims": a.latent}
    shape = ops.RopeShape(*numbers, 1.25, a.v_norm, 1e-5, **behind)
    memory = ops.RopeMemory(*map(address, (own_q, own_k, own_v, *pools, *rest)))
    if a.latent:
        memory = replace(memory, v=0)

    def check() -> None:
        np.testing.assert_allclose(own_q[..., : a.dims], want_q, rtol=0, atol=8e-6)
        np.testing.assert_array_equal(own_q[..., a.dims :], q[..., a.dims :])
        np.testing.assert_allclose(own_k, want_k, rtol=0, atol=8e-6)
        # What is stored is, to the bit, the codes of what the kernel left in place.
        stored_v = k if a.same else v
        if a.v_norm:
            stored_v = head_norm(stored_v.astype(np.float64), None, 1e-5).astype(np.float32)
        for pool, lay, rows, mine in zip(pools, LAYS, (own_k, stored_v), _written(a, slots), strict=True):
            full = np.zeros((4 * PAGE, a.kv_heads, a.dims), np.float32)
            full[slots] = rows
            want = np.where(mine, lay(a.kv, full), 0xFF)
            if a.latent and lay is gpu_pages.values:
                want[:] = 0xFF
            if a.v_norm and rows is stored_v:
                assert a.kv == "f32", "what is normed is rounded once more"
                np.testing.assert_array_equal(pool[~mine], 0xFF)
                np.testing.assert_allclose(pool.view(np.float32), want.astype(np.uint8).view(np.float32), rtol=1e-6)
            else:
                np.testing.assert_array_equal(pool, want)

    arrays = (own_q, own_k, *(() if a.same else (own_v,)), *pools, *rest)
    return Case(ops.rope_store(shape, memory), arrays, check)


LAYS = (gpu_pages.keys, gpu_pages.values)


def _written(a: Turned, slots: Array) -> tuple[Array, Array]:
    return gpu_pages.bytes_of(a.kv, slots, (4 * PAGE, a.kv_heads, a.dims))


def _rope(rng: np.random.Generator, warp: int, kv: str) -> Case:
    dims = 32 * int(rng.integers(1, 5))
    pairs = int(rng.integers(1, dims // 2 + 1))
    turned = Turned(kv, dims, int(rng.integers(1, 8)), int(rng.integers(1, 4)), int(rng.integers(1, 5)), pairs)
    return rope_case(rng, warp, replace(turned, interleaved=bool(rng.integers(2)), gap=dims * int(rng.integers(2))))


def ranks_case(
    rng: np.random.Generator, warp: int, *, sinks: bool = False, gates: bool = False, first: int = 1, own: int = 2
) -> Case:
    rows, ranks, heads, dims = int(rng.integers(1, 4)), int(rng.integers(1, 5)), 4, int(rng.integers(1, 40)) * 4
    outs = rng.standard_normal((rows, ranks, heads, dims)).astype(np.float32)
    logs = (rng.standard_normal((rows, ranks, heads)) * 5).astype(np.float32)
    gone = rng.random(logs.shape) < 0.3
    gone[0, :, first] = True  # of one head no rank has a row
    outs[gone], logs[gone] = 0.0, -np.inf
    every = aligned(np.concatenate([outs.reshape(rows, ranks, -1), logs], axis=2))
    of_sinks = aligned(rng.standard_normal(own).astype(np.float32))
    of_gates = aligned(rng.standard_normal((rows, own, 2, dims)).astype(np.float32))
    out = nothing((rows, own, dims))
    shape = ops.MergeShape(rows, ranks, heads, dims, first, own, own * dims, 2 * own * dims)
    launches = ops.merge_ranks(
        shape, address(out), address(every), address(of_sinks) if sinks else 0, address(of_gates) if gates else 0
    )

    def check() -> None:
        mine = slice(first, first + own)
        wide = [each.astype(np.float64) for each in (outs[:, :, mine], logs[:, :, mine])]
        want = merge_parts(*wide, of_sinks.astype(np.float64) if sinks else None)
        if gates:
            want = want * sigmoid(of_gates[:, :, 1].astype(np.float64))
        np.testing.assert_allclose(out, want, rtol=0, atol=2e-6)

    return Case(launches, (out, every, of_sinks, of_gates), check)


CASES: dict[str, Maker] = {
    **{f"rope_store_{kv}": partial(_rope, kv=kv) for kv in ops.KV_TYPES},
    **{symbol.name: partial(_few, kv=kv, dims=dims) for (kv, dims), symbol in ops.FEW.items()},
    **{symbol.name: partial(_many, kv=kv, dims=dims) for (kv, dims), symbol in ops.MANY.items()},
    **{f"attention_latent_{kv}": partial(latent_case, kv=kv) for kv in ops.KV_TYPES},
    "attention_latent_f16:parts": partial(latent_case, kv="f16", parts=True),
    "attention_merge": partial(_few, kv="f16", dims=64),
    "merge_attention": ranks_case,
}
