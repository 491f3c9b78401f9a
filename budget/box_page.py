"""A box for a person: the host, a line for each device, what is in doubt, within 100 columns."""

from __future__ import annotations

from collections.abc import Sequence

from budget.asides import doubt_lines
from budget.disk import DiskRate
from budget.facts import GIB, Box, Card, CpuFacts, MemoryFacts
from budget.page import Column, Style, mib, table, wrapped

_HEAD = 8
_ENVIRONMENTS = {
    "bare": "no hypervisor, no container",
    "vm": "a virtual machine",
    "container": "a container",
    "wsl2": "WSL2",
    "windows": "native Windows",
}
_COLUMNS = (
    Column("graphics", limit=34),
    Column("arch"),
    Column("total MiB", right=True),
    Column("reserved", right=True),
    Column("free", right=True),
    Column("also"),
)


def box_page(box: Box, disk: DiskRate | None, style: Style) -> list[str]:
    """Lines for a terminal."""
    lines = [
        *_line("cpu", _cpu(box.cpu)),
        *_line("memory", _memory(box.memory)),
        *_line("system", _system(box)),
    ]
    if disk is not None:
        how = "around the page cache" if disk.direct else "through the page cache, so it may be too good"
        lines += _line(
            "disk", f"{disk.read_bytes_s / 1e6:.0f} MB/s at {disk.path} ({disk.read_bytes >> 20} MiB read, {how})"
        )
    if box.cards:
        lines += ["", *table(style, _COLUMNS, [_row(card) for card in box.cards], indent="")]
    else:
        lines += _line("gpus", "none found")
    doubts = doubt_lines(style, box.doubts)
    return [*lines, "", *doubts] if doubts else lines


def _line(head: str, text: str) -> list[str]:
    return wrapped(f"{head:{_HEAD}}{text}", "", " " * _HEAD)


def _cpu(cpu: CpuFacts | None) -> str:
    if cpu is None:
        return "unknown"
    nodes = f"; {cpu.numa_nodes} memory nodes" if cpu.numa_nodes > 1 else ""
    limit = "" if cpu.source == "processors" else f", bound by {cpu.source}"
    threads = f"{cpu.usable} of {cpu.logical} hardware threads compute{limit}" if cpu.usable < cpu.logical else ""
    return f"{cpu.name}; {threads or f'{cpu.usable} cores'}; {cpu.isa}{nodes}"


def _memory(memory: MemoryFacts | None) -> str:
    if memory is None:
        return "unknown"
    bound = "" if memory.limit_source == "MemTotal" else f", limited by {memory.limit_source}"
    total, limit = memory.total_bytes, memory.limit_bytes
    of = f" (the machine has {_gib(total)})" if total is not None and limit is not None and limit < total else ""
    swap = f"; swap {_gib(memory.swap_bytes)} GiB" if memory.swap_bytes else ""
    return f"{_gib(memory.available_bytes)} of {_gib(limit)} GiB available{bound}{of}{swap}"


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / GIB:.1f}"


def _system(box: Box) -> str:
    where = _ENVIRONMENTS.get(box.environment or "", "what stands between it and the hardware is unknown")
    kernel = f"kernel {box.kernel}" if box.kernel else "kernel unknown"
    return ", ".join([box.os or "unknown system", kernel, where, *([box.notes] if box.notes else [])])


def _row(card: Card) -> Sequence[str]:
    free, total = mib(card.free_bytes), mib(card.total_bytes)
    reserved = "" if card.vendor != "nvidia" or card.unified else mib(card.reserved_bytes)
    return (card.name, card.arch or "", total, reserved, free, "; ".join(_also(card)))


def _also(card: Card) -> list[str]:
    said = []
    if card.unified:
        gtt = "" if card.gtt_total_bytes is None else f", up to {_size(card.gtt_total_bytes)} of it"
        said.append(f"shares host memory{gtt}")
    if card.bar1_total_bytes is not None:
        said.append(f"BAR1 {_size(card.bar1_total_bytes)}")
    if card.visible_bytes is not None and not card.unified:
        said.append(f"{_size(card.visible_bytes)} mappable")
    if card.link is not None:
        said.append(f"PCIe {card.link.gen or '?'} x{card.link.width or '?'}")
    if card.bandwidth_bytes_s is not None:
        said.append(f"{card.bandwidth_bytes_s / 1e9:.0f} GB/s")
    if card.display:
        said.append("drives a display")
    return [*said, card.pci or card.id]


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size >> 20} MiB"
