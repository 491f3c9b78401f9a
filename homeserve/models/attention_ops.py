"""The ops of an attention: projections, the rows that are kept, attention itself, the output projection.

One rank with everything attends at once. In the tensor layout heads are divided and rows are, too, but by another
vector; so q, k and v of all ranks are gathered, each rank stores and attends to the rows that it keeps, with all heads,
and gets its own heads back when the ranks merge:

    own q, k, v ─GatherRows─▶ q, k, v ─RopeStore, Attention─▶ all heads over own rows ─MergeAttention─▶ own heads
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from backends.base import Attention as AttentionOp
from backends.base import (
    Buffer,
    GatherPart,
    GatherRows,
    KvLayer,
    LinearPart,
    MergeAttention,
    Rope,
    RopeStore,
    Weight,
)
from homeserve.errors import UnsupportedModel
from homeserve.layouts.partition import Run
from homeserve.models.op_list import OpList, held
from homeserve.models.stages import Attention

Names = Mapping[str, str]
Whole = tuple[Buffer | None, Buffer | None, Buffer | None]
"""q, k and v of all ranks; None: not computed."""
NO_QUERY = Buffer("no_query", 0)


def attention(out: OpList, stage: Attention, layer: int, names: Names, rope: Rope | None) -> None:
    q = out.buffer("q", stage.heads * stage.q_step)
    pool_layer = _kv_layer(out, stage, layer)
    out.read(stage, names["attn_norm"])
    k, v = _keys_and_values(out, stage) if stage.kv_source is None else (None, None)
    own_q, own_heads = _qkv(out, stage, layer, names, (q, k, v))
    _store(out, stage, names, rope, pool_layer, (q, k, v))
    mixed = _attend(out, stage, layer, names, pool_layer, q, own_q, own_heads)
    inner = stage.heads * stage.head_dim
    out.project(mixed, names, "attn_output", inner, out.update, stage.output_bias)
    out.owe(stage, names, "attn_post_norm", out.label("attention", layer))


def keys_and_values(out: OpList, stage: Attention, layer: int, names: Names, rope: Rope | None) -> None:
    """What of an attention other rows will ask for: its K and V, into the pool. Nobody attends."""
    pool_layer = _kv_layer(out, stage, layer)
    out.read(stage, names["attn_norm"])
    k, v = _keys_and_values(out, stage)
    _qkv(out, stage, layer, names, (None, k, v))
    _store(out, stage, names, rope, pool_layer, (None, k, v))


def _keys_and_values(out: OpList, stage: Attention) -> tuple[Buffer, Buffer]:
    width = stage.kv_heads * stage.head_dim
    return out.buffer("k", width), out.buffer("v", width)


def _store(out: OpList, stage: Attention, names: Names, rope: Rope | None, pool_layer: int, whole: Whole) -> None:
    q, k, v = whole
    q_norm = out.source.take(names["attn_q_norm"], 1, stage.head_dim) if stage.q_norm and q is not None else None
    own_k_norm = stage.k_norm and k is not None
    k_norm = out.source.take(names["attn_k_norm"], 1, stage.head_dim) if own_k_norm else None
    q_step = stage.q_step if stage.gated and q is not None else 0
    heads = stage.heads if q is not None else 0
    sizes = (heads, stage.kv_heads, stage.head_dim)
    normed = q_norm is not None or k_norm is not None or stage.v_norm
    eps = stage.read.eps if normed else 0.0
    v_norm = stage.v_norm and v is not None
    out.add(RopeStore(q or NO_QUERY, k, v, pool_layer, *sizes, rope, q_step, q_norm, k_norm, eps, v_norm))


def _attend(
    out: OpList, stage: Attention, layer: int, names: Names, pool_layer: int, q: Buffer, own_q: Buffer, own: Run
) -> Buffer:
    """The attention of this rank's own heads. Where every rank keeps some of the rows, each attends with all heads over
    its own, and sinks and gates come in when the ranks merge."""
    sinks = held(out.source.take(names["attn_sinks"], 1, stage.heads)) if stage.sinks else None
    mixed = out.buffer("mixed", own.size * stage.head_dim)
    whole = AttentionOp(
        q,
        mixed,
        pool_layer,
        stage.heads,
        stage.kv_heads,
        stage.head_dim,
        scale=stage.scale,
        window=stage.window,
        softcap=stage.softcap,
        sinks=sinks,
        q_step=stage.q_step if stage.gated else 0,
        gated=stage.gated,
    )
    if not out.divided:
        out.add(whole)
        return mixed
    partial = out.buffer("partial", stage.heads * (stage.head_dim + 1))
    gate = own_q if stage.gated and own.size else None
    out.add(replace(whole, out=partial, sinks=None, gated=False, partial=True))
    sizes = (stage.heads, stage.head_dim, own.first, own.size)
    out.add(MergeAttention(partial, mixed, *sizes, out.label("merge", layer), sinks, gate))
    return mixed


def _kv_layer(out: OpList, stage: Attention, layer: int) -> int:
    """The pool layer that this one stores to, or reads from where it has no K and V of its own."""
    if layer in out.kv_index:
        return out.kv_index[layer]
    if stage.kv_source is None:
        out.kv_index[layer] = len(out.kv_layers)
        group = 1 + out.windows.index(stage.window) if stage.window else 0
        out.kv_layers.append(KvLayer(stage.kv_heads, stage.head_dim, group))
        return out.kv_index[layer]
    if stage.kv_source not in out.kv_index:
        raise UnsupportedModel(
            f"layer {layer} reads the K and V of layer {stage.kv_source}: both must be on one rank", field="layers"
        )
    return out.kv_index[stage.kv_source]


def _qkv(out: OpList, stage: Attention, layer: int, names: Names, whole: Whole) -> tuple[Buffer, Run]:
    """The three projections (q alone where K and V are another layer's, k and v alone where nobody attends), from
    tensors of their own or as row ranges of a fused one (rows q | k | v). What a rank computes of them is gathered from
    all ranks, but where each has computed all of it. Gives what this rank has of q, and its query heads."""
    roles = ("attn_q", "attn_k", "attn_k" if stage.v_from_k else "attn_v")
    biased = (stage.q_bias, stage.k_bias, stage.v_bias)
    kv_rows = stage.kv_heads * stage.head_dim if stage.kv_source is None else 0
    sizes = (stage.heads * stage.q_step, kv_rows, kv_rows)
    parts, gathered, first = [], [], 0
    for name, role, to, bias, size in zip("qkv", roles, whole, biased, sizes, strict=True):
        end = first + size
        if to is not None:
            widths = _widths(out, names, role, first, end)
            own = to if widths is None else out.buffer(f"own_{name}", widths[out.source.rank])
            parts.append(_projection(out, names, role, (first, end, sum(sizes)), own, bias))
            if widths is not None:
                gathered.append(GatherPart(own, to, widths))
        first = end
    out.linear(out.normed, *parts)
    if gathered:
        out.add(GatherRows(tuple(gathered), out.label("qkv", layer)))
    q = whole[0]
    if q is None or not gathered:
        return q or NO_QUERY, Run(0, stage.heads)
    before = sum(gathered[0].widths[: out.source.rank])
    return gathered[0].src, Run(before // stage.q_step, (before + gathered[0].src.width) // stage.q_step)


def _is_fused(out: OpList, names: Names, role: str) -> bool:
    return not out.source.has(names[role]) and out.source.has(names["attn_qkv"])


def _widths(out: OpList, names: Names, role: str, first: int, end: int) -> tuple[int, ...] | None:
    """How wide each rank's part of a projection is; None: as wide as the projection."""
    if _is_fused(out, names, role):
        return out.source.rows_by_rank(names["attn_qkv"], first, end)
    return out.source.rows_by_rank(names[role], 0, end - first)


def _projection(
    out: OpList, names: Names, role: str, place: tuple[int, int, int], to: Buffer, biased: bool
) -> LinearPart:
    """`place` (first row, end, all rows) is that in a fused tensor."""
    source, fused_bias = out.source, names["attn_qkv.bias"]
    first, end, rows = place
    if _is_fused(out, names, role):
        weight = source.take_rows(names["attn_qkv"], first, end, rows, out.hidden)
    else:
        weight = source.take(names[role], end - first, out.hidden)
    bias: Weight | None = None
    if biased and source.has(fused_bias):
        bias = source.take_span(fused_bias, first, end, rows)
    elif biased:
        bias = source.take(names[f"{role}.bias"], 1, end - first)
    return LinearPart(weight, to, held(bias))
