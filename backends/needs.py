"""What an op list needs, in the words of a capability table: pairs of an op's name and a type.

EmbedRows, Linear          x  the weight's type
Norm, Bias, Scale          x  the weight's type          (Bias is that of a Linear)
RopeStore, Attention       x  the KV pool's type
RopeStore                  x  shared rows                (a layer that reads what another one stored)
HeadNorm                   x  the weight's type          (RopeStore's norms over a head; "none" for one without weights)
Attention                  x  softcap, sinks, gated      (each where it is used)
GatedActivation, Experts   x  the activation's name
Experts                    x  each weight's type, "routing " + its function, and "gains" where experts have some
AddGated, Softcap, SelectRows, DeltaNet   x  F32
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from backends.base import (
    AddGated,
    Attention,
    Capability,
    DeltaNet,
    EmbedRows,
    Experts,
    GatedActivation,
    KvPool,
    Linear,
    Norm,
    Op,
    RopeStore,
    Scale,
    SelectRows,
    Softcap,
    TensorView,
    Unsupported,
)

Need = tuple[str, str]


def needed(ops: Sequence[Op], weights: Mapping[str, TensorView], kv: KvPool) -> tuple[Need, ...]:
    """Every (op, type) that `ops` use, each once, in order of first use."""
    return tuple(dict.fromkeys(need for op in ops for need in _of(op, weights, kv)))


def refuse_missing(
    backend: str,
    table: Iterable[Capability],
    ops: Sequence[Op],
    weights: Mapping[str, TensorView],
    kv: KvPool,
) -> None:
    """Raises Unsupported with *every* need that `table` does not answer with yes. An absent entry is unknown."""
    known = {(entry.op, entry.type): entry for entry in table}
    found = [known.get(need, Capability(*need, ok=None)) for need in needed(ops, weights, kv)]
    missing = [entry for entry in found if entry.ok is not True]
    if missing:
        raise Unsupported(backend, missing)


def _of(op: Op, weights: Mapping[str, TensorView], kv: KvPool) -> Iterable[Need]:
    match op:
        case EmbedRows(table=table):
            yield "EmbedRows", weights[table.name].type.name
        case Norm(weight=weight) | Scale(weight=weight):
            yield type(op).__name__, weights[weight.name].type.name
        case Linear(parts=parts):
            for part in parts:
                yield "Linear", weights[part.weight.name].type.name
                if part.bias is not None:
                    yield "Bias", weights[part.bias.name].type.name
        case RopeStore():
            yield "RopeStore", kv.type.name
            if op.k is None:
                yield "RopeStore", "shared rows"
            for norm in (op.q_norm, op.k_norm):
                if norm is not None:
                    yield "HeadNorm", weights[norm.name].type.name
            if op.v_norm:
                yield "HeadNorm", "none"
        case Attention():
            yield "Attention", kv.type.name
            features = {"softcap": op.softcap > 0, "sinks": op.sinks is not None, "gated": op.gated}
            for feature, used in features.items():
                if used:
                    yield "Attention", feature
        case Experts(routing=routing, kind=kind):
            yield "Experts", kind
            yield "Experts", f"routing {routing.func}"
            if routing.gains is not None:
                yield "Experts", "gains"
            for matrix in (op.gate, op.up, op.down):
                yield "Experts", weights[matrix.weight.name].type.name
                if matrix.bias is not None:
                    yield "Bias", weights[matrix.bias.name].type.name
        case AddGated() | Softcap() | DeltaNet():
            yield type(op).__name__, "F32"
        case GatedActivation(kind=kind):
            yield "GatedActivation", kind
        case SelectRows():
            yield "SelectRows", "F32"
