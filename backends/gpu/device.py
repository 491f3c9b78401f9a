"""THE SEAM between programs and a card: memory by address, launches, one stream.

What a program does with a card is little: it gets memory, moves bytes, launches kernels, and waits. `Device` is that,
and nothing of a vendor is in it. `backends.gpu.card.Card` is the real one, over a driver; tests have one whose memory
is the host's and whose kernels are emulated, so that a program is tested without any driver, and a driver without any
program.

    Program ─▶ Device ─▶ Card ─▶ Driver ─▶ libcuda, libamdhip64            (or the fakes of tests/fakes)
                    └──▶ tests/kernel/emulated_device.py

Rules
- Addresses are numbers. Memory of a card is never read by Python: it is downloaded first.
- There is one stream. Uploads, downloads, copies, fills and launches are in the order in which they were asked for;
  `wait` is where their results, and their errors, come to be known. Host memory of an upload may change only behind the
  next `wait`; that of a download means something only then.
- Memory for uploads and downloads is pinned (`pinned`, `pin`), so that the card reads and writes it by itself. Other
  memory is refused: it would be copied once more, and not be asynchronous at all.
- Device memory is had at a bind. Nothing here allocates while a plan runs, except that a driver takes some for what it
  records.

Errors (backends.gpu.errors): `OutOfDeviceMemory`, a MemoryError with the arithmetic, leaves the device usable.
`DeviceLost` does not: every later call raises it again, and the process must end. Other errors of the driver are
`DriverError`.

What a device may do besides are protocols of their own: `PeerDevice` and `StreamDevice`, for transports between ranks
(backends.gpu.transport) and libraries, and `Timed`, for measuring at a bind (backends.gpu.tuning). Who needs one asks
with `isinstance`, and does without where it is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from backends.gpu.arch import Arch, Vendor
from backends.gpu.launch import Launch, Symbol


@dataclass(frozen=True)
class CardFacts:
    """What a card says of itself. `warp`: lanes of its waves, for which its code is built; `units`: multiprocessors;
    `uuid` as the vendor's tools print it; `pci` like 0000:01:00.0; `unified`: it computes in the host's memory;
    `driver`: versions as text, for reports; `virtual_memory`: addresses can be had apart from memory; `granularity`: of
    such memory, in bytes."""

    vendor: Vendor
    index: int
    uuid: str
    pci: str
    name: str
    arch: Arch
    warp: int
    units: int
    total_bytes: int
    unified: bool
    driver: str
    virtual_memory: bool
    granularity: int

    @property
    def told(self) -> str:
        """For messages: `NVIDIA GeForce RTX 3090 (GPU-1234)`."""
        return f"{self.name} ({self.uuid})"


class Memory(Protocol):
    """Device memory at an address that never changes."""

    address: int
    nbytes: int
    line: str

    def close(self) -> None:
        """Give it back. Does nothing a second time."""
        ...


class Backing(Memory, Protocol):
    """Addresses that hold memory only between `back` and `release`: of `nbytes` the whole, rounded up to the
    granularity. New memory is zeroed."""

    @property
    def backed(self) -> bool: ...

    def back(self) -> None:
        """Raises OutOfDeviceMemory, and holds none then."""
        ...

    def release(self) -> None:
        """Waits for the stream first. Nothing to do where none is held."""
        ...


class HostMemory(Protocol):
    """Pinned host memory. `bytes`: uint8 [nbytes] at `address`."""

    address: int
    nbytes: int
    line: str

    @property
    def bytes(self) -> npt.NDArray[np.uint8]: ...

    def close(self) -> None: ...


class Recording(Protocol):
    """Launches that a device keeps ready. To be closed when none of them is on the stream."""

    launches: tuple[Launch, ...]

    def close(self) -> None: ...


class Device(Protocol):
    """A card, opened by one process."""

    facts: CardFacts

    @property
    def counts(self) -> Mapping[str, int]:
        """Launches so far, by symbol; those of replays among them."""
        ...

    # ---------------------------------------------------------------------------------------------------------- memory

    def allocate(self, nbytes: int, line: str, arithmetic: str = "") -> Memory:
        """Zeroed; begins at a multiple of 256 bytes. `line` of the ledger, `arithmetic` for the message that it does
        not fit. Raises OutOfDeviceMemory."""
        ...

    def reserve(self, nbytes: int, line: str, arithmetic: str = "") -> Backing:
        """Addresses alone. Raises DriverError where the card has no virtual memory."""
        ...

    def pinned(self, nbytes: int, line: str) -> HostMemory:
        """Zeroed host memory of exactly so many bytes (whole pages of the system). Raises MemoryError."""
        ...

    def pin(self, address: int, nbytes: int, line: str) -> HostMemory:
        """Host memory of the caller, which outlives what is returned: whole pages from `address` on. Its close ends the
        pinning, not the memory. Raises MemoryError."""
        ...

    def free_bytes(self) -> int:
        """Of the card's memory now, by the driver."""
        ...

    # ------------------------------------------------------------------------------------------------------------ work

    def prepare(self, symbols: Iterable[Symbol]) -> None:
        """Compile and load what these need, several at once; `launch` and `record` do it for one that was not. Raises
        KernelError."""
        ...

    def upload(self, target: int, source: int, nbytes: int) -> None: ...

    def download(self, target: int, source: int, nbytes: int) -> None: ...

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Within the card. The two do not overlap."""
        ...

    def fill(self, target: int, byte: int, nbytes: int) -> None: ...

    def launch(self, launches: Sequence[Launch]) -> None: ...

    def record(self, launches: Sequence[Launch]) -> Recording:
        """For `replay`, as often as wanted, at the same addresses: a graph of the driver. Runs nothing. Raises
        OutOfDeviceMemory, KernelError, DriverError."""
        ...

    def replay(self, recording: Recording) -> None: ...

    def wait(self) -> None:
        """Until all of it is done. Raises DeviceLost, DriverError."""
        ...

    def close(self) -> None:
        """What was had from it must be closed before."""
        ...


# ----------------------------------------------------------------------------------------- what a device may do besides


@runtime_checkable
class StreamDevice(Device, Protocol):
    """A device whose stream libraries of the vendor can be given (NCCL, RCCL). Not every device has one."""

    @property
    def stream(self) -> int:
        """The driver's handle of the one stream. Its context is current on the thread that calls the device."""
        ...

    def idle(self) -> bool:
        """Whether all that was asked for is done; never waits. Raises DeviceLost, DriverError."""
        ...


@runtime_checkable
class Timed(Device, Protocol):
    """A device that knows how long its work takes."""

    def seconds(self, work: Callable[[], None]) -> float:
        """Of what `work` asks for, by the card's own clock, from when what was asked for before is done; waits for it.
        Raises DeviceLost, DriverError."""
        ...


@runtime_checkable
class PeerDevice(Device, Protocol):
    """A device that other processes' cards may write to, through handles of its memory (IPC). `copy` takes addresses of
    opened memory as it does its own."""

    def reaches(self, uuid: str) -> str:
        """Why this card cannot reach the memory of the one with this UUID, in the driver's words; empty: the driver
        says that it can, which is not evidence. A card that this process is not shown reads as a reason."""
        ...

    def export(self, memory: Memory) -> bytes:
        """A handle for other processes, of memory that `allocate` gave, whole. It means something as long as the memory
        is held. Raises DriverError."""
        ...

    def open(self, handle: bytes, nbytes: int) -> Memory:
        """The memory of another process's handle, at an address of this card's; its close unmaps it and waits for the
        stream first. `line` is empty: it is not this card's memory. Raises DriverError."""
        ...

    def try_copy(self, target: int, source: int, nbytes: int, timeout_s: float) -> bool:
        """A copy on a stream of its own, which is not used for anything else; false where it was not done in time. Then
        both places must be left alone for ever, and not be closed: giving memory back would wait for it. Behind all
        that was asked for before. Raises DriverError."""
        ...
