"""Which form of a `Linear` each of its matrices takes, by its type, its shape and the batch's rows.

    rows        1 … few_rows_most      … library_from − 1       library_from …
    form        few                    many                     a library's product (backends.gpu.library_gemm)

Without measuring the first border is one number for a type (`few_rows_most`) and there is no second one. A bind that
measures (backends.gpu.tuning) has borders for each *shape class*: a type, and rows and columns of the matrix up to a
power of two. They are fixed for the life of a program.

Ranks may have different ones, and so may two starts: what a row gets depends on the form on its own rank alone, and
each form is within the same bounds of the oracle. Nothing that ranks exchange depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from backends.gpu.arch import Arch
from backends.gpu.ops import linear
from backends.gpu.ops.quants import FLOATS
from backends.quant import QuantType

FEW_LEAST, FEW_MOST = 2, 16
"""Bounds of the first border. Below it the matrix is read once for all rows in either form; above it the few-row form
reads it a third time. The budget foresees quantised rows up to the upper one (budget/card_work.py)."""
NEVER = 1 << 30
"""Rows from which on a library's product is taken, where it never is."""


class Matrix(Protocol):
    """`Stored` of backends.gpu.steps.base, or `TensorView`'s type and shape."""

    @property
    def quant(self) -> QuantType: ...

    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...


class ShapeClass(NamedTuple):
    """Matrices that are measured as one: of a type, whose rows and columns are at most these powers of two and more
    than half of them."""

    quant: QuantType
    outs: int
    cols: int

    @property
    def told(self) -> str:
        return f"{self.quant.name} {self.outs} x {self.cols}"


def class_of(matrix: Matrix) -> ShapeClass:
    return ShapeClass(matrix.quant, _power(matrix.rows), _power(matrix.cols))


def few_rows_most(quant: QuantType, arch: Arch) -> int:
    """Up to how many rows the few-row form is ahead where nothing was measured: where one block still takes all rows,
    so that the matrix is read once; without matrix cores the other form multiplies as this one does and its halves cost
    more, so there twice as many."""
    most = linear.VARIANTS[-1]
    return 2 * most if arch.matrix == "none" and quant not in FLOATS else most


@dataclass(frozen=True)
class Forms:
    """`few`, `library`: borders by class, `every_few`, `every_library` those of classes that are not in them (0: as
    without measuring)."""

    arch: Arch
    few: Mapping[ShapeClass, int] = field(default_factory=dict)
    library: Mapping[ShapeClass, int] = field(default_factory=dict)
    every_few: int = 0
    every_library: int = NEVER

    def few_rows_most(self, matrix: Matrix) -> int:
        found = self.few.get(class_of(matrix), self.every_few)
        return found or few_rows_most(matrix.quant, self.arch)

    def is_few(self, matrix: Matrix, rows: int) -> bool:
        return rows <= self.few_rows_most(matrix)

    def is_library(self, matrix: Matrix, rows: int) -> bool:
        """Of rows that are not few."""
        return rows >= self.library.get(class_of(matrix), self.every_library)


def possible(arch: Arch, *, library: bool) -> tuple[Forms, ...]:
    """What measuring may choose, at its ends: every kernel that any choice launches is launched by one of these."""
    ends = Forms(arch), Forms(arch, every_few=FEW_LEAST), Forms(arch, every_few=FEW_MOST)
    return (*ends, Forms(arch, every_few=FEW_LEAST, every_library=FEW_LEAST + 1)) if library else ends


def _power(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(0, number - 1).bit_length()
