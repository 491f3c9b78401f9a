"""Launches of the attention ops: RopeStore, Attention in its forms, MergeAttention.

    rope_store_<kv>                q and k normed and rotated in place, K and V into their page
    attention_few_<kv>_d<dims>     decode and verify: parts of attention, then attention_merge puts them together
    attention_many_<kv>_d<dims>    prefill on matrix cores, whole; or in parts, for more queries than `few` likes
    attention_latent_<kv>          the same for one shared head of latent rows, whose first LATENT dims are the values
    attention_merge                parts of one rank
    merge_attention                partial attentions of all ranks

Shapes, units and what the numbers mean: backends/ops.py; how memory lies: backends/gpu/kernels/kv.h and attention.h.
`<kv>` is f32, f16, bf16, q8_0 or f8; dims are those of HEAD_DIMS, of q8_0 only multiples of 32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import pi

import numpy as np
import numpy.typing as npt

from backends.base import PAGE_LEN
from backends.gpu.launch import Launch, Param, Symbol, params

KV_TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "f8": "F8"}
"""By the name in symbols, the type as capability tables have it."""
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 192, 256, 512)
LATENT, LATENT_ROPE = 512, 64
"""Dims of a latent row that are values, and those behind them that only turn."""

ROPE_UNITS = 8
"""Heads that a block of rope_store takes."""
FEW_STEP_PAGES = 8
"""Parts of attention are whole steps of attention_few."""
LEAST_PART_PAGES, MAX_PART_PAGES = 16, 256
MANY_COLS = 32
"""Positions that attention_many takes at once."""

ROPE_PARAMS = params(
    "q, k, v, k_pool, v_pool, positions, slots, turns, q_norm, k_norm, i32 heads, i32 kv_heads, i32 dims, i32 q_step,"
    " i32 q_stride, i32 k_stride, i32 v_stride, i32 pool_pages, i32 pairs, i32 interleaved, i32 v_norm, i32 turn_first,"
    " i32 norm_dims, float eps, float magnitude"
)
ATTENTION_PARAMS = params(
    "out, q, k_pool, v_pool, tables, positions, lanes, tiles, part_stats, part_values, sinks, i32 heads, i32 kv_heads,"
    " i32 q_step, i32 q_stride, i32 out_stride, i32 lane_pages, i32 pool_pages, i32 window, i32 tile_rows,"
    " i32 part_pages, i32 max_parts, i32 gated, i32 partial, float scale, float softcap"
)
MERGE_PARAMS = params(
    "out, every, sinks, gates, i32 ranks, i32 heads, i32 dims, i32 first, i32 out_stride, i32 gate_stride"
)


@dataclass(frozen=True)
class Block:
    """Of attention_many: queries, threads, dims of a chunk of K and V, dims of values."""

    rows: int
    threads: int
    chunk: int
    dims: int
    values: int

    @property
    def shared(self) -> int:
        """Bytes of block memory: queries, a chunk in either order, scores, and what is known of each query."""
        chunk = max(self.chunk * _line(MANY_COLS), MANY_COLS * _line(self.chunk))
        return 2 * self.rows * _line(self.dims) + 2 * chunk + self.rows * (4 * (MANY_COLS + 4) + 20)


def _line(halves: int) -> int:
    """`tile_stride` of tiles.h."""
    groups = -(-halves // 8)
    return 8 * (groups + 1 - groups % 2)


def many_block(dims: int) -> Block:
    chunks = -(-dims // 128)
    return Block(64 if dims <= 256 else 32, 128 if dims <= 128 else 256, dims // chunks, dims, dims)


LATENT_BLOCK = Block(32, 256, 192, LATENT + LATENT_ROPE, LATENT)


def few_queries(kv: str) -> int:
    """Queries of a block of attention_few."""
    return 4 if kv in ("q8_0", "f8") else 8


def heads_of(kv: str) -> tuple[int, ...]:
    """The head sizes that attention over a KV type is built for."""
    return tuple(dims for dims in HEAD_DIMS if kv != "q8_0" or dims % 32 == 0)


def _rope_store(kv: str) -> Symbol:
    return Symbol(f"rope_store_{kv}", "rope_store", "RopeStore", ROPE_PARAMS, 128, (KV_TYPES[kv],), kv)


def _few(kv: str, dims: int) -> Symbol:
    name = f"attention_few_{kv}_d{dims}"
    return Symbol(
        name, "attention_few", "Attention", ATTENTION_PARAMS, 128, (KV_TYPES[kv],), f"{kv}_d{dims}", ("load128",)
    )


def _many(kv: str, dims: int) -> Symbol:
    name, types = f"attention_many_{kv}_d{dims}", (KV_TYPES[kv],)
    threads = many_block(dims).threads
    return Symbol(
        *(name, "attention_many", "Attention", ATTENTION_PARAMS, threads, types, f"{kv}_d{dims}", ("load128", "matrix"))
    )


def _latent(kv: str) -> Symbol:
    """Its op will be Attention with `values` below `head_dim`: one kv head, whose V is the first dims of its K."""
    name, types = f"attention_latent_{kv}", (KV_TYPES[kv],)
    return Symbol(
        *(
            name,
            "attention_latent",
            "Attention",
            ATTENTION_PARAMS,
            LATENT_BLOCK.threads,
            types,
            kv,
            ("load128", "matrix"),
        )
    )


ROPE_STORE = {kv: _rope_store(kv) for kv in KV_TYPES}
FEW = {(kv, dims): _few(kv, dims) for kv in KV_TYPES for dims in heads_of(kv)}
MANY = {(kv, dims): _many(kv, dims) for kv in KV_TYPES for dims in heads_of(kv)}
LATENTS = {kv: _latent(kv) for kv in KV_TYPES}
MERGE = Symbol("attention_merge", "attention_merge", "Attention", (*ATTENTION_PARAMS, Param("dims", "i32")), 128)
MERGE_RANKS = Symbol("merge_attention", "merge_attention", "MergeAttention", MERGE_PARAMS, 128)

SYMBOLS = (*ROPE_STORE.values(), *FEW.values(), *MANY.values(), *LATENTS.values(), MERGE, MERGE_RANKS)


# ------------------------------------------------------------------------------------------------------------ RopeStore


@dataclass(frozen=True)
class RopeShape:
    """`rows` rows. `k_stride` 0: heads side by side. `pairs`: of the rope, as many as `turns` has; 0: none turns.

    Of latent rows the dims from `turn_first` on turn, and k's norm is over its first `norm_dims` (0: all)."""

    kv: str
    rows: int
    heads: int
    kv_heads: int
    dims: int
    q_step: int
    q_stride: int
    pool_pages: int
    pairs: int = 0
    interleaved: bool = False
    magnitude: float = 1.0
    v_norm: bool = False
    eps: float = 0.0
    k_stride: int = 0
    v_stride: int = 0
    turn_first: int = 0
    norm_dims: int = 0


@dataclass(frozen=True)
class RopeMemory:
    """Addresses; 0 where there is none (v of latent rows, norms). `slots` are those of the layer's KV group; norms are
    float32 vectors."""

    q: int
    k: int
    v: int
    k_pool: int
    v_pool: int
    positions: int
    slots: int
    turns: int
    q_norm: int = 0
    k_norm: int = 0


def rope_turns(frequencies: Iterable[float]) -> npt.NDArray[np.uint64]:
    """Radians per position as turns per position, in units of 2^-64 of one: exact to the last of them, whole turns left
    out."""
    turn = Fraction(2) * PI
    return np.array([round(Fraction(each) / turn * 2**64) % 2**64 for each in frequencies], np.uint64)


PI = Fraction(3141592653589793238462643383279502884197, 10**39)
assert float(PI) == pi


def rope_store(shape: RopeShape, memory: RopeMemory) -> tuple[Launch, ...]:
    """Nothing where there is no row, or no head at all."""
    units = shape.heads + shape.kv_heads
    if not shape.rows or not units:
        return ()
    m, inner = memory, shape.kv_heads * shape.dims
    args = (
        *(m.q, m.k, m.v, m.k_pool, m.v_pool, m.positions, m.slots, m.turns, m.q_norm, m.k_norm),
        *(shape.heads, shape.kv_heads, shape.dims, shape.q_step, shape.q_stride),
        *(shape.k_stride or inner, shape.v_stride or inner, shape.pool_pages, shape.pairs),
        *(int(shape.interleaved), int(shape.v_norm), shape.turn_first, shape.norm_dims or shape.dims),
        *(shape.eps, shape.magnitude),
    )
    return (Launch(ROPE_STORE[shape.kv], (shape.rows, -(-units // ROPE_UNITS), 1), args),)


# ------------------------------------------------------------------------------------------------------------ Attention


@dataclass(frozen=True)
class Shape:
    """An Attention op. `q_step`, `q_stride`: floats from a query to the next head's, the next row's; `out_stride` from
    one row to the next of out."""

    kv: str
    heads: int
    kv_heads: int
    dims: int
    scale: float
    q_step: int
    q_stride: int
    out_stride: int
    lane_pages: int
    pool_pages: int
    window: int = 0
    softcap: float = 0.0
    gated: bool = False
    partial: bool = False

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Memory:
    """Addresses. `tables` are those of the layer's KV group; `part_*` as `part_floats` says, 0 without parts."""

    out: int
    q: int
    k_pool: int
    v_pool: int
    tables: int
    positions: int
    lanes: int
    tiles: int
    part_stats: int = 0
    part_values: int = 0
    sinks: int = 0


@dataclass(frozen=True)
class Tiles:
    """`count` tiles of at most `rows` rows each, in `Memory.tiles`: int32 [count][2], first row and rows."""

    count: int
    rows: int


@dataclass(frozen=True)
class Parts:
    """Attention is computed in parts of `pages` pages, of which the queries of one tile see at most `most` between
    them: each has a place of its own, whichever queries see it."""

    pages: int
    most: int


def cut_tiles(lanes: Sequence[int] | npt.NDArray[np.int32], most: int) -> npt.NDArray[np.int32]:
    """Runs of rows of one lane, `most` rows at a time: int32 [tiles][2], first row and rows."""
    tiles: list[tuple[int, int]] = []
    for row, lane in enumerate(lanes):
        if tiles and lanes[row - 1] == lane and tiles[-1][1] < most:
            tiles[-1] = tiles[-1][0], tiles[-1][1] + 1
        else:
            tiles.append((row, 1))
    return np.array(tiles, np.int32).reshape(-1, 2)


def parts(pages: int, shape: Shape, rows: int) -> Parts:
    """Parts of `pages` pages (whole steps) for sequences as long as a lane's table and tiles of at most `rows` rows.
    Raises ValueError."""
    if not 0 < pages <= MAX_PART_PAGES or pages % FEW_STEP_PAGES:
        raise ValueError(f"parts of {pages} pages: a multiple of {FEW_STEP_PAGES}, at most {MAX_PART_PAGES}")
    return Parts(pages, _seen(shape, pages, rows))


def fitting_parts(shape: Shape, tiles: Tiles, limit: int) -> Parts:
    """The smallest parts, from 256 positions on, of which those of all tiles at their longest take at most `limit`
    bytes: small ones fill a card from short sequences on, and all of a program's batches must have the same. Raises
    ValueError where none do."""
    for pages in range(LEAST_PART_PAGES, MAX_PART_PAGES + 1, FEW_STEP_PAGES):
        cut = parts(pages, shape, tiles.rows)
        if 4 * sum(part_floats(shape, tiles, cut)) <= limit:
            return cut
    raise ValueError(f"{tiles.count} tiles of {tiles.rows} rows take more than {limit} bytes in parts of {pages} pages")


def part_floats(shape: Shape, tiles: Tiles, parts: Parts) -> tuple[int, int]:
    """Floats of `part_stats` and of `part_values`."""
    each = tiles.count * tiles.rows * shape.heads * parts.most
    return 2 * each, shape.dims * each


def is_few(shape: Shape, rows: int) -> bool:
    """Whether tiles of so many rows are better served by `few`: up to two passes over what is read."""
    return rows * shape.group <= 2 * few_queries(shape.kv)


def few(shape: Shape, memory: Memory, tiles: Tiles, parts: Parts) -> tuple[Launch, ...]:
    """Decode and verify: tiles of few rows."""
    if not tiles.count:
        return ()
    passes = -(-tiles.rows * shape.group // few_queries(shape.kv))
    grid = (shape.kv_heads * passes, tile_parts(shape, tiles, parts), tiles.count)
    args = _arguments(shape, memory, tiles, parts)
    return (Launch(FEW[shape.kv, shape.dims], grid, args), merge(shape, memory, tiles, parts))


def many(shape: Shape, memory: Memory, tiles: Tiles, parts: Parts | None = None) -> tuple[Launch, ...]:
    """Prefill: tiles of many rows, each query's whole sequence by one block. With parts, for few tiles of long ones."""
    return _blocks(MANY[shape.kv, shape.dims], many_block(shape.dims), shape, memory, tiles, parts)


def latent(shape: Shape, memory: Memory, tiles: Tiles, parts: Parts | None = None) -> tuple[Launch, ...]:
    """Attention over latent rows [LATENT + LATENT_ROPE] of one kv head; queries are as wide, `shape.dims` and out are
    LATENT wide for each head. `v_pool` is not read."""
    return _blocks(LATENTS[shape.kv], LATENT_BLOCK, shape, memory, tiles, parts)


def _blocks(
    symbol: Symbol, block: Block, shape: Shape, memory: Memory, tiles: Tiles, parts: Parts | None
) -> tuple[Launch, ...]:
    assert shape.dims == block.values, "out is as wide as values"
    if not tiles.count:
        return ()
    passes = -(-tiles.rows * shape.group // block.rows)
    of_parts = tile_parts(shape, tiles, parts) if parts else 1
    args = _arguments(shape, memory, tiles, parts or Parts(0, 0))
    launch = Launch(symbol, (shape.kv_heads * passes, of_parts, tiles.count), args, shared=block.shared)
    return (launch, merge(shape, memory, tiles, parts)) if parts else (launch,)


def merge(shape: Shape, memory: Memory, tiles: Tiles, parts: Parts) -> Launch:
    """Parts that are there become the op's result."""
    args = (*_arguments(shape, memory, tiles, parts), shape.dims)
    return Launch(MERGE, (shape.heads, tiles.rows, tiles.count), args)


def tile_parts(shape: Shape, tiles: Tiles, parts: Parts) -> int:
    """Parts that the rows of one tile see between them: at a window's edge one more than each. Raises ValueError for
    tiles of more rows than there are places for."""
    seen = _seen(shape, parts.pages, tiles.rows)
    if seen > parts.most:
        raise ValueError(f"{tiles.rows} rows of a tile see {seen} parts, there are places for {parts.most}")
    return seen


def _seen(shape: Shape, pages: int, rows: int) -> int:
    """Parts of `pages` pages that `rows` rows of one lane see between them, at most."""
    every = -(-shape.lane_pages // pages)
    return min(every, -(-(shape.window + rows - 2) // (pages * PAGE_LEN)) + 1) if shape.window else every


def _arguments(shape: Shape, m: Memory, tiles: Tiles, parts: Parts) -> tuple[int | float, ...]:
    assert not shape.partial or not (shape.gated or m.sinks), "sinks and gates wait for MergeAttention"
    return (
        *(
            m.out,
            m.q,
            m.k_pool,
            m.v_pool,
            m.tables,
            m.positions,
            m.lanes,
            m.tiles,
            m.part_stats,
            m.part_values,
            m.sinks,
        ),
        *(shape.heads, shape.kv_heads, shape.q_step, shape.q_stride, shape.out_stride, shape.lane_pages),
        *(shape.pool_pages, shape.window, tiles.rows, parts.pages, parts.most, int(shape.gated), int(shape.partial)),
        *(shape.scale, shape.softcap),
    )


# ------------------------------------------------------------------------------------------------------- MergeAttention


@dataclass(frozen=True)
class MergeShape:
    """A MergeAttention op over `ranks`. `gate_stride`: floats of a row of the gates' buffer."""

    rows: int
    ranks: int
    heads: int
    dims: int
    first: int
    own: int
    out_stride: int
    gate_stride: int = 0


def merge_ranks(shape: MergeShape, out: int, every: int, sinks: int = 0, gates: int = 0) -> tuple[Launch, ...]:
    """`every`: what the gather left, [rows][ranks][heads * dims + heads]. Nothing where this rank has no head."""
    if not shape.rows or not shape.own:
        return ()
    numbers = (shape.ranks, shape.heads, shape.dims, shape.first, shape.out_stride, shape.gate_stride)
    return (Launch(MERGE_RANKS, (shape.own, shape.rows, 1), (out, every, sinks, gates, *numbers)),)
