"""What several ranks are measured by: `sum8k`, `tp2_vs_1x2` and `flip` (flip_tests.py) of scripts/bench; and which
tests are asked for that need no llama-server: these, `draft` (draft_tests.py) and `step` (step_tests.py).

    sum8k         a sum of 8 KiB between two processes (sums.py), ours and gloo in turn
    tp2_vs_1x2    decode by two CPU ranks with one thread each in the tensor layout, and by one rank with two threads:
                  two servers on one file, asked in turn; ours is the first, `homeserve-1x2` its peer

Each pair of the second asks one rank twice, before and after the two ranks or the other way round, so that the CSV has
what the machine's noise is: `noise:tp2_vs_1x2` are the tokens per second of the second time. `load` of the engine
`machine` is the system's load average at each pair.

Samples are under model names of their own (`2 ranks`, `MODEL, 2 ranks`): a page shows each model by the commit that it
was measured on last, and these are measured at other times than the rest.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import sums
from measures import DRAFTING
from servers import Server, homeserve

from homeserve.bench.measures import decode
from homeserve.bench.prompts import Prompts

SUM, TENSOR, FLIP, DRAFT, STEP = "sum8k", "tp2_vs_1x2", "flip", "draft", "step"
TESTS = frozenset((SUM, TENSOR, FLIP, DRAFT, STEP))
"""Each of these runs is a group of its own; `draft` is taken by its parts too (`DRAFTING`)."""
MODELS = ("SmolLM2-135M-Instruct.Q4_1", "llama-1.5b.Q4_K_M")
"""Of the second, where no others are asked for."""
RANKS = 2
SUM_BYTES = 8192
GLOO, ONE_RANK = "gloo", "homeserve-1x2"
SUMS_MODEL = f"{RANKS} ranks"
TWO_RANKS = ("--devices", f"cpu:{RANKS}", "--layout", "tensor")
SLOT_TOKENS = 512


def wanted(tests: str | None, *, full: bool) -> frozenset[str]:
    """Those that `tests` names (by comma), else all of a full run."""
    if not tests:
        return TESTS if full else frozenset()
    names = frozenset(tests.split(","))
    return TESTS & names | (frozenset((DRAFT,)) if names & DRAFTING else frozenset())


def drafting(tests: str | None) -> frozenset[str]:
    """Which parts of `draft` are asked for: all, where none is named."""
    return frozenset((tests or "").split(",")) & DRAFTING or DRAFTING


def no_peer_needed(tests: str | None) -> bool:
    """Whether `tests` names these alone."""
    return bool(tests) and frozenset(tests.split(",")) <= TESTS | DRAFTING


class Keep(Protocol):
    """Where a sample goes."""

    def __call__(self, engine: str, test: str, unit: str, run: int, value: float, settings: str = "") -> None: ...


def of_model(name: str) -> str:
    """What the samples of `tp2_vs_1x2` on a model are under."""
    return f"{name}, {RANKS} ranks"


def torch_version(python: str) -> str | None:
    """Of the torch that this Python has, whose gloo is compared with; None without one."""
    ask = [python, "-c", "import torch; print(torch.__version__)"]
    done = subprocess.run(ask, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def measure_sums(pairs: int, python: str, keep: Keep, *, with_gloo: bool) -> None:
    """Median us of a call, once for each kind and pair, who goes first changing. `python` runs gloo."""
    kinds = [sums.OURS, GLOO] if with_gloo else [sums.OURS]
    for run in range(pairs):
        keep("machine", "load", "processes", run, os.getloadavg()[0])
        for kind in kinds if run % 2 == 0 else reversed(kinds):
            value = sums.measured(kind, RANKS, SUM_BYTES // 4, python if kind == GLOO else None)
            keep("homeserve" if kind == sums.OURS else GLOO, SUM, "us", run, value)


def two_sides(path: Path, threads: int, folder: Path, program: Sequence[str], isa: str) -> tuple[Server, Server]:
    """The two ranks with a thread each, and the one with as many threads."""
    level = ("--isa", isa) if isa else ()
    both = homeserve(str(path), threads // RANKS, SLOT_TOKENS, folder, program)
    both.command += [*TWO_RANKS, *level]
    both.settings = " ".join((*TWO_RANKS, "--threads", str(threads // RANKS)))
    one = homeserve(str(path), threads, SLOT_TOKENS, folder, program, ONE_RANK)
    one.command += level
    one.settings = f"--threads {threads}"
    return both, one


def measure_tensor(
    both: Server, one: Server, pairs: int, prompts: Prompts, keep: Keep, limits: Callable[[int], Any]
) -> None:
    """Tokens per second of each side once for each pair, and of one rank once more. Both servers run; each is asked
    once before, which does not count."""
    for server in (both, one):
        decode(server, prompts)
    for run in range(pairs):
        limits(run)
        keep("machine", "load", "processes", run, os.getloadavg()[0])
        # One rank twice around the two, so that a drift of the machine is in neither ratio with one sign.
        first, last = (TENSOR, f"noise:{TENSOR}") if run % 2 == 0 else (f"noise:{TENSOR}", TENSOR)
        keep(ONE_RANK, first, "tok/s", run, decode(one, prompts), one.settings)
        keep("homeserve", TENSOR, "tok/s", run, decode(both, prompts), both.settings)
        keep(ONE_RANK, last, "tok/s", run, decode(one, prompts), one.settings)
