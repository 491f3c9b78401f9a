"""KV pools of the reference backend: one K and one V array per layer, rows addressed by slot.

    layer i:  k [slots, kv_heads, head_dim]   v [slots, kv_heads, head_dim]

F32 is kept as the backend's own dtype (so that float64 stays float64 throughout). F16 and BF16 are stored as such.
What Q8_0 and F8 can express is what is stored, in the backend's dtype and without the packing: the numbers that come
back are those of a packed pool, its memory is not.

    Q8_0   32 values of a head (its last block may be shorter) share a scale, the largest magnitude / 127 rounded to 16
           bits; each is the nearest whole number of scales within +-127
    F8     4 bits of exponent, 3 of mantissa: the nearest such number, at most 448
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from backends.base import PAGE_LEN, KvPool
from backends.quant import QuantType
from backends.reference.compute import Array, Ints
from backends.reference.dequant import bf16_to_f32, f32_to_bf16

POOL_TYPES = (QuantType.F32, QuantType.F16, QuantType.BF16, QuantType.Q8_0, QuantType.F8)
BLOCK = 32
F8_MAX = 448.0
F8_EXPONENT_MIN = -6
F8_MANTISSA_BITS = 3


def pool_bytes(kv: KvPool, dtype: np.dtype[np.floating]) -> int:
    """Bytes that the pools of `kv` take in this backend."""
    numbers = sum(2 * layer.kv_heads * layer.head_dim * kv.group_slots[layer.group] for layer in kv.layers)
    return numbers * _storage(kv.type, dtype).itemsize


class Pools:
    """Every attention layer's K and V rows."""

    def __init__(self, kv: KvPool, dtype: np.dtype[np.floating]) -> None:
        assert kv.type in POOL_TYPES and not any(slots % PAGE_LEN for slots in kv.group_slots)
        self.type = kv.type
        self.dtype = dtype
        self.itemsize = _storage(kv.type, dtype).itemsize
        self.groups = tuple(layer.group for layer in kv.layers)
        shapes = [(kv.group_slots[layer.group], layer.kv_heads, layer.head_dim) for layer in kv.layers]
        storage = _storage(kv.type, dtype)
        self.k = [np.zeros(shape, storage) for shape in shapes]
        self.v = [np.zeros(shape, storage) for shape in shapes]

    def store(self, layer: int, slots: Ints, k: Array, v: Array) -> None:
        """Write rows k, v `[rows, kv_heads, head_dim]` at `slots`."""
        self.k[layer][slots] = self._pack(k)
        self.v[layer][slots] = self._pack(v)

    def rows(self, layer: int, slots: Ints) -> tuple[Array, Array]:
        """K and V rows at `slots`, `[len(slots), kv_heads, head_dim]` of the backend's dtype."""
        return self._unpack(self.k[layer][slots]), self._unpack(self.v[layer][slots])

    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.k, *self.v))

    def _pack(self, values: Array) -> npt.NDArray[np.generic]:
        match self.type:
            case QuantType.BF16:
                return f32_to_bf16(values.astype(np.float32))
            case QuantType.Q8_0:
                return round_q8_0(values)
            case QuantType.F8:
                return round_f8(values)
        return values.astype(_storage(self.type, self.dtype))

    def _unpack(self, stored: npt.NDArray[np.generic]) -> Array:
        dense = bf16_to_f32(stored.view(np.uint16)) if self.type is QuantType.BF16 else stored
        return dense.astype(self.dtype)


def round_q8_0(values: Array) -> Array:
    """What Q8_0 keeps of rows `[..., head_dim]`, in the same dtype."""
    rounded = np.empty_like(values)
    for first in range(0, values.shape[-1], BLOCK):
        block = values[..., first : first + BLOCK].astype(np.float32)
        scale = np.abs(block).max(axis=-1, keepdims=True) / np.float32(127)
        steps = np.rint(block / np.where(scale > 0, scale, 1))
        rounded[..., first : first + BLOCK] = steps * scale.astype(np.float16).astype(np.float32)
    return rounded


def round_f8(values: Array) -> Array:
    """The nearest 8-bit float (4 of exponent, 3 of mantissa) of each value, ties to even, held within +-448."""
    _, exponent = np.frexp(values)
    step = np.ldexp(values.dtype.type(1), np.maximum(exponent - 1, F8_EXPONENT_MIN) - F8_MANTISSA_BITS)
    held: Array = np.clip(np.rint(values / step) * step, -F8_MAX, F8_MAX)
    return held.astype(values.dtype)


def slots_of(table: Ints, first: int, end: int) -> Ints:
    """Slots of positions first..end of a sequence whose pages are `table`."""
    positions = np.arange(first, end, dtype=np.int32)
    pages = table[positions // PAGE_LEN]
    assert not (pages < 0).any(), f"positions {first} to {end} reach back to pages that are nobody's"
    slots: Ints = pages * PAGE_LEN + positions % PAGE_LEN
    return slots


def slots_here(table: Ints, first: int, end: int) -> Ints:
    """Those of `slots_of` whose pages lie on this rank: pages of -1 are passed over."""
    positions = np.arange(first, end, dtype=np.int32)
    here = positions[table[positions // PAGE_LEN] >= 0]
    slots: Ints = table[here // PAGE_LEN] * PAGE_LEN + here % PAGE_LEN
    return slots


def _storage(kind: QuantType, dtype: np.dtype[np.floating]) -> np.dtype[np.generic]:
    stored: dict[QuantType, np.dtype[np.generic]] = {
        QuantType.F16: np.dtype(np.float16),
        QuantType.BF16: np.dtype(np.uint16),
    }
    return stored.get(kind, np.dtype(dtype))
