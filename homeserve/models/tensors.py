"""The tensors of a checkpoint as a model asks for them: by role, with the shape that its declaration gives.

Nothing is used that was not checked: `take` compares the declared shape with the file's, and `leftovers` tells what a
layer holds that nobody asked for. A leftover is refused, not ignored: it is a part of the layer that this program does
not know, and running without it would give fluent, wrong text. (Tensors that are known to carry nothing are listed by
the family.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from backends.base import TensorView, Weight
from backends.quant import QuantType
from homeserve.checkpoint.safetensors_forms import FLOATS, MadeView, scaled
from homeserve.errors import InvalidModelFile, UnsupportedModel
from homeserve.layouts.partition import Run
from homeserve.layouts.shards import Piece, Split
from homeserve.models.held_views import held_view, overlap

SOURCE = "model"
"""Stands where an error names a file: a tensor may come from any part of a split model."""


@dataclass
class TensorSource:
    """Hands out weights and remembers which tensors were taken.

    `taken` maps the name of every `Weight` handed out to its bytes. A row range of a fused tensor gets the name
    `TENSOR[first:end]`, columns `TENSOR[,first:end]`, gathered rows `TENSOR[part]`.

    `splits` says which elements of a tensor each rank holds (tensor layout; of one without a split every rank has all).
    Who takes a tensor gives the shape that the whole one must have, and gets a weight of what rank `rank` holds, in the
    order of the file: the width of what it computes is read from there. A weight without elements is in no op, and
    `cut` are the names of those that are a part of a whole.
    """

    tensors: Mapping[str, TensorView]
    splits: Mapping[str, Split] = field(default_factory=dict)
    rank: int = 0
    taken: dict[str, TensorView] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def take(self, name: str, rows: int, cols: int, stack: int = 1) -> Weight:
        """The tensor, which must be `[rows, cols]`; of a `stack` of matrices it is all rows. Raises InvalidModelFile
        with the name and both shapes."""
        self.checked(name, rows, cols)
        return self._give(name, name, Run(0, rows), Run(0, cols), stack)

    def take_rows(self, name: str, first: int, end: int, rows: int, cols: int) -> Weight:
        """Rows first..end of a tensor that must be `[rows, cols]`: a view, no copy."""
        self.checked(name, rows, cols)
        return self._give(name, f"{name}[{first}:{end}]", Run(first, end), Run(0, cols))

    def take_span(self, name: str, first: int, end: int, length: int) -> Weight:
        """Elements first..end of a vector of `length`. (Vectors are never of a blocked type.)"""
        self.checked(name, 1, length)
        return self._give(name, f"{name}[{first}:{end}]", Run(0, 1), Run(first, end))

    def take_flat(self, name: str, rows: int, cols: int) -> Weight:
        """A tensor `[rows, cols]` of unblocked numbers as one vector of `rows * cols`."""
        view = self.checked(name, rows, cols)
        if view.type.block_len != 1:
            raise InvalidModelFile(SOURCE, name, f"is of type {view.type.name}, a type without blocks is needed")
        given = self._give(name, name, Run(0, rows), Run(0, cols))
        length = given.rows * given.cols
        if length:
            held = self.taken[name]
            made = held.made if isinstance(held, MadeView) else held.data
            self.taken[name] = MadeView(name, held.type, 1, length, made)
        return Weight(name, 1, length)

    def take_scaled(self, name: str, length: int, factor: float) -> Weight:
        """A vector of floats times `factor`, as `TENSOR[scaled]`. Every rank has all of it."""
        view, part = self.checked(name, 1, length), f"{name}[scaled]"
        if view.type not in FLOATS:
            raise InvalidModelFile(SOURCE, name, f"is of type {view.type.name}, floats are needed")
        assert self._whole_everywhere(name, Run(0, 1), Run(0, length)), f"{name} is divided"
        self.taken[part] = MadeView(part, QuantType.F32, 1, length, lambda: scaled(view, factor))
        return Weight(part, 1, length)

    def take_columns(self, name: str, first: int, end: int, rows: int, cols: int) -> Weight:
        """Columns first..end of a tensor that must be `[rows, cols]`, as `TENSOR[,first:end]`: made when it is read, so
        that a large table is copied part by part. They must be whole blocks."""
        whole = self.checked(name, rows, cols)
        if first % whole.type.block_len or end % whole.type.block_len:
            raise UnsupportedModel(
                f"{name} is of type {whole.type.name}: columns {first} to {end} are no whole blocks of it", field=name
            )
        return self._give(name, f"{name}[,{first}:{end}]", Run(0, rows), Run(first, end))

    def take_reordered(self, name: str, part: str, order: Sequence[int], rows: int, cols: int) -> Weight:
        """The rows `order` of a tensor that must be `[rows, cols]`, as `TENSOR[part]`: made when it is read. Of a part
        of the tensor, those of the order that are held, in the same order."""
        whole = self.checked(name, rows, cols)
        label = f"{name}[{part}]"
        held = {row for piece in self._pieces(name) for run in piece.rows for row in range(run.first, run.end)}
        own = [row for row in order if row in held]
        if own:
            self.taken[label] = MadeView(
                label, whole.type, len(own), cols, lambda: whole.data.reshape(rows, -1)[own].reshape(-1)
            )
        if not self._whole_everywhere(name, Run(0, rows), Run(0, cols)):
            self.cut.add(label)
        return Weight(label, len(own), cols)

    # ------------------------------------------------------------------------------------------------- who holds what

    @property
    def ranks(self) -> int:
        return next((len(split) for split in self.splits.values()), 1)

    def own_rows(self, name: str, whole: int) -> int:
        """Rows of the `whole` ones that are held here."""
        return sum(piece.height for piece in self.splits[name][self.rank]) if name in self.splits else whole

    def own_cols(self, name: str, whole: int) -> int:
        """Columns, or elements of a vector, of the `whole` ones that are held here."""
        return sum(piece.width for piece in self.splits[name][self.rank]) if name in self.splits else whole

    def first_row(self, name: str) -> int:
        """Of the rows that are held here; 0 where none are."""
        return next((run.first for piece in self._pieces(name) for run in piece.rows), 0)

    def first_columns(self, name: str, first: int, end: int) -> Run:
        """Of the columns first..end of a tensor, those that are held here, which are one run; counted from `first`."""
        held = [overlap(piece.cols, Run(first, end)) for piece in self._pieces(name)]
        runs = [run.times(1, -first) for found in held for run in found]
        assert len(runs) <= 1, f"{name}: {runs} are no run"
        return runs[0] if runs else Run(0, 0)

    def rows_by_rank(self, name: str, first: int, end: int) -> tuple[int, ...] | None:
        """How many of the rows first..end each rank holds; None where every rank has all of them."""
        window = Run(first, end)
        if name not in self.splits or self._whole_everywhere(name, window, Run(0, self.tensors[name].cols)):
            return None
        found = [[overlap(each.rows, window) for each in own] for own in self.splits[name]]
        return tuple(sum(run.size for runs in each for run in runs) for each in found)

    def _whole_everywhere(self, name: str, rows: Run, cols: Run) -> bool:
        """Whether every rank has all of a window of a tensor."""
        every = [piece for pieces in self.splits.get(name, ()) for piece in pieces]
        return all(piece.copied for piece in every if overlap(piece.rows, rows) and overlap(piece.cols, cols))

    def _pieces(self, name: str) -> tuple[Piece, ...]:
        if name in self.splits:
            return self.splits[name][self.rank]
        whole = self.tensors[name]
        return (Piece((Run(0, whole.rows),), (Run(0, whole.cols),)),)

    def _give(self, name: str, label: str, rows: Run, cols: Run, stack: int = 1) -> Weight:
        """What is held of a window of a tensor, under the name `label`."""
        windows = [(overlap(each.rows, rows), overlap(each.cols, cols)) for each in self._pieces(name)]
        held = [window for window in windows if all(window)]
        if not self._whole_everywhere(name, rows, cols):
            self.cut.add(label)
        if not held:
            return Weight(label, 0, cols.size)
        ((own_rows, own_cols),) = held
        view = self.taken[label] = held_view(self.tensors[name], label, own_rows, own_cols, stack)
        return Weight(label, view.rows, view.cols)

    def checked(self, name: str, rows: int, cols: int) -> TensorView:
        view = self.tensors.get(name)
        if view is None:
            raise InvalidModelFile(SOURCE, name, f"is missing; shape {_shape(rows, cols)} is needed")
        if (view.rows, view.cols) != (rows, cols):
            raise InvalidModelFile(
                SOURCE, name, f"has shape {_shape(view.rows, view.cols)}, {_shape(rows, cols)} is needed"
            )
        self.used.add(name)
        return view

    def leftovers(self, prefix: str, ignored: tuple[str, ...] = ()) -> list[str]:
        """Tensors under `prefix` that nobody took and that `ignored` does not name, sorted."""
        return sorted(
            name
            for name in self.tensors
            if name.startswith(prefix) and name not in self.used and name[len(prefix) :] not in ignored
        )


def _shape(rows: int, cols: int) -> str:
    return f"[{cols}]" if rows == 1 else f"[{rows}, {cols}]"
