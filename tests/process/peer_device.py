"""The emulated card of tests/kernel with what transports need besides: memory that other processes' cards write to, and
a stream that a collectives library is given.

Memory of the ledger's mailboxes is a file without a name. Its handle is the process's /proc entry of it, so another
process that may see this one can map it, as a driver's IPC does. `lie` says what is wrong with this card:

    nothing    copies to peers copy nothing, and say that they did
    the first  the first copy arrives, and no other
    refuse     opening another's handle fails
    no         the driver says that the cards do not reach each other
    hang       tried copies never end
    busy       the stream is never idle
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass, field

from emulated_device import EmulatedDevice, EmulatedMemory, _libc

from backends.gpu.device import Memory
from backends.gpu.errors import DriverError

SHARED_LINE = "mailboxes"
_RW, _FIXED = mmap.PROT_READ | mmap.PROT_WRITE, 0x10


@dataclass
class Opened:
    """Another process's memory, mapped here."""

    device: PeerEmulatedDevice
    address: int
    nbytes: int
    line: str = ""

    def close(self) -> None:
        if self.address:
            self.device.settle()
            self.device.memory.remove(self.address)
            self.device.opened.remove(self)
            _libc.munmap(self.address, self.nbytes)
            self.address = 0


@dataclass
class PeerEmulatedDevice(EmulatedDevice):
    """`StreamDevice` and `PeerDevice`."""

    lie: str = ""
    opened: list[Opened] = field(default_factory=list)
    tried: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._files: dict[int, int] = {}

    def allocate(self, nbytes: int, line: str, arithmetic: str = "") -> EmulatedMemory:
        memory = super().allocate(nbytes, line, arithmetic)
        if line == SHARED_LINE:
            fd = os.memfd_create("mailbox")
            os.ftruncate(fd, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
            _map_file(fd, nbytes, memory.address)
            self._files[memory.address] = fd
        return memory

    # ------------------------------------------------------------------------------------------------- StreamDevice

    @property
    def stream(self) -> int:
        """Whatever is put into it from now on comes behind all that was asked for."""
        self.settle()
        return 1

    def idle(self) -> bool:
        self.wait()
        return self.lie != "busy"

    # --------------------------------------------------------------------------------------------------- PeerDevice

    def reaches(self, uuid: str) -> str:
        return "peer access is not supported between these cards" if self.lie == "no" else ""

    def export(self, memory: Memory) -> bytes:
        return f"/proc/{os.getpid()}/fd/{self._files[memory.address]}".encode()

    def open(self, handle: bytes, nbytes: int) -> Opened:
        if self.lie == "refuse":
            raise DriverError("the handle cannot be opened", fix="none", card=self.uuid)
        fd = os.open(handle.decode(), os.O_RDWR)
        try:
            opened = Opened(self, _map_file(fd, nbytes, 0), nbytes)
        finally:
            os.close(fd)
        self.memory.add(opened.address, nbytes)
        self.opened.append(opened)
        return opened

    def try_copy(self, target: int, source: int, nbytes: int, timeout_s: float) -> bool:
        self.tried += 1
        if self.lie == "hang":
            return False
        self.copy(target, source, nbytes)
        self.settle()
        return True

    def copy(self, target: int, source: int, nbytes: int) -> None:
        peer = next((each for each in self.opened if each.address <= target < each.address + each.nbytes), None)
        if peer is not None and (self.lie == "nothing" or (self.lie == "the first" and self.tried > 1)):
            return
        super().copy(target, source, nbytes)

    def close(self) -> None:
        super().close()
        for fd in self._files.values():
            os.close(fd)


def _map_file(fd: int, nbytes: int, at: int) -> int:
    flags = mmap.MAP_SHARED | (_FIXED if at else 0)
    found = _libc.mmap(at or None, nbytes, _RW, flags, fd, 0)
    if found in (None, ctypes.c_void_p(-1).value):
        raise MemoryError(f"mmap of {nbytes} bytes: errno {ctypes.get_errno()}")
    return int(found)
