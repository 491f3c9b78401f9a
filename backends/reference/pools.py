"""KV pools of the reference backend: one K and one V array per layer, rows addressed by slot.

    layer i:  k [slots, kv_heads, head_dim]   v [slots, kv_heads, head_dim]     of the pool's type

F32 is kept as the backend's own dtype (so that float64 stays float64 throughout); F16 and BF16 are rounded on the way
in, as every backend's pool of that type must.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from backends.base import PAGE_LEN, KvPool
from backends.quant import QuantType
from backends.reference.compute import Array, Ints
from backends.reference.dequant import bf16_to_f32, f32_to_bf16

POOL_TYPES = (QuantType.F32, QuantType.F16, QuantType.BF16)


def pool_bytes(kv: KvPool, dtype: np.dtype[np.floating]) -> int:
    """Bytes that the pools of `kv` take in this backend."""
    per_slot = sum(2 * layer.kv_heads * layer.head_dim for layer in kv.layers)
    return kv.slots * per_slot * _storage(kv.type, dtype).itemsize


class Pools:
    """Every attention layer's K and V rows."""

    def __init__(self, kv: KvPool, dtype: np.dtype[np.floating]) -> None:
        assert kv.type in POOL_TYPES and kv.slots % PAGE_LEN == 0
        self.type = kv.type
        self.dtype = dtype
        shapes = [(kv.slots, layer.kv_heads, layer.head_dim) for layer in kv.layers]
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
        if self.type is QuantType.BF16:
            return f32_to_bf16(values.astype(np.float32))
        return values.astype(_storage(self.type, self.dtype))

    def _unpack(self, stored: npt.NDArray[np.generic]) -> Array:
        dense = bf16_to_f32(stored.view(np.uint16)) if self.type is QuantType.BF16 else stored
        return dense.astype(self.dtype)


def slots_of(table: Ints, first: int, end: int) -> Ints:
    """Slots of positions first..end of a sequence whose pages are `table`."""
    positions = np.arange(first, end, dtype=np.int32)
    slots: Ints = table[positions // PAGE_LEN] * PAGE_LEN + positions % PAGE_LEN
    return slots


def _storage(kind: QuantType, dtype: np.dtype[np.floating]) -> np.dtype[np.generic]:
    if kind is QuantType.F32:
        return np.dtype(dtype)
    return np.dtype(np.float16 if kind is QuantType.F16 else np.uint16)
