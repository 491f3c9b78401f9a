"""The fleet: workers of one model, started, loaded, asked, started again, stopped.

    start ─▶ load ─▶ issue … on_results        on_lost ─▶ restart ─▶ issue … (seq from 1 again)        stop

A fleet outlives its workers. What it keeps over a restart is the load, the count of restarts and the back-off; all else
belongs to the life that ended (`homeserve.fleet.life`). It decides nothing about requests: it says once that a life is
lost, and starts another when it is told to.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec

from homeserve.errors import BudgetError, DeviceError, HomeserveError, SettingError, WorkerLost, WorkerStartError
from homeserve.fleet.backoff import Backoff
from homeserve.fleet.capture import Captures
from homeserve.fleet.life import Life
from homeserve.fleet.rank import RankProcess
from homeserve.fleet.spec import (
    Exchanges,
    FleetListener,
    FleetSpec,
    LoadProgressCallback,
    Loss,
    RankStatus,
)
from homeserve.fleet.stages import LoadStages, Told
from homeserve.wire.faults import parse
from homeserve.wire.records import FlipOrder, LaneRows, LoadSpec, NewLane, PlanKind, Progress, RankFacts, Result
from homeserve.wire.refusal import error_of

log = logging.getLogger(__name__)

START_ATTEMPTS = 5
"""Lives that may die before they serve within one `restart`, each waiting longer than the one before."""


class Fleet:
    """See the module. All methods are for the loop's thread."""

    def __init__(
        self,
        spec: FleetSpec,
        listener: FleetListener,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Raises SettingError for a fault that cannot be."""
        self.spec = spec
        self.restarts = 0
        self._listener = listener
        self._clock = clock
        self._sleep = sleep
        self._backoff = Backoff()
        self._captures = Captures(spec.capture_dir)
        self._life: Life | None = None
        self._load: LoadSpec | None = None
        self._on_progress: LoadProgressCallback | None = None
        self._stages = LoadStages(spec.ranks)
        self._facts: tuple[RankFacts, ...] = ()
        self._serving_since: float | None = None
        self._stopped = False
        fault = parse(spec.fault)
        if fault is not None and fault.rank >= spec.ranks:
            raise SettingError(f"fault: there is no rank {fault.rank} among {spec.ranks}", field="fault")
        self._first_faults = ["" if fault is None or fault.rank != rank else spec.fault for rank in range(spec.ranks)]

    # -------------------------------------------------------------------------------------------------------- lives

    async def start(self) -> None:
        """Spawn the workers and wait for their hellos. Raises WorkerStartError; nothing is left behind then, nor when
        this is cancelled."""
        assert self._life is None, "a fleet starts once; use restart"
        await self._begin(self._first_faults)

    async def load(self, load: LoadSpec, on_progress: LoadProgressCallback | None = None) -> tuple[RankFacts, ...]:
        """Have every rank load the model; returns what each holds. Raises the error that the first refusing rank gave,
        or WorkerStartError if one died."""
        self._load, self._on_progress = load, on_progress
        assert self._life is not None, "load comes after start"
        self._stages = LoadStages(self.spec.ranks)
        results = await self._life.ask(PlanKind.LOAD, load=load)
        for result in results:
            if not result.ok:
                raise error_of(result)
        self._tell(self._stages.end())
        self._facts = tuple(result.facts for result in results if result.facts is not None)
        self._serving_since = self._clock()
        return self._facts

    async def restart(self, kv_slots: int | None = None, window_slots: tuple[tuple[int, int], ...] = ()) -> None:
        """End what is left of this life and bring up another with the same load, waiting first if deaths come in a row.

        `kv_slots` and `window_slots` are the KV pool's sizes from here on (`wire.records.LoadSpec`), where they change:
        after a worker that was killed for memory.

        A life that dies before it serves is followed by another, up to `START_ATTEMPTS`; so is one whose card could not
        be opened, since a driver takes a while to bring a lost one back, and one that memory lacked for: it held this
        load before, and a driver may still be taking down what the dead process had. Raises WorkerLost with the last
        error then, or at once what else a rank refuses to load for.
        """
        assert self._load is not None, "restart comes after load"
        if kv_slots is not None:
            self._load = msgspec.structs.replace(self._load, kv_slots=kv_slots, window_slots=window_slots)
        lived_s = 0.0 if self._serving_since is None else self._clock() - self._serving_since
        self._serving_since = None
        served = self._life is not None and self._life.served
        await self._end_life()
        for attempt in range(1, START_ATTEMPTS + 1):
            self._backoff = self._backoff.after_death(lived_s, served=served)
            lived_s, served = 0.0, False
            await self._sleep(self._backoff.delay_s)
            try:
                self.restarts += 1
                await self._begin([""] * self.spec.ranks)
                await self.load(self._load, self._on_progress)
                return
            except (WorkerStartError, DeviceError, BudgetError) as error:
                log.warning("a restart failed", extra={"attempt": attempt, "why": error.message})
                last: HomeserveError = error
                await self._end_life()
            if self._stopped:
                break
        raise WorkerLost(f"the workers do not come up again: {last.message}", fix=last.fix)

    async def stop(self) -> None:
        """End the workers, gently if they are idle, and release everything. May be called at any time, repeatedly."""
        self._stopped = True
        self._serving_since = None
        if self._life is not None:
            await self._life.end(graceful=self._facts != ())

    @property
    def deaths_in_a_row(self) -> int:
        """Deaths without a minute's service in between."""
        return self._backoff.deaths_in_a_row

    async def _begin(self, faults: Sequence[str]) -> None:
        if self._stopped:
            raise WorkerStartError("the fleet was stopped")
        life = Life(self.spec, faults, self._captures, self._on_results, self._report_progress, self._clock)
        self._life = life
        life.loss.add_done_callback(lambda loss: self._on_loss(life, loss.result()))
        try:
            await life.start()
        except BaseException:
            await life.end(graceful=False)
            raise

    async def _end_life(self) -> None:
        if self._life is not None:
            await self._life.end(graceful=False)

    # -------------------------------------------------------------------------------------------------------- plans

    def credit(self) -> int:
        """Plans that may be issued now; 0 while the fleet is not loaded."""
        return self._life.credit() if self._life is not None and self._serving_since is not None else 0

    def issue(
        self,
        kind: PlanKind,
        *,
        epoch: int,
        ranks: Sequence[int] | None = None,
        drop: tuple[int, ...] = (),
        new: tuple[NewLane, ...] = (),
        rows: tuple[LaneRows, ...] = (),
        flip: FlipOrder | None = None,
    ) -> int:
        """Issue a plan to `ranks` (default: all); returns its seq. Never blocks. AssertionError without credit,
        RecordTooLarge (nothing is issued then) for a plan that does not fit a slot."""
        assert self._life is not None and self._serving_since is not None, "a plan was issued to a fleet without a load"
        return self._life.issue(kind, epoch=epoch, ranks=ranks, drop=drop, new=new, rows=rows, flip=flip)

    def _on_results(self, seq: int, results: tuple[Result, ...]) -> None:
        if self._serving_since is not None:
            self._listener.on_results(seq, results)

    def _on_loss(self, life: Life, loss: Loss) -> None:
        if life is self._life and self._serving_since is not None:
            self._listener.on_lost(loss)

    def _report_progress(self, progress: Progress) -> None:
        self._tell(self._stages.progress(progress.rank, progress.stage, progress.done_bytes, progress.total_bytes))

    def _tell(self, stages: Iterable[Told]) -> None:
        for stage, done_bytes, total_bytes in stages:
            if self._on_progress is not None:
                self._on_progress(stage, done_bytes, total_bytes)

    # ------------------------------------------------------------------------------------------------------- status

    @property
    def ranks(self) -> list[RankStatus]:
        """What `status` shows, one entry for each rank."""
        held = self._life.ranks if self._life is not None else []
        return [self._rank_status(rank, held[rank] if rank < len(held) else None) for rank in range(self.spec.ranks)]

    def shared_memory_names(self) -> list[str]:
        """Names of the shared memory that the fleet holds now."""
        return self._life.memory_names() if self._life is not None else []

    def regions(self) -> list[tuple[int, int, tuple[tuple[str, int, int], ...]]]:
        """(rank, pid, regions) of each worker that is up and has loaded; a region is (ledger line, address, bytes)."""
        held = self._life.ranks if self._life is not None else []
        return [
            (rank.rank, rank.pid, rank.facts.regions)
            for rank in held
            if rank.pid is not None and rank.facts is not None
        ]

    def lines(self) -> dict[int, dict[str, int]]:
        """Bytes by ledger line of each rank that has loaded, as it counted them then."""
        held = self._life.ranks if self._life is not None else []
        return {rank.rank: dict(rank.facts.lines) for rank in held if rank.facts is not None}

    def _rank_status(self, rank: int, held: RankProcess | None) -> RankStatus:
        facts = held.facts if held is not None else None
        alive = held is not None and held.process is not None and held.process.returncode is None
        return RankStatus(
            rank=rank,
            pid=held.pid if held is not None and alive else None,
            device=facts.device if facts else self.spec.device(rank).name or None,
            backend=facts.backend if facts else self.spec.device(rank).backend,
            isa=facts.isa if facts else None,
            threads=(facts.threads or None) if facts else None,  # a card has none
            restarts=self.restarts,
            last_seq=self._life.book.last_seq(rank) if self._life is not None else 0,
            layers=list(facts.layers) if facts and facts.layers else None,
            busy_ms=held.busy_us / 1000 if held is not None else 0.0,
            waited_ms=held.waited_us / 1000 if held is not None else 0.0,
            idle_ms=held.idle_us / 1000 if held is not None else 0.0,
            rss_mib=held.rss_mib() if held is not None and alive else None,
            lines_mib={name: round(size / 2**20, 3) for name, size in facts.lines} if facts else {},
            copied_bytes=held.exchanges.moved_bytes if held is not None else None,
            collectives=(held.exchanges if held is not None else Exchanges()).shown(),
        )
