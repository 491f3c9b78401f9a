"""The corpses of bounds and clocks: what may end a flip, and from when on it counts.

Collected by `test_corpses`.
"""

from __future__ import annotations

import asyncio
import os

import pytest
from corpse_rig import HELD, LIVE, PIPELINE, TENSOR, answered, ends_right
from engine_flip_rig import RANKS, SimFleet, Trouble, flip_limits, run
from flip_rig import Rig
from test_engine_flip_engine import asked, make

from homeserve.engine.flip import Flipper, FlipState
from homeserve.engine.flip_record import FlipRecord
from homeserve.fleet.acts import ActsMemory
from homeserve.fleet.spec import ActSizes
from homeserve.worker.flip import FlipRefused

PARK_S = 30.0
MUCH = 1e6


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
