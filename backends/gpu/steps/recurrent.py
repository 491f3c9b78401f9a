"""Recurrent layers as launches: delta nets and joined hidden rows, and what becomes of their states.

    DeltaNet     convolution, the delta rule row by row and by chunks, the gated norm      (ops.delta.delta_net)
    JoinHidden   in a plan: the row before, or the lane's slot; in a step of drafting: along the chain

What a batch has of each lane lies in the card's memory (`LaneRuns`); launches know how many lanes and chunks there are,
and whether a lane goes row by row. Of a held lane nothing is written to its slot: its rows are kept (`kept`), and those
that count become part of the state by `accepts`, one launch a layer for all held lanes.
"""

from __future__ import annotations

from backends.base import DeltaNet, JoinHidden
from backends.gpu.launch import Launch
from backends.gpu.ops import delta
from backends.gpu.ops.buffers import NONE, Planes, Rows
from backends.gpu.ops.quants import quantize_rows
from backends.gpu.states import FLOAT_BYTES, padded
from backends.gpu.steps.base import BatchShape, Context, Places

CONVOLVED, PREPARED = "convolved", "prepared"


def scratch(op: DeltaNet | JoinHidden, context: Context) -> dict[str, int]:
    """Raises ValueError for heads that no kernel takes."""
    if isinstance(op, JoinHidden):
        return {}
    shape = shape_of(op)
    return {
        CONVOLVED: context.rows * shape.convolved_floats * FLOAT_BYTES,
        PREPARED: delta.most_chunks(context.rows, context.limits.lanes) * shape.prepared_floats * FLOAT_BYTES,
    }


def launches(
    op: DeltaNet | JoinHidden, places: Places, shape: BatchShape, planes: Planes | None = None
) -> tuple[Launch, ...]:
    if shape.empty:
        return ()
    match op:
        case DeltaNet():
            return _delta_net(op, places, shape, planes)
        case JoinHidden():
            return _join(op, places, shape)


# ------------------------------------------------------------------------------------------------------------- states


def kept(op: DeltaNet | JoinHidden) -> tuple[int, int]:
    """Floats that are kept of a held row: of a delta net its results of the convolution, and its row of `mixed`; of
    JoinHidden the columns. A chained one keeps nothing."""
    match op:
        case DeltaNet():
            return shape_of(op).convolved_floats, shape_of(op).channels
        case JoinHidden(chained=True):
            return 0, 0
        case JoinHidden():
            return padded(op.end - op.first), 0


def accepts(op: DeltaNet | JoinHidden, places: Places, count: int) -> tuple[Launch, ...]:
    """Of `count` held lanes the rows that count; who they are lies at `accepts` (`ops.delta.accepts_of`)."""
    if not count:
        return ()
    at = places.batch("accepts")
    match op:
        case DeltaNet():
            return (delta.delta_accept(shape_of(op), _memory(op, places), at, count),)
        case JoinHidden(chained=True):
            return ()
        case JoinHidden():
            return delta.join_accept(_join_shape(op, 0), _kept_columns(op, places), _states(op, places), at, count)


def copies(places: Places, pairs: int, count: int) -> tuple[Launch, ...]:
    """Copies of `count` slots (source, target), in this order, of all layers; int32 [count, 2] at `pairs`. None where
    there are no recurrent layers."""
    if not count or not places.states.layers:
        return ()
    first, _, slot_bytes = places.state(0)
    return (delta.copy_states(first, slot_bytes, pairs, count),)


# ------------------------------------------------------------------------------------------------------------ launches


def shape_of(op: DeltaNet) -> delta.DeltaShape:
    return delta.DeltaShape(op.key_heads, op.value_heads, op.key_dim, op.value_dim, op.kernel, op.eps, tiled=op.tiled)


def _delta_net(op: DeltaNet, places: Places, shape: BatchShape, planes: Planes | None) -> tuple[Launch, ...]:
    mixed, z, beta, alpha, out = (places.rows(buffer) for buffer in (op.mixed, op.z, op.beta, op.alpha, op.out))
    within = planes if op.value_dim % 32 == 0 else None  # the norm quantises whole blocks of one head
    found = delta.delta_net(
        *(shape.rows, shape_of(op), _memory(op, places), _runs(places, shape)),
        *(mixed, z, beta, alpha, out),
        within,
    )
    if planes is None or within is not None:
        return found
    return (*found, quantize_rows(out, planes, shape.rows, op.out.width))


def _join(op: JoinHidden, places: Places, shape: BatchShape) -> tuple[Launch, ...]:
    left, right, out = (places.rows(buffer) for buffer in (op.left, op.right, op.out))
    own, states, runs = _join_shape(op, shape.rows), _states(op, places), _runs(places, shape)
    if op.chained:
        return delta.join_chained(own, left, right, out, states, runs, places.batch("chain"))
    return delta.join_hidden(own, left, right, out, states, runs, _kept_columns(op, places))


def _memory(op: DeltaNet, places: Places) -> delta.DeltaMemory:
    convolved, mixed = places.kept(op.layer)
    return delta.DeltaMemory(
        conv=places.vector(op.conv),
        dt_bias=places.vector(op.dt_bias),
        a=places.vector(op.a),
        norm=places.vector(op.norm),
        states=_states(op, places),
        convolved=places.scratch(CONVOLVED),
        prepared=places.scratch(PREPARED),
        kept=convolved,
        kept_mixed=mixed,
    )


def _join_shape(op: JoinHidden, rows: int) -> delta.JoinShape:
    return delta.JoinShape(rows, op.first, op.end)


def _kept_columns(op: JoinHidden, places: Places) -> Rows:
    at, _ = places.kept(op.layer)
    return Rows(at, kept(op)[0]) if at else NONE


def _states(op: DeltaNet | JoinHidden, places: Places) -> delta.StatesAt:
    window, _, slot_bytes = places.state(op.layer)
    return delta.StatesAt(window, slot_bytes // FLOAT_BYTES)


def _runs(places: Places, shape: BatchShape) -> delta.RunsAt:
    runs, lanes, chunks = (places.batch(name) for name in ("runs", "lanes", "chunks"))
    return delta.RunsAt(runs, lanes, chunks, shape.lanes, shape.chunks, shape.single)
