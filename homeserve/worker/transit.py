"""The transit memory, as a rank uses it.

It is sparse, so the first byte of each page costs a fault and a zeroed page: some eight times as much as a copy of the
page. `reserve` and `reach` do this for many pages at once, before anything is copied, and the pages stay for the next
flip: the plan of memory has them in every phase. What an earlier flip has left in them passes for nothing, because no
digest is asked for that was not packed for this one.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys

from backends.pages import POPULATE_WRITE


class Transit:
    """The memory through which the ranks of one life hand each other payloads: sparse, and of `nbytes`. A rank has the
    system hold what it is about to write."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._fd = fd
        self._mapped = mmap.mmap(fd, nbytes) if nbytes else None

    def reserve(self, offset: int, nbytes: int) -> None:
        """Have the system hold what this rank will write. Raises OSError where it has no room."""
        if sys.platform == "linux":
            os.posix_fallocate(self._fd, offset, nbytes)
        self.reach(offset, nbytes)

    def reach(self, offset: int, nbytes: int) -> None:
        """Map pages that hold something already: those of this rank, or of one that has reserved them."""
        if sys.platform != "linux" or self._mapped is None:
            return
        first = offset // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            self._mapped.madvise(POPULATE_WRITE, first, offset + nbytes - first)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel before 5.14: each page is mapped when it is touched
                raise

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Not to be kept: it holds the mapping open."""
        assert self._mapped is not None and 0 <= offset <= offset + nbytes <= self.nbytes, "checked against the plan"
        return memoryview(self._mapped)[offset : offset + nbytes]

    def close(self) -> None:
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None
