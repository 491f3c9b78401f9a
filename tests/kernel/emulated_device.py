"""A `Device` of backends.gpu.device without a card: its memory is the host's, its launches run emulated (simt_rig.py).

    device = EmulatedDevice("sm_86")        # kernels of the cuda tree; "gfx1103": of the hip tree
    memory = device.allocate(1 << 20, "weights")
    device.launch(...)
    device.wait()                           # only here anything is done

Work is put off until `wait`, the latest moment that the seam allows, in the order in which it was asked for. So host
memory of an upload that is written too early, or of a download that is read too early (it holds ones until then), shows
in results. Everything is checked that a card would not forgive:

- an address that is in no memory, or a run of bytes that leaves it: Fault, with the symbol and the parameter. Memory
  that was released or closed is unmapped as well, so a kernel that strays into it ends the process;
- host memory of an upload or a download that is not pinned;
- a symbol that is launched before `prepare` has seen it, unless `lenient`: then it is noted in `unprepared`.

`capacity` bounds what is held, so that `OutOfDeviceMemory` is met. `lose` makes the card go away at the next `wait`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import simt_rig as rig

from backends.gpu.arch import arch
from backends.gpu.device import CardFacts, Recording
from backends.gpu.errors import DeviceLost, DriverError, OutOfDeviceMemory
from backends.gpu.launch import Launch, Symbol

GRANULARITY = 1 << 16
PAGE = mmap.PAGESIZE
_PROT_NONE, _PROT_RW = 0, mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_EMULATING = threading.Lock()
"""The emulation has one block at a time; ranks of a test may be threads."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _map(nbytes: int, protection: int, at: int = 0) -> int:
    found = _libc.mmap(at or None, nbytes, protection, _FLAGS | (_MAP_FIXED if at else 0), -1, 0)
    if found in (None, ctypes.c_void_p(-1).value):
        raise MemoryError(f"mmap of {nbytes} bytes: errno {ctypes.get_errno()}")
    return int(found)


def _rounded(nbytes: int, to: int) -> int:
    return max(-(-nbytes // to), 1) * to


class Ranges:
    """Runs of addresses that do not overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}

    def add(self, address: int, nbytes: int) -> None:
        self._starts.insert(bisect_right(self._starts, address), address)
        self._ends[address] = address + nbytes

    def remove(self, address: int) -> None:
        if self._ends.pop(address, None) is not None:
            self._starts.remove(address)

    @property
    def count(self) -> int:
        return len(self._starts)

    def holds(self, address: int, nbytes: int = 1) -> bool:
        at = bisect_right(self._starts, address) - 1
        return at >= 0 and address + nbytes <= self._ends[self._starts[at]]


class EmulatedMemory:
    """`Memory` and `Backing`. Addresses begin at a page; behind the last whole granule nothing is mapped."""

    def __init__(self, device: EmulatedDevice, nbytes: int, line: str, arithmetic: str, *, backed: bool) -> None:
        self.nbytes, self.line = nbytes, line
        self._device, self._arithmetic = device, arithmetic
        self._room = _rounded(nbytes, GRANULARITY if not backed else PAGE)
        self.backed = False
        self.address = _map(self._room, _PROT_NONE)
        try:
            if backed:
                self.back()
        except BaseException:
            self.close()
            raise

    def back(self) -> None:
        if not self.backed:
            self._device.take(self._room, self._arithmetic or f"{self.nbytes} bytes of {self.line}")
            _map(self._room, _PROT_RW, self.address)
            self._device.memory.add(self.address, self.nbytes)
            self.backed = True

    def release(self) -> None:
        if self.backed:
            self._device.settle()
            _map(self._room, _PROT_NONE, self.address)
            self._device.memory.remove(self.address)
            self._device.give(self._room)
            self.backed = False

    def close(self) -> None:
        if self.address:
            self.release()
            _libc.munmap(self.address, self._room)
            self.address = 0


class EmulatedHost:
    """`HostMemory`: of its own, or of the caller where `address` says."""

    def __init__(self, device: EmulatedDevice, nbytes: int, line: str, address: int = 0) -> None:
        self.nbytes, self.line = nbytes, line
        self._device, self._own = device, not address
        self.address = address or _map(_rounded(nbytes, PAGE), _PROT_RW)
        if address % PAGE:
            raise MemoryError(f"{address:#x} is not the beginning of a page")
        device.pinned_memory.add(self.address, nbytes)
        self._bytes = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.address))

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        return self._bytes

    def close(self) -> None:
        """Of its own: the memory stays mapped for arrays that look at it, but is pinned no longer."""
        if self.address:
            self._device.settle()
            self._device.pinned_memory.remove(self.address)
            if self._own:
                _map(_rounded(self.nbytes, PAGE), _PROT_NONE, self.address)
            self.address = 0


@dataclass
class EmulatedRecording:
    """A driver may free the graph while it runs: it is not closed before what it launched was waited for."""

    launches: tuple[Launch, ...]
    device: EmulatedDevice
    closed: bool = False

    def close(self) -> None:
        if self.device.in_flight(self):
            raise rig.Fault("a recording is closed that may be running")
        self.closed = True


@dataclass
class EmulatedDevice:
    """`arch_name` decides which tree its kernels come from; its warps are as wide as the arch's first width."""

    arch_name: str = "sm_86"
    capacity: int = 1 << 32
    lenient: bool = False
    virtual_memory: bool = True
    uuid: str = "GPU-00000000-0000-0000-0000-000000000000"
    held: int = 0
    prepared: set[str] = field(default_factory=set)
    unprepared: set[str] = field(default_factory=set)
    replays: int = 0
    waits: int = 0
    uploaded: int = 0
    lost: bool = False

    def __post_init__(self) -> None:
        kind = arch(self.arch_name)
        self.vendor: rig.Vendor = "cuda" if kind.vendor == "nvidia" else "hip"
        self.facts = CardFacts(
            *(kind.vendor, 0, self.uuid, "0000:01:00.0", f"Emulated {self.arch_name}", kind, kind.warps[0], 4),
            *(self.capacity, False, "emulated", self.virtual_memory, GRANULARITY),
        )
        self.memory, self.pinned_memory = Ranges(), Ranges()
        self._counts: Counter[str] = Counter()
        self._queue: list[Callable[[], None]] = []
        self._replayed: list[EmulatedRecording] = []
        self._losing = False

    @property
    def counts(self) -> Mapping[str, int]:
        return self._counts

    # ---------------------------------------------------------------------------------------------------------- memory

    def take(self, nbytes: int, arithmetic: str) -> None:
        self._alive()
        if self.held + nbytes > self.capacity:
            raise OutOfDeviceMemory(
                f"{self.facts.told}: {arithmetic} do not fit: {self.capacity - self.held} bytes are free",
                fix="use a smaller model, or fewer slots",
                card=self.uuid,
            )
        self.held += nbytes

    def give(self, nbytes: int) -> None:
        self.held -= nbytes

    def allocate(self, nbytes: int, line: str, arithmetic: str = "") -> EmulatedMemory:
        return EmulatedMemory(self, nbytes, line, arithmetic, backed=True)

    def reserve(self, nbytes: int, line: str, arithmetic: str = "") -> EmulatedMemory:
        if not self.virtual_memory:
            raise DriverError(f"{self.facts.told} has no virtual memory", fix="use the copy source", card=self.uuid)
        return EmulatedMemory(self, nbytes, line, arithmetic, backed=False)

    def pinned(self, nbytes: int, line: str) -> EmulatedHost:
        return EmulatedHost(self, nbytes, line)

    def pin(self, address: int, nbytes: int, line: str) -> EmulatedHost:
        return EmulatedHost(self, nbytes, line, address)

    def free_bytes(self) -> int:
        return self.capacity - self.held

    # ------------------------------------------------------------------------------------------------------------ work

    def prepare(self, symbols: Iterable[Symbol]) -> None:
        wanted = {symbol.name: symbol for symbol in symbols}
        rig.prepare(
            {(None, symbol.file, self.vendor, self.facts.warp, *self._build(symbol)) for symbol in wanted.values()}
        )
        for symbol in wanted.values():
            self._kernels(symbol)
        self.prepared |= wanted.keys()

    def upload(self, target: int, source: int, nbytes: int) -> None:
        self._within(self.pinned_memory, "host memory that is not pinned", source, nbytes)
        self._within(self.memory, "an upload", target, nbytes)
        self.uploaded += nbytes
        self._queue.append(lambda: _move(target, source, nbytes))

    def download(self, target: int, source: int, nbytes: int) -> None:
        self._within(self.pinned_memory, "host memory that is not pinned", target, nbytes)
        self._within(self.memory, "a download", source, nbytes)
        if nbytes:
            ctypes.memset(target, 0xFF, nbytes)
        self._queue.append(lambda: _move(target, source, nbytes))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._within(self.memory, "a copy", source, nbytes)
        self._within(self.memory, "a copy", target, nbytes)
        if source < target + nbytes and target < source + nbytes:
            raise rig.Fault(f"a copy of {nbytes} bytes from {source:#x} to {target:#x} overlaps")
        self._queue.append(lambda: _move(target, source, nbytes))

    def fill(self, target: int, byte: int, nbytes: int) -> None:
        self._within(self.memory, "a fill", target, nbytes)
        self._queue.append(lambda: _set(target, byte, nbytes))

    def launch(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            self._check(launch)
            self._counts[launch.symbol.name] += 1
            self._queue.append(lambda launch=launch: self._run(launch))  # type: ignore[misc]

    def record(self, launches: Sequence[Launch]) -> EmulatedRecording:
        for launch in launches:
            self._check(launch)
        return EmulatedRecording(tuple(launches), self)

    def replay(self, recording: Recording) -> None:
        assert isinstance(recording, EmulatedRecording), "of this device"
        if recording.closed:
            raise rig.Fault("a recording that was closed is replayed")
        self.replays += 1
        self._replayed.append(recording)
        self.launch(recording.launches)

    def wait(self) -> None:
        self._alive()
        self.waits += 1
        if self._losing:
            self.lost = True
            self._queue.clear()
            self._alive()
        self.settle()

    def lose(self) -> None:
        """From the next wait on the card is gone."""
        self._losing = True

    def settle(self) -> None:
        """What waits in the queue is done."""
        queue, self._queue = self._queue, []
        self._replayed.clear()
        for work in queue:
            work()

    def in_flight(self, recording: EmulatedRecording) -> bool:
        """Whether it was replayed, and not waited for."""
        return not self.lost and any(each is recording for each in self._replayed)

    def close(self) -> None:
        self.settle()
        if self.held:
            raise rig.Fault(f"{self.held} bytes are still held when the device is closed")

    # ---------------------------------------------------------------------------------------------------------- checks

    def _alive(self) -> None:
        if self.lost:
            raise DeviceLost(f"{self.facts.told} is lost", fix="restart", card=self.uuid)

    def _within(self, ranges: Ranges, what: str, address: int, nbytes: int) -> None:
        self._alive()
        if nbytes and not ranges.holds(address, nbytes):
            raise rig.Fault(f"{what}: {nbytes} bytes at {address:#x} lie outside")

    def _check(self, launch: Launch) -> None:
        self._alive()
        for param, value in zip(launch.symbol.params, launch.args, strict=True):
            if param.kind == "pointer" and value and not self.memory.holds(int(value)):
                raise rig.Fault(f"{launch.symbol.name}: {param.name} is {int(value):#x}, which is in no memory")
        if launch.symbol.name not in self.prepared:
            self.unprepared.add(launch.symbol.name)
            if not self.lenient:
                raise rig.Fault(f"{launch.symbol.name} was not prepared")

    def _run(self, launch: Launch) -> None:
        with _EMULATING:
            self._kernels(launch.symbol).run(launch)

    def _kernels(self, symbol: Symbol) -> rig.Kernels:
        return rig.load(symbol.file, self.vendor, self.facts.warp, *self._build(symbol))

    def _build(self, symbol: Symbol) -> tuple[str, ...]:
        """A symbol's type alone, unless the tier compiles its whole file anyway."""
        whole = os.environ.get("HOMESERVE_TEST_TIER") and (self.vendor, self.facts.warp) in rig.WHOLE
        return (f"QUANT={symbol.quant}",) if symbol.quant and not whole else ()


def _move(target: int, source: int, nbytes: int) -> None:
    if nbytes:
        ctypes.memmove(target, source, nbytes)


def _set(target: int, byte: int, nbytes: int) -> None:
    if nbytes:
        ctypes.memset(target, byte, nbytes)
