"""Where a figure comes from: on which commit and day, and how busy the machine was."""

from __future__ import annotations

import datetime
import os
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout, where this is one."""
QUIET_SHARE, QUIET_LEAST = 0.25, 0.5
"""A machine whose load average is below this share of its cores, or below this, counts as quiet."""


def today() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")


@cache
def commit() -> str | None:
    """Of the checkout that this package lies in, when first asked: it may move on while a run takes its hours. None for
    an installed package: a folder above it may be somebody else's repository."""
    if not (ROOT / ".git").exists():
        return None
    ask = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


@dataclass(frozen=True)
class Quiet:
    """How busy the machine was before a run: its load average of the last minute, beside its cores."""

    load_average: float
    cores: int

    @property
    def quiet(self) -> bool:
        return self.load_average < max(QUIET_LEAST, QUIET_SHARE * self.cores)

    def as_json(self) -> dict[str, object]:
        return {"quiet": self.quiet, "load_average": round(self.load_average, 2), "cores": self.cores}


def quietness(cores: int) -> Quiet:
    return Quiet(os.getloadavg()[0], cores)
