"""The tensors of a checkpoint as a model asks for them: by role, with the shape that its declaration gives.

Nothing is used that was not checked: `take` compares the declared shape with the file's, and `leftovers` tells what a
layer holds that nobody asked for. A leftover is refused, not ignored: it is a part of the layer that this program does
not know, and running without it would give fluent, wrong text. (Tensors that are known to carry nothing are listed by
the family.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from backends.base import TensorView, Weight
from backends.quant import QuantType
from homeserve.checkpoint.safetensors_forms import FLOATS, MadeView, scaled
from homeserve.errors import InvalidModelFile, UnsupportedModel

SOURCE = "model"
"""Stands where an error names a file: a tensor may come from any part of a split model."""


@dataclass
class TensorSource:
    """Hands out weights and remembers which tensors were taken.

    `taken` maps the name of every `Weight` handed out to its bytes. A row range of a fused tensor gets the name
    `TENSOR[first:end]`, columns `TENSOR[,first:end]`, gathered rows `TENSOR[part]`.
    """

    tensors: Mapping[str, TensorView]
    taken: dict[str, TensorView] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def take(self, name: str, rows: int, cols: int) -> Weight:
        """The whole tensor, which must be `[rows, cols]`. Raises InvalidModelFile with the name and both shapes."""
        view = self.checked(name, rows, cols)
        self.taken[name] = view
        return Weight(name, rows, cols)

    def take_rows(self, name: str, first: int, end: int, rows: int, cols: int) -> Weight:
        """Rows first..end of a tensor that must be `[rows, cols]`: a view, no copy."""
        whole = self.checked(name, rows, cols)
        row_bytes = whole.type.row_bytes(cols)
        part = f"{name}[{first}:{end}]"
        data = whole.data[first * row_bytes : end * row_bytes]
        self.taken[part] = replace(whole, name=part, rows=end - first, data=data)
        return Weight(part, end - first, cols)

    def take_span(self, name: str, first: int, end: int, length: int) -> Weight:
        """Elements first..end of a vector of `length`: a view, no copy. (Vectors are never of a blocked type.)"""
        whole = self.checked(name, 1, length)
        start, stop = whole.type.row_bytes(first), whole.type.row_bytes(end)
        part = f"{name}[{first}:{end}]"
        self.taken[part] = replace(whole, name=part, cols=end - first, data=whole.data[start:stop])
        return Weight(part, 1, end - first)

    def take_flat(self, name: str, rows: int, cols: int) -> Weight:
        """A tensor `[rows, cols]` of unblocked numbers as one vector of `rows * cols`."""
        view = self.checked(name, rows, cols)
        if view.type.block_len != 1:
            raise InvalidModelFile(SOURCE, name, f"is of type {view.type.name}, a type without blocks is needed")
        self.taken[name] = replace(view, rows=1, cols=rows * cols)
        return Weight(name, 1, rows * cols)

    def take_scaled(self, name: str, length: int, factor: float) -> Weight:
        """A vector of floats times `factor`, as `TENSOR[scaled]`."""
        view, part = self.checked(name, 1, length), f"{name}[scaled]"
        if view.type not in FLOATS:
            raise InvalidModelFile(SOURCE, name, f"is of type {view.type.name}, floats are needed")
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
        start, stop = whole.type.row_bytes(first), whole.type.row_bytes(end)
        part = f"{name}[,{first}:{end}]"
        self.taken[part] = MadeView(
            part, whole.type, rows, end - first, lambda: whole.data.reshape(rows, -1)[:, start:stop].reshape(-1)
        )
        return Weight(part, rows, end - first)

    def take_reordered(self, name: str, part: str, order: Sequence[int], rows: int, cols: int) -> Weight:
        """The rows `order` of a tensor that must be `[rows, cols]`, as `TENSOR[part]`: made when it is read."""
        whole = self.checked(name, rows, cols)
        label = f"{name}[{part}]"
        self.taken[label] = MadeView(
            label, whole.type, len(order), cols, lambda: whole.data.reshape(rows, -1)[list(order)].reshape(-1)
        )
        return Weight(label, len(order), cols)

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
