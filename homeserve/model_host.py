"""The models of one process: it executes what `residency` decides, and answers who wants a model.

    lease ──ask──▶ Residency ──acts──▶ open, look, load, unload (tasks over a `Resident`) ──what came of it──▶ Residency

Decisions are all in the state machine, and who fits beside whom is planned in `homeserve.room`; here are the clock and
the tasks. Each model has at most one life at a time: what belongs to one is taken down before the next one is made
(`_Hosted.turn`).

A server that was started with one model has one here, without a name before its file is found.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from budget.beside import promised
from budget.facts import Box
from budget.plan import Plan
from homeserve.attempt import Attempt, CalledOff
from homeserve.errors import (
    BudgetError,
    DoesNotFit,
    Draining,
    HomeserveError,
    ModelInUse,
    ModelLoadFailed,
    ModelUnloaded,
    ModelWaits,
    QueueFull,
    RequestError,
    UnknownModel,
)
from homeserve.heap import return_freed_heap
from homeserve.memory import MemoryWatch
from homeserve.residency import (
    Act,
    CancelLoad,
    Grant,
    Load,
    Look,
    ModelState,
    Open,
    Refuse,
    Residency,
    Unload,
    Why,
)
from homeserve.resident import LoadWatcher, Resident, cancel
from homeserve.room import Room
from homeserve.server.context import Loaded, LoadProgress, ModelInfo, ModelTold
from homeserve.settings import Settings, chosen, settings_of

log = logging.getLogger(__name__)

_ALONE = ""
"""The key of the model of a server that has one."""


class _Hosted:
    """What the host keeps of one model, in or out."""

    def __init__(self, key: str, settings: Settings, ttl_s: float) -> None:
        self.key = key
        """Its name among the host's, which never changes."""
        self.settings = settings
        self.ttl_s = ttl_s
        self.resident: Resident | None = None
        self.info: ModelInfo | None = None
        """As it was loaded last."""
        self.turn = asyncio.Lock()
        """One life at a time."""
        self.attempt = Attempt()
        """What is being done to bring it in."""
        self.watch: asyncio.Task[None] | None = None
        """Waits for its engine to give up, as long as it is in."""

    @property
    def name(self) -> str:
        """Its name in the API; empty while nobody knows it."""
        return self.info.id if self.info is not None else self.key


class ModelHost:
    """Implements `server.context.Models`. `load_first`, then the rest; `drain`, then `stop`, which is right after any
    of them."""

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        watcher: LoadWatcher,
        memory: MemoryWatch,
        read_box: Callable[[], Box],
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`watcher` hears of the first load alone; of others the log tells. `on_change`: other models are in now."""
        entries = chosen(settings)
        self.several = bool(entries)
        self._hosted = {each.id: _Hosted(each.id, settings_of(settings, each), each.ttl_s) for each in entries}
        if not entries:
            self._hosted = {_ALONE: _Hosted(_ALONE, settings, 0.0)}
        self._settings = settings
        self._environ = environ
        self._memory = memory
        self._read_box = read_box
        self._room = Room(environ, read_box)
        self._on_change = on_change
        self._clock = clock
        self._residency = Residency(
            {key: each.ttl_s for key, each in self._hosted.items()},
            wait_s=settings.model_wait_s,
            waiting_max=settings.max_waiting,
        )
        self._tickets: dict[int, asyncio.Future[None]] = {}
        self._serial = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._due = asyncio.Event()
        self._hurry = asyncio.Event()
        self._failure: asyncio.Future[HomeserveError] | None = None
        self._first = next(iter(self._hosted))
        self.first = Resident(self._hosted[self._first].settings, environ, watcher, memory, read_box)
        """The model that the server starts with."""

    # ------------------------------------------------------------------------------------------------ of the process

    @property
    def progress(self) -> LoadProgress:
        """Of the first load."""
        return self.first.progress

    @property
    def stage(self) -> str:
        """Of a load that is under way; empty: none is. May be asked in any thread."""
        loading = (each.resident for each in self._hosted.values() if each.attempt.under_way)
        return next((resident.progress.stage for resident in loading if resident is not None), "")

    @property
    def recovering(self) -> bool:
        """Whether the ranks of the model used last are started again."""
        loaded = self.loaded
        return bool(loaded) and loaded[0].engine.state == "recovering"

    async def load_first(self, box: Box) -> Loaded:
        """Raises the HomeserveError of whatever cannot work."""
        hosted = self._hosted[self._first]
        hosted.resident = self.first
        self._residency.begin(self._first, self._clock())
        async with hosted.turn:
            loaded = await self.first.load(box)
        self._failure = asyncio.get_running_loop().create_future()
        self._spawn(self._keep_time())
        self._in(hosted, loaded)
        return loaded

    async def wait_failed(self) -> HomeserveError:
        """Returns the reason when the one model of this server cannot go on; of several each fails alone, and this
        waits for ever."""
        assert self._failure is not None, "ready"
        return await asyncio.shield(self._failure)

    async def drain(self, timeout_s: float, hurry: asyncio.Event) -> None:
        """No new requests; let the open ones end, for so long or until `hurry`. A load under way is cancelled."""
        self._do(self._residency.drain(self._clock()))
        residents = [each.resident for each in self._hosted.values() if each.resident is not None]
        await asyncio.gather(*(each.drain(timeout_s, hurry) for each in residents))

    async def stop(self) -> None:
        """Take every model down."""
        self._hurry.set()
        self._do(self._residency.drain(self._clock()))
        while self._tasks:
            await cancel(next(iter(self._tasks)))
        for hosted in self._hosted.values():
            await self._drop(hosted)

    # ------------------------------------------------------------------------------------------------------- leases

    @property
    def loaded(self) -> Sequence[Loaded]:
        """Those that are in, the one used last first."""
        inside = (self._hosted[key].resident for key in self._residency.by_use())
        return [each.loaded for each in inside if each is not None and each.loaded is not None]

    @asynccontextmanager
    async def lease(self, asked: str | None) -> AsyncIterator[Loaded]:
        """The model called `asked` (None: the one used last), loaded if need be. It stays in until the lease ends.

        Raises UnknownModel; what a load fails of (DoesNotFit, ModelLoadFailed); ModelWaits, QueueFull, Draining.
        """
        hosted = self._called(asked)
        await self._granted(hosted)
        try:
            if hosted.resident is None or hosted.resident.loaded is None:  # it gave up in between
                raise ModelLoadFailed(hosted.name, self._residency.entries[hosted.key].reason)
            yield hosted.resident.loaded
        finally:
            self._do(self._residency.release(hosted.key, self._clock()))

    async def _granted(self, hosted: _Hosted) -> None:
        ticket, key = next(self._serial), hosted.key
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tickets[ticket] = answer
        try:
            self._do(self._residency.ask(key, ticket, self._clock()))
            await answer
        except asyncio.CancelledError:
            now = self._clock()
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self._do(self._residency.release(key, now))  # it had just been granted
            else:
                self._do(self._residency.leave(key, ticket, now))
            raise
        finally:
            self._tickets.pop(ticket, None)

    def _called(self, asked: str | None) -> _Hosted:
        """Raises UnknownModel, with those that there are."""
        if not asked:
            return self._hosted[self._residency.used_last()]
        found = next((each for each in self._hosted.values() if each.name == asked), None)
        if found is None:
            raise UnknownModel(asked, tuple(each.name for each in self._hosted.values() if each.name))
        return found

    # ---------------------------------------------------------------------------------------------------- operators

    def tell(self) -> list[ModelTold]:
        """Every model whose name is known."""
        return [self._told(each) for each in self._hosted.values() if each.name]

    def begin_load(self, asked: str) -> ModelTold:
        """Bring it in, if it is out; returns at once. Raises UnknownModel."""
        hosted = self._called(asked)
        self._do(self._residency.load(hosted.key, self._clock()))
        return self._told(hosted)

    def begin_unload(self, asked: str, *, force: bool) -> ModelTold:
        """Let it out, if it is in; returns at once. Raises UnknownModel, ModelInUse."""
        hosted = self._called(asked)
        key = hosted.key
        if self._residency.in_use(key) and not force:
            raise ModelInUse(hosted.name, self._residency.entries[key].leases)
        self._do(self._residency.unload(key, self._clock(), force=force))
        return self._told(hosted)

    def _told(self, hosted: _Hosted) -> ModelTold:
        entry, resident = self._residency.entries[hosted.key], hosted.resident
        used = None if entry.last_used is None else time.time() - (self._clock() - entry.last_used)
        plan = resident.plan if resident is not None else None
        return ModelTold(
            id=hosted.name,
            state=entry.state.value,
            reason=entry.reason or None,
            last_used=used,
            ttl_s=hosted.ttl_s,
            running=entry.leases,
            waiting=self._residency.waiting_for(hosted.key),
            info=hosted.info,
            progress=resident.progress if resident is not None and entry.state is ModelState.LOADING else None,
            planned=promised(plan) if plan is not None else {},
        )

    # --------------------------------------------------------------------------------------------------------- acting

    def _do(self, acts: list[Act]) -> None:
        for act in acts:
            if isinstance(act, Grant):
                self._answer(act.ticket, None)
            elif isinstance(act, Refuse):
                self._answer(act.ticket, self._refusal(act))
            else:
                self._begin(self._hosted[act.key], act)
        self._due.set()

    def _begin(self, hosted: _Hosted, act: Open | Look | Load | CancelLoad | Unload) -> None:
        if isinstance(act, CancelLoad):
            hosted.attempt.call_off()
            self._spawn(self._discard(hosted))
        elif isinstance(act, Unload):
            log.info("unloading a model", extra={"model": hosted.name})
            self._spawn(self._unload(hosted, cut=act.cut))
        else:
            hosted.attempt = Attempt()
            if isinstance(act, Open):
                self._spawn(self._open(hosted, hosted.attempt))
            elif isinstance(act, Look):
                self._spawn(self._look(hosted, act, hosted.attempt))
            else:
                log.info("loading a model", extra={"model": hosted.name})
                self._spawn(self._load(hosted, hosted.attempt))

    def _answer(self, ticket: int, error: RequestError | None) -> None:
        answer = self._tickets.get(ticket)
        if answer is None or answer.done():
            return  # its request is being cancelled, and says so itself
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)

    def _refusal(self, act: Refuse) -> RequestError:
        name = self._hosted[act.key].name
        if act.why is Why.DOES_NOT_FIT:
            return DoesNotFit(name, act.reason)
        if act.why is Why.BUSY:
            others = ", ".join(repr(self._hosted[key].name) for key in act.others)
            return ModelWaits(name, others, self._settings.model_wait_s)
        if act.why is Why.FULL:
            return QueueFull(self._residency.waiting, why="requests wait for a model already (--max-waiting)")
        if act.why is Why.UNLOADED:
            return ModelUnloaded(name)
        if act.why is Why.DRAINING:
            return Draining("the server is shutting down and takes no new requests")
        return ModelLoadFailed(name, act.reason)

    # ---------------------------------------------------------------------------------------------------------- tasks

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the models failed", exc_info=error)

    async def _open(self, hosted: _Hosted, attempt: Attempt) -> None:
        """Find the model and read what a plan needs."""
        key, failure = hosted.key, ""
        async with hosted.turn:
            await self._drop(hosted)
            resident = Resident(hosted.settings, self._environ, _Logged(hosted), self._memory, self._read_box)
            hosted.resident = resident
            try:
                await attempt.run(resident.open())
            except CalledOff:
                await self._drop(hosted)
                return
            except Exception as error:  # noqa: BLE001  the edge: whatever it is, who waits is told
                failure = reason_of(error)
                await self._drop(hosted)
        if failure:
            self._do(self._residency.load_failed(key, failure, self._clock()))
        else:
            self._do(self._residency.opened(key, self._clock()))

    async def _look(self, hosted: _Hosted, act: Look, attempt: Attempt) -> None:
        """Which of the others have to leave."""
        resident, key = hosted.resident, hosted.key
        assert resident is not None, "opened"
        try:
            leaving = await attempt.run(self._leaving(resident, act))
        except CalledOff:
            return
        except BudgetError as error:
            self._do(self._residency.looked(act.look, None, said(error), self._clock()))
            self._spawn(self._discard(hosted))
        except Exception as error:  # noqa: BLE001  the edge: whatever it is, who waits is told
            self._do(self._residency.load_failed(key, reason_of(error), self._clock()))
            self._spawn(self._discard(hosted))
        else:
            self._do(self._residency.looked(act.look, leaving, "", self._clock()))

    async def _leaving(self, resident: Resident, act: Look) -> tuple[str, ...] | None:
        """Raises the BudgetError of a model that does not fit even alone."""
        inside = [self._plan_of(self._hosted[other]) for other in act.others]
        if act.ahead:
            waits, keep = self._hosted[act.ahead].resident, [each not in act.leaving for each in act.others]
            both = await asyncio.to_thread(self._room.both_fit, resident, waits, inside, keep, self._pids())
            return () if both else None
        places = await asyncio.to_thread(self._room.in_the_way, resident, inside, self._pids())
        return tuple(act.others[place] for place in places)

    def _plan_of(self, hosted: _Hosted) -> Plan | None:
        return hosted.resident.plan if hosted.resident is not None else None

    def _pids(self) -> list[int]:
        """Every process of ours that holds memory, those of models on their way out too."""
        residents = (each.resident for each in self._hosted.values() if each.resident is not None)
        return [os.getpid(), *(pid for resident in residents for pid in resident.pids())]

    async def _load(self, hosted: _Hosted, attempt: Attempt) -> None:
        """Its outcome is told whatever it is, also where it was called off."""
        key, why, reason = hosted.key, Why.FAILED, ""
        async with hosted.turn:
            resident = hosted.resident
            assert resident is not None, "opened"
            try:
                loaded = await attempt.run(self._bring_in(resident))
            except CalledOff:
                why = Why.UNLOADED
            except BudgetError as error:
                why, reason = Why.DOES_NOT_FIT, said(error)
            except Exception as error:  # noqa: BLE001  the edge: whatever it is, who waits is told
                reason = reason_of(error)
            else:
                self._in(hosted, loaded)
                return
            await self._drop(hosted)
        if reason:
            log.error("a model could not be loaded", extra={"model": hosted.name, "why": reason})
        self._do(self._residency.load_failed(key, reason, self._clock(), why=why))

    async def _bring_in(self, resident: Resident) -> Loaded:
        others = [each for each in self._hosted.values() if each.resident is not None and each.resident.loaded]
        inside = [self._plan_of(each) for each in others]
        box = await asyncio.to_thread(self._room.beside, inside, self._pids())
        return await resident.load(box)

    def _in(self, hosted: _Hosted, loaded: Loaded) -> None:
        hosted.info = loaded.model
        gc.freeze()  # what a load made stays for long: collections while serving need not walk through it
        hosted.watch = self._spawn(self._watch(hosted, loaded))
        self._do(self._residency.loaded(hosted.key, self._clock()))
        self._on_change()

    async def _watch(self, hosted: _Hosted, loaded: Loaded) -> None:
        """Until its engine gives up."""
        await loaded.engine.gave_up.wait()
        failure = loaded.engine.failure
        assert failure is not None, "it gave up"
        if not self.several and self._failure is not None:
            if not self._failure.done():
                self._failure.set_result(failure)
            return
        if hosted.resident is not None and hosted.resident.loaded is loaded:
            self._do(self._residency.gave_up(hosted.key, failure.message, self._clock()))

    async def _unload(self, hosted: _Hosted, *, cut: bool) -> None:
        """What goes wrong on the way is logged; that the model is out is told in any case."""
        async with hosted.turn:
            try:
                if hosted.resident is not None:
                    await hosted.resident.drain(self._settings.drain_timeout_s if cut else 0.0, self._hurry)
            except Exception:
                log.exception("a model did not drain", extra={"model": hosted.name})
            await self._drop(hosted)
        self._on_change()
        await asyncio.to_thread(_give_back)
        self._do(self._residency.unloaded(hosted.key, self._clock()))

    async def _discard(self, hosted: _Hosted) -> None:
        """What was opened is not loaded."""
        async with hosted.turn:
            if hosted.resident is not None and hosted.resident.loaded is None:
                await self._drop(hosted)

    async def _drop(self, hosted: _Hosted) -> None:
        """Until it is gone, its processes and what was promised to it count."""
        if hosted.watch is not None:
            hosted.watch.cancel()
            hosted.watch = None
        resident = hosted.resident
        if resident is None:
            return
        try:
            await _whole(resident.stop())
        except Exception:
            log.exception("a model did not go without an error", extra={"model": hosted.name})
        finally:
            hosted.resident = None

    async def _keep_time(self) -> None:
        """Tells the state machine of the time, when it has something to do then."""
        while True:
            self._due.clear()
            due = self._residency.next_due()
            try:
                async with asyncio.timeout(None if due is None else max(0.0, due - self._clock())):
                    await self._due.wait()
            except TimeoutError:
                self._do(self._residency.tick(self._clock()))


class _Logged:
    """Hears of a load that nobody looks at."""

    def __init__(self, hosted: _Hosted) -> None:
        self._hosted = hosted

    def on_warning(self, text: str) -> None:
        log.warning("%s", text, extra={"model": self._hosted.name})

    def on_cards(self, told: Sequence[str]) -> None:
        for line in told:
            log.info("%s", line, extra={"model": self._hosted.name})

    def on_plan(self, model: ModelInfo, plan: Plan) -> None:
        log.info("planned", extra={"model": model.id, "kv_tokens": plan.kv_tokens, "context": plan.context})

    def on_progress(self, progress: LoadProgress) -> None:
        """Whoever wants to know asks the status."""


def reason_of(error: Exception) -> str:
    """What to tell of a failure. One that we do not know how to tell is our fault, and in the log."""
    if isinstance(error, HomeserveError):
        return said(error)
    log.error("a model failed by an error of the server's own", exc_info=error)
    return f"an error of the server's own ({type(error).__name__}): its log has more"


def said(error: HomeserveError) -> str:
    """An error as one sentence, with what to do about it."""
    return f"{error.message} ({error.fix})" if error.fix else error.message


async def _whole(work: Coroutine[Any, Any, None]) -> None:
    """Wait for `work` to its end, cancelled or not: half a teardown would leave processes."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def _give_back() -> None:
    """Return what an unloaded model leaves in this process. What was frozen has to be looked through once for that."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    return_freed_heap()
