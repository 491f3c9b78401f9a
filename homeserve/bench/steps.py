"""What a decode step costs beside its computing, from outside: over a window in which every stream decodes.

    CPU time    of the engine process, for each plan: it parses, decides, detokenises and writes all the streams
    gap         time in which the busiest worker had nothing to compute, for each plan

CPU time comes from the system, plans and idle time from `/v1/homeserve/status`; the clients are threads of this
process. The window begins when each stream has had its first token.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil  # type: ignore[import-untyped]

from homeserve.bench.client import Target, Unmeasured, complete
from homeserve.bench.prompts import Prompts

PROMPT = 8
STARTED_S = 60.0
STUCK_S = 3.0
"""Streams of which some only wait for so long will not run together."""
SETTLE_S = 0.5


class StepFailed(Unmeasured):
    """The window was not one of decoding alone."""


class StreamsEnded(StepFailed):
    """Some were over before the window was."""


@dataclass(frozen=True)
class Reading:
    """At one moment: plans that came back, the busiest worker's idle milliseconds, CPU seconds of the engine process,
    requests that run."""

    plans: int
    idle_ms: float
    cpu_s: float
    running: int


def step(target: Target, pid: int, streams: int, prompts: Prompts, answer: int, window_s: float) -> tuple[float, float]:
    """(CPU milliseconds of the engine process `pid`, idle milliseconds of the worker), for each plan of a window of
    `window_s`. `answer`: tokens of each stream, some longer than the window. Raises StepFailed."""
    errors: list[Exception] = []
    asking = [
        threading.Thread(target=_ask, args=(target, prompts.draw(PROMPT), answer, errors), daemon=True)
        for _ in range(streams)
    ]
    for thread in asking:
        thread.start()
    try:
        _wait_for(target, streams, errors)
        before = reading(target, pid)
        time.sleep(window_s)
        after = reading(target, pid)
    finally:
        # What is measured next must not find them still running.
        for thread in asking:
            thread.join()
    if errors:
        raise StepFailed(f"a stream failed: {errors[0]}")
    return per_plan(before, after, streams)


def per_plan(before: Reading, after: Reading, streams: int) -> tuple[float, float]:
    """Raises StreamsEnded where a stream had ended, or nothing came back."""
    plans = after.plans - before.plans
    if after.running != streams or plans < 1:
        raise StreamsEnded(f"{after.running} of {streams} streams were open at the end of a window of {plans} plans")
    return 1e3 * (after.cpu_s - before.cpu_s) / plans, (after.idle_ms - before.idle_ms) / plans


def reading(target: Target, pid: int) -> Reading:
    status = target.get("/v1/homeserve/status")
    spent = psutil.Process(pid).cpu_times()
    idle_ms = min(float(rank["idle_ms"]) for rank in status["ranks"])
    plans, running = status["engine"]["plans_acked"], status["requests"]["running"]
    return Reading(int(plans), idle_ms, spent.user + spent.system, int(running))


def _ask(target: Target, prompt: list[int], answer: int, errors: list[Exception]) -> None:
    try:
        complete(target, prompt, answer)
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        errors.append(error)


def _wait_for(target: Target, streams: int, errors: Sequence[Exception]) -> None:
    """Until every stream decodes: its prompt is read with its first token."""
    began = stuck = time.monotonic()
    while (now := time.monotonic()) < began + STARTED_S and not errors:
        requests: dict[str, Any] = target.get("/v1/homeserve/status")["requests"]
        if requests["running"] == streams:
            time.sleep(SETTLE_S)
            return
        if requests["running"] + requests["waiting"] < streams:
            stuck = now
        if now > stuck + STUCK_S:
            raise StepFailed(f"the server runs {requests['running']} of {streams} streams at once (--max-running)")
        time.sleep(0.02)
    raise StepFailed(f"{streams} streams did not begin within {STARTED_S:.0f} s: {errors[:1]}")
