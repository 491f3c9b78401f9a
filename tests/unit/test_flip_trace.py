"""The measured load is the one on paper, made shorter, and is summed up as its page says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "benchmarks"))

import flip_trace as trace
from flip_simulation import Call, mixed_load

from homeserve.bench.client import Timing


def test_the_load_is_that_of_the_simulation_made_shorter() -> None:
    calls = trace.scaled(mixed_load(), 32, 8, 0.4)
    assert len(calls) == 39 and calls[:3] == (Call(0.0, 256, 64), Call(2.0, 1024, 64), Call(4.0, 256, 64))


def test_a_call_has_a_token_at_least_and_an_answer_two() -> None:
    assert trace.scaled((Call(5.0, 4, 1),), 32, 8, 1.0) == (Call(5.0, 1, 2),)


def test_times_count_from_when_a_call_was_due() -> None:
    dues = [10.0, 12.0]
    timings = [Timing(10.0, 11.0, 14.0, 4, 100, 1), Timing(12.5, 15.0, 16.0, 3, 100, 2)]
    found = trace.summed(dues, timings, 3)
    assert (found.makespan_s, found.ttft_s, found.whole_s, found.flips) == (6.0, 2.0, 4.0, 3)
    assert found.per_token_ms == pytest.approx(1000.0)


def test_a_table_has_medians_and_the_spread() -> None:
    runs = [("auto", trace.Measured(each, 1.0, 20.0, 3.0, 2)) for each in (5.0, 9.0, 6.0)]
    lines = trace.table([*runs, ("tensor", trace.Measured(7.0, 1.0, 20.0, 3.0, 0))]).splitlines()
    assert len(lines) == 4 and lines[2].startswith("| tensor | 7.0 | 1.0 |")
    assert lines[3] == "| auto | 6.0 (5.0-9.0) | 1.0 (1.0-1.0) | 20 (20-20) | 3.0 (3.0-3.0) | 2 (2-2) |"
