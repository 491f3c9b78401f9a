"""Packed tensors to dense arrays.

Plain floats are read here; every blocked type goes through the `gguf` package, whose formulas are not ours: that
is what makes this backend an oracle. The package is imported on first need (it takes half a second) and only here; the
capability table says no to blocked types where it is not installed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from backends.base import TensorView
from backends.quant import QuantType

Array = npt.NDArray[np.floating]

PLAIN = frozenset({QuantType.F32, QuantType.F16, QuantType.BF16, QuantType.F64})
INTEGERS = frozenset({QuantType.I8, QuantType.I16, QuantType.I32, QuantType.I64})
"""Types of index tensors; none is a weight."""
NOT_WEIGHTS = INTEGERS | {QuantType.F8}
DEQUANTISED = frozenset(QuantType) - NOT_WEIGHTS


def dequantise(view: TensorView, dtype: npt.DTypeLike = np.float32) -> Array:
    """The tensor as `[rows, cols]` of `dtype`."""
    assert view.type in DEQUANTISED, f"{view.name} is of type {view.type.name}; bind refuses these"
    dense = _plain(view) if view.type in PLAIN else _blocked(view)
    return np.ascontiguousarray(dense.reshape(view.rows, view.cols), dtype=dtype)


def bf16_to_f32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """A bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even. NaN and infinity do not occur in what this is used for."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _plain(view: TensorView) -> Array:
    # A copy first: a mapped file promises no alignment of a tensor to its own element size.
    raw = np.frombuffer(view.data.tobytes(), dtype=np.uint8)
    if view.type is QuantType.BF16:
        return bf16_to_f32(raw.view(np.dtype("<u2")))
    formats = {QuantType.F32: "<f4", QuantType.F16: "<f2", QuantType.F64: "<f8"}
    dense: Array = raw.view(np.dtype(formats[view.type]))
    return dense


def _blocked(view: TensorView) -> Array:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = view.data.reshape(view.rows, view.type.row_bytes(view.cols))
    dense: Array = dequantize(rows, GGMLQuantizationType(view.type.gguf_id))
    return dense
