"""The corpses that were deadlocks: who waits for whom, what an order needs to arrive, and what is paired with what.

Collected by `test_corpses`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from corpse_rig import EVERY, PIPELINE, SLOT_BYTES, TENSOR, PaperFleet, right, unread
from engine_flip_rig import FLIP_KINDS, RANKS, SimFleet, flip_limits, limits, run
from ranks import over_memory
from test_engine_flip_engine import asked, make

from backends.acts import Stamp, StampMismatch
from backends.base import OpenOptions
from backends.registry import open_backend
from homeserve.engine.policy import Policy
from homeserve.engine.scheduler import Scheduler
from homeserve.fleet.capture import Captures
from homeserve.fleet.life import Life, LifeState
from homeserve.fleet.spec import FleetSpec
from homeserve.wire.doorbell import BellReader, BellWriter
from homeserve.wire.records import PACK, VERIFY, FlipOrder, PlanKind
from homeserve.wire.ring import PlanLogReader, PlanLogWriter, Slots, ring_bytes
from homeserve.worker.drawn import FIELDS, LABEL, Drawn, TokenReceiver

PREPARE, COMMIT, ABANDON = FLIP_KINDS
SHORT, LONG = (1, 2, 3), tuple(range(1, 41))
SEEDS = range(3)


def crossing(fleet: PaperFleet) -> None:
    """A prompt in chunks and a stream, with three flips under them, asked for while plans are in flight."""
    streams = [fleet.submit(SHORT, 24), fleet.submit(LONG, 12)]
    for to in (TENSOR, PIPELINE, TENSOR):
        fleet.hear()
        fleet.flip(to)
        assert fleet.lying(LABEL) == [], "drawn tokens of before a flip are all taken"
    assert fleet.finish(*streams) == [right(SHORT, 24), right(LONG, 12)]
    assert [stream.timings.flips_crossed for stream in streams] == [3, 3]


def crossed(seed: int, **lags: Any) -> PaperFleet:
    return PaperFleet(seed, **lags).run(crossing)


def test_pre_1() -> None:
    """There a reduction at the top of every pass let ranks agree on a flip. One stood in it and still owed its
    neighbour the rows of the pass before, the neighbour waited for these, and nobody went on. Here a plan of a flip has
    no exchange between ranks: all that a rank does in it is to take drawn tokens that lie there already."""
    for seed in SEEDS:
        fleet = crossed(seed)
        flips = fleet.flip_plans()
        assert len(flips) == 9
        for rank in EVERY:
            for seq in flips:
                calls = fleet.exchanged[rank, seq]
                assert set(calls) <= {LABEL} and (not calls or fleet.plans[seq].kind is PREPARE), (rank, seq)


def test_pre_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the reduction moved to the end of the pass, and ranks had run different numbers of passes: the same
    deadlock, without any flip in sight. Here serving without a flip does nothing for flips: no plan, no question what
    is live or pending, no decision, in 10 000 steps, counted by the engine and once more from outside."""
    asked_inside: list[str] = []
    looks: list[str] = []
    inside = [False]

    def watched(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **more: Any) -> Any:
            (asked_inside if inside[0] else looks).append(name)
            return real(*args, **more)

        monkeypatch.setattr(owner, name, call)

    watched(Policy, "look")
    for name in ("live", "demand", "resident_bytes", "lanes"):
        watched(Scheduler, name)

    async def body() -> None:
        fleet = SimFleet(limits(flip_limits(policy="auto"), recurrent=False), step_s=0.0)
        await fleet.engine.start()
        for step in range(10_000):
            inside[0] = True
            if not fleet.plans:
                asked(fleet.engine, (3 + step % 40, 1), 6)
            fleet.answer()
            inside[0] = False
            assert asked_inside == [], f"step {step} did work for flips"
            fleet.timers.pass_(0.005)
        assert fleet.engine.snapshot().plans_acked == 10_000
        assert len(looks) > 100, "the policy looks, between steps"
        assert not set(fleet.kinds) & set(FLIP_KINDS)
        assert fleet.engine.snapshot().flip["unarmed_work_count"] == 0
        await fleet.engine.stop()

    run(body)


class Ear:
    """A rank as a life issues to it: it hears its bell, and reads the log as often as it was rung."""

    def __init__(self, log: memoryview) -> None:
        read, write = os.pipe()
        self.bell, self._ring = BellReader(read, blocking=False), BellWriter(write)
        self._plans = PlanLogReader(Slots(log, RANKS + 1, SLOT_BYTES, create=False))

    def announce(self) -> None:
        self._ring.ring()

    def heard(self) -> list[FlipOrder | None]:
        return [self._plans.take().flip for _ in range(self.bell.poll_nowait())]

    def close(self) -> None:
        self.bell.close()
        self._ring.close()


@contextmanager
def life_with_ears() -> Iterator[tuple[Life, list[Any]]]:
    """A life that is up, without processes."""
    spec = FleetSpec(
        ranks=RANKS, backend="cpu", device_index=0, threads=1, isa="", plans_in_flight=RANKS + 1, plan_timeout_s=60.0,
        slot_bytes=SLOT_BYTES, report_slot_bytes=SLOT_BYTES,
    )  # fmt: skip
    life = Life(spec, [""] * RANKS, Captures(None), lambda *_: None, lambda _: None, lambda: 0.0)
    log = memoryview(bytearray(ring_bytes(RANKS + 1, SLOT_BYTES)))
    life._log = PlanLogWriter(Slots(log, RANKS + 1, SLOT_BYTES, create=True), RANKS)
    ears: list[Any] = [Ear(log) for _ in EVERY]
    life.ranks, life.state = ears, LifeState.UP
    try:
        yield life, ears
    finally:
        life._stop_timer()
        for ear in ears:
            ear.close()


def test_A() -> None:
    """There an order to flip was forwarded asynchronously: it left only when its sender came by the next time, and the
    sender had gone into the reduction. Here an order is delivered when it is issued, record and bell together: every
    rank can read it though the engine does nothing more."""

    async def body() -> None:
        with life_with_ears() as (life, ears):
            steps = [(PREPARE, PACK), (PREPARE, VERIFY), (COMMIT, ""), (ABANDON, "")]
            for number, (kind, stage) in enumerate(steps, 1):
                order = FlipOrder(number, number, TENSOR, stage)
                life.issue(kind, epoch=0, flip=order)
                assert [ear.heard() for ear in ears] == [[order]] * RANKS

    run(body)


def test_B() -> None:
    """There the order was forwarded synchronously: the sender stood in that send, its receiver in the receive of
    another channel. Here issuing never blocks, because nothing is issued that there is no room for: with all of it
    taken a flip waits without a plan, and takes its first step when every answer is in."""

    async def body() -> None:
        engine, fleet = make()
        calls = [asked(engine, (n + 8,) * 20, 20) for n in range(4)]
        assert fleet.credit() == 0
        record = engine.flip_ask(TENSOR)
        for _ in range(RANKS + 1):
            assert record.state == "draining" and not set(fleet.kinds) & set(FLIP_KINDS)
            fleet.answer()
        assert [plan.kind for plan in fleet.plans] == [PREPARE]
        fleet.answer_all()
        for each in calls:
            await asyncio.wait_for(each.read(), 5)
            each.check()

    run(body)


def test_B_prime() -> None:
    """There only the one handle of the chain of orders was waited for, because "downstream is waiting for it": it was
    not. Here a rank that prepares waits for nothing: it takes the drawn tokens that it was sent, each of a plan that
    all have answered, and not one more."""
    taken = 0
    for seed in SEEDS:
        fleet = crossed(seed)
        for seq in fleet.flip_plans():
            at = fleet.events.index(("issue", seq))
            answered = {event[1:] for event in fleet.events[:at] if event[0] == "ends"}
            for rank in EVERY:
                taken += fleet.exchanged[rank, seq].get(LABEL, 0)
                sent = sum(fleet.exchanged[2, each].get(LABEL, 0) > rank for _, each in answered if _ == 2)
                had = sum(fleet.exchanged[rank, each].get(LABEL, 0) for _, each in answered if _ == rank)
                if rank < 2 and fleet.plans[seq].flip.stage == PACK:  # type: ignore[union-attr]
                    assert had + fleet.exchanged[rank, seq].get(LABEL, 0) == sent
    assert taken > 0, "there were some to take"


def test_lone_rank() -> None:
    """There rank 0 decided alone and entered alone: nobody had told the others. Here every plan of a flip is for all
    ranks, and each runs it."""
    fleet = crossed(0)
    for seq in fleet.flip_plans():
        assert fleet.plans[seq].ranks == 0b111
        assert {rank for rank in EVERY if ("ends", rank, seq) in fleet.events} == set(EVERY)


def test_bounded_recv() -> None:
    """There a receive with a bound went on without what it was to take: sends that nobody took piled up until senders
    blocked. Here whatever was sent is taken, in order: behind each of many flips the channels of drawn tokens are
    empty, and no send ever lacks room."""

    def script(fleet: PaperFleet) -> None:
        stream = fleet.submit(SHORT, 60)
        for to in (TENSOR, PIPELINE) * 4:
            for _ in range(3):
                fleet.hear()
            fleet.flip(to)
            assert fleet.lying(LABEL) == []
        assert fleet.finish(stream) == [right(SHORT, 60)]

    fleet = PaperFleet(1).run(script)
    assert fleet.lying("rows") == [], "what the last plans drew nobody needed any more"


def test_F() -> None:
    """There a loop polled handles that never complete by polling: it had been dead all along, and orders had travelled
    by their readers' own waits. Here the two premises of the transport are run: a bell that rang before anybody
    listened is heard, every stroke once, whoever looks how; and a message is there for its reader without its sender
    doing anything more."""
    read, write = os.pipe()
    ring, bell = BellWriter(write), BellReader(read, blocking=False)
    assert bell.poll_nowait() == 0
    for _ in range(2):
        ring.ring()
    assert bell.poll_nowait() == 2 and bell.poll_nowait() == 0
    ring.ring()
    assert bell.wait() == 1 and not bell.ended
    ring.close()
    assert bell.poll_nowait() == 0 and bell.ended
    bell.close()
    with native() as acts:
        for seq in (5, 6):
            acts[2].send(Stamp(1, seq, 1, LABEL), 0, np.full((1, 3), seq, np.float32))
        rows = np.zeros((1, 3), np.float32)
        for seq in (5, 6):
            acts[0].receive(Stamp(1, seq, 1, LABEL), 2, rows)
            assert rows.tolist() == [[seq] * 3]


@contextmanager
def native() -> Iterator[list[Any]]:
    """Exchanges of three ranks through shared memory, as they ship."""
    with closing(open_backend("cpu", OpenOptions(threads=1))) as device:
        with over_memory(device.library, RANKS, timeout_s=2.0, limit_s=10.0) as group:  # type: ignore[attr-defined]
            yield list(group.acts)


def test_I() -> None:
    """There a rank called itself quiet while its neighbour had begun a pass whose input it owed: each was right about
    itself, and the pair was stuck. Here quiet is a fact about the plan log: a flip's first plan goes out when every
    rank has answered every plan before it, however late one of them is."""
    for slow in EVERY:
        fleet = crossed(slow, lags={slow: 80})
        for seq in fleet.flip_plans():
            before = fleet.events[: fleet.events.index(("issue", seq))]
            for each in range(1, seq):
                assert {("ends", rank, each) for rank in EVERY} <= set(before), (slow, seq, each)
                assert ("told", each) in before
        rows = [seq for seq, plan in fleet.plans.items() if plan.rows]
        last = [max(EVERY, key=lambda rank, seq=seq: fleet.events.index(("ends", rank, seq))) for seq in rows]
        assert last.count(slow) > len(rows) // 2, "it is the one that everybody waits for"


def test_I_w() -> None:
    """There the callback that counted what was consumed raised for want of an import, "best effort" swallowed it, and
    every rank withheld for ever while the message blamed others. Here the shipped calls are driven from end to end (the
    engine over plan book, loops and rank flips on the paper wire), and whatever one of them raises is heard: it is the
    end of the engine, and every open request is told so."""

    def script(fleet: PaperFleet, wrong: str) -> None:
        phases: list[str | None] = []
        fleet.engine.watch_flips(phases.append)
        stream = fleet.submit(SHORT, 30)
        fleet.flip(TENSOR)
        assert phases == ["draining", "packing", "verifying", "committing", "checking", None]

        def told(phase: str | None) -> None:
            if phase == wrong:
                raise NameError("name 'counts' is not defined")

        fleet.engine.watch_flips(told)
        with pytest.raises(NameError, match="counts"):
            fleet.flip(PIPELINE)
        assert fleet.engine.failure is not None and "counts" in fleet.engine.failure.message
        assert stream.finished and stream._unread[-1].error and fleet.engine.gave_up.is_set()

    for wrong in ("draining", "verifying", "checking"):
        PaperFleet(2).run(partial(script, wrong=wrong))


def test_M() -> None:
    """There the neighbour was worked out from the live rank count, which is 1 in the tensor layout: rank 0 compared its
    own counter with itself and withheld 8889 times. Here who sends drawn tokens to whom is the layout's that is in
    force: one rank is told in the pipeline layout, all others in the tensor layout, and back again."""
    fleet = crossed(1)
    targets = {PIPELINE: set[int](), TENSOR: set[int]()}
    layout = PIPELINE
    for seq, plan in fleet.plans.items():
        if plan.kind is COMMIT and plan.flip is not None:
            layout = plan.flip.to
        if plan.rows and any(rows.sample for rows in plan.rows):
            targets[layout].add(fleet.exchanged[2, seq].get(LABEL, 0))
    assert targets == {PIPELINE: {1}, TENSOR: {2}}


def test_Q() -> None:
    """There ranks differed by tens of thousands of passes, so no count of its own means anything to another rank. Here
    none takes part in a flip: ranks that were named by different numbers of plans flip all the same."""

    def script(fleet: PaperFleet) -> None:
        stream = fleet.submit(SHORT, 20)
        for ranks in ((0,), (0,), (1, 2), (2,), (0,)):
            while not fleet.credit():
                fleet.hear()
            fleet.aside(PlanKind.CENSUS, ranks)
            fleet.hear()
        for to in (TENSOR, PIPELINE):
            fleet.flip(to)
        assert fleet.finish(stream) == [right(SHORT, 20)]

    fleet = PaperFleet(3).run(script)
    ran = [sum(event[:2] == ("ends", rank) for event in fleet.events) for rank in EVERY]
    assert len(set(ran)) == RANKS


def test_proxy_strand() -> None:
    """There a rank that abandoned on its own left a message behind, and each later one was paired with the one before
    it, for ever. Here a message says which plan of which epoch it is of: a stale one is an error that names both, its
    bytes are not handed on, and nothing is paired behind it."""
    with native() as acts:
        for seq in (5, 6):
            acts[2].send(Stamp(1, seq, 1, LABEL), 0, np.full((1, 3), seq, np.float32))
        rows = np.zeros((1, 3), np.float32)
        for _ in range(2):
            with pytest.raises(StampMismatch, match="plan 5.*plan 6|plan 6.*plan 5"):
                acts[0].receive(Stamp(1, 6, 1, LABEL), 2, rows)
            assert not rows.any()
    with native() as acts:
        acts[2].send(Stamp(1, 5, 1, LABEL), 0, np.ones((1, 3), np.float32))
        with pytest.raises(StampMismatch):
            acts[0].receive(Stamp(2, 5, 1, LABEL), 2, rows)
        assert not rows.any()


def test_R() -> None:
    """There lanes were looked up in the list of the pass before. Here every answer is of the plan that it names: the
    census behind a flip tells of lanes as they are when it runs, also of one that this very plan drops."""

    def script(fleet: PaperFleet) -> None:
        going, staying = fleet.submit(SHORT, 3), fleet.submit(LONG, 20)
        fleet.hear_until(lambda: len(unread(going)) == 2)
        fleet.flip(TENSOR)
        assert going.finished
        (census,) = (plan for plan in fleet.plans.values() if plan.kind is PlanKind.CENSUS)
        assert len(census.drop) == 1
        assert fleet.finish(going, staying) == [right(SHORT, 3), right(LONG, 20)]

    PaperFleet(4).run(script)


def test_S() -> None:
    """There a flip drained whatever lay in a channel, and ate an output. Here what is taken is what was meant to be:
    under drawn tokens nothing else is read, though it has their plan and their shape."""
    with native() as acts:
        taken: list[Drawn] = []
        receiver = TokenReceiver(acts[0], 2, RANKS + 1, taken.append)
        acts[2].send(Stamp(1, 5, 1, "rows"), 0, np.ones((1, FIELDS), np.float32))
        receiver.expect(1, 5, [0])
        with pytest.raises(StampMismatch, match="rows"):
            receiver.drain()
        assert taken == []
