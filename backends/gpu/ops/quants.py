"""Launches that make, read and feed packed matrices on a card.

    pack_<type>                 rows as they lie in the file, in a staging buffer, become planes (planes.py)
    dequantize_<type>_f32|_f16  planes become rows of floats, for a library's matrix product
    embed_rows_<type>           EmbedRows
    quantize_rows               float rows become blocks of int16 in two planes of bytes, for packed matrices

Addresses are those of device memory, `w` of a matrix always its planes. Floats are matrices too: one plane.
"""

from __future__ import annotations

from typing import NamedTuple

from backends.gpu import planes
from backends.gpu.launch import Launch, Param, Symbol, params
from backends.gpu.ops.buffers import PLANES, Planes, Rows, symbol
from backends.quant import QuantType

PACKED = tuple(planes.ORDERS)
FLOATS = tuple(planes.FLOATS)
MATRICES = FLOATS + PACKED
"""All types that a matrix may have on a card."""

GROUP = 32
"""Neighbours of a row that a thread takes."""
PACK_THREADS = 256
ROW_THREADS = 128
QUANTIZE_COLS = 1024
"""Columns of a row that a block of quantize_rows takes: 256 threads, four each."""


def tag(quant: QuantType) -> str:
    """A type's name in symbols and for -DQUANT."""
    return quant.name.lower()


def quantised_bytes(rows: int, width: int) -> tuple[int, int, int, int]:
    """The lengths of the four arrays of `buffers.Planes`. `width` is a multiple of 32."""
    return rows * width, rows * width, rows * width // 8, rows * width // 4


_PACK = params("planes, src, i32 matrix_rows, i32 cols, i32 first_row, i32 first_col, i32 rows, i32 cols_here,"
               " i64 src_row_bytes")  # fmt: skip
_DEQUANTIZE = params("out, w, i32 matrix_rows, i32 cols, i32 first_row, i32 rows, i32 out_stride")
_EMBED = params("out, table, tokens, i32 table_rows, i32 cols, i32 first, i32 out_stride, float scale")


def _of_types(
    file: str, op: str, parameters: tuple[Param, ...], threads: int, variant: str = ""
) -> dict[QuantType, Symbol]:
    return {
        quant: Symbol(f"{file}_{tag(quant)}{variant}", file, op, parameters, threads, (quant.name,), tag(quant))
        for quant in MATRICES
    }


PACK = _of_types("pack", "pack", _PACK, PACK_THREADS)
DEQUANTIZE = {to: _of_types("dequantize", "Linear", _DEQUANTIZE, ROW_THREADS, f"_{to}") for to in ("f32", "f16")}
EMBED_ROWS = _of_types("embed_rows", "EmbedRows", _EMBED, ROW_THREADS)
QUANTIZE_ROWS = symbol("quantize_rows", "quantize_rows", "Linear", f"src, i32 src_stride, {PLANES}, i32 width", 256)
SYMBOLS = (
    *PACK.values(),
    *DEQUANTIZE["f32"].values(),
    *DEQUANTIZE["f16"].values(),
    *EMBED_ROWS.values(),
    QUANTIZE_ROWS,
)


class Part(NamedTuple):
    """A rectangle of a matrix, of whole blocks of columns."""

    first_row: int
    first_col: int
    rows: int
    cols: int


def pack(quant: QuantType, w: int, src: int, rows: int, cols: int, part: Part, src_row_bytes: int = 0) -> Launch:
    """`src`: the part's first byte, its rows `src_row_bytes` apart, without that one after the other. The matrix is
    [rows, cols]. Raises ValueError for a part that is not of whole blocks or lies outside."""
    row_bytes = quant.row_bytes(part.cols)
    if part.first_col % quant.block_len:
        raise ValueError(f"column {part.first_col} is within a block of {quant.name}")
    if part.first_row + part.rows > rows or part.first_col + part.cols > cols:
        raise ValueError(f"{part} is no part of a matrix of {rows} times {cols}")
    if quant in planes.FLOATS:
        padded = planes.planes(quant, rows, cols)[0].row_bytes // planes.FLOATS[quant]
        items = part.rows * (padded - part.first_col if part.first_col + part.cols == cols else part.cols)
    else:
        items = part.rows * part.cols // GROUP
    grid = (blocks(items, PACK_THREADS), 1, 1)
    place = (part.first_row, part.first_col, part.rows, part.cols)
    return Launch(PACK[quant], grid, (w, src, rows, cols, *place, src_row_bytes or row_bytes))


def dequantize(
    quant: QuantType, out: int, w: int, rows: int, cols: int, *, first: int = 0, count: int, half: bool, stride: int = 0
) -> Launch:
    """Rows first .. first + count of a matrix of [rows, cols], as float32 or `half`, in lines `stride` apart."""
    symbol = DEQUANTIZE["f16" if half else "f32"][quant]
    grid = (blocks(count * blocks(cols, GROUP), ROW_THREADS), 1, 1)
    return Launch(symbol, grid, (out, w, rows, cols, first, count, stride or cols))


def embed_rows(
    quant: QuantType, out: int, table: int, tokens: int, *, count: int, rows: int, cols: int,
    first: int = 0, scale: float = 1.0, stride: int = 0,
) -> Launch:  # fmt: skip
    """`tokens`: int32 [count]; the table has `rows` rows, the vocabulary's from `first` on."""
    grid = (blocks(cols, GROUP * ROW_THREADS), count, 1)
    return Launch(EMBED_ROWS[quant], grid, (out, table, tokens, rows, cols, first, stride or cols, scale))


def quantize_rows(src: Rows, to: Planes, rows: int, width: int) -> Launch:
    """float32 [rows, width]; `width` is a multiple of 32."""
    to.check(width)
    return Launch(QUANTIZE_ROWS, (blocks(width, QUANTIZE_COLS), rows, 1), (src.at, src.stride, *to.addresses, width))


def blocks(count: int, each: int) -> int:
    return -(-count // each)
