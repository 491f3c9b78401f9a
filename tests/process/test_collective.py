"""Exchanges between real processes: exact, in the order of the ranks, bounded when a peer dies, stops or is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# The test folders are no package (pytest's importlib mode); this one has modules of its own.
sys.path.insert(0, str(Path(__file__).parent))

import collective_rank as rank_side

from backends.acts import ActShape, make_memory

PATIENCE_S = 60.0
"""A bound on every wait. It is for hangs: nothing is measured with it."""
BOUND_S = 4.0
DEPTH = 3


class Ranks:
    """Processes that share the acts of one shape."""

    def __init__(self, ranks: int, job: str, timeout_s: float = PATIENCE_S) -> None:
        routes = tuple((rank, (rank + 1) % ranks) for rank in range(ranks))
        shape = ActShape(ranks, piece_floats=4096, message_floats=16, depth=DEPTH, routes=routes)
        fd = make_memory(shape)
        words = [str(fd), json.dumps(asdict(shape))]
        self.processes = [
            subprocess.Popen(
                [sys.executable, rank_side.__file__, *words, str(rank), job, str(timeout_s)],
                pass_fds=(fd,),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        os.close(fd)
        self.hear({"up": True})
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

    def ready(self) -> None:
        """Wait until every rank has said so."""
        self.hear({"ready": True})

    def hear(self, wanted: dict[str, Any]) -> None:
        for process in self.processes:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline()) == wanted

    def said(self, rank: int) -> list[dict[str, Any]]:
        """All that a rank says until its end."""
        out, _ = self.processes[rank].communicate(timeout=PATIENCE_S)
        assert self.processes[rank].returncode == 0
        return [json.loads(line) for line in out.splitlines()]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def started() -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def start(*args: Any, **options: Any) -> Ranks:
        made.append(Ranks(*args, **options))
        return made[-1]

    yield start
    for ranks in made:
        ranks.close()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sum_has_the_bits_of_the_order_of_the_ranks_on_every_rank(started: Callable[..., Ranks], ranks: int) -> None:
    wanted = []
    for seed, (rows, width) in enumerate(rank_side.CASES * 3):
        total = rank_side.part_of(seed, 0, rows, width)
        for rank in range(1, ranks):
            total = total + rank_side.part_of(seed, rank, rows, width)
        wanted.append({"digest": rank_side.digest(total)})
    fleet = started(ranks, "sums")
    for rank in range(ranks):
        said = fleet.said(rank)
        assert said[:-1] == wanted
        counts = said[-1]["counts"]
        assert {label: entry[:2] for label, entry in counts.items()} == {
            f"sum {case}": [3, 3 * 4 * rows * width] for case, (rows, width) in enumerate(rank_side.CASES)
        }


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_gather_lays_unequal_parts_side_by_side(started: Callable[..., Ranks], ranks: int) -> None:
    fleet = started(ranks, "gathers")
    wanted = []
    for seed, shares in enumerate(rank_side.SHARES):
        parts = [rank_side.part_of(seed, rank, 4, shares[rank]) for rank in range(ranks)]
        wanted.append({"digest": rank_side.digest(np.concatenate(parts, axis=1))})
    for rank in range(ranks):
        assert fleet.said(rank)[:-1] == wanted


@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_come_in_order_and_whole(started: Callable[..., Ranks], ranks: int) -> None:
    fleet = started(ranks, "ring")
    said = fleet.said(0)
    assert said[:-1] == [{"value": float(seq + ranks - 1), "seq": seq} for seq in range(30)]
    for rank in range(1, ranks):
        assert fleet.said(rank)[-1]["counts"]["rows"][:2] == [60, 60 * 24]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_peer_that_dies_or_stops_is_an_error_within_the_bound(
    started: Callable[..., Ranks], ranks: int, how: signal.Signals
) -> None:
    fleet = started(ranks, "for_ever", BOUND_S)
    fleet.ready()
    fleet.processes[-1].send_signal(how)
    for rank in range(ranks - 1):
        error, counts = fleet.said(rank)
        assert (error["error"], error["label"], error["peer"]) == ("PeerLate", "for ever", ranks - 1)
        assert error["words"].startswith(f"rank {ranks - 1} did not come to sum 'for ever' of plan ")
        assert error["words"].endswith("in epoch 1, 1 x 64 within 4 s")
        assert error["again"] == error["words"]
        assert 0 < counts["counts"]["for ever"][2] < PATIENCE_S * 1e9
    assert fleet.processes[-1].poll() == (None if how == signal.SIGSTOP else -how)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_at_another_plan_is_refused_with_both_stamps(started: Callable[..., Ranks], ranks: int) -> None:
    fleet = started(ranks, "another_plan")
    mine, other = (f"sum 'ffn' of plan {seq} in epoch 1, 1 x 4" for seq in (7, 8))
    for rank in range(ranks):
        error = fleet.said(rank)[0]
        assert error["error"] == "StampMismatch"
        if rank == ranks - 1:
            assert error["words"] == f"rank 0 exchanges {mine} where this rank is at {other}"
        else:
            assert error["words"] == f"rank {ranks - 1} exchanges {other} where this rank is at {mine}"
