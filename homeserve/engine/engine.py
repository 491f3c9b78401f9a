"""The engine: the only module here with a clock and tasks. It turns calls into plans and results into streams.

    submit ─▶ Scheduler.add ─┐                                       ┌─▶ TokenStream.push ─▶ reader
                             ├─ pump: next_plan ─▶ Fleet.issue ═▶ ranks
    on_results ◀═════════════╪══════════════════════════════════════ ┘
                             └─ Scheduler.apply, then pump again

`pump` runs whenever something changed: a call came, a result came, a reader caught up. It issues plans until the fleet
has no credit or the scheduler has nothing. Nothing here polls or waits for a timer.

A lost worker. The fleet says so once (`on_lost`); one task then restarts it, with every open sequence queued again from
its tokens. Streams see a pause. The engine gives up, and fails what is open, when the fleet cannot be started any more
or dies `DEATHS_IN_A_ROW` times without bringing a single plan back. A rank that answers what cannot be is lost as well.

A flip. While one is on (`flip_driver`) `pump` issues no plan, and all that is open stays where it is: calls queue, a
census waits, and what ends from outside is noted and ended afterwards, in order. Its reader is told at once, because
that touches nothing that ranks hold; lane and pages are given back behind the flip, because the flip carries them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from homeserve.engine.census import Census
from homeserve.engine.decoding import BadRound
from homeserve.engine.flip_driver import FlipDriver, Handle
from homeserve.engine.flip_record import FlipRecord, FlipRefused
from homeserve.engine.flip_totals import FlipTotals
from homeserve.engine.request import EngineLimits, FinishReason, GenerateCall, TokenEvent
from homeserve.engine.scheduler import Draft, Emit, Scheduler
from homeserve.engine.sequence import Sequence
from homeserve.engine.snapshot import Counts
from homeserve.engine.snapshot import EngineSnapshot as EngineSnapshot
from homeserve.engine.snapshot import percentiles as percentiles
from homeserve.engine.speculation import Drafting
from homeserve.engine.stream import TokenStream
from homeserve.engine.timeline import Timeline
from homeserve.errors import ContextOverflow, Draining, HomeserveError, QueueFull, WorkerLost
from homeserve.fleet import Loss
from homeserve.wire.records import FlipOrder, LaneRows, NewLane, PlanKind, Result

log = logging.getLogger(__name__)

DEATHS_IN_A_ROW = 6
"""Losses without one plan acknowledged in between, after which the engine gives up."""

OOM_KV_SHARE = 0.5
"""What is left of the KV pool after its worker was killed for memory."""

OOM_KV_TOKENS_MIN = 512
"""The pool is not lowered below this: a machine that cannot hold it cannot serve."""

LAG_PERIOD_S = 0.25


class PlanFleet(Protocol):
    """What the engine needs of a fleet."""

    def credit(self) -> int: ...

    def issue(
        self,
        kind: PlanKind,
        *,
        epoch: int,
        drop: tuple[int, ...] = (),
        new: tuple[NewLane, ...] = (),
        rows: tuple[LaneRows, ...] = (),
        flip: FlipOrder | None = None,
    ) -> int: ...

    async def restart(self, kv_slots: int, window_slots: tuple[tuple[int, int], ...]) -> None: ...

    def shared_memory_names(self) -> list[str]: ...


class Engine:
    """One model's requests on one fleet. Implements the fleet's listener."""

    def __init__(
        self,
        fleet: PlanFleet,
        limits: EngineLimits,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], Handle] | None = None,
    ) -> None:
        """`later` calls something in so many seconds: the loop does, unless a test does."""
        self.limits = limits
        self.failure: HomeserveError | None = None
        """Set once when the engine gave up."""
        self.gave_up = asyncio.Event()
        self._fleet = fleet
        self._clock = clock
        self._later = later
        self._scheduler = Scheduler(limits)
        self._streams: dict[int, TokenStream] = {}
        self._sequences: dict[TokenStream, Sequence] = {}
        self._state = "ready"
        self._counts = Counts()
        self._plans_open = 0
        """Issued in this life of the fleet, and not answered."""
        self._acked_since_loss = True
        self._fruitless_losses = 0
        self._draining = False
        self._census_wanted: list[asyncio.Future[dict[str, Any]]] = []
        self._census_flight: dict[int, tuple[Census, list[asyncio.Future[dict[str, Any]]]]] = {}
        self._timeline = Timeline()
        self._flips: FlipDriver | None = None
        if limits.flip is not None:
            self._flips = FlipDriver(limits, limits.flip, self._scheduler, self._timeline, _FlipHost(self))
        self._late_ends: list[tuple[Sequence, FinishReason]] = []
        """What was ended from outside during a flip, in order."""
        self._unarmed_step = False
        self._news: list[TokenStream] = []
        """Streams with something for their listeners."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()

    # ------------------------------------------------------------------------------------------------- life cycle

    async def start(self) -> None:
        """Begin to measure the loop. The fleet is loaded already."""
        self._spawn(self._measure_lag())
        if self._flips is not None:
            self._flips.begin()

    async def drain(self, timeout_s: float) -> None:
        """Take no further calls, let the open ones finish; what is left after `timeout_s` is aborted."""
        self._draining = True
        if self._flips is not None:
            self._flips.stop()
        try:
            async with asyncio.timeout(timeout_s):
                await self._quiet.wait()
        except TimeoutError:
            log.warning("drain: %d requests were cut off after %.0f s", len(self._streams), timeout_s)
            for stream in list(self._sequences):
                self.abort(stream)

    async def stop(self) -> None:
        """End every stream and task. The fleet is stopped by its owner."""
        self._state = "stopped"
        if self._flips is not None:
            self._flips.stop()
        for stream in list(self._sequences):
            self.abort(stream)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --------------------------------------------------------------------------------------------------- requests

    @property
    def state(self) -> str:
        """ready, draining, recovering (a fleet restart is on its way), failed or stopped."""
        return "draining" if self._draining and self._state == "ready" else self._state

    @property
    def token_limit(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._scheduler.token_limit

    @property
    def drafting(self) -> Drafting:
        """What rounds of drafting have brought since the start, and `off_because`, why there are no more of them."""
        return self._scheduler.drafting

    def submit(self, call: GenerateCall) -> TokenStream:
        """Queue a call. Raises Draining, QueueFull, ContextOverflow."""
        if self._draining or self._state in ("failed", "stopped"):
            raise Draining("the server is shutting down and takes no new requests")
        if call.least_tokens > self.token_limit:
            raise ContextOverflow(len(call.prompt), self.token_limit - (call.least_tokens - len(call.prompt)))
        # Counted over all that is open: a call that waits for the next plan, not for a lane, is no reason to refuse.
        if len(self._streams) >= self.limits.running + self.limits.waiting:
            raise QueueFull(self._scheduler.waiting_count)
        if self._flips is not None:
            self._flips.arrived()
        sequence = self._scheduler.add(call)
        stream = TokenStream(
            call.request_id,
            len(call.prompt),
            self._clock(),
            self.limits.stream_tokens,
            lambda held: self._hold(sequence, held),
            sequence.drafted.counts,
            self._tell_soon,
        )
        self._streams[sequence.key] = stream
        self._sequences[stream] = sequence
        self._quiet.clear()
        self._pump()
        return stream

    def abort(self, stream: TokenStream, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a sequence now; its slots are free when no plan in flight names it. Idempotent. A caller that has all it
        wants (a stop string matched) gives `FinishReason.STOP`."""
        sequence = self._sequences.get(stream)
        if sequence is None:
            return
        if self._flips is not None and self._flips.on and self._state == "ready":
            self._late_ends.append((sequence, reason))
            self._deliver([Emit(sequence, finish=reason)])
            return
        self._deliver(self._scheduler.end(sequence, reason))
        self._pump()

    # ------------------------------------------------------------------------------------------------------ flips

    def flip_ask(self, to: str, cause: str = "request") -> FlipRecord:
        """Begin a change of layout; what becomes of it is in its record. Raises FlipRefused."""
        if self._flips is None:
            none = self.limits.no_flip
            raise FlipRefused(none.code, none.message, none.needed_mib, none.available_mib, none.device)
        with self._whole(FlipRefused):
            return self._flips.ask(to, cause)

    def flip_record(self, flip: int) -> FlipRecord | None:
        """None: there is no such flip, or it is long past."""
        return self._flips.flipper.get(flip) if self._flips is not None else None

    def flip_records(self) -> list[FlipRecord]:
        """The last 64, oldest first."""
        return self._flips.flipper.records() if self._flips is not None else []

    @property
    def flip_totals(self) -> FlipTotals | None:
        """Sums over all flips; None where the layout stays."""
        return self._flips.flipper.totals if self._flips is not None else None

    def watch_flips(self, told: Callable[[str | None], None]) -> None:
        """Have `told` called with each step of a flip, and with None when it is over."""
        if self._flips is not None:
            self._flips.flipper.on_phase = told

    @property
    def _epoch(self) -> int:
        return self._flips.flipper.epoch if self._flips is not None else 0

    def _end_late(self) -> None:
        """End what was ended during the flip; its readers know already."""
        ends, self._late_ends = self._late_ends, []
        for sequence, reason in ends:
            self._scheduler.end(sequence, reason)

    # --------------------------------------------------------------------------------------------- fleet listener

    def on_results(self, seq: int, results: tuple[Result, ...]) -> None:
        """Every rank has run plan `seq`; the last one has sampled."""
        if self._state != "ready":
            return
        try:  # as `_whole` has it, which costs each plan a microsecond
            self._take(seq, results)
        except Exception as error:
            self._half_done(error)
            raise

    def _take(self, seq: int, results: tuple[Result, ...]) -> None:
        began = time.perf_counter()
        self._unarmed_step = self._flips is None or not self._flips.on
        self._counts.plans_acked += 1
        self._plans_open -= 1
        seconds = self._timeline.answered(seq, results)
        self._acked_since_loss = True
        for result in results:
            for note in result.notes:
                self.note("rank_note", rank=result.rank, seq=seq, text=note)
        if self._flips is not None and seq == self._flips.awaited:
            self._flips.on_results(results)
        elif seq in self._census_flight:
            self._answer_census(seq, results)
        else:
            try:
                self._deliver(self._scheduler.apply(seq, results[-1].samples, seconds))
            except BadRound as error:
                log.error("plan %d: rank %d %s", seq, results[-1].rank, error)
                self.on_lost(Loss(results[-1].rank, str(error)))
        self._pump()
        self._timeline.settled()
        self._unarmed_step = False
        self._counts.step_ms.append(1e3 * (time.perf_counter() - began))

    def on_lost(self, loss: Loss) -> None:
        """A rank is gone or cannot be trusted any more."""
        if self._state != "ready":
            return
        rank = loss.rank if loss.rank >= 0 else None
        log.error("%s lost: %s", "the ranks are" if rank is None else f"rank {rank}", loss.told)
        self.note("worker_lost", rank=rank, seq=loss.seq, text=loss.told, folder=loss.folder)
        self._fruitless_losses = 1 if self._acked_since_loss else self._fruitless_losses + 1
        self._acked_since_loss = False
        self._state = "recovering"
        self._timeline.lost()
        self._plans_open = 0
        for _, waiters in self._census_flight.values():
            self._census_wanted.extend(waiters)
        self._census_flight.clear()
        if self._flips is not None:
            self._flips.on_lost(loss.rank, loss.why)
            self._end_late()
        reborn = {s.key for s in self._scheduler.open_sequences() if s.lane >= 0}
        if loss.oom:
            self._lower_budget()
        why = loss.why if rank is None else f"rank {rank} {loss.why}"
        drafted = [] if loss.outside else self._scheduler.in_rounds()
        self._deliver(self._scheduler.lose_fleet(self.limits, why, outside=loss.outside))
        if drafted:
            self._tell_of_rounds(drafted)
        for key in reborn & self._streams.keys():
            self._streams[key].timings.restarts += 1
        if self._fruitless_losses >= DEATHS_IN_A_ROW:
            self._give_up(
                WorkerLost(f"workers died {self._fruitless_losses} times in a row; the last time: {loss.why}")
            )
        else:
            self._spawn(self._recover())

    def _tell_of_rounds(self, drafted: list[Sequence]) -> None:
        """A life ended while these were in a round."""
        text = f"{len(drafted)} requests were drafting when the worker was lost: they go on without drafts"
        log.warning("%s", text)
        self.note("drafts_barred", text=text)
        if self.drafting.off_because:
            log.warning("drafting is off: %s", self.drafting.off_because)
            self.note("drafting_off", text=self.drafting.off_because)

    def _lower_budget(self) -> None:
        """The kernel took the worker for its memory: the same pool would meet the same end."""
        before = self.limits.kv_tokens
        self.limits = self.limits.lowered(OOM_KV_SHARE, OOM_KV_TOKENS_MIN)
        after = self.limits.kv_tokens
        log.warning("out of memory: the KV pool is lowered from %d to %d tokens", before, after)
        self.note("budget_lowered", text=f"KV pool {before} -> {after} tokens after an out-of-memory kill")

    async def _recover(self) -> None:
        try:
            await self._fleet.restart(self.limits.kv_tokens, self.limits.window_slots)
        except HomeserveError as error:
            self._give_up(error)
            return
        self._counts.restarts += 1
        self._state = "ready"
        self.note("recovered", text=f"{len(self._streams)} requests go on")
        log.info("fleet restarted; %d requests go on", len(self._streams))
        if self._flips is not None:
            self._flips.recovered()
        self._pump()

    @contextmanager
    def _whole(self, *honest: type[Exception]) -> Iterator[None]:
        """What raises in here, unless it is one of `honest`, has left half of a step undone. Nothing would come that
        does the rest (a flip would be on for ever), so it is the end, and told to all."""
        try:
            yield
        except honest:
            raise
        except Exception as error:
            self._half_done(error)
            raise

    def _half_done(self, error: Exception) -> None:
        if self._state != "failed":
            self._give_up(WorkerLost(f"internal error: {type(error).__name__}: {error}"))

    def _give_up(self, error: HomeserveError) -> None:
        log.error("the engine gives up: %s", error.message)
        self.failure = error
        self._state = "failed"
        self.note("failed", text=error.message)
        for sequence in list(self._sequences.values()):
            self._deliver(self._scheduler.end(sequence, FinishReason.ERROR, error.message))
        for waiter in self._census_wanted:
            if not waiter.done():
                waiter.set_exception(error)
        self._census_wanted.clear()
        self.gave_up.set()

    # ----------------------------------------------------------------------------------------------------- reports

    def note(
        self,
        kind: str,
        rank: int | None = None,
        seq: int | None = None,
        text: str = "",
        folder: str | None = None,
    ) -> None:
        """Record an event for `status`."""
        self._counts.note(kind, rank, seq, text, folder)

    def snapshot(self) -> EngineSnapshot:
        return self._counts.snapshot(self._state, self.limits, self._scheduler, self._timeline, self._flips)

    async def census(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Count every page here and every lane on the ranks. `ok` when nothing is missing and both sides agree."""
        waiter: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._census_wanted.append(waiter)
        self._pump()
        async with asyncio.timeout(timeout_s):
            return await waiter

    # ---------------------------------------------------------------------------------------------------- the loop

    def _pump(self) -> None:
        """Issue plans while there is credit and something to compute."""
        if self._state != "ready":
            return
        if self._flips is not None and self._flips.on:
            self._flips.advance()
            return
        outer, self._unarmed_step = self._unarmed_step, True
        if self._census_wanted and self._fleet.credit() > 0:
            census, waiters, self._census_wanted = Census.of(self._scheduler), self._census_wanted, []
            seq = self._issue(PlanKind.CENSUS, drop=self._scheduler.take_drops())
            self._census_flight[seq] = (census, waiters)
        while self._fleet.credit() > 0 and self._plans_open < self._scheduler.limits.plans_in_flight:
            draft = self._scheduler.next_plan()
            if draft is None:
                break
            self._note_scheduled(draft)
            seq = self._issue(draft.kind, draft.drop, tuple(draft.new), tuple(draft.rows))
            self._timeline.issued(seq, draft.kind, draft.rows, draft.prompt_rows)
            self._scheduler.on_issued(draft, seq)
        self._unarmed_step = outer

    def _issue(
        self,
        kind: PlanKind,
        drop: tuple[int, ...] = (),
        new: tuple[NewLane, ...] = (),
        rows: tuple[LaneRows, ...] = (),
    ) -> int:
        self._counts.plans_issued += 1
        self._plans_open += 1
        return self._fleet.issue(kind, epoch=self._epoch, drop=drop, new=new, rows=rows)

    def _issue_flip(self, kind: PlanKind, epoch: int, order: FlipOrder) -> int:
        self._counts.plans_issued += 1
        self._plans_open += 1
        return self._fleet.issue(kind, epoch=epoch, flip=order)

    def _answer_census(self, seq: int, results: tuple[Result, ...]) -> None:
        census, waiters = self._census_flight.pop(seq)
        answer = census.answer(results, self._fleet.shared_memory_names())
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(answer)

    def _note_scheduled(self, draft: Draft) -> None:
        if not draft.new:
            return
        now = self._clock()
        for lane in draft.new:
            stream = self._streams.get(lane.request)
            if stream is not None and stream.timings.scheduled is None:
                stream.timings.scheduled = now
                sequence = self._sequences[stream]
                stream.timings.cached_tokens = sequence.hit_tokens
                stream.usage.cached_tokens = sequence.hit_tokens
                self._counts.prompt_tokens += sequence.prompt_len

    def _deliver(self, emits: list[Emit]) -> None:
        if not emits:
            return
        now = self._clock()
        for emit in emits:
            stream = self._streams.get(emit.sequence.key)
            if stream is None:
                continue
            if emit.tokens and stream.timings.first_token is None:
                stream.timings.first_token = now
            self._counts.generated_tokens += len(emit.tokens)
            if emit.finish is not None:
                stream.timings.finished = now
                self._counts.ended[emit.finish] += 1
                del self._streams[emit.sequence.key]
                del self._sequences[stream]
            told = emit.tokens, emit.logprobs, emit.prompt_logprobs, emit.finish, emit.error, emit.embedding
            stream.push(TokenEvent(*told))
        if not self._streams:
            self._quiet.set()

    def _tell_soon(self, stream: TokenStream) -> None:
        """Behind the step that is under way: the next plan is issued first, and then all are told in one go."""
        if not self._news:
            asyncio.get_running_loop().call_soon(self._tell)
        self._news.append(stream)

    def _tell(self) -> None:
        news, self._news = self._news, []
        for stream in news:
            stream.tell()

    def _hold(self, sequence: Sequence, held: bool) -> None:
        sequence.held = held
        if not held:
            self._pump()

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("an engine task failed", exc_info=task.exception())
            self._give_up(WorkerLost(f"internal error: {task.exception()}"))

    async def _measure_lag(self) -> None:
        """How late the loop wakes a sleeper: the upper bound of what any callback waits."""
        while True:
            before = time.perf_counter()
            await asyncio.sleep(LAG_PERIOD_S)
            self._counts.lag_ms.append(max(0.0, 1e3 * (time.perf_counter() - before - LAG_PERIOD_S)))


class _FlipHost:
    """What a flip may do with the engine (`flip_driver.FlipHost`)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def unarmed_step(self) -> bool:
        return self._engine._unarmed_step

    @property
    def serving(self) -> bool:
        return self._engine._state == "ready"

    @property
    def quiet(self) -> bool:
        return self._engine._plans_open == 0

    @property
    def busy(self) -> bool:
        return bool(self._engine._streams)

    def now(self) -> float:
        return self._engine._clock()

    def later(self, seconds: float, what: Callable[[], None]) -> Handle:
        def whole() -> None:
            with self._engine._whole():
                what()

        if self._engine._later is not None:
            return self._engine._later(seconds, whole)
        return asyncio.get_running_loop().call_later(seconds, whole)

    def issue_flip(self, kind: PlanKind, epoch: int, order: FlipOrder | None) -> int:
        engine = self._engine
        if order is None:
            return engine._issue(kind, drop=engine._scheduler.take_drops())
        return engine._issue_flip(kind, epoch, order)

    def flip_crossed(self) -> None:
        for stream in self._engine._streams.values():
            stream.timings.flips_crossed += 1

    def flip_over(self) -> None:
        self._engine._end_late()
        self._engine._pump()

    def lose(self, why: str) -> None:
        self._engine.on_lost(Loss(-1, why, outside=True))

    def note(self, kind: str, *, text: str) -> None:
        self._engine.note(kind, text=text)

    def pump(self) -> None:
        self._engine._pump()
