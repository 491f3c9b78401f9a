"""One life of a fleet: from shared memory and spawn to the last worker reaped. A restart is a new life.

    NEW ──start──▶ UP ────────────────────────end────────────────────────▶ ENDED
                    ├──a rank died, refused a plan or lied──▶ LOST ──end──────┘
                    └──a rank waited in vain, or is silent──▶ STUCK ─▶ LOST

The first thing that goes wrong ends it: nothing more is issued, no result is believed, and whoever waits (a handshake,
a load, the engine) is told once, with `loss`. A loss is noticed by

    the process ends           its exit status; a SIGKILL together with the cgroup's counter is an out-of-memory kill,
                               and one status says that its card is lost
    its doorbell ends          it is given a moment to end by itself, so that the exit status can tell why
    a report is damaged        or answers a plan out of turn
    a plan is refused          after the load: the others may be waiting for this rank inside the same plan. A rank may
                               say no to the preparation of a flip: nobody waits for it, and nothing has changed
    a rank waited in vain      for another one: STUCK, until it is known whom they all wait for (`inquest`)
    silence                    answers are owed, and for the plan timeout no rank moved: no answer, no progress of a
                               load, no step in the memory of their exchanges. So a slow rank is none that hangs;
                               one that a signal has stopped is found sooner

Once plans were served, evidence of all ranks is taken before a loss is told.

`end` leaves nothing: no process, no zombie, no shared memory, no descriptor, whatever state it finds, and also when
whoever called it is cancelled.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import signal
from collections.abc import Callable, Coroutine, Sequence
from enum import Enum
from typing import Any, TypeVar

from homeserve.errors import WireError, WorkerOutOfMemory, WorkerStartError
from homeserve.fleet.acts import ActsMemory
from homeserve.fleet.blame import Wait
from homeserve.fleet.book import Late, PlanBook
from homeserve.fleet.capture import STOPPED, Captures, process_state, readable
from homeserve.fleet.death import CRASH_FIX, death_of
from homeserve.fleet.death import DEVICE_LOST_FIX as DEVICE_LOST_FIX
from homeserve.fleet.inquest import Inquest
from homeserve.fleet.oom import oom_kill_count
from homeserve.fleet.rank import RankProcess
from homeserve.fleet.spec import FleetSpec, Loss
from homeserve.wire.records import (
    RECORD_VERSION,
    FlipOrder,
    Hello,
    LaneRows,
    LoadSpec,
    NewLane,
    Plan,
    PlanKind,
    Progress,
    Report,
    Result,
)
from homeserve.wire.refusal import waited_for
from homeserve.wire.ring import PlanLogWriter, Slots, ring_bytes, slot_bytes_for
from homeserve.wire.segments import Segment

log = logging.getLogger(__name__)

STOP_GRACE_S = 2.0
"""For STOP: the plan that runs is finished."""
TERM_GRACE_S = 1.0
KILL_GRACE_S = 10.0
BELL_GRACE_S = 2.0
LOOKS = 8
"""Looks at what the ranks do, in the time for which they may stand still."""
LOOK_PERIOD_S = 5.0
"""The longest time between two of them."""
STOPPED_S = 20.0
"""How long nobody may move while a rank is stopped by a signal: it does not go on by itself, so this does not have to
last as long as a slow plan."""

T = TypeVar("T")
Results = tuple[Result, ...]


class LifeState(Enum):
    NEW = "new"
    UP = "up"
    STUCK = "stuck"
    LOST = "lost"
    ENDED = "ended"


class Life:
    """`on_results` gets what no `ask` waits for. `on_progress` gets load progress."""

    def __init__(
        self,
        spec: FleetSpec,
        faults: Sequence[str],
        captures: Captures,
        on_results: Callable[[int, Results], None],
        on_progress: Callable[[Progress], None],
        clock: Callable[[], float],
    ) -> None:
        self.spec = spec
        self.state = LifeState.NEW
        self.loss: asyncio.Future[Loss] = asyncio.get_running_loop().create_future()
        self.ranks: list[RankProcess] = []
        self.book = PlanBook(spec.ranks)
        self._faults = faults
        self._on_results = on_results
        self._on_progress = on_progress
        self._clock = clock
        self._inquest = Inquest(self.book, captures)
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._memory: Segment | None = None
        self._acts: ActsMemory | None = None
        self._serving = False
        """A plan beyond the load was issued."""
        self._slots: Slots | None = None
        self._log: PlanLogWriter | None = None
        self._asked: dict[int, asyncio.Future[Results]] = {}
        """The plan behind which nobody reads what the last flip carried."""
        self._greeted: asyncio.Future[None] = self._loop.create_future()
        self._exits: dict[int, asyncio.Task[None]] = {}
        self._log_ends: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._marks: tuple[int, ...] = ()
        self._oom_kills: int | None = None

    # -------------------------------------------------------------------------------------------------------- start

    async def start(self) -> None:
        """Spawn every rank and wait until each has said hello. Raises WorkerStartError; `end` then cleans up."""
        self._oom_kills = oom_kill_count()
        await finish(self._spawn())
        timeout_s = self.spec.start_timeout_s * self.spec.patience
        await self._first(self._greeted, timeout_s)
        if not self._greeted.done():
            silent = next(rank.rank for rank in self.ranks if not rank.greeted)
            raise await self._start_error(Loss(silent, f"did not say hello within {timeout_s:g} s"))

    async def _spawn(self) -> None:
        async with self._lock:
            if self.state is not LifeState.NEW:
                return
            spec = self.spec
            self._memory = Segment.create("plans", ring_bytes(spec.plans_in_flight, slot_bytes_for(spec.slot_bytes)))
            self._slots = Slots(self._memory.view, spec.plans_in_flight, slot_bytes_for(spec.slot_bytes), create=True)
            self._log = PlanLogWriter(self._slots, spec.ranks)
            self._acts = self._make_acts()
            for index in range(spec.ranks):
                self.ranks.append(self._prepared(index, self._memory))
            self.state = LifeState.UP
            outcomes = await asyncio.gather(*(rank.spawn() for rank in self.ranks), return_exceptions=True)
            for rank in self.ranks:
                if rank.process is not None:
                    self._watch(rank, rank.process)
            for rank, outcome in zip(self.ranks, outcomes, strict=True):
                if isinstance(outcome, OSError):
                    raise WorkerStartError(f"rank {rank.rank} cannot be started: {outcome.strerror}") from outcome
                if outcome is not None:
                    raise outcome

    def _make_acts(self) -> ActsMemory | None:
        spec = self.spec
        if spec.acts is None:
            return None
        try:
            return ActsMemory(
                spec.ranks, spec.acts, unified=spec.unified, copy=spec.weights_copy, transit_bytes=spec.transit_bytes
            )
        except OSError as error:
            raise WorkerStartError(
                f"no memory for what ranks exchange: {error.strerror}", fix="free some memory, or use fewer ranks"
            ) from error

    def _prepared(self, rank: int, plan_memory: Segment) -> RankProcess:
        try:
            return RankProcess(rank, self.spec, plan_memory, self._faults[rank], self._acts)
        except OSError as error:
            fix = "allow more open files (ulimit -n 1024)" if error.errno == errno.EMFILE else None
            raise WorkerStartError(f"rank {rank} cannot be prepared: {error.strerror}", fix=fix) from error

    def _watch(self, rank: RankProcess, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        self._loop.add_reader(rank.bell.fd, self._on_bell, rank)
        self._log_ends[rank.rank] = self._keep(rank.relay.run(process.stdout))
        self._exits[rank.rank] = self._loop.create_task(self._on_exit(rank, process))

    async def _start_error(self, loss: Loss) -> WorkerStartError:
        if loss.rank < 0:
            return WorkerStartError(f"the fleet {loss.why}")
        log_end = self._log_ends.get(loss.rank)
        if log_end is not None and self.state is LifeState.LOST:  # its last lines may still be in the pipe
            await asyncio.wait({log_end}, timeout=TERM_GRACE_S)
        words = self.ranks[loss.rank].relay.last_words()
        kind = WorkerOutOfMemory if loss.oom else WorkerStartError
        fix = DEVICE_LOST_FIX if loss.device else CRASH_FIX if loss.crash else None
        return kind(f"rank {loss.rank} {loss.why}" + (f"; it said: {words}" if words else ""), fix=fix)

    # -------------------------------------------------------------------------------------------------------- plans

    def credit(self) -> int:
        """Plans that may be issued now: 0 unless up."""
        return self._log.credit() if self._log is not None and self.state is LifeState.UP else 0

    def issue(
        self,
        kind: PlanKind,
        *,
        epoch: int,
        ranks: Sequence[int] | None = None,
        drop: tuple[int, ...] = (),
        new: tuple[NewLane, ...] = (),
        rows: tuple[LaneRows, ...] = (),
        load: LoadSpec | None = None,
        flip: FlipOrder | None = None,
    ) -> int:
        """Write the next plan to the log and ring for it; returns its seq. Needs credit, else AssertionError; raises
        RecordTooLarge, with nothing issued, if it does not fit a slot."""
        plan_log = self._log
        if plan_log is None or self.state is not LifeState.UP:
            raise AssertionError(f"a plan was issued to a fleet that is {self.state.value}")
        everybody = (1 << self.spec.ranks) - 1
        mask = everybody if ranks is None else sum(1 << rank for rank in ranks)
        if not 0 < mask <= everybody:
            raise AssertionError(f"a plan names ranks {ranks} of {self.spec.ranks}")
        plan = Plan(plan_log.issued + 1, epoch, kind, mask, drop, new, rows, load, flip)
        plan_log.write(plan)
        self.book.issue(plan, self._clock())
        self._serving = self._serving or kind is not PlanKind.LOAD
        for rank in self.ranks:
            rank.announce()
        self._arm()
        return plan.seq

    @property
    def served(self) -> bool:
        """Every rank has answered a plan beyond its load (which is plan 1)."""
        return all(self.book.last_seq(rank) > 1 for rank in range(self.spec.ranks))

    async def ask(self, kind: PlanKind, *, load: LoadSpec | None = None) -> Results:
        """Issue a plan to all ranks and wait for its results. Raises WorkerStartError if the life is lost first."""
        seq = self.issue(kind, epoch=0, load=load)
        answered: asyncio.Future[Results] = self._loop.create_future()
        self._asked[seq] = answered
        try:
            await self._first(answered)
        finally:
            del self._asked[seq]
        return answered.result()

    async def _first(self, hoped: asyncio.Future[Any], timeout_s: float | None = None) -> None:
        """Wait for `hoped`, for the timeout, or for a loss; the last raises WorkerStartError."""
        waited: set[asyncio.Future[Any]] = {hoped, self.loss}
        await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self.loss.done():
            raise await self._start_error(self.loss.result())

    # ------------------------------------------------------------------------------------------------------ reports

    @property
    def _listening(self) -> bool:
        return self.state in (LifeState.UP, LifeState.STUCK)

    def _on_bell(self, rank: RankProcess) -> None:
        if rank.bell.fd < 0:
            return
        rank.pending += rank.bell.poll_nowait()
        if rank.bell.ended:
            self._loop.remove_reader(rank.bell.fd)
            self._loop.call_later(BELL_GRACE_S, self._lose, rank.rank, "closed its doorbell without ending")
        try:
            while rank.pending and self._listening:
                rank.pending -= 1
                self._hear(rank, rank.reports.take())
        except WireError as error:
            self._lose(rank.rank, f"cannot be trusted: {error.message}")
        finally:
            if rank.pending and self._listening:  # a listener raised: what was announced is still heard
                self._loop.call_soon(self._on_bell, rank)

    def _hear(self, rank: RankProcess, report: Report) -> None:
        if isinstance(report, Result):
            self._hear_result(rank, report)
        elif isinstance(report, Progress):
            self.book.alive(self._clock())
            self._on_progress(report)
        else:
            self._greet(rank, report)

    def _hear_result(self, rank: RankProcess, result: Result) -> None:
        assert self._log is not None
        debt = None if result.ok else self.book.debt(rank.rank)
        completed = self.book.answer(rank.rank, result, self._clock())
        self._log.acknowledge(rank.rank, result.seq)
        rank.count(result)
        if debt is not None and not _may_refuse(debt.kind, result):
            self._refused(rank, result, debt.text)
            return
        if not result.ok and waited_for(result) is None and result.seq in self._asked:
            self._deliver(result.seq, (result,))  # a load: others that wait for this rank have nothing to add
        for seq, results in completed:
            if self.state is LifeState.UP:
                self._deliver(seq, results)

    def _refused(self, rank: RankProcess, result: Result, plan: str) -> None:
        """A plan did not run on this rank: at once the end, the answers of the others need never come."""
        if self._inquest.has_heard(rank.rank):
            return  # it waited in vain in an earlier plan, and no later one finds what that one owed
        peer = waited_for(result)
        if peer is None or peer == rank.rank or peer not in range(self.spec.ranks):
            self._lose(rank.rank, f"refused {plan}: {result.reason}", seq=result.seq)
        elif self._stick():
            self._inquest.accuse(rank.rank, Wait(result.seq, peer, result.reason))

    def _greet(self, rank: RankProcess, hello: Hello) -> None:
        if (hello.rank, hello.record_version) != (rank.rank, RECORD_VERSION):
            raise WireError(f"hello of rank {hello.rank} in version {hello.record_version}")
        rank.greeted = True
        if all(other.greeted for other in self.ranks) and not self._greeted.done():
            self._greeted.set_result(None)

    def _deliver(self, seq: int, results: Results) -> None:
        asked = self._asked.get(seq)
        if asked is None:
            self._on_results(seq, results)
        elif not asked.done():
            asked.set_result(results)

    # --------------------------------------------------------------------------------------------------------- loss

    def _lose(
        self,
        rank: int,
        why: str,
        *,
        oom: bool = False,
        seq: int | None = None,
        outside: bool = False,
        device: bool = False,
        crash: bool = False,
    ) -> None:
        """The first loss ends this life; later ones are its consequences."""
        if not self._listening:
            return
        debt = self.book.debt(rank)
        if seq is None and debt is not None:
            why, seq = f"{why} while it owed {debt.text}", debt.seq
        loss = Loss(rank, why, oom, seq, outside=outside, device=device, crash=crash)
        with_evidence = (self._serving or self.state is LifeState.STUCK) and self._stick()
        self.state = LifeState.LOST
        self._unwatch()
        if with_evidence:
            self._inquest.name(loss)
        else:
            self._tell(loss)

    def _stick(self) -> bool:
        """Stop issuing and believing, and find out why, once. False if this life is over."""
        if self.state is LifeState.UP:
            self.state = LifeState.STUCK
            self._stop_timer()
            self._keep(self._find_out()).add_done_callback(self._found_out)
        return self.state is LifeState.STUCK

    async def _find_out(self) -> None:
        loss = await self._inquest.run([rank.evidence() for rank in self.ranks], self._positions)
        if self.state is LifeState.STUCK:
            self.state = LifeState.LOST
            self._unwatch()
        self._tell(loss)

    def _found_out(self, looking: asyncio.Task[None]) -> None:
        """A bug in there is told as well: without a loss nobody would start the fleet again."""
        error = None if looking.cancelled() else looking.exception()
        if error is None:
            return
        log.error("a loss could not be looked into", exc_info=error)
        if self._listening:
            self.state = LifeState.LOST
            self._unwatch()
        named = self._inquest.verdict
        self._tell(named.result() if named.done() else Loss(-1, f"is stuck, and nobody knows why: {error}"))

    def _positions(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The last plans, and where every ring stands."""
        plan_log = self._log
        assert plan_log is not None
        answered = [self.book.last_seq(rank.rank) for rank in self.ranks]
        rings = {
            "plan_log": {"slots": self.spec.plans_in_flight, "issued": plan_log.issued},
            "ranks": [rank.positions(self.book.last_seq(rank.rank)) for rank in self.ranks],
            "acts": self._acts.positions() if self._acts is not None else None,
        }
        return [readable(plan, answered) for plan in plan_log.recent()], rings

    def _tell(self, loss: Loss) -> None:
        if not self.loss.done():
            self.loss.set_result(loss)

    async def _on_exit(self, rank: RankProcess, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        if self._listening:
            self._on_bell(rank)  # what it still said counts, and one look sees all that a ring can hold
            kills = oom_kill_count()
            more = kills is not None and self._oom_kills is not None and kills > self._oom_kills
            found = death_of(status, self.spec.device(rank.rank), oom_kills_more=more)
            self._lose(
                rank.rank,
                found.why,
                oom=found.oom,
                outside=found.outside,
                device=found.device,
                crash=found.crash,
            )

    def _arm(self) -> None:
        """Have what is owed looked at now and then, and when it would be late."""
        if self._timer is not None or self.state is not LifeState.UP:
            return
        allowed_s, limit_s = self._bounds()
        late_at = self.book.next_check(allowed_s, limit_s)
        if late_at is None:
            return
        now = self._clock()
        at = min(late_at, now + min(LOOK_PERIOD_S, self.spec.plan_allowed_s / LOOKS))
        self._timer = self._loop.call_later(max(0.01, at - now), self._check_late, max(at, now + 0.01))

    def _bounds(self) -> tuple[float, float]:
        """How long nobody may move, and how long one answer may take at most. A load takes what it takes."""
        spec = self.spec
        return (spec.load_allowed_s, math.inf) if self.book.loading else (spec.plan_allowed_s, spec.plan_limit_s)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_late(self, due: float) -> None:
        self._timer = None
        for rank in self.ranks:  # what they have said and this process has not read yet is no silence
            self._on_bell(rank)
        if self.state is not LifeState.UP:
            return
        allowed_s, limit_s = self._bounds()
        now = self._clock()
        marks = self._acts.marks() if self._acts is not None else ()
        if marks != self._marks:
            self._marks = marks
            self.book.alive(now)
        if now - due >= allowed_s / 2:  # this process was stopped itself
            self.book.pardon(now)
        late = self.book.late(now, allowed_s, limit_s) or self._stopped(now)
        if late is None:
            self._arm()
        elif self._stick():
            self._inquest.miss(late)

    def _stopped(self, now: float) -> Late | None:
        """A rank that owes an answer and is stopped, if nobody has moved for too long."""
        silent_s = self.book.silent_s(now)
        if silent_s < STOPPED_S:
            return None
        stopped = (rank for rank in self.book.owing if process_state(self.ranks[rank].pid) == STOPPED)
        return next((Late(rank, silent_s) for rank in stopped), None)

    # ---------------------------------------------------------------------------------------------------------- end

    async def end(self, *, graceful: bool) -> None:
        """End every worker and release everything. `graceful` lets the running plan end first."""
        await finish(self._end(graceful))

    async def _end(self, graceful: bool) -> None:
        async with self._lock:
            if self.state is LifeState.ENDED:
                return
            graceful = graceful and self.credit() > 0
            if graceful:
                self.issue(PlanKind.STOP, epoch=0)
            self.state = LifeState.ENDED
            self._unwatch()
            self._tell(Loss(-1, "was ended"))
            self._inquest.name(self.loss.result())
            try:
                await self._end_processes(graceful)
                await self._end_tasks()
            finally:
                self._release()

    async def _end_processes(self, graceful: bool) -> None:
        steps = [(signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, KILL_GRACE_S)]
        running = set(self._exits.values())
        if graceful and running:
            _, running = await asyncio.wait(running, timeout=STOP_GRACE_S)
        else:
            self._unlink()
            steps = steps[1:]
        for number, grace_s in steps:
            if running:
                for rank in self.ranks:
                    rank.signal(number)
                _, running = await asyncio.wait(running, timeout=grace_s)
        if running:
            log.error("a worker survived SIGKILL for %g s", KILL_GRACE_S)
            for task in running:
                task.cancel()

    async def _end_tasks(self) -> None:
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=TERM_GRACE_S)
            for task in late:
                task.cancel()
        await asyncio.gather(*self._tasks, *self._exits.values(), return_exceptions=True)

    def _unwatch(self) -> None:
        for rank in self.ranks:
            if rank.bell.fd >= 0:
                self._loop.remove_reader(rank.bell.fd)
        self._stop_timer()

    def _unlink(self) -> None:
        for rank in self.ranks:
            rank.unlink()
        if self._memory is not None:
            self._memory.unlink()

    def _release(self) -> None:
        for rank in self.ranks:
            rank.close()
        if self._slots is not None:
            self._slots.release()
        if self._memory is not None:
            self._memory.close()
        if self._acts is not None:
            self._acts.close()

    def memory_names(self) -> list[str]:
        """Names of the shared memory that this life holds."""
        plans = self._memory.path.name if self._memory is not None and self._memory.path is not None else None
        return [name for name in (plans, *(rank.memory_name for rank in self.ranks)) if name is not None]

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _may_refuse(kind: PlanKind, result: Result) -> bool:
    """Whether a no is an answer like another one: before anything is served, and before a flip has changed anything.
    (Not where the rank waited in vain for another one: that ends all exchanges.)"""
    return kind is PlanKind.LOAD or (kind is PlanKind.FLIP_PREPARE and waited_for(result) is None)


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end even if the caller is cancelled meanwhile; the cancellation is raised afterwards."""
    task = asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # it is the cancellation that is told
        raise cancelled
    return task.result()
