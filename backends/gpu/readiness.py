"""What a vendor's cards need of this machine, in a process of its own: `python -m backends.gpu.readiness amd`.

A driver that is opened may hang, take seconds, or keep memory; the engine process never opens one. So whoever wants to
know, before a worker is started or to tell a person what is missing, runs this module with a deadline and reads the one
JSON line that it prints: for each vendor

    driver     title and version, or null
    compiler   title and version of the library that compiles kernels, or null
    cards      {uuid, pci, name, arch, virtual_memory} of each card that the driver shows; what it does not say is null
    missing    {what, fix} of each thing without which no card of the vendor can be used
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, cast

from backends.gpu import jit
from backends.gpu.arch import Vendor
from backends.gpu.driver import Driver, Identity, open_driver
from backends.gpu.errors import DriverError, GpuError

VENDORS: tuple[Vendor, ...] = ("nvidia", "amd")


def examine(vendor: Vendor) -> dict[str, Any]:
    """What the module says of one vendor."""
    found: dict[str, Any] = {"driver": None, "compiler": None, "cards": [], "missing": []}

    def lacks(error: GpuError) -> None:
        found["missing"].append({"what": error.message, "fix": error.fix})

    major = None
    try:
        driver = open_driver(vendor)
        found["driver"] = f"{driver.names.title} {driver.version_text}"
        major = driver.version // 1000 if vendor == "nvidia" else None
        found["cards"] = [_card(driver, each) for each in driver.identities()]
    except GpuError as error:
        lacks(error)
    try:
        found["compiler"] = jit.find(vendor, major).title
    except GpuError as error:
        lacks(error)
    return found


def main(words: Sequence[str]) -> int:
    if not words or not set(words) <= set(VENDORS):
        sys.stderr.write(f"usage: python -m backends.gpu.readiness {' | '.join(VENDORS)} ...\n")
        return 2
    print(json.dumps({word: examine(cast(Vendor, word)) for word in words}))
    return 0


def _card(driver: Driver, card: Identity) -> dict[str, Any]:
    try:
        arch: str | None = driver.arch_name(card.index)
        memory: bool | None = bool(driver.attribute(driver.names.attributes.virtual_memory, card.index))
    except DriverError:
        arch = memory = None
    return {"uuid": card.uuid, "pci": card.pci, "name": card.name, "arch": arch, "virtual_memory": memory}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
