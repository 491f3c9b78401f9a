"""Lanes whose states are held while rows of drafts are computed (`Batch.hold`): the account of who they are.

    run      rows of held lanes are kept at the places that the batch names     `note`
    accept   the first rows of what was kept become part of the state           `taken`

How rows are kept, and how they become part of a state, is each backend's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from backends.base import DraftStep, Limits, Op

Ints = npt.NDArray[np.int32]


def held_limit(ops: Sequence[Op], limits: Limits) -> int:
    """Rows that a program may have to keep: one without a step of drafting has nothing to hold, whatever limits are
    those of several layouts."""
    return limits.held_rows if any(isinstance(op, DraftStep) for op in ops) else 0


@dataclass(frozen=True)
class HeldLane:
    """Of the last run: the slot of a lane, where its rows are kept, how many (of those that count, once that is known),
    and the position of the first."""

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
        starts = [0, *(np.flatnonzero(lanes[1:] != lanes[:-1]) + 1).tolist()]
        for first, end in zip(starts, [*starts[1:], len(lanes)], strict=True):
            lane = int(lanes[first])
            place, before = int(hold[lane]), self._lanes.get(lane)
            if place >= 0 and before is not None:  # where no layer has states its rows need not be one run
                self._lanes[lane] = replace(before, rows=before.rows + end - first)
            elif place >= 0:
                slot = int(states[lane]) if len(states) else 0
                self._lanes[lane] = HeldLane(slot, place, end - first, int(positions[first]))

    def taken(self, kept: Sequence[tuple[int, int]]) -> list[HeldLane]:
        """What becomes of (lane, rows): those with any, of which so many `rows` count. Raises ValueError, with nothing
        taken, for a lane that is not held, or has not so many rows."""
        seen: set[int] = set()
        for lane, rows in kept:
            if lane in seen or lane not in self._lanes:
                raise ValueError(f"the states of lane {lane} are not held")
            if not 0 <= rows <= self._lanes[lane].rows:
                raise ValueError(f"lane {lane} has {self._lanes[lane].rows} rows, {rows} cannot count")
            seen.add(lane)
        found = [(self._lanes.pop(lane), rows) for lane, rows in kept]
        return [HeldLane(held.slot, held.place, rows, held.position) for held, rows in found if rows]
