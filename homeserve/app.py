"""The composition root: it makes every part in order, hands each what it needs, and takes them down in reverse.

    port ▸ server ▸ model found ▸ its facts ▸ plan ▸ ranks ▸ fleet ▸ their weights │ tokenizer ▸ engine ▸ ready

The plan says how many ranks there are and what each of them is (`layouts.ranks`); fleet, load, engine and status take
their part of that. The port comes first: one that is taken is said at once, and `/health` tells how far the load is.
The worker processes are spawned as soon as the plan is known, so that their interpreters start beside what the engine
process still has to do; the tokenizer is built while the weights load. One `AsyncExitStack` holds what was made:
whatever goes wrong, and wherever Ctrl-C strikes, the same unwinding runs, and no process, name or file is left.

Nothing here prints. What a person is told goes through a `Watcher`. Imports of the heavier rooms stand where they are
needed, so that the port is bound and the first line printed before NumPy, aiohttp and the tokenizer library are in.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import socket
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from budget.facts import Box
from budget.host import allowed_threads, physical_cores
from budget.plan import Plan
from budget.probe import Sources, read_box
from budget.wish import PAGE
from homeserve.errors import BudgetError, HomeserveError, SettingError, WorkerOutOfMemory
from homeserve.heap import return_freed_heap
from homeserve.images import make_folder, remove_folder
from homeserve.instances import Record, check_ready_file, remove_ready_file, write_atomically
from homeserve.kernels import check_host_library, check_kernels
from homeserve.memory import MemoryWatch
from homeserve.model_facts import ModelFacts, find_model, read_model
from homeserve.server.context import LoadProgress, ModelInfo, ServerContext, State
from homeserve.server.port import is_loopback, listen, url_of
from homeserve.settings import CARD_BACKENDS, Settings, cache_dir, read_api_keys, runtime_dir

if TYPE_CHECKING:
    from homeserve.checkpoint import Checkpoint
    from homeserve.engine.engine import Engine
    from homeserve.engine.request import EngineLimits
    from homeserve.fleet import Fleet, Loss
    from homeserve.layouts.ranks import RankPlan
    from homeserve.server.application import HttpServer
    from homeserve.text.templates import TemplateHost
    from homeserve.text.tokenizer import Tokenizer
    from homeserve.wire.records import Result

log = logging.getLogger(__name__)

COMPILE_SILENCE_S = 900.0
"""How long a rank on a card may tell nothing new of its load: a first start compiles kernels, on a slow machine one for
minutes."""
HEAD_START_S = 1.0
"""How long the server waits for the worker to be spawned."""


class Watcher(Protocol):
    """Who is told, in order, how a start goes."""

    def on_warning(self, text: str) -> None: ...

    def on_box(self, box: Box) -> None: ...

    def on_cards(self, told: Sequence[str]) -> None: ...

    def on_plan(self, model: ModelInfo, plan: Plan) -> None: ...

    def on_progress(self, progress: LoadProgress) -> None: ...

    def on_ready(self, url: str, model: ModelInfo, seconds: float) -> None: ...

    def on_measured(self, rows: Sequence[Mapping[str, Any]]) -> None: ...


class App:
    """One server. `start`, then `wait_failed` while it runs, then `stop`, which is right after any of them."""

    def __init__(self, settings: Settings, environ: Mapping[str, str], watcher: Watcher) -> None:
        self.settings = settings
        self.load_progress = LoadProgress("starting")
        self._environ = environ
        self._watcher = watcher
        self._began = time.monotonic()
        self._stack = AsyncExitStack()
        self._state = State.LOADING
        self._record: Record | None = None
        self._engine: Engine | None = None
        self._hurry = asyncio.Event()
        self._spawned = asyncio.Event()
        self._images = ""
        self._by_itself = False
        """The ranks are cards, and nobody said so."""
        self.context = ServerContext(settings, state=lambda: self.state.value, load=lambda: self.load_progress)
        self._memory = MemoryWatch(self.context)
        self._prewarmed: asyncio.Task[None] | None = None

    @property
    def state(self) -> State:
        if self._state is State.READY and self._engine is not None and self._engine.state == "recovering":
            return State.RECOVERING
        return self._state

    # ------------------------------------------------------------------------------------------------------- start

    async def start(self) -> None:
        """Everything up to ready. Raises the HomeserveError of whatever cannot work; `stop` then cleans up."""
        settings = self.settings
        self._memory.start()
        self._stack.push_async_callback(self._memory.stop)
        listener = listen(settings.host, settings.port, runtime_dir(self._environ))
        self._stack.callback(listener.close)
        url = url_of(listener)
        self._warn_if_open(listener)
        self._clear_ready_file()
        self._open_record(listener, url)
        box = await asyncio.to_thread(self._read_box)
        self._watcher.on_box(box)
        if not settings.wants_cards and not box.cards:  # it will be the CPU: said before a model is fetched
            self._check_kernels(box, settings.backend)
        model = await self._load_and_serve(listener, box)
        gc.freeze()  # what a start made stays for good: collections while serving need not walk through it
        self.load_progress = LoadProgress("ready")
        self._state = State.READY
        self._write_record("ready", model.id)
        self._write_ready_file(url, listener, model)
        seconds = time.monotonic() - self._began
        # In text a person has just been told.
        level = logging.INFO if settings.log_format == "json" else logging.DEBUG
        log.log(level, "ready", extra={"url": url, "model": model.id, "seconds": round(seconds, 3)})
        self._watcher.on_ready(url, model, seconds)
        self._background(self._tell_measured())

    async def _load_and_serve(self, listener: socket.socket, box: Box) -> ModelInfo:
        """The load, and beside it the server that tells of it.

        Importing the server takes as long as a worker's start, so the worker is spawned first; a model that is not
        found by then has to be fetched, and the server no longer waits for it.
        """
        try:
            async with asyncio.TaskGroup() as group:
                load = group.create_task(self._load(box))
                spawned = group.create_task(self._spawned.wait())
                await asyncio.wait({load, spawned}, timeout=HEAD_START_S, return_when=asyncio.FIRST_COMPLETED)
                spawned.cancel()
                await self._start_server(listener)
        except BaseExceptionGroup as failures:
            raise _first_error(failures) from None
        return load.result()

    async def _start_server(self, listener: socket.socket) -> None:
        application = await asyncio.to_thread(import_module, "homeserve.server.application")
        server: HttpServer = application.HttpServer(self.context)
        self._stack.push_async_callback(server.stop)
        await server.start(listener)

    async def _load(self, box: Box) -> ModelInfo:
        self._progress("finding the model", None, None)
        path = await find_model(self.settings.model, cache_dir(self.settings, self._environ), self._progress)
        self._progress("reading the model's facts", None, None)
        facts = await asyncio.to_thread(read_model, path, self.settings)
        self._stack.callback(facts.checkpoint.close)
        from homeserve.sizing import engine_limits, ranks_of_plan, why_nothing_is_drafted

        plan = await self._choose(facts, box)
        ranks = ranks_of_plan(self.settings, plan, box, physical_cores(allowed_threads()))
        self._check_kernels(box, ranks.devices[0].backend)
        model = replace(facts.info, context=plan.context)
        self._watcher.on_plan(model, plan)
        self._memory.planned(plan, box.memory, facts.checkpoint)
        self._warn_if_crowded(ranks)
        self._warn_if_rounded(plan)
        limits = engine_limits(self.settings, plan, ranks)
        self._tell_no_flip(limits)
        self.context.no_drafts = why_nothing_is_drafted(self.settings, facts, plan)
        self.context.ranks = ranks
        relay = Relay()
        self._images = self._image_folder(ranks.flip)  # before the fleet, whose ranks write there until they are gone
        fleet = await self._make_fleet(limits, ranks, relay)
        tokenizer = await self._load_both(fleet, facts, plan, limits, ranks)
        await self._start_engine(fleet, relay, limits)
        self._tell_no_drafts(facts)
        self.context.model = model
        self.context.fleet = fleet
        self.context.tokenizer = tokenizer
        self._start_templates(facts.checkpoint, tokenizer)
        self._start_grammars(tokenizer)
        self.context.engine = self._engine
        self._memory.tell()
        facts.checkpoint.drop_pages()
        return model

    async def _choose(self, facts: ModelFacts, box: Box) -> Plan:
        """Which devices serve, and the plan for them; from here on the settings name them.

        Where nobody named any and the plan for the cards of this box does not fit, the CPU is taken and told why."""
        from homeserve.cards import Choice, choose, told_of, without
        from homeserve.readiness import read as read_drivers
        from homeserve.sizing import plan_of

        def look() -> Choice:
            made = choose(self.settings, facts, box, self._environ)
            if not made.may_be_cpu:
                return made  # what was asked for is opened by its worker, whose error tells
            vendors = sorted({card.vendor for card in made.cards})
            return without(made, box, read_drivers(vendors, self._environ))

        choice = await asyncio.to_thread(look)
        self._watcher.on_cards((*choice.left_out, *choice.told))
        try:
            plan = plan_of(choice.settings, facts, box, among=choice.among)
        except BudgetError as error:
            if not choice.may_be_cpu:
                raise
            cards = " and ".join(told_of(card, box) for card in choice.cards)
            self._watcher.on_cards([f"{cards} left out: {error.message}"])
            choice = replace(choice, settings=replace(self.settings, devices="cpu"), cards=())
            plan = plan_of(choice.settings, facts, box)
        if choice.among and choice.cards:
            used = [plan.ceilings.devices[index] for index in plan.ranks]
            choice = replace(choice, settings=replace(choice.settings, devices=",".join(each.id for each in used)))
        self.settings = self.context.settings = choice.settings
        self._by_itself = choice.may_be_cpu and bool(choice.cards)
        return plan

    def _check_kernels(self, box: Box, backend: str) -> None:
        """Raises SettingError where the native libraries that a backend needs were not built."""
        if backend in ("auto", "cpu") and box.cpu is not None:
            check_kernels(self.settings.isa, box.cpu)
        if backend in CARD_BACKENDS:
            check_host_library()

    def _read_box(self) -> Box:
        return read_box(Sources(cards=self.settings.cards_root or None))

    async def _make_fleet(self, limits: EngineLimits, ranks: RankPlan, relay: Relay) -> Fleet:
        from homeserve.engine.scheduler import plan_bytes_limit, result_bytes_limit
        from homeserve.fleet import Fleet, FleetSpec
        from homeserve.layouts.ranks import UNIFIED
        from homeserve.wire.segments import sweep

        settings = self.settings
        swept = await asyncio.to_thread(sweep)
        if swept:
            log.info("swept shared memory that a killed server left", extra={"names": ",".join(swept)})
        spec = FleetSpec(
            ranks=ranks.ranks,
            backend=ranks.devices[0].backend,
            device_index=0,
            devices=ranks.devices,
            threads=ranks.threads,
            isa=settings.isa or "",
            plans_in_flight=ranks.plans_in_flight,
            plan_timeout_s=settings.plan_timeout_s,
            slot_bytes=plan_bytes_limit(limits),
            report_slot_bytes=result_bytes_limit(limits),
            fault=settings.fault,
            capture_dir=settings.capture_dir,
            log_level=settings.log_level.upper(),
            cores=ranks.cores,
            acts=ranks.acts,
            unified=ranks.memory_domain == UNIFIED,
            weights_copy=ranks.flip and ranks.memory_domain != UNIFIED and settings.image_spill is None,
            transit_bytes=ranks.transit_bytes,
            spin_us=ranks.spin_us,
            load_silence_s=COMPILE_SILENCE_S if ranks.on_cards else FleetSpec.load_silence_s,
        )
        fleet = Fleet(spec, relay)
        self._stack.push_async_callback(fleet.stop)
        return fleet

    async def _load_both(
        self, fleet: Fleet, facts: ModelFacts, plan: Plan, limits: EngineLimits, ranks: RankPlan
    ) -> Tokenizer:
        """Weights on the ranks and the tokenizer here, at the same time.

        Raises BudgetError where the kernel killed the worker for memory: the plan was wrong, or is not true any more.
        """
        from homeserve.sizing import killed_for_memory, logit_row_limit, row_limit, state_slots
        from homeserve.wire.records import LoadSpec

        spec = LoadSpec(
            path=facts.checkpoint.path,
            kv_slots=plan.kv_tokens,
            kv_type=self.settings.kv_type,
            rows=row_limit(self.settings, plan),
            logit_rows=logit_row_limit(plan),
            lanes=limits.running,
            lane_pages=-(-plan.context // PAGE),
            deterministic=self.settings.deterministic,
            state_slots=state_slots(plan),
            window_slots=limits.window_slots,
            layout=ranks.layout,
            ranges=ranks.ranges if ranks.ranks > 1 else (),
            weight_vector=ranks.weight_vector,
            token_vector=ranks.token_vector,
            flip=ranks.flip,
            transit_bytes=ranks.transit_bytes,
            image_dir=self._images,
            drafts=plan.drafts,
            cache_dir=str(cache_dir(self.settings, self._environ)),
            drafts_test=self.settings.drafts_test,
        )

        async def load() -> None:
            self._progress("starting the worker" if ranks.ranks == 1 else "starting the workers", None, None)
            self._spawned.set()
            await fleet.start()
            await fleet.load(spec, self._progress)

        cache = cache_dir(self.settings, self._environ)

        async def build() -> Tokenizer:
            return await asyncio.to_thread(_build_tokenizer, facts.checkpoint, cache)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(load())
                tokenizer = group.create_task(build())
        except BaseExceptionGroup as failures:
            error = _first_error(failures)
            if isinstance(error, WorkerOutOfMemory):
                box = await asyncio.to_thread(self._read_box)
                error = killed_for_memory(self.settings, facts, plan, box, error)
            if isinstance(error, HomeserveError) and self._by_itself:
                error.fix = f"{error.fix or 'see homeserve doctor'}; or serve without cards: --devices cpu"
            raise error from None
        return tokenizer.result()

    async def _start_engine(self, fleet: Fleet, relay: Relay, limits: EngineLimits) -> None:
        from homeserve.engine.engine import Engine

        engine = Engine(fleet, limits)
        self._memory.watch_flips(engine)
        relay.attach(engine)
        self._stack.push_async_callback(engine.stop)
        await engine.start()
        self._engine = engine

    def _start_templates(self, checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
        """The helper comes up beside whatever follows; a request that is faster than it waits for it."""
        from homeserve.models.dialects import USUAL
        from homeserve.text.dialects import dialect_of
        from homeserve.text.fallback_templates import special_tokens, templates_for
        from homeserve.text.templates import TemplateHost

        host = TemplateHost()
        self._stack.push_async_callback(host.stop)
        self.context.templates = host
        templates = templates_for(checkpoint.chat_templates, tokenizer)
        self.context.dialect = dialect_of(templates, USUAL.get(checkpoint.arch, ("", "")))
        host.configure(templates, special_tokens(tokenizer))
        if templates:
            self._prewarmed = self._background(_prewarm(host, templates, special_tokens(tokenizer)))

    def _start_grammars(self, tokenizer: Tokenizer) -> None:
        """The helper comes up with the first grammar: many servers never see one."""
        from homeserve.text.grammars import GrammarHost

        host = GrammarHost()
        self._stack.push_async_callback(host.stop)
        self.context.grammars = host
        special = {token: tokenizer.token_text(token) for token in tokenizer.special_ids}
        host.configure(tokenizer.vocab_size, special)

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task beside the start, taken down with everything else."""
        task = asyncio.create_task(work)
        task.add_done_callback(_told)
        self._stack.push_async_callback(_cancel, task)
        return task

    async def _tell_measured(self) -> None:
        """Predicted against measured, once every process that the plan counts is there."""
        if self._prewarmed is not None:
            await asyncio.wait({self._prewarmed})
        self._watcher.on_measured(await self._memory.rows())

    # -------------------------------------------------------------------------------------------------- while ready

    async def wait_failed(self) -> HomeserveError:
        """Returns the reason when the engine gave up; waits for ever otherwise."""
        assert self._engine is not None
        await self._engine.gave_up.wait()
        assert self._engine.failure is not None
        return self._engine.failure

    def hurry(self) -> None:
        """Cut open requests off instead of waiting for them."""
        self._hurry.set()

    # --------------------------------------------------------------------------------------------------------- stop

    async def stop(self) -> None:
        """Let open requests end (for `--drain-timeout-s`, or until `hurry`), then take everything down in reverse."""
        was_ready, self._state = self._state is State.READY, State.DRAINING
        if was_ready:
            self._remove_ready_file()
        try:
            if was_ready and self._engine is not None:
                self._write_record("draining")
                await self._drain(self._engine)
        finally:
            await self._stack.aclose()

    async def _drain(self, engine: Engine) -> None:
        drain = asyncio.create_task(engine.drain(self.settings.drain_timeout_s))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({drain, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drain, hurry):
            task.cancel()
        await asyncio.gather(drain, hurry, return_exceptions=True)
        if self._hurry.is_set():
            await engine.drain(0)

    # ------------------------------------------------------------------------------------------------------ progress

    def _progress(self, stage: str, done_bytes: int | None, total_bytes: int | None) -> None:
        self.load_progress = LoadProgress(stage, done_bytes, total_bytes)
        self._watcher.on_progress(self.load_progress)

    # ------------------------------------------------------------------------------------------- records and files

    def _warn_if_open(self, listener: socket.socket) -> None:
        if not read_api_keys(self.settings.api_key_file) and not is_loopback(listener):
            self._watcher.on_warning(
                f"everybody who reaches {listener.getsockname()[0]} can use this server: no --api-key-file is set"
            )

    def _warn_if_crowded(self, ranks: RankPlan) -> None:
        if ranks.shares_cores:
            threads = f"{ranks.ranks} ranks of {ranks.threads} thread{'s' * (ranks.threads != 1)}"
            self._watcher.on_warning(
                f"{threads} share fewer cores than that: slower than ranks with cores of their own"
            )

    def _warn_if_rounded(self, plan: Plan) -> None:
        """A pool that is larger than asked for by more than a page."""
        asked = self.settings.kv_tokens
        if asked and plan.kv_tokens - asked >= PAGE:
            self._watcher.on_warning(
                f"--kv-tokens {asked} is taken as {plan.kv_tokens}: pages of {PAGE} tokens are dealt out to the ranks"
                f" in whole rounds, and every rank has one at least; requests have {plan.context} tokens of context"
            )

    def _tell_no_flip(self, limits: EngineLimits) -> None:
        """Several ranks that nobody told to keep one layout, and that keep one: a line says why."""
        if limits.flip is None and limits.no_flip.code == "does_not_fit":
            unused = "" if self.settings.image_spill is None else "; nothing is written below --image-spill"
            self._watcher.on_warning(f"the layout stays {limits.layout}: {limits.no_flip.message}{unused}")

    def _tell_no_drafts(self, facts: ModelFacts) -> None:
        """Served without drafting though nobody said so. That a model has no drafting block is no event: most have
        none."""
        why = self.context.no_drafts
        if not why or self.settings.draft == "off":
            return
        log.info("served without drafting", extra={"why": why})
        if facts.config.nextn and self._engine is not None:
            self._engine.note("no_drafting", text=f"served without drafting: {why}")

    def _image_folder(self, flips: bool) -> str:
        """Of this server alone below `--image-spill`, gone with it; empty without one, and where no layout changes.
        Raises SettingError for a word that can be no folder, in either case."""
        folder = self.settings.image_spill
        if folder is None:
            return ""
        made = make_folder(Path(folder))
        self._stack.callback(remove_folder, made)
        return str(made) if flips else ""

    def _open_record(self, listener: socket.socket, url: str) -> None:
        port = listener.getsockname()[1]
        settings = self.settings
        self._record = Record(
            runtime_dir(self._environ), port, url, settings.model or "", drain_timeout_s=settings.drain_timeout_s
        )
        self._stack.callback(self._record.remove)
        self._write_record("loading")

    def _write_record(self, state: str, model: str | None = None) -> None:
        """A folder that cannot be written costs `ps` and `down`, not the server."""
        assert self._record is not None
        try:
            self._record.write(state, model)
        except OSError as error:
            log.warning("homeserve ps will not show this server", extra={"why": str(error)})

    def _write_ready_file(self, url: str, listener: socket.socket, model: ModelInfo) -> None:
        path = self.settings.ready_file
        if path is None:
            return
        facts = {"schema": 1, "url": url, "port": listener.getsockname()[1], "pid": os.getpid(), "model": model.id}
        try:
            write_atomically(Path(path), json.dumps(facts) + "\n")
        except OSError as error:
            raise SettingError(
                f"--ready-file: {path}: {error.strerror}", field="ready_file", fix="name a file in a folder that exists"
            ) from None

    def _clear_ready_file(self) -> None:
        """A file that a killed server left would say that this one is ready; a folder that is not there is said now."""
        path = self.settings.ready_file
        if path is None:
            return
        if not os.access(Path(path).parent, os.W_OK):
            raise SettingError(
                f"--ready-file: {path}: its folder cannot be written", field="ready_file", fix="name another folder"
            )
        check_ready_file(Path(path))
        self._remove_ready_file()

    def _remove_ready_file(self) -> None:
        if self.settings.ready_file is not None:
            remove_ready_file(Path(self.settings.ready_file))


class Relay:
    """The fleet's listener from before there is an engine. A rank lost while it loads is the loader's error."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def attach(self, engine: Engine) -> None:
        self._engine = engine

    def on_results(self, seq: int, results: tuple[Result, ...]) -> None:
        if self._engine is not None:
            self._engine.on_results(seq, results)

    def on_lost(self, loss: Loss) -> None:
        if self._engine is not None:
            self._engine.on_lost(loss)
        else:
            log.error("worker lost before the model was loaded", extra={"rank": loss.rank, "why": loss.why})


async def _prewarm(host: TemplateHost, templates: dict[str, str], special_tokens: dict[str, str]) -> None:
    try:
        await host.start(templates, special_tokens)
    except HomeserveError as error:
        log.warning("the template helper did not start ahead of the first request", extra={"why": error.message})


def _told(task: asyncio.Task[None]) -> None:
    """Nobody waits for a background task: what it died of is logged."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a background task of the start failed", exc_info=error)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


def _build_tokenizer(checkpoint: Checkpoint, cache: Path) -> Tokenizer:
    from homeserve.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_checkpoint(checkpoint, cache_dir=cache)
    return_freed_heap()
    return tokenizer


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What to tell of several failures at once: the first that we know how to tell, else all of them."""
    known = [error for error in group.exceptions if isinstance(error, HomeserveError)]
    return known[0] if known else group
