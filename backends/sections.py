"""An op list in its sections: the steps of a plan, and behind the mark `DraftStep` those of one step of drafting.

    ops      … │ SelectRows │ … │ DraftStep │ …
    scope    0 │          1 │   │ 0         │ …      0: all rows of the batch, 1: those whose logits are wanted
    rows     limits.rows, then limits.logit_rows     limits.lanes: a step of drafting has one row of each lane

A section is recorded and run by itself. Both use the same weights, pools and buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from backends.base import (
    AddGated,
    Attention,
    Buffer,
    DeltaNet,
    DraftStep,
    EmbedRows,
    Experts,
    GatedActivation,
    GatherRows,
    JoinHidden,
    Limits,
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
    Zero,
)

ALL_ROWS = (EmbedRows, RopeStore, Attention, DeltaNet, JoinHidden)
"""Ops that know the rows of a batch by its positions, lanes or tokens."""


def sections_of(ops: Sequence[Op]) -> list[range]:
    """Which ops are those of a plan, and which those of a step of drafting, where there are any. Raises ValueError
    where a section is empty, or has an op that belongs into the other."""
    marks = [at for at, op in enumerate(ops) if isinstance(op, DraftStep)]
    ends = [*marks, len(ops)]
    starts = [0, *(at + 1 for at in marks)]
    found = [range(start, end) for start, end in zip(starts, ends, strict=True)]
    if not all(found):
        raise ValueError("a program, and a step of drafting, needs at least one op")
    if len(found) > 2:
        raise ValueError(f"{len(marks)} marks of a step of drafting: there is one at most")
    for number, section in enumerate(found):
        for op in (ops[at] for at in section):
            if isinstance(op, JoinHidden) and op.chained != bool(number):
                raise ValueError("JoinHidden is chained behind the mark of a step of drafting, and nowhere else")
            if number and isinstance(op, DeltaNet | SelectRows):
                raise ValueError(f"{type(op).__name__} cannot be part of a step of drafting")
    return found


def scopes_of(ops: Sequence[Op]) -> Iterator[int]:
    """Of each op. Raises ValueError where one works on rows that are gone."""
    scope = 0
    for op in ops:
        if isinstance(op, DraftStep):
            scope = 0
        elif isinstance(op, SelectRows):
            if scope:
                raise ValueError("a program selects its logit rows once")
            scope = 1
        elif scope and isinstance(op, ALL_ROWS):
            raise ValueError(f"{type(op).__name__} works on all rows and cannot follow SelectRows")
        yield scope


def rows_of(ops: Sequence[Op], limits: Limits) -> tuple[tuple[int, int], ...]:
    """For each op the most rows by scope: of all, and of those whose logits are wanted."""
    drafting, found = False, []
    for op in ops:
        drafting = drafting or isinstance(op, DraftStep)
        found.append((limits.lanes, limits.lanes) if drafting else (limits.rows, limits.logit_rows))
    return tuple(found)


def left_by(op: Op, rank: int | None) -> Buffer | int:
    """What rank `rank` has of a section that ends with `op`: the buffer that this writes, or how wide the rows are that
    another rank gets instead. Raises ValueError for an op that leaves no rows."""
    match op:
        case SendRows():
            return 0
        case GatherRows(parts=(part,), target=target):
            return part.out if target in (None, rank) else part.out.width
        case SumRows(buffer=buffer):
            return buffer
        case Linear(parts=parts):
            return parts[-1].out
        case RopeStore(q=q):
            return q
        case Softcap(src=src) | Scale(src=src):
            return src
        case AddGated(into=into):
            return into
        case GatherRows() | ReceiveRows() | DraftStep():
            raise ValueError(f"a program cannot end with {type(op).__name__}")
        case _:
            return op.out


def buffers_of(op: Op, scope: int, rank: int | None) -> Iterator[tuple[Buffer, int]]:
    """Every buffer of an op that rank `rank` uses, with the scope of its rows."""
    match op:
        case EmbedRows(out=out):
            yield out, scope
        case Norm(src=src, out=out, add=add):
            yield from ((buffer, scope) for buffer in (src, out, add) if buffer is not None)
        case Linear(src=src, parts=parts):
            yield src, scope
            yield from ((part.out, scope) for part in parts)
        case RopeStore(q=q, k=k, v=v):
            yield from ((buffer, scope) for buffer in (q, k, v) if buffer is not None)
        case Attention(q=q, out=out):
            yield from ((buffer, scope) for buffer in (q, out))
        case GatedActivation(gate=gate, up=up, out=out):
            yield from ((buffer, scope) for buffer in (gate, up, out))
        case AddGated(src=src, into=into, gate=gate_or_none):
            yield from ((buffer, scope) for buffer in (src, into, gate_or_none) if buffer is not None)
        case Softcap(src=src) | Scale(src=src):
            yield src, scope
        case Experts(src=src, logits=logits, out=out):
            yield from ((buffer, scope) for buffer in (src, logits, out))
        case DeltaNet():
            yield from ((buffer, scope) for buffer in (op.mixed, op.z, op.beta, op.alpha, op.out))
        case JoinHidden(left=left, right=right, out=out):
            yield from ((buffer, scope) for buffer in (left, right, out))
        case SelectRows(src=src, out=out, add=add):
            yield from ((buffer, 0) for buffer in (src, add) if buffer is not None)
            yield out, 1
        case Zero(out=out):
            yield out, scope
        case _:
            yield from ((buffer, scope) for buffer in exchanged_buffers(op, rank))


def exchanged_buffers(op: Op, rank: int | None) -> Iterator[Buffer]:
    """Every buffer of an exchange that rank `rank` uses; of another op none."""
    match op:
        case SumRows(buffer=buffer):
            yield buffer
        case GatherRows(parts=parts, target=target):
            yield from (part.src for part in parts)
            yield from (part.out for part in parts if target in (None, rank))
        case MergeAttention(src=src, out=out, gate=gate):
            yield from (src, out)
            if gate is not None:
                yield gate
        case SendRows(buffers=buffers) | ReceiveRows(buffers=buffers):
            yield from buffers
