"""Weights on a card: where each one lies in one arena, and how it gets there.

    matrix   planes of its type (`backends.gpu.planes`), packed on the card; a stack of experts is one matrix
    vector   float32, as many as there are, in the order of the file: norms, biases, sinks, routing, convolutions, gates

Places are cut from the arena in the order of the ops, each at a multiple of 256 bytes, before any memory is had: equal
ops have equal arenas. A weight that several ops use lies there once, so does a tensor from which gate and up are cut.

Filling is the same at a load and at a flip; only where the file's bytes come from differs (`Source`). They pass through
the staging in rectangles of whole rows; where a rectangle is pinned memory already, the card takes it from there.

    file or copy ─▶ half of the staging ─upload─▶ card's part of it ─pack_<type>─▶ arena

The arena is filled with zeros before, so that what lies between two planes and two weights has the same bytes whatever
was there: a filled arena has one digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from backends.base import (
    Attention,
    DeltaNet,
    EmbedRows,
    Experts,
    Linear,
    LoadProgress,
    MergeAttention,
    Norm,
    Op,
    RopeStore,
    Scale,
    TensorView,
    Weight,
)
from backends.gpu import planes
from backends.gpu.device import Device
from backends.gpu.launch import Launch, Symbol
from backends.gpu.ops import quants
from backends.gpu.staging import Staging
from backends.gpu.steps.base import Stored
from backends.quant import QuantType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

MATRIX, VECTOR = "matrix", "vector"
ALIGN = 256
"""Of every weight in the arena: planes and vectors begin with whole lines of a card's memory."""
FLOAT_BYTES = 4
PIECE_ALIGN = 16
"""Of pieces in the staging."""


@dataclass(frozen=True)
class Placed:
    """A weight of the program: `nbytes` at `offset` of the arena."""

    view: TensorView
    form: str
    offset: int
    nbytes: int


class CardWeights:
    """Places of the weights of `ops`; addresses once `place` was called. Raises ValueError where a tensor is not what
    an op wants, or has a type that cards do not take."""

    def __init__(self, ops: Sequence[Op], weights: Mapping[str, TensorView]) -> None:
        self.nbytes = 0
        self._by_name: dict[str, Placed] = {}
        self._base = 0
        for op in ops:
            for weight, form in weights_of(op):
                self._have(weight, weights[weight.name], form)

    @property
    def placed(self) -> tuple[Placed, ...]:
        """All of them, by their place."""
        return tuple(self._by_name.values())

    @property
    def source_bytes(self) -> int:
        """Bytes of the checkpoint that they hold."""
        return sum(each.view.nbytes for each in self.placed)

    @property
    def arithmetic(self) -> str:
        return f"{len(self.placed)} tensors of {self.source_bytes} bytes in the file"

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """What a fill launches."""
        types = {each.view.type: None for each in self.placed if each.form == MATRIX}
        return tuple(quants.PACK[quant] for quant in types)

    def forget_files(self) -> None:
        """Let go of the file's bytes: from here on a fill needs a source that has them elsewhere."""
        for name, placed in self._by_name.items():
            self._by_name[name] = replace(placed, view=without_bytes(placed.view))

    def place(self, address: int) -> None:
        """The arena begins there, which is a multiple of 256."""
        assert address % ALIGN == 0, "planes begin with whole lines"
        self._base = address

    @property
    def base(self) -> int:
        """Where the arena begins."""
        assert self._base, "placed before it is used"
        return self._base

    def address(self, placed: Placed) -> int:
        return self.base + placed.offset

    def matrix(self, weight: Weight) -> Stored:
        placed = self._placed(weight, MATRIX)
        return Stored(placed.view.type, self.address(placed), placed.view.rows, placed.view.cols)

    def vector(self, weight: Weight | None) -> int:
        """Address of float32 numbers; 0 without a weight."""
        return self.address(self._placed(weight, VECTOR)) if weight is not None else 0

    def _placed(self, weight: Weight, form: str) -> Placed:
        placed = self._by_name[weight.name]
        assert placed.form == form, f"{weight.name} lies as a {placed.form}"
        return placed

    def _have(self, weight: Weight, view: TensorView, form: str) -> None:
        if (view.rows, view.cols) != (weight.rows, weight.cols):
            raise ValueError(
                f"{weight.name} is [{view.rows}, {view.cols}], the op wants [{weight.rows}, {weight.cols}]"
            )
        known = self._by_name.get(weight.name)
        if known is not None:
            if known.form != form:
                raise ValueError(f"{weight.name} is used as a matrix and as a vector")
            return
        nbytes = _nbytes(weight.name, view, form)
        self._by_name[weight.name] = Placed(view, form, self.nbytes, nbytes)
        self.nbytes += -(-nbytes // ALIGN) * ALIGN


def without_bytes(view: TensorView) -> TensorView:
    """What a tensor is, and of which part of the checkpoint; its bytes lie elsewhere."""
    return TensorView(view.name, view.type, view.rows, view.cols, np.zeros(0, np.uint8), view.part)


def _nbytes(name: str, view: TensorView, form: str) -> int:
    if form == VECTOR:
        if view.type not in planes.FLOATS:
            raise ValueError(f"{name} is {view.type.name}: vectors are floats")
        return FLOAT_BYTES * view.rows * view.cols
    if view.type not in quants.MATRICES:
        raise ValueError(f"{name} is {view.type.name}, which no card takes")
    try:
        return planes.matrix_bytes(view.type, view.rows, view.cols)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def weights_of(op: Op) -> Iterator[tuple[Weight, str]]:
    """What an op uses, and in which form."""
    match op:
        case EmbedRows(table=table):
            yield table, MATRIX
        case Linear(parts=parts):
            yield from ((part.weight, MATRIX) for part in parts)
            yield from ((part.bias, VECTOR) for part in parts if part.bias is not None)
        case Norm(weight=weight) | Scale(weight=weight):
            yield weight, VECTOR
        case RopeStore(q_norm=q_norm, k_norm=k_norm):
            yield from ((norm, VECTOR) for norm in (q_norm, k_norm) if norm is not None)
        case Attention(sinks=sinks) | MergeAttention(sinks=sinks):
            if sinks is not None:
                yield sinks, VECTOR
        case Experts(routing=routing):
            matrices = (op.gate, op.up, op.down)
            yield from ((each.weight, MATRIX) for each in matrices)
            vectors = (routing.selection, routing.gains, *(each.bias for each in matrices))
            yield from ((vector, VECTOR) for vector in vectors if vector is not None)
        case DeltaNet():
            yield from ((vector, VECTOR) for vector in (op.conv, op.dt_bias, op.a, op.norm))


# ------------------------------------------------------------------------------------------------- the file's bytes


class Rectangle(NamedTuple):
    """Rows of a tensor from `first_row` on, and of them the columns from `first_col` on, a whole block's first one:
    `lines` uint8 [rows, bytes]. `pinned`: they are one run of memory that the card reads by itself."""

    first_row: int
    first_col: int
    lines: Bytes
    pinned: bool = False


class Source(Protocol):
    """Where a fill has the file's bytes from."""

    def rectangles(self, view: TensorView) -> Iterator[Rectangle]:
        """All of a tensor, each element once. Raises ValueError where its bytes are not what its shape says."""
        ...


class OfFile:
    """The views' own bytes, piece by piece: a stack whose matrices are made one by one is never held together."""

    def rectangles(self, view: TensorView) -> Iterator[Rectangle]:
        size, row = view.type.row_bytes(view.cols), 0
        for piece in view.pieces():
            if piece.nbytes % size or row + piece.nbytes // size > view.rows:
                raise _wrong_length(view, row * size + piece.nbytes)
            lines = np.ascontiguousarray(piece).reshape(-1, size)
            yield Rectangle(row, 0, lines)
            row += len(lines)
            del piece, lines
        if row != view.rows:
            raise _wrong_length(view, row * size)


def _wrong_length(view: TensorView, length: int) -> ValueError:
    return ValueError(f"{view.name}: {length} bytes of data for [{view.rows}, {view.cols}] of {view.type.name}")


# ------------------------------------------------------------------------------------------------------------- filling


def fill(
    device: Device, staging: Staging, weights: CardWeights, source: Source, progress: LoadProgress | None = None
) -> None:
    """Fill the arena of `weights`, which is placed: all of it, zeros in between. Raises ValueError for a tensor whose
    bytes are not what its shape says, OSError, KernelError, DriverError."""
    device.prepare(weights.symbols)
    device.wait()
    if weights.nbytes:
        device.fill(weights.base, 0, weights.nbytes)
    belt, total = Belt(device, staging), weights.source_bytes
    done = 0
    if progress is not None:
        progress("weights", 0, total)
    for placed in weights.placed:
        address = weights.address(placed)
        if placed.form == MATRIX:
            for rectangle in source.rectangles(placed.view):
                belt.pack(placed.view, address, rectangle)
        else:
            belt.store(address, _floats(placed.view, source))
        done += placed.view.nbytes
        if progress is not None:
            progress("weights", done, total)
    belt.end()


class Belt:
    """Pieces on their way to the card, as many together as a half of the staging holds."""

    def __init__(self, device: Device, staging: Staging) -> None:
        self._device, self._staging = device, staging
        self._used = 0
        self._packs: list[Launch] = []
        self._copies: list[tuple[int, int, int]] = []

    def pack(self, view: TensorView, planes_at: int, rectangle: Rectangle) -> None:
        """Rows of a matrix, to their places in its planes."""
        for part in _cut(view.type, rectangle, self._staging.nbytes):
            if part.pinned:
                self._pack_pinned(view, planes_at, part)
                continue
            for few in self._fitting(part):
                at = self._room(few.lines.nbytes)
                np.copyto(self._staging.half.bytes[at : at + few.lines.nbytes].reshape(few.lines.shape), few.lines)
                self._packs.append(_launch(view, planes_at, self._staging.card + at, few))

    def store(self, address: int, floats: Floats) -> None:
        """Numbers as they are."""
        data, most = floats.view(np.uint8), self._staging.nbytes // PIECE_ALIGN * PIECE_ALIGN
        for first in range(0, len(data), most):
            piece = data[first : first + most]
            at = self._room(len(piece))
            self._staging.half.bytes[at : at + len(piece)] = piece
            self._copies.append((address + first, self._staging.card + at, len(piece)))

    def end(self) -> None:
        """Until all of it is where it should be. Raises what the stream came to."""
        self._send()
        self._device.wait()

    def _pack_pinned(self, view: TensorView, planes_at: int, part: Rectangle) -> None:
        """The card's part of the staging is used up in the order of the stream, whatever is in the half."""
        card = self._staging.card
        self._device.upload(card, int(part.lines.ctypes.data), part.lines.nbytes)
        self._device.launch((_launch(view, planes_at, card, part),))

    def _fitting(self, part: Rectangle) -> Iterator[Rectangle]:
        """Cut by rows so that the first piece fits behind what is in the half; a row always fits into an empty one."""
        row, size = 0, part.lines.shape[1]
        while row < len(part.lines):
            free = self._staging.nbytes - self._used
            if free < size:
                self._send()
                continue
            rows = min(free // size, len(part.lines) - row)
            yield part._replace(first_row=part.first_row + row, lines=part.lines[row : row + rows])
            row += rows

    def _room(self, nbytes: int) -> int:
        """Where in the half so many bytes go."""
        if self._used + nbytes > self._staging.nbytes:
            self._send()
        at = self._used
        self._used += -(-nbytes // PIECE_ALIGN) * PIECE_ALIGN
        return at

    def _send(self) -> None:
        """Have the card do what the half is for, once it is done with the other one."""
        if not self._used:
            return
        self._device.wait()
        self._device.upload(self._staging.card, self._staging.half.address, min(self._used, self._staging.nbytes))
        self._device.launch(self._packs)
        for target, source, nbytes in self._copies:
            self._device.copy(target, source, nbytes)
        self._staging.turn()
        self._used, self._packs, self._copies = 0, [], []


def _cut(quant: QuantType, rectangle: Rectangle, most: int) -> Iterator[Rectangle]:
    """Pieces of at most so many bytes: of whole rows, and of some columns of one where a row alone is longer."""
    size = rectangle.lines.shape[1]
    if size <= most:
        rows = most // size
        for row in range(0, len(rectangle.lines), rows):
            yield rectangle._replace(first_row=rectangle.first_row + row, lines=rectangle.lines[row : row + rows])
        return
    blocks = most // quant.block_bytes
    for row in range(len(rectangle.lines)):
        for first in range(0, size, blocks * quant.block_bytes):
            lines = rectangle.lines[row : row + 1, first : first + blocks * quant.block_bytes]
            col = rectangle.first_col + first // quant.block_bytes * quant.block_len
            yield rectangle._replace(first_row=rectangle.first_row + row, first_col=col, lines=lines)


def _launch(view: TensorView, planes_at: int, src: int, part: Rectangle) -> Launch:
    rows, nbytes = part.lines.shape
    cols = nbytes // view.type.block_bytes * view.type.block_len
    place = quants.Part(part.first_row, part.first_col, rows, cols)
    return quants.pack(view.type, planes_at, src, view.rows, view.cols, place)


def _floats(view: TensorView, source: Source) -> Floats:
    """float32 [rows * cols] of a tensor of floats."""
    lines, found = np.zeros((view.rows, view.type.row_bytes(view.cols)), np.uint8), 0
    for each in source.rectangles(view):
        rows, nbytes = each.lines.shape
        at = view.type.row_bytes(each.first_col)
        lines[each.first_row : each.first_row + rows, at : at + nbytes] = each.lines
        found += each.lines.nbytes
    if found != view.nbytes:
        raise _wrong_length(view, found)
    data = lines.reshape(-1)
    match view.type:
        case QuantType.F32:
            return data.view(np.float32)
        case QuantType.F16:
            return data.view(np.float16).astype(np.float32)
        case _:
            return (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
