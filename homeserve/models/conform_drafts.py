"""A drafting block's own ops held against its declaration: what it reads, how it joins, what it stores and keeps.

The layer inside the block is compared as every layer is (`conform`). Around it there are two lists, that which fills
the block and that of a step of drafting, with the same inputs from different places:

    fill    final ──hnorm──▶ hidden_in      joined in the order of rows, the last one stays     K and V, no query
    step    draft_final ──hnorm──▶ draft_hidden      joined along the chain, nothing stays      logits
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from backends.base import (
    AddGated,
    Attention,
    EmbedRows,
    JoinHidden,
    Linear,
    Norm,
    Op,
    Rope,
    RopeStore,
    Scale,
    StateLayer,
    StatePart,
)
from homeserve.layouts.partition import Run
from homeserve.layouts.transition import StateForm
from homeserve.models.config import OUTPUT, OUTPUT_NORM, TOKEN_EMBD, ModelConfig
from homeserve.models.conform import check_layer
from homeserve.models.conform_parts import Facts, Parts
from homeserve.models.draft_ops import EMBED, ENORM, HEAD, HNORM, JOIN, NORM, checked_stages
from homeserve.models.family import Family
from homeserve.models.op_list import OpList
from homeserve.models.stages import Attention as AttentionStage
from homeserve.models.stages import RopeFacts


@dataclass(frozen=True)
class Block:
    """What a block must be on this rank. `columns` of either half of the joining matrix are here, `state` is the
    ordinal of its state among those of the model; tensors go by their names, `table` is "" where no row of it is here,
    `head` where no column of the logits is."""

    layer: int
    mixer: AttentionStage
    rope: Rope | None
    columns: Run
    state: int
    kv_layer: int
    eps: float
    table: str
    enorm: str
    hnorm: str
    join: str
    norm: str
    head: str
    has_kv: bool = True
    """Whether this rank computes some K and V, or gets all of them from others."""


def block_of(
    out: OpList,
    family: Family,
    config: ModelConfig,
    resolved: Callable[[RopeFacts], Rope],
    states_before: int,
    parts: Parts | None,
    states: Mapping[int, StateForm] | None,
) -> Block:
    """What the block must be on the rank of `out`, whose shares are `parts` and `states` (None: it has all)."""
    source, layer = out.source, config.layers
    names = family.tensor_names(config, layer)
    mixer, _ = checked_stages(family.stages(config, layer), layer)

    def one_of(role: str, of_model: str) -> str:
        return names[role] if source.has(names[role]) else of_model

    def here(table: str) -> str:
        return table if source.own_rows(table, config.vocab) else ""

    runs = (Run(0, config.hidden),) if states is None else states[layer].channels[source.rank]
    return Block(
        layer,
        mixer,
        resolved(mixer.rope) if mixer.rope else None,
        runs[0] if runs else Run(0, 0),
        states_before,
        len(out.kv_layers) - 1,
        config.norm_eps,
        here(one_of(EMBED, TOKEN_EMBD)),
        names[ENORM],
        names[HNORM],
        names[JOIN],
        one_of(NORM, OUTPUT_NORM),
        here(one_of(HEAD, TOKEN_EMBD if config.tied_head else OUTPUT)),
        parts is None or parts.has_kv(layer),
    )


def check_fill(block: Block, ops: Sequence[Op], state: tuple[StateLayer | None, StatePart | None]) -> None:
    """Raises DeclarationMismatch with every field that differs."""
    declared = _inputs(block, "final", "hidden_in", chained=False)
    declared["state"] = _state_of(block)
    mixer, normed = block.mixer, block.mixer.k_norm or block.mixer.v_norm
    declared["stored"] = (block.kv_layer, 0, mixer.kv_heads, mixer.head_dim)
    declared |= {"rope": block.rope, "k_norm": mixer.k_norm, "v_norm": mixer.v_norm, "attn_norm": mixer.read.eps}
    declared |= {"norm_eps": mixer.read.eps if normed else 0.0}
    declared |= {"biases": (mixer.k_bias, mixer.v_bias) if block.has_kv else ()}
    check_layer(block.layer, [declared], [_built(ops, block, "fill the drafting block") | {"state": state}])


def check_step(block: Block, ops: Sequence[Op]) -> None:
    """`ops` behind the mark, without those of the layer. Raises DeclarationMismatch with every field that differs."""
    declared = _inputs(block, "draft_final", "draft_hidden", chained=True)
    declared["final"] = (block.norm, "x", "draft_final", block.eps, True)
    if block.head:
        declared["head"] = ("draft_final", block.head)
    check_layer(block.layer, [declared], [_built(ops, block, "draft")])


def _inputs(block: Block, of: str, hidden: str, *, chained: bool) -> Facts:
    facts: Facts = {"stage": "draft" if chained else "fill the drafting block"}
    if block.table:
        facts["table"] = (block.table, 1.0)
    facts["enorm"] = (block.enorm, "embedded", "normed", block.eps)
    facts["hnorm"] = (block.hnorm, of, hidden, block.eps)
    if block.columns.size:
        joined = 2 * block.columns.size
        facts["joined"] = ("normed", hidden, joined, block.columns.first, block.columns.end, chained)
        facts["eh_proj"] = (block.join, joined, "x")
    return facts


def _state_of(block: Block) -> tuple[StateLayer | None, StatePart | None]:
    columns = block.columns
    if not columns.size:
        return None, None
    return StateLayer(columns.size, 2, 0, 0, 0), StatePart(block.state, columns.first)


def _built(ops: Sequence[Op], block: Block, stage: str) -> Facts:
    facts: Facts = {"stage": stage}
    for op in ops:
        match op:
            case EmbedRows(table=table, scale=scale):
                facts["table"] = (table.name, scale)
            case Norm(src=src, out=out, weight=weight, eps=eps, add=add):
                facts |= _norm(block, weight.name, src.name, out.name, eps, add is not None)
            case JoinHidden(left=left, right=right, out=out):
                facts["joined"] = (left.name, right.name, out.width, op.first, op.end, op.chained)
            case Linear():
                facts |= _linear(op.src.name, op)
            case RopeStore():
                facts["stored"] = (op.layer, op.heads, op.kv_heads, op.head_dim)
                facts |= {"rope": op.rope, "k_norm": op.k_norm is not None, "v_norm": op.v_norm}
                facts["norm_eps"] = op.norm_eps
                if op.q_norm is not None:
                    facts["q_norm"] = True
            case Attention() | AddGated() | Scale():
                facts["besides"] = type(op).__name__
    if "rope" in facts:
        facts.setdefault("biases", ())
    return facts


def _norm(block: Block, weight: str, src: str, out: str, eps: float, adds: bool) -> Facts:
    if weight == block.enorm:
        return {"enorm": (weight, src, out, eps)}
    if weight == block.hnorm:
        return {"hnorm": (weight, src, out, eps)}
    return {"final": (weight, src, out, eps, adds)} if out == "draft_final" else {"attn_norm": eps}


def _linear(src: str, op: Linear) -> Facts:
    if src == "joined" or src.startswith("joined."):
        (part,) = op.parts
        return {"eh_proj": (part.weight.name, part.weight.cols, part.out.name)}
    if src == "normed":
        return {"biases": tuple(part.bias is not None for part in op.parts)}
    return {"head": (src, op.parts[0].weight.name)}
