"""Load a model and serve it on an OpenAI-compatible HTTP API, until Ctrl-C.

Every option may also stand in the environment (HOMESERVE_PORT for --port) or in homeserve.toml (port = 8000).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from homeserve import log as log_setup
from homeserve import settings as table
from homeserve.commands.report import report
from homeserve.errors import HomeserveError, WorkerError
from homeserve.instances import CANCEL_LIMIT_S, TEARDOWN_LIMIT_S

if TYPE_CHECKING:
    import argparse

    from homeserve.app import App
    from homeserve.settings import Settings

log = logging.getLogger(__name__)

INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    table.add_flags(parser)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    settings = table.check_together(table.resolve(args, environ, os.getcwd()))
    if settings.print_config:
        print(json.dumps(settings.as_json(), indent=2))
        return 0
    table.read_api_keys(settings.api_key_file)
    log_setup.setup(settings.log_format, settings.log_level, texts=settings.log_requests == "full")
    loop = _new_loop()
    code = loop.run_until_complete(_serve(settings, environ))
    _leave(code)


async def _serve(settings: Settings, environ: Mapping[str, str]) -> int:
    """Start, run until a signal or a failure, stop. Returns the exit code."""
    signals = _Signals()
    from homeserve.app import App
    from homeserve.commands.announce import Announcer
    from homeserve.commands.notify import SOCKET, Notifier

    notifier = Notifier(environ.get(SOCKET))
    announcer = Announcer(settings, notifier=notifier)
    for warning in settings.warnings:
        announcer.on_warning(warning)
    app = App(settings, environ, announcer)
    signals.on_second = app.hurry
    try:
        return await _run(app, signals)
    except HomeserveError as error:
        announcer.close()
        return report(error)
    finally:
        announcer.close()
        notifier.stopping()
        await _take_down(app, settings)


async def _run(app: App, signals: _Signals) -> int:
    start = asyncio.create_task(app.start())
    first = asyncio.create_task(signals.first.wait())
    await asyncio.wait({start, first}, return_when=asyncio.FIRST_COMPLETED)
    if not start.done():
        start.cancel()
        await asyncio.wait({start}, timeout=CANCEL_LIMIT_S)
        return INTERRUPTED
    await start
    failed = asyncio.create_task(app.wait_failed())
    await asyncio.wait({failed, first}, return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        # Whatever the reason, a server that served and cannot go on has lost its workers.
        report(failed.result())
        return WorkerError.exit_code
    failed.cancel()
    return 0


async def _take_down(app: App, settings: Settings) -> None:
    try:
        async with asyncio.timeout(settings.leaving_s + TEARDOWN_LIMIT_S):
            await app.stop()
    except TimeoutError:
        log.error("the teardown took too long; leaving without the rest of it")


class _Signals:
    """The first Ctrl-C, SIGTERM or SIGHUP asks to stop; the next one to hurry."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.on_second = self.first.set
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # started under nohup: it shall outlive its terminal
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.first.is_set():
            self.on_second()
        self.first.set()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _leave(code: int) -> NoReturn:
    """End the process here. Everything is taken down; what may still run is a thread that cannot be interrupted (a
    download in a system call), and the interpreter's own way out would wait for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
