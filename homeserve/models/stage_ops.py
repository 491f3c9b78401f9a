"""One function for each stage kind: the declared stage becomes ops that read `normed` and leave their sum in `update`.

Tensors come by role (`Family.tensor_names`); a projection may lie in a tensor of its own or as rows of a fused one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from backends.base import (
    AddGated,
    Buffer,
    DeltaNet,
    EmbedRows,
    ExpertMatrix,
    GatedActivation,
    KvLayer,
    Linear,
    LinearPart,
    Norm,
    Rope,
    RopeStore,
    Routing,
    StateLayer,
    Weight,
)
from backends.base import Attention as AttentionOp
from backends.base import Experts as ExpertsOp
from homeserve.errors import UnsupportedModel
from homeserve.models.config import TOKEN_INPUT
from homeserve.models.op_list import OpList
from homeserve.models.stages import Attention, Dense, Experts, GatedDeltaNet, SharedExpert, TokenInput, UpdateKind

Names = Mapping[str, str]


def attention(out: OpList, stage: Attention, layer: int, names: Names, rope: Rope | None) -> None:
    q = out.buffer("q", stage.heads * stage.q_step)
    mixed = out.buffer("mixed", stage.heads * stage.head_dim)
    pool_layer = _kv_layer(out, stage, layer)
    out.read(stage, names["attn_norm"])
    k = v = None
    if stage.kv_source is None:
        k = out.buffer("k", stage.kv_heads * stage.head_dim)
        v = out.buffer("v", stage.kv_heads * stage.head_dim)
        out.add(Linear(out.normed, _qkv(out, stage, names, q, k, v)))
    else:
        out.add(Linear(out.normed, (out.part(names, "attn_q", out.hidden, q, stage.q_bias),)))
    q_norm = out.source.take(names["attn_q_norm"], 1, stage.head_dim) if stage.q_norm else None
    own_k_norm = stage.k_norm and stage.kv_source is None
    k_norm = out.source.take(names["attn_k_norm"], 1, stage.head_dim) if own_k_norm else None
    q_step = stage.q_step if stage.gated else 0
    sizes = (stage.heads, stage.kv_heads, stage.head_dim)
    normed = q_norm is not None or k_norm is not None or stage.v_norm
    eps = stage.read.eps if normed else 0.0
    out.add(RopeStore(q, k, v, pool_layer, *sizes, rope, q_step, q_norm, k_norm, eps, stage.v_norm and v is not None))
    sinks = out.source.take(names["attn_sinks"], 1, stage.heads) if stage.sinks else None
    out.add(
        AttentionOp(
            q,
            mixed,
            pool_layer,
            *sizes,
            scale=stage.scale,
            window=stage.window,
            softcap=stage.softcap,
            sinks=sinks,
            q_step=q_step,
            gated=stage.gated,
        )
    )
    out.add(Linear(mixed, (out.part(names, "attn_output", mixed.width, out.update, stage.output_bias),)))
    out.owe(stage, names, "attn_post_norm")


def _kv_layer(out: OpList, stage: Attention, layer: int) -> int:
    """The pool layer that this one stores to, or reads from where it has no K and V of its own."""
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


def _qkv(out: OpList, stage: Attention, names: Names, q: Buffer, k: Buffer, v: Buffer) -> tuple[LinearPart, ...]:
    """The three projections, from tensors of their own or as row ranges of a fused one (rows q | k | v)."""
    source, fused_bias = out.source, names["attn_qkv.bias"]
    rows = q.width + k.width + v.width
    parts, first = [], 0
    v_role = "attn_k" if stage.v_from_k else "attn_v"
    for role, to, biased in (("attn_q", q, stage.q_bias), ("attn_k", k, stage.k_bias), (v_role, v, stage.v_bias)):
        end = first + to.width
        if source.has(names[role]) or not source.has(names["attn_qkv"]):
            weight = source.take(names[role], to.width, out.hidden)
        else:
            weight = source.take_rows(names["attn_qkv"], first, end, rows, out.hidden)
        bias: Weight | None = None
        if biased and source.has(fused_bias):
            bias = source.take_span(fused_bias, first, end, rows)
        elif biased:
            bias = source.take(names[f"{role}.bias"], 1, to.width)
        parts.append(LinearPart(weight, to, bias))
        first = end
    return tuple(parts)


# --------------------------------------------------------------------------------------------------------- delta nets


def delta_net(out: OpList, stage: GatedDeltaNet, names: Names) -> None:
    mixed = out.buffer("delta_in", stage.channels)
    z = out.buffer("delta_z", stage.value_heads * stage.value_dim)
    beta, alpha = (out.buffer(name, stage.value_heads) for name in ("delta_beta", "delta_alpha"))
    result = out.buffer("delta_out", z.width)
    state_layer = len(out.state_layers)
    out.state_layers.append(StateLayer(stage.channels, stage.kernel, stage.value_heads, stage.key_dim, stage.value_dim))
    out.read(stage, names["attn_norm"])
    weights = (*_delta_in(out, stage, names), *_delta_gates(out, stage, names))
    buffers = (mixed, z, beta, alpha)
    out.add(Linear(out.normed, tuple(LinearPart(weight, to) for weight, to in zip(weights, buffers, strict=True))))
    take = out.source.take
    out.add(
        DeltaNet(
            mixed,
            z,
            beta,
            alpha,
            result,
            state_layer,
            conv=take(names["ssm_conv1d"], stage.channels, stage.kernel),
            dt_bias=take(names["ssm_dt"], 1, stage.value_heads),
            a=take(names["ssm_a"], 1, stage.value_heads),
            norm=take(names["ssm_norm"], 1, stage.value_dim),
            key_heads=stage.key_heads,
            value_heads=stage.value_heads,
            key_dim=stage.key_dim,
            value_dim=stage.value_dim,
            kernel=stage.kernel,
            eps=stage.read.eps,
            tiled=stage.tiled,
        )
    )
    out.add(Linear(result, (out.part(names, "ssm_out", result.width, out.update),)))
    out.owe(stage, names, "attn_post_norm")


def _delta_in(out: OpList, stage: GatedDeltaNet, names: Names) -> tuple[Weight, Weight]:
    """The projections to q | k | v and to z, from two tensors or from one that is ordered by key head."""
    source, z_rows = out.source, stage.value_heads * stage.value_dim
    if source.has(names["attn_qkv"]) or not source.has(names["ssm_in"]):
        qkv = source.take(names["attn_qkv"], stage.channels, out.hidden)
        return qkv, source.take(names["attn_gate"], z_rows, out.hidden)
    # For each key head: q, k, then v and z of the value heads that go with it.
    share = stage.value_heads // stage.key_heads * stage.value_dim
    sizes = (stage.key_dim, stage.key_dim, share, share)
    q, k, v, z = _rows_by_group(stage.key_heads, sizes)
    if stage.tiled:
        v, z = (_tiled(rows, stage, stage.value_dim) for rows in (v, z))
    rows = stage.channels + z_rows
    mixed = source.take_reordered(names["ssm_in"], "qkv", [*q, *k, *v], rows, out.hidden)
    return mixed, source.take_reordered(names["ssm_in"], "z", z, rows, out.hidden)


def _delta_gates(out: OpList, stage: GatedDeltaNet, names: Names) -> tuple[Weight, Weight]:
    """The projections to beta and alpha, from two tensors or from one that is ordered by key head."""
    source, heads = out.source, stage.value_heads
    if source.has(names["ssm_beta"]) or not source.has(names["ssm_ba"]):
        return (
            source.take(names["ssm_beta"], heads, out.hidden),
            source.take(names["ssm_alpha"], heads, out.hidden),
        )
    share = heads // stage.key_heads
    beta, alpha = _rows_by_group(stage.key_heads, (share, share))
    if stage.tiled:
        beta, alpha = (_tiled(rows, stage, 1) for rows in (beta, alpha))
    return (
        source.take_reordered(names["ssm_ba"], "beta", beta, 2 * heads, out.hidden),
        source.take_reordered(names["ssm_ba"], "alpha", alpha, 2 * heads, out.hidden),
    )


def _rows_by_group(groups: int, sizes: tuple[int, ...]) -> list[list[int]]:
    """Rows of each of `sizes` parts in a tensor that holds, for each group, all parts one behind the other."""
    step = sum(sizes)
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    return [
        [group * step + start + row for group in range(groups) for row in range(size)]
        for start, size in zip(starts, sizes, strict=True)
    ]


def _tiled(rows: list[int], stage: GatedDeltaNet, width: int) -> list[int]:
    """Rows of value heads in grouped order (head g * share + j) as head j * key_heads + g."""
    share = stage.value_heads // stage.key_heads
    order = [group * share + j for j in range(share) for group in range(stage.key_heads)]
    return [row for head in order for row in rows[head * width : (head + 1) * width]]


# ------------------------------------------------------------------------------------------------------- feed-forwards


def dense(out: OpList, stage: Dense, names: Names) -> None:
    gate, up, act = (out.buffer(name, stage.width) for name in ("gate", "up", "act"))
    out.read(stage, names["ffn_norm"])
    parts = (
        out.part(names, "ffn_gate", out.hidden, gate, stage.gate_bias),
        out.part(names, "ffn_up", out.hidden, up, stage.up_bias),
    )
    out.add(Linear(out.normed, parts))
    out.add(GatedActivation(gate, up, act, kind=stage.activation.value))
    out.add(Linear(act, (out.part(names, "ffn_down", stage.width, out.target(stage), stage.down_bias),)))
    out.owe(stage, names, "ffn_post_norm")


def experts(out: OpList, stage: Experts, names: Names) -> None:
    router, shared_logit = out.buffer("router", stage.count), None
    # Beside another feed-forward they have norms of their own.
    norms = "ffn_experts" if stage.update.kind is UpdateKind.JOIN else "ffn"
    out.read(stage, names[f"{norms}_norm"])
    routed = [out.part(names, "ffn_gate_inp", out.hidden, router, stage.router_bias)]
    if stage.shared is not None and stage.shared.gated:
        shared_logit = out.buffer("shared_logit", 1)
        routed.append(out.part(names, "ffn_gate_inp_shexp", out.hidden, shared_logit))
    out.add(Linear(_router_input(out, stage, names), tuple(routed)))
    selection = out.source.take(names["exp_probs_b"], 1, stage.count) if stage.selection_bias else None
    gains = out.source.take(names["ffn_down_exps.scale"], 1, stage.count) if stage.gains else None
    routing = Routing(stage.count, stage.used, stage.func.value, stage.normalise, stage.scale, selection, gains)
    gate, up = _gate_and_up(out, stage, names)
    down = _expert_matrix(out, names, "ffn_down_exps", stage.count, out.hidden, stage.width, stage.down_bias)
    out.add(ExpertsOp(out.normed, router, out.update, routing, gate, up, down, kind=stage.activation.value))
    if stage.shared is not None:
        _shared_expert(out, stage, stage.shared, names, shared_logit)
    out.owe(stage, names, f"{norms}_post_norm")


def _router_input(out: OpList, stage: Experts, names: Names) -> Buffer:
    """What the router reads: what the experts do, or the residual by a norm of the router's own."""
    if not stage.router_eps:
        return out.normed
    assert stage.shared is None or not stage.shared.gated, "one input for both logits"
    own = out.buffer("router_in", out.hidden)
    weight = out.source.take_scaled(names["ffn_gate_inp.scale"], out.hidden, 1.0 / math.sqrt(out.hidden))
    out.add(Norm(out.x, weight, stage.router_eps, own))
    return own


def _shared_expert(out: OpList, stage: Experts, shared: SharedExpert, names: Names, logit: Buffer | None) -> None:
    gate, up, act = (out.buffer(name, shared.width) for name in ("shared_gate", "shared_up", "shared_act"))
    result = out.buffer("shared_out", out.hidden)
    parts = (
        out.part(names, "ffn_gate_shexp", out.hidden, gate),
        out.part(names, "ffn_up_shexp", out.hidden, up),
    )
    out.add(Linear(out.normed, parts))
    out.add(GatedActivation(gate, up, act, kind=stage.activation.value))
    out.add(Linear(act, (out.part(names, "ffn_down_shexp", shared.width, result),)))
    out.add(AddGated(result, out.update, logit))


def _gate_and_up(out: OpList, stage: Experts, names: Names) -> tuple[ExpertMatrix, ExpertMatrix]:
    """Two tensors, or one that holds each expert's gate rows and, behind them, its up rows."""
    source, fused = out.source, names["ffn_gate_up_exps"]
    if source.has(names["ffn_gate_exps"]) or not source.has(fused):
        sizes = (stage.count, stage.width, out.hidden)
        return (
            _expert_matrix(out, names, "ffn_gate_exps", *sizes, stage.gate_bias),
            _expert_matrix(out, names, "ffn_up_exps", *sizes, stage.up_bias),
        )
    whole = _expert_matrix(
        out, names, "ffn_gate_up_exps", stage.count, 2 * stage.width, out.hidden, stage.gate_bias and stage.up_bias
    )
    gate, up = (ExpertMatrix(whole.weight, stage.width, whole.pitch, first, whole.bias) for first in (0, stage.width))
    return gate, up


def _expert_matrix(
    out: OpList, names: Names, role: str, count: int, height: int, cols: int, biased: bool
) -> ExpertMatrix:
    weight = out.source.take(names[role], count * height, cols)
    bias = out.source.take_flat(names[f"{role}.bias"], count, height) if biased else None
    return ExpertMatrix(weight, height, height, bias=bias)


# ------------------------------------------------------------------------------------------------- inputs by token


def token_input(out: OpList, stage: TokenInput, names: Names, vocab: int) -> None:
    table, projection, norm = TOKEN_INPUT
    mixed, told, gate, act = (out.buffer(f"token_{name}", stage.width) for name in ("mixed", "told", "gate", "act"))
    end = stage.first + stage.width
    own_rows = out.source.take_rows(projection, stage.first, end, stage.columns, out.hidden)
    out.add(Linear(out.embedded, (LinearPart(own_rows, mixed),)))
    out.add(Norm(mixed, out.source.take(norm, 1, stage.width), stage.projection_eps, mixed))
    own_columns = out.source.take_columns(table, stage.first, end, vocab, stage.columns)
    out.add(EmbedRows(own_columns, told, math.sqrt(stage.width)))
    out.add(AddGated(told, mixed))
    out.settle_here()
    out.add(Linear(out.x, (out.part(names, "inp_gate", out.hidden, gate),)))
    out.add(GatedActivation(gate, mixed, act, kind=stage.activation.value))
    out.add(Linear(act, (out.part(names, "proj", stage.width, out.update),)))
    out.owe(stage, names, "token_post_norm")
