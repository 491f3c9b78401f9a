"""Float32 rows into the blocks of GGUF: what synthetic models are quantised with.

Every block is computed from its own 32 or 256 values: a scale (and a minimum) of each group from its extremes,
rounded to the type's few bits, then the nearest integers. There is no search for better scales, as converters for
real models do: the bytes are as varied as theirs and the errors a little larger, which is right for models that are
only timed. Layouts are those that `gguf.dequantize` reads back; the tests compare with it. All of it is vectorised
over blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from backends.quant import QuantType

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
SUPER = 256


def quantise(kind: QuantType, values: F32) -> U8:
    """[rows, cols] -> [rows, kind.row_bytes(cols)]. Raises ValueError for a type that is not written here."""
    rows, cols = values.shape
    if kind is QuantType.F32:
        return values.view(np.uint8)
    if kind not in QUANTISERS:
        raise ValueError(f"{kind.name} is not among {', '.join(each.name for each in QUANTISERS)}")
    blocks = QUANTISERS[kind](values.reshape(-1, kind.block_len))
    return blocks.reshape(rows, kind.row_bytes(cols))


def _over(values: F32, scale: F32) -> F32:
    """values / scale, 0 where the scale is."""
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    return values * inverse


def _half(scale: F32) -> tuple[U8, F32]:
    """A scale as the two bytes that are stored, and as the float that they mean."""
    stored = scale.astype(np.float16)
    return stored.reshape(-1, 1).view(np.uint8), stored.astype(np.float32)


def _q8_0(x: F32) -> U8:
    data, scale = _half(np.abs(x).max(axis=1) / np.float32(127))
    return np.concatenate([data, np.rint(_over(x, scale[:, None])).clip(-127, 127).astype(np.int8).view(np.uint8)], 1)


def _q4_0(x: F32) -> U8:
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], 1)[:, 0]
    data, scale = _half(extreme / np.float32(-8))
    q = (np.rint(_over(x, scale[:, None])) + 8).clip(0, 15).astype(np.uint8)
    return np.concatenate([data, q[:, :16] | q[:, 16:] << 4], 1)


_MXFP4_CODES = np.array([0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 7, 7, 7, 7, 7, 7], np.uint8)
"""Code of the magnitude whose double is the index: 0, 0.5, 1, 1.5, 2, 3, 4 and 6 have codes 0 to 7."""


def _mxfp4(x: F32) -> U8:
    """A scale is a power of two, as its biased exponent; the largest magnitude of a block comes to lie in [4, 8)."""
    _, exponent = np.frexp(np.abs(x).max(axis=1))
    exponent = exponent - 3
    doubled = np.ldexp(np.abs(x), (1 - exponent)[:, None])
    codes = _MXFP4_CODES[np.rint(doubled).clip(0, 16).astype(np.uint8)] | (x < 0).astype(np.uint8) << 3
    biased = (exponent + 127).clip(1, 254).astype(np.uint8)
    return np.concatenate([biased[:, None], codes[:, :16] | codes[:, 16:] << 4], 1)


def _affine(x: F32, levels: int, steps: int) -> tuple[U8, U8, U8, U8, U8]:
    """[blocks, groups, n] as scale * q - minimum with q <= `levels`, scales and minima as multiples (<= `steps`) of one
    half-precision float for each block. Returns both floats as bytes, the multiples of each group, and q."""
    low = np.minimum(x.min(axis=2), 0)
    scales, minima = (x.max(axis=2) - low) / np.float32(levels), -low
    d_data, d = _half(scales.max(axis=1) / np.float32(steps))
    m_data, m = _half(minima.max(axis=1) / np.float32(steps))
    scale_q = np.rint(_over(scales, d[:, None])).clip(0, steps).astype(np.uint8)
    minimum_q = np.rint(_over(minima, m[:, None])).clip(0, steps).astype(np.uint8)
    step, minimum = d[:, None] * scale_q, m[:, None] * minimum_q
    q = np.rint(_over(x + minimum[:, :, None], step[:, :, None])).clip(0, levels).astype(np.uint8)
    return d_data, m_data, scale_q, minimum_q, q


def _symmetric(x: F32, levels: int, steps: int) -> tuple[U8, npt.NDArray[np.int8], U8]:
    """[blocks, groups, 16] as scale * (q - levels) with 0 <= q < 2 * levels; the scales are signed multiples, from
    -steps to steps - 1, of one half-precision float for each block. Returns that float as bytes, the multiples, q."""
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=2)[:, :, None], 2)[:, :, 0]
    scales = extreme / np.float32(-levels)
    largest = np.take_along_axis(scales, np.abs(scales).argmax(axis=1)[:, None], 1)[:, 0]
    data, d = _half(largest / np.float32(-steps))
    scale_q = np.rint(_over(scales, d[:, None])).clip(-steps, steps - 1).astype(np.int8)
    step = d[:, None] * scale_q
    q = (np.rint(_over(x, step[:, :, None])) + levels).clip(0, 2 * levels - 1).astype(np.uint8)
    return data, scale_q, q


def _q4_k(x: F32) -> U8:
    d, m, scale, minimum, q = _affine(x.reshape(-1, 8, 32), 15, 63)
    packed = np.concatenate(
        [
            scale[:, :4] | scale[:, 4:] >> 4 << 6,
            minimum[:, :4] | minimum[:, 4:] >> 4 << 6,
            scale[:, 4:] & 15 | (minimum[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    return np.concatenate([d, m, packed, (q[:, 0::2] | q[:, 1::2] << 4).reshape(-1, 128)], 1)


def _q2_k(x: F32) -> U8:
    d, m, scale, minimum, q = _affine(x.reshape(-1, 16, 16), 3, 15)
    quarters = q.reshape(-1, 2, 4, 32)
    packed = quarters[:, :, 0] | quarters[:, :, 1] << 2 | quarters[:, :, 2] << 4 | quarters[:, :, 3] << 6
    return np.concatenate([scale | minimum << 4, packed.reshape(-1, 64), d, m], 1)


def _q3_k(x: F32) -> U8:
    data, scale, q = _symmetric(x.reshape(-1, 16, 16), 4, 32)
    quarters = q.reshape(-1, 2, 4, 32)
    low = quarters & 3
    packed = low[:, :, 0] | low[:, :, 1] << 2 | low[:, :, 2] << 4 | low[:, :, 3] << 6
    high = np.bitwise_or.reduce((q.reshape(-1, 8, 32) >> 2) << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    offset = (scale.astype(np.int16) + 32).astype(np.uint8)
    upper = (offset >> 4).reshape(-1, 4, 4)
    scales = np.concatenate(
        [
            offset[:, :8] & 15 | (offset[:, 8:] & 15) << 4,
            upper[:, 0] | upper[:, 1] << 2 | upper[:, 2] << 4 | upper[:, 3] << 6,
        ],
        axis=1,
    )
    return np.concatenate([high, packed.reshape(-1, 64), scales, data], 1)


def _q6_k(x: F32) -> U8:
    data, scale, q = _symmetric(x.reshape(-1, 16, 16), 32, 128)
    quarters = q.reshape(-1, 2, 4, 32)
    low, high = quarters & 15, quarters >> 4
    nibbles = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=2)
    pairs = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    return np.concatenate([nibbles.reshape(-1, 128), pairs.reshape(-1, 64), scale.view(np.uint8), data], 1)


QUANTISERS: dict[QuantType, Callable[[F32], U8]] = {
    QuantType.Q8_0: _q8_0,
    QuantType.Q4_0: _q4_0,
    QuantType.MXFP4: _mxfp4,
    QuantType.Q2_K: _q2_k,
    QuantType.Q3_K: _q3_k,
    QuantType.Q4_K: _q4_k,
    QuantType.Q6_K: _q6_k,
}
