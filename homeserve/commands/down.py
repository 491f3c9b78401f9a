"""Stop a server: open requests are answered first (for its --drain-timeout-s).

A server that hangs beyond that is killed, which is an error: exit code 3.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from homeserve.errors import SettingError
from homeserve.instances import Instance, is_alive, running, stop
from homeserve.settings import Option, runtime_dir

if TYPE_CHECKING:
    import argparse

KILLED = 3
"""Exit code where a server had to be killed: its open requests were cut off."""

_PORT = Option("int", "", "", low=1, high=65535)
_WAIT = Option("float", "", "", low=0, high=86400)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--port", metavar="N", help="the server on this port")
    which.add_argument("--all", action="store_true", help="every server of this user")
    parser.add_argument(
        "--wait-s", metavar="S", help="kill it after so many seconds (default: when its drain must be over)"
    )


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    port = None if args.port is None else int(_PORT.convert(args.port, "--port", "port"))
    wait_s = None if args.wait_s is None else float(_WAIT.convert(args.wait_s, "--wait-s", "wait_s"))
    folder = runtime_dir(environ)
    meant = choose(running(folder), port, args.all)
    if not meant:
        print("no server runs")
    ended = [_stop(instance, wait_s) for instance in meant]
    if all(ended):
        return 0
    _sweep(folder)
    return KILLED


def _stop(instance: Instance, wait_s: float | None) -> bool:
    """Stop one server and say how it went. False when it had to be killed."""
    name = f"{instance.url} (pid {instance.pid})"
    patience_s = instance.patience_s if wait_s is None else wait_s
    if stop(instance, patience_s=patience_s):
        print(f"stopped {name}")
        return True
    outcome = "SIGKILL does not end it either" if is_alive(instance) else "killed"
    print(f"{name} did not end in {patience_s:g} s: {outcome}", file=sys.stderr)
    return False


def _sweep(folder: Path) -> None:
    """Remove what killed servers could not remove themselves: their records and their shared memory."""
    from homeserve.wire import segments

    running(folder)
    segments.sweep()


def choose(found: list[Instance], port: int | None, everything: bool) -> list[Instance]:
    """The servers that are meant. Raises SettingError where that is none, or not clear."""
    if everything:
        return found
    ports = ", ".join(str(instance.port) for instance in found)
    if port is not None:
        meant = [instance for instance in found if instance.port == port]
        if not meant:
            there = f"there is: {ports}" if found else "no server runs"
            raise SettingError(
                f"no server of this user runs on port {port}; {there}", field="port", fix="see homeserve ps"
            )
        return meant
    if not found:
        raise SettingError("no server runs", field="port", fix="see homeserve ps")
    if len(found) > 1:
        raise SettingError(
            f"{len(found)} servers run, on the ports {ports}", field="port", fix="name one with --port, or use --all"
        )
    return found
