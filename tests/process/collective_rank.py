"""One rank of the tests of `HostCollective`, as a process: `collective_rank.py FD SHAPE RANK JOB TIMEOUT_S`.

Says that it is up and waits for a line, so that bounds do not cover how long a process takes to start. Then prints one
JSON document for each thing that it was told to do; what ends a job that runs for ever is its last but one.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.acts import ActShape, ExchangeError, Stamp
from backends.host import library
from backends.host.collective import HostCollective

CASES = ((1, 1), (1, 2048), (3, 40), (0, 64), (5, 0), (37, 300), (2, 5000))
"""Rows and width of sums; the last are longer than a piece."""
SHARES = ((30, 17, 17), (28, 26, 20), (0, 5, 1), (0, 0, 0), (1500, 0, 20))
SPREAD = 1e6
"""Parts of very different size: another order of the sum has other bits."""


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def part_of(seed: int, rank: int, rows: int, width: int) -> npt.NDArray[np.float32]:
    numbers = np.random.default_rng([seed, rank])
    scale = SPREAD ** numbers.uniform(-1, 1, (rows, width))
    return (numbers.standard_normal((rows, width)) * scale).astype(np.float32)


def digest(matrix: npt.NDArray[np.float32]) -> str:
    return hashlib.sha256(np.ascontiguousarray(matrix).tobytes()).hexdigest()


def sums(acts: HostCollective) -> None:
    """Each case several times, out of step with the peers."""
    late = random.Random(acts.rank)
    for seed, (rows, width) in enumerate(CASES * 3):
        buffer = part_of(seed, acts.rank, rows, width)
        if late.random() < 0.3:
            time.sleep(late.random() * 0.002)
        acts.sum(Stamp(1, seed, rows, f"sum {seed % len(CASES)}"), buffer)
        say(digest=digest(buffer))


def gathers(acts: HostCollective) -> None:
    for seed, shares in enumerate(SHARES):
        widths = shares[: acts.ranks]
        out = np.empty((4, sum(widths)), np.float32)
        acts.gather(Stamp(1, seed, 4, "heads"), part_of(seed, acts.rank, 4, widths[acts.rank]), out, widths)
        say(digest=digest(out))


def ring(acts: HostCollective) -> None:
    """Messages once around all ranks, rank 0 as many ahead as there is credit."""
    behind, ahead = (acts.rank - 1) % acts.ranks, (acts.rank + 1) % acts.ranks
    rows = np.zeros((2, 3), np.float32)
    for first in range(0, 30, 3):
        for seq in range(first, first + 3):
            if acts.rank > 0:
                acts.receive(Stamp(1, seq, 2, "rows"), behind, rows)
            acts.send(Stamp(1, seq, 2, "rows"), ahead, rows + 1 if acts.rank else np.full((2, 3), seq, np.float32))
        for seq in range(first, first + 3 if acts.rank == 0 else first):
            acts.receive(Stamp(1, seq, 2, "rows"), behind, rows)
            say(value=float(rows[1, 2]), seq=seq)


def for_ever(acts: HostCollective) -> None:
    buffer = np.ones((1, 64), np.float32)
    seq = 0
    while True:
        seq += 1
        acts.sum(Stamp(1, seq, 1, "for ever"), buffer)
        if seq == 100:
            say(ready=True)


def another_plan(acts: HostCollective) -> None:
    """The last rank is one plan ahead of the others."""
    acts.sum(Stamp(1, 8 if acts.rank == acts.ranks - 1 else 7, 1, "ffn"), np.ones((1, 4), np.float32))


JOBS: dict[str, Callable[[HostCollective], None]] = {
    "sums": sums,
    "gathers": gathers,
    "ring": ring,
    "for_ever": for_ever,
    "another_plan": another_plan,
}


def main(fd: str, shape: str, rank: str, job: str, timeout_s: str) -> None:
    facts = json.loads(shape)
    routes = tuple((source, target) for source, target in facts.pop("routes"))
    shape_ = ActShape(**facts | {"sizes": tuple(facts["sizes"])}, routes=routes)
    acts = HostCollective(library.load(), int(fd), shape_, int(rank), timeout_s=float(timeout_s))
    say(up=True)
    sys.stdin.readline()
    try:
        JOBS[job](acts)
    except ExchangeError as error:
        again = ""
        try:
            acts.sum(Stamp(1, 10**6, 1, "later"), np.ones((1, 1), np.float32))
        except ExchangeError as second:
            again = str(second)
        say(error=type(error).__name__, peer=error.peer, label=error.label, words=str(error), again=again)
    say(counts={label: [each.calls, each.moved_bytes, each.slept_ns] for label, each in acts.counts().items()})
    acts.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
