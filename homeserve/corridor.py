"""The sampler of the corridor: what is free on each device, ten times a second, from before the first byte is loaded.

A thread, not a task: while a server boots its loop is held up now and then (an import, a large file), and these are the
moments that count. A reading is a few small files that stay open, some 0.3 ms; the thread takes 0.4 % of a core.

What cannot be read is None and stays None; nothing here may fail a server. Breaches of the floor go to the loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from budget.corridor import Breach, Corridor
from budget.facts import MIB
from budget.host import AvailableMemory

log = logging.getLogger(__name__)

PERIOD_S = 0.1
STOP_S = 2.0
"""How long a reading that is under way may take to end."""


class FreeReader(Protocol):
    """Where free memory is read: one value for each device that it knows, always in the same order. It is called in the
    sampler's thread, and closed when it is not needed any more. Raises OSError for what cannot be read at all."""

    def __call__(self) -> Sequence[int | None]: ...

    def close(self) -> None: ...


class HostFree:
    """What this process may still take of the host's memory, with its control groups."""

    def __init__(self) -> None:
        self._memory = AvailableMemory()

    def __call__(self) -> Sequence[int | None]:
        return (self._memory.read(),)

    def close(self) -> None:
        self._memory.close()


class CorridorSampler:
    """`start` first of all, `watch` when more is known, `stop` last.

    `phase` says what the server is doing; it is called in the sampler's thread. `on_breach` is called on the loop.
    """

    def __init__(
        self,
        floor_bytes: int,
        phase: Callable[[], str],
        on_breach: Callable[[Breach], None],
        read: FreeReader | None = None,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._corridor = Corridor((floor_bytes,), period_s * 1e3)
        self._indices: tuple[int, ...] | None = None
        self._phase = phase
        self._on_breach = on_breach
        self._read = read
        self._period_s = period_s
        self._clock = clock
        self._began = clock()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, with the first value taken at once. Call it on the loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="corridor", daemon=True)
        self._thread.start()

    def watch(self, read: FreeReader, floor_bytes: Sequence[int], indices: Sequence[int]) -> None:
        """From here on read `read`: its first value is the host's, as before, and more devices follow. `indices` are
        their numbers in the budget."""
        with self._lock:
            if self._read is not None:
                self._read.close()
            self._read = read
            self._indices = tuple(indices)
            self._corridor.set_floors(floor_bytes)

    def stop(self) -> None:
        """End the thread. Does nothing a second time, or before `start`."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(STOP_S)
            self._thread = None
        with self._lock:
            if self._read is not None:
                self._read.close()
                self._read = None

    def as_json(self) -> dict[str, Any]:
        """The body of `/v1/homeserve/corridor`."""
        with self._lock:
            return self._corridor.as_json(self._indices)

    def least_bytes(self) -> tuple[tuple[int, int], ...]:
        """(device, least free bytes since the start) of each device that is known."""
        with self._lock:
            numbers = self._indices or range(len(self._corridor))
            least = [self._corridor.least(position) for position in range(len(self._corridor))]
        return tuple(
            (number, sample.free_bytes)
            for number, sample in zip(numbers, least, strict=False)
            if sample is not None and sample.free_bytes is not None
        )

    # ------------------------------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        with self._lock:
            if self._read is None:
                self._read = HostFree()
        due = self._clock()
        while not self._ended.is_set():
            self._take()
            # A reading that took longer than the period costs its samples and is not made up for.
            due = max(due + self._period_s, self._clock())
            self._ended.wait(due - self._clock())

    def _take(self) -> None:
        with self._lock:
            if self._read is None:
                return  # stopped
            try:
                free = self._read()
            except OSError as error:
                log.debug("free memory cannot be read", extra={"why": str(error)})
                free = ()
            begun = self._corridor.sample(self._clock() - self._began, self._phase(), free)
        for breach in begun:
            self._tell(breach)

    def _tell(self, breach: Breach) -> None:
        log.warning("%s", words(breach), extra={"device": breach.device})
        assert self._loop is not None, "started on a loop"
        try:
            self._loop.call_soon_threadsafe(self._on_breach, breach)
        except RuntimeError:  # the loop has closed: nobody is left to be told
            self._ended.set()


def words(breach: Breach) -> str:
    """A breach for a person."""
    free, floor = (breach.sample.free_bytes or 0) / MIB, breach.floor_bytes / MIB
    return (
        f"free memory of device {breach.device} is down to {free:.0f} MiB, below the floor of {floor:.0f} MiB"
        f" ({breach.sample.phase})"
    )
