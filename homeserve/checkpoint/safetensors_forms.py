"""From the form in which a folder stores a tensor to that of a GGUF file.

What is small (a norm's weights plus one, a vector of decays) is made at once. What is large is made on access, from the
mapped file, and forgotten: stacks of experts that lie one by one, matrices that stand transposed, 4-bit floats in
another order. So opening a folder reads headers alone. All of these are stacks, made matrix by matrix: who reads them
by `pieces` holds one expert's matrix at a time, never a layer's.

4-bit floats (MXFP4), 32 of them with a scale of one byte: a folder keeps 16 bytes of neighbouring pairs (the even one
in the low half) and the scale apart; a GGUF block is the scale, then 16 bytes that pair element i with i + 16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.base import PartOf, TensorView
from backends.quant import QuantType
from homeserve.checkpoint.hf_rules import BlockedPlace, Form

Bytes = npt.NDArray[np.uint8]
_FLOATS: dict[QuantType, np.dtype[np.floating]] = {
    QuantType.F32: np.dtype("<f4"),
    QuantType.F16: np.dtype("<f2"),
    QuantType.F64: np.dtype("<f8"),
}
FLOATS = frozenset({*_FLOATS, QuantType.BF16})
SMALL_BYTES_MAX = 64 << 20
"""What is made at once may not be larger: a norm's weights never are."""


@dataclass(frozen=True)
class Matrices:
    """A stack: `make(i)` gives the bytes of matrix i of `count`, all of one length."""

    count: int
    make: Callable[[int], Bytes]

    def __call__(self) -> Bytes:
        """All of them, one behind the other."""
        first = self.make(0)
        whole = np.empty((self.count, first.size), np.uint8)
        whole[0] = first
        for index in range(1, self.count):
            whole[index] = self.make(index)
        return whole.reshape(-1)


class MadeView(TensorView):
    """A tensor whose bytes are made each time they are asked for."""

    def __init__(
        self,
        name: str,
        type: QuantType,
        rows: int,
        cols: int,
        data: Bytes | Callable[[], Bytes],
        part: PartOf | None = None,
    ) -> None:
        fields = {"name": name, "type": type, "rows": rows, "cols": cols, "part": part, "_made": data}
        for field, value in fields.items():
            object.__setattr__(self, field, value)

    @property
    def made(self) -> Bytes | Callable[[], Bytes]:
        """The bytes, or what makes them."""
        made: Bytes | Callable[[], Bytes] = self.__dict__["_made"]
        return made

    @property
    def data(self) -> Bytes:
        made = self.made
        return made() if callable(made) else made

    def pieces(self) -> Iterator[Bytes]:
        made = self.made
        if isinstance(made, Matrices):
            yield from (made.make(index) for index in range(made.count))
        else:
            yield self.data


@dataclass(frozen=True)
class Stored:
    """A tensor of a folder as it lies there."""

    view: TensorView
    shape: tuple[int, ...]

    @property
    def stack(self) -> tuple[int, int, int]:
        """The shape as a stack of matrices. Raises ValueError for another one."""
        if len(self.shape) != 3:
            raise ValueError(f"has the shape {list(self.shape)[:8]}, a stack of matrices is needed")
        count, rows, cols = self.shape
        return count, rows, cols


def formed(name: str, stored: Stored, form: Form) -> TensorView:
    """A tensor in another form. Raises ValueError with what is wrong about its type or shape."""
    view = stored.view
    match form:
        case Form.AS_IS:
            return TensorView(name, view.type, view.rows, view.cols, view.data)
        case Form.PLUS_ONE | Form.MINUS_EXP:
            return _small(name, view, form)
        case Form.EVEN_COLS | Form.ODD_COLS:
            first = 0 if form is Form.EVEN_COLS else 1
            return _columns(name, stored, first)
        case Form.TRANSPOSED:
            return _transposed(name, stored, 0, 1)
        case Form.EVEN_COLS_TRANSPOSED | Form.ODD_COLS_TRANSPOSED:
            return _transposed(name, stored, 0 if form is Form.EVEN_COLS_TRANSPOSED else 1, 2)


def vector(name: str, values: Sequence[float]) -> TensorView:
    """A tensor that a folder does not store at all."""
    return TensorView(name, QuantType.F32, 1, len(values), _bytes(np.array(values, np.float32)))


def scaled(view: TensorView, factor: float) -> Bytes:
    """The elements of a tensor of FLOATS as float32, times `factor`."""
    return _bytes(_floats(view) * np.float32(factor))


def stacked(name: str, experts: Sequence[TensorView]) -> TensorView:
    """Matrices of one type and shape as one tensor, made on access. Raises ValueError where they differ."""
    first = experts[0]
    for view in experts:
        if (view.type, view.rows, view.cols) != (first.type, first.rows, first.cols):
            what = f"[{view.rows}, {view.cols}] of {view.type.name}, the first one [{first.rows}, {first.cols}] of"
            raise ValueError(f"holds a matrix {what} {first.type.name}")
    parts = [view.data for view in experts]
    made = Matrices(len(parts), parts.__getitem__)
    return MadeView(name, first.type, len(experts) * first.rows, first.cols, made)


def blocked(name: str, blocks: Stored, scales: Stored, place: BlockedPlace) -> TensorView:
    """4-bit floats in GGUF's blocks, every `row_step`-th row from `first_row`. Raises ValueError for shapes that are
    not [experts, rows, blocks, 16] and [experts, rows, blocks] of bytes."""
    if blocks.view.type is not QuantType.I8 or scales.view.type is not QuantType.I8:
        raise ValueError("holds blocks or scales that are no bytes")
    if len(blocks.shape) != 4 or blocks.shape[3] != 16 or blocks.shape[:3] != scales.shape:
        raise ValueError(f"has blocks of shape {list(blocks.shape)[:8]} and scales of {list(scales.shape)[:8]}")
    count, rows, groups, _ = blocks.shape
    if rows % place.row_step:
        raise ValueError(f"has {rows} rows for each expert, an even number is needed")
    chosen = slice(place.first_row, None, place.row_step)
    codes, exponents = blocks.view.data.reshape(blocks.shape), scales.view.data.reshape(scales.shape)

    def make(expert: int) -> Bytes:
        pairs = codes[expert, chosen]
        elements = np.empty((*pairs.shape[:2], 32), np.uint8)
        elements[..., 0::2], elements[..., 1::2] = pairs & 15, pairs >> 4
        made = np.empty((*pairs.shape[:2], 17), np.uint8)
        made[..., 0] = exponents[expert, chosen]
        made[..., 1:] = elements[..., :16] | (elements[..., 16:] << 4)
        return made.reshape(-1)

    return MadeView(name, QuantType.MXFP4, count * rows // place.row_step, groups * 32, Matrices(count, make))


def _small(name: str, view: TensorView, form: Form) -> TensorView:
    if view.nbytes > SMALL_BYTES_MAX:
        raise ValueError(f"of {view.nbytes} bytes is too large for a vector")
    values = _floats(view)
    made = values + np.float32(1) if form is Form.PLUS_ONE else -np.exp(values)
    return TensorView(name, QuantType.F32, view.rows, view.cols, _bytes(made.astype(np.float32)))


def _columns(name: str, stored: Stored, first: int) -> TensorView:
    view = stored.view
    if view.cols % 2 or view.nbytes > SMALL_BYTES_MAX:
        raise ValueError(f"has rows of {view.cols}, an even number of elements is needed")
    whole = _elements(view).reshape(view.rows, view.cols)
    return TensorView(name, view.type, view.rows, view.cols // 2, _bytes(whole[:, first::2]))


def _transposed(name: str, stored: Stored, first: int, step: int) -> TensorView:
    view = stored.view
    count, rows, cols = stored.stack
    if cols % step:
        raise ValueError(f"has rows of {cols}, an even number of elements is needed")
    stack = _elements(view).reshape(count, rows, cols)
    made = Matrices(count, lambda expert: _bytes(stack[expert, :, first::step].T))
    return MadeView(name, view.type, count * (cols // step), rows, made)


def _elements(view: TensorView) -> npt.NDArray[np.generic]:
    """The elements as integers of their size: enough to put them in another order."""
    return np.frombuffer(view.data, np.dtype(f"<u{_element(view)}"))


def _element(view: TensorView) -> int:
    if view.type.block_len != 1:
        raise ValueError(f"is of type {view.type.name}, whose elements cannot be put in another order")
    return view.type.block_bytes


def _floats(view: TensorView) -> npt.NDArray[np.float32]:
    if view.type is QuantType.BF16:
        return (np.frombuffer(view.data, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    if view.type not in FLOATS:
        raise ValueError(f"is of type {view.type.name}, floats are needed")
    return np.frombuffer(view.data, _FLOATS[view.type]).astype(np.float32)


def _bytes(values: npt.NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
