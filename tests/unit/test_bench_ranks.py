"""The tests of several ranks of scripts/bench: who is asked when, and what the table says of their goals."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from homeserve.bench.prompts import Prompts

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "benchmarks"))

import bench  # noqa: E402
import rank_tests  # noqa: E402
import report  # noqa: E402
import sums  # noqa: E402

FACTS: dict[str, Any] = {
    "date": "2026-01-01",
    "commit": "abc",
    "device": "a CPU",
    "command": "scripts/bench",
    "version": "1",
    "isa": "avx2",
    "model": rank_tests.of_model("llama-1.5b.Q4_K_M"),
    "quant": "Q4_K_M",
    "threads": 2,
}


class Kept:
    """The samples that a test kept, and in which order."""

    def __init__(self, model: str = FACTS["model"]) -> None:
        self.model = model
        self.samples: list[report.Sample] = []

    def __call__(self, engine: str, test: str, unit: str, run: int, value: float, settings: str = "") -> None:
        facts = FACTS | {"model": self.model}
        each = report.Sample(**facts, engine=engine, settings=settings, test=test, unit=unit, run=run, value=value)
        self.samples.append(each)

    def of(self, run: int) -> list[tuple[str, str]]:
        return [(each.engine, each.test) for each in self.samples if each.run == run and each.engine != "machine"]


def test_one_rank_is_asked_on_both_sides_of_two_and_its_second_time_is_the_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, one = rank_tests.two_sides(tmp_path / "m.gguf", 2, tmp_path, ("homeserve",), "avx2")
    assert both.command[-6:] == ["--devices", "cpu:2", "--layout", "tensor", "--isa", "avx2"]
    threads = [server.command[server.command.index("--threads") + 1] for server in (both, one)]
    assert threads == ["1", "2"] and "cpu:2" not in one.command
    speeds = {id(both): 9.5, id(one): 10.0}
    monkeypatch.setattr(rank_tests, "decode", lambda server, prompts: speeds[id(server)])
    kept, limited = Kept(), []
    rank_tests.measure_tensor(both, one, 2, Prompts(None, ()), kept, limited.append)  # type: ignore[arg-type]
    two, first, second = (
        ("homeserve", "tp2_vs_1x2"),
        ("homeserve-1x2", "tp2_vs_1x2"),
        ("homeserve-1x2", "noise:tp2_vs_1x2"),
    )
    assert (kept.of(0), kept.of(1), limited) == ([first, two, second], [second, two, first], [0, 1])
    model = report.report(kept.samples)["models"][0]
    ratio = model["ratios"][0]
    assert (ratio["test"], ratio["median"], ratio["goal"], ratio["met"]) == ("tp2_vs_1x2", 0.95, 0.9, True)
    assert model["noise"] == {"tp2_vs_1x2": {"pairs": 2, "median": 1.0, "low": 1.0, "high": 1.0}}


def test_sums_take_turns_with_gloo_and_the_goal_is_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, int, str | None]] = []

    def measured(kind: str, ranks: int, floats: int, python: str | None = None) -> float:
        asked.append((kind, ranks, floats, python))
        return 16.0 if kind == sums.OURS else 80.0

    monkeypatch.setattr(sums, "measured", measured)
    kept = Kept(rank_tests.SUMS_MODEL)
    rank_tests.measure_sums(2, "a python", kept, with_gloo=True)
    ours, gloo = ("ours", 2, 2048, None), ("gloo", 2, 2048, "a python")
    assert asked == [ours, gloo, gloo, ours]
    model = report.report(kept.samples)["models"][0]
    assert model["ratios"][0]["median"] == 5.0 and model["ratios"][0]["goal"] is None
    assert "at most 15 us: missed" in report.table(model)
    alone = Kept(rank_tests.SUMS_MODEL)
    rank_tests.measure_sums(1, "", alone, with_gloo=False)
    assert alone.of(0) == [("homeserve", "sum8k")]


@pytest.mark.parametrize(
    ("tests", "full", "wanted", "alone"),
    [
        (None, False, set(), False),
        (None, True, {"sum8k", "tp2_vs_1x2", "flip", "draft", "step"}, False),
        ("sum8k,tg@0", True, {"sum8k"}, False),
        ("tp2_vs_1x2", False, {"tp2_vs_1x2"}, True),
        ("draft_3,draft_new", False, {"draft"}, True),
        ("draft,pp512", False, {"draft"}, False),
    ],
)
def test_which_are_taken_and_whether_a_peer_is_needed(
    tests: str | None, full: bool, wanted: set[str], alone: bool
) -> None:
    assert rank_tests.wanted(tests, full=full) == wanted
    assert rank_tests.no_peer_needed(tests) is alone


def test_what_a_former_run_of_this_commit_measured_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("scripts/bench", "--tests", "sum8k,tp2_vs_1x2", "--repeat", "2")
    monkeypatch.setattr(sys, "argv", list(given))
    kept = Kept(rank_tests.SUMS_MODEL)
    for number in range(2):
        kept("homeserve", "sum8k", "us", number, 9.0)
    options = bench.arguments()
    run = bench.Run(options, bench.wanted(options), kept.samples)
    assert run.measures == []
    monkeypatch.setattr(rank_tests, "measure_sums", lambda *_, **__: pytest.fail("measured again"))
    run.sums()
    kept.samples.pop()
    measured: list[int] = []
    monkeypatch.setattr(rank_tests, "torch_version", lambda python: None)
    monkeypatch.setattr(rank_tests, "measure_sums", lambda pairs, *_, **__: measured.append(pairs))
    run.sums()
    assert measured == [2]
