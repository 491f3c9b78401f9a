"""The policy: a pure function, rule by rule."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeserve.engine.policy import (
    Decision,
    Demand,
    Done,
    LayoutSpeeds,
    Policy,
    PolicyInputs,
    break_even,
    decide,
    home,
)

PIPELINE, TENSOR = "pipeline", "tensor"
SPEEDS = {PIPELINE: LayoutSpeeds(7245.5, 16.8), TENSOR: LayoutSpeeds(1681.0, 78.3)}
"""As measured on the ancestor's three cards."""


def at(layout: str, pending: int = 0, decoding: int = 0, left: int | None = None, **more: Any) -> Decision:
    drawn = 512 * decoding if left is None else left
    fields: dict[str, Any] = {"now": 100.0, "resting": PIPELINE, "speeds": SPEEDS, "cost_s": 3.2, **more}
    return decide(
        PolicyInputs(layout=layout, pending_tokens=pending, decoding=decoding, decode_left_tokens=drawn, **fields)
    )


def test_the_break_even_is_a_measurement() -> None:
    """I5: N = C / (1/X - 1/P): 7004 tokens at the ancestor's figures; refused where X >= P or either is unknown."""
    assert break_even(3.2, 1681.0, 7245.5) == pytest.approx(7004, abs=1)
    for here, there in (
        (2.0, 2.0),
        (3.0, 2.0),
        (0.0, 2.0),
        (None, 2.0),
        (2.0, None),
        (2.0, -1.0),
        (999.9999999999993, 999.9999999999994),
    ):
        assert math.isinf(break_even(3.2, here, there))


@pytest.mark.parametrize("decoding", [0, 3])
def test_prompts_beyond_the_break_even_pull_to_the_pipeline(decoding: int) -> None:
    """I4."""
    assert at(TENSOR, 7005, decoding).to == PIPELINE
    assert at(TENSOR, 7004, decoding).to is None


def test_with_no_prompt_left_decoding_pulls_back() -> None:
    """I4: not before; and I17: what is below N is computed where it arrives."""
    assert at(PIPELINE, 0, 3).to == TENSOR
    assert at(PIPELINE, 1, 3).to is None
    assert at(PIPELINE, 5000, 0).to is None and at(TENSOR, 5000, 3).to is None


def test_a_flip_has_to_earn_its_keep_for_answers_too() -> None:
    """A few tokens are drawn where they are: 1.6 s buy 34 of them at these speeds."""
    bound = 1.6 / (1 / 16.8 - 1 / 78.3)
    assert at(PIPELINE, 0, 3, left=math.floor(bound)).to is None
    assert at(PIPELINE, 0, 3, left=math.ceil(bound)).to == TENSOR


@pytest.mark.parametrize("layout", [PIPELINE, TENSOR])
def test_where_one_layout_is_faster_at_both_it_is_kept_or_gone_to_once(layout: str) -> None:
    """X >= P: never to the pipeline for prompts, and likewise for answers; out of the other as soon as it pays."""
    both = {layout: LayoutSpeeds(2000.0, 80.0), other(layout): LayoutSpeeds(1000.0, 40.0)}
    for pending, decoding in ((10**6, 0), (10**6, 9), (0, 9)):
        assert at(layout, pending, decoding, speeds=both).to is None
        assert at(other(layout), pending, decoding, speeds=both).to == layout
    assert at(other(layout), 3199, 0, cost_s=3.2, speeds=both).to is None, "1.6 s are less than the flip takes"
    assert at(other(layout), 1000, 1, left=40, cost_s=3.2, speeds=both).to is None


def other(layout: str) -> str:
    return TENSOR if layout == PIPELINE else PIPELINE


def test_which_layout_is_for_what_is_measured() -> None:
    """Published figures go both ways: with the roles exchanged, so are the flips."""
    turned = {PIPELINE: SPEEDS[TENSOR], TENSOR: SPEEDS[PIPELINE]}
    assert at(PIPELINE, 7005, 3, speeds=turned).to == TENSOR
    assert at(TENSOR, 0, 3, speeds=turned).to == PIPELINE


def test_without_speeds_of_both_nothing_flips() -> None:
    unknown = {PIPELINE: SPEEDS[PIPELINE], TENSOR: LayoutSpeeds(None, None)}
    decision = at(PIPELINE, 0, 9, speeds=unknown)
    assert decision.to is None and decision.owed and "not known" in decision.reason


@pytest.mark.parametrize(("layout", "pending", "decoding"), [(TENSOR, 10**5, 0), (PIPELINE, 0, 9), (TENSOR, 0, 0)])
def test_no_two_flips_within_the_dwell(layout: str, pending: int, decoding: int) -> None:
    """I6, for every flip, the idle return too; it says when to look again."""
    inputs: dict[str, Any] = {"dwell_s": 15.0, "idle": 0.0}
    held = at(layout, pending, decoding, changed=90.0, **inputs)
    assert held.to is None and held.again_s == pytest.approx(5.0)
    assert at(layout, pending, decoding, changed=85.0, **inputs).to == other(layout)


def test_idle_for_a_while_it_goes_back_to_rest() -> None:
    """I6, I7: with a timer for it, and none once it is there."""
    assert at(TENSOR, idle=97.0, idle_s=5.0) == Decision(None, "nothing to do for less than 5 s", again_s=2.0)
    assert at(TENSOR, idle=95.0, idle_s=5.0).to == PIPELINE
    assert at(PIPELINE, idle=0.0) == Decision(None, "nothing to do")
    assert at(PIPELINE, idle=0.0, resting=TENSOR).to == TENSOR


def test_it_rests_where_it_is_clearly_faster_at_both() -> None:
    """Not where the difference is noise."""
    base = PolicyInputs(0.0, PIPELINE, PIPELINE, 0, 0, 0, {}, 3.0)
    for factor, rests in ((1.05, PIPELINE), (1.2, TENSOR)):
        speeds = {PIPELINE: LayoutSpeeds(1000.0, 50.0), TENSOR: LayoutSpeeds(1000.0 * factor, 50.0 * factor)}
        assert home(dataclasses.replace(base, speeds=speeds)) == rests
    assert home(dataclasses.replace(base, speeds=SPEEDS)) == PIPELINE


def test_demand_holds_the_layout_that_it_pulled_for_a_window_at_most() -> None:
    """I16, I18: a standing backlog would keep decoding at the slow pace for ever."""
    waits = at(PIPELINE, 50_000, 3, contended=95.0, window_s=15.0)
    assert waits.to is None and waits.again_s == pytest.approx(10.0)
    assert at(PIPELINE, 50_000, 3, contended=85.0, window_s=15.0).to == TENSOR
    assert at(PIPELINE, 50_000, 0, contended=None).to is None, "nobody waits for the other"


def test_what_is_owed_and_what_pays_are_two_answers() -> None:
    """I19."""
    assert (at(TENSOR, 100, 0).owed, at(TENSOR, 100, 0).to) == (True, None)
    assert not at(TENSOR).owed


def test_what_cannot_begin_is_held_with_its_reason() -> None:
    """I11: never while one is on; and what does not fit."""
    held = at(TENSOR, 10**5, 0, hold="another flip is on")
    assert (held.to, held.reason) == (None, "another flip is on")
    assert "not more than" in at(TENSOR, 10, 0, hold="another flip is on").reason, "nothing was wanted"


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("the last flip is less than 13.4 s ago", "the last flip is less than 13.5 s ago", True),
        ("7 prompt tokens are not more than 7,004", "12 prompt tokens are not more than inf", True),
        ("7 prompt tokens are not more than 7", "7 tokens to draw are not more than 7", False),
    ],
)
def test_reasons_are_of_one_kind_without_their_numbers(one: str, two: str, same: bool) -> None:
    """I10."""
    assert (Decision(None, one).kind == Decision(None, two).kind) == same


def test_a_standing_reason_is_news_once() -> None:
    """I9, I10: 368 lines in two minutes otherwise."""
    policy = Policy(PIPELINE, 15.0, 5.0)
    told = 0
    for step in range(1000):
        demand = Demand(100 + step, 0, 0)
        decision = policy.look(demand, TENSOR, SPEEDS, 3.2, step / 10)
        assert decision.to is None and policy.hold_reason.startswith(f"{100 + step} prompt tokens")
        told += policy.news(decision)
    assert told == 1


def test_the_same_inputs_have_the_same_answer() -> None:
    """I12: nothing is remembered but what the inputs say; a flip that was refused may be wanted again (I14)."""
    assert at(TENSOR, 9000, 1) == at(TENSOR, 9000, 1)
    policy = Policy(PIPELINE, 15.0, 5.0)
    for now in (1.0, 2.0):
        assert policy.look(Demand(9000, 1, 50), TENSOR, SPEEDS, 3.2, now).to == PIPELINE


def test_under_a_standing_backlog_both_layouts_get_their_time() -> None:
    """Neither starves: a minute of more prompts than can ever be computed, and streams that decode."""
    policy = Policy(PIPELINE, dwell_s=15.0, idle_s=5.0)
    layout, changed, spent, flips = PIPELINE, None, dict.fromkeys(SPEEDS, 0.0), 0
    for tick in range(1200):
        now = tick / 10
        decision = policy.look(Demand(10**6, 8, 4000), layout, SPEEDS, 3.2, now, changed)
        if decision.to is not None:
            layout, changed, flips = decision.to, now, flips + 1
        spent[layout] += 0.1
    assert flips == 7 and min(spent.values()) >= 45.0


@given(
    st.sampled_from([PIPELINE, TENSOR]),
    st.integers(0, 10**6),
    st.integers(0, 64),
    st.floats(0, 1000),
    st.tuples(*[st.floats(0.1, 1e5)] * 4),
    st.floats(0.01, 100),
)
def test_a_decision_is_to_the_other_layout_or_none(
    layout: str, pending: int, decoding: int, since: float, speeds: tuple[float, ...], cost_s: float
) -> None:
    """And where nothing is owed and the layout is at rest, no timer runs."""
    both = {PIPELINE: LayoutSpeeds(*speeds[:2]), TENSOR: LayoutSpeeds(*speeds[2:])}
    decision = at(layout, pending, decoding, speeds=both, cost_s=cost_s, changed=100.0 - since, idle=50.0)
    assert decision.to in (None, other(layout))
    assert decision.owed == bool(pending or decoding)
    if decision.to is not None:
        assert since >= 15.0
    if decision.again_s is not None:
        assert decision.again_s > 0


def test_short_answers_in_the_slower_layout_add_up_to_a_flip() -> None:
    """No open answer pays for a flip by itself; together those that were drawn here would have."""
    speeds = {PIPELINE: LayoutSpeeds(700.0, 150.0), TENSOR: LayoutSpeeds(700.0, 100.0)}
    policy, cost_s, looks = Policy(PIPELINE, 0.0, 5.0), 1.0, 0
    for step in range(1000):
        looks += 1
        decision = policy.look(Demand(0, 1, 8), TENSOR, speeds, cost_s, step * 0.1, None, "", Done(0, 8))
        if decision.to is not None:
            break
    assert decision.to == PIPELINE and "would have saved" in decision.reason
    assert looks == math.floor(cost_s / (8 * (1 / 100 - 1 / 150))) + 1, "as soon as it comes to the round trip"


def test_what_was_lost_begins_anew_with_each_layout_and_gains_are_counted() -> None:
    speeds = {PIPELINE: LayoutSpeeds(2000.0, 50.0), TENSOR: LayoutSpeeds(1000.0, 100.0)}
    policy = Policy(PIPELINE, 0.0, 5.0)

    def look(layout: str, done: Done) -> str | None:
        return policy.look(Demand(1, 1, 1), layout, speeds, 1.0, 1.0, None, "", done).to

    assert look(TENSOR, Done(1000, 50)) is None, "0.5 s lost for prompts, as much gained for answers"
    assert look(TENSOR, Done(1999, 0)) is None, "0.9995 s: not more than a round trip"
    assert look(PIPELINE, Done()) is None and look(TENSOR, Done(1999, 0)) is None, "another stay"
    assert look(TENSOR, Done(0, 10**6)) is None and look(TENSOR, Done(1999, 0)) is None, "a gain is no credit"
    assert look(TENSOR, Done(2, 0)) == PIPELINE
