"""Where a figure comes from: how the run is repeated, on which commit, day and processor."""

from __future__ import annotations

import argparse
import datetime
import platform
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def command(options: argparse.Namespace) -> str:
    """How the run is repeated, without paths."""
    words = ["scripts/bench"]
    if options.peer:
        words += ["--peer", Path(options.peer).name, "--full" if options.full else "--quick"]
    words += ["--model", Path(options.model).name] if options.model else []
    for name in ("models", "tests", "isa"):
        words += [f"--{name}", value] if (value := getattr(options, name)) else []
    return " ".join(words)


def today() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def commit() -> str:
    """Of the checkout, when first asked: it may move on while a run takes its hours."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
