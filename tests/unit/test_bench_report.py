"""From samples to tables: ratios, goals, limits, the peer's settings; and the pages are those that the CSV makes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from homeserve.bench import client

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "benchmarks"))

import document  # noqa: E402
import flip_tests  # noqa: E402
import measures  # noqa: E402
import rank_tests  # noqa: E402
import report  # noqa: E402
import search  # noqa: E402
import step_tests  # noqa: E402
import subjects  # noqa: E402

MODEL = "llama-1.5b.Q4_K_M"


def sample(engine: str, test: str, run: int, value: float, **changes: Any) -> report.Sample:
    facts: dict[str, Any] = {
        "date": "2026-01-01",
        "commit": "abc",
        "device": "a CPU",
        "command": "scripts/bench",
        "version": "1",
        "isa": "avx2",
        "settings": "",
        "model": MODEL,
        "quant": "Q4_K_M",
        "threads": 2,
        "unit": "tok/s",
    }
    return report.Sample(**(facts | changes), engine=engine, test=test, run=run, value=value)


def two_sides() -> list[report.Sample]:
    found = []
    for run, (ours, theirs) in enumerate([(20.0, 10.0), (30.0, 10.0), (16.0, 10.0)]):
        found.append(sample("homeserve", "tg@0", run, ours))
        found.append(sample("llama-server", "tg@0", run, theirs, settings="-fa on"))
        found.append(sample("homeserve", "ttft512", run, 100.0, unit="ms"))
        found.append(sample("llama-server", "ttft512", run, 300.0, unit="ms"))
        found.append(sample("machine", "read_gb_s", run, 25.0 + run, unit="GB/s"))
    found.append(sample("machine", "bytes_per_token", 0, 1e9, unit="B"))
    return found


def test_ratios_are_of_pairs_and_above_one_is_better() -> None:
    model = report.report(two_sides())["models"][0]
    ratios = {ratio["test"]: ratio for ratio in model["ratios"]}
    assert (ratios["tg@0"]["median"], ratios["tg@0"]["pairs"], ratios["tg@0"]["goal"]) == (2.0, 3, 1.7)
    assert ratios["tg@0"]["met"] and ratios["ttft512"]["median"] == 3.0 and ratios["ttft512"]["goal"] == 2.0
    ours = next(row for row in model["rows"] if (row["engine"], row["test"]) == ("homeserve", "tg@0"))
    assert ours["median"] == 20.0 and ours["of_limit"] == {"read_gb_s": pytest.approx(100 * 20 / 26, abs=0.1)}
    assert "**2.00** (1.68-2.80) | 1.7: met | 77 % of reading |" in report.table(model)


def test_a_missed_goal_is_told_and_a_run_without_its_pair_does_not_count() -> None:
    samples = [sample("homeserve", "conc8", run, 20.0) for run in range(3)]
    samples += [sample("llama-server", "conc8", run, 10.0) for run in range(2)]
    ratio = report.report(samples)["models"][0]["ratios"][0]
    assert (ratio["pairs"], ratio["goal"], ratio["met"]) == (2, 3.0, False)


def test_the_csv_gives_back_what_was_put_in(tmp_path: Path) -> None:
    file = report.SampleFile(tmp_path / "runs.csv")
    for each in two_sides():
        file.add(each)
    assert report.SampleFile.read(tmp_path / "runs.csv") == two_sides()
    report.SampleFile(tmp_path / "runs.csv").add(sample("homeserve", "rss", 0, 1.0))
    assert len(report.SampleFile.read(tmp_path / "runs.csv")) == len(two_sides()) + 1


def test_each_result_takes_the_setting_that_is_best_for_it() -> None:
    on, off, plain, small = search.CANDIDATES
    found = {
        on: {"pp512": 90.0, "tg@0": 15.8, "tg@2048": 12.0, "rss": 1800.0},
        off: {"pp512": 91.0, "tg@0": 15.8, "tg@2048": 14.0, "rss": 1800.0},
        plain: {"pp512": 150.0, "tg@0": 14.0, "rss": 1000.0},
        small: {"pp512": 80.0, "tg@0": 15.9, "rss": 1790.0},
    }
    chosen = {result: search.best(found, result) for result in ("pp512", "pp2048", "ttft512", "tg@0", "tg@2048", "rss")}
    assert chosen == {"pp512": plain, "pp2048": plain, "ttft512": plain, "tg@0": on, "tg@2048": off, "rss": plain}
    assert search.best({}, "pp512") == on


def test_every_row_of_the_goals_is_measured() -> None:
    given = {result for measure in measures.MEASURES for result in measure.gives}
    assert not given & rank_tests.TESTS
    given |= rank_tests.TESTS - {rank_tests.DRAFT} | set(flip_tests.TESTS) | set(step_tests.TESTS)
    given |= measures.DRAFTING
    goals = subjects.DRAFTING_GOALS.keys() | subjects.DEMANDS.keys() | subjects.MOST.keys() | subjects.LEAST.keys()
    assert given == measures.RESULTS.keys() and goals <= given
    assert all(result.chosen_by in given for result in measures.RESULTS.values())
    assert subjects.goal(MODEL, "pp512") == 1.5 and subjects.goal("llama-1.5b.Q8_0", "pp2048") == 3.0
    drafting = f"{subjects.DRAFTING_MODEL}, drafting"
    assert subjects.goal(drafting, "draft_3") == 1.6 and subjects.goal("counter, drafting", "draft_3") is None
    assert subjects.goal("SmolLM2-135M-Instruct.Q4_1", "tg@2048") == 5.0 and subjects.goal("another", "tg@0") is None


def test_the_pages_are_those_that_the_csv_makes() -> None:
    docs = ROOT / "docs"
    for name, text in document.pages(docs).items():
        assert (docs / name).read_text() == text, f"docs/{name} is not what scripts/bench --doc writes"


def test_the_last_measured_commit_of_a_model_is_shown() -> None:
    old = [sample("homeserve", "tg@0", 0, 1.0, commit="old")]
    other = [sample("homeserve", "tg@0", 0, 2.0, commit="old", model="other")]
    shown = document.latest(old + other + two_sides())
    assert {each["models"][0]["model"]: each["commit"] for each in shown} == {MODEL: "abc", "other": "old"}


def test_tokens_that_came_with_the_first_event_are_not_timed() -> None:
    """A server holds back text that is no whole character: its first event then stands for several tokens."""
    timing = client.Timing(sent=0.0, first=1.0, last=3.0, tokens=64, prompt_tokens=8, first_tokens=24)
    assert (timing.decode_tok_s, timing.ttft_s) == (20.0, 1.0)
    with pytest.raises(client.HeldBack, match="40 of 64"):
        _ = client.Timing(0.0, 1.0, 1.001, 64, 8, first_tokens=40).decode_tok_s
