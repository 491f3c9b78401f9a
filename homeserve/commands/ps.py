"""List the servers of this user that run on this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from homeserve.instances import Instance, running
from homeserve.settings import runtime_dir

if TYPE_CHECKING:
    import argparse

_COLUMNS = ("PID", "PORT", "STATE", "UP", "URL", "MODEL")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print [{pid, port, url, model, state, started}]")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    found = running(runtime_dir(environ))
    if args.json:
        print(json.dumps([instance.as_json() for instance in found]))
    elif not found:
        print("no server runs; start one with: homeserve up")
    else:
        print(table(found, time.time()))
    return 0


def table(found: list[Instance], now: float) -> str:
    rows = [_COLUMNS]
    for instance in found:
        up = duration(max(0.0, now - instance.started))
        rows.append((str(instance.pid), str(instance.port), instance.state, up, instance.url, instance.model))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"
