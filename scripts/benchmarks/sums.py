"""Time of a sum between ranks, by itself: what `sum8k` measures.

Ranks are processes of their own. A *run* starts them, lets them make `WARM` and then `CALLS` sums of 8 KiB one after
the other, and takes the median time of a call on rank 0. Ours and gloo (where torch is there) alternate, so that both
meet the same minutes of the machine; the line at the end says the median of the runs, the smallest and the largest.

    PYTHON scripts/benchmarks/sums.py [--ranks 2] [--bytes 8192] [--pairs 7] [--limit-us 15]

Exit status 1 where the median is over the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # the installed package first; a Python that has only gloo finds the checkout

from backends.acts import ActShape, Stamp, make_memory  # noqa: E402
from backends.host import library  # noqa: E402
from backends.host.collective import HostCollective  # noqa: E402

WARM, CALLS = 300, 2000
OURS = "ours"
BOUND_S = 20.0

Sum = Callable[[npt.NDArray[np.float32]], None]


def ours(rank: int, ranks: int, floats: int, fd: int) -> Sum:
    acts = HostCollective(library.load(), fd, ActShape(ranks, floats, 16, 1), rank, timeout_s=BOUND_S)
    stamp = Stamp(0, 0, 1, "sum")
    return lambda buffer: acts.sum(stamp, buffer[None])


def gloo(rank: int, ranks: int, store: str) -> Sum:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    return lambda buffer: dist.all_reduce(torch.from_numpy(buffer))


def serve(kind: str, rank: int, ranks: int, floats: int, where: str) -> None:
    """One rank: prints the median of its calls in us."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    call = ours(rank, ranks, floats, int(where)) if kind == OURS else gloo(rank, ranks, where)
    buffer = np.zeros(floats, np.float32)
    times = []
    for number in range(WARM + CALLS):
        began = time.perf_counter_ns()
        call(buffer)
        if number >= WARM:
            times.append((time.perf_counter_ns() - began) / 1000)
    print(json.dumps(statistics.median(times)), flush=True)


def measured(kind: str, ranks: int, floats: int, python: str | None = None) -> float:
    """Median us of a call on rank 0, in one run. `python` runs the ranks where it is not this one."""
    with tempfile.TemporaryDirectory() as folder:
        fd = make_memory(ActShape(ranks, floats, 16, 1))
        where = str(fd) if kind == OURS else str(Path(folder) / "store")
        command = [
            python or sys.executable,
            __file__,
            "--rank",
            kind,
            where,
            "--ranks",
            str(ranks),
            "--bytes",
            str(floats * 4),
        ]
        ran = [
            subprocess.Popen([*command, "--number", str(rank)], stdout=subprocess.PIPE, text=True, pass_fds=(fd,))
            for rank in range(ranks)
        ]
        os.close(fd)
        try:
            said = [each.communicate(timeout=2 * BOUND_S)[0] for each in ran]
        finally:
            for each in ran:
                each.kill()
                each.wait()
    if any(each.returncode for each in ran):
        raise RuntimeError(f"sums by {kind} did not work: {[each.returncode for each in ran]}")
    return float(json.loads(said[0]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, default=8192)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--limit-us", type=float, default=15.0)
    parser.add_argument("--rank", nargs=2, metavar=("KIND", "WHERE"), help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    floats = asked.bytes // 4
    if asked.rank:
        serve(asked.rank[0], asked.number, asked.ranks, floats, asked.rank[1])
        os._exit(0)  # its time is told; gloo's threads may abort an interpreter that puts itself away
    kinds = (OURS, "gloo") if find_spec("torch") else (OURS,)
    runs: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(asked.pairs):
        for kind in kinds:
            runs[kind].append(measured(kind, asked.ranks, floats))
    for kind, each in runs.items():
        print(
            f"{kind:5} {asked.ranks} ranks, {asked.bytes} bytes: median {statistics.median(each):.1f} us of"
            f" {asked.pairs} runs ({min(each):.1f} to {max(each):.1f})"
        )
    if "gloo" not in runs:
        print("gloo  not compared: torch is not installed")
    return int(statistics.median(runs[OURS]) > asked.limit_us)


if __name__ == "__main__":
    sys.exit(main())
