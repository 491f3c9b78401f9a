"""Pools that come back at a flip: their memory is had again beside the work, not before it.

A pool that was released has addresses and no pages; the system gives a zeroed page at the first touch of each. To have
all of it at once takes longer the larger the pool is (some 20 ms for 100 MiB). A flip that carries rows touches nearly
every huge page and has to wait for that; one with nothing live does not: a thread has the system hold the pool while
plans run again. What is there stays, also what is written at the same moment. That the memory is there was planned, and
the pool that it replaces has just given its own back; where it lacks all the same, the next plan fails for it, with the
arithmetic.

It is work that nobody waits for, on cores that others wait for. A system hands a core over only after a few
milliseconds, to whoever has just been woken as well, and a step of a flip is four such waits. So one huge page is had
at a time, and the thread sleeps for as long as that worked: nobody waits longer, and half of a core is left.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
import time
from collections.abc import Sequence

from backends.host.memory import HUGE_PAGE, Mapping, refused
from backends.pages import POPULATE_WRITE

STEP_BYTES = HUGE_PAGE
"""What is had in one call: a pool that is to be given back waits for one."""


class Backing(threading.Thread):
    """Has the system hold `mappings`, one after the other. `failure` is set where it cannot."""

    def __init__(self, mappings: Sequence[Mapping]) -> None:
        super().__init__(name="homeserve-backing", daemon=True)
        self._mappings = tuple(mappings)
        self._ended = threading.Event()
        self.failure: MemoryError | None = None

    def run(self) -> None:
        for mapping in self._mappings:
            for first in range(0, mapping.size, STEP_BYTES):
                began = time.thread_time()
                error = populate(mapping.address + first, min(STEP_BYTES, mapping.size - first))
                if error:
                    self.failure = refused(mapping.purpose, mapping.size, mapping.arithmetic, error)
                    return
                if self._ended.wait(time.thread_time() - began):
                    return

    def end(self) -> None:
        """Stop after the step at hand, and wait for that."""
        self._ended.set()
        self.join()


def can_populate() -> bool:
    """Whether the system can have pages held without touching what is in them (Linux 5.14)."""
    return sys.platform == "linux" and populate(0, 0) == 0


def populate(address: int, nbytes: int) -> int:
    """Have the system hold the pages of [address, address + nbytes), from a page's first byte on. 0, or its error."""
    library = ctypes.CDLL(None, use_errno=True)
    while library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), POPULATE_WRITE):
        error = ctypes.get_errno()
        if error not in (errno.EAGAIN, errno.EINTR):
            return error
        os.sched_yield()
    return 0
