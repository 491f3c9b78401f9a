"""Talk to a model in the terminal: with the server at --url, with the one that runs, or with a temporary one.

`--prompt TEXT` asks one question and prints the answer alone. Without it a conversation goes on until Ctrl-D: Enter
sends, Alt-Enter or Ctrl-J begins a line, Ctrl-C cuts an answer short, /help lists what else there is.
"""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import signal
import sys
from collections.abc import Coroutine, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from homeserve.chat.client import Client
from homeserve.chat.conversation import Conversation
from homeserve.chat.echo import Echo
from homeserve.chat.fields import FIELDS
from homeserve.chat.line import EditedLines, History, Lines, PipedLines, can_edit
from homeserve.chat.screen import PlainScreen, RichScreen, Screen
from homeserve.chat.session import Session
from homeserve.commands.reach import first_key, running_urls
from homeserve.commands.temporary import TemporaryServer
from homeserve.errors import SettingError
from homeserve.settings import state_dir

if TYPE_CHECKING:
    import argparse

INTERRUPTED = 130
HISTORY = "chat_history"
COLUMNS_LEAST = 20
_ENDING = (signal.SIGTERM, signal.SIGHUP)
"""What ends a chat wherever it is; the second is what comes when its window is closed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="for a temporary server (default: the default model)")
    parser.add_argument("--url", metavar="URL", help="server to talk to, such as http://127.0.0.1:8000")
    parser.add_argument("--prompt", metavar="TEXT", help="ask this, print the answer to stdout, and leave")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--temperature", metavar="T", help="0 is always the likeliest token (default: the server's)")
    parser.add_argument("--max-tokens", metavar="N", help="longest answer")
    parser.add_argument("--plain", action="store_true", help="show answers as they are written, not as Markdown")
    parser.add_argument("--quiet", action="store_true", help="no line of numbers behind an answer")
    parser.add_argument("--api-key-file", metavar="FILE", help="its first key is sent")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    if args.url and args.model:
        raise SettingError("MODEL is for a temporary server, and --url names one", field="url", fix="leave one out")
    if args.url and not args.url.startswith(("http://", "https://")):
        raise SettingError(f"--url {args.url}: is no URL", field="url", fix="give one such as http://127.0.0.1:8000")
    fields = _fields(args)
    _any_text()
    for number in (signal.SIGINT, *_ENDING):
        signal.signal(number, _stop_here)
    with ExitStack() as stack:
        url = args.url or _found_url(stack, environ, args.model)
        loop = asyncio.new_event_loop()
        stack.callback(loop.close)
        alone = args.prompt is not None
        client = Client(url, first_key(args.api_key_file, environ))
        session = Session(
            client,
            _screen(environ, plain=args.plain or alone),
            _Runner(loop),
            conversation=Conversation(_typed(args.system or "")),
            fields=fields,
            environ=environ,
            width=lambda: max(COLUMNS_LEAST, shutil.get_terminal_size().columns),
            quiet=args.quiet or alone or not sys.stdin.isatty(),
        )
        if alone:
            return 0 if session.ask(_typed(args.prompt)) else INTERRUPTED
        print(f"talking to {client.url}; /help lists what it knows, Ctrl-D leaves", file=sys.stderr)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            session.converse(_lines(environ))
        finally:
            signal.signal(signal.SIGINT, _stop_here)
        return 0


class _Runner:
    """Runs a coroutine so that a signal cuts it short: a request is aborted by closing its connection. Behind Ctrl-C a
    conversation goes on, behind others it does not."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, work: Coroutine[Any, Any, None]) -> bool:
        task = self._loop.create_task(work)
        caught: list[int] = []
        before = signal.getsignal(signal.SIGINT)

        def cut(number: int) -> None:
            caught.append(number)
            task.cancel()

        for number in (signal.SIGINT, *_ENDING):
            self._loop.add_signal_handler(number, cut, number)
        try:
            self._loop.run_until_complete(task)
        except asyncio.CancelledError:
            if set(caught) & set(_ENDING):
                raise SystemExit(INTERRUPTED) from None
            return False
        finally:
            for number in (signal.SIGINT, *_ENDING):
                self._loop.remove_signal_handler(number)
                signal.signal(number, _stop_here)
            signal.signal(signal.SIGINT, before)
        return True


def _screen(environ: Mapping[str, str], *, plain: bool) -> Screen:
    """Markdown where a terminal can show it."""
    if plain or not sys.stdout.isatty() or environ.get("TERM", "") in ("", "dumb"):
        return PlainScreen(sys.stdout, sys.stderr)
    from rich.console import Console

    return RichScreen(Console(file=sys.stdout), Echo(sys.stdin.fileno()))


def _lines(environ: Mapping[str, str]) -> Lines:
    if can_edit(environ):
        return EditedLines(History(state_dir(environ) / HISTORY, _warn), environ)
    return PipedLines(sys.stdin, sys.stderr if sys.stdin.isatty() else None)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def _any_text() -> None:
    """What the locale has no byte for is shown as ?, and what it cannot read is no reason to end."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _typed(text: str) -> str:
    """An argument, also where the locale has no such characters: a terminal's bytes are UTF-8 all the same."""
    return os.fsencode(text).decode(errors="replace")


def _stop_here(number: int, frame: object) -> None:
    """Between two answers a signal ends the command by the ordinary way out, which stops a temporary server."""
    raise SystemExit(INTERRUPTED)


def _found_url(stack: ExitStack, environ: Mapping[str, str], model: str | None) -> str:
    """The newest server that is ready; a temporary one where there is none, or a model was asked for by name."""
    ready = running_urls(environ)
    if ready and model is None:
        return ready[0]
    why = f"MODEL is named, so {ready[0]} is not asked" if ready else "no server runs"
    server = TemporaryServer(model)
    stack.callback(server.stop)
    print(f"{why}; starting a temporary one …", file=sys.stderr, flush=True)
    return server.start()


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    given = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    return {
        name: FIELDS[name].convert(text, f"--{name.replace('_', '-')}", name)
        for name, text in given.items()
        if text is not None
    }
