"""What an op list needs, in the words of a capability table: pairs of an op's name and a type.

EmbedRows, Linear          x  the weight's type
Norm, Bias                 x  the weight's type          (Bias is that of a Linear)
RopeStore, Attention       x  the KV pool's type
GatedActivation            x  the activation's name
SelectRows                 x  F32
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from backends.base import (
    Attention,
    Capability,
    EmbedRows,
    GatedActivation,
    KvPool,
    Linear,
    Norm,
    Op,
    RopeStore,
    SelectRows,
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
        case Norm(weight=weight):
            yield "Norm", weights[weight.name].type.name
        case Linear(parts=parts):
            for part in parts:
                yield "Linear", weights[part.weight.name].type.name
                if part.bias is not None:
                    yield "Bias", weights[part.bias.name].type.name
        case RopeStore():
            yield "RopeStore", kv.type.name
        case Attention():
            yield "Attention", kv.type.name
        case GatedActivation(kind=kind):
            yield "GatedActivation", kind
        case SelectRows():
            yield "SelectRows", "F32"
