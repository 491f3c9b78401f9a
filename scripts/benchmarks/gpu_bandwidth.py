"""What kernels that are bound by memory make of it: a fraction of what a copy within the card reaches in the same run.

A copy reads and writes; its bandwidth is both together. A linear layer of few rows reads its matrix, decode attention K
and V: what they read alone is counted, in bytes of the file's types.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gpu_bench import GIGA, MIB, Bench
from gpu_rows import Teller

from backends.base import PAGE_LEN, Limits
from backends.gpu import planes
from backends.gpu.batch import few_rows_most, few_tiles_most
from backends.gpu.device import Memory
from backends.gpu.launch import Launch
from backends.gpu.ops import attention, linear, quants
from backends.gpu.ops.buffers import Planes, Rows
from backends.gpu.steps.attention import PART_BYTES
from backends.quant import QuantType
from budget.facts import KV_BITS

FEW_GOAL, ATTENTION_GOAL = 0.85, 0.80
KV_TYPES = ("f16", "q8_0", "f8")
ALIGN = 256


def run(bench: Bench, tell: Teller, types: Sequence[QuantType]) -> None:
    tell.at("device copy")
    copy = bench.copy_gb_s()
    far = f"over {bench.far_bytes / MIB:.0f} MiB; L2 {bench.l2_bytes / MIB:.0f} MiB"
    tell.row("device copy, read and written", copy, "GB/s", note=bench.l2_told or far)
    _host_copies(bench, tell)
    tell.at("compiling")
    bench.prepare(linear.LINEAR_FEW[quant, 1] for quant in types)
    with_room = bench.memory(bench.far_bytes + _largest(bench, types))
    for quant in types:
        for outs, cols in bench.sizes.linear:
            what = f"linear_few {quant.name} {cols} to {outs}, 1 row"
            tell.at(what)
            tell.row(
                what,
                few_gb_s(bench, with_room, quant, outs, cols),
                "GB/s",
                of=copy,
                goal=bench.sizes.goal(FEW_GOAL),
            )
    tell.at("compiling attention")
    bench.prepare([attention.MERGE, *(attention.FEW[kv, bench.sizes.heads[2]] for kv in KV_TYPES)])
    for context in bench.sizes.contexts:
        for lanes in bench.sizes.lanes:
            for kv in KV_TYPES:
                what = f"decode attention {kv}, {lanes} x {context} tokens"
                tell.at(what)
                found = attention_gb_s(bench, with_room, kv, context, lanes)
                tell.row(what, found, "GB/s", of=copy, goal=bench.sizes.goal(ATTENTION_GOAL))
    with_room.close()


def _largest(bench: Bench, types: Sequence[QuantType]) -> int:
    """Of one thing that is read: the arena has far memory and one more of it."""
    matrices = [planes.matrix_bytes(quant, *shape) for quant in types for shape in bench.sizes.linear]
    pools = [sum(_pool_bytes(bench, kv, max(bench.sizes.contexts), max(bench.sizes.lanes))) for kv in KV_TYPES]
    return max(matrices + pools) + 2 * ALIGN


def _host_copies(bench: Bench, tell: Teller) -> None:
    """Between pinned memory and the card's: what flips and loads are bound by."""
    size = max(bench.sizes.staging, 1)
    memory, pinned = bench.memory(size), bench.card.pinned(size, "gpu_check")
    card = bench.card
    up = bench.seconds(lambda: card.upload(memory.address, pinned.address, size))
    down = bench.seconds(lambda: card.download(pinned.address, memory.address, size))
    for what, taken in (("upload from pinned memory", up), ("download to pinned memory", down)):
        tell.row(what, size / taken / GIGA, "GB/s")
    pinned.close()
    memory.close()


# --------------------------------------------------------------------------------------------------------------- linear


def acts_of(quant: QuantType, at: int, rows: int, cols: int) -> Planes | Rows:
    """Activations at an address, as the type's matrices take them."""
    if quant in quants.FLOATS:
        return Rows(at, cols)
    ends = [at]
    for size in quants.quantised_bytes(rows, cols):
        ends.append(ends[-1] + -(-size // ALIGN) * ALIGN)
    return Planes(*ends[:4])


def acts_bytes(rows: int, cols: int) -> int:
    return 4 * rows * cols + 4 * ALIGN


def spread(arena: Memory, size: int, far: int) -> list[int]:
    """Addresses of as many things of `size` bytes as are `far` together, one behind the other."""
    step = -(-size // ALIGN) * ALIGN
    count = max(1, min(-(-far // step), arena.nbytes // step))
    return [arena.address + step * index for index in range(count)]


def few_gb_s(bench: Bench, arena: Memory, quant: QuantType, outs: int, cols: int, rows: int = 1) -> float:
    places = spread(arena, planes.matrix_bytes(quant, outs, cols), bench.far_bytes)
    acts, out = bench.memory(acts_bytes(rows, cols)), bench.memory(4 * rows * outs)
    given = acts_of(quant, acts.address, rows, cols)
    launches = [linear.linear_few(quant, out.address, at, given, rows=rows, outs=outs, cols=cols) for at in places]
    try:
        return len(places) * outs * quant.row_bytes(cols) / bench.seconds_of(launches) / GIGA
    finally:
        acts.close()
        out.close()


# ------------------------------------------------------------------------------------------------------------ attention


def _pool_bytes(bench: Bench, kv: str, context: int, lanes: int) -> tuple[int, int]:
    """Bytes of K and of V of one layer, whole pages."""
    _, kv_heads, dims = bench.sizes.heads
    one = lanes * -(-context // PAGE_LEN) * PAGE_LEN * kv_heads * int(dims * KV_BITS[kv]) // 8
    return one, one


def attention_gb_s(bench: Bench, arena: Memory, kv: str, context: int, lanes: int) -> float:
    """A token of each of `lanes` sequences of `context` tokens, in layers over far memory; cut into tiles and parts as
    a program cuts them."""
    heads, kv_heads, dims = bench.sizes.heads
    lane_pages = -(-context // PAGE_LEN)
    limits = Limits(max(lanes, 1), lanes, lanes, lane_pages)
    shape = attention.Shape(
        kv, heads, kv_heads, dims, dims**-0.5, dims, heads * dims, heads * dims, lane_pages, lanes * lane_pages
    )
    tiles = attention.Tiles(few_tiles_most(limits), few_rows_most(limits))
    least = 4 * sum(attention.part_floats(shape, tiles, attention.parts(attention.MAX_PART_PAGES, shape, tiles.rows)))
    parts = attention.fitting_parts(shape, tiles, max(PART_BYTES, least))
    own = _Own(bench, shape, tiles, parts, context, lanes)
    k_bytes, v_bytes = _pool_bytes(bench, kv, context, lanes)
    places = spread(arena, k_bytes + v_bytes, bench.far_bytes)
    launches: list[Launch] = []
    for at in places:
        launches += attention.few(shape, own.memory(at, at + k_bytes), tiles, parts)
    try:
        return len(places) * (k_bytes + v_bytes) / bench.seconds_of(launches) / GIGA
    finally:
        own.close()


class _Own:
    """What all layers share: queries, results, parts, and the arrays of a batch."""

    def __init__(
        self,
        bench: Bench,
        shape: attention.Shape,
        tiles: attention.Tiles,
        parts: attention.Parts,
        context: int,
        lanes: int,
    ) -> None:
        order = np.random.default_rng(2).permutation(shape.pool_pages).astype(np.int32)
        rows = np.arange(lanes, dtype=np.int32)
        stats, values = attention.part_floats(shape, tiles, parts)
        self._held = {
            "out": bench.memory(4 * lanes * shape.out_stride),
            "q": bench.memory(4 * lanes * shape.q_stride),
            "tables": bench.numbers(order),
            "positions": bench.numbers(np.full(lanes, context - 1, np.int32)),
            "lanes": bench.numbers(rows),
            "tiles": bench.numbers(attention.cut_tiles(rows, tiles.rows)),
            "part_stats": bench.memory(4 * max(stats, 4)),
            "part_values": bench.memory(4 * max(values, 4)),
        }

    def memory(self, k_pool: int, v_pool: int) -> attention.Memory:
        return attention.Memory(
            k_pool=k_pool, v_pool=v_pool, **{name: held.address for name, held in self._held.items()}
        )

    def close(self) -> None:
        for held in self._held.values():
            held.close()
