"""Weights that the ranks of one box hold together: `--memory unified`.

All ranks map the same memory. They agree on what lies where without a word: each makes the arena of the *whole* model
from the same op list, so the offsets are the same. Each packs a part of the weights (dealt out by bytes), and
they meet in exchanges; after the last one nobody writes.

    arena of the whole model          rank 0 of 2, tensor layout
    attn_q   [576 x 576]   ▒▒▒▒▒▒     rows 0 .. 319: from group 0 on
    ffn_down [576 x 1536]  ▒▒▒▒▒▒     columns 0 .. 767 of each group: another step from group to group
    delta q|k|v            ▒▒▒▒▒▒     three runs of rows: three matrices that write side by side

A part of a tensor is a view where its runs of rows begin and end with groups of 16 rows (or with the tensor) and its
columns are one run of whole blocks. What is not (a few numbers for each head, biases of experts by columns, the
columns of a tiled delta net) is packed by each rank for itself, in its own arena; a tensor that no rank can view is not
in the common one at all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from backends.base import Collective, ExpertMatrix, LoadProgress, PartOf, Shared, Stamp, TensorView
from backends.cpu.load import Onward, load_weights
from backends.cpu.memory import Arena
from backends.cpu.stored import MATRIX, STACK, VECTOR, StoredRun, StoredWeight, StoredWeights
from backends.cpu.widths import FLOAT_BYTES
from backends.host.memory import SharedMapping
from backends.quant import QuantType

GROUP_ROWS = 16
PACKED = "weights packed"
MEETINGS = 16
"""How often ranks wait for each other while they pack."""


class SharedWeights:
    """The arena of the whole model, and where parts of its tensors lie in it."""

    def __init__(self, library: ctypes.CDLL, shared: Shared) -> None:
        self._library = library
        self._shared = shared
        self.arena = Arena()
        self._seen: set[int] = set()
        self.stored = self._placed(StoredWeights(library, shared.ops, shared.weights).own)
        self._by_tensor = _by_tensor(self.stored)
        viewed = self._viewed()
        if len(viewed) < len(self.stored):
            self.arena = Arena()
            self.stored = self._placed([stored for stored in self.stored if stored.offset in viewed])
            self._by_tensor = _by_tensor(self.stored)

    def _placed(self, wanted: Sequence[StoredWeight]) -> list[StoredWeight]:
        """The same weights, one behind the other in the arena."""
        runs = [replace(stored.runs[0], offset=self.arena.reserve(stored.size)) for stored in wanted]
        return [replace(stored, arena=self.arena, runs=(run,)) for stored, run in zip(wanted, runs, strict=True)]

    def _viewed(self) -> set[int]:
        """Offsets of the weights that some rank has a view of; all of them where the ranks are not known."""
        if not self._shared.fleet:
            return {stored.offset for stored in self.stored}
        for ops, weights in self._shared.fleet:
            StoredWeights(self._library, ops, weights, self)
        return self._seen

    @property
    def weights_fd(self) -> int:
        return self._shared.weights_fd

    @property
    def packed(self) -> bool:
        """Whether an earlier bind has filled the arena."""
        return self._shared.packed

    @property
    def size(self) -> int:
        return self.arena.size

    def my_part(self) -> list[StoredWeight]:
        """What this rank packs: the largest weights first, each to whoever has the least so far."""
        loads = [0] * self._shared.ranks
        mine = []
        for stored in sorted(self.stored, key=lambda each: (-each.size, each.offset)):
            rank = loads.index(min(loads))
            loads[rank] += stored.size
            if rank == self._shared.rank:
                mine.append(stored)
        return sorted(mine, key=lambda each: each.offset)

    def meetings(self, part: Sequence[StoredWeight]) -> list[list[StoredWeight]]:
        """`part` in `MEETINGS` steps of about equal bytes; some may be empty."""
        total = sum(stored.size for stored in part)
        steps: list[list[StoredWeight]] = [[] for _ in range(MEETINGS)]
        done = 0
        for stored in part:
            steps[min(MEETINGS - 1, done * MEETINGS // max(1, total))].append(stored)
            done += stored.size
        return steps

    def meet(self, collective: Collective) -> None:
        """Wait until every rank has packed this step of its part. Raises ExchangeError."""
        collective.sum(Stamp(0, 0, 1, PACKED), np.zeros((1, 1), np.float32))

    def find(self, view: TensorView, form: str, rows: ExpertMatrix | None) -> StoredWeight | None:
        """A weight as a view into the arena; None where it cannot be one."""
        if view.part is None:
            return None
        for whole in self._by_tensor.get(view.part.tensor, []):
            if whole.form == form and (found := self._within(whole, view, view.part, rows)) is not None:
                self._seen.add(whole.offset)
                return found
        return None

    def _within(
        self, whole: StoredWeight, view: TensorView, part: PartOf, rows: ExpertMatrix | None
    ) -> StoredWeight | None:
        place = whole.view.part
        assert place is not None, "indexed by it"
        ((first_col, end_col),) = place.cols if len(place.cols) == 1 else ((0, 0),)
        if len(part.cols) != 1 or not first_col <= part.cols[0][0] <= part.cols[0][1] <= end_col:
            return None
        columns = (part.cols[0][0] - first_col, part.cols[0][1] - first_col)
        local = _in_runs(part.rows, place.rows)
        if local is None:
            return None
        if whole.form == VECTOR:
            return self._vector(whole, view, local, columns)
        if whole.form == MATRIX:
            return self._matrix(whole, view, local, columns)
        if whole.form == STACK and rows is not None:
            return self._stack(whole, view, local, columns, rows)
        return whole if (part, rows) == (place, whole.rows) else None

    def _vector(
        self, whole: StoredWeight, view: TensorView, rows: Sequence[tuple[int, int]], cols: tuple[int, int]
    ) -> StoredWeight | None:
        if list(rows) != [(0, whole.view.rows)] or (whole.view.rows > 1 and cols != (0, whole.view.cols)):
            return None
        run = StoredRun(0, 1, whole.offset + cols[0] * FLOAT_BYTES)
        return StoredWeight(view, VECTOR, self.arena, (run,), view.cols * FLOAT_BYTES)

    def _matrix(
        self, whole: StoredWeight, view: TensorView, rows: Sequence[tuple[int, int]], cols: tuple[int, int]
    ) -> StoredWeight | None:
        if not all(_is_group(run, whole.view.rows) for run in rows) or not _ends_well(rows):
            return None
        offset, size = self._columns(whole.view, cols)
        runs, before = [], 0
        for first, end in rows:
            runs.append(StoredRun(before, end - first, whole.offset + first // GROUP_ROWS * size + offset))
            before += end - first
        return StoredWeight(view, MATRIX, self.arena, tuple(runs), 0, stored_cols=_stored(whole.view, view))

    def _stack(
        self,
        whole: StoredWeight,
        view: TensorView,
        rows: Sequence[tuple[int, int]],
        cols: tuple[int, int],
        wanted: ExpertMatrix,
    ) -> StoredWeight | None:
        """Some experts, or the same rows and columns of each."""
        assert whole.rows is not None, "a stack has rows of each expert"
        pitch, height = whole.rows.pitch, whole.rows.height
        count = view.rows // wanted.pitch
        offset, size = self._columns(whole.view, cols)
        if wanted.pitch == pitch and len(rows) == 1 and rows[0][0] % pitch == 0:
            if (wanted.first, wanted.height) != (whole.rows.first, height):
                return None
            offset += rows[0][0] // pitch * whole.expert_bytes
        elif len(rows) % count == 0 and (inside := _of_each(rows, pitch, count)) is not None:
            # Gate and up of one tensor are two runs of each expert: this stack is the one of its own rows.
            first, end = _nth(inside, wanted)
            if end - first != wanted.height or not whole.rows.first <= first < end <= whole.rows.first + height:
                return None
            run = (first - whole.rows.first, end - whole.rows.first)
            if not _is_group(run, height):
                return None
            offset += run[0] // GROUP_ROWS * size
        else:
            return None
        place = StoredRun(0, view.rows, whole.offset + offset)
        return StoredWeight(
            view, STACK, self.arena, (place,), 0, wanted, whole.expert_bytes, stored_cols=_stored(whole.view, view)
        )

    def _columns(self, whole: TensorView, cols: tuple[int, int]) -> tuple[int, int]:
        """(bytes before the first column in a group of rows, bytes of a whole group)."""
        kind: QuantType = whole.type
        return GROUP_ROWS * kind.row_bytes(cols[0]), GROUP_ROWS * kind.row_bytes(whole.cols)


def pack_together(
    library: ctypes.CDLL, team: int, together: SharedWeights, collective: Collective, line: str, progress: LoadProgress
) -> SharedMapping:
    """Map the memory of all and pack this rank's part, unless it is packed. Ranks meet again and again, so that none
    waits long for another however long the load takes, and at the end all is packed. Raises MemoryError,
    ExchangeError."""
    part = [] if together.packed else together.my_part()
    arithmetic = f"{len(together.stored)} tensors of the whole model, packed"
    filled = 0, sum(stored.size for stored in part)
    mapping = SharedMapping(library, together.weights_fd, together.size, line, arithmetic, filled)
    try:
        together.arena.place(mapping.address)
        total, done = sum(stored.source_bytes for stored in part), 0
        for some in [] if together.packed else together.meetings(part):
            load_weights(library, team, some, Onward(progress, done, total))
            done += sum(stored.source_bytes for stored in some)
            together.meet(collective)
    except BaseException:
        mapping.close()
        raise
    return mapping


def _by_tensor(stored: Sequence[StoredWeight]) -> dict[str, list[StoredWeight]]:
    found: dict[str, list[StoredWeight]] = {}
    for each in stored:
        if each.view.part is not None:
            found.setdefault(each.view.part.tensor, []).append(each)
    return found


def _stored(whole: TensorView, view: TensorView) -> int:
    return whole.cols if view.cols != whole.cols else 0


def _in_runs(rows: Sequence[tuple[int, int]], place: Sequence[tuple[int, int]]) -> list[tuple[int, int]] | None:
    """Runs of a tensor's rows as runs of what was stored of it; None where some were not."""
    found = []
    for first, end in rows:
        before = 0
        for start, stop in place:
            if start <= first and end <= stop:
                found.append((before + first - start, before + end - start))
                break
            before += stop - start
        else:
            return None
    return found


def _is_group(run: tuple[int, int], whole: int) -> bool:
    """Whether a run of rows begins and ends with groups, or ends with the matrix."""
    first, end = run
    return first % GROUP_ROWS == 0 and (end % GROUP_ROWS == 0 or end == whole)


def _ends_well(rows: Sequence[tuple[int, int]]) -> bool:
    """Only the last of several runs may end within a group: what it gives is padded, and the next one lies behind."""
    return all((end - first) % GROUP_ROWS == 0 for first, end in rows[:-1])


def _of_each(rows: Sequence[tuple[int, int]], pitch: int, count: int) -> list[tuple[int, int]] | None:
    """The runs of each of `count` experts, counted from its first row; None where they differ."""
    each = len(rows) // count
    inside = [(first % pitch, first % pitch + end - first) for first, end in rows[:each]]
    for expert in range(count):
        own = rows[expert * each : (expert + 1) * each]
        if own != [(expert * pitch + first, expert * pitch + end) for first, end in inside]:
            return None
    return inside


def _nth(inside: Sequence[tuple[int, int]], wanted: ExpertMatrix) -> tuple[int, int]:
    """The run that a stack's rows `wanted.first` .. are, where the runs lie one behind the other."""
    before = 0
    for first, end in inside:
        if before == wanted.first:
            return first, end
        before += end - first
    return 0, 0
