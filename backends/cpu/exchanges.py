"""Ops that exchange rows with other ranks, as native steps.

    SumRows · GatherRows · MergeAttention    mailboxes, all ranks
    SendRows · ReceiveRows                   a channel, two ranks

A step points to an `hs_act`: the collective's mailboxes or channel, the record of the label (bounds, stamp, counts) and
the matrices. The native walk fills in epoch, plan and rows, and makes the exchange between two stages.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_int32

from backends.base import (
    EXCHANGES,
    Buffer,
    GatherRows,
    MergeAttention,
    Op,
    ReceiveRows,
    SendRows,
    SumRows,
    Weight,
)
from backends.cpu import abi
from backends.host.collective import HostCollective

Exchange = SumRows | GatherRows | MergeAttention | SendRows | ReceiveRows
Place = Callable[[Buffer], tuple[int, int]]
"""Address of a buffer, and floats from row to row."""


def check(ops: Sequence[Op], collective: HostCollective | None) -> None:
    """Raise ValueError where ops exchange rows and there is nobody to exchange them with, or widths do not fit."""
    for op in ops:
        if not isinstance(op, EXCHANGES):
            continue
        if collective is None:
            raise ValueError(f"{type(op).__name__} {op.label} without a collective")
        if isinstance(op, GatherRows):
            for part in op.parts:
                wanted = (part.widths[collective.rank], sum(part.widths))
                if len(part.widths) != collective.ranks or (part.src.width, part.out.width) != wanted:
                    raise ValueError(
                        f"{op.label}: {part.src.width} of {part.out.width} columns on rank {collective.rank} do not go"
                        f" with the widths {part.widths}"
                    )
        if isinstance(op, MergeAttention):
            widths = (op.src.width, op.out.width)
            if widths != (op.heads * (op.head_dim + 1), op.own * op.head_dim) or op.first + op.own > op.heads:
                raise ValueError(f"{op.label}: buffers of {widths} for {op.own} of {op.heads} heads of {op.head_dim}")


def record(op: Exchange, collective: HostCollective, place: Place, vector: Callable[[Weight], int]) -> Recorded:
    """(kind of step, its fields, the record that it points to)."""
    match op:
        case SumRows(buffer=buffer):
            src, stride = place(buffer)
            fields = {"width": buffer.width, "src": src, "src_stride": stride}
            return abi.STEP_SUM, fields, collective.act(op.label)
        case GatherRows(target=target):
            wanted = target in (None, collective.rank)
            parts = [_gathered(part.src, part.out if wanted else None, part.widths, place) for part in op.parts]
            act = collective.act(op.label, parts, target=-1 if target is None else target)
            return abi.STEP_GATHER, {}, act
        case MergeAttention():
            return abi.STEP_MERGE, _merge(op, place, vector), collective.act(op.label)
        case SendRows(buffers=buffers, target=to):
            parts = [_part(place, src=buffer) for buffer in buffers]
            return abi.STEP_SEND, {}, collective.act(op.label, parts, to=to)
        case ReceiveRows(buffers=buffers, source=source):
            parts = [_part(place, out=buffer) for buffer in buffers]
            return abi.STEP_RECEIVE, {}, collective.act(op.label, parts, source=source)


Recorded = tuple[int, dict[str, int], abi.Act]


def _merge(op: MergeAttention, place: Place, vector: Callable[[Weight], int]) -> dict[str, int]:
    src, src_stride = place(op.src)
    dst, dst_stride = place(op.out)
    fields = {"src": src, "src_stride": src_stride, "dst": dst, "dst_stride": dst_stride}
    fields |= {"heads": op.heads, "head_dim": op.head_dim, "first": op.first, "kv_heads": op.own}
    if op.sinks is not None:
        fields["weight"] = vector(op.sinks)
    if op.gate is not None:
        fields["add"], fields["add_stride"] = place(op.gate)
    return fields


def _gathered(src: Buffer, out: Buffer | None, widths: tuple[int, ...], place: Place) -> abi.ActPart:
    part = _part(place, src=src, out=out)
    part.widths = (c_int32 * len(widths))(*widths)
    return part


def _part(place: Place, src: Buffer | None = None, out: Buffer | None = None) -> abi.ActPart:
    part = abi.ActPart(width=(src or out or Buffer("", 0)).width)
    if src is not None:
        part.src, part.src_stride = place(src)
    if out is not None:
        part.out, part.out_stride = place(out)
    return part


def pointer_to(act: abi.Act) -> int:
    return ctypes.addressof(act)
