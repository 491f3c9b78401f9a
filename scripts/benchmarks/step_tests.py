"""What a decode step costs beside its computing: `step` of scripts/bench. No peer, one worker with one thread.

    step, step64            CPU time of the engine process for each plan, with 1 and with 64 streams open
    step_gap, step_gap64    time in which the worker had nothing to compute, for each plan

All is read from outside over a window in which every stream decodes: CPU time from the system, plans and the worker's
idle time from `/v1/homeserve/status`. The engine process parses, decides, detokenises and writes all the streams; the
clients are threads of this process. The window begins when each stream has had its first token.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from client import complete
from measures import Prompts
from rank_tests import STEP, Keep
from servers import Server, homeserve

MODELS = ("SmolLM2-135M-Instruct.Q4_1",)
STREAMS = (1, 64)
MOST = max(STREAMS)
TESTS = (STEP, f"{STEP}64", f"{STEP}_gap", f"{STEP}_gap64")
PROMPT = 8
ANSWER = {1: 960, 64: 200}
"""Tokens of each answer: some longer than the window."""
CONTEXT = 1024
WINDOW_S = {1: 4.0, 64: 8.0}
"""A clock of the system ticks each 10 ms: of a window of some seconds that is less than a percent."""
STARTED_S = 60.0


class StepFailed(RuntimeError):
    """The window was not one of decoding alone."""


@dataclass(frozen=True)
class Reading:
    """At one moment: plans that came back, the worker's idle milliseconds, CPU seconds of the engine process."""

    plans: int
    idle_ms: float
    cpu_s: float
    running: int


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
            cpu_ms, gap_ms = step(server, streams, prompts)
            keep("homeserve", f"{STEP}{suffix}", "ms", run, cpu_ms, server.settings)
            keep("homeserve", f"{STEP}_gap{suffix}", "ms", run, gap_ms, server.settings)


def step(server: Server, streams: int, prompts: Prompts) -> tuple[float, float]:
    """(CPU milliseconds of the engine, idle milliseconds of the worker), for each plan of a window."""
    errors: list[Exception] = []
    asking = [
        threading.Thread(target=_ask, args=(server.url, prompts.draw(PROMPT), ANSWER[streams], errors), daemon=True)
        for _ in range(streams)
    ]
    for thread in asking:
        thread.start()
    _wait_for(server, streams, errors)
    before = reading(server)
    time.sleep(WINDOW_S[streams])
    after = reading(server)
    for thread in asking:
        thread.join()
    if errors:
        raise StepFailed(f"a stream failed: {errors[0]}")
    return per_plan(before, after, streams)


def per_plan(before: Reading, after: Reading, streams: int) -> tuple[float, float]:
    """Raises StepFailed where a stream had ended, or nothing came back."""
    plans = after.plans - before.plans
    if after.running != streams or plans < 1:
        raise StepFailed(f"{after.running} of {streams} streams were open at the end of a window of {plans} plans")
    return 1e3 * (after.cpu_s - before.cpu_s) / plans, (after.idle_ms - before.idle_ms) / plans


def reading(server: Server) -> Reading:
    status = server.get("/v1/homeserve/status")
    assert server.process is not None, "it runs"
    spent = psutil.Process(server.process.pid).cpu_times()
    (rank,) = status["ranks"]
    plans, running = status["engine"]["plans_acked"], status["requests"]["running"]
    return Reading(int(plans), float(rank["idle_ms"]), spent.user + spent.system, int(running))


def _ask(url: str, prompt: list[int], answer: int, errors: list[Exception]) -> None:
    try:
        complete(url, prompt, answer)
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        errors.append(error)


def _wait_for(server: Server, streams: int, errors: Sequence[Exception]) -> None:
    """Until every stream decodes: its prompt is read with its first token."""
    until = time.monotonic() + STARTED_S
    while time.monotonic() < until and not errors:
        status: Mapping[str, Mapping[str, int]] = server.get("/v1/homeserve/status")
        if status["requests"]["running"] == streams:
            time.sleep(0.5)
            return
        time.sleep(0.02)
    raise StepFailed(f"{streams} streams did not begin within {STARTED_S:.0f} s: {errors[:1]}")
