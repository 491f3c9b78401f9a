"""Anonymous memory from the native library, and a bump allocator over one mapping."""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_int32

import numpy as np
import numpy.typing as npt

ALIGN = 64

MIB = 1024 * 1024


class Mapping:
    """A zeroed mapping, aligned to 2 MiB, that costs memory only where it is touched.

    Raises MemoryError that says how much `purpose` wanted, and of what that was made.
    """

    def __init__(self, library: ctypes.CDLL, size: int, huge: bool, purpose: str, arithmetic: str) -> None:
        self.size = size
        self._library = library
        error = c_int32(0)
        # A program without weights or KV still gets an address of its own.
        address = library.hs_map(max(size, 1), int(huge), byref(error))
        if not address:
            raise MemoryError(
                f"{purpose} needs {size} bytes ({size / MIB:.1f} MiB) = {arithmetic}, and the system refused:"
                f" {os.strerror(error.value)}"
            )
        self.address: int = address

    def close(self) -> None:
        if self.address:
            self._library.hs_unmap(self.address, max(self.size, 1))
            self.address = 0


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
