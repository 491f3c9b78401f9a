"""Which weights a program uses, as what each is stored, and where it lies.

    matrix        packed in R16
    vector        floats
    transposed    floats, columns first
    stack         the same rows of every expert, each expert's packed in R16
    stack bias    floats, each expert's padded to 16

Offsets are cut from one arena, in the order of the ops. Where ranks share memory (`backends.cpu.shared`) a weight may
lie in the arena of all of them instead: as a part of a larger one, in one or more runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from backends.base import (
    Attention,
    DeltaNet,
    EmbedRows,
    ExpertMatrix,
    Experts,
    Linear,
    MergeAttention,
    Norm,
    Op,
    RopeStore,
    Scale,
    TensorView,
    Weight,
)
from backends.cpu import experts
from backends.cpu.memory import Arena
from backends.cpu.widths import FLOAT_BYTES, padded

MATRIX = "matrix"
VECTOR = "vector"
TRANSPOSED = "transposed"
STACK = "stack"
STACK_BIAS = "stack bias"


@dataclass(frozen=True)
class StoredRun:
    """Rows `first` .. of a weight, `count` of them, from `offset` of the arena on."""

    first: int
    count: int
    offset: int


@dataclass(frozen=True)
class StoredWeight:
    """A weight of the program. `arena` is where its `runs` lie. A stack has one run, which is that of its first expert,
    and `expert_bytes` from one to the next. `stored_cols`: of a matrix that lies in a wider one, how wide that is."""

    view: TensorView
    form: str
    arena: Arena
    runs: tuple[StoredRun, ...]
    size: int
    rows: ExpertMatrix | None = None
    expert_bytes: int = 0
    stored_cols: int = 0

    @property
    def offset(self) -> int:
        return self.runs[0].offset

    @property
    def address(self) -> int:
        """Of its first run, once the arena is placed."""
        return self.arena.address(self.offset)

    @property
    def source_bytes(self) -> int:
        """Bytes of the checkpoint that it holds."""
        if self.rows is None:
            return self.view.nbytes
        return self.view.nbytes // self.rows.pitch * self.rows.height


class Elsewhere(Protocol):
    """Weights that lie in memory which others fill as well."""

    def find(self, view: TensorView, form: str, rows: ExpertMatrix | None) -> StoredWeight | None:
        """Where a weight lies there; None: nowhere, or not in a form that can be used."""
        ...


class StoredWeights:
    """The weights of `ops`, by name (a stack by `experts.stack_name`). Raises ValueError where a tensor is not what an
    op wants."""

    def __init__(
        self,
        library: ctypes.CDLL,
        ops: Sequence[Op],
        weights: Mapping[str, TensorView],
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self.arena = Arena()
        self.by_name: dict[str, StoredWeight] = {}
        self._library = library
        self._weights = weights
        self._elsewhere = elsewhere
        for op in ops:
            for weight, form in _weights_of(op):
                self._store(weight, form)
            if isinstance(op, Experts):
                experts.check(op)
                for matrix in experts.matrices_of(op):
                    self._store_stack(matrix)

    @property
    def own(self) -> list[StoredWeight]:
        """Those that lie in the arena of this program."""
        return [stored for stored in self.by_name.values() if stored.arena is self.arena]

    def _store(self, weight: Weight, form: str) -> None:
        view = self._weights[weight.name]
        if (view.rows, view.cols) != (weight.rows, weight.cols):
            raise ValueError(
                f"{weight.name} is [{view.rows}, {view.cols}], the op wants [{weight.rows}, {weight.cols}]"
            )
        known = self.by_name.get(weight.name)
        if known is not None:
            if known.form != form:
                raise ValueError(f"{weight.name} is used as a matrix and as a vector")
            return
        self._keep(weight.name, view, form, self._size(view, form, weight.name))

    def _size(self, view: TensorView, form: str, name: str) -> int:
        if form in (VECTOR, TRANSPOSED):
            return padded(view.rows * view.cols) * FLOAT_BYTES
        return self._packed_bytes(view, view.rows, name)

    def _packed_bytes(self, view: TensorView, rows: int, name: str) -> int:
        size: int = self._library.hs_packed_bytes(view.type.gguf_id, rows, view.cols)
        if size == 0:
            raise ValueError(f"{name}: {view.cols} columns are no whole number of {view.type.name} blocks")
        return size

    def _store_stack(self, matrix: ExpertMatrix) -> None:
        view, name = self._weights[matrix.weight.name], experts.stack_name(matrix)
        if (view.rows, view.cols) != (matrix.weight.rows, matrix.weight.cols):
            raise ValueError(
                f"{view.name} is [{view.rows}, {view.cols}], the op wants [{matrix.weight.rows}, {matrix.weight.cols}]"
            )
        count = view.rows // matrix.pitch
        if name not in self.by_name:
            each = self._packed_bytes(view, matrix.height, name)
            self._keep(name, view, STACK, count * each, matrix, each)
        if matrix.bias is not None and f"{name}.bias" not in self.by_name:
            bias = self._weights[matrix.bias.name]
            if (bias.rows, bias.cols) != (1, view.rows):
                raise ValueError(f"{bias.name} is [{bias.rows}, {bias.cols}], the op wants [1, {view.rows}]")
            size = count * padded(matrix.height) * FLOAT_BYTES
            self._keep(f"{name}.bias", bias, STACK_BIAS, size, matrix)

    def _keep(
        self,
        name: str,
        view: TensorView,
        form: str,
        size: int,
        rows: ExpertMatrix | None = None,
        expert_bytes: int = 0,
    ) -> None:
        found = self._elsewhere.find(view, form, rows) if self._elsewhere is not None else None
        if found is None:
            run = StoredRun(0, view.rows, self.arena.reserve(size))
            found = StoredWeight(view, form, self.arena, (run,), size, rows, expert_bytes)
        self.by_name[name] = found


def _weights_of(op: Op) -> Iterator[tuple[Weight, str]]:
    match op:
        case EmbedRows(table=table):
            yield table, MATRIX
        case Linear(parts=parts):
            for part in parts:
                yield part.weight, MATRIX
                if part.bias is not None:
                    yield part.bias, VECTOR
        case Norm(weight=weight) | Scale(weight=weight):
            yield weight, VECTOR
        case RopeStore(q_norm=q_norm, k_norm=k_norm):
            yield from ((norm, VECTOR) for norm in (q_norm, k_norm) if norm is not None)
        case Attention(sinks=sinks) | MergeAttention(sinks=sinks):
            if sinks is not None:
                yield sinks, VECTOR
        case Experts():
            yield from ((vector, VECTOR) for vector in experts.vectors_of(op))
        case DeltaNet(conv=conv):
            yield conv, TRANSPOSED
            yield from ((vector, VECTOR) for vector in (op.dt_bias, op.a, op.norm))
