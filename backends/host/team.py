"""A team of threads of a native library, which does a commit, a copy or a digest together (`native/team.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int32

from backends.host import abi


class Team:
    """`threads` threads, the calling one among them; of one thread nothing is started. `cores` pins thread i to
    cores[i]; `spin` bounds how long one that waits spins before it sleeps, in pause instructions.

    `handle` is what functions of the same library take. One call at a time. Raises OSError where a thread cannot be
    started.
    """

    def __init__(self, library: ctypes.CDLL, threads: int, *, cores: Sequence[int] = (), spin: int = 0) -> None:
        self.library, self.threads = library, threads
        error = c_int32(0)
        pinned = (c_int32 * len(cores))(*cores)
        handle = library.hs_team_create(threads, pinned, len(cores), spin, byref(error))
        if not handle:
            raise OSError(f"{threads} threads could not be started: {abi.ERRORS[error.value]}")
        self.handle: int = handle

    def close(self) -> None:
        """Stop the threads. Does nothing a second time."""
        if self.handle:
            self.library.hs_team_destroy(self.handle)
            self.handle = 0
