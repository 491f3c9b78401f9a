"""The corpses of steps and bounds: when a flip begins, goes on and is given up, and what must not hold it up.

Collected by `test_corpses`.
"""

from __future__ import annotations

import asyncio
import os

import msgspec
import pytest
from corpse_rig import TENSOR
from corpses_wire import crossed
from engine_flip_rig import FLIP_KINDS, PIPELINE, RANKS, SimFleet, Trouble, flip_limits, run
from flip_rig import Rig
from test_engine_flip_engine import Asked, asked, make
from test_engine_traces import answer

from homeserve.engine.flip import Flipper, FlipState
from homeserve.engine.flip_record import FlipRecord
from homeserve.engine.policy import LayoutSpeeds, PolicyInputs, decide
from homeserve.engine.request import FinishReason
from homeserve.fleet.acts import ActsMemory
from homeserve.fleet.spec import ActSizes
from homeserve.wire.records import PACK, VERIFY, PlanKind
from homeserve.worker.flip import FlipRefused

PREPARE, COMMIT, ABANDON = FLIP_KINDS
PARK_S = 30.0
MUCH = 1e6
LIVE, HELD = ({0, 1, 2, 3, 7, 22}, {0, 5, 8}), {0, 3}


def answered(fleet: SimFleet, record: FlipRecord, most: int) -> int:
    """How many answers the flip needed to end; it may take `most`."""
    for count in range(most):
        if record.over:
            return count
        assert fleet.plans, f"the flip is {record.state}, and nothing more will come"
        fleet.answer()
    assert record.over, f"the flip is still {record.state} after {most} answers"
    return most


def committed(fleet: SimFleet, to: str) -> int:
    """A flip: how many answers it needed. What was in flight, and four plans of its own, are the most."""
    in_flight = len(fleet.plans)
    record = fleet.engine.flip_ask(to)
    count = answered(fleet, record, in_flight + 4)
    assert record.state == "committed", record.reason
    return count


async def ends_right(fleet: SimFleet, *calls: Asked) -> None:
    fleet.answer_all()
    for each in calls:
        assert each.stream.finished
        await asyncio.wait_for(each.read(), 5)
        each.check()


def long_prompt(count: int) -> tuple[int, ...]:
    return tuple(n % 40 + 8 for n in range(count))


# ------------------------------------------------------------------------------------------------------------- bounds


def until(fleet: SimFleet, record: FlipRecord, state: FlipState) -> None:
    flipper = fleet.engine._flips
    assert flipper is not None
    for _ in range(20):
        if flipper.flipper.state is state:
            return
        fleet.answer()
    raise AssertionError(f"the flip never was {state.value}: {record.reason}")


def unmoved_by_time(fleet: SimFleet, state: FlipState) -> None:
    """However long nothing comes: neither a timer nor a look at the clock ends the flip in this state."""

    async def body() -> None:
        call = asked(fleet.engine, max_tokens=30)
        fleet.answer()
        record = fleet.engine.flip_ask(TENSOR)
        until(fleet, record, state)
        issued = len(fleet.kinds)
        fleet.timers.pass_(MUCH)
        assert fleet.engine._flips is not None
        fleet.engine._flips._expire()
        assert fleet.engine._flips.flipper.state is state and len(fleet.kinds) == issued and not record.over
        answered(fleet, record, 5)
        assert record.state == "committed", record.reason
        await ends_right(fleet, call)

    run(body)


def test_C() -> None:
    """There whoever had entered the reduction left it after 45 seconds: its peers saw a closed connection and died.
    Here nothing is left from inside: once a commit is issued the engine waits for its answers as long as the fleet
    lives, and only the end of a life ends it."""
    for state in (FlipState.COMMITTING, FlipState.CHECKING):
        unmoved_by_time(make()[1], state)

    async def body() -> None:
        engine, fleet = make()
        call = asked(engine)
        fleet.answer()
        record = engine.flip_ask(TENSOR)
        until(fleet, record, FlipState.COMMITTING)
        fleet.timers.pass_(MUCH)
        fleet.lose("killed in the commit")
        assert (record.state, record.why) == ("abandoned", "lost") and engine.state == "recovering"
        while engine.state != "ready":
            await asyncio.sleep(0)
        assert fleet.layout == PIPELINE
        await ends_right(fleet, call)

    run(body)


def test_b14() -> None:
    """There two bounds were counted from the same moment, the longer one of the step that came second: a rank gave up
    for one of them while its peers were inside the other. Here bounds come one behind the other: the park deadline is
    that of the drain alone, and each later step has the bound of its plan, which begins with it."""
    for state in (FlipState.PACKING, FlipState.VERIFYING):
        unmoved_by_time(make()[1], state)

    async def late_drain() -> None:
        engine, fleet = make()
        call = asked(engine)
        record = engine.flip_ask(TENSOR)
        fleet.timers.pass_(PARK_S - 1)
        until(fleet, record, FlipState.PACKING)
        fleet.timers.pass_(PARK_S)
        answered(fleet, record, 5)
        assert record.state == "committed", record.reason
        await ends_right(fleet, call)

    run(late_drain)


def test_b15() -> None:
    """There markers that a killed server had left were taken for today's quorum. Here nothing of an earlier life can be
    evidence in a later one: its transit memory is new and empty, a rank knows of no flip that it did not prepare, and
    neither a flip's number nor an epoch is given twice."""
    sizes = ActSizes(16, 16, 16, 4)
    lives = [ActsMemory(RANKS, sizes, transit_bytes=1 << 16) for _ in range(2)]
    os.pwrite(lives[0].transit_fd, b"packed", 0)
    assert os.pread(lives[1].transit_fd, 6, 0) == bytes(6)
    for life in lives:
        life.close()

    with Rig() as old, Rig() as new:
        order = old.order(LIVE, HELD)
        verify = old.verify_order(order, old.pack(order))
        for rank in range(RANKS):
            with pytest.raises(FlipRefused, match="flip 1 is not prepared here"):
                new.ranks[rank].prepare(verify, 0)
            with pytest.raises(FlipRefused, match="flip 1 is not prepared here"):
                new.commit(rank, order)

    async def body() -> None:
        engine, fleet = make()
        used: list[tuple[int, int]] = []
        for at in ("verify", "commit", "check", ""):
            fleet.trouble = Trouble(at, "lose") if at else None
            before = engine.snapshot().epoch
            record = engine.flip_ask(TENSOR)
            used.append((record.id, record.epoch))
            assert record.epoch > before
            answered(fleet, record, 5)
            while engine.state != "ready":
                await asyncio.sleep(0)
        assert record.state == "committed"
        assert [number for number, _ in used] == [1, 2, 3, 4]
        epochs = [epoch for _, epoch in used]
        assert epochs == sorted(set(epochs))

    run(body)


def test_b16() -> None:
    """There whether a flip was over its time was asked before its clock had begun, against an older time stamp:
    "abandoned after 0.0 s". Here the clock is the flip's own and begins when it is asked for, however long the server
    has run and whatever was given up before."""
    flipper = Flipper(flip_limits(park_deadline_s=PARK_S))
    for began in (0.0, 1000.0, 5000.0):
        record = flipper.ask(TENSOR, "request", began, 0)
        for later in (0.0, 1.0, PARK_S - 0.001):
            flipper.tick(began + later)
            assert flipper.state is FlipState.DRAINING, record.reason
        flipper.tick(began + PARK_S)
        assert (record.state, record.why, record.ms["total"]) == ("abandoned", "park_deadline", 1e3 * PARK_S)


def test_b17() -> None:
    """There each opening of a gate set the park clock anew: the deadline was never reached, and a server that looked
    healthy answered nothing. Here nothing that comes in during the drain moves the deadline: answers, calls, aborts."""

    async def body() -> None:
        engine, fleet = make()
        calls = [asked(engine, (n + 8,) * 20, 20) for n in range(4)]
        record = engine.flip_ask(TENSOR)
        for n in range(3):
            fleet.timers.pass_(PARK_S / 3 - 0.002)
            assert record.state == "draining"
            fleet.answer()
            calls.append(asked(engine, (n + 30,) * 5, 4))
            calls[n].aborted = True
            engine.abort(calls[n].stream)
        assert record.state == "draining" and fleet.plans, "an answer is missing still"
        fleet.timers.pass_(0.1)
        assert (record.state, record.why) == ("abandoned", "park_deadline")
        fleet.answer_all()
        for each in calls:
            await asyncio.wait_for(each.read(), 5)
            each.check()

    run(body)


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


def long_answers(count: int, tokens: int = 40) -> list[tuple[int, ...]]:
    found = [prompt for n in range(200) if len(answer(prompt := (9, 8, n), tokens)) == tokens]
    return found[:count]


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
    for at in ("pack", "verify"):

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
        fleet.timers.pass_(PARK_S)
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
