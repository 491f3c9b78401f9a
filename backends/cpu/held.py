"""Lanes whose states are held while rows of drafts are computed (`Batch.hold`): the store of their rows.

    run      each recurrent op keeps what its rows do to a state, at the places that the batch names (native/accept.cpp)
    accept   the first rows of what was kept become part of the state

Who they are: `backends.held`. A row takes, for each `DeltaNet`, its results of the first stage and `mixed`; for each
`JoinHidden` its columns.
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.base import DeltaNet, JoinHidden, Op
from backends.cpu import abi, delta
from backends.cpu.memory import Arena
from backends.cpu.widths import FLOAT_BYTES, LANES, padded
from backends.held import HeldLane

LINE = "drafts"


def kept_floats(op: Op) -> int:
    """Floats that are kept of one row."""
    match op:
        case DeltaNet():
            return delta.convolved_floats(op) + padded(delta.channels_of(op))
        case JoinHidden(chained=False):
            return padded(op.end - op.first)
        case _:
            return 0


class HeldStore:
    """Where the rows of each state layer are kept, and each thread's copy of two blocks of a matrix."""

    def __init__(self, ops: Sequence[Op], rows: int, threads: int) -> None:
        self.arena = Arena()
        self.rows = rows
        widest = max((op.key_dim for op in ops if isinstance(op, DeltaNet)), default=0)
        self._copy_floats = 2 * LANES * widest
        self._at: dict[int, tuple[int, int]] = {}
        self._copies = 0
        if not rows:
            return
        for op in ops:
            if isinstance(op, DeltaNet | JoinHidden) and kept_floats(op):
                first = rows * FLOAT_BYTES * (delta.convolved_floats(op) if isinstance(op, DeltaNet) else 0)
                rest = rows * FLOAT_BYTES * kept_floats(op) - first
                self._at[op.layer] = self.arena.reserve(first), self.arena.reserve(rest)
        self._copies = self.arena.reserve(threads * self._copy_floats * FLOAT_BYTES)

    def of_delta(self, op: DeltaNet) -> dict[str, int]:
        """Fields of `hs_delta`; none where nothing is ever held."""
        if not self.rows:
            return {}
        convolved, mixed = self._at[op.layer]
        return {
            "kept": self.arena.address(convolved),
            "kept_mixed": self.arena.address(mixed),
            "mixed_stride": padded(delta.channels_of(op)),
            "copies": self.arena.address(self._copies),
            "copy_floats": self._copy_floats,
        }

    def of_join(self, op: JoinHidden) -> dict[str, int]:
        """Fields of `hs_join`."""
        if not self.rows or op.chained:
            return {}
        return {"kept": self.arena.address(self._at[op.layer][1]), "kept_stride": padded(op.end - op.first)}


def kept_record(lane: HeldLane) -> abi.Kept:
    """`hs_kept` of a lane whose first `rows` rows count."""
    return abi.Kept(lane.slot, lane.place, lane.rows, lane.position)
