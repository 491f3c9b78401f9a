"""RopeStore and Attention as launches.

Attention takes the tiles of a batch's block (backends.gpu.batch). What few rows ask for is the whole of a long sequence
for a handful of queries, which is little work for a card unless the sequence is cut into parts that are computed beside
each other; many rows are work enough by themselves:

    few     attention_few, in parts ─ attention_merge          or, where more heads share a kv head than that likes,
            attention_many, in parts ─ attention_merge
    many    attention_many, each query's whole sequence by one block

How long a part is follows from the program's limits alone, so a row's bits do not depend on its neighbours here.
"""

from __future__ import annotations

from backends.base import PAGE_LEN, Attention, KvPool, Limits, Op, RopeStore
from backends.gpu.batch import few_rows_most, few_tiles_most
from backends.gpu.launch import Launch
from backends.gpu.ops import attention as ops
from backends.gpu.ops.buffers import Planes
from backends.gpu.steps.base import BatchShape, Context, Places, stride_of
from backends.kv_shapes import q_step

STATS, VALUES = "attention stats", "attention values"
PART_BYTES = 64 << 20
"""Of parts; more only where parts of the largest size take more."""


def scratch(op: Op, context: Context) -> dict[str, int]:
    if not isinstance(op, Attention) or not op.heads:
        return {}
    shape, tiles = _shape(op, context.kv, context.limits), _most_tiles(context.limits)
    stats, values = ops.part_floats(shape, tiles, _room(shape, context.limits))
    return {STATS: 4 * stats, VALUES: 4 * values}


def launches(op: Op, places: Places, shape: BatchShape, planes: Planes | None = None) -> tuple[Launch, ...]:
    if shape.empty:
        return ()
    match op:
        case RopeStore():
            return _rope_store(op, places, shape.rows)
        case Attention() if op.heads:
            return _attention(op, places, shape)
        case _:
            return ()


def kv_name(kv: KvPool) -> str:
    """Of the pool's type, in symbols."""
    return kv.type.name.lower()


# ----------------------------------------------------------------------------------------------------------- RopeStore


def _rope_store(op: RopeStore, places: Places, rows: int) -> tuple[Launch, ...]:
    q, rope = places.rows(op.q), op.rope
    stores = op.k is not None and op.v is not None
    k = places.rows(op.k) if op.k is not None else None
    v = places.rows(op.v) if op.v is not None else None
    k_pool, v_pool, pages = places.kv_pool(op.layer)
    shape = ops.RopeShape(
        kv_name(places.kv),
        rows,
        op.heads,
        op.kv_heads if stores else 0,
        op.head_dim,
        q_step(op),
        q.stride,
        pages,
        len(rope.frequencies) if rope is not None else 0,
        rope is not None and rope.interleaved,
        rope.magnitude if rope is not None else 1.0,
        op.v_norm,
        op.norm_eps,
        k_stride=k.stride if k is not None else 0,
        v_stride=v.stride if v is not None else 0,
    )
    memory = ops.RopeMemory(
        q.at if op.heads else 0,
        k.at if k is not None else 0,
        v.at if v is not None else 0,
        k_pool,
        v_pool,
        places.batch("positions"),
        places.slots(op.layer),
        places.turns(rope) if rope is not None else 0,
        places.vector(op.q_norm),
        places.vector(op.k_norm),
    )
    return ops.rope_store(shape, memory)


# ----------------------------------------------------------------------------------------------------------- Attention


def _attention(op: Attention, places: Places, batch: BatchShape) -> tuple[Launch, ...]:
    shape = _shape(op, places.kv, places.limits)
    cut = _parts(shape, places.limits)
    found: tuple[Launch, ...] = ()
    for name, (count, rows) in (("few", batch.few), ("many", batch.many)):
        if not count:
            continue
        tiles, memory = ops.Tiles(count, rows), _memory(op, places, name)
        if name == "many":
            found += ops.many(shape, memory, tiles)
        elif ops.is_few(shape, rows):
            found += ops.few(shape, memory, tiles, cut)
        else:
            found += ops.many(shape, memory, tiles, cut)
    return found


def _memory(op: Attention, places: Places, tiles: str) -> ops.Memory:
    k_pool, v_pool, _ = places.kv_pool(op.layer)
    return ops.Memory(
        places.rows(op.out).at,
        places.rows(op.q).at,
        k_pool,
        v_pool,
        places.tables(op.layer),
        places.batch("positions"),
        places.batch("lanes"),
        places.batch(tiles),
        places.scratch(STATS),
        places.scratch(VALUES),
        places.vector(op.sinks),
    )


def _shape(op: Attention, kv: KvPool, limits: Limits) -> ops.Shape:
    return ops.Shape(
        kv_name(kv),
        op.heads,
        op.kv_heads,
        op.head_dim,
        op.scale,
        q_step(op),
        stride_of(op.q.width),
        stride_of(op.out.width),
        limits.lane_pages,
        kv.group_slots[kv.layers[op.layer].group] // PAGE_LEN,
        op.window,
        op.softcap,
        op.gated,
        op.partial,
    )


def _most_tiles(limits: Limits) -> ops.Tiles:
    return ops.Tiles(few_tiles_most(limits), few_rows_most(limits))


def _parts(shape: ops.Shape, limits: Limits) -> ops.Parts:
    """Of a layer, for all batches of the program."""
    return ops.fitting_parts(shape, _most_tiles(limits), _limit(shape, limits))


def _room(shape: ops.Shape, limits: Limits) -> ops.Parts:
    """The parts that there is memory for, no fewer than those of `_parts`: as many as the smallest would be, and no
    more than the limit has room for. So a longer context never takes less, and what it takes can be told beforehand
    (budget.card_work)."""
    tiles = _most_tiles(limits)
    small = ops.parts(ops.LEAST_PART_PAGES, shape, tiles.rows)
    each = 4 * sum(ops.part_floats(shape, tiles, ops.Parts(small.pages, 1)))
    return ops.Parts(small.pages, min(small.most, _limit(shape, limits) // each))


def _limit(shape: ops.Shape, limits: Limits) -> int:
    """Bytes that parts may take."""
    tiles = _most_tiles(limits)
    largest = ops.parts(ops.MAX_PART_PAGES, shape, tiles.rows)
    return max(PART_BYTES, 4 * sum(ops.part_floats(shape, tiles, largest)))
