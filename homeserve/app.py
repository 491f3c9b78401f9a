"""The composition root: it makes every part in order, hands each what it needs, and takes them down in reverse.

    port ▸ server ▸ the first model (`resident`) ▸ ready

What is of the process is made here: the port, the record for `ps`, the ready file, the server, the corridor. Models
come and go (`model_host`). The port comes first: one that is taken is said at once, and `/health` tells how far the
load is. One `AsyncExitStack` holds what was made: whatever goes wrong, and wherever Ctrl-C strikes, the same unwinding
runs, and no process, name or file is left.

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
from contextlib import AsyncExitStack, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from budget.facts import MIB, Box
from budget.plan import Plan
from budget.probe import Sources, read_box
from homeserve import __version__, log_files
from homeserve.errors import HomeserveError, SettingError
from homeserve.instances import Record, check_ready_file, process_birth, remove_ready_file, write_atomically
from homeserve.memory import MemoryWatch
from homeserve.model_host import ModelHost
from homeserve.resident import cancel, check_backend, first_error, told
from homeserve.server.context import Loaded, LoadProgress, ModelInfo, ServerContext, State
from homeserve.server.port import is_loopback, listen, url_of
from homeserve.settings import Settings, log_dir, read_api_keys, runtime_dir

if TYPE_CHECKING:
    from homeserve.server.application import HttpServer

log = logging.getLogger(__name__)

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
        self._environ = environ
        self._watcher = watcher
        self._began = time.monotonic()
        self._stack = AsyncExitStack()
        self._state = State.LOADING
        self._record: Record | None = None
        self._hurry = asyncio.Event()
        self._unnoticed = False
        """Told to stop, and load balancers may not know it yet."""
        self._memory = MemoryWatch(settings.floor_mib * MIB, self._phase)
        self._models = ModelHost(settings, environ, watcher, self._memory, self._read_box, self._on_models)
        self.context = ServerContext(
            settings,
            state=lambda: self.state.value,
            load=lambda: self.load_progress,
            models=self._models,
            corridor=self._memory.corridor,
            still_takes=lambda: self._unnoticed,
        )

    @property
    def state(self) -> State:
        if self._state is State.READY and self._models.recovering:
            return State.RECOVERING
        return self._state

    @property
    def load_progress(self) -> LoadProgress:
        """Of the load with which the server starts."""
        return self._models.progress if self._state is State.LOADING else LoadProgress("ready")

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
        self._warn_if_texts_are_logged()
        self._clear_ready_file()
        self._open_record(listener, url)
        box = await asyncio.to_thread(self._read_box)
        self._watcher.on_box(box)
        if not settings.wants_cards and not box.cards:  # it will be the CPU: said before a model is fetched
            check_backend(settings, box, settings.backend)
        self._stack.push_async_callback(self._models.stop)
        first = await self._load_and_serve(listener, box)
        gc.freeze()  # what a start made stays for good: collections while serving need not walk through it
        self._state = State.READY
        self._on_models()
        self._write_ready_file(url, listener, first.model)
        seconds = time.monotonic() - self._began
        # In text a person has just been told.
        level = logging.INFO if settings.log_format == "json" else logging.DEBUG
        log.log(level, "ready", extra={"url": url, "model": first.model.id, "seconds": round(seconds, 3)})
        self._watcher.on_ready(url, first.model, seconds)
        self._background(self._tell_measured(first))

    async def _load_and_serve(self, listener: socket.socket, box: Box) -> Loaded:
        """The load, and beside it the server that tells of it.

        Importing the server takes as long as a worker's start, so the worker is spawned first; a model that is not
        found by then has to be fetched, and the server no longer waits for it.
        """
        try:
            async with asyncio.TaskGroup() as group:
                load = group.create_task(self._models.load_first(box))
                spawned = group.create_task(self._models.first.spawned.wait())
                await asyncio.wait({load, spawned}, timeout=HEAD_START_S, return_when=asyncio.FIRST_COMPLETED)
                spawned.cancel()
                await self._start_server(listener)
        except BaseExceptionGroup as failures:
            raise first_error(failures) from None
        return load.result()

    async def _start_server(self, listener: socket.socket) -> None:
        application = await asyncio.to_thread(import_module, "homeserve.server.application")
        server: HttpServer = application.HttpServer(self.context)
        self._stack.push_async_callback(server.stop)
        await server.start(listener)

    def _read_box(self) -> Box:
        return read_box(Sources(cards=self.settings.cards_root or None))

    def _phase(self) -> str:
        """What the corridor's samples are marked with: of a load its stage, else the state. Called in the sampler's
        thread."""
        state = self.state
        return self.load_progress.stage if state is State.LOADING else self._models.stage or state.value

    def _on_models(self) -> None:
        """Other models are in than before."""
        for hear in self.context.on_models:
            hear()
        if self._state is State.READY:
            self._write_record("ready", ", ".join(each.model.id for each in self._models.loaded))

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        """A task beside the start, taken down with everything else."""
        task = asyncio.create_task(work)
        task.add_done_callback(told)
        self._stack.push_async_callback(cancel, task)

    async def _tell_measured(self, first: Loaded) -> None:
        """Predicted against measured, once every process that the plan counts is there."""
        await self._models.first.whole()
        self._watcher.on_measured((await first.budget.as_json())["measured"])

    # -------------------------------------------------------------------------------------------------- while ready

    async def wait_failed(self) -> HomeserveError:
        """Returns the reason when the server cannot go on; waits for ever otherwise."""
        return await self._models.wait_failed()

    def hurry(self) -> None:
        """Cut open requests off instead of waiting for them."""
        self._hurry.set()

    # --------------------------------------------------------------------------------------------------------- stop

    async def stop(self) -> None:
        """Be seen to leave (for `--drain-delay-s`), let open requests end (for `--drain-timeout-s`), either until
        `hurry`; then take everything down in reverse."""
        was_ready, self._state = self._state is State.READY, State.DRAINING
        if was_ready:
            self._remove_ready_file()
        try:
            if was_ready:
                self._write_record("draining")
                await self._wait_noticed(self.settings.drain_delay_s)
                await self._models.drain(self.settings.drain_timeout_s, self._hurry)
        finally:
            await self._stack.aclose()

    async def _wait_noticed(self, delay_s: float) -> None:
        """Requests are still taken while `/ready` says 503, so that nobody is sent here who would be refused."""
        self._unnoticed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._hurry.wait()
        self._unnoticed = False

    # ------------------------------------------------------------------------------------------- records and files

    def _warn_if_open(self, listener: socket.socket) -> None:
        if not read_api_keys(self.settings.api_key_file) and not is_loopback(listener):
            self._watcher.on_warning(
                f"everybody who reaches {listener.getsockname()[0]} can use this server: no --api-key-file is set"
            )

    def _warn_if_texts_are_logged(self) -> None:
        if self.settings.log_requests == "full":
            self._watcher.on_warning("--log-requests full: prompts and answers of all users are written to the log")

    def _open_record(self, listener: socket.socket, url: str) -> None:
        port = listener.getsockname()[1]
        settings = self.settings
        self._record = Record(
            runtime_dir(self._environ), port, url, settings.model or "", drain_timeout_s=settings.leaving_s
        )
        self._stack.callback(self._record.remove)
        self._open_log(port, url)
        self._write_record("loading")

    def _open_log(self, port: int, url: str) -> None:
        """The log for `homeserve logs`. A folder that cannot be written costs that, not the server."""
        folder = log_dir(self.settings.log_dir, self._environ)
        if folder is None:
            return
        try:
            kept = log_files.LogFile(folder, port, texts=self.settings.log_requests == "full")
        except OSError as error:
            log.warning("homeserve logs will not show this server", extra={"why": str(error)})
            return
        self._stack.callback(kept.close)
        logging.getLogger().addHandler(kept)
        begin = {"version": __version__, "pid": os.getpid(), "url": url}
        kept.handle(log.makeRecord(log.name, logging.INFO, "", 0, "the server begins", (), None, extra=begin))
        log_files.prune(kept.path, lambda pid: process_birth(pid) is not None)
        assert self._record is not None
        self._record.keeps_log(kept.path)

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
