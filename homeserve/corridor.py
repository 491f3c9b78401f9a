"""The sampler of the corridor: what is free on each device, ten times a second, from before the first byte is loaded.

A thread, not a task: while a server boots its loop is held up now and then (an import, a large file), and these are the
moments that count. A reading is a few small files that stay open, some 0.3 ms; the thread takes 0.4 % of a core.

While the layout changes it looks every `FLIP_PERIOD_S` and at each step of the change, whose name is the phase then;
beside free memory it then reads what each rank holds (`RankPeaks`): the ledger has a moment of its own for that.

What cannot be read is None and stays None; nothing here may fail a server. Breaches of the floor go to the loop.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from budget.corridor import Breach, Corridor
from budget.facts import MIB
from budget.host import AvailableMemory

log = logging.getLogger(__name__)

PERIOD_S = 0.1
FLIP_PERIOD_S = 0.004
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


@dataclass(frozen=True)
class FlipStep:
    """Where a flip is: `phase` is what samples are marked with, `moment` which sum of the ledger holds then (empty:
    nothing moves yet), `pids` are the ranks (rank, pid)."""

    phase: str
    moment: str
    pids: tuple[tuple[int, int], ...]


@dataclass
class Peak:
    """The most that a rank held, in bytes, when and in which phase."""

    most: int
    at_s: float
    phase: str


class RankPeaks:
    """What ranks hold while the layout changes, of each moment of the ledger the most. Their own memory alone: what
    files and shared memory back is not a rank's.

    The kernel's counters lag behind by some pages for each processor of the box; an exact reading walks all pages and
    holds up whoever maps some meanwhile.
    """

    def __init__(self, root: str | Path = "/") -> None:
        self.taken = 0
        self._root = Path(root)
        self._most: dict[tuple[int, str], Peak] = {}

    def take(self, at_s: float, step: FlipStep) -> None:
        """A process that has gone is left out."""
        self.taken += 1
        for rank, pid in step.pids:
            held = self._private_bytes(pid)
            if held is None:
                continue
            known = self._most.get((rank, step.moment))
            if known is None or held > known.most:
                self._most[rank, step.moment] = Peak(held, at_s, step.phase)

    def as_json(self, ledger: Mapping[tuple[int, str], int]) -> dict[str, Any]:
        """`ledger`: what the plan allows each rank at each moment, in bytes. A rank's own line is that of the moment
        that came nearest to it (or went furthest past it)."""
        ranks = sorted({rank for rank, _ in self._most})
        return {
            "period_ms": FLIP_PERIOD_S * 1e3,
            "taken": self.taken,
            "ranks": [self._rank(rank, ledger) for rank in ranks],
        }

    def _rank(self, rank: int, ledger: Mapping[tuple[int, str], int]) -> dict[str, Any]:
        moments = [
            {
                "moment": moment,
                "peak_mib": round(peak.most / MIB, 2),
                "ledger_mib": round(ledger[rank, moment] / MIB, 2) if (rank, moment) in ledger else None,
                "at": round(peak.at_s, 3),
                "phase": peak.phase,
            }
            for (of, moment), peak in self._most.items()
            if of == rank
        ]
        nearest = max(moments, key=lambda each: each["peak_mib"] - (each["ledger_mib"] or 0.0))  # type: ignore[operator]
        told = {name: nearest[name] for name in ("peak_mib", "ledger_mib", "moment")}
        return {"rank": rank, **told, "moments": moments}

    def _private_bytes(self, pid: int) -> int | None:
        """Resident, without what files and shared memory back."""
        try:
            words = (self._root / f"proc/{pid}/statm").read_text().split()
            return (int(words[1]) - int(words[2])) * mmap.PAGESIZE
        except (OSError, IndexError, ValueError):
            return None


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
        peaks: RankPeaks | None = None,
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
        self._woken = threading.Event()
        self._flip: FlipStep | None = None
        self._peaks = peaks or RankPeaks()
        self._ledger: Mapping[tuple[int, str], int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, with the first value taken at once. Call it on the loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="corridor", daemon=True)
        self._thread.start()

    def watch(
        self,
        read: FreeReader,
        floor_bytes: Sequence[int],
        indices: Sequence[int],
        flip_bytes: Mapping[tuple[int, str], int] | None = None,
    ) -> None:
        """From here on read `read`: its first value is the host's, as before, and more devices follow. `indices` are
        their numbers in the budget; `flip_bytes` is what the ledger has for each rank at each moment of a flip."""
        with self._lock:
            if self._read is not None:
                self._read.close()
            self._read = read
            self._indices = tuple(indices)
            self._corridor.set_floors(floor_bytes)
            if self._ledger and self._ledger != flip_bytes:
                self._peaks = RankPeaks()  # other ranks' moments are told apart from these
            self._ledger = dict(flip_bytes or {})

    def flip(self, step: FlipStep | None) -> None:
        """A flip has come to a step; None: it is over."""
        self._flip = step
        self._woken.set()

    def stop(self) -> None:
        """End the thread. Does nothing a second time, or before `start`."""
        self._ended.set()
        self._woken.set()
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
            began = round(time.time() - (self._clock() - self._began), 3)
            told = self._corridor.as_json(self._indices)
            return told | {"began": began, "flips": self._peaks.as_json(self._ledger)}

    def levels(self) -> tuple[tuple[int, int, int | None, int | None], ...]:
        """(device, floor, free now, least free since the start) of each device, in bytes; None: not known."""
        with self._lock:
            numbers = self._indices or tuple(range(len(self._corridor)))
            return tuple((number, *self._corridor.level(place)) for place, number in enumerate(numbers))

    # ------------------------------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        with self._lock:
            if self._read is None:
                self._read = HostFree()
        due = self._clock()
        while not self._ended.is_set():
            self._take()
            # A reading that took longer than the period costs its samples and is not made up for.
            period_s = self._period_s if self._flip is None else min(self._period_s, FLIP_PERIOD_S)
            due = max(due + period_s, self._clock())
            if self._woken.wait(due - self._clock()):
                self._woken.clear()
                due = self._clock()

    def _take(self) -> None:
        with self._lock:
            if self._read is None:
                return  # stopped
            try:
                free = self._read()
            except OSError as error:
                log.debug("free memory cannot be read", extra={"why": str(error)})
                free = ()
            flip, at_s = self._flip, self._clock() - self._began
            begun = self._corridor.sample(at_s, self._phase() if flip is None else flip.phase, free)
            if flip is not None and flip.moment:
                self._peaks.take(at_s, flip)
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
