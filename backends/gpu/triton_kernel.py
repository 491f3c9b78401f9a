"""Attention over paged K and V in Triton's language. The only module that imports triton: `backends.gpu.triton_compile`
is the process that does it, and `backends.gpu.attention_triton` says what it is for.

Parameters, tiles, parts and their memory are those of backends/gpu/kernels/attention.h. A block has QUERIES queries of
one kv head, takes COLS positions at a time, and keeps a running softmax, as attention_many.h does. COLS positions are
whole pages and begin at multiples of COLS whatever the tile: a row that sees none of them is left as it is, to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

KINDS = {
    **dict.fromkeys(("out", "q", "part_stats", "part_values", "sinks"), "*fp32"),
    **dict.fromkeys(("tables", "positions", "lanes", "tiles"), "*i32"),
    **dict.fromkeys(("scale", "softcap"), "fp32"),
}
"""Of parameters; others are i32."""
ALIGNED = ("out", "q", "k_pool", "v_pool", "q_step")
"""Multiples of 16: bytes of addresses, floats of the step."""


@triton.jit
def attention_triton(
    out,
    q,
    k_pool,
    v_pool,
    tables,
    positions,
    lanes,
    tiles,
    part_stats,
    part_values,
    sinks,
    heads,
    kv_heads,
    q_step,
    q_stride,
    out_stride,
    lane_pages,
    pool_pages,
    window,
    tile_rows,
    part_pages,
    max_parts,
    scale,
    softcap,
    DIMS: tl.constexpr,
    BLOCK_DIMS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    COLS: tl.constexpr,
    PARTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    GATED: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    # Which queries: rows of a tile times the heads of a kv head, in that order.
    passes = tl.num_programs(0) // kv_heads
    kv_head = tl.program_id(0) // passes
    tile = tl.program_id(2)
    tile_row = tl.load(tiles + 2 * tile)
    queries = tl.load(tiles + 2 * tile + 1) * GROUP
    first_query = tl.program_id(0) % passes * QUERIES
    if first_query < queries:
        index = first_query + tl.arange(0, QUERIES)
        live = index < queries
        row = index // GROUP  # of the tile
        head = kv_head * GROUP + index % GROUP
        last = tl.load(positions + tile_row + row, mask=live, other=-1)
        lane = tl.load(lanes + tile_row)
        first = tl.where((window > 0) & (last >= window), last - window + 1, 0)
        begin = tl.min(tl.where(live, first, 2147483647), 0)
        end = tl.max(last, 0) + 1
        if PARTS:
            length = part_pages * 16
            part = begin // length + tl.program_id(1)
            begin = tl.maximum(begin, part * length)
            end = tl.minimum(end, (part + 1) * length)

        # A query's largest element becomes 1, so that no query overflows a half.
        dim = tl.arange(0, BLOCK_DIMS)
        inside = dim < DIMS
        is_query = live[:, None] & inside[None, :]
        q += tile_row.to(tl.int64) * q_stride
        at_q = (row * q_stride + head * q_step)[:, None] + dim[None, :]
        wide = tl.load(q + at_q, mask=is_query, other=0.0)
        unit = tl.max(tl.abs(wide), 1)
        unit = tl.where(unit > 0.0, unit, 1.0)
        narrow = (wide / unit[:, None]).to(tl.float16)

        # Addresses of single elements are 32-bit steps from these.
        k_pool += kv_head.to(tl.int64) * pool_pages * (DIMS * 16)
        v_pool += kv_head.to(tl.int64) * pool_pages * (DIMS * 16)
        tables += lane.to(tl.int64) * lane_pages
        top = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        acc = tl.zeros([QUERIES, BLOCK_DIMS], tl.float32)
        for start in range(begin // COLS * COLS, end, COLS):
            start = tl.multiple_of(start, COLS)
            position = start + tl.arange(0, COLS)
            page = tl.load(tables + position // 16, mask=(position >= begin) & (position < end), other=-1)
            here = page >= 0
            slot = position % 16
            at_k = (page * (DIMS * 16) + slot)[None, :] + (dim * 16)[:, None]
            k = tl.load(k_pool + at_k, mask=inside[:, None] & here[None, :], other=0.0)
            score = tl.dot(narrow, _halves(k)) * (unit * scale)[:, None]
            if SOFTCAP:  # tanh by exp
                score = softcap * (1.0 - 2.0 / (tl.exp(2.0 * score / softcap) + 1.0))
            seen = here[None, :] & (position[None, :] <= last[:, None]) & (position[None, :] >= first[:, None])
            score = tl.where(seen, score, -float("inf"))
            new = tl.maximum(top, tl.max(score, 1))
            base = tl.where(new == -float("inf"), 0.0, new)
            weight = tl.exp(score - base[:, None])
            factor = tl.exp(top - base)
            total = total * factor + tl.sum(weight, 1)
            at_v = (page * (16 * DIMS) + slot * DIMS)[:, None] + dim[None, :]
            v = tl.load(v_pool + at_v, mask=here[:, None] & inside[None, :], other=0.0)
            acc = acc * factor[:, None] + tl.dot(weight.to(tl.float16), _halves(v))
            top = new

        if PARTS:
            sees = live & (first < (part + 1) * length) & (last >= part * length)
            tile_parts = tile.to(tl.int64) * tile_rows * heads * max_parts
            place = (row * heads + head) * max_parts + part % max_parts
            part_stats += 2 * tile_parts
            tl.store(part_stats + 2 * place, top, mask=sees)
            tl.store(part_stats + 2 * place + 1, total, mask=sees)
            at_part = place[:, None] * DIMS + dim[None, :]
            tl.store(part_values + tile_parts * DIMS + at_part, acc, mask=sees[:, None] & inside[None, :])
        else:
            if SINKS:
                sink = tl.load(sinks + head, mask=live, other=0.0)
                both = tl.maximum(top, sink)
                own = tl.exp(top - both)
                result = acc * (own / (total * own + tl.exp(sink - both)))[:, None]
            else:
                result = acc * tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
            if GATED:
                gate = tl.load(q + DIMS + at_q, mask=is_query, other=0.0)
                result = result / (1.0 + tl.exp(-gate))
            out += tile_row.to(tl.int64) * out_stride
            tl.store(out + (row * out_stride + head * DIMS)[:, None] + dim[None, :], result, mask=is_query)
            if PARTIAL:
                tl.store(out + row * out_stride + heads * DIMS + head, top + tl.log(total), mask=live)


@triton.jit
def _halves(x):
    # Elements beyond a half's range are held at its end.
    return tl.minimum(tl.maximum(x.to(tl.float32), -65504.0), 65504.0).to(tl.float16)


def source(pool: str, constants: dict[str, int]) -> ASTSource:
    """`pool`: fp16 or bf16."""
    signature, attributes = {}, {}
    for at, name in enumerate(attention_triton.arg_names):
        kind = f"*{pool}" if name in ("k_pool", "v_pool") else KINDS.get(name, "i32")
        signature[name] = "constexpr" if name in constants else kind
        if name in ALIGNED:
            attributes[at,] = [["tt.divisibility", 16]]
    return ASTSource(attention_triton, signature, constants, attributes)


def compiled(
    pool: str, constants: dict[str, int], target: tuple[str, int | str, int], warps: int, stages: int
) -> tuple[bytes, str, dict[str, str | int]]:
    """The code, its assembly, and what Triton says of it."""
    made = triton.compile(
        source(pool, constants), target=GPUTarget(*target), options={"num_warps": warps, "num_stages": stages}
    )
    code, text = ("hsaco", "amdgcn") if target[0] == "hip" else ("cubin", "ptx")
    # 3.6 does not know the first on AMD.
    scratch = max(getattr(made.metadata, f"{kind}_scratch_size", 0) for kind in ("global", "profile"))
    told = {
        "version": triton.__version__,
        "name": made.metadata.name,
        "shared": made.metadata.shared,
        "scratch": scratch,
    }
    return made.asm[code], made.asm[text], told
