"""Lanes whose states are held while rows of drafts are computed (`Batch.hold`): the store of their rows, and the
account of who they are.

    run      each recurrent op keeps what its rows do to a state, at the places that the batch names (native/accept.cpp)
    accept   the first rows of what was kept become part of the state

A row takes, for each `DeltaNet`, its results of the first stage and `mixed`; for each `JoinHidden` its columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.base import DeltaNet, DraftStep, JoinHidden, Limits, Op
from backends.cpu import abi, delta
from backends.cpu.memory import Arena
from backends.cpu.widths import FLOAT_BYTES, LANES, padded

LINE = "drafts"
Ints = npt.NDArray[np.int32]


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


def held_limit(ops: Sequence[Op], limits: Limits) -> int:
    """Rows that a program may have to keep: one without a step of drafting has nothing to hold, whatever limits are
    those of several layouts."""
    return limits.held_rows if any(isinstance(op, DraftStep) for op in ops) else 0


@dataclass(frozen=True)
class HeldLane:
    """Of the last run: the slot of a lane, where its rows are kept, how many, and the position of the first."""

    slot: int
    place: int
    rows: int
    position: int


class HeldLanes:
    """Lanes that were held in the last run, and have not been accepted."""

    def __init__(self) -> None:
        self._lanes: dict[int, HeldLane] = {}

    def forget(self) -> None:
        self._lanes = {}

    def note(self, hold: Ints, states: Ints, lanes: Ints, positions: Ints) -> None:
        """Of a run that has ended."""
        for lane in np.flatnonzero(hold >= 0).tolist():
            rows = np.flatnonzero(lanes == lane)
            if len(rows):
                slot = int(states[lane]) if len(states) else 0
                self._lanes[lane] = HeldLane(slot, int(hold[lane]), len(rows), int(positions[rows[0]]))

    def taken(self, kept: Sequence[tuple[int, int]]) -> list[abi.Kept]:
        """What becomes of (lane, rows). Raises ValueError, with nothing taken, for a lane that is not held, or has not
        so many rows."""
        seen: set[int] = set()
        for lane, rows in kept:
            if lane in seen or lane not in self._lanes:
                raise ValueError(f"the states of lane {lane} are not held")
            if not 0 <= rows <= self._lanes[lane].rows:
                raise ValueError(f"lane {lane} has {self._lanes[lane].rows} rows, {rows} cannot count")
            seen.add(lane)
        found = [(self._lanes.pop(lane), rows) for lane, rows in kept]
        return [abi.Kept(held.slot, held.place, rows, held.position) for held, rows in found if rows]
