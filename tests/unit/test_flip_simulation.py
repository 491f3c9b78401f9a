"""The policy that ships, on paper: faster than either layout alone on a mixed load, and no slower on pure ones."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "benchmarks"))

import flip_simulation as paper  # noqa: E402
from flip_simulation import CARDS, LOADS, PIPELINE, TENSOR, Call, Told  # noqa: E402

from homeserve.engine.policy import LayoutSpeeds  # noqa: E402


@cache
def told(load: str, mode: str, resting: str = PIPELINE) -> Told:
    return paper.run(replace(CARDS, resting=resting), LOADS[load](), mode)


def test_the_trace_is_the_one_that_was_measured() -> None:
    calls = LOADS["mixed"]()
    assert len(calls) == 39 and {call.answer for call in calls} == {512}
    assert [(call.at_s, call.prompt) for call in calls[:3]] == [(0.0, 8192), (5.0, 32768), (10.0, 8192)]
    speeds = {layout: (each.prefill_tok_s, each.decode_tok_s) for layout, each in CARDS.speeds.items()}
    assert speeds == {PIPELINE: (7245.5, 16.8), TENSOR: (1681.0, 78.3)} and CARDS.cost_s == 3.2
    assert paper.threshold(CARDS) == 7004


@pytest.mark.parametrize("mode", [PIPELINE, TENSOR])
def test_one_layout_takes_what_its_speeds_say(mode: str) -> None:
    """A box that is never idle: the sum of all work. Whatever is computed with what, it takes no less."""
    calls, speeds = LOADS["mixed"](), CARDS.speeds[mode]
    assert speeds.prefill_tok_s and speeds.decode_tok_s
    work = sum(call.prompt for call in calls) / speeds.prefill_tok_s
    work += sum(call.answer - 1 for call in calls) / speeds.decode_tok_s
    assert told("mixed", mode).makespan_s == pytest.approx(work) and told("mixed", mode).flips == 0


@pytest.mark.parametrize("resting", [PIPELINE, TENSOR])
@pytest.mark.parametrize("alone", [PIPELINE, TENSOR])
def test_the_policy_beats_both_layouts_on_a_mixed_load(alone: str, resting: str) -> None:
    auto, fixed = told("mixed", "auto", resting), told("mixed", alone)
    assert auto.makespan_s < 0.75 * fixed.makespan_s
    assert auto.ttft_s < 0.6 * fixed.ttft_s
    assert auto.per_token_s < 0.75 * fixed.per_token_s
    assert auto.whole_s < 0.75 * fixed.whole_s


@pytest.mark.parametrize("resting", [PIPELINE, TENSOR])
@pytest.mark.parametrize("load", ["prompts alone", "answers alone"])
def test_the_policy_is_at_most_a_twentieth_slower_on_a_pure_load(load: str, resting: str) -> None:
    auto, better = told(load, "auto", resting), min((told(load, mode) for mode in (PIPELINE, TENSOR)), key=_whole)
    assert auto.makespan_s <= 1.05 * better.makespan_s
    assert auto.whole_s <= 1.05 * better.whole_s
    assert auto.per_token_s <= 1.05 * better.per_token_s and auto.flips <= 1


def _whole(each: Told) -> float:
    return each.whole_s


def test_a_flip_for_every_change_of_work_loses_to_one_layout() -> None:
    always = told("mixed", "always")
    assert always.flips > 20 * told("mixed", "auto").flips
    assert always.makespan_s > max(told("mixed", mode).makespan_s for mode in (PIPELINE, TENSOR))


@pytest.mark.parametrize("chunk", [512, 4096])
def test_no_answer_and_no_prompt_waits_longer_than_a_window_and_a_dwell(chunk: int) -> None:
    """Whoever goes first, the other is not starved: between two tokens of an answer there is at most a dwell in either
    layout, flips, and what one plan takes."""
    machine = replace(CARDS, chunk=chunk, dwell_s=5.0)
    run = paper.Simulation(
        machine, tuple(Call(0.5 * n, 8192, 32) for n in range(24)), PIPELINE, paper.by_policy(machine)
    )
    gaps: list[float] = []
    draw = run._draw

    def drawn(job: paper.Job) -> None:
        last = seen.get(id(job))
        if last is not None:
            gaps.append(run.now - last)
        seen[id(job)] = run.now
        draw(job)

    seen: dict[int, float] = {}
    run._draw = drawn  # type: ignore[method-assign]
    run.run("auto")
    longest_plan = chunk / 1681.0 + 16 / 16.8
    assert max(gaps) <= 2 * machine.dwell_s + machine.cost_s + 2 * longest_plan + paper.LOOK_S


def test_a_box_whose_tensor_layout_is_faster_at_all_is_not_left_for_prompts() -> None:
    machine = replace(CARDS, speeds={PIPELINE: CARDS.speeds[TENSOR], TENSOR: CARDS.speeds[PIPELINE]})
    both = replace(machine, speeds={**machine.speeds, TENSOR: replace(machine.speeds[TENSOR], decode_tok_s=100.0)})
    auto, fixed = (paper.run(both, LOADS["mixed"]()[:8], mode) for mode in ("auto", TENSOR))
    assert auto.flips == 1 and auto.makespan_s <= 1.05 * fixed.makespan_s + both.cost_s


def test_short_calls_with_pauses_do_not_stay_in_the_slower_layout() -> None:
    """Speeds as three CPU ranks that share two cores had them; every call is too short to pay for a flip by itself."""
    speeds = {PIPELINE: LayoutSpeeds(790.0, 140.0), TENSOR: LayoutSpeeds(660.0, 100.0)}
    machine = replace(CARDS, speeds=speeds, cost_s=1.0, dwell_s=5.0, resting=TENSOR)
    calls = [Call(2.0 * number, 250 if number % 2 else 1000, 64) for number in range(60)]
    auto, better, worse = (paper.run(machine, calls, mode) for mode in ("auto", PIPELINE, TENSOR))
    assert worse.whole_s > 1.2 * better.whole_s, "the layouts differ"
    assert auto.flips == 1 and auto.whole_s <= 1.05 * better.whole_s


def test_the_table_is_written_as_it_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "table.csv"
    assert paper.main(["--csv", str(where), "--chunk", "8192", "--running", "4", "--requests", "3"]) == 0
    printed = capsys.readouterr().out.splitlines()
    with where.open(newline="") as file:
        rows = list(csv.reader(file))
    assert len(printed) == len(rows) == 13 and rows[0][:3] == ["load", "mode", "makespan_s"]
    assert printed[3].split() == rows[3] and rows[3][:2] == ["mixed", "auto"]
    with pytest.raises(SystemExit):
        paper.main(["--tensor", "12"])
    assert "not two positive numbers" in capsys.readouterr().err
