"""What goes first while a layout is kept for it: the rule, and plans that follow it."""

from __future__ import annotations

from typing import Any

import pytest
from test_engine_flip_policy import PIPELINE, SPEEDS, TENSOR, at
from test_engine_traces import END, Trace

from homeserve.engine.policy import ANSWERS, PROMPTS
from homeserve.engine.request import GenerateCall
from homeserve.engine.scheduler import Draft
from homeserve.wire.records import Sampling


def test_answers_wait_for_the_end_of_prompts_or_of_their_window() -> None:
    assert at(PIPELINE, 9000, 3).first == PROMPTS
    assert at(PIPELINE, 9000, 3, contended=90.0, window_s=15.0).first == PROMPTS
    for over in (at(PIPELINE, 9000, 3, contended=80.0, window_s=15.0), at(PIPELINE, 0, 3), at(PIPELINE, 9000, 0)):
        assert over.first == ""
    assert at(PIPELINE, 9000, 1, left=30).first == "", "too little for a flip is drawn where it is"


def test_prompts_worth_a_flip_wait_for_the_end_of_the_dwell() -> None:
    assert at(TENSOR, 9000, 3, changed=90.0, dwell_s=15.0).first == ANSWERS
    assert at(TENSOR, 9000, 3, changed=80.0, dwell_s=15.0).to == PIPELINE
    assert at(TENSOR, 9000, 3, changed=80.0, dwell_s=15.0).first == ""
    assert at(TENSOR, 7000, 3, changed=90.0, dwell_s=15.0).first == "", "below N it is computed where it arrives"
    assert at(TENSOR, 9000, 0, changed=90.0, dwell_s=15.0).first == ""


@pytest.mark.parametrize(
    "more",
    [
        {"hold": "what is live does not fit"},
        {"speeds": {TENSOR: SPEEDS[TENSOR]}},
        {"speeds": {PIPELINE: SPEEDS[TENSOR], TENSOR: SPEEDS[TENSOR]}},
        {"speeds": {PIPELINE: SPEEDS[PIPELINE], TENSOR: SPEEDS[PIPELINE]}},
    ],
)
def test_nobody_waits_for_a_flip_that_does_not_come(more: dict[str, Any]) -> None:
    assert at(PIPELINE, 9000, 3, **more).first == ""
    assert at(TENSOR, 9000, 3, changed=90.0, **more).first == ""


def decoding_beside_a_prompt() -> Trace:
    """Two sequences that decode, and a prompt of 300 tokens that has just come."""
    trace = Trace(3, losses=False, context=1024, kv_tokens=2048, running=4, chunk=64, prefill_delay=0,
                  plans_in_flight=1, prefix_cache=False)  # fmt: skip
    for length in (10, 11, 300):
        call = GenerateCall("r", tuple(11 + n % 30 for n in range(length)), Sampling(), 40, frozenset({END}))
        sequence = trace.scheduler.add(call)
        trace.calls[sequence.key], trace.shown[sequence.key] = sequence, []
        if length == 11:
            step(trace)
    return trace


def step(trace: Trace) -> Draft:
    assert trace.issue()
    draft = trace.flight[-1][1]
    trace.acknowledge()
    return draft


def kinds(draft: Draft) -> tuple[int, int]:
    """(rows of prompts, rows that decode)."""
    rows = [len(each.tokens) // 4 for each in draft.rows]
    return sum(each for each in rows if each > 1), sum(each <= 1 for each in rows)


def test_prompts_have_plans_alone_while_there_are_any() -> None:
    trace = decoding_beside_a_prompt()
    assert kinds(step(trace)) == (64, 2)
    trace.scheduler.first = PROMPTS
    assert [kinds(step(trace)) for _ in range(4)] == [(64, 0), (64, 0), (64, 0), (44, 0)]
    assert kinds(step(trace)) == (0, 3), "none is left, and nobody waits for nothing"


def test_answers_have_plans_alone_while_there_are_any() -> None:
    trace = decoding_beside_a_prompt()
    trace.scheduler.first = ANSWERS
    assert [kinds(step(trace)) for _ in range(3)] == [(0, 2)] * 3
    trace.scheduler.first = ""
    assert kinds(step(trace)) == (64, 2)


def test_a_loss_and_another_layout_end_what_goes_first() -> None:
    trace = decoding_beside_a_prompt()
    trace.scheduler.first = ANSWERS
    trace.lose("a test")
    assert trace.scheduler.first == ""


@pytest.mark.parametrize("seed", range(12))
def test_whatever_goes_first_every_answer_is_right(seed: int) -> None:
    """A choice before every plan, at random; when all has come in, everything ends."""
    trace = Trace(7000 + seed, recurrent=seed % 2 == 1, decode_groups=1 + seed % 3, plans_in_flight=1 + seed % 3)
    issue = trace.issue

    def chosen() -> bool:
        trace.scheduler.first = trace.random.choice(("", PROMPTS, ANSWERS))
        return issue()

    trace.issue = chosen  # type: ignore[method-assign]
    trace.run(60)
