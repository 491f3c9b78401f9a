"""Display controllers on the PCI bus: what a graphics card says of itself before any driver speaks.

This is the safety net of the probe. A card that NVML or amdgpu did not report (a laptop's second GPU without a driver,
a card handed to a virtual machine, an Intel one) is on the bus all the same; it is listed with what is known, which
may be no more than its name. The address is what cards are told apart by: a card that a driver did report is not
listed again.

The link: an endpoint's own figures are not the truth. Many cards have a bridge of their own, behind which the chip
claims whatever its designers liked (Intel: 2.5 GT/s x1; AMD: full speed whatever the slot). What card and slot agree on
is the least of the best that every port above the card's own bridge can do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass

from budget.facts import Card, Link
from budget.tree import Tree, whole

NVIDIA, AMD, INTEL = 0x10DE, 0x1002, 0x8086
VENDORS = {NVIDIA: "nvidia", AMD: "amd", INTEL: "intel"}
ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")

_DEVICES = "sys/bus/pci/devices"
_NO_COMPUTE = {
    0x1A03: "ASPEED", 0x102B: "Matrox", 0x1234: "QEMU", 0x1AF4: "virtio", 0x1B36: "QXL", 0x1013: "Cirrus",
    0x15AD: "VMware", 0x80EE: "VirtualBox", 0x1414: "Hyper-V", 0x19E5: "Hisilicon", 0x5333: "S3", 0x1A0A: "loongson",
}  # fmt: skip
"""Adapters that only draw: a server's management console, a virtual screen. They are no device for a model."""
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""GT/s of a lane -> PCIe generation."""
_NAME_FILES = ("usr/share/misc/pci.ids", "usr/share/hwdata/pci.ids")


@dataclass(frozen=True)
class Controller:
    """A display controller as the bus shows it."""

    pci: str
    vendor: int
    device: int | None
    driver: str | None

    @property
    def folder(self) -> str:
        return f"{_DEVICES}/{self.pci}"


def address(text: str | None) -> str | None:
    """A PCI address as sysfs writes it (0000:01:00.0), from any spelling of it; None for what is none."""
    match = re.fullmatch(
        r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([01]?[0-9a-f])(?:\.([0-7]))?", (text or "").strip().lower()
    )
    if match is None:
        return None
    domain, bus, device, function = (int(part or "0", 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"


def controllers(tree: Tree) -> list[Controller]:
    """Display controllers (class 03) and AMD's accelerators (class 12), in the order of the bus."""
    found = []
    for name in sorted(tree.names(_DEVICES, ADDRESS.pattern)):
        folder = f"{_DEVICES}/{name}"
        kind, vendor = tree.number(f"{folder}/class") or 0, tree.number(f"{folder}/vendor")
        if vendor is None or not (kind >> 16 == 0x03 or (kind >> 16 == 0x12 and vendor == AMD)):
            continue
        found.append(Controller(name, vendor, tree.number(f"{folder}/device"), tree.link(f"{folder}/driver")))
    return found


def other_cards(tree: Tree, reported: Collection[str]) -> list[Card]:
    """Cards of the bus whose address no driver reported; what is not known of them is a doubt."""
    left = [card for card in controllers(tree) if card.pci not in reported and card.vendor not in _NO_COMPUTE]
    return [_intel(tree, one) if one.vendor == INTEL else _silent(tree, one) for one in left]


def name_of(tree: Tree, vendor: int, device: int | None) -> str | None:
    """A card's name by the system's list of PCI names, where it has one."""
    if device is None:
        return None
    for path in _NAME_FILES:
        text = tree.text(path)
        section = re.search(rf"^{vendor:04x}  .*\n((?:[\t#].*\n|\n)*)", text, re.M) if text else None
        line = re.search(rf"^\t{device:04x}  (.*)$", section.group(1), re.M) if section else None
        if line:
            bracketed = re.search(r"\[(.+)\]", line.group(1))
            return bracketed.group(1) if bracketed else line.group(1).strip()
    return None


def numa_node(tree: Tree, pci: str) -> int | None:
    """The memory node next to a card; None where the board does not say (the kernel writes -1)."""
    node = tree.number(f"{_DEVICES}/{pci}/numa_node")
    return node if node is not None and node >= 0 else None


def link(tree: Tree, folder: str) -> Link | None:
    """The best link that the card at `folder` and its slot agree on; None where nothing tells."""
    generations, widths = _least(tree, folder, "max")
    if generations is None and widths is None:
        generations, widths = _least(tree, folder, "current")
        if generations is not None:
            tree.doubt(
                f"{folder}/max_link_speed", "is not there; an idle card's current link is slow", "the current one"
            )
    return None if generations is None and widths is None else Link(generations, widths)


def _least(tree: Tree, folder: str, which: str) -> tuple[int | None, int | None]:
    ports = _ports(tree, folder)
    generations = [found for port in ports if (found := _generation(tree, f"{port}/{which}_link_speed"))]
    widths = [found for port in ports if (found := _width(tree, f"{port}/{which}_link_width"))]
    return min(generations, default=None), min(widths, default=None)


def _ports(tree: Tree, folder: str) -> list[str]:
    """The card and the ports above it, by the folders that sysfs nests them in.

    Where the two bridges above the chip are of its own maker and a root port stands above them, they are the card's:
    the chip and the lower one are inside of the card, and their figures are left out.
    """
    real = os.path.realpath(tree.path(folder))
    inside = os.path.relpath(real, os.path.realpath(tree.root)).split(os.sep)
    ports = ["/".join(inside[: n + 1]) for n, part in enumerate(inside) if ADDRESS.fullmatch(part)]
    if ".." in inside or not ports:
        return [folder]
    makers = {tree.number(f"{port}/vendor") for port in ports[-3:]}
    return ports[:-2] if len(ports) >= 4 and len(makers) == 1 and None not in makers else ports


def _generation(tree: Tree, name: str) -> int | None:
    match = re.match(r"([0-9]{1,3}(?:\.[0-9])?) GT/s", tree.line(name) or "")
    return _GENERATIONS.get(float(match.group(1))) if match else None


def _width(tree: Tree, name: str) -> int | None:
    width = whole((tree.line(name) or "").removeprefix("x"))
    return width if width is not None and 0 < width <= 32 else None


def _intel(tree: Tree, one: Controller) -> Card:
    """i915 and xe tell the size of a card's own memory; a GPU that is part of the processor has none."""
    total = _intel_memory(tree, one)
    unified = total is None and one.pci.startswith("0000:00:")
    if total is None:
        what = "shares the host's memory" if unified else f"says no size of its memory (driver: {one.driver or 'none'})"
        tree.doubt(one.folder, f"the Intel GPU {what}", "its memory is unknown")
    best = None if unified else link(tree, one.folder)
    return Card(
        vendor="intel",
        id=one.pci,
        name=_name(tree, one),
        unified=unified,
        total_bytes=total,
        # The chip behind the card's bridge always claims this.
        link=None if best == Link(1, 1) else best,
        pci=one.pci,
        numa_node=numa_node(tree, one.pci),
    )


def _intel_memory(tree: Tree, one: Controller) -> int | None:
    folders = [one.folder]
    folders += [f"sys/class/drm/{name}" for name in tree.names("sys/class/drm", r"card[0-9]+") if _is(tree, name, one)]
    sizes = [tree.number(f"{folder}/lmem_total_bytes") or 0 for folder in folders]
    tiles = tree.names(one.folder, r"tile[0-9]+")
    return max(*sizes, sum(tree.number(f"{one.folder}/{tile}/physical_vram_size_bytes") or 0 for tile in tiles)) or None


def _silent(tree: Tree, one: Controller) -> Card:
    """A card of which no driver told anything."""
    vendor = VENDORS.get(one.vendor, "other")
    driver = f"its driver is {one.driver}" if one.driver else "it has no driver"
    tree.doubt(
        one.folder, f"{_name(tree, one)} is on the bus, {driver}; nothing says its memory", "its memory is unknown"
    )
    return Card(vendor=vendor, id=one.pci, name=_name(tree, one), pci=one.pci, numa_node=numa_node(tree, one.pci))


def _is(tree: Tree, drm: str, one: Controller) -> bool:
    return os.path.basename(os.path.realpath(tree.path(f"sys/class/drm/{drm}/device"))) == one.pci


def _name(tree: Tree, one: Controller) -> str:
    maker = {NVIDIA: "NVIDIA", AMD: "AMD", INTEL: "Intel"}.get(one.vendor, "graphics card of vendor")
    number = f"{one.vendor:04x}:{one.device:04x}" if one.device is not None else f"{one.vendor:04x}"
    name = name_of(tree, one.vendor, one.device)
    return f"{maker} {name} ({number})" if name else f"{maker} ({number})"
