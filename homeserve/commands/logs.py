"""Show the log of a server that runs, or of the last one that ran.

Each server keeps its log in a file of bounded size (up --log-dir), whether it was started in a terminal, in a container
or as a service; what it writes is also on its stderr.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from budget.page import safe
from homeserve import log_files
from homeserve import settings as table
from homeserve.commands.down import choose
from homeserve.errors import SettingError
from homeserve.instances import Instance, is_alive, running
from homeserve.settings import Option, runtime_dir

if TYPE_CHECKING:
    import argparse

POLL_S = 0.2
LINES = 50

_PORT = Option("int", "", "", low=1, high=65535)
_LINES = Option("int", "", "", low=0, high=1 << 20)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", metavar="N", help="the server on this port, or the last one that was")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what is logged, until the server ends")
    parser.add_argument("-n", "--lines", metavar="N", help=f"how many of the last lines (default: {LINES})")
    parser.add_argument("--json", action="store_true", help="print the lines as they are kept: JSON, times in UTC")
    parser.add_argument("--log-dir", metavar="DIR", help="folder of the logs (default: as up has it)")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    import argparse

    port = None if args.port is None else int(_PORT.convert(args.port, "--port", "port"))
    lines = LINES if args.lines is None else int(_LINES.convert(args.lines, "--lines", "lines"))
    settings = table.resolve(argparse.Namespace(log_dir=args.log_dir), environ, os.getcwd())
    path, instance = find(running(runtime_dir(environ)), table.log_dir(settings.log_dir, environ), port)
    if instance is None and not args.json:
        print(f"note: no such server runs; this is the log of the last one: {path}", file=sys.stderr)
    show = _as_json if args.json else _as_text
    try:
        with closing(log_files.Follower(path)) as follower:
            for line in follower.before(lines):
                show(line)
            if args.follow and instance is not None:
                follow(follower, lambda: is_alive(instance), show)
    except OSError as error:
        if error.filename is None:
            raise  # stdout
        raise SettingError(f"{path}: cannot be read: {error.strerror}", field="log_dir") from None
    return 0


def find(found: list[Instance], folder: Path | None, port: int | None) -> tuple[Path, Instance | None]:
    """The log that is meant, and the server that writes it; None: it has ended. Raises SettingError."""
    if any(port in (None, each.port) for each in found):
        (instance,) = choose(found, port, everything=False)
        if not instance.log:
            why = f"the server on port {instance.port} keeps no log"
            raise SettingError(why, field="log_dir", fix="its stderr has it; start it without --log-dir off")
        return Path(instance.log), instance
    if folder is None:
        raise SettingError("no server runs, and --log-dir off keeps no logs", field="log_dir", fix="name a folder")
    for path in log_files.files(folder):
        name = log_files.Name.of(path)
        if name is not None and port in (None, name.port):
            return path, None
    which = "no server" if port is None else f"no server on port {port}"
    raise SettingError(f"{which} runs or has left a log in {folder}", field="port", fix="see homeserve ps")


def follow(
    follower: log_files.Follower,
    alive: Callable[[], bool],
    show: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Show what comes, until the server has ended and all of it is shown."""
    while True:
        last = not alive()
        for line in follower:
            show(line)
        if last:
            return
        sys.stdout.flush()
        pause(POLL_S)


def _as_json(line: str) -> None:
    print(line)


def _as_text(line: str) -> None:
    print(safe(log_files.as_text(line)))
