"""Exchanges between ranks: what a transport is asked for, and what runs behind it.

An exchange ends a segment of launches (backends.gpu.recorder). The transport has rows on the card as a program has
them (backends.gpu.transport.base), so most exchanges are one call; attention is merged by a kernel afterwards, from all
that was gathered:

    SumRows        sum                  GatherRows     gather, of all its parts at once
    SendRows       send                 ReceiveRows    receive
    MergeAttention gather into scratch [rows][ranks][heads * dims + heads] ─ merge_attention
"""

from __future__ import annotations

from backends.base import Buffer, GatherRows, MergeAttention, Op, ReceiveRows, SendRows, Stamp, SumRows
from backends.gpu.launch import Launch
from backends.gpu.ops import attention as ops
from backends.gpu.ops.buffers import NONE, Planes, Rows
from backends.gpu.steps.base import BatchShape, Context, Places
from backends.gpu.transport.base import Act, Part, Transport

Exchange = SumRows | GatherRows | MergeAttention | SendRows | ReceiveRows
GATHERED = "gathered"


def scratch(op: Op, context: Context) -> dict[str, int]:
    if not isinstance(op, MergeAttention):
        return {}
    return {GATHERED: 4 * context.rows * context.ranks * op.src.width}


def launches(op: Op, places: Places, shape: BatchShape, planes: Planes | None = None) -> tuple[Launch, ...]:
    """What runs behind the exchange."""
    if not isinstance(op, MergeAttention) or shape.empty:
        return ()
    out = places.rows(op.out)
    gate = places.rows(op.gate) if op.gate is not None else NONE
    own = ops.MergeShape(
        shape.rows, places.ranks, op.heads, op.head_dim, op.first, op.own, out.stride, gate_stride=gate.stride
    )
    return ops.merge_ranks(own, out.at, places.scratch(GATHERED), places.vector(op.sinks), gate.at)


def make(op: Exchange, places: Places, transport: Transport, stamp: Stamp) -> None:
    """Exchange rows. Raises what the transport raises."""
    match op:
        case SumRows(buffer=buffer):
            transport.sum(stamp, places.rows(buffer), buffer.width)
        case GatherRows(parts=parts, target=target):
            wanted = target in (None, transport.rank)
            transport.gather(
                stamp,
                [Part(_rows(places, p.src), _rows(places, p.out) if wanted else NONE, p.widths) for p in parts],
                target,
            )
        case MergeAttention(src=src):
            every = Rows(places.scratch(GATHERED), places.ranks * src.width)
            transport.gather(stamp, [Part(places.rows(src), every, (src.width,) * places.ranks)])
        case SendRows(buffers=buffers, target=target):
            transport.send(stamp, target, [Act(places.rows(buffer), buffer.width) for buffer in buffers])
        case ReceiveRows(buffers=buffers, source=source):
            transport.receive(stamp, source, [Act(places.rows(buffer), buffer.width) for buffer in buffers])


def _rows(places: Places, buffer: Buffer) -> Rows:
    """One of width 0 is nowhere."""
    return places.rows(buffer) if buffer.width else NONE
