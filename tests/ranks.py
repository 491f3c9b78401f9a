"""Several ranks of one fleet in one process: each has a collective of its own, and runs in a thread of its own.

    with over_memory(library, ranks=3) as group:    # native exchanges through shared memory, as between processes
    group = on_paper(ranks=3)                       # exchanges in Python on a paper wire: no native code, no clock

        programs = [device.bind(ops[rank], ..., collective=acts) for rank, acts in enumerate(group.acts)]
        logits = group.run(programs, batches)       # a batch for each rank, or one for all

On paper one rank runs at a time and ranks that wait for one another end in `Deadlock` at once. Over memory a rank whose
peer does not come raises `PeerLate` after `timeout_s`, and `limit_s` bounds the whole call. Each CPU rank needs a
backend of its own: programs of one share its team, and one that waits for another in an exchange has the team.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import CDLL
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

# The test folders are no package (pytest's importlib mode); the paper wire lies among the process tests.
sys.path.insert(0, str(Path(__file__).parent / "process"))

from paper_wire import Deadlock as Deadlock
from paper_wire import PaperCollective, Wire

from backends.acts import ActShape, make_memory
from backends.base import Batch, Collective, Program

TIMEOUT_S = 20.0
LIMIT_S = 60.0
"""Bounds for hangs: nothing is measured with them."""


class Group(Protocol):
    """The ranks of one fleet."""

    acts: Sequence[Collective]

    def together(self, step: Callable[[int], Any]) -> list[Any]:
        """What `step(rank)` gives on each rank, all at once. Raises the first error of any, with its rank noted."""
        ...

    def run(self, programs: Sequence[Program], batches: Batch | Sequence[Batch]) -> list[npt.NDArray[np.float32]]:
        """Logits of each rank's program."""
        ...


class _Group(ABC):
    def __init__(self, acts: Sequence[Collective]) -> None:
        self.acts = acts

    @abstractmethod
    def together(self, step: Callable[[int], Any]) -> list[Any]: ...

    def run(self, programs: Sequence[Program], batches: Batch | Sequence[Batch]) -> list[npt.NDArray[np.float32]]:
        own = [batches] * len(programs) if isinstance(batches, Batch) else batches
        assert len(programs) == len(own) == len(self.acts), "a program and a batch for each rank"
        return self.together(lambda rank: programs[rank].run(own[rank]).copy())


class _OverMemory(_Group):
    def __init__(self, acts: Sequence[Collective], limit_s: float) -> None:
        super().__init__(acts)
        self._limit_s = limit_s

    def together(self, step: Callable[[int], Any]) -> list[Any]:
        gave: dict[int, Any] = {}
        errors: list[BaseException] = []

        def play(rank: int) -> None:
            try:
                gave[rank] = step(rank)
            except BaseException as error:  # noqa: BLE001  the caller raises it again
                error.add_note(f"on rank {rank} of {len(self.acts)}")
                errors.append(error)

        # Daemons: a rank that hangs must not keep the interpreter from ending.
        threads = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in range(len(self.acts))]
        for thread in threads:
            thread.start()
        end = time.monotonic() + self._limit_s
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        if errors:
            raise errors[0]
        late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if late:
            raise TimeoutError(f"ranks {late} did not end within {self._limit_s:g} s")
        return [gave[rank] for rank in range(len(self.acts))]


class _OnPaper(_Group):
    def __init__(self, wire: Wire, acts: Sequence[Collective]) -> None:
        super().__init__(acts)
        self._wire = wire

    def together(self, step: Callable[[int], Any]) -> list[Any]:
        gave: dict[int, Any] = {}

        def act(rank: int) -> None:
            try:
                gave[rank] = step(rank)
            except BaseException as error:
                error.add_note(f"on rank {rank} of {len(self.acts)}")
                raise

        for rank in range(len(self.acts)):
            self._wire.act(f"rank {rank}", lambda rank=rank: act(rank))
        self._wire.run()
        return [gave[rank] for rank in range(len(self.acts))]


def shape_of(ranks: int, message_floats: int = 1 << 16, piece_floats: int = 1 << 12, depth: int = 4) -> ActShape:
    """Channels from each rank to the next, and from the last one to each of the others."""
    routes = [(rank, rank + 1) for rank in range(ranks - 1)] + [(ranks - 1, rank) for rank in range(ranks - 1)]
    return ActShape(ranks, piece_floats, message_floats, depth, tuple(routes))


@contextmanager
def over_memory(
    library: CDLL,
    ranks: int,
    shape: ActShape | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    limit_s: float = LIMIT_S,
    spin_us: int = 0,
) -> Iterator[Group]:
    """`library` is that of an opened CPU backend; whatever backend the programs run on, it makes the exchanges."""
    from backends.host.collective import HostCollective

    shape = shape or shape_of(ranks)
    fd = make_memory(shape)
    acts: list[HostCollective] = []
    try:
        for rank in range(ranks):
            acts.append(HostCollective(library, fd, shape, rank, timeout_s=timeout_s, spin_us=spin_us))
        yield _OverMemory(acts, limit_s)
    finally:
        for each in acts:
            each.close()
        os.close(fd)


def on_paper(ranks: int, shape: ActShape | None = None, *, seed: int = 0) -> Group:
    """The order in which ranks run and messages arrive is drawn from `seed`."""
    wire = Wire(seed)
    return _OnPaper(wire, [PaperCollective(wire, shape or shape_of(ranks), rank) for rank in range(ranks)])
