"""The plan loop on rings in plain memory: one answer to every plan, whatever happens in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from backends.gpu.errors import DeviceLost, OutOfDeviceMemory
from homeserve.errors import BudgetError, HomeserveError, InvalidModelFile, UnknownArchitecture, UnsupportedModel
from homeserve.wire.doorbell import BellReader, BellWriter
from homeserve.wire.faults import parse
from homeserve.wire.records import LaneRows, Plan, PlanKind, Progress, Result, Sample, pack_ints
from homeserve.wire.refusal import error_of
from homeserve.wire.ring import PlanLogReader, PlanLogWriter, ReportReader, ReportWriter, Slots, ring_bytes
from homeserve.worker.faults import FaultPoint
from homeserve.worker.loop import EngineGone, Reports, ThrottledProgress, run_plans
from homeserve.worker.runner import Answer

SLOT_BYTES = 512


class Wires:
    """Both rings and bells of rank 1 of 2, in this process."""

    def __init__(self) -> None:
        log = memoryview(bytearray(ring_bytes(8, SLOT_BYTES)))
        reports = memoryview(bytearray(ring_bytes(12, SLOT_BYTES)))
        self.log = PlanLogWriter(Slots(log, 8, SLOT_BYTES, create=True), 1)
        self.plans = PlanLogReader(Slots(log, 8, SLOT_BYTES, create=False))
        read_fd, write_fd = os.pipe()
        self.plan_bell, self.plan_ear = BellWriter(write_fd), BellReader(read_fd, blocking=True)
        read_fd, write_fd = os.pipe()
        self.report_ear = BellReader(read_fd, blocking=False)
        self._report_bell = BellWriter(write_fd)
        self.reports = Reports(ReportWriter(Slots(reports, 12, SLOT_BYTES, create=True), 8), self._report_bell)
        self._reader = ReportReader(Slots(reports, 12, SLOT_BYTES, create=False))

    def issue(self, *plans: Plan) -> None:
        for plan in plans:
            self.log.write(plan)
            self.plan_bell.ring()

    def heard(self) -> list[Any]:
        return [self._reader.take() for _ in range(self.report_ear.poll_nowait())]

    def close(self) -> None:
        for end in (self.plan_bell, self.plan_ear, self.report_ear, self._report_bell):
            end.close()


class Acting:
    """A runner that does what the plan's epoch says."""

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.waited = 0

    def exchanged(self) -> tuple[int, int, int]:
        return 3 * len(self.ran), 64 * len(self.ran), self.waited

    def run(self, plan: Plan) -> Answer:
        self.ran.append(plan.seq)
        self.waited += 100 * plan.seq
        if isinstance(raised := RAISES.get(plan.epoch), Exception):
            raise raised
        if plan.epoch == 50:
            return Answer(samples=tuple(Sample(i, i, i, i) for i in range(100)))
        return Answer(samples=(Sample(0, plan.seq, 5, 6),), draft_us=9)


RAISES: dict[int, Exception] = {
    1: InvalidModelFile("m.gguf", "blk.0", "is cut off"),
    2: BudgetError("too small", field="kv", fix="less"),
    3: ZeroDivisionError("by nothing"),
    4: MemoryError(),
    5: UnknownArchitecture("gpt5", ("llama", "qwen3")),
    6: OutOfDeviceMemory("no 64 MiB", fix="less", card="GPU-1"),
    7: DeviceLost("it fell off the bus", fix="restart the machine", card="GPU-1"),
}


@pytest.fixture
def wires() -> Iterator[Wires]:
    wires = Wires()
    yield wires
    wires.close()


def loop(wires: Wires, runner: Acting, fault: str = "") -> None:
    run_plans(1, wires.plans, wires.plan_ear, wires.reports, runner, FaultPoint(parse(fault)))  # type: ignore[arg-type]


def decode(seq: int, epoch: int = 0, ranks: int = 3) -> Plan:
    return Plan(seq, epoch, PlanKind.DECODE, ranks)


def test_every_plan_is_answered_once_in_order_until_stop(wires: Wires) -> None:
    runner = Acting()
    wires.issue(decode(1), decode(2, ranks=1), decode(3, epoch=9), Plan(4, 0, PlanKind.STOP, 3), decode(5))
    loop(wires, runner)
    heard = wires.heard()
    assert [(r.rank, r.seq, r.epoch, r.ok) for r in heard] == [
        (1, 1, 0, True),
        (1, 2, 0, True),
        (1, 3, 9, True),
        (1, 4, 0, True),
    ]
    assert runner.ran == [1, 3, 4], "plan 2 names rank 0 alone: it is passed, and answered empty"
    assert heard[0].samples == (Sample(0, 1, 5, 6),) and heard[1].samples == ()
    assert [r.draft_us for r in heard] == [9, 0, 9, 9]
    assert all(r.busy_us >= 0 and r.idle_us >= 0 for r in heard)
    assert [r.began_us for r in heard] == sorted(r.began_us for r in heard) and heard[0].began_us > 0


def test_what_a_rank_waited_for_others_is_told_of_each_plan_that_computes(wires: Wires) -> None:
    rows = (LaneRows(0, 1, 0, pack_ints([5])),)
    for seq in (1, 2, 3):
        wires.issue(Plan(seq, 0, PlanKind.PREFILL, 3, rows=rows))
    wires.issue(Plan(4, 0, PlanKind.STOP, 3))
    loop(wires, Acting())
    heard = wires.heard()
    assert [r.waited_us for r in heard] == [100, 200, 300, 0]
    assert [r.exchanges for r in heard] == [
        (("", 3, 64, 100),),
        (("", 6, 128, 300),),
        (("", 9, 192, 600),),
        (),
    ]


def test_what_goes_wrong_is_the_answer_and_the_loop_goes_on(wires: Wires) -> None:
    for seq, epoch in enumerate((1, 2, 3, 4, 5, 0), 1):
        wires.issue(decode(seq, epoch))
    wires.issue(Plan(7, 0, PlanKind.STOP, 3))
    loop(wires, Acting())
    heard: list[Result] = wires.heard()
    assert [r.ok for r in heard] == [False] * 5 + [True] * 2
    assert [r.code for r in heard[:5]] == ["checkpoint", "budget", "fault", "fault", "unknown_architecture"]
    assert heard[2].reason == "ZeroDivisionError: by nothing"
    for result, raised in ((heard[0], RAISES[1]), (heard[1], RAISES[2]), (heard[4], RAISES[5])):
        again = error_of(result)
        assert type(again) is type(raised) and isinstance(raised, HomeserveError)
        assert again.as_json() == raised.as_json() and vars(again) == vars(raised)
    assert error_of(heard[2]).code == "worker"
    plain = UnsupportedModel("no Q9", fix="another")
    assert error_of(Result(0, 1, 0, False, plain.message, plain.code, fix="another")).as_json() == plain.as_json()


def test_an_answer_that_does_not_fit_becomes_a_reason(wires: Wires) -> None:
    wires.issue(decode(1, epoch=50), Plan(2, 0, PlanKind.STOP, 3))
    loop(wires, Acting())
    large, stop = wires.heard()
    assert (large.ok, large.code) == (False, "wire") and "larger than a slot" in large.reason
    assert stop.ok


def test_the_loop_ends_with_the_engine(wires: Wires) -> None:
    wires.issue(decode(1))
    wires.plan_bell.close()
    with pytest.raises(EngineGone):
        loop(wires, Acting())
    assert [r.seq for r in wires.heard()] == [1], "what was announced is still done"
    wires.report_ear.close()
    with pytest.raises(EngineGone):
        wires.reports.send(Result(1, 2, 0))


def test_progress_is_thinned_but_says_each_stage_and_the_end(wires: Wires) -> None:
    now = [0.0]
    progress = ThrottledProgress(1, wires.reports, clock=lambda: now[0])
    for step in range(1000):
        now[0] = step * 1e-4
        progress("weights", step, 1000)
    progress("weights", 1000, 1000)
    progress("warm up", 0, 0)
    heard: list[Progress] = wires.heard()
    assert [(p.stage, p.done_bytes) for p in heard] == [
        ("weights", 0),
        ("weights", 500),
        ("weights", 1000),
        ("warm up", 0),
    ]


def test_a_card_without_memory_for_a_step_is_a_fault_of_its_plan(wires: Wires) -> None:
    """The plan is answered no, and the loop goes on: the verdict is the engine's, as for any fault."""
    runner = Acting()
    wires.issue(decode(1, epoch=6), decode(2), Plan(3, 0, PlanKind.STOP, 3))
    loop(wires, runner)
    no, yes, _ = wires.heard()
    assert (no.ok, no.code, yes.ok) == (False, "fault", True) and no.reason.startswith("OutOfDeviceMemory: no 64 MiB")


def test_a_lost_card_ends_the_loop_without_an_answer(wires: Wires) -> None:
    """Nothing of this process can be used: it must not go on answering, and its end says why (worker.child)."""
    runner = Acting()
    wires.issue(decode(1), decode(2, epoch=7), decode(3), Plan(4, 0, PlanKind.STOP, 3))
    with pytest.raises(DeviceLost):
        loop(wires, runner)
    assert [each.seq for each in wires.heard()] == [1] and runner.ran == [1, 2]
