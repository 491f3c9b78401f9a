"""Every recorded box with three models: a plan that is a proof, or a refusal whose nearest wish is a plan, or unknown.

The last test prints the counts (`pytest -rP`)."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from budget.advice import Subject, answer, changed
from budget.facts import ModelShape
from budget.ledger import MOMENTS, held_bytes, peak_bytes
from budget.plan import Plan, Refusal, Unknown
from budget.profile import box_from_json
from budget.shape import load_shape
from budget.wish import Wish

DATA = Path(__file__).parents[1] / "data"
BOXES: list[dict[str, Any]] = json.loads((DATA / "boxes" / "boxes.json").read_text())
SHAPES = ("dense27b", "moe35b", "dense8b")
COUNTS: Counter[str] = Counter()


@cache
def shape(name: str) -> ModelShape:
    return load_shape(str(DATA / "shapes" / f"{name}.json"))


@cache
def fallback() -> ModelShape:
    return load_shape("smollm2-135m-q4_1")


def says_no_memory(box: dict[str, Any]) -> bool:
    """Neither the memory of a card nor that of the host is in the profile."""
    return (
        box["mem_total_mib"] is None
        and box["cgroup_limit_mib"] is None
        and not any(card["vram_total_mib"] is not None or card["gtt_total_mib"] is not None for card in box["gpus"])
    )


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("recorded", BOXES, ids=[box["id"] for box in BOXES])
def test_a_box_and_a_model(recorded: dict[str, Any], name: str) -> None:
    subject = Subject(box_from_json(recorded, recorded["id"]), shape(name), fallback())
    outcome = answer(subject, Wish())
    COUNTS[type(outcome).__name__] += 1
    devices = outcome.ceilings.devices
    assert devices[-1].kind == "cpu" and len(devices) == len(recorded["gpus"]) + 1
    assert len({device.id for device in devices}) == len(devices), "no device is counted twice"
    match outcome:
        case Unknown():
            assert says_no_memory(recorded)
        case Plan():
            _proven(outcome)
            _advice_holds(subject, outcome)
        case Refusal():
            assert outcome.nearest is not None, "every refusal has a way out"
            other, wish = changed(subject, Wish(), outcome.nearest)
            assert isinstance(answer(other, wish, advise=False), Plan)


def _proven(made: Plan) -> None:
    for device in made.ceilings.devices:
        if device.ceiling_bytes is not None:
            assert peak_bytes(made.lines, device.index) <= device.ceiling_bytes
    for pool, size in enumerate(made.ceilings.pools):
        members = [device for device in made.ceilings.devices if device.pool == pool]
        for moment in MOMENTS if size is not None and len(members) > 1 else ():
            held = sum(max(0, held_bytes(made.lines, d.index, moment) - d.private_bytes) for d in members)
            assert held <= (size or 0)


def _advice_holds(subject: Subject, made: Plan) -> None:
    for advice in made.advice:
        other, wish = changed(subject, Wish(), advice.flags)
        again = answer(other, wish, advise=False)
        assert isinstance(again, Plan)
        gain = again.context - made.context if advice.of == "context" else again.kv_tokens - made.kv_tokens
        assert gain == pytest.approx(advice.gain_tokens, rel=0.01)


def test_there_are_291_runs_and_only_boxes_without_memory_are_unknown() -> None:
    assert len(BOXES) * len(SHAPES) == 291
    silent = sum(says_no_memory(box) for box in BOXES)
    if sum(COUNTS.values()) == 291:  # not when a part of the file runs alone
        print(dict(COUNTS))
        assert COUNTS["Unknown"] == 3 * silent
        assert COUNTS["Plan"] > COUNTS["Refusal"] > 0
