"""Memory that does not keep what is written to it: pages that are one and the same, so the later store takes the
earlier one's place. For tests that what was stored is read back."""

from __future__ import annotations

import ctypes
import mmap
import os

PAGE = mmap.PAGESIZE
MAP_FIXED = 0x10


def make_one(*addresses: int) -> None:
    """The mapped pages at these addresses become one page of zeros."""
    system = ctypes.CDLL(None, use_errno=True).mmap
    system.restype = ctypes.c_void_p
    system.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    fd = os.memfd_create("one page")
    try:
        os.ftruncate(fd, PAGE)
        for address in addresses:
            assert address % PAGE == 0
            found = system(address, PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, fd, 0)
            assert found == address, os.strerror(ctypes.get_errno())
    finally:
        os.close(fd)
