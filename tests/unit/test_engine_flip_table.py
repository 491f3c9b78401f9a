"""The flip's table, and the flip that is driven by it: every state meets every event, and it ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeserve.engine.flip import TABLE, FlipAction, FlipEvent, Flipper, FlipState, Step
from homeserve.engine.flip_record import FlipRefused, LiveSet
from homeserve.engine.request import FlipLimits, LayoutLimits
from homeserve.wire.records import PACK, VERIFY, FlipAnswer, FlipDigest, FlipLive, Result

PIPELINE, TENSOR = "pipeline", "tensor"
S, E, A = FlipState, FlipEvent, FlipAction
ENDS = {A.GIVE_UP, A.FINISH, A.LOSE}
LIVE = LiveSet(FlipLive((b"\x07",), b"\x01"), 1, (3,), 48, 1, 0, 1000)


def make(**more: object) -> Flipper:
    layouts = {name: LayoutLimits(name, 1, 2) for name in (PIPELINE, TENSOR)}
    fields: dict[str, object] = {"transit_bytes": 5000, "cache_bytes": 0, "park_deadline_s": 30.0}
    return Flipper(FlipLimits(layouts, PIPELINE, (300,), 100, **{**fields, **more}))  # type: ignore[arg-type]


def test_every_state_meets_every_event() -> None:
    assert set(TABLE) == {(state, event) for state in S for event in E}


def test_the_table_says_nothing_that_could_leave_a_flip_hanging() -> None:
    for (state, event), (to, action) in TABLE.items():
        if action in ENDS:
            assert to is S.IDLE and state is not S.IDLE, "an end is an end"
        elif action in (A.NOTHING, A.NEVER, A.REFUSE):
            assert to is state
        else:
            assert to is not S.IDLE
        if event is E.LOST:
            assert to is S.IDLE, "a loss ends any flip"
        if event is E.ASK and state is not S.IDLE:
            assert action is A.REFUSE, "one flip at a time"
    for state in (S.PACKING, S.VERIFYING):
        assert TABLE[state, E.NO] == (S.ABANDONING, A.UNDO), "until the commit one no undoes all"
    for state in (S.COMMITTING, S.CHECKING, S.ABANDONING):
        assert TABLE[state, E.NO] == (S.IDLE, A.LOSE), "behind it there is no way back"
    waits = [state for state in S if TABLE[state, E.EXPIRED][1] is A.GIVE_UP]
    assert waits == [S.DRAINING], "every other state waits for a plan, which has the fleet's bound"


def test_from_every_state_answers_lead_to_the_end() -> None:
    for start in S:
        state, steps = start, 0
        while state is not S.IDLE:
            state = TABLE[state, E.DRAINED if state is S.DRAINING else E.YES][0]
            steps += 1
            assert steps <= len(S)


def answers(ok: bool = True, total: int = 1000, **fields: int) -> list[Result]:
    """Two ranks: the first sends a tenth to the other one, who keeps the rest."""
    sent = total // 10
    digests = (FlipDigest(0, 1, sent, 1), FlipDigest(1, 1, total - sent, 2))
    return [
        Result(0, 1, 0, flip=FlipAnswer(**{"sent_bytes": sent, **fields}, digests=digests[:1])),
        Result(
            1, 1, 0, ok=ok, reason="" if ok else "no",
            flip=FlipAnswer(local_bytes=total - sent, received_bytes=sent, digests=digests[1:]),
        ),
    ]  # fmt: skip


def test_what_each_step_orders() -> None:
    flipper = make()
    record = flipper.ask(TENSOR, "policy", 1.0, 100)
    packing = flipper.on_drained(LIVE, 2.0)
    assert packing.order is not None and packing.order.live is LIVE.live
    assert (packing.action, packing.order.stage, packing.order.epoch, packing.order.to) == (A.PACK, PACK, 1, TENSOR)
    verifying = flipper.on_results(answers(), 3.0)
    assert verifying.order is not None and verifying.order.stage == VERIFY
    assert [(d.source, d.target, d.nbytes) for d in verifying.order.digests] == [(0, 1, 100), (1, 1, 900)]
    commit = flipper.on_results(answers(), 4.0)
    assert commit.action is A.COMMIT and commit.order is not None and commit.order.live is None
    assert (flipper.layout, flipper.epoch) == (PIPELINE, 0), "not before all have said yes"
    assert flipper.on_results(answers(), 6.0).action is A.CHECK
    assert (flipper.layout, flipper.epoch) == (TENSOR, 1)
    assert flipper.on_census("", 6.5).action is A.FINISH
    assert record.ms == {"drain": 1e3, "prepare": 2e3, "commit": 2e3, "verify": 500.0, "refill": None, "total": 5.5e3}
    assert flipper.totals.ended[(TENSOR, "policy", "committed", "")] == 1


def test_what_is_too_much_when_all_is_quiet_ends_the_flip_before_a_rank_hears_of_it() -> None:
    flipper = make()
    record = flipper.ask(TENSOR, "request", 0.0, 100)
    large = LiveSet(LIVE.live, 1, (3,), 48, 1, 0, 5001)
    assert flipper.on_drained(large, 1.0).action is A.GIVE_UP
    assert (record.state, record.why) == ("abandoned", "does_not_fit") and "MiB" in (record.reason or "")


@pytest.mark.parametrize(
    ("stage", "results", "problem"),
    [
        ("pack", answers(total=999), "bytes are packed of 1000"),
        ("pack", answers(sent_bytes=101), "101 + 900 bytes"),
        ("commit", answers(received_bytes=1), "101 bytes were received of 100 sent"),
        ("commit", [Result(0, 1, 0), Result(1, 1, 0)], ""),
    ],
)
def test_what_ranks_say_is_compared(stage: str, results: list[Result], problem: str) -> None:
    flipper = make()
    record = flipper.ask(TENSOR, "request", 0.0, 0)
    flipper.on_drained(LIVE, 0.0)
    if stage == "commit":
        flipper.on_results(answers(), 0.0)
        flipper.on_results(answers(), 0.0)
    step = flipper.on_results(results, 0.0)
    if problem:
        assert step.action is (A.UNDO if stage == "pack" else A.LOSE)
        assert problem in (record.reason or "") and record.why == "mismatch"
    else:
        assert step.action is A.CHECK


@pytest.mark.parametrize(
    ("rows", "states", "good"), [(2 * 48, 3, True), (2 * 48, 4, True), (2 * 48 - 1, 3, False), (2 * 48, 2, False)]
)
def test_rows_and_states_are_counted_where_their_layers_are_known(rows: int, states: int, good: bool) -> None:
    """Of two attention layers each row once; a state may lie on several ranks in parts, but on none too few."""
    flipper = make(group_layers=(2,), state_layers=3)
    flipper.ask(TENSOR, "request", 0.0, 0)
    flipper.on_drained(LIVE, 0.0)
    for _ in range(2):
        flipper.on_results(answers(), 0.0)
    step = flipper.on_results(answers(rows=rows, states=states), 0.0)
    assert step.action is (A.CHECK if good else A.LOSE)


def test_an_answer_that_says_nothing_of_what_was_packed_is_no_yes() -> None:
    flipper = make()
    record = flipper.ask(TENSOR, "request", 0.0, 0)
    flipper.on_drained(LIVE, 0.0)
    assert flipper.on_results([answers()[0], Result(1, 1, 0)], 0.0).action is A.UNDO
    assert record.reason == "rank 1 does not say what it did"


def test_what_cannot_come_is_loud() -> None:
    flipper = make()
    flipper.ask(TENSOR, "request", 0.0, 0)
    with pytest.raises(AssertionError, match="draining cannot meet yes"):
        flipper.on_results(answers(), 0.0)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from(["ask", "yes", "no", "lie", "lost", "late"]), max_size=60))
def test_any_history_of_answers_ends_every_flip_and_epochs_only_grow(history: list[str]) -> None:
    """And none ends without a reason; the layout in force is that of the last flip committed in this life."""
    flipper, now, epochs, layout = make(), 0.0, [0], PIPELINE
    for event in history:
        now += 1.0
        step = Step(A.NOTHING)
        if event == "ask":
            to = TENSOR if flipper.layout == PIPELINE else PIPELINE
            try:
                epochs.append(flipper.ask(to, "request", now, 0).epoch)
            except FlipRefused as refused:
                assert refused.code == "flip_running" and flipper.on
        elif event == "lost":
            step = flipper.on_lost(1, "gone", now)
            epochs.append(flipper.epoch)
            layout = PIPELINE
            assert not flipper.on and flipper.layout == PIPELINE
        elif event == "late":
            was = flipper.state
            step = flipper.tick(now + 100)
            assert step.action is (A.GIVE_UP if was is S.DRAINING else A.NOTHING)
        elif flipper.state is S.DRAINING:
            step = flipper.on_drained(LIVE, now)
        elif flipper.state is S.CHECKING:
            layout = flipper.layout
            step = flipper.on_census("" if event == "yes" else "a leak", now)
        elif flipper.on:
            results = answers(ok=event != "no", total=1000 if event != "lie" else 990)
            step = flipper.on_results(results, now)
        if step.action is A.LOSE:
            flipper.on_lost(-1, step.why, now)
            epochs.append(flipper.epoch)
            layout = PIPELINE
        assert flipper.on == (flipper.record is not None)
    assert epochs == sorted(set(epochs)), "no epoch is used twice"
    if not flipper.on:
        assert flipper.layout == layout
        assert all(record.over for record in flipper.records())
    over = [record for record in flipper.records() if record.over]
    assert flipper.committed + sum(flipper.abandoned.values()) == len(over)
    assert all(record.reason and record.why for record in over if record.state == "abandoned"), (
        "no end without a reason"
    )
