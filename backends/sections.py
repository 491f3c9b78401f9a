"""An op list in its sections: the steps of a plan, behind the mark `DraftStep` those of one step of drafting, and
behind the mark `HiddenStep` what makes the rows of embeddings.

    ops      … │ SelectRows │ … │ DraftStep │ …                  │ HiddenStep │ …
    scope    0 │          1 │   │ 0         │                    │ 0          │
    rows     limits.rows, then limits.logit_rows     limits.lanes              limits.rows

Scope 0 has all rows of the batch, 1 those whose logits are wanted; a step of drafting has one row of each lane. A
section is recorded and run by itself, and one without ops is none. All use the same weights, pools and buffers; the
last one reads what the plan's own section left of all rows, so nothing may run in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

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
    HiddenStep,
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


MARKS = (DraftStep, HiddenStep)


class HiddenRows(NamedTuple):
    """Where the rows of embeddings are, and the section that makes them; None: those of a plan do."""

    buffer: Buffer
    section: int | None


def sections_of(ops: Sequence[Op]) -> list[range]:
    """Which ops are those of a plan; behind it which are those of a step of drafting, and which make the rows of
    embeddings, where there are any. Raises ValueError where a section is empty, or has an op that belongs into
    another."""
    marks = [at for at, op in enumerate(ops) if isinstance(op, MARKS)]
    _check_marks([ops[at] for at in marks])
    ends = [*marks, len(ops)]
    starts = [0, *(at + 1 for at in marks)]
    found = [range(start, end) for start, end in zip(starts, ends, strict=True)]
    if marks and not found[-1] and isinstance(ops[marks[-1]], HiddenStep):
        found.pop()
    if not all(found):
        raise ValueError("a program, and a step of drafting, needs at least one op")
    drafting, hidden = draft_section(ops), hidden_rows(ops)
    for number, section in enumerate(found):
        for op in (ops[at] for at in section):
            if isinstance(op, JoinHidden) and op.chained != (number == drafting):
                raise ValueError("JoinHidden is chained behind the mark of a step of drafting, and nowhere else")
            if hidden is not None and number == hidden.section:
                if not isinstance(op, Norm):
                    raise ValueError(f"{type(op).__name__} cannot follow HiddenStep: only a Norm can")
            elif number and isinstance(op, DeltaNet | SelectRows):
                raise ValueError(f"{type(op).__name__} cannot be part of a step of drafting")
    return found


def _check_marks(marks: Sequence[Op]) -> None:
    drafts = sum(isinstance(mark, DraftStep) for mark in marks)
    if drafts > 1:
        raise ValueError(f"{drafts} marks of a step of drafting: there is one at most")
    if any(isinstance(mark, HiddenStep) for mark in marks[:-1]):
        raise ValueError("HiddenStep is the last mark of a list")


def draft_section(ops: Sequence[Op]) -> int | None:
    """The number of the section that is a step of drafting."""
    return 1 if any(isinstance(op, DraftStep) for op in ops) else None


def hidden_rows(ops: Sequence[Op]) -> HiddenRows | None:
    """None on a rank that has no such rows."""
    mark = next((op for op in ops if isinstance(op, HiddenStep)), None)
    if mark is None:
        return None
    behind = 1 if draft_section(ops) is None else 2
    return HiddenRows(mark.rows, None if ops[-1] is mark else behind)


def scopes_of(ops: Sequence[Op]) -> Iterator[int]:
    """Of each op. Raises ValueError where one works on rows that are gone."""
    scope = 0
    for op in ops:
        if isinstance(op, MARKS):
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
        drafting = isinstance(op, DraftStep) or (drafting and not isinstance(op, HiddenStep))
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
        case GatherRows() | ReceiveRows() | DraftStep() | HiddenStep():
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
        case HiddenStep(rows=rows):
            yield rows, 0
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
