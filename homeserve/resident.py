"""One model of this process, from its name to answers and back to nothing.

    open ─▶ load ─▶ (serving) ─▶ drain ─▶ stop

    open    found, fetched if need be, and its facts read
    load    plan ▸ ranks ▸ fleet ▸ weights │ tokenizer ▸ engine ▸ helpers ▸ `Loaded`

The plan says how many ranks there are and what each of them is (`layouts.ranks`); fleet, load, engine and status take
their part of that. The worker processes are spawned as soon as the plan is known, so that their interpreters start
beside what the engine process still has to do; the tokenizer is built while the weights load. One `AsyncExitStack`
holds what was made: whatever goes wrong, and wherever a load is cancelled, `stop` unwinds it, and no process, name or
file is left.

Nothing here decides which models are in (`homeserve.model_host`). Imports of the heavier rooms stand where they are
needed, so that the port is bound and the first line printed before NumPy, aiohttp and the tokenizer library are in.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from budget.facts import Box
from budget.host import allowed_threads, physical_cores
from budget.plan import Plan
from budget.wish import PAGE
from homeserve.errors import BudgetError, HomeserveError, WorkerOutOfMemory
from homeserve.heap import return_freed_heap
from homeserve.images import make_folder, remove_folder
from homeserve.kernels import check_host_library, check_kernels
from homeserve.memory import MemoryWatch, ModelMemory
from homeserve.model_facts import ModelFacts, find_model, read_model
from homeserve.server.context import Loaded, LoadProgress, ModelInfo
from homeserve.settings import CARD_BACKENDS, Settings, cache_dir

if TYPE_CHECKING:
    from homeserve.checkpoint import Checkpoint
    from homeserve.engine.engine import Engine
    from homeserve.engine.request import EngineLimits
    from homeserve.fleet import Fleet, Loss
    from homeserve.layouts.ranks import RankPlan
    from homeserve.text.dialects import Dialect
    from homeserve.text.grammars import GrammarHost
    from homeserve.text.templates import TemplateHost
    from homeserve.text.tokenizer import Tokenizer
    from homeserve.wire.records import Result

log = logging.getLogger(__name__)


class LoadWatcher(Protocol):
    """Who is told, in order, how a load goes."""

    def on_warning(self, text: str) -> None: ...

    def on_cards(self, told: Sequence[str]) -> None: ...

    def on_plan(self, model: ModelInfo, plan: Plan) -> None: ...

    def on_progress(self, progress: LoadProgress) -> None: ...


class Resident:
    """One model. `open`, `load`, then `loaded` is there; `stop` is right after any of them, and more than once.

    `settings` are those of this model; once it has a plan, with `devices` as they came out.
    """

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        watcher: LoadWatcher,
        memory: MemoryWatch,
        read_box: Callable[[], Box],
    ) -> None:
        self.settings = settings
        self.progress = LoadProgress("starting")
        self.spawned = asyncio.Event()
        """The workers are on their way: what else has to be imported may be now."""
        self.facts: ModelFacts | None = None
        self.plan: Plan | None = None
        self.loaded: Loaded | None = None
        self._environ = environ
        self._watcher = watcher
        self._memory = memory
        self._read_box = read_box
        self._stack = AsyncExitStack()
        self._going: Loaded | None = None
        """What was loaded, while it is taken down."""
        self._by_itself = False
        """The ranks are cards, and nobody said so."""
        self._prewarmed: asyncio.Task[None] | None = None

    # -------------------------------------------------------------------------------------------------------- opening

    async def open(self) -> ModelFacts:
        """Find the model and read what a plan needs of it. Raises ModelErrors, FetchError."""
        if self.facts is not None:
            return self.facts
        self._progress("finding the model", None, None)
        path = await find_model(self.settings.model, self._cache, self._progress)
        self._progress("reading the model's facts", None, None)
        facts = await asyncio.to_thread(read_model, path, self.settings)
        self._stack.callback(facts.checkpoint.close)
        self.facts = facts
        return facts

    async def load(self, box: Box) -> Loaded:
        """Everything up to an engine that answers. `box` is what this model may have of the box. Raises the
        HomeserveError of whatever cannot work; `stop` then cleans up."""
        from homeserve.sizing import engine_limits, ranks_of_plan, why_nothing_is_drafted

        facts = await self.open()
        plan = await self._choose(facts, box)
        ranks = ranks_of_plan(self.settings, plan, box, physical_cores(allowed_threads()))
        check_backend(self.settings, box, ranks.devices[0].backend)
        model = replace(facts.info, context=plan.context)
        self._watcher.on_plan(model, plan)
        self._hold(plan, facts.checkpoint)
        self._warn_if_crowded(ranks)
        self._warn_if_rounded(plan)
        limits = engine_limits(self.settings, plan, ranks)
        self._tell_no_flip(limits)
        images = self._image_folder(ranks.flip)  # before the fleet, whose ranks write there until they are gone
        relay = Relay()
        fleet = await self._make_fleet(limits, ranks, relay)
        tokenizer = await self._load_both(fleet, facts, plan, limits, ranks, images)
        engine = await self._start_engine(fleet, relay, limits)
        no_drafts = why_nothing_is_drafted(self.settings, facts, plan)
        self._tell_no_drafts(no_drafts, facts, engine)
        templates, dialect = self._start_templates(facts.checkpoint, tokenizer)
        grammars = self._start_grammars(tokenizer)
        memory = ModelMemory(self._memory, plan, ranks, fleet, engine, (templates, grammars))
        memory.watch_flips()
        self.loaded = Loaded(
            settings=self.settings,
            model=model,
            engine=engine,
            tokenizer=tokenizer,
            templates=templates,
            grammars=grammars,
            dialect=dialect,
            fleet=fleet,
            ranks=ranks,
            budget=memory.budget(self._document(plan, box), self.settings.cards_root),
            no_drafts=no_drafts,
        )
        facts.checkpoint.drop_pages()
        return self.loaded

    async def whole(self) -> None:
        """Waits until every process is there that the plan counts."""
        if self._prewarmed is not None:
            await asyncio.wait({self._prewarmed})

    # --------------------------------------------------------------------------------------------------- going again

    async def drain(self, timeout_s: float, hurry: asyncio.Event) -> None:
        """Let open requests end, for so long or until `hurry`; what is left then is cut off."""
        if self.loaded is None:
            return
        engine = self.loaded.engine
        drain = asyncio.create_task(engine.drain(timeout_s))
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait({drain, hurried}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drain, hurried):
            task.cancel()
        await asyncio.gather(drain, hurried, return_exceptions=True)
        if hurry.is_set():
            await engine.drain(0)

    async def stop(self) -> None:
        """Take everything down in reverse."""
        self._going, self.loaded = self.loaded, None
        try:
            await self._stack.aclose()
        finally:
            self._going = None

    def pids(self) -> list[int]:
        """Its processes, until they are gone."""
        loaded = self.loaded or self._going
        if loaded is None:
            return []
        helpers = (loaded.templates.pid, loaded.grammars.pid)
        return [*(pid for _, pid, _ in loaded.fleet.regions()), *(pid for pid in helpers if pid is not None)]

    # ---------------------------------------------------------------------------------------------------------- steps

    async def _choose(self, facts: ModelFacts, box: Box) -> Plan:
        """Which devices serve, and the plan for them; from here on the settings name them."""
        told: list[str] = []
        try:
            chosen = await asyncio.to_thread(chosen_plan, self.settings, facts, box, self._environ, told)
        finally:
            if told:
                self._watcher.on_cards(told)
        self.settings, self.plan, self._by_itself = chosen
        return self.plan

    def _hold(self, plan: Plan, checkpoint: Checkpoint) -> None:
        files = {os.path.realpath(file.path) for file in checkpoint.files}
        self._memory.planned(plan, files)
        self._stack.callback(self._memory.forget, plan, files)

    def _document(self, plan: Plan, box: Box) -> dict[str, Any]:
        from budget.document import document
        from budget.question import Question

        return document(plan.ceilings, box.memory, plan, plan.doubts, Question(self.settings.model))

    async def _make_fleet(self, limits: EngineLimits, ranks: RankPlan, relay: Relay) -> Fleet:
        from homeserve.fleet import Fleet
        from homeserve.specs import fleet_spec
        from homeserve.wire.segments import sweep

        swept = await asyncio.to_thread(sweep)
        if swept:
            log.info("swept shared memory that a killed server left", extra={"names": ",".join(swept)})
        fleet = Fleet(fleet_spec(self.settings, limits, ranks), relay)
        self._stack.push_async_callback(fleet.stop)
        return fleet

    async def _load_both(
        self, fleet: Fleet, facts: ModelFacts, plan: Plan, limits: EngineLimits, ranks: RankPlan, images: str
    ) -> Tokenizer:
        """Weights on the ranks and the tokenizer here, at the same time.

        Raises BudgetError where the kernel killed the worker for memory: the plan was wrong, or is not true any more.
        """
        from homeserve.sizing import killed_for_memory
        from homeserve.specs import load_spec

        spec = load_spec(self.settings, facts.checkpoint.path, plan, limits, ranks, images, self._cache)

        async def load() -> None:
            self._progress("starting the worker" if ranks.ranks == 1 else "starting the workers", None, None)
            self.spawned.set()
            await fleet.start()
            await fleet.load(spec, self._progress)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(load())
                tokenizer = group.create_task(asyncio.to_thread(_build_tokenizer, facts.checkpoint, self._cache))
        except BaseExceptionGroup as failures:
            error = first_error(failures)
            if isinstance(error, WorkerOutOfMemory):
                box = await asyncio.to_thread(self._read_box)
                error = killed_for_memory(self.settings, facts, plan, box, error)
            if isinstance(error, HomeserveError) and self._by_itself:
                error.fix = f"{error.fix or 'see homeserve doctor'}; or serve without cards: --devices cpu"
            raise error from None
        return tokenizer.result()

    async def _start_engine(self, fleet: Fleet, relay: Relay, limits: EngineLimits) -> Engine:
        from homeserve.engine.engine import Engine

        engine = Engine(fleet, limits)
        relay.attach(engine)
        self._stack.push_async_callback(engine.stop)
        await engine.start()
        self._memory.tell(engine)
        self._stack.callback(self._memory.tell_no_more, engine)
        return engine

    def _start_templates(self, checkpoint: Checkpoint, tokenizer: Tokenizer) -> tuple[TemplateHost, Dialect]:
        """The helper comes up beside whatever follows; a request that is faster than it waits for it."""
        from homeserve.models.dialects import USUAL
        from homeserve.text.dialects import dialect_of
        from homeserve.text.fallback_templates import special_tokens, templates_for
        from homeserve.text.templates import TemplateHost

        host = TemplateHost()
        self._stack.push_async_callback(host.stop)
        templates = templates_for(checkpoint.chat_templates, tokenizer)
        host.configure(templates, special_tokens(tokenizer))
        if templates:
            self._prewarmed = self._background(_prewarm(host, templates, special_tokens(tokenizer)))
        return host, dialect_of(templates, USUAL.get(checkpoint.arch, ("", "")))

    def _start_grammars(self, tokenizer: Tokenizer) -> GrammarHost:
        """The helper comes up with the first grammar: many servers never see one."""
        from homeserve.text.grammars import GrammarHost

        host = GrammarHost()
        self._stack.push_async_callback(host.stop)
        special = {token: tokenizer.token_text(token) for token in tokenizer.special_ids}
        host.configure(tokenizer.vocab_size, special)
        return host

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task beside the load, taken down with everything else."""
        task = asyncio.create_task(work)
        task.add_done_callback(told)
        self._stack.push_async_callback(cancel, task)
        return task

    # -------------------------------------------------------------------------------------------------------- telling

    @property
    def _cache(self) -> Path:
        return cache_dir(self.settings, self._environ)

    def _progress(self, stage: str, done_bytes: int | None, total_bytes: int | None) -> None:
        self.progress = LoadProgress(stage, done_bytes, total_bytes)
        self._watcher.on_progress(self.progress)

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

    def _tell_no_drafts(self, why: str, facts: ModelFacts, engine: Engine) -> None:
        """Served without drafting though nobody said so. That a model has no drafting block is no event: most have
        none."""
        if not why or self.settings.draft == "off":
            return
        log.info("served without drafting", extra={"why": why})
        if facts.config.nextn:
            engine.note("no_drafting", text=f"served without drafting: {why}")

    def _image_folder(self, flips: bool) -> str:
        """Of this model alone below `--image-spill`, gone with it; empty without one, and where no layout changes.
        Raises SettingError for a word that can be no folder, in either case."""
        folder = self.settings.image_spill
        if folder is None:
            return ""
        made = make_folder(Path(folder))
        self._stack.callback(remove_folder, made)
        return str(made) if flips else ""


def chosen_plan(
    settings: Settings, facts: ModelFacts, box: Box, environ: Mapping[str, str], told: list[str]
) -> tuple[Settings, Plan, bool]:
    """Which devices serve, and the plan for them: settings that name them, the plan, and whether cards were chosen
    though nobody named any. Raises SettingError, DeviceError, UnsupportedModel, BudgetError.

    Where nobody named any and the plan for the cards of this box does not fit, the CPU is taken. `told` gets a line for
    each card that is left out, and for what the use of the others takes. To be called in a thread.
    """
    from homeserve.cards import choose, told_of, without
    from homeserve.readiness import read as read_drivers
    from homeserve.sizing import plan_of

    choice = choose(settings, facts, box, environ)
    if choice.may_be_cpu:  # what was asked for is opened by its worker, whose error tells
        vendors = sorted({card.vendor for card in choice.cards})
        choice = without(choice, box, read_drivers(vendors, environ))
    told += (*choice.left_out, *choice.told)
    try:
        plan = plan_of(choice.settings, facts, box, among=choice.among)
    except BudgetError as error:
        if not choice.may_be_cpu:
            raise
        cards = " and ".join(told_of(card, box) for card in choice.cards)
        told.append(f"{cards} left out: {error.message}")
        choice = replace(choice, settings=replace(settings, devices="cpu"), cards=())
        plan = plan_of(choice.settings, facts, box)
    if choice.among and choice.cards:
        used = [plan.ceilings.devices[index] for index in plan.ranks]
        choice = replace(choice, settings=replace(choice.settings, devices=",".join(each.id for each in used)))
    return choice.settings, plan, choice.may_be_cpu and bool(choice.cards)


def check_backend(settings: Settings, box: Box, backend: str) -> None:
    """Raises SettingError where the native libraries that a backend needs were not built."""
    if backend in ("auto", "cpu") and box.cpu is not None:
        check_kernels(settings.isa, box.cpu)
    if backend in CARD_BACKENDS:
        check_host_library()


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


def told(task: asyncio.Task[None]) -> None:
    """Nobody waits for a background task: what it died of is logged."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a background task failed", exc_info=error)


async def cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


def _build_tokenizer(checkpoint: Checkpoint, cache: Path) -> Tokenizer:
    from homeserve.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_checkpoint(checkpoint, cache_dir=cache)
    return_freed_heap()
    return tokenizer


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What to tell of several failures at once: the first that we know how to tell, else all of them."""
    known = [error for error in group.exceptions if isinstance(error, HomeserveError)]
    return known[0] if known else group
