"""One function for each stage kind: the declared stage becomes ops that read `normed` and leave their sum in `update`.

Tensors come by role (`Family.tensor_names`); a projection may lie in a tensor of its own or as rows of a fused one.

In the tensor layout the same functions build a rank's part. What a tensor's part is, the `TensorSource` knows; a stage
asks it how wide the inner buffers are (heads, columns, experts), names the whole shapes, and projects what it has into
`update`, a partial sum that `OpList.owe` completes. So a stage is written once:

    inner width   own_cols(the matrix into the sum)      the whole one, where nothing is divided
    in            linear(normed, parts by rows)          parts of which nothing is held fall away
    out           project(inner, matrix by columns)      Zero, where the rank has no inner column
    end           owe(..., label)                        SumRows, then norms behind the sum

Attention has a module of its own (`attention_ops`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from backends.base import (
    AddGated,
    Buffer,
    DeltaNet,
    ExpertMatrix,
    GatedActivation,
    Linear,
    LinearPart,
    Norm,
    Routing,
    StateLayer,
    Weight,
    Zero,
)
from backends.base import Experts as ExpertsOp
from homeserve.models.config import TOKEN_INPUT
from homeserve.models.end_ops import look_up
from homeserve.models.op_list import OpList, held
from homeserve.models.stages import Dense, Experts, GatedDeltaNet, SharedExpert, TokenInput, UpdateKind

Names = Mapping[str, str]


# --------------------------------------------------------------------------------------------------------- delta nets


def delta_net(out: OpList, stage: GatedDeltaNet, layer: int, names: Names) -> None:
    take, value_dim = out.source.take, stage.value_dim
    conv = take(names["ssm_conv1d"], stage.channels, stage.kernel)
    values = out.source.own_cols(names["ssm_out"], stage.value_heads * value_dim)
    heads = values // value_dim
    mixed = out.buffer("delta_in", conv.rows)
    z = out.buffer("delta_z", values)
    beta, alpha = (out.buffer(name, heads) for name in ("delta_beta", "delta_alpha"))
    result = out.buffer("delta_out", values)
    out.read(stage, names["attn_norm"])
    weights = (*_delta_in(out, stage, names), *_delta_gates(out, stage, names))
    buffers = (mixed, z, beta, alpha)
    out.linear(out.normed, *(LinearPart(weight, to) for weight, to in zip(weights, buffers, strict=True)))
    own = StateLayer(conv.rows, stage.kernel, heads, stage.key_dim, value_dim) if heads else None
    out.keep_state(own, out.source.first_row(names["ssm_conv1d"]) // stage.key_dim)
    if heads:
        out.add(
            DeltaNet(
                mixed,
                z,
                beta,
                alpha,
                result,
                len(out.state_layers) - 1,
                conv=conv,
                dt_bias=take(names["ssm_dt"], 1, stage.value_heads),
                a=take(names["ssm_a"], 1, stage.value_heads),
                norm=take(names["ssm_norm"], 1, value_dim),
                key_heads=heads * stage.key_heads // stage.value_heads,
                value_heads=heads,
                key_dim=stage.key_dim,
                value_dim=value_dim,
                kernel=stage.kernel,
                eps=stage.read.eps,
                tiled=stage.tiled,
            )
        )
    out.project(result, names, "ssm_out", stage.value_heads * value_dim, out.update)
    out.owe(stage, names, "attn_post_norm", out.label("delta", layer))


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


def dense(out: OpList, stage: Dense, layer: int, names: Names) -> None:
    own = out.source.own_cols(names["ffn_down"], stage.width)
    gate, up, act = (out.buffer(name, own) for name in ("gate", "up", "act"))
    out.read(stage, names["ffn_norm"])
    out.linear(
        out.normed,
        out.part(names, "ffn_gate", stage.width, out.hidden, gate, stage.gate_bias),
        out.part(names, "ffn_up", stage.width, out.hidden, up, stage.up_bias),
    )
    if own:
        out.add(GatedActivation(gate, up, act, kind=stage.activation.value))
    out.project(act, names, "ffn_down", stage.width, out.target(stage), stage.down_bias)
    out.owe(stage, names, "ffn_post_norm", out.label("dense", layer))


def experts(out: OpList, stage: Experts, layer: int, names: Names) -> None:
    # Beside another feed-forward they have norms of their own.
    norms = "ffn_experts" if stage.update.kind is UpdateKind.JOIN else "ffn"
    out.read(stage, names[f"{norms}_norm"])
    router, shared_logit = out.buffer("router", stage.count), None
    routed = [out.part(names, "ffn_gate_inp", stage.count, out.hidden, router, stage.router_bias)]
    if stage.shared is not None and stage.shared.gated:
        shared_logit = out.buffer("shared_logit", 1)
        routed.append(out.part(names, "ffn_gate_inp_shexp", 1, out.hidden, shared_logit))
    out.add(Linear(_router_input(out, stage, names), tuple(routed)))
    selection = out.source.take(names["exp_probs_b"], 1, stage.count) if stage.selection_bias else None
    gains = out.source.take(names["ffn_down_exps.scale"], 1, stage.count) if stage.gains else None
    routing = Routing(stage.count, stage.used, stage.func.value, stage.normalise, stage.scale, selection, gains)
    some, width = _held_experts(out, stage, names)
    here = stage.count if some is None else some[1] - some[0]
    if here and width:
        gate, up = _gate_and_up(out, stage, names, here, width)
        sizes = (stage.count, out.hidden, stage.width)
        down = _expert_matrix(out, names, "ffn_down_exps", here, sizes, stage.down_bias)
        kind = stage.activation.value
        out.add(ExpertsOp(out.normed, router, out.update, routing, gate, up, down, kind=kind, held=some))
    else:
        out.add(Zero(out.update))
    if stage.shared is not None:
        _shared_expert(out, stage, stage.shared, names, shared_logit)
    out.owe(stage, names, f"{norms}_post_norm", out.label("experts", layer))


def _held_experts(out: OpList, stage: Experts, names: Names) -> tuple[tuple[int, int] | None, int]:
    """Which experts this rank holds (None: all), and how many columns of each."""
    down, rows = names["ffn_down_exps"], stage.count * out.hidden
    by_rank = out.source.rows_by_rank(down, 0, rows)
    width = out.source.own_cols(down, stage.width)
    if by_rank is None or all(own in (0, rows) for own in by_rank):
        return None, width
    first = sum(by_rank[: out.source.rank]) // out.hidden
    return (first, first + by_rank[out.source.rank] // out.hidden), width


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
    own = out.source.own_cols(names["ffn_down_shexp"], shared.width)
    gate, up, act = (out.buffer(name, own) for name in ("shared_gate", "shared_up", "shared_act"))
    result = out.buffer("shared_out", out.hidden)
    out.linear(
        out.normed,
        out.part(names, "ffn_gate_shexp", shared.width, out.hidden, gate),
        out.part(names, "ffn_up_shexp", shared.width, out.hidden, up),
    )
    down = out.part(names, "ffn_down_shexp", out.hidden, shared.width, result)
    if own:
        out.add(GatedActivation(gate, up, act, kind=stage.activation.value))
        out.add(Linear(act, (down,)))
        out.add(AddGated(result, out.update, logit))


def _gate_and_up(out: OpList, stage: Experts, names: Names, here: int, width: int) -> tuple[ExpertMatrix, ExpertMatrix]:
    """Two tensors, or one that holds each expert's gate rows and, behind them, its up rows."""
    source, fused = out.source, names["ffn_gate_up_exps"]
    if source.has(names["ffn_gate_exps"]) or not source.has(fused):
        sizes = (stage.count, stage.width, out.hidden)
        return (
            _expert_matrix(out, names, "ffn_gate_exps", here, sizes, stage.gate_bias),
            _expert_matrix(out, names, "ffn_up_exps", here, sizes, stage.up_bias),
        )
    sizes = (stage.count, 2 * stage.width, out.hidden)
    whole = _expert_matrix(out, names, "ffn_gate_up_exps", here, sizes, stage.gate_bias and stage.up_bias)
    gate, up = (ExpertMatrix(whole.weight, width, whole.pitch, first, whole.bias) for first in (0, width))
    return gate, up


def _expert_matrix(
    out: OpList, names: Names, role: str, here: int, sizes: tuple[int, int, int], biased: bool
) -> ExpertMatrix:
    """`sizes` (count, height, cols) are those of all experts; `here` are as many, or some rows or columns of each."""
    count, height, cols = sizes
    weight = out.source.take(names[role], count * height, cols, stack=count)
    bias = out.source.take_flat(names[f"{role}.bias"], count, height) if biased else None
    own = weight.rows // here
    return ExpertMatrix(weight, own, own, bias=held(bias))


# ------------------------------------------------------------------------------------------------- inputs by token


def token_input(out: OpList, stage: TokenInput, layer: int, names: Names, vocab: int) -> None:
    table, projection, norm = TOKEN_INPUT
    mixed, told, gate, act = (out.buffer(f"token_{name}", stage.width) for name in ("mixed", "told", "gate", "act"))
    end = stage.first + stage.width
    own_rows = out.source.take_rows(projection, stage.first, end, stage.columns, out.hidden)
    out.add(Linear(out.embedded, (LinearPart(own_rows, mixed),)))
    out.add(Norm(mixed, out.source.take(norm, 1, stage.width), stage.projection_eps, mixed))
    own_columns = out.source.take_columns(table, stage.first, end, vocab, stage.columns)
    look_up(out, own_columns, told, math.sqrt(stage.width), table, f"told {layer}")
    out.add(AddGated(told, mixed))
    out.settle_here()
    out.add(Linear(out.x, (out.part(names, "inp_gate", stage.width, out.hidden, gate),)))
    out.add(GatedActivation(gate, mixed, act, kind=stage.activation.value))
    out.project(act, names, "proj", stage.width, out.update)
    out.owe(stage, names, "token_post_norm")
