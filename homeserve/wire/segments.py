"""Shared memory as plain files, so that it can be named, counted and swept.

A segment is a file `homeserve-<pid>-<start>-<random>-<what>` in /dev/shm (elsewhere: the temporary folder), created
exclusively with mode 0600 and mapped. Rules:

- **One owner.** The process that creates a segment unlinks it. A child maps it through an inherited descriptor and
  never opens it by name, so a name can go at any time without hurting whoever has it mapped.
- **The name tells whether the owner lives.** `pid` alone would not: numbers come again. `start` is the owner's start
  time as the kernel tells it (clock ticks since boot on Linux), so a new process under an old number is not taken for
  the owner.
- **A boot sweeps.** `sweep` unlinks what dead owners left behind. Should it ever misjudge one (an owner in another pid
  namespace with the same /dev/shm), that one keeps running: it has its memory mapped and needs the name no more.
- **Room is reserved at creation**, so a full /dev/shm is an error here and not a SIGBUS later.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
import sys
import tempfile
from pathlib import Path

from homeserve.errors import WireError, WorkerStartError

_NAME = re.compile(r"homeserve-(\d+)-(\d+)-[0-9a-f]{8}-[a-z0-9-]+")


class Segment:
    """`size` bytes of shared memory. `view` is valid until `close`; `fd` until `close` or `attach`'s mapping of it."""

    def __init__(self, fd: int, size: int, path: Path | None) -> None:
        self.fd = fd
        self.size = size
        self.path = path
        self._map = mmap.mmap(fd, size)
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, what: str, size: int, *, at: Path | None = None) -> Segment:
        """A new segment of zeros, owned by this process. Raises WorkerStartError where there is no room for it."""
        pid = os.getpid()
        path = (at or folder()) / f"homeserve-{pid}-{start_time(pid)}-{secrets.token_hex(4)}-{what}"
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            _reserve(fd, size)
            return cls(fd, size, path)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
                path.unlink(missing_ok=True)
            raise WorkerStartError(
                f"cannot make {size} bytes of shared memory in {path.parent}: {error.strerror}",
                fix="enlarge it (docker: --shm-size=256m)" if error.errno == errno.ENOSPC else None,
            ) from error

    @classmethod
    def attach(cls, fd: int, size: int) -> Segment:
        """Map an inherited descriptor. Raises WireError if it is not `size` bytes long."""
        found = os.fstat(fd).st_size
        if found != size:
            raise WireError(f"shared memory of {found} bytes where {size} were announced")
        return cls(fd, size, None)

    def unlink(self) -> None:
        """Remove the name; the memory stays mapped. Does nothing a second time, or in a process not its owner."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None

    def close(self) -> None:
        """Unlink and unmap. Views made from `view` must be released before. Does nothing a second time."""
        self.unlink()
        if self.fd >= 0:
            self.view.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1


def folder() -> Path:
    """Where segments lie: memory where the system has such a folder."""
    shm = Path("/dev/shm")
    return shm if sys.platform == "linux" and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def names(pid: int | None = None, *, at: Path | None = None) -> list[str]:
    """Names of the segments that process `pid` (default: this one) owns."""
    prefix = f"homeserve-{os.getpid() if pid is None else pid}-"
    return sorted(path.name for path in (at or folder()).glob(prefix + "*") if _NAME.fullmatch(path.name))


def sweep(*, at: Path | None = None) -> list[str]:
    """Unlink the segments whose owner is dead; returns their names. Those of other users are left alone."""
    swept = []
    for path in stale(at=at):
        try:
            path.unlink()
        except FileNotFoundError:
            continue  # another boot swept it first
        swept.append(path.name)
    return swept


def stale(*, at: Path | None = None) -> list[Path]:
    """This user's segments whose owner is dead."""
    found = []
    for path in sorted((at or folder()).glob("homeserve-*")):
        match = _NAME.fullmatch(path.name)
        if match is None or start_time(int(match[1])) == int(match[2]):
            continue
        try:
            if path.stat().st_uid == os.getuid():
                found.append(path)
        except FileNotFoundError:
            continue  # swept between the two looks
    return found


def start_time(pid: int) -> int | None:
    """When process `pid` began, in the system's own unit; None if there is no such process (a zombie is none)."""
    if sys.platform == "linux":
        return _start_time_linux(pid)
    else:
        import psutil  # a dependency of the budget, and not on Linux's way to ready

        try:
            return int(psutil.Process(pid).create_time() * 1000)
        except psutil.Error:
            return None


def _start_time_linux(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field is the program's name in parentheses and may hold anything, spaces too.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _reserve(fd: int, size: int) -> None:
    if sys.platform == "linux":
        os.posix_fallocate(fd, 0, size)
    else:
        os.ftruncate(fd, size)
