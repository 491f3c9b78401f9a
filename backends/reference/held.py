"""States that are held while rows of drafts are computed, and the hidden states that a drafting layer joins.

A lane whose states are held runs on copies of them, made anew for each op and thrown away. What each op was given for
the lane's rows is kept; `accept` runs the first of these rows again, on the states themselves. So they hold what plain
decoding would have left, bit for bit, and nothing is ever taken back:

    run      state ──copy──▶ rows 0..k          kept: the op's inputs of rows 0..k
    accept   state ──rows 0..a of what was kept──▶ state

Rows are kept in arrays of their own; buffers come and go with each run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from backends.base import Batch, DeltaNet, JoinHidden, Op
from backends.reference.compute import Array
from backends.reference.delta import DeltaWeights, States, run_delta_rows

Replay = Callable[[int], None]
"""Runs the first so many of a lane's kept rows on its state."""


@dataclass
class Held:
    """Of one run: the rows of each lane whose states are held, and what it takes to run them again."""

    rows: dict[int, int] = field(default_factory=dict)
    replays: dict[int, list[Replay]] = field(default_factory=dict)

    def keep(self, lane: int, replay: Replay) -> None:
        self.replays.setdefault(lane, []).append(replay)

    def accept(self, kept: Sequence[tuple[int, int]]) -> None:
        """Raises ValueError, before anything is written."""
        seen: set[int] = set()
        for lane, rows in kept:
            if lane in seen or lane not in self.rows:
                raise ValueError(f"the states of lane {lane} are not held")
            if not 0 <= rows <= self.rows[lane]:
                raise ValueError(f"lane {lane} has {self.rows[lane]} rows, {rows} cannot count")
            seen.add(lane)
        for lane, rows in kept:
            del self.rows[lane]
            replays = self.replays.pop(lane, [])
            for replay in replays if rows else ():
                replay(rows)


def is_held(batch: Batch, lane: int) -> bool:
    return bool(len(batch.hold)) and bool(batch.hold[lane] >= 0)


def lane_rows(batch: Batch) -> Iterable[tuple[int, slice]]:
    """Each lane that has rows, and which."""
    lanes, first = batch.lanes, 0
    for end in range(1, len(lanes) + 1):
        if end == len(lanes) or lanes[end] != lanes[first]:
            yield int(lanes[first]), slice(first, end)
            first = end


def held_rows(batch: Batch) -> dict[int, int]:
    """How many rows each lane has whose states are held."""
    return {lane: rows.stop - rows.start for lane, rows in lane_rows(batch) if is_held(batch, lane)}


def kept_elements(ops: Iterable[Op]) -> int:
    """Numbers that are kept for one row."""
    total = 0
    for op in ops:
        match op:
            case DeltaNet():
                total += op.mixed.width + op.z.width + op.beta.width + op.alpha.width
            case JoinHidden(chained=False):
                total += op.end - op.first
    return total


def run_delta_net(
    op: DeltaNet,
    weights: DeltaWeights,
    states: States,
    batch: Batch,
    buffers: Mapping[str, Array],
    held: Held,
) -> Array:
    """All rows of a batch, each from the state that the row before it left. Gives [rows, value_heads * value_dim]."""
    given = [buffers[buffer.name] for buffer in (op.mixed, op.z, op.beta, op.alpha)]
    out = np.empty_like(given[1])
    for lane, rows in lane_rows(batch):
        conv, matrix = (own[op.layer][batch.states[lane]] for own in (states.conv, states.matrix))
        own, positions = [each[rows] for each in given], batch.positions[rows]
        if is_held(batch, lane):
            held.keep(lane, _delta_replay(op, weights, (conv, matrix), positions.copy(), [each.copy() for each in own]))
            conv, matrix = conv.copy(), matrix.copy()
        out[rows] = run_delta_rows(op, weights, conv, matrix, positions, *own)
    return out


def _delta_replay(
    op: DeltaNet,
    weights: DeltaWeights,
    state: tuple[Array, Array],
    positions: np.ndarray[tuple[int], np.dtype[np.int32]],
    given: Sequence[Array],
) -> Replay:
    def replay(rows: int) -> None:
        mixed, z, beta, alpha = (each[:rows] for each in given)
        run_delta_rows(op, weights, *state, positions[:rows], mixed, z, beta, alpha)

    return replay


def join_hidden(op: JoinHidden, states: States, batch: Batch, buffers: Mapping[str, Array], held: Held) -> Array:
    """[left | right of the row before], columns first .. end of each; gives [rows, 2 * (end - first)]."""
    left, right = (buffers[buffer.name][:, op.first : op.end] for buffer in (op.left, op.right))
    before = np.empty_like(right)
    for lane, rows in lane_rows(batch):
        state = states.conv[op.layer][batch.states[lane]]
        before[rows.start] = state[0] if batch.positions[rows.start] else 0
        before[rows.start + 1 : rows.stop] = right[rows.start : rows.stop - 1]
        if is_held(batch, lane):
            held.keep(lane, _join_replay(state, right[rows].copy()))
        else:
            state[0] = right[rows.stop - 1]
    return np.concatenate([left, before], axis=1)


def _join_replay(state: Array, right: Array) -> Replay:
    def replay(rows: int) -> None:
        state[0] = right[rows - 1]

    return replay


def join_chained(op: JoinHidden, states: States, batch: Batch, left: Array, step_before: Mapping[str, Array]) -> Array:
    """The same in a step of drafting, on what the step before left in the buffers `step_before`."""
    before = np.empty((len(batch.tokens), op.end - op.first), left.dtype)
    for row, (chain, lane) in enumerate(zip(batch.chain, batch.lanes, strict=True)):
        if chain >= 0:
            before[row] = step_before[op.right.name][chain, op.first : op.end]
        else:
            before[row] = states.conv[op.layer][batch.states[lane]][0] if batch.positions[row] else 0
    return np.concatenate([left[:, op.first : op.end], before], axis=1)
