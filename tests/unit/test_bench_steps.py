"""The step test of scripts/bench: what is made of two readings, and which windows do not count."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_bench_ranks import Kept

from homeserve.bench.prompts import Prompts
from homeserve.bench.steps import Reading, StepFailed, per_plan

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "benchmarks"))

import rank_tests  # noqa: E402
import step_tests  # noqa: E402
import subjects  # noqa: E402
from measures import RESULTS  # noqa: E402
from servers import Server  # noqa: E402

BEFORE = Reading(plans=100, idle_ms=50.0, cpu_s=2.0, running=64)
AFTER = Reading(plans=600, idle_ms=150.0, cpu_s=2.5, running=64)


def test_what_a_step_costs_is_what_was_spent_over_the_plans_of_the_window() -> None:
    cpu_ms, gap_ms = per_plan(BEFORE, AFTER, 64)
    assert (cpu_ms, gap_ms) == (pytest.approx(1.0), pytest.approx(0.2))


@pytest.mark.parametrize("end", [replace(AFTER, running=63), replace(AFTER, plans=100)])
def test_a_window_in_which_a_stream_ended_or_nothing_came_back_does_not_count(end: Reading) -> None:
    with pytest.raises(StepFailed):
        per_plan(BEFORE, end, 64)


def test_each_number_of_streams_has_its_results_and_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    costs = {1: (0.2, 0.1), 64: (2.5, 0.4)}
    monkeypatch.setattr(step_tests, "step", lambda server, pid, streams, *_: costs[streams])
    server = Server("homeserve", ["homeserve"], Path("log"), settings="--threads 1")
    monkeypatch.setattr(Server, "pid", 1)
    step_tests.measure_steps(server, 2, Prompts(random.Random(1), range(1000)), kept)
    tests = {each.test for each in kept.samples}
    assert tests == set(step_tests.TESTS) <= set(RESULTS)
    assert {test: subjects.MOST.get(test) for test in sorted(tests)} == {
        "step": 0.3, "step64": 3.0, "step_gap": None, "step_gap64": None,
    }  # fmt: skip
    assert rank_tests.no_peer_needed("step") and rank_tests.STEP in rank_tests.wanted("step", full=False)
