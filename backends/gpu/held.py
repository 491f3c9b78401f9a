"""Lanes whose states are held while rows of drafts are computed, on a card: what is kept of their rows, and what makes
those that count part of the states. Who they are: `backends.held`.

    run      op after op keeps rows of held lanes at their places of the layer's two arrays          (steps.recurrent)
    accept   (slot, place, rows, position) of each lane is uploaded, one launch a layer takes them all
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from backends.base import DeltaNet, JoinHidden, Op
from backends.gpu.launch import Launch
from backends.gpu.ops import delta
from backends.gpu.states import FLOAT_BYTES
from backends.gpu.steps import recurrent
from backends.gpu.steps.base import Places
from backends.held import HeldLane
from backends.held import HeldLanes as HeldLanes
from backends.held import held_limit as held_limit

LINE = "drafts"


def kept_bytes(ops: Sequence[Op], rows: int) -> dict[int, tuple[int, int]]:
    """By state layer the bytes of the two arrays of `Places.kept` for `rows` held rows; without any there are none."""
    if not rows:
        return {}
    found = {}
    for op in _keeping(ops):
        first, second = recurrent.kept(op)
        found[op.layer] = rows * first * FLOAT_BYTES, rows * second * FLOAT_BYTES
    return found


def accepts_of(lanes: Sequence[HeldLane]) -> delta.Ints:
    """What lies at `Places.batch("accepts")`: int32 [lanes, 4]."""
    return delta.accepts_of([(lane.slot, lane.place, lane.rows, lane.position) for lane in lanes])


def accepts(ops: Sequence[Op], places: Places, count: int) -> tuple[Launch, ...]:
    """Launches after which the states of `count` lanes are what their rows leave."""
    return tuple(launch for op in _keeping(ops) for launch in recurrent.accepts(op, places, count))


def _keeping(ops: Sequence[Op]) -> Iterator[DeltaNet | JoinHidden]:
    """Ops that write states."""
    for op in ops:
        if isinstance(op, DeltaNet) or (isinstance(op, JoinHidden) and not op.chained):
            yield op
