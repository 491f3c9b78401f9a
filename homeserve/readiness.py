"""What the drivers of this machine say of its cards, asked of a helper process with a deadline.

The engine process opens no device. Where it has to know beforehand whether cards can be used at all (an automatic
choice, `doctor`), a helper opens the drivers, says what it found and ends (`python -m backends.gpu.readiness`). One
that hangs is killed at the deadline, which is an answer too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from homeserve.wire.children import environment

DEADLINE_S = 20.0
"""A driver without persistence takes seconds to start."""


@dataclass(frozen=True)
class SeenCard:
    """A card that its driver shows. None: the driver does not say."""

    uuid: str
    pci: str
    name: str
    arch: str | None
    virtual_memory: bool | None


@dataclass(frozen=True)
class Readiness:
    """Of one vendor. `missing`: (what, fix) of each thing without which none of its cards can be used."""

    driver: str | None = None
    compiler: str | None = None
    cards: tuple[SeenCard, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()

    def sees(self, card_id: str, pci: str | None) -> SeenCard | None:
        """The card of a UUID or an address."""
        names = {card_id.lower(), (pci or card_id).lower()}
        return next((card for card in self.cards if {card.uuid.lower(), card.pci.lower()} & names), None)


def read(vendors: Sequence[str], environ: Mapping[str, str], deadline_s: float = DEADLINE_S) -> dict[str, Readiness]:
    """By vendor (nvidia, amd). Never raises for what a driver does: that is something missing."""
    if not vendors:
        return {}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "backends.gpu.readiness", *vendors],
            env=environment(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _all(vendors, f"the driver did not answer within {deadline_s:g} s", _HANGS)
    except OSError as error:
        return _all(vendors, f"no helper process could be started: {error.strerror}", "free some memory or processes")
    try:
        told = json.loads(done.stdout.splitlines()[-1])
        return {vendor: _of(told[vendor]) for vendor in vendors}
    except (ValueError, KeyError, IndexError, TypeError):
        how = f"status {done.returncode}" if done.returncode >= 0 else f"signal {-done.returncode}"
        words = (done.stderr.strip().splitlines() or ["nothing"])[-1][:300]
        return _all(vendors, f"the process that asked the driver ended with {how} and said: {words}", _HANGS)


_HANGS = "look at what the kernel says of the card (dmesg), and restart the machine; or use --devices cpu"


def _all(vendors: Sequence[str], what: str, fix: str) -> dict[str, Readiness]:
    return {vendor: Readiness(missing=((what, fix),)) for vendor in vendors}


def _of(told: Mapping[str, Any]) -> Readiness:
    cards = tuple(
        SeenCard(each["uuid"], each["pci"], each["name"], each["arch"], each["virtual_memory"])
        for each in told["cards"]
    )
    return Readiness(
        told["driver"], told["compiler"], cards, tuple((each["what"], each["fix"]) for each in told["missing"])
    )
