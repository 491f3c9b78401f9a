"""The corpses of steps: when a flip begins, what must not hold it up, whose yes counts, and how serving goes on.

Collected by `test_corpses`.
"""

from __future__ import annotations

import msgspec
import pytest
from corpse_rig import HELD, LIVE, TENSOR, answered, committed, ends_right, long_answers, long_prompt
from corpses_wire import crossed
from engine_flip_rig import FLIP_KINDS, PIPELINE, RANKS, Trouble, run
from flip_rig import Rig
from test_engine_flip_engine import asked, make

from homeserve.engine.policy import LayoutSpeeds, PolicyInputs, decide
from homeserve.engine.request import FinishReason
from homeserve.wire.records import PACK, VERIFY, PlanKind
from homeserve.worker.flip import FlipRefused

PREPARE, COMMIT, ABANDON = FLIP_KINDS


# -------------------------------------------------------------------------------------------------- what begins a flip


def test_D() -> None:
    """There a rank acted on an order one pass later, and that pass began with a receive from a neighbour who was in the
    reduction already. Here whoever is quiet acts in the very call that asks: nothing later has to happen."""

    async def body() -> None:
        engine, fleet = make()
        for to in (TENSOR, PIPELINE):
            record = engine.flip_ask(to)
            assert [plan.kind for plan in fleet.plans] == [PREPARE] and record.state == "preparing"
            assert answered(fleet, record, 4) == 4

    run(body)


def test_G() -> None:
    """There a rank that waited quietly stopped handing orders on, so the others never heard: each attempt ended in
    time, none in a flip. Here a drain has an end that depends on nobody: no plan is issued while it lasts, so however
    many calls come in it needs the answers that were due when it began, and flips go on one after another."""

    async def body() -> None:
        engine, fleet = make(waiting=256)
        calls = []
        for n in range(60):
            in_flight = len(fleet.plans)
            record = engine.flip_ask((TENSOR, PIPELINE)[n % 2])
            for count in range(in_flight + 4):
                assert record.state == ("draining" if count < in_flight else record.state)
                calls.append(asked(engine, (n % 40 + 8, count + 8), 3))
                fleet.answer()
            assert record.state == "committed", record.reason
            while engine.snapshot().waiting > 100:
                fleet.answer()
        await ends_right(fleet, *calls)

    run(body)


def test_Q0() -> None:
    """There a rank was ready only when it was idle, and the reason to flip was that it was not: both could never hold.
    Here what has to be quiet is the machinery: residents that decode do not hold a flip up."""

    async def body() -> None:
        engine, fleet = make()
        calls = [asked(engine, prompt, 40) for prompt in long_answers(3)]
        for _ in range(8):
            fleet.answer()
        assert engine._scheduler.demand().decoding == 3
        committed(fleet, TENSOR)
        assert engine._scheduler.demand().decoding == 3
        await ends_right(fleet, *calls)

    run(body)


def test_L() -> None:
    """There the last batch was never empty while anything decoded, so the way back to the pipeline layout was never
    free. Here it is that of any flip: under streams that go on for ever it is committed within the answers that are in
    flight and its own."""

    async def body() -> None:
        engine, fleet = make()
        calls = [asked(engine, prompt, 90) for prompt in long_answers(2, 90)]
        for _ in range(4):
            fleet.answer()
        for _ in range(3):
            committed(fleet, TENSOR)
            for _ in range(3):
                fleet.answer()
            assert engine._scheduler.demand().decoding == 2 and fleet.plans
            committed(fleet, PIPELINE)
            for _ in range(3):
                fleet.answer()
        await ends_right(fleet, *calls)

    run(body)


def test_O() -> None:
    """There a prompt in chunks refused the flip from its first chunk to its last. Here between two chunks is as good a
    moment as any: the flip waits for the chunks in flight, and the prompt goes on behind them in the other layout."""

    async def body() -> None:
        engine, fleet = make(chunk=16, checkpoints=0)
        call = asked(engine, long_prompt(200), 5)
        in_flight = len(fleet.plans)
        assert committed(fleet, TENSOR) == in_flight + 4
        assert fleet.plans[0].draft.rows[0].start == 16 * in_flight < 200
        await ends_right(fleet, call)

    run(body)


def test_N() -> None:
    """There the policy measured the queue, and a prompt that had left it, its first chunk computed, counted as nothing:
    the flip for it came never or too late. Here what counts is every prompt token that is not computed, the unfilled
    rest of a prompt in chunks included."""

    async def body() -> None:
        engine, fleet = make(chunk=16, checkpoints=0, running=1)
        calls = [asked(engine, long_prompt(200), 2)]
        scheduler = engine._scheduler
        assert scheduler.waiting_count == 0
        assert scheduler.demand().pending_tokens == 200 - 16 * len(fleet.plans)
        calls.append(asked(engine, long_prompt(100), 2))
        assert scheduler.demand().pending_tokens == 300 - 16 * len(fleet.plans)
        speeds = {TENSOR: LayoutSpeeds(1681.0, 78.3), PIPELINE: LayoutSpeeds(7245.5, 16.8)}
        rest = scheduler.demand().pending_tokens
        inputs = PolicyInputs(100.0, TENSOR, TENSOR, rest, 0, 0, speeds, rest * (1 / 1681.0 - 1 / 7245.5) * 0.9)
        assert decide(inputs).to == PIPELINE, "it pays for that rest"
        await ends_right(fleet, *calls)

    run(body)


# ------------------------------------------------------------------------------------------------- yes, no, and whose


def test_E() -> None:
    """There flags carried the epoch and not the round: the quorum of round N opened the gate for N + 1 at once. Here a
    yes is for one flip: what was compared for it licenses the commit of no other, whichever of number, epoch and layout
    differs, and a flip that was packed and not compared is licensed by nothing."""
    with Rig() as rig:
        rig.fill(LIVE, HELD)
        order = rig.order(LIVE, HELD)
        verify = rig.verify_order(order, rig.pack(order))
        for rank in rig.ranks:
            rank.prepare(verify, 0)
        for change in ({"flip": 2}, {"epoch": 2}, {"flip": 2, "epoch": 2}):
            for rank in range(RANKS):
                with pytest.raises(FlipRefused, match="is not the one that is prepared"):
                    rig.commit(rank, msgspec.structs.replace(order, **change))
        for each in rig.ranks:
            each.abandon(order)
        second = rig.order(LIVE, HELD)
        rig.pack(second)
        for rank in range(RANKS):
            with pytest.raises(FlipRefused, match="flip 2 is to be committed, and its payloads were not compared"):
                rig.commit(rank, second)
        assert rig.layout == PIPELINE and rig.rebound == [0] * RANKS


def test_E2() -> None:
    """There a rank announced that it was ready and then went on to other work, which blocked: the evidence was of the
    right round and of the wrong place. Here a commit follows the answers of all ranks to one plan, the comparison of
    this flip, which each gave at the end of that plan."""
    for seed in range(3):
        fleet = crossed(seed)
        commits = [seq for seq in fleet.flip_plans() if fleet.plans[seq].kind is COMMIT]
        assert len(commits) == 3
        for seq in commits:
            verify, pack = fleet.plans[seq - 1].flip, fleet.plans[seq - 2].flip
            order = fleet.plans[seq].flip
            assert order is not None and verify is not None and pack is not None
            assert (pack.stage, verify.stage) == (PACK, VERIFY) and pack.flip == verify.flip == order.flip
            before = fleet.events[: fleet.events.index(("issue", seq))]
            assert {("ends", rank, seq - 1) for rank in range(RANKS)} <= set(before)
            assert before[-1] == ("told", seq - 1), "nothing comes between the last answer and the commit"


def test_H() -> None:
    """There a rank gave up for itself and its flag stayed up: the others formed a quorum on it, went in, and epochs
    parted. Here one no is a no of all: every rank is told to drop what it packed, all have the old layout, no commit
    was issued, and the next attempt, under a larger epoch, is an ordinary one."""
    for at in ("verify", "pack"):

        async def body(at: str = at) -> None:
            engine, fleet = make()
            call = asked(engine, max_tokens=30)
            fleet.answer()
            fleet.trouble = Trouble(at, "refuse")
            record = engine.flip_ask(TENSOR)
            answered(fleet, record, 8)
            assert (record.state, record.why) == ("abandoned", "refused") and "rank 1" in str(record.reason)
            kinds = [kind for kind in fleet.kinds if kind in FLIP_KINDS]
            assert kinds == [PREPARE] * (1 if at == "pack" else 2) + [ABANDON]
            assert (fleet.layout, engine.snapshot().layout, engine.snapshot().epoch) == (PIPELINE, PIPELINE, 0)
            again = engine.flip_ask(TENSOR)
            assert again.epoch > record.epoch
            answered(fleet, again, 8)
            assert again.state == "committed" and fleet.layout == TENSOR
            await ends_right(fleet, call)

        run(body)

    with Rig(faults={1: "rank=1,step=prepare.digest,action=refuse"}) as rig:
        rig.fill(LIVE, HELD)
        before, order = rig.bytes_now(), rig.order(LIVE, HELD)
        verify = rig.verify_order(order, rig.pack(order))
        rig.ranks[0].prepare(verify, 0)
        with pytest.raises(Exception, match="prepare.digest"):
            rig.ranks[1].prepare(verify, 0)
        for rank in rig.ranks:
            rank.abandon(order)
        assert rig.bytes_now() == before and [rank.blocked for rank in rig.ranks] == [""] * RANKS
        rig.flip(rig.order(LIVE, HELD))
        assert rig.wrong(LIVE, HELD) == []


# ------------------------------------------------------------------------------------------------- how serving goes on


def test_resume_gate() -> None:
    """There ranks withheld work after a flip was given up until all had said that they were done with it, which was the
    old deadlock once more. Here the first plan behind one that was given up is issued in the call that ends it: the
    order of the log sees to the rest."""

    async def given_up() -> None:
        engine, fleet = make()
        call = asked(engine, max_tokens=30)
        fleet.answer()
        fleet.trouble = Trouble("verify", "refuse")
        record = engine.flip_ask(TENSOR)
        while not record.over:
            assert fleet.plans, record.state
            fleet.answer()
        assert record.state == "abandoned"
        assert fleet.plans and fleet.plans[0].draft.rows, "and nobody was asked anything more"
        assert PlanKind.CENSUS not in fleet.kinds
        await ends_right(fleet, call)

    run(given_up)

    async def out_of_time() -> None:
        engine, fleet = make()
        first = asked(engine)
        fleet.answer()
        record = engine.flip_ask(TENSOR)
        fleet.answer()
        assert record.state == "draining" and fleet.plans and fleet.credit() > 0
        second = asked(engine, (9, 9, 9))
        issued = len(fleet.kinds)
        fleet.timers.pass_(30.0)
        assert record.state == "abandoned" and len(fleet.kinds) > issued, "though answers are missing still"
        await ends_right(fleet, first, second)

    run(out_of_time)


def test_batch_full() -> None:
    """There "the batch is full" was remembered, and what would have cleared it had gone with the old layout: nothing
    was admitted any more. Here nobody remembers a refusal: a lane that is free behind a flip is given out in the same
    call."""

    async def body() -> None:
        engine, fleet = make(running=1, stream_tokens=2)
        (prompt,) = long_answers(1)
        stalled = asked(engine, prompt, 40)
        fleet.answer_all()
        waiting = asked(engine, (3, 1, 4), 4)
        assert not fleet.plans and engine.snapshot().waiting == 1, "one lane, and its reader stalls"
        record = engine.flip_ask(TENSOR)
        stalled.aborted = True
        engine.abort(stalled.stream, FinishReason.ABORT)
        answered(fleet, record, 4)
        assert record.state == "committed" and fleet.plans, "it is admitted"
        await ends_right(fleet, waiting)

    run(body)
