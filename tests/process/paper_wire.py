"""A wire on paper: collective and doorbells of several ranks under one random schedule, with a deadlock detector.

Every actor (a rank, the engine) is a thread, of which exactly one runs at a time. An actor that has to wait says for
what and hands over; whoever waits for nothing any more, or for something that has come, may be drawn next. What an
actor puts on the wire arrives after a random number of steps. When nothing is on its way and all who are left wait,
that is a deadlock: it is raised in each of them, with what every one waits for. There is no clock: a schedule is a
function of its seed.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.acts import ActShape, Counts, ExchangeError, NoCredit, Stamp, StampMismatch

Floats = npt.NDArray[np.float32]
Key = tuple[object, ...]
LATEST = 40
"""Steps that a message travels at most."""
PATIENCE_S = 60.0
"""A bound on a whole schedule. It is for hangs of the test itself: nothing is measured with it."""

_THREADS = ThreadPoolExecutor(8)
"""At least as many as a schedule has actors; kept, because making threads would take longer than most schedules."""


class Deadlock(Exception):
    """All actors wait for one another. The message says for what."""


@dataclass
class _Actor:
    name: str
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held while it is another one's turn; a plain lock, because a schedule is mostly handing over."""
    ready: Callable[[], bool] | None = None
    why: str = ""
    over: bool = False


class Wire:
    """One schedule. `act` adds actors, `run` runs them all to their end; then others may be added."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.steps = 0
        self.arrivals: dict[Key, deque[tuple[int, Any]]] = {}
        self.taken: Counter[tuple[int, int]] = Counter()
        """Messages taken from each channel. Seen at once: whoever may send again has heard of it in a way that takes
        longer (the engine issued a plan because of it)."""
        self._actors: list[_Actor] = []
        self._bodies: list[Callable[[], None]] = []
        self._running: _Actor | None = None
        self._stuck = ""

    def act(self, name: str, body: Callable[[], None]) -> None:
        actor = _Actor(name)
        actor.turn.acquire()
        self._actors.append(actor)
        self._bodies.append(body)

    def run(self) -> None:
        """Raises the first error of an actor that is not the echo of another one's end."""
        playing = [_THREADS.submit(self._play, *pair) for pair in zip(self._actors, self._bodies, strict=True)]
        self._hand_over()
        errors = [error for each in playing if (error := each.exception(PATIENCE_S)) is not None]
        self._actors, self._bodies = [], []
        for error in sorted(errors, key=lambda each: isinstance(each, Deadlock)):
            raise error

    # ---------------------------------------------------------------------------------------- for actors

    def put(self, key: Key, message: Any) -> None:
        """Behind what was put there before, and there after some steps."""
        self.arrivals.setdefault(key, deque()).append((self.steps + self.chance.randrange(LATEST), message))

    def there(self, key: Key, count: int = 1) -> bool:
        """Have the first `count` messages come?"""
        queue = self.arrivals.get(key, ())
        return len(queue) >= count and all(queue[i][0] <= self.steps for i in range(count))

    def take(self, key: Key, why: str) -> Any:
        self.wait(lambda: self.there(key), why)
        return self.arrivals[key].popleft()[1]

    def wait(self, ready: Callable[[], bool], why: str) -> None:
        """Hand over until `ready`. Raises Deadlock."""
        actor = self._running
        assert actor is not None
        actor.ready, actor.why = ready, why
        self._hand_over()
        actor.turn.acquire()
        actor.ready = None
        if self._stuck:
            raise Deadlock(self._stuck)

    # --------------------------------------------------------------------------------------------- inside

    def _play(self, actor: _Actor, body: Callable[[], None]) -> None:
        actor.turn.acquire()
        try:
            body()
        finally:
            actor.over = True
            self._hand_over()

    def _hand_over(self) -> None:
        waiting = [actor for actor in self._actors if not actor.over]
        if not waiting:
            return
        able = [actor for actor in waiting if self._stuck or actor.ready is None or actor.ready()]
        while not able:
            later = [at for queue in self.arrivals.values() for at, _ in queue if at > self.steps]
            if not later:
                self._stuck = "; ".join(f"{actor.name} waits for {actor.why}" for actor in waiting)
                able = waiting
                break
            self.steps = min(later)
            able = [actor for actor in waiting if actor.ready is not None and actor.ready()]
        self.steps += 1
        self._running = able[self.chance.randrange(len(able))]
        self._running.turn.release()


class PaperCollective:
    """`Collective` of one rank over a `Wire`: the same stamps, credit and errors as over shared memory."""

    def __init__(self, wire: Wire, shape: ActShape, rank: int) -> None:
        self.rank = rank
        self.ranks = shape.ranks
        self._wire = wire
        self._shape = shape
        self._failed: ExchangeError | None = None
        self._sent: Counter[int] = Counter()
        self._counts: dict[str, Counts] = {}

    def sum(self, stamp: Stamp, buffer: Floats) -> None:
        parts = self._all(("sum", stamp, (buffer.shape[1],) * self.ranks), stamp, buffer)
        total = parts[0].copy()
        for part in parts[1:]:
            total += part
        buffer[:] = total

    def gather(self, stamp: Stamp, part: Floats, out: Floats, widths: Sequence[int]) -> None:
        if part.shape[1] != widths[self.rank] or out.shape != (stamp.rows, sum(widths)):
            raise ValueError(f"{stamp.label}: a part {part.shape} into {out.shape}, widths {list(widths)}")
        out[:] = np.concatenate(self._all(("gather", stamp, tuple(widths)), stamp, part), axis=1)

    def send(self, stamp: Stamp, target: int, rows: Floats) -> None:
        self._enter(stamp, rows)
        if self.credit(target) < 1:
            raise NoCredit(f"the channel to rank {target} is full at {stamp}", stamp.label, target)
        self._sent[target] += 1
        self._wire.put(("channel", self.rank, target), (("message", stamp, rows.shape[1]), rows.copy()))
        self._count(stamp.label, rows.nbytes)

    def receive(self, stamp: Stamp, source: int, out: Floats) -> None:
        self._enter(stamp, out)
        found, rows = self._wire.take(("channel", source, self.rank), f"rank {source} at {stamp}")
        self._wire.taken[source, self.rank] += 1
        self._compare(("message", stamp, out.shape[1]), found, source)
        out[:] = rows
        self._count(stamp.label, rows.nbytes)

    def credit(self, target: int) -> int:
        if (self.rank, target) not in self._shape.routes:
            raise ValueError(f"there is no channel from rank {self.rank} to rank {target}")
        return self._shape.depth - self._sent[target] + self._wire.taken[self.rank, target]

    def counts(self) -> Mapping[str, Counts]:
        return self._counts

    def totals(self) -> tuple[int, int, int]:
        every = self._counts.values()
        return sum(each.calls for each in every), sum(each.moved_bytes for each in every), 0

    def close(self) -> None:
        """Nothing is held."""

    def _all(self, mark: tuple[Any, ...], stamp: Stamp, own: Floats) -> list[Floats]:
        """The matrices of all ranks in their order, once all have posted this one."""
        self._enter(stamp, own)
        self._count(stamp.label, own.nbytes)
        for peer in range(self.ranks):
            if peer != self.rank:
                self._wire.put(("mail", self.rank, peer), (mark, own.copy()))
        parts = []
        for peer in range(self.ranks):
            if peer == self.rank:
                parts.append(own)
                continue
            found, part = self._wire.take(("mail", peer, self.rank), f"rank {peer} at {stamp}")
            self._compare(mark, found, peer)
            parts.append(part)
        return parts

    def _enter(self, stamp: Stamp, matrix: Floats) -> None:
        if self._failed is not None:
            raise self._failed
        if matrix.ndim != 2 or len(matrix) != stamp.rows:
            raise ValueError(f"{stamp.label}: a matrix {matrix.shape} under a stamp of {stamp.rows} rows")

    def _compare(self, wanted: object, found: object, peer: int) -> None:
        if wanted != found:
            self._failed = StampMismatch("", peer, str(wanted), str(found))
            raise self._failed

    def _count(self, label: str, moved: int) -> None:
        old = self._counts.get(label, Counts(0, 0, 0, 0))
        self._counts[label] = Counts(old.calls + 1, old.moved_bytes + moved, 0, 0)
