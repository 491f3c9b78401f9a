"""What an op list needs, in the words of a capability table: pairs of an op's name and a type.

EmbedRows, Linear          x  the weight's type
Norm, Bias, Scale          x  the weight's type          (Bias is that of a Linear)
RopeStore, Attention       x  the KV pool's type
RopeStore                  x  shared rows                (a layer that reads what another one stored)
HeadNorm                   x  the weight's type          (RopeStore's norms over a head; "none" for one without weights)
Attention                  x  softcap, sinks, gated      (each where it is used)
GatedActivation, Experts   x  the activation's name
Experts                    x  each weight's type, "routing " + its function, and "gains" where experts have some
AddGated, Softcap, SelectRows, DeltaNet, JoinHidden   x  F32
Zero, SumRows, GatherRows, MergeAttention, SendRows, ReceiveRows   x  F32
EmbedRows x first, Attention x partial, Experts x held   (where a rank has a part of what the op is about)
MergeAttention             x  sinks, gated               (each where it is used)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from backends.base import (
    EXCHANGES,
    AddGated,
    Attention,
    Capability,
    Collective,
    DeltaNet,
    EmbedRows,
    Experts,
    GatedActivation,
    GatherRows,
    JoinHidden,
    KvPool,
    Linear,
    MergeAttention,
    Norm,
    Op,
    ReceiveRows,
    RopeStore,
    Scale,
    SelectRows,
    SendRows,
    Softcap,
    SumRows,
    TensorView,
    Unsupported,
    Zero,
)

Need = tuple[str, str]

SHARES: tuple[Need, ...] = (
    *((op, "F32") for op in ("Zero", "SumRows", "GatherRows", "MergeAttention", "SendRows", "ReceiveRows")),
    ("EmbedRows", "first"),
    ("Attention", "partial"),
    ("Experts", "held"),
    ("MergeAttention", "sinks"),
    ("MergeAttention", "gated"),
)
"""Every need of a rank that runs a part of a model."""


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


def check_exchanges(ops: Sequence[Op], collective: Collective | None) -> None:
    """Raises ValueError, naming the op, for an exchange that `collective` cannot make or whose widths do not fit
    together, and for a partial attention that does what waits for the merge."""
    for op in ops:
        if isinstance(op, Attention) and op.partial:
            whole = op.heads * (op.head_dim + 1)
            if op.sinks is not None or op.gated or op.out.width != whole:
                raise ValueError(
                    f"partial attention of layer {op.layer}: sinks and gates wait, and out is {whole} wide"
                )
        elif isinstance(op, EXCHANGES):
            if collective is None:
                raise ValueError(f"{op.label}: {type(op).__name__} without a collective")
            problem = _misfit(op, collective.rank, collective.ranks)
            if problem:
                raise ValueError(f"{op.label}: {type(op).__name__} on rank {collective.rank}: {problem}")


def _misfit(op: Op, rank: int, ranks: int) -> str:
    """What is wrong with an exchange on rank `rank` of `ranks`; empty: nothing."""
    match op:
        case GatherRows(parts=parts, target=target):
            for part in parts:
                widths = part.widths
                if len(widths) != ranks or part.src.width != widths[rank] or part.out.width != sum(widths):
                    return f"{part.src} into {part.out} does not go with widths {widths} of {ranks} ranks"
            return "" if target is None or 0 <= target < ranks else f"target {target} of {ranks} ranks"
        case MergeAttention():
            fits = 0 <= op.first <= op.first + op.own <= op.heads
            sides = (op.src.width, op.heads * (op.head_dim + 1)), (op.out.width, op.own * op.head_dim)
            wrong = not fits or any(width != wanted for width, wanted in sides)
            return f"heads {op.first} to {op.first + op.own} of {op.heads}, {op.src} into {op.out}" if wrong else ""
        case SendRows(target=peer) | ReceiveRows(source=peer):
            return "" if 0 <= peer < ranks and peer != rank else f"with rank {peer} of {ranks}"
        case _:
            return ""


def _of(op: Op, weights: Mapping[str, TensorView], kv: KvPool) -> Iterable[Need]:
    match op:
        case EmbedRows(table=table, first=first):
            yield "EmbedRows", weights[table.name].type.name
            if first is not None:
                yield "EmbedRows", "first"
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
            used = {
                "softcap": op.softcap > 0,
                "sinks": op.sinks is not None,
                "gated": op.gated,
                "partial": op.partial,
            }
            yield from (("Attention", feature) for feature in used if used[feature])
        case Experts(routing=routing, kind=kind):
            yield "Experts", kind
            yield "Experts", f"routing {routing.func}"
            if routing.gains is not None:
                yield "Experts", "gains"
            if op.held is not None:
                yield "Experts", "held"
            for matrix in (op.gate, op.up, op.down):
                yield "Experts", weights[matrix.weight.name].type.name
                if matrix.bias is not None:
                    yield "Bias", weights[matrix.bias.name].type.name
        case AddGated() | Softcap() | DeltaNet() | JoinHidden():
            yield type(op).__name__, "F32"
        case GatedActivation(kind=kind):
            yield "GatedActivation", kind
        case SelectRows() | Zero() | SumRows() | GatherRows() | SendRows() | ReceiveRows():
            yield type(op).__name__, "F32"
        case MergeAttention(sinks=sinks, gate=gate):
            yield "MergeAttention", "F32"
            if sinks is not None:
                yield "MergeAttention", "sinks"
            if gate is not None:
                yield "MergeAttention", "gated"
