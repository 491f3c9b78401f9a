"""A KV pool in NumPy, byte for byte, and what its numbers are: the layout of backends/cpu/native/kv.h, written again.

Rows are float32 [slots, kv_heads, head_dim]; slots are whole pages. A kind is f32, f16, bf16, q8_0 or f8.
"""

from __future__ import annotations

import numpy as np
from gpu_cases import Array

from backends.reference.dequant import bf16_to_f32, f32_to_bf16

PAGE = 16
BLOCK = 32
F8 = np.array([m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)])
"""What the codes 0 .. 127 stand for. The last one is never stored but for NaN."""


def codes(kind: str, x: Array) -> Array:
    """Each number by itself, in the element type of the pool. Not of q8_0."""
    if kind == "f32":
        return x
    if kind == "f16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16)
    if kind == "bf16":
        return f32_to_bf16(x)
    size = np.abs(x).astype(np.float64)
    middles = (F8[:126] + F8[1:127]) / 2
    code = np.searchsorted(middles, size)
    tie = (code < 126) & (middles[np.minimum(code, 125)] == size) & (code % 2 == 1)
    code = np.where(np.isnan(x), 127, np.minimum(code + tie, 126))
    return (code | np.signbit(x) * 128).astype(np.uint8)


def numbers(kind: str, stored: Array) -> Array:
    """The float64 that each element of `codes` stands for."""
    if kind == "bf16":
        return bf16_to_f32(stored).astype(np.float64)
    if kind == "f8":
        return np.where(stored & 128, -1.0, 1.0) * F8[stored & 127]
    return stored.astype(np.float64)


def blocks(x: Array) -> tuple[Array, Array]:
    """Of q8_0: int8 [..., dims], scales float16 [..., dims / 32]."""
    of = x.reshape(*x.shape[:-1], -1, BLOCK)
    scale = np.abs(of).max(axis=-1) / np.float32(127)
    steps = np.rint(of / np.where(scale > 0, scale, np.float32(1))[..., None])
    return np.where(np.isnan(steps), 127, steps).clip(-127, 127).astype(np.int8).reshape(x.shape), scale.astype(
        np.float16
    )


def kept(kind: str, x: Array) -> Array:
    """What the pool keeps of rows, as float64."""
    if kind != "q8_0":
        return numbers(kind, codes(kind, x))
    steps, scales = blocks(x)
    return steps.astype(np.float64) * np.repeat(scales.astype(np.float64), BLOCK, axis=-1)


def keys(kind: str, x: Array) -> Array:
    """The pool's bytes of K: [heads][pages][dims][16 slots]."""
    return _lay_keys(*(blocks(x) if kind == "q8_0" else (codes(kind, x),)))


def values(kind: str, x: Array) -> Array:
    """The pool's bytes of V: [heads][pages][16 slots][dims, padded to 16]."""
    return _lay_values(*(blocks(x) if kind == "q8_0" else (codes(kind, x),)))


def bytes_of(kind: str, slots: Array, shape: tuple[int, int, int]) -> tuple[Array, Array]:
    """Which bytes of K and of V belong to some of the slots (its padding too)."""
    stored = blocks(np.zeros(shape, np.float32)) if kind == "q8_0" else (codes(kind, np.zeros(shape, np.float32)),)
    for each in stored:
        each[slots] = np.full(each.dtype.itemsize, 0xFF, np.uint8).view(each.dtype)[0]
    return _lay_keys(*stored) == 0xFF, _lay_values(*stored, padding="edge") == 0xFF


def _lay_keys(stored: Array, scales: Array | None = None) -> Array:
    of = _paged(stored).transpose(2, 0, 3, 1)
    if scales is None:
        return _bytes(of)
    of = of.reshape(*of.shape[:2], -1, BLOCK * PAGE).view(np.uint8)
    front = _bytes(_paged(scales).transpose(2, 0, 3, 1)).reshape(*of.shape[:3], 2 * PAGE)
    return _bytes(np.concatenate([front, of], axis=3))


def _lay_values(stored: Array, scales: Array | None = None, *, padding: str = "constant") -> Array:
    of = _paged(stored).transpose(2, 0, 1, 3)
    if scales is None:
        return _bytes(np.pad(of, [(0, 0)] * 3 + [(0, -of.shape[3] % 16)], mode=padding))  # type: ignore[call-overload]
    of = of.reshape(*of.shape[:2], -1).view(np.uint8)
    front = _bytes(_paged(scales).transpose(2, 0, 3, 1)).reshape(*of.shape[:2], -1)
    return _bytes(np.concatenate([front, of], axis=2))


def _paged(x: Array) -> Array:
    """[pages, 16, heads, ...]"""
    return x.reshape(len(x) // PAGE, PAGE, *x.shape[1:])


def _bytes(x: Array) -> Array:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)
