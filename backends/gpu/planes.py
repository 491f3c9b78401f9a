"""How a matrix lies on a card: the bits of the file, sorted into planes.

A block of a packed file is 17 to 210 bytes long, so hardly anything in it is aligned, and each type has an order of its
own. A card reads 16 aligned bytes with one instruction of a lane, and reads well only if neighbouring lanes read
neighbouring bytes. So a matrix is packed once, when it is loaded: its bits are sorted, none is added or lost. Each
kind of field gets a plane, and a plane is a matrix of bytes by itself, rows after one another:

    ┌───────────────────────────┐ ┌───────────┐ ┌─────┐
    │ low bits, row 0           │ │ high bits │ │ d   │      each plane begins on a multiple of 128 bytes
    │ low bits, row 1           │ │           │ │     │
    │ …                         │ │           │ │     │
    └───────────────────────────┘ └───────────┘ └─────┘
      16 bytes for 32 weights       4 or 8        2 for a block      (of a type of 4 bits and more)

A shard of rows is one run of bytes in each plane, a shard of columns (whole blocks) a run of each row of each plane.

Within a plane, bits lie such that a lane makes 32 signed bytes, in the order of the row, with few instructions
(quants.h). For the weights 0 .. 31 of a group:

    four bits   16 bytes   byte j: weight j below, weight j + 16 above           all types of 4 bits and more
    two bits     8 bytes   byte j of word i, bits 2k, 2k + 1: weight 16i + 4k + j    Q2_K Q3_K TQ2_0, upper two of Q6_K
    one bit      4 bytes   bit 8j + k: weight 4k + j                             fifth of Q5, third of Q3_K
    eight bits  16 + 16    weights 0 .. 15 in one plane, 16 .. 31 in the next    Q8_0

What a block has of scales:

    d or d, m            as in the file                                        Q4_0 Q5_0 Q8_0 IQ4_NL; Q4_1 Q5_1
    Q4_K, Q5_K           16 bytes  d │ dmin │ lower 4 of 8 scales │ lower 4 of 8 mins │ upper 2 of scales, of mins
    Q3_K                 12 bytes  lower 4 of 16 scales │ upper 2 of 16 scales;  d in a plane of its own
    Q2_K, Q6_K           16 bytes, one for 16 weights;  d (and dmin) in a plane of its own
    IQ4_XS                8 bytes  d │ upper 2 of 8 scales │ lower 4 of them, as in the file
    MXFP4, NVFP4         one byte for 32, for 16 weights

Types whose weights are numbers of a table keep the file's bytes and only part company by size: `SPLITS`.

Floats have one plane; a row is padded with zeros to 16 bytes, which only rows of odd lengths need.

Everything here is a permutation of bits, written as a list of the file's bit numbers in the order of the planes. Slow
and obvious: tests check the kernel `pack_<type>` against it, and it against the permutation's own inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from backends.quant import QuantType

Bytes = npt.NDArray[np.uint8]
Where = Callable[[int], tuple[int, int]]
"""Of weight e: the byte of the file's block and the lowest bit in it."""

PLANE_ALIGN = 128
"""Bytes. Every plane begins on a multiple of it: quants.h has the same number."""
FLOATS = {QuantType.F32: 4, QuantType.F16: 2, QuantType.BF16: 2}
FLOAT_ALIGN = 16


class Plane(NamedTuple):
    """A plane of a matrix: where it begins, how long a row is."""

    at: int
    row_bytes: int


def planes(quant: QuantType, rows: int, cols: int) -> tuple[Plane, ...]:
    """Raises ValueError where a row is no whole number of blocks, KeyError for a type that cards do not take."""
    found: list[Plane] = []
    at = 0
    for row_bytes in _row_bytes(quant, cols):
        found.append(Plane(at, row_bytes))
        at = aligned(at + rows * row_bytes)
    return tuple(found)


def matrix_bytes(quant: QuantType, rows: int, cols: int) -> int:
    """What a matrix takes on a card: the file's bytes and at most 127 more for each plane."""
    last = planes(quant, rows, cols)[-1]
    return aligned(last.at + rows * last.row_bytes)


def aligned(count: int) -> int:
    return -(-count // PLANE_ALIGN) * PLANE_ALIGN


def row_runs(quant: QuantType, rows: int, cols: int, first: int, count: int) -> Iterator[tuple[int, int]]:
    """Where rows first .. first + count lie: the offset and length of a run in each plane."""
    for plane in planes(quant, rows, cols):
        yield plane.at + first * plane.row_bytes, count * plane.row_bytes


def _row_bytes(quant: QuantType, cols: int) -> tuple[int, ...]:
    if quant in FLOATS:
        return (-(-cols * FLOATS[quant] // FLOAT_ALIGN) * FLOAT_ALIGN,)
    quant.row_bytes(cols)  # whole blocks, or its error
    return tuple(size * (cols // quant.block_len) for size in block_bytes(quant))


def block_bytes(quant: QuantType) -> tuple[int, ...]:
    """Bytes of a block in each plane of a packed type."""
    return tuple(bits.size // 8 for bits in _orders(quant))


def pack(quant: QuantType, data: Bytes, rows: int, cols: int) -> Bytes:
    """The bytes on the card of a matrix as it lies in the file; gaps are zeros."""
    out = np.zeros(matrix_bytes(quant, rows, cols), np.uint8)
    if quant in FLOATS:
        parts = [data.reshape(rows, -1)]
    else:
        blocks = data.reshape(rows, cols // quant.block_len, quant.block_bytes)
        bits = np.unpackbits(blocks, axis=2, bitorder="little")
        parts = [np.packbits(bits[:, :, order], axis=2, bitorder="little") for order in _orders(quant)]
    for plane, part in zip(planes(quant, rows, cols), parts, strict=True):
        lines = out[plane.at : plane.at + rows * plane.row_bytes].reshape(rows, plane.row_bytes)
        lines[:, : part[0].size] = part.reshape(rows, -1)
    return out


def unpack(quant: QuantType, data: Bytes, rows: int, cols: int) -> Bytes:
    """The inverse of `pack`: the matrix as in the file."""
    lines = [data[p.at : p.at + rows * p.row_bytes].reshape(rows, p.row_bytes) for p in planes(quant, rows, cols)]
    if quant in FLOATS:
        return np.ascontiguousarray(lines[0][:, : cols * FLOATS[quant]]).reshape(-1)
    shape = (rows, cols // quant.block_len, -1)
    bits = np.concatenate([np.unpackbits(line.reshape(shape), axis=2, bitorder="little") for line in lines], axis=2)
    inverse = np.argsort(np.concatenate(_orders(quant)))
    return np.packbits(bits[:, :, inverse], axis=2, bitorder="little").reshape(-1)


# --------------------------------------------------------------------------------------------- orders of a block's bits

Order = list[int]


def _bits(byte: int, bit: int, count: int) -> Order:
    return [8 * byte + bit + i for i in range(count)]


def _whole(first: int, count: int) -> Order:
    """Bytes of the file as they are."""
    return _bits(first, 0, 8 * count)


def _fours(low: Where, length: int) -> Order:
    """`low`: where the four bits of a weight are."""
    order: Order = []
    for first in range(0, length, 32):
        for j in range(16):
            order += _bits(*low(first + j), 4) + _bits(*low(first + j + 16), 4)
    return order


def _twos(where: Where, length: int) -> Order:
    order: Order = []
    for first in range(0, length, 16):
        for j in range(4):
            for k in range(4):
                order += _bits(*where(first + 4 * k + j), 2)
    return order


def _ones(where: Where, length: int) -> Order:
    order: Order = []
    for first in range(0, length, 32):
        for j in range(4):
            for k in range(8):
                order += _bits(*where(first + 4 * k + j), 1)
    return order


def _halves(first: int) -> Where:
    """Four bits as in the blocks of 32: byte e mod 16, weights 0 .. 15 below."""
    return lambda e: (first + e // 32 * 16 + e % 16, e % 32 // 16 * 4)


def _quarters(first: int) -> Where:
    """Two bits as in the K types: 128 weights in 32 bytes."""
    return lambda e: (first + e // 128 * 32 + e % 32, e % 128 // 32 * 2)


def _pairs(first: int) -> Where:
    """Four bits as in Q4_K: 64 weights in 32 bytes."""
    return lambda e: (first + e // 64 * 32 + e % 32, e % 64 // 32 * 4)


def _of_32(quants: int, *fields: Order) -> Callable[[], list[Order]]:
    return lambda: [_fours(_halves(quants), 32), *fields]


def _fifths(first: int) -> Order:
    return _ones(lambda e: (first + e // 8, e % 8), 32)


def _scales_of_six(at: int) -> Order:
    """d │ dmin │ 12 bytes, as reference tables draw them: lower fours of scales, of mins, upper twos of both."""
    packed = at + 4
    order = _whole(at, 4)
    for j in range(8):  # lower four of the scales
        order += _bits(packed + (j if j < 4 else j + 4), 0, 4)
    for j in range(8):  # of the mins
        order += _bits(packed + j + 4, 0 if j < 4 else 4, 4)
    for j in range(8):
        order += _bits(packed + j, 4, 2) if j < 4 else _bits(packed + j - 4, 6, 2)
    for j in range(8):
        order += _bits(packed + j + 4, 4, 2) if j < 4 else _bits(packed + j, 6, 2)
    return order


def _q3_k() -> list[Order]:
    scales: Order = []
    for i in range(16):
        scales += _bits(96 + i % 8, i // 8 * 4, 4)
    for i in range(16):
        scales += _bits(104 + i % 4, i // 4 * 2, 2)
    return [_twos(_quarters(32), 256), _ones(lambda e: (e % 32, e // 32), 256), scales, _whole(108, 2)]


def _q6_k() -> list[Order]:
    def low(e: int) -> tuple[int, int]:
        return e // 128 * 64 + e % 64, e % 128 // 64 * 4

    return [_fours(low, 256), _twos(_quarters(128), 256), _whole(192, 16), _whole(208, 2)]


def _nvfp4() -> list[Order]:
    return [_fours(lambda e: (4 + e // 16 * 8 + e % 8, e % 16 // 8 * 4), 64), _whole(0, 4)]


def _iq2_s() -> list[Order]:
    """Indices and signs of a group side by side, so are the upper index bits and the scales."""
    near: Order = []
    rest: Order = []
    for g in range(8):
        near += _whole(2 + 4 * g, 4) + _whole(34 + 4 * g, 4)
        rest += _whole(66 + g, 1) + _whole(74 + g, 1)
    return [near, rest, _whole(0, 2)]


def _split(*fields: tuple[int, int]) -> Callable[[], list[Order]]:
    return lambda: [_whole(first, count) for first, count in fields]


SPLITS: dict[QuantType, Callable[[], list[Order]]] = {
    QuantType.TQ1_0: _split((0, 52), (52, 2)),
    QuantType.IQ2_XXS: _split((2, 64), (0, 2)),
    QuantType.IQ2_XS: _split((2, 64), (66, 8), (0, 2)),
    QuantType.IQ3_XXS: _split((2, 64), (66, 32), (0, 2)),
    QuantType.IQ1_S: _split((2, 32), (34, 16), (0, 2)),
    QuantType.IQ1_M: _split((0, 32), (32, 16), (48, 8)),
}
"""Fields of the file's block (first byte, length), each a plane."""

ORDERS: dict[QuantType, Callable[[], list[Order]]] = {
    QuantType.Q4_0: _of_32(2, _whole(0, 2)),
    QuantType.Q4_1: _of_32(4, _whole(0, 4)),
    QuantType.Q5_0: _of_32(6, _fifths(2), _whole(0, 2)),
    QuantType.Q5_1: _of_32(8, _fifths(4), _whole(0, 4)),
    QuantType.Q8_0: _split((2, 16), (18, 16), (0, 2)),
    QuantType.IQ4_NL: _of_32(2, _whole(0, 2)),
    QuantType.MXFP4: _of_32(1, _whole(0, 1)),
    QuantType.NVFP4: _nvfp4,
    QuantType.Q2_K: lambda: [_twos(_quarters(16), 256), _whole(0, 16), _whole(80, 4)],
    QuantType.Q3_K: _q3_k,
    QuantType.Q4_K: lambda: [_fours(_pairs(16), 256), _scales_of_six(0)],
    QuantType.Q5_K: lambda: [
        _fours(_pairs(48), 256),
        _ones(lambda e: (16 + e % 32, e // 32), 256),
        _scales_of_six(0),
    ],
    QuantType.Q6_K: _q6_k,
    QuantType.IQ4_XS: lambda: [_fours(_halves(8), 256), _whole(0, 8)],
    QuantType.TQ2_0: lambda: [_twos(_quarters(0), 256), _whole(64, 2)],
    QuantType.IQ2_S: _iq2_s,
    QuantType.IQ3_S: lambda: [
        _whole(2, 64),
        _whole(74, 32),
        _whole(66, 8) + _whole(106, 4),
        _whole(0, 2),
    ],
    **SPLITS,
}
"""Of each packed type: the bits of its planes, as numbers of the bits of a block in the file."""


@cache
def _orders(quant: QuantType) -> list[npt.NDArray[np.intp]]:
    return [np.array(order, np.intp) for order in ORDERS[quant]()]
