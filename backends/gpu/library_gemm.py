"""Products of many rows by a library: the seam, and the launches that go before it.

    halve_rows ─ dequantize_<q>_f16 of some rows of the matrix ─ the library's product ─ of the next rows ─ product …

`linear_many` unpacks a packed matrix while it multiplies. A library multiplies halves, so the matrix is unpacked into
a *slab* first, as many of its rows at a time as `SLAB_BYTES` hold; matrices of halves are taken where they lie. That
moves four times the bytes, and pays only where the library's product is that much faster than ours: with hundreds of
rows, if at all. So a class of shapes takes it only where the tuner has measured it ahead, and only after what it
computes was compared with what linear_many computes on the same card (backends.gpu.tuning).

    out[r] = scales[r] * (x[r] W^T) + bias        x halves, W halves, sums and out in single precision

A product is no launch of ours: it cannot be part of a recording, so it ends a segment (backends.gpu.recorder) and is
made between two replays, on the card's one stream.

Which library there is, HOMESERVE_GEMM says: `own` (what is not set) none, `auto` torch where it is installed and can be
used with this very card, `torch` the same, and an error where it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from backends.gpu.device import Device
from backends.gpu.errors import GpuError
from backends.gpu.launch import Launch
from backends.gpu.ops import many
from backends.gpu.ops.quants import dequantize
from backends.gpu.planes import planes
from backends.quant import QuantType

VARIABLE = "HOMESERVE_GEMM"
CHOICES = ("own", "auto", "torch")
SLAB_BYTES = 32 << 20
LINE = "library"
"""Of the ledger: the slab, and what the library took of the card for itself when it first multiplied."""
HALF_BYTES = 2


class GemmRefused(GpuError):
    """A library that was asked for cannot be had, or there is none of the name."""


@dataclass(frozen=True)
class Product:
    """out float32 [rows, outs] = scales float32 [rows] times x halves [rows, cols] times the transpose of w halves
    [outs, cols], plus bias float32 [outs] (0: none). Addresses; strides in numbers."""

    x: int
    x_stride: int
    scales: int
    w: int
    w_stride: int
    out: int
    out_stride: int
    bias: int
    rows: int
    outs: int
    cols: int


class Gemm(Protocol):
    """A library that multiplies on a card's stream. It keeps no matrix, and allocates nothing after the first product
    of the largest size but what it needs of its own."""

    title: str
    """Name and version: measurements are of one."""

    def multiply(self, product: Product) -> None:
        """Asked for in order with everything else of the device; its errors may come at the device's next `wait`.
        Raises GemmRefused for what the library does not do."""
        ...


Finder = Callable[[Device], Gemm]
"""Makes the library ready for a card. Raises GemmRefused with the reason why it cannot be used."""
Work = Launch | Product


def choice(environ: Mapping[str, str]) -> str:
    """What the user wants. Raises GemmRefused for a word that is none of CHOICES."""
    wanted = environ.get(VARIABLE, "") or CHOICES[0]
    if wanted not in CHOICES:
        raise GemmRefused(f"{VARIABLE}={wanted} is no library", fix=f"set it to one of {', '.join(CHOICES)}")
    return wanted


def linear(
    matrix: many.Matrix, x: many.Halved, rows: int, out: int, out_stride: int, bias: int, slab: int
) -> tuple[Work, ...]:
    """The same as `many.linear`, with room for SLAB_BYTES at `slab`. Raises ValueError where a line of the matrix is
    longer than that."""
    if matrix.quant is QuantType.F16:
        (plane,) = planes(matrix.quant, matrix.rows, matrix.cols)
        stride = plane.row_bytes // HALF_BYTES
        return (_product(matrix, x, rows, matrix.at, stride, 0, matrix.rows, out, out_stride, bias),)
    stride = many.padded(matrix.cols)
    each = SLAB_BYTES // (HALF_BYTES * stride)
    if not each:
        raise ValueError(f"a line of {matrix.cols} columns does not fit into {SLAB_BYTES} bytes")
    found: list[Work] = []
    for first in range(0, matrix.rows, each):
        count = min(each, matrix.rows - first)
        found.append(
            dequantize(
                *(matrix.quant, slab, matrix.at, matrix.rows, matrix.cols),
                first=first,
                count=count,
                half=True,
                stride=stride,
            )
        )
        found.append(_product(matrix, x, rows, slab, stride, first, count, out, out_stride, bias))
    return tuple(found)


def _product(
    matrix: many.Matrix,
    x: many.Halved,
    rows: int,
    w: int,
    w_stride: int,
    first: int,
    count: int,
    out: int,
    out_stride: int,
    bias: int,
) -> Product:
    """Of outputs first .. first + count, whose rows of the matrix lie at `w`."""
    here, add = out + 4 * first, bias + 4 * first if bias else 0
    return Product(x.at, x.pitch, x.scales, w, w_stride, here, out_stride, add, rows, count, matrix.cols)
