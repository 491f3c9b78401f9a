"""How fast a folder's disk reads: it prices images that spill to it, and loading.

A file is written there, read once from its start to its end, and is gone: it never has a name where the file system
can do without, so that nothing is left whatever happens. It holds random bytes, since some file systems compress.
Reading goes around the page cache (O_DIRECT) where the file system can; elsewhere the cache is asked to forget the file
first, and the result says that it was read through it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

from budget.tree import Tree

_FILE_BYTES = 256 << 20
_BLOCK_BYTES = 4 << 20
_SHARE_OF_FREE = 4
_PATIENCE_S = 10.0
"""Each of writing and reading ends after this long, whatever is done by then."""


@dataclass(frozen=True)
class DiskRate:
    """Sequential reading of `read_bytes` from one file. `direct`: around the page cache."""

    path: str
    read_bytes_s: float
    read_bytes: int
    direct: bool


def measure_disk(
    folder: str, file_bytes: int = _FILE_BYTES, clock: Callable[[], float] = time.perf_counter
) -> DiskRate:
    """Writes at most `file_bytes`, and at most a quarter of what is free there. Raises OSError where nothing can be
    written."""
    space = os.statvfs(folder)
    blocks = min(file_bytes, space.f_bavail * space.f_frsize // _SHARE_OF_FREE) // _BLOCK_BYTES
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file, mmap.mmap(-1, _BLOCK_BYTES) as block:
        descriptor = file.fileno()
        block.write(os.urandom(_BLOCK_BYTES))
        written = _write(descriptor, block, max(1, blocks), clock)
        direct = not _in_memory(descriptor) and _go_direct(descriptor)
        if not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        read, seconds = _read(file.readinto, block, written, clock)
    return DiskRate(os.path.abspath(folder), read / max(seconds, 1e-9), read, direct)


def _write(descriptor: int, block: mmap.mmap, count: int, clock: Callable[[], float]) -> int:
    until, written = clock() + _PATIENCE_S, 0
    for _ in range(count):
        written += os.write(descriptor, block)
        if clock() > until:
            break
    os.fsync(descriptor)
    return written


def _read(
    fill: Callable[[mmap.mmap], int | None], block: mmap.mmap, size: int, clock: Callable[[], float]
) -> tuple[int, float]:
    start, read = clock(), 0
    while read < size and clock() - start < _PATIENCE_S and (count := fill(block)):
        read += count
    return read, clock() - start


def _in_memory(descriptor: int) -> bool:
    """Whether the file lies in a file system that is memory: its cache is the file itself."""
    device = os.fstat(descriptor).st_dev
    mark = f" {os.major(device)}:{os.minor(device)} "
    mounts = (Tree().text("proc/self/mountinfo") or "").splitlines()
    return any(mark in line and line.partition(" - ")[2].split(" ")[0] in ("tmpfs", "ramfs") for line in mounts)


def _go_direct(descriptor: int) -> bool:
    """Whether reads go around the page cache from now on."""
    direct = getattr(os, "O_DIRECT", 0)
    if not direct:
        return False
    import fcntl

    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | direct)
        # Some file systems take the flag and then refuse the read.
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            os.preadv(descriptor, [page], 0)
    except OSError:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~direct)
        return False
    return True
