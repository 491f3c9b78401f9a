"""Memory of a card and for it: allocations, addresses with memory behind them now and then, pinned host memory.

Whatever is had here is written down in the card's books until it is closed, so that a card that is closed gives all of
it back, and so that an upload from memory that is not pinned is refused instead of being slow in silence.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right, insort
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from backends.gpu.driver import Driver
from backends.gpu.driver.status import SMALLER
from backends.gpu.errors import DeviceLost, DriverError, HostMemoryRefused, OutOfDeviceMemory

PAGE = mmap.PAGESIZE


class CardMemory:
    """`Memory` of backends.gpu.device."""

    def __init__(self, books: Books, address: int, nbytes: int, line: str, end: Callable[[int], None]) -> None:
        self.address = address
        self.nbytes = nbytes
        self.line = line
        self._books = books
        self._end = end
        books.enter(self)

    def close(self) -> None:
        if self._books.strike(self) and not self._books.hangs:
            self._books.ending(self._books.driver.enter)
            self._books.ending(lambda: self._end(self.address))


class Granules:
    """`Backing` of backends.gpu.device: addresses of the card, and memory behind them between `back` and `release`."""

    def __init__(self, books: Books, nbytes: int, granularity: int, line: str, arithmetic: str, stream: int) -> None:
        self.nbytes = nbytes
        self.line = line
        self._arithmetic = arithmetic
        self._books = books
        self._stream = stream
        self._whole = -(-nbytes // granularity) * granularity
        self.address = books.driver.reserve(self._whole)
        self._backed = False
        self._handle = 0
        books.enter(self)

    @property
    def backed(self) -> bool:
        return self._backed

    def back(self) -> None:
        if self._backed:
            return
        driver = self._books.driver
        driver.enter()
        try:
            self._handle = driver.back(self.address, self._whole)
        except OutOfDeviceMemory as error:
            raise self._books.does_not_fit(error, self._whole, self.line, self._arithmetic) from error
        self._backed = True
        driver.fill(self.address, 0, self._whole, self._stream)

    def release(self) -> None:
        if not self._backed:
            return
        driver = self._books.driver
        driver.enter()
        driver.wait(self._stream)
        driver.unback(self.address, self._whole, self._handle)
        self._backed = False

    def close(self) -> None:
        if self._books.strike(self) and not self._books.hangs:
            driver = self._books.driver
            self._books.ending(driver.enter)
            self._books.ending(self.release)
            self._books.ending(lambda: driver.unreserve(self.address, self._whole))


class Pinned:
    """`HostMemory` of backends.gpu.device. `owner`: the memory itself, which stays there as long as an array of it
    is in use; None where it is the caller's."""

    def __init__(
        self, books: Books, address: int, nbytes: int, line: str, owner: mmap.mmap | None, stream: int
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self.line = line
        self._books = books
        self._stream = stream
        if address % PAGE:
            raise ValueError(f"{line}: memory to be pinned begins at {address:#x}, inside a page")
        try:
            books.driver.host_register(address, self.whole)
        except OutOfDeviceMemory as error:
            raise HostMemoryRefused(
                f"{line}: {nbytes} bytes of host memory could not be pinned for {books.card}: {error.message}",
                fix="free memory of the system, or raise the limit of locked memory (ulimit -l)",
                card=books.card,
            ) from error
        whole = np.frombuffer(owner, np.uint8) if owner is not None else _array(address, nbytes)
        self._bytes: npt.NDArray[np.uint8] | None = whole[:nbytes]
        books.pin(self)

    @property
    def whole(self) -> int:
        """Bytes that are pinned: pages."""
        return -(-self.nbytes // PAGE) * PAGE

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        if self._bytes is None:
            raise ValueError(f"{self.line}: this memory was closed")
        return self._bytes

    def close(self) -> None:
        """Waits for the stream first, which no driver promises to do: it may read or write here still. The memory goes
        after the pinning, never before: its addresses may be somebody else's then."""
        if not self._books.unpin(self):
            return
        books, driver = self._books, self._books.driver
        if books.hangs:
            books.leave(self)
            return
        try:
            books.ending(driver.enter)
            books.ending(lambda: driver.wait(self._stream))
            books.ending(lambda: driver.host_unregister(self.address))
        finally:
            self._bytes = None


class Books:
    """What a card has given out, and where pinned memory lies. `hangs`: something on the card never ends, and the
    driver would wait for it whatever is given back: so nothing is, until the process ends."""

    def __init__(self, driver: Driver, card: str) -> None:
        self.driver = driver
        self.card = card
        self.hangs = False
        self._left: list[Pinned] = []
        self._given: list[CardMemory | Granules] = []
        self._begins: list[int] = []
        self._pinned: dict[int, Pinned] = {}

    def enter(self, memory: CardMemory | Granules) -> None:
        self._given.append(memory)

    def strike(self, memory: CardMemory | Granules) -> bool:
        """False where that was done before."""
        if not any(each is memory for each in self._given):
            return False
        self._given = [each for each in self._given if each is not memory]
        return True

    def pin(self, memory: Pinned) -> None:
        insort(self._begins, memory.address)
        self._pinned[memory.address] = memory

    def unpin(self, memory: Pinned) -> bool:
        if self._pinned.get(memory.address) is not memory:
            return False
        del self._pinned[memory.address]
        self._begins.remove(memory.address)
        return True

    def leave(self, memory: Pinned) -> None:
        """Keep memory that stays pinned: it must not go from under the card."""
        self._left.append(memory)

    def refuse_unpinned(self, address: int, nbytes: int, what: str) -> None:
        """Raises ValueError for host memory that is not pinned as a whole."""
        at = bisect_right(self._begins, address) - 1
        memory = self._pinned[self._begins[at]] if at >= 0 else None
        if memory is None or address + nbytes > memory.address + memory.whole:
            raise ValueError(
                f"{what} of {nbytes} bytes at {address:#x}, which is not pinned: memory of Device.pinned or Device.pin"
                " is wanted"
            )

    def does_not_fit(self, error: DriverError, nbytes: int, line: str, arithmetic: str) -> OutOfDeviceMemory:
        free, total = self.driver.memory_info()
        made = f" ({arithmetic})" if arithmetic else ""
        return OutOfDeviceMemory(
            f"{self.card} has no room for {line}: {_mib(nbytes)}{made} wanted, {_mib(free)} of {_mib(total)} free;"
            f" {error.message}",
            fix=SMALLER,
            card=self.card,
        )

    def ending(self, step: Callable[[], None]) -> None:
        """One step of giving back. A lost card has given all back already."""
        try:
            step()
        except DeviceLost:
            pass

    def close(self) -> None:
        for memory in reversed(self._given.copy()):
            memory.close()
        for pinned in list(self._pinned.values()):
            pinned.close()


def anonymous(nbytes: int, line: str) -> mmap.mmap:
    """Zeroed memory of whole pages that belongs to this process alone."""
    whole = max(1, -(-nbytes // PAGE)) * PAGE
    try:
        return mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        what = f"{line}: no {whole} bytes of host memory ({error.strerror})"
        raise HostMemoryRefused(what, fix="free memory of the system") from error


def where(memory: mmap.mmap) -> int:
    """Its address."""
    return int(np.frombuffer(memory, np.uint8, 1).ctypes.data)


def _array(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    if not nbytes:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8)), (nbytes,))


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"
