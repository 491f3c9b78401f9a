"""The doorbell: a pipe in which one byte stands for one record.

The record lies in shared memory; the byte says that it is there. The reader takes exactly as many records as it has
read bytes, so the kernel's own ordering of a pipe's write and read also orders the memory behind it, on every machine:
nobody looks at a flag in memory that another process writes. The pipe ends when its writer dies, which is how each side
learns of the other's death without asking.

A pipe holds 64 KiB on Linux and at least 16 KiB elsewhere; a ring has a few slots. A bell that would block is our bug.
"""

from __future__ import annotations

import os

_READ_BYTES = 4096


class BellWriter:
    """Never blocks. The write end is this object's from here on."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        os.set_blocking(fd, False)

    def ring(self) -> bool:
        """Announce one record. False if the reader is gone."""
        try:
            os.write(self.fd, b"\1")
        except BlockingIOError as error:
            raise AssertionError("a doorbell is full: more records were announced than any ring holds") from error
        except BrokenPipeError:
            return False
        return True

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class BellReader:
    """Counts announced records. `wait` blocks; `poll_nowait` is for a loop that watches `fd`."""

    def __init__(self, fd: int, *, blocking: bool) -> None:
        self.fd = fd
        self.ended = False
        os.set_blocking(fd, blocking)

    def wait(self) -> int:
        """Block until at least one record is announced; 0 when the writer is gone."""
        return self._read()

    def poll_nowait(self) -> int:
        """Records announced since the last call, possibly 0. Sets `ended` once the writer is gone."""
        try:
            return self._read()
        except BlockingIOError:
            return 0

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _read(self) -> int:
        count = len(os.read(self.fd, _READ_BYTES))
        self.ended = count == 0
        return count
