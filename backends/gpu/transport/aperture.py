"""Windows of cards, through which peers write to them: how wide they are, and a ledger of what is mapped through each.

A card shows its memory to the bus through a window: BAR 1 of an NVIDIA card, BAR 0 of an AMD one. All that peers map
of a card takes room in it, of every transport that lives; both layouts of a fleet that flips share one transport, so
its mailboxes are there once. What a window allows is `budget.aperture`'s to say; here it is asked before anything is
mapped.

The width is read from sysfs, where it is true on bare metal. A virtual machine shows its own window: a width is a
reason against copies between cards, never one for them.
"""

from __future__ import annotations

from pathlib import Path

from backends.gpu.arch import Vendor
from budget.aperture import check_groups

BUS = Path("/sys/bus/pci/devices")
WINDOW_BAR: dict[Vendor, int] = {"nvidia": 1, "amd": 0}
"""Which of a card's resources is its window."""
OTHERS_BYTES = 40 << 20
"""What the driver itself keeps: of a window of 256 MiB 216 were usable."""


def window_bytes(pci: str, vendor: Vendor, bus: Path = BUS) -> int | None:
    """Bytes of the window of the card at a PCI address; None where the system does not tell."""
    try:
        lines = (bus / pci.lower() / "resource").read_text().splitlines()
        first, last, _ = (int(word, 16) for word in lines[WINDOW_BAR[vendor]].split())
    except (OSError, ValueError, IndexError):
        return None
    return last - first + 1 if last > first else None


class Apertures:
    """What is mapped of one card, in groups: the mailboxes of each transport. `window` None: unknown, and then the
    card's memory bounds it."""

    def __init__(self, window: int | None, total_bytes: int) -> None:
        self._usable = max(0, (window if window is not None else total_bytes) - OTHERS_BYTES)
        self._groups: list[int] = []

    @property
    def mapped_bytes(self) -> int:
        return sum(self._groups)

    def refusal(self, nbytes: int) -> str:
        """Why `nbytes` more cannot be mapped, with the arithmetic; empty: they can."""
        return check_groups([*self._groups, nbytes], self._usable) or ""

    def add(self, nbytes: int) -> None:
        """Raises ValueError with the arithmetic, and nothing is mapped then."""
        refused = self.refusal(nbytes)
        if refused:
            raise ValueError(refused)
        self._groups.append(nbytes)

    def remove(self, nbytes: int) -> None:
        self._groups.remove(nbytes)


def is_narrow(window: int | None, total_bytes: int) -> bool:
    """Whether a window is known to be smaller than the memory behind it."""
    return window is not None and window < total_bytes
