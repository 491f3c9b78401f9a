"""What a decode step costs beside its computing: `step` of scripts/bench. No peer, one worker with one thread.

    step, step64            CPU time of the engine process for each plan, with 1 and with 64 streams open
    step_gap, step_gap64    time in which the worker had nothing to compute, for each plan

homeserve.bench.steps says how both are read from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rank_tests import STEP, Keep
from servers import Server, homeserve

from homeserve.bench.prompts import Prompts
from homeserve.bench.steps import step

MODELS = ("SmolLM2-135M-Instruct.Q4_1",)
STREAMS = (1, 64)
MOST = max(STREAMS)
TESTS = (STEP, f"{STEP}64", f"{STEP}_gap", f"{STEP}_gap64")
ANSWER = {1: 960, 64: 200}
"""Tokens of each answer: some longer than the window."""
CONTEXT = 1024
WINDOW_S = {1: 4.0, 64: 8.0}
"""A clock of the system ticks each 10 ms: of a window of some seconds that is less than a percent."""


def of_model(name: str) -> str:
    """What the samples of a model are filed under."""
    return f"{name}, steps"


def server_of(path: Path, folder: Path, program: Sequence[str], isa: str) -> Server:
    found = homeserve(str(path), 1, CONTEXT, folder, program)
    for name, value in (("--kv-tokens", MOST * CONTEXT), ("--max-running", MOST)):
        found.command[found.command.index(name) + 1] = str(value)
    found.command += ["--max-waiting", str(MOST), *(("--isa", isa) if isa else ())]
    found.settings = "--threads 1"
    return found


def measure_steps(server: Server, runs: int, prompts: Prompts, keep: Keep) -> None:
    """`runs` windows with each number of streams. Raises StepFailed."""
    for run in range(runs):
        for streams in STREAMS:
            suffix = "" if streams == 1 else str(streams)
            cpu_ms, gap_ms = step(server, server.pid, streams, prompts, ANSWER[streams], WINDOW_S[streams])
            keep("homeserve", f"{STEP}{suffix}", "ms", run, cpu_ms, server.settings)
            keep("homeserve", f"{STEP}_gap{suffix}", "ms", run, gap_ms, server.settings)
