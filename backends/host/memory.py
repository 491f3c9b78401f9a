"""Memory of the host: anonymous mappings that are reserved, held and given back, and memory that ranks share.

A team that commits is of the same library as the mapping (`backends.host.team`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from ctypes import byref, c_int32

import numpy as np

from backends.base import LoadProgress

MIB = 1024 * 1024
HUGE_PAGE = 2 * MIB

COMMIT_BYTES = 256 * MIB
"""What is made resident in one call: progress is told between two of them."""


class Mapping:
    """A zeroed mapping in huge pages, aligned to 2 MiB, that costs memory only where it is touched or committed. Its
    neighbours are pages without access, so that it is a line of its own in /proc/PID/smaps.

    Raises MemoryError that says how much `purpose` wanted, and of what that was made.
    """

    def __init__(self, library: ctypes.CDLL, size: int, purpose: str, arithmetic: str) -> None:
        self.size = size
        self.purpose = purpose
        self.arithmetic = arithmetic
        self._library = library
        error = c_int32(0)
        # A program without weights or KV still gets an address of its own.
        address = library.hs_map(max(size, 1), 1, f"homeserve-{purpose}".encode(), byref(error))
        if not address:
            raise self._refused(error.value)
        self.address: int = address

    @property
    def filled_here(self) -> int:
        """Bytes of it that this process makes resident."""
        return self.size

    def commit(self, team: int, progress: LoadProgress) -> None:
        """Have the system hold all of it now, so that memory that lacks is known here and not at some later touch.
        Raises MemoryError."""
        error = committed(self._library, team, self.address, self.size, lambda done: self._tell(progress, done))
        if error:
            raise self._refused(error)

    def release(self) -> None:
        """Give its pages back to the system, those behind its end too: a huge page is held whole. The address stays,
        and reads as zeros. Raises OSError."""
        error = self._library.hs_release(self.address, -(-max(self.size, 1) // HUGE_PAGE) * HUGE_PAGE)
        if error:
            raise OSError(error, f"{self.size} bytes of {self.purpose} could not be given back: {os.strerror(error)}")

    def _tell(self, progress: LoadProgress, done: int) -> None:
        progress(self.purpose, done, self.size)

    def _refused(self, error: int) -> MemoryError:
        return refused(self.purpose, self.size, self.arithmetic, error)

    def close(self) -> None:
        if self.address:
            self._library.hs_unmap(self.address, max(self.size, 1))
            self.address = 0


class SharedMapping:
    """`size` bytes of the shared memory `fd`, mapped; the first rank that comes gives it its size, and what others have
    written is there. This process makes the bytes part[0] .. part[1] of it resident. Raises MemoryError with the
    arithmetic where there is no room."""

    def __init__(
        self, library: ctypes.CDLL, fd: int, size: int, purpose: str, arithmetic: str, part: tuple[int, int]
    ) -> None:
        self.size, self.purpose, self.part = size, purpose, part
        self._library, self._arithmetic = library, arithmetic
        try:
            os.ftruncate(fd, max(size, 1))
            self._map = mmap.mmap(fd, max(size, 1))
        except OSError as error:
            raise refused(purpose, size, arithmetic, error.errno or 0) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # an offer: a system without huge pages for shared memory uses small ones
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)

    @property
    def filled_here(self) -> int:
        """Bytes of it that this process makes resident."""
        return self.part[1] - self.part[0]

    def commit(self, team: int, progress: LoadProgress) -> None:
        """Have the system hold this process's part now, what is there stays. Raises MemoryError."""
        first, end = self.part
        at = first // mmap.PAGESIZE * mmap.PAGESIZE
        error = committed(
            self._library, team, self.address + at, end - at, lambda done: progress(self.purpose, done, end - at)
        )
        if error:
            raise refused(self.purpose, self.size, self._arithmetic, error)

    def close(self) -> None:
        if not self._map.closed:
            del self._anchor
            self._map.close()


def committed(library: ctypes.CDLL, team: int, address: int, size: int, told: Callable[[int], None]) -> int:
    """Have the system hold `size` bytes from `address` on; `told` hears how many are. 0, or the system's error."""
    for done in range(0, size, COMMIT_BYTES):
        step = min(COMMIT_BYTES, size - done)
        error: int = library.hs_commit(team, address + done, step)
        if error:
            return error
        told(done + step)
    return 0


def refused(purpose: str, size: int, arithmetic: str, error: int) -> MemoryError:
    return MemoryError(
        f"{purpose} needs {size} bytes ({size / MIB:.1f} MiB) = {arithmetic}, and the system refused:"
        f" {os.strerror(error)}"
    )


def address_of(view: memoryview) -> int:
    """Where the bytes of a contiguous view lie. Raises BufferError for one that is not."""
    return int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0
