"""One copy of the model's file in host memory, from which every rank fills its arena in any layout.

All ranks map the same memory (`WeightHome.weights_fd`). They agree on what lies where without a word: each lays out the
tensors of the *whole* model in the order in which one rank would use them. Each fills a part of it, dealt out by bytes,
and they meet in exchanges; after the last one nobody writes. Then each has its card pin all of it.

    copy                               a rank's weights, in the layout that it changes to
    attn_q    whole rows, as in the    rows 320 .. 575: one run, which the card takes from there
    ffn_down  file                     columns 768 .. 1535: a run of each row, gathered on their way to the card
    made by a rank alone               what no tensor of the copy has as it is ("weights side")

These are the file's bytes, whatever card packs them in what way, so cards of two vendors fill from one copy. Tensors of
which no rank has a part in any layout are left out.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from backends.base import Collective, LoadProgress, MemoryRegion, Op, PartOf, Stamp, TensorView, WeightHome
from backends.gpu.device import Device, HostMemory
from backends.gpu.errors import HostMemoryRefused
from backends.gpu.weights import CardWeights, OfFile, Rectangle, Source, without_bytes

Bytes = npt.NDArray[np.uint8]
Runs = Sequence[tuple[int, int]]
Fleet = Sequence[tuple[Sequence[Op], Mapping[str, TensorView]]]
Side = dict[str, list[Rectangle]]
"""By a view's name."""

COPY, SIDE = "weights copy", "weights side"
COPIED = "weights copied"
"""Where ranks meet."""
MEETINGS = 16
"""How often they wait for each other while they fill the copy, so that none waits long for another."""
ALIGN = 256
"""Of a tensor in the copy."""


@dataclass(frozen=True)
class Whole:
    """A tensor of the whole model, or what the whole model uses of it: `view.nbytes` at `offset` of the copy."""

    view: TensorView
    offset: int

    @property
    def part(self) -> PartOf:
        assert self.view.part is not None, "indexed by it"
        return self.view.part


@dataclass(frozen=True)
class Found:
    """Rows of a view from `first_row` on, columns from `first_col` on: rows and columns of a tensor in the copy."""

    first_row: int
    first_col: int
    whole: Whole
    rows: tuple[int, int]
    cols: tuple[int, int]


class Directory:
    """What lies where in the copy. The same on every rank."""

    def __init__(self, home: WeightHome, fleet: Fleet) -> None:
        self._rank, self._ranks = home.rank, home.ranks
        self._place(_distinct(placed.view for placed in CardWeights(home.ops, home.weights).placed))
        if fleet:
            seen = {
                whole.offset for view in _views(fleet) for found in self.find(view) or () for whole in [found.whole]
            }
            self._place([whole.view for whole in self.wholes if whole.offset in seen])

    def _place(self, views: Sequence[TensorView]) -> None:
        self.nbytes, self.wholes = 0, list[Whole]()
        self._by_tensor: dict[str, list[Whole]] = {}
        for view in views:
            whole = Whole(view, self.nbytes)
            self.wholes.append(whole)
            self._by_tensor.setdefault(whole.part.tensor, []).append(whole)
            self.nbytes += -(-view.nbytes // ALIGN) * ALIGN

    def find(self, view: TensorView) -> tuple[Found, ...] | None:
        """All of a view; None where some of it is not in the copy as it is."""
        if view.part is None:
            return None
        found: list[Found] = []
        row = 0
        for rows in view.part.rows:
            col = 0
            for cols in view.part.cols:
                one = self._within(view, rows, cols, row, col)
                if one is None:
                    return None
                found.append(one)
                col += cols[1] - cols[0]
            row += rows[1] - rows[0]
        return tuple(found)

    def _within(
        self, view: TensorView, rows: tuple[int, int], cols: tuple[int, int], row: int, col: int
    ) -> Found | None:
        assert view.part is not None, "looked at before"
        for whole in self._by_tensor.get(view.part.tensor, []):
            own_rows, own_cols = _inside(rows, whole.part.rows), _inside(cols, whole.part.cols)
            if whole.view.type is view.type and own_rows is not None and own_cols is not None:
                return Found(row, col, whole, own_rows, own_cols)
        return None

    def forget_files(self) -> None:
        """The copy has all of them."""
        for wholes in (self.wholes, *self._by_tensor.values()):
            wholes[:] = [replace(whole, view=without_bytes(whole.view)) for whole in wholes]

    def my_part(self) -> list[Whole]:
        """What this rank fills: the largest tensors first, each to whoever has the least so far."""
        loads, mine = [0] * self._ranks, []
        for whole in sorted(self.wholes, key=lambda each: (-each.view.nbytes, each.offset)):
            rank = loads.index(min(loads))
            loads[rank] += whole.view.nbytes
            if rank == self._rank:
                mine.append(whole)
        return sorted(mine, key=lambda each: each.offset)


def _distinct(views: Iterator[TensorView]) -> list[TensorView]:
    """Those that say where they are from, each part of a tensor once."""
    return list({view.part: view for view in reversed(list(views)) if view.part is not None}.values())[::-1]


def _views(fleet: Fleet) -> Iterator[TensorView]:
    """All that any rank uses in any layout."""
    for ops, weights in fleet:
        yield from (placed.view for placed in CardWeights(ops, weights).placed)


def _inside(run: tuple[int, int], places: Runs) -> tuple[int, int] | None:
    """A run of a tensor's rows, or columns, counted in what there is of them; None where some are not there."""
    before = 0
    for first, end in places:
        if first <= run[0] and run[1] <= end:
            return before + run[0] - first, before + run[1] - first
        before += end - first
    return None


class FileCopy:
    """The copy, filled and pinned when this is made. `layouts` are this rank's weights in each, by name: what the copy
    lacks of them is kept aside, and nothing that is kept refers to the model's files. Raises MemoryError with the
    arithmetic, ExchangeError, and what reading a file raises."""

    def __init__(
        self,
        device: Device,
        home: WeightHome,
        fleet: Fleet,
        layouts: Mapping[str, CardWeights],
        collective: Collective,
        progress: LoadProgress,
    ) -> None:
        self.directory = Directory(home, fleet)
        self._pinned: HostMemory | None = None
        self._side: dict[str, Side] = {}
        self._mapped = self._map(home.weights_fd)
        self._bytes: Bytes = np.frombuffer(self._mapped, np.uint8)
        try:
            self.filled = self._fill(collective, progress)
            self._pinned = device.pin(int(self._bytes.ctypes.data), len(self._bytes), COPY)
            self._side = {name: self._aside(weights) for name, weights in layouts.items()}
        except BaseException:
            self.close()
            raise

    def _map(self, fd: int) -> mmap.mmap:
        """Whole pages. The first rank that comes gives the memory its size."""
        nbytes = -(-max(self.directory.nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            os.ftruncate(fd, nbytes)
            mapped = mmap.mmap(fd, nbytes)
        except OSError as error:
            raise HostMemoryRefused(
                f"{COPY} needs {nbytes} bytes = {len(self.directory.wholes)} tensors of the whole model, and the system"
                f" refused: {error.strerror}",
                fix="free memory of the system, or have one layout alone (--flip off)",
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                mapped.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # an offer: a system without huge pages for shared memory uses small ones
        return mapped

    def _fill(self, collective: Collective, progress: LoadProgress) -> int:
        """This rank's part; when it returns the others have theirs. Returns its bytes."""
        part = self.directory.my_part()
        total, done, met = sum(whole.view.nbytes for whole in part), 0, 0
        progress(COPY, 0, total)
        for whole in part:
            for each in OfFile().rectangles(whole.view):
                rows, nbytes = each.lines.shape
                at = whole.offset + each.first_row * nbytes
                np.copyto(self._bytes[at : at + rows * nbytes].reshape(rows, nbytes), each.lines)
            done += whole.view.nbytes
            progress(COPY, done, total)
            while met < MEETINGS * done // total - 1:
                met = _meet(collective, met)
        while met < MEETINGS:
            met = _meet(collective, met)
        self.directory.forget_files()
        return total

    def _aside(self, weights: CardWeights) -> Side:
        views = [placed.view for placed in weights.placed if self.directory.find(placed.view) is None]
        return {view.name: [_kept(each) for each in OfFile().rectangles(view)] for view in views}

    def of(self, name: str) -> Source:
        """For fills of layout `name`."""
        return _OfCopy(self.directory, self._bytes, self._side[name])

    def memory_lines(self) -> Mapping[str, int]:
        """Of the copy each rank tells what it has filled, so that together they tell all of it."""
        aside = [each for side in self._side.values() for rectangles in side.values() for each in rectangles]
        side = sum(each.lines.nbytes for each in aside)
        return {COPY: self.filled} | ({SIDE: side} if side else {})

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        return (MemoryRegion(COPY, int(self._bytes.ctypes.data), len(self._bytes)),)

    def close(self) -> None:
        """No fill may go on. The memory is the fleet's, and stays."""
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None
        self._bytes = np.zeros(0, np.uint8)
        try:
            self._mapped.close()
        except BufferError:
            pass  # an error that is on its way looks at it: it goes with that


class _OfCopy:
    """A `Source`. It must not outlive the copy's mapping."""

    def __init__(self, directory: Directory, memory: Bytes, side: Side) -> None:
        self._directory, self._memory, self._side = directory, memory, side

    def rectangles(self, view: TensorView) -> Iterator[Rectangle]:
        found = self._directory.find(view)
        if found is None:
            yield from self._side[view.name]
            return
        for each in found:
            kind, whole = view.type, each.whole
            table = self._memory[whole.offset : whole.offset + whole.view.nbytes].reshape(whole.view.rows, -1)
            lines = table[slice(*each.rows), kind.row_bytes(each.cols[0]) : kind.row_bytes(each.cols[1])]
            yield Rectangle(each.first_row, each.first_col, lines, pinned=lines.flags.c_contiguous)


def _meet(collective: Collective, met: int) -> int:
    """Wait until every rank has come as far. Raises ExchangeError."""
    collective.sum(Stamp(0, 0, 1, COPIED), np.zeros((1, 1), np.float32))
    return met + 1


def _kept(rectangle: Rectangle) -> Rectangle:
    """In memory of its own, not the file's."""
    return rectangle._replace(lines=rectangle.lines.copy())
