"""Stop a server: open requests are answered first, and a server that does not end in time is killed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from homeserve.errors import SettingError
from homeserve.instances import Instance, running, stop
from homeserve.settings import Option, runtime_dir

if TYPE_CHECKING:
    import argparse

_PATIENCE_S = 45.0
"""Longer than a server's own default --drain-timeout-s, so that a drain is not cut short."""

_PORT = Option("int", "", "", low=1, high=65535)
_WAIT = Option("float", "", "", low=0, high=86400)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--port", metavar="N", help="the server on this port")
    which.add_argument("--all", action="store_true", help="every server of this user")
    parser.add_argument("--wait-s", metavar="S", help=f"kill it after so many seconds (default: {_PATIENCE_S:g})")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    port = None if args.port is None else int(_PORT.convert(args.port, "--port", "port"))
    patience_s = _PATIENCE_S if args.wait_s is None else float(_WAIT.convert(args.wait_s, "--wait-s", "wait_s"))
    folder = runtime_dir(environ)
    meant = choose(running(folder), port, args.all)
    if not meant:
        print("no server runs")
    for instance in meant:
        if stop(instance, patience_s=patience_s):
            print(f"stopped {instance.url} (pid {instance.pid})")
        else:
            print(f"{instance.url} (pid {instance.pid}) did not end in {patience_s:g} s: killed", file=sys.stderr)
    running(folder)  # sweeps the records of those that could not remove their own
    return 0


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
