"""A bump allocator over one mapping (`backends.host.memory`), and views of native memory."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

ALIGN = 64


class Arena:
    """Addresses cut from one mapping whose size is not known until all were asked for.

    First `reserve` everything, then `place` on a mapping; `address` is valid from then on.
    """

    def __init__(self) -> None:
        self.size = 0
        self._base = 0

    def reserve(self, size: int) -> int:
        """Offset of `size` bytes, aligned for a cache line."""
        offset = self.size
        self.size += -(-size // ALIGN) * ALIGN
        return offset

    def place(self, base: int) -> None:
        self._base = base

    def address(self, offset: int) -> int:
        return self._base + offset


def doubles_at(address: int, count: int) -> npt.NDArray[np.float64]:
    """A view of native memory; it must not outlive the mapping."""
    return np.ctypeslib.as_array((ctypes.c_double * count).from_address(address))


def floats_at(address: int, count: int) -> npt.NDArray[np.float32]:
    """A view of native memory; it must not outlive the mapping."""
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))
