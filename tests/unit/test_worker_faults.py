"""Faults for tests: what their text may be, and when they fire. (That they kill and stop is seen in tests/process.)"""

from __future__ import annotations

import errno

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeserve.errors import SettingError
from homeserve.wire.faults import ACTIONS, STEPS, Fault, ForcedDrafts, parse, parse_drafts
from homeserve.wire.records import LaneRows, LoadSpec, Plan, PlanKind, pack_ints
from homeserve.worker.faults import FaultPoint, FaultRefused, steps_of

PREFILL = Plan(2, 0, PlanKind.PREFILL, 1, rows=(LaneRows(0, 1, 0, pack_ints([1, 2])),))
DECODE = Plan(3, 0, PlanKind.DECODE, 1, rows=(LaneRows(0, 1, 2, b""),))
MIXED = Plan(4, 0, PlanKind.MIXED, 1, rows=PREFILL.rows + DECODE.rows)
LOAD = Plan(1, 0, PlanKind.LOAD, 1, load=LoadSpec("m", 16, "f16", 1, 1, 1, 1))


def test_the_documented_form_is_understood() -> None:
    assert parse("") is None
    assert parse("rank=1,step=decode,nth=3,action=kill") == Fault(1, "decode", 3, "kill")
    assert parse(" step=load , action=delay:250 ") == Fault(0, "load", 1, "delay", 250)
    for step in STEPS:
        for action in ACTIONS:
            assert parse(f"rank=0,step={step},action={action.replace('MS', '5')}") is not None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rank=0,step=nap,action=kill", "known: load, prefill, decode, draft, verify, prepare.check, "),
        ("rank=0,action=kill", "known: load, prefill, decode, draft, verify, prepare.check, "),
        ("rank=0,step=load,action=explode", "known: kill, stop, refuse, enospc, corrupt, delay:MS"),
        ("rank=0,step=load", "action ''"),
        ("rank=0,step=load,action=delay", "action 'delay'"),
        ("rank=0,step=load,action=delay:MS", "'MS' is not a number"),
        ("rank=0,step=load,action=kill:3", "action 'kill:3'"),
        ("rank=-1,step=load,action=kill", "rank '-1'"),
        ("rank=0,step=load,nth=0,action=kill", "nth '0'"),
        ("rank=0,rank=1,step=load,action=kill", "'rank=1' is not expected"),
        ("when=now,step=load,action=kill", "'when=now' is not expected"),
    ],
)
def test_a_wrong_one_says_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(SettingError) as caught:
        parse(text)
    assert says in caught.value.message and caught.value.field == "fault" and caught.value.fix


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("", ForcedDrafts()),
        ("wrong", ForcedDrafts(wrong=True, accept=0)),
        ("accept:0", ForcedDrafts(accept=0)),
        ("accept:3", ForcedDrafts(accept=3)),
    ],
)
def test_drafts_for_tests_are_wrong_or_count_whatever_was_drawn(text: str, means: ForcedDrafts) -> None:
    assert parse_drafts(text) == means


@pytest.mark.parametrize(
    "text", ["right", "accept", "accept:", "accept:-1", "accept:\u0663", "accept:99999", "wrong:1"]
)
def test_other_drafts_for_tests_are_refused(text: str) -> None:
    with pytest.raises(SettingError) as caught:
        parse_drafts(text)
    assert repr(text) in caught.value.message and caught.value.field == "drafts_test" and caught.value.fix


@settings(max_examples=60)
@given(st.text(alphabet="rankstepdco=,:0123456789 load-\u0663", max_size=60))
def test_any_text_is_a_fault_or_a_setting_error(text: str) -> None:
    try:
        parse(text)
    except SettingError:
        pass


def test_a_plans_steps_are_those_of_its_rows() -> None:
    assert [sorted(steps_of(plan)) for plan in (LOAD, PREFILL, DECODE, MIXED)] == [
        ["load"],
        ["prefill"],
        ["decode"],
        ["decode", "prefill"],
    ]
    assert steps_of(Plan(5, 0, PlanKind.CENSUS, 1)) == frozenset()
    drafting = Plan(6, 0, PlanKind.DECODE, 1, rows=(LaneRows(0, 1, 2, pack_ints([7]), sample=True, drafts=3),))
    assert steps_of(drafting) == {"decode"}, "a row with drafts goes on, though it brings its token"


def test_it_fires_once_at_the_nth_of_its_step() -> None:
    point = FaultPoint(parse("step=decode,nth=2,action=refuse"))
    for plan in (LOAD, PREFILL, DECODE, PREFILL):
        point.before(plan)
    with pytest.raises(FaultRefused, match="decode"):
        point.before(MIXED)
    for _ in range(3):
        point.before(DECODE)


def test_each_action_that_a_process_survives() -> None:
    with pytest.raises(OSError) as caught:
        FaultPoint(parse("step=load,action=enospc")).before(LOAD)
    assert caught.value.errno == errno.ENOSPC
    corrupt = FaultPoint(parse("step=load,action=corrupt"))
    corrupt.before(LOAD)
    assert corrupt.corrupts
    FaultPoint(parse("step=load,action=delay:1")).before(LOAD)
    FaultPoint(None).before(LOAD)


def test_a_step_within_a_plan_fires_at_its_nth_time_and_says_whether_to_spoil() -> None:
    point = FaultPoint(parse("step=prepare.pack,nth=2,action=corrupt"))
    assert [point.at(step) for step in ("prepare.pack", "prepare.check", "prepare.pack", "prepare.pack")] == [
        False,
        False,
        True,
        False,
    ]
    assert not point.corrupts
    point = FaultPoint(parse("step=commit.map,action=corrupt"))
    point.damaging("commit.release")
    assert not point.corrupts
    point.damaging("commit.map")
    assert point.corrupts
    with pytest.raises(FaultRefused, match="prepare.digest"):
        FaultPoint(parse("step=prepare.digest,action=refuse")).at("prepare.digest")


def test_a_plan_as_a_whole_is_no_step_of_a_flip() -> None:
    point = FaultPoint(parse("step=prepare.check,action=refuse"))
    point.before(Plan(9, 0, PlanKind.FLIP_PREPARE, 1))
    assert not point.corrupts
