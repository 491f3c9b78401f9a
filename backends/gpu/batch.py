"""A `Batch` on its way to a card: checked, laid out in one pinned block, uploaded, and what of it decides the launches.

    head     tokens │ positions │ lanes │ logit_rows │ chain │ slots [groups] │ few │ many │ runs │ chunks
    tables   [groups][lanes][lane_pages]
    rest     accepts │ pairs                                  of `Program.accept` and `Program.copy_states`

All of it is int32, at fixed places, so that recorded launches find it. The head goes up with every batch, in one
upload. Tables hardly change from one step of decoding to the next, and are long: of those of lanes that have rows, up
to the page of the last position, what the card already has stays there, and lanes from the first to the last that
differs go up together. Pages that no row of the batch can read are not even looked at.

Attention takes rows in *tiles*, runs of rows of one lane in order of position. A lane with at most `few_rows_most` rows
is one tile of `few`; longer ones are cut into tiles of MANY_TILE_ROWS for `many`. A batch may have both.

Everything that indexes memory on the card is checked here, before anything is written: what a kernel does with a wrong
page nobody would tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from backends.base import PAGE_LEN, Batch, KvPool, Limits
from backends.gpu.device import Device, HostMemory
from backends.gpu.ops import delta
from backends.gpu.steps.base import BatchShape

Ints = npt.NDArray[np.int32]

STAGING_LINE = "staging"
"""Ledger line of the host memory that batches and logits pass through."""
INT_BYTES = 4
ALIGN = 64
"""Ints: every array begins on a multiple of 256 bytes."""
MANY_TILE_ROWS = 64
FEW_ROWS = 4
FEW_ROWS_MOST = 8
"""Rows of a lane that attention still takes as one tile of `few`: without and with rows of drafts."""
PAIRS = 256
"""Pairs of state slots that one launch copies."""
POSITIONS_MOST = 2**31 - 1


def few_rows_most(limits: Limits) -> int:
    """Rows of a lane that are few: those of drafts being verified, and short ends of prompts."""
    of_a_lane = -(-limits.held_rows // max(limits.lanes, 1))
    return min(max(of_a_lane, FEW_ROWS), FEW_ROWS_MOST)


def few_tiles_most(limits: Limits) -> int:
    """Tiles of `few` that a batch may have."""
    return max(limits.lanes, 1)


# ----------------------------------------------------------------------------------------------------------- the block


class BlockLayout:
    """Where each array lies in the block, in ints: `at`, `sizes`; `head` ints go up with every batch."""

    def __init__(self, limits: Limits, groups: int) -> None:
        rows, lanes = max(limits.rows, limits.lanes), limits.lanes
        self.groups, self.limits, self.rows = groups, limits, rows
        sizes = dict.fromkeys(("tokens", "positions", "lanes", "logit_rows", "chain"), rows)
        sizes["logit_rows"] = max(rows, limits.logit_rows)
        sizes |= {f"slots {group}": rows for group in range(groups)}
        sizes["few"] = 2 * few_tiles_most(limits)
        sizes["many"] = 2 * rows
        sizes["runs"] = delta.RUN_FIELDS * lanes
        sizes["chunks"] = 4 * delta.most_chunks(rows, lanes)
        head = len(sizes)
        sizes |= {f"tables {group}": lanes * limits.lane_pages for group in range(groups)}
        sizes["accepts"] = 4 * lanes
        sizes["pairs"] = 2 * PAIRS
        self.sizes = sizes
        self.at: dict[str, int] = {}
        end = 0
        for number, (name, size) in enumerate(sizes.items()):
            if number == head:
                self.head = end
            self.at[name] = end
            end += -(-max(size, 1) // ALIGN) * ALIGN
        self.nbytes = INT_BYTES * end


# ---------------------------------------------------------------------------------------------------------- the checks


@dataclass(frozen=True)
class Rules:
    """What batches of a section are checked against. `rows`, `logit_rows`: the most of them; `vocab_rows` 0: tokens are
    looked up nowhere, or in parts that give zeros for others; `kv_layers`, `state_slots` 0: it has none; `partial` of
    each group: pages may be -1."""

    limits: Limits
    kv: KvPool
    rows: int
    logit_rows: int
    vocab_rows: int
    state_slots: int
    held_rows: int
    partial: tuple[bool, ...]
    chained: bool


class Run(NamedTuple):
    """Rows first .. end - 1 of one lane, each a position behind the one before."""

    lane: int
    first: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.first


def checked(batch: Batch, rules: Rules, logit_rows: Ints, chain_rows: int | None = None) -> tuple[Run, ...]:
    """The runs of a batch's rows. Raises ValueError for one that exceeds the limits, or points outside vocabulary,
    tables, pools or store of held rows. `chain_rows`: of the step of drafting before; None: there is no chain."""
    rows = len(batch.tokens)
    _check_shapes(batch, rules, logit_rows)
    if rules.vocab_rows:
        _within("token", batch.tokens, rules.vocab_rows)
    _within("logit row", logit_rows, rows)
    capacity = batch.tables.shape[2] * PAGE_LEN if rules.kv.layers else POSITIONS_MOST
    _within("position", batch.positions, capacity)
    if rules.kv.layers or rules.state_slots:
        _within("lane", batch.lanes, batch.tables.shape[1])
    runs = runs_of(batch.lanes, batch.positions)
    if rules.state_slots:
        _check_states(batch, rules, runs)
        if len(batch.hold):
            _check_holds(batch, rules, runs)
    if rules.chained:
        if chain_rows is None or len(batch.chain) != rows:
            raise ValueError(f"a chain of {len(batch.chain)} rows for a step of drafting of {rows}")
        _within("chain", batch.chain, min(chain_rows, rules.rows), lowest=-1)
    if rules.kv.layers:
        for group in range(len(rules.kv.group_slots)):
            _check_group(batch, rules, runs, group)
    return runs


def runs_of(lanes: Ints, positions: Ints) -> tuple[Run, ...]:
    """Rows of one lane whose positions follow each other, in order."""
    if not len(lanes):
        return ()
    broken = (lanes[1:] != lanes[:-1]) | (positions[1:] != positions[:-1] + 1)
    starts = [0, *(np.flatnonzero(broken) + 1).tolist()]
    return tuple(map(Run, lanes[starts].tolist(), starts, [*starts[1:], len(lanes)]))


def read_of(runs: Sequence[Run], positions: Ints) -> tuple[slice, slice]:
    """(lanes, pages) of a group's table that rows of these runs can read: nothing behind it, much of it perhaps."""
    lanes = [run.lane for run in runs]
    return slice(min(lanes), max(lanes) + 1), slice(0, int(positions.max()) // PAGE_LEN + 1)


def _check_shapes(batch: Batch, rules: Rules, logit_rows: Ints) -> None:
    rows, limits = len(batch.tokens), rules.limits
    if not len(batch.positions) == len(batch.lanes) == rows:
        raise ValueError("tokens, positions and lanes must be of one length")
    groups = len(rules.kv.group_slots)
    slots, tables = batch.slots, batch.tables
    if slots.shape != (groups, rows) or tables.ndim != 3 or tables.shape[0] != groups:
        raise ValueError(f"slots and tables of {slots.shape} and {tables.shape} for {groups} KV groups, {rows} rows")
    if not 1 <= rows <= rules.rows:
        raise ValueError(f"a batch of {rows} rows, there may be 1 to {rules.rows}")
    if len(logit_rows) > rules.logit_rows:
        raise ValueError(f"logits of {len(logit_rows)} rows are wanted, at most {rules.logit_rows} may be")
    if tables.shape[1] > limits.lanes or tables.shape[2] > limits.lane_pages:
        most = f"{limits.lanes} lanes of {limits.lane_pages} pages"
        raise ValueError(f"tables of {tables.shape[1]} lanes of {tables.shape[2]} pages, there may be {most}")
    if rules.state_slots and len(batch.states) != tables.shape[1]:
        raise ValueError(f"{len(batch.states)} states for {tables.shape[1]} lanes")
    if len(batch.hold) and len(batch.hold) != tables.shape[1]:
        raise ValueError(f"{len(batch.hold)} places of held lanes for {tables.shape[1]} lanes")


def _within(what: str, values: Ints, limit: int, lowest: int = 0) -> None:
    if len(values) and not lowest <= int(values.min()) <= int(values.max()) < limit:
        wrong = int(values[(values < lowest) | (values >= limit)][0])
        raise ValueError(f"{what} {wrong} of a batch lies outside {lowest} to {limit - 1}")


def _check_states(batch: Batch, rules: Rules, runs: Sequence[Run]) -> None:
    """Rows of a lane must be one run in order of position, without a gap, and no two lanes may share a state."""
    seen: dict[int, int] = {}
    for run in runs:
        slot = int(batch.states[run.lane])
        if not 0 <= slot < rules.state_slots:
            raise ValueError(f"lane {run.lane} has state slot {slot} of {rules.state_slots}")
        if slot in seen:
            raise ValueError(
                f"state slot {slot} of lane {run.lane} is also that of rows of lane {seen[slot]}: rows of a lane with a"
                " state are one run, in order of position"
            )
        seen[slot] = run.lane


def _check_holds(batch: Batch, rules: Rules, runs: Sequence[Run]) -> None:
    """Rows of held lanes have places of their own, and all of them have one."""
    taken: list[tuple[int, int]] = []
    for run in runs:
        place = int(batch.hold[run.lane])
        if place == -1:
            continue
        if not 0 <= place <= rules.held_rows - run.rows:
            raise ValueError(f"{run.rows} rows of lane {run.lane} are held from {place} on, of {rules.held_rows}")
        if any(place < end and first < place + run.rows for first, end in taken):
            raise ValueError(f"rows of lane {run.lane} are held from {place} on, where others are")
        taken.append((place, place + run.rows))


def _check_group(batch: Batch, rules: Rules, runs: Sequence[Run], group: int) -> None:
    """Slots of the rows, and pages that they will read. A page may be -1 where all its readers pass it over."""
    slots, window = rules.kv.group_slots[group], rules.kv.group_windows[group]
    _within(f"slot of KV group {group}", batch.slots[group], slots)
    pages, lowest = slots // PAGE_LEN, -1 if rules.partial[group] else 0
    tables = batch.tables[group][read_of(runs, batch.positions)]
    if lowest <= int(tables.min()) <= int(tables.max()) < pages:
        return  # whatever is read of them; the rule, and cheap
    for run in runs:
        seen = int(batch.positions[run.first]) - window + 1 if window else 0
        first, last = max(seen, 0) // PAGE_LEN, int(batch.positions[run.end - 1]) // PAGE_LEN
        _within(
            f"page of lane {run.lane} in KV group {group}",
            batch.tables[group, run.lane, first : last + 1],
            pages,
            lowest,
        )


# ----------------------------------------------------------------------------------------------------------- the upload


class Block:
    """The block in pinned memory, and where it lies on the card (`address`). What the stream may still be reading is
    waited for before it is written again; `waited` tells that the device was."""

    def __init__(self, device: Device, layout: BlockLayout, address: int) -> None:
        self._device, self._layout, self._address = device, layout, address
        self._memory: HostMemory = device.pinned(layout.nbytes, STAGING_LINE)
        self._ints: Ints = self._memory.bytes.view(np.int32)
        limits = layout.limits
        self._tables = [
            self._array(f"tables {group}").reshape(limits.lanes, limits.lane_pages) for group in range(layout.groups)
        ]
        self._in_flight: set[str] = set()
        self._few_rows = few_rows_most(limits)

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def write(
        self, batch: Batch, runs: Sequence[Run], logit_rows: Ints, *, states: bool, tables: bool = True
    ) -> BatchShape:
        """Upload a batch that was checked. `states`: a program's layers have some; `tables`: they read some."""
        self._take("batch")
        rows, lanes = len(batch.tokens), self._layout.limits.lanes
        for name, values in (("tokens", batch.tokens), ("positions", batch.positions), ("lanes", batch.lanes)):
            self._array(name)[:rows] = values
        self._array("logit_rows")[: len(logit_rows)] = logit_rows
        chain = batch.chain[:rows]  # checked where ops look at it; nobody else has to have one of any length
        self._array("chain")[: len(chain)] = chain
        for group in range(self._layout.groups):
            self._array(f"slots {group}")[:rows] = batch.slots[group]
        few, many = self._tiles(runs)
        chunks = single = 0
        if states:
            found = delta.lane_runs(batch, lanes)
            self._array("runs")[:] = found.runs.reshape(-1)
            self._array("chunks")[: found.chunks.size] = found.chunks.reshape(-1)
            chunks, single = len(found.chunks), found.rows
        self._upload(0, self._layout.head)
        if tables:
            self._write_tables(batch.tables, *read_of(runs, batch.positions))
        return BatchShape(rows, len(logit_rows), _lanes_of(runs, lanes), few, many, chunks, single)

    def write_accepts(self, accepts: Ints) -> None:
        """int32 [n, 4], at most one for each lane."""
        self._write("accepts", accepts)

    def write_pairs(self, pairs: Ints) -> None:
        """int32 [n, 2], at most PAIRS."""
        self._write("pairs", pairs)

    def waited(self) -> None:
        """All that was asked of the device before is done."""
        self._in_flight.clear()

    def close(self) -> None:
        self._ints = np.zeros(0, np.int32)
        self._tables = []
        self._memory.close()

    # ---------------------------------------------------------------------------------------------------------- inside

    def _tiles(self, runs: Sequence[Run]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Writes both lists; (tiles, rows of the longest) of each."""
        short = [run for run in runs if run.rows <= self._few_rows]
        few = [(run.first, run.rows) for run in short[: few_tiles_most(self._layout.limits)]]
        cut = [run for run in runs if run.rows > self._few_rows] + short[len(few) :]
        many = [
            (at, min(MANY_TILE_ROWS, run.end - at)) for run in cut for at in range(run.first, run.end, MANY_TILE_ROWS)
        ]
        for name, tiles in (("few", few), ("many", many)):
            array = np.array(tiles, np.int32).reshape(-1)
            self._array(name)[: array.size] = array
        return (len(few), max((rows for _, rows in few), default=0)), (len(many), MANY_TILE_ROWS if many else 0)

    def _take(self, what: str) -> None:
        """`what` is written now, and read by the stream from then on."""
        if what in self._in_flight:
            self._device.wait()
            self.waited()
        self._in_flight.add(what)

    def _write_tables(self, tables: Ints, lanes: slice, pages: slice) -> None:
        """Of these lanes and pages those lanes that differ from what the card has."""
        lane_pages = self._layout.limits.lane_pages
        for group, whole in enumerate(self._tables):
            there, wanted = whole[lanes, pages], tables[group, lanes, pages]
            changed = np.flatnonzero((there != wanted).any(axis=1))
            if not len(changed):
                continue
            first, end = int(changed[0]), int(changed[-1]) + 1
            there[first:end] = wanted[first:end]
            at = self._layout.at[f"tables {group}"] + (lanes.start + first) * lane_pages
            self._upload(at, (end - first - 1) * lane_pages + wanted.shape[1])

    def _write(self, name: str, values: Ints) -> None:
        self._take(name)
        self._array(name)[: values.size] = values.reshape(-1)
        self._upload(self._layout.at[name], values.size)

    def _array(self, name: str) -> Ints:
        at = self._layout.at[name]
        return self._ints[at : at + self._layout.sizes[name]]

    def _upload(self, at: int, count: int) -> None:
        self._device.upload(self._address + INT_BYTES * at, self._memory.address + INT_BYTES * at, INT_BYTES * count)


def _lanes_of(runs: Sequence[Run], most: int) -> int:
    """Lanes that launches look at: up to the highest with rows, in powers of two so that shapes are few."""
    highest = max((run.lane for run in runs), default=0) + 1
    return min(1 << (highest - 1).bit_length(), most)
