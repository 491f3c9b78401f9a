"""The transit memory, as a rank uses it."""

from __future__ import annotations

import mmap
import os
import sys


class Transit:
    """The memory through which the ranks of one life hand each other payloads: sparse, and of `nbytes`. A rank has the
    system hold what it is about to write; the engine gives all of it back behind the flip."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._fd = fd
        self._mapped = mmap.mmap(fd, nbytes) if nbytes else None

    def reserve(self, offset: int, nbytes: int) -> None:
        """Raises OSError where the system has no room."""
        if sys.platform == "linux":
            os.posix_fallocate(self._fd, offset, nbytes)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Not to be kept: it holds the mapping open."""
        assert self._mapped is not None and 0 <= offset <= offset + nbytes <= self.nbytes, "checked against the plan"
        return memoryview(self._mapped)[offset : offset + nbytes]

    def close(self) -> None:
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None
