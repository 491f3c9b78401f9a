"""The plan loop: wait for the doorbell, take the next plan, run it, answer it. Nothing is decided here.

    bell ─▶ PlanLogReader.take ─▶ FaultPoint ─▶ Runner.run ─▶ one Result ─▶ report ring ─▶ bell

Every plan gets exactly one answer. What goes wrong inside a plan becomes that answer (`ok` False, a code and a reason)
and the loop goes on: the verdict is the engine's. What is wrong with the log itself (a damaged or misplaced record)
ends the process, because nothing that follows could be trusted; and so does a card that is lost (DeviceLost). A card
without memory for a step is a fault of that plan like others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from backends.acts import ExchangeError
from backends.base import LoadProgress
from backends.gpu.errors import DeviceLost
from homeserve.errors import HomeserveError, RecordTooLarge
from homeserve.wire.codec import encode
from homeserve.wire.doorbell import BellReader, BellWriter
from homeserve.wire.records import Plan, PlanKind, Progress, Report, Result
from homeserve.wire.refusal import failed, refused, with_notes
from homeserve.wire.ring import PlanLogReader, ReportWriter
from homeserve.worker.faults import FaultPoint
from homeserve.worker.flip import FlipRefused
from homeserve.worker.runner import Runner

log = logging.getLogger(__name__)

PROGRESS_PERIOD_S = 0.05

FLIP_REFUSED = "flip_refused"
"""The `code` of a no to a step of a flip."""
ALL_EXCHANGES = ""
"""The label under which an answer tells of all exchanges of the rank together; a census tells of each by its label."""


class EngineGone(Exception):
    """The engine closed its end of a doorbell."""


class Reports:
    """The rank's voice: reports into the ring, and one ring of the bell for each."""

    def __init__(self, writer: ReportWriter, bell: BellWriter) -> None:
        self._writer = writer
        self._bell = bell

    def send(self, report: Report) -> None:
        self._writer.write(report)
        self._ring()

    def send_damaged(self, report: Report) -> None:
        """For a fault of tests: one bit of the payload turns on the way."""
        frame = bytearray(encode(report))
        frame[-1] ^= 1
        self._writer.write_frame(bytes(frame))
        self._ring()

    def progress_nowait(self, progress: Progress) -> None:
        if self._writer.progress_nowait(progress):
            self._ring()

    def _ring(self) -> None:
        if not self._bell.ring():
            raise EngineGone


class ThrottledProgress(LoadProgress):
    """Load progress as reports: every new stage, and within a stage at most one per `PROGRESS_PERIOD_S`."""

    def __init__(self, rank: int, reports: Reports, clock: Callable[[], float] = time.monotonic) -> None:
        self._rank = rank
        self._reports = reports
        self._clock = clock
        self._stage = ""
        self._next = 0.0

    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        now = self._clock()
        if stage != self._stage or now >= self._next or done_bytes >= total_bytes > 0:
            self._stage, self._next = stage, now + PROGRESS_PERIOD_S
            self._reports.progress_nowait(Progress(self._rank, stage, done_bytes, total_bytes))


def run_plans(
    rank: int, plans: PlanLogReader, bell: BellReader, reports: Reports, runner: Runner, faults: FaultPoint
) -> None:
    """Run plans until STOP. Raises EngineGone if the engine goes first, WireError on a damaged log, DeviceLost."""
    idle_since = time.monotonic_ns()
    pending = 0
    waited_before = 0
    while True:
        if not pending:
            pending = bell.wait()
            if bell.ended:
                raise EngineGone
        plan = plans.take()
        pending -= 1
        began = time.monotonic_ns()
        result = answer(rank, plan, runner, faults)
        ended = time.monotonic_ns()
        all_calls, all_bytes, all_waited = runner.exchanged()
        waited_us = all_waited - waited_before if plan.rows else 0
        exchanges = result.exchanges
        if plan.rows and all_calls:
            exchanges = ((ALL_EXCHANGES, all_calls, all_bytes, all_waited),)
        result = _timed(result, began, ended, began - idle_since, waited_us, exchanges)
        idle_since, waited_before = ended, all_waited
        _send(reports, result, faults)
        if plan.kind == PlanKind.STOP:
            return


def answer(rank: int, plan: Plan, runner: Runner, faults: FaultPoint) -> Result:
    """The rank's answer to a plan, whatever happens in it; but DeviceLost is raised."""
    if not plan.ranks >> rank & 1:
        return Result(rank, plan.seq, plan.epoch)
    try:
        faults.before(plan)
        given = runner.run(plan)
    except HomeserveError as error:
        log.warning("plan %d refused: %s", plan.seq, error.message)
        return refused(rank, plan.seq, plan.epoch, error)
    except DeviceLost:
        raise  # nothing of this process can answer for its card any more
    except FlipRefused as error:
        reason = with_notes(error, str(error))
        log.warning("plan %d: no flip: %s", plan.seq, reason)
        return Result(rank, plan.seq, plan.epoch, ok=False, reason=reason, code=FLIP_REFUSED)
    except ExchangeError as error:  # the others say the same, and each later plan does: the engine tells it once
        log.debug("plan %d failed: %s", plan.seq, error)
        return failed(rank, plan.seq, plan.epoch, error)
    except Exception as error:  # the process edge: whatever a plan runs into is its answer, and the loop goes on
        log.exception("plan %d failed", plan.seq)
        return failed(rank, plan.seq, plan.epoch, error)
    return Result(
        rank,
        plan.seq,
        plan.epoch,
        samples=given.samples,
        facts=given.facts,
        census=given.census,
        exchanges=given.exchanges,
        launches=given.launches,
        flip=given.flip,
        draft_us=given.draft_us,
        notes=given.notes,
    )


def _send(reports: Reports, result: Result, faults: FaultPoint) -> None:
    if faults.corrupts:
        faults.corrupts = False
        reports.send_damaged(result)
        return
    try:
        reports.send(result)
    except RecordTooLarge as error:
        log.error("the answer to plan %d does not fit: %s", result.seq, error.message)
        reports.send(refused(result.rank, result.seq, result.epoch, error))


def _timed(
    result: Result,
    began_ns: int,
    ended_ns: int,
    idle_ns: int,
    waited_us: int,
    exchanges: tuple[tuple[str, int, int, int], ...],
) -> Result:
    # Not msgspec.structs.replace: that is several times slower, and this runs once a step.
    return Result(
        result.rank,
        result.seq,
        result.epoch,
        result.ok,
        result.reason,
        result.code,
        result.samples,
        result.facts,
        result.census,
        (ended_ns - began_ns) // 1000,
        idle_ns // 1000,
        result.field,
        result.fix,
        result.parts,
        began_ns // 1000,
        waited_us,
        exchanges,
        result.flip,
        result.draft_us,
        result.launches,
        result.notes,
    )
