"""NVIDIA GPUs by NVML, which opens no context: it reads what the driver knows.

Through `nvidia-ml-py` (module pynvml), imported only where there is a library to speak to. pynvml loads the library by
its name and offers no other way; the loader knows a library that is already in the process by that name. So the one
that is wanted is loaded here first, by path: that is how WSL and NixOS, which keep it outside of the loader's folders,
and the tests' own library are reached without touching pynvml's insides.

Any call may fail by itself: not supported here, not in this driver, no permission. Then that field is unknown, and a
doubt says so where a plan depends on it. A driver may also hang (a card that fell off the bus); nothing can end a
thread that waits in the kernel, so all calls are made in a helper thread which is left behind at the deadline. The bus
still shows the cards then.

What NVML says is not what it means:
- `used` of the first version of the memory call contains what the driver reserves, that of the second does not.
  Where there is only the first (WSL2, drivers before 510) used and reserved are both unknown, total and free are not.
- Max link generation is what card and slot agree on; the current one is 1 on an idle card.
- `display active` is a picture on a screen; `display attached` says yes on servers without one.
- A card in MIG mode computes on its slices only. They claim a BAR1 of 32 GiB and no reserve: both are left unknown.
- GB10 and Jetson say no memory size, because it is the host's.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import ModuleType
from typing import Any

from budget.facts import Card, Doubt, Link
from budget.probe_pci import address, numa_node
from budget.tree import Tree

_NAMES = (
    "libnvidia-ml.so.1",
    "/usr/lib/wsl/lib/libnvidia-ml.so.1",
    "/run/opengl-driver/lib/libnvidia-ml.so.1",
)
_CARD_LIMIT = 64
_UNIFIED = frozenset({(5, 3), (6, 2), (7, 2), (8, 7), (10, 1), (11, 0), (12, 1)})
"""Compute capabilities of Tegra chips and GB10: they compute in the host's memory."""
_PEER = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS", 6: "U"}
"""nvmlGpuP2PStatus_t -> the codes that nvidia-smi prints."""
_MEMORY_V2 = 0x02000028
_CLOCK_MEMORY = 2
_PEER_READ_WRITE = (0, 1)
_NOT_A_BUS_ADDRESS = "0000:00:00.0"


@dataclass
class NvidiaFound:
    """Cards and slices, the bus addresses of all that answered (of MIG parents too), and what could not be known."""

    cards: list[Card] = field(default_factory=list)
    addresses: set[str] = field(default_factory=set)
    doubts: list[Doubt] = field(default_factory=list)

    def doubt(self, where: str, what: str, taken: str) -> None:
        self.doubts.append(Doubt(where, what, taken))


def read_nvidia(tree: Tree, library: str | None, deadline_s: float, host_bytes: int | None) -> NvidiaFound:
    """NVIDIA's GPUs. `library` is a path, None the system's own. `host_bytes` is the host's memory, in which some of
    them compute. A missing library means no cards, and no doubt: the bus tells whether there should be any."""
    name = _load(library)
    if name is None:
        found = NvidiaFound()
        if library is not None:
            found.doubt(library, "is no library that can be loaded", "no NVIDIA cards")
        return found
    answers: queue.SimpleQueue[NvidiaFound] = queue.SimpleQueue()
    own = Tree(tree.root)
    reader = threading.Thread(target=lambda: answers.put(_read(own, host_bytes)), name="nvml", daemon=True)
    reader.start()
    try:
        return answers.get(timeout=deadline_s)
    except queue.Empty:
        found = NvidiaFound()
        found.doubt("NVML", f"did not answer within {deadline_s:g} s: the driver hangs", "what the PCI bus shows")
        return found


def _load(library: str | None) -> str | None:
    """The name under which the library was found, now in the process."""
    for name in (library,) if library is not None else _NAMES:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return None


def _read(tree: Tree, host_bytes: int | None) -> NvidiaFound:
    found = NvidiaFound()
    try:
        nvml = import_module("pynvml")
    except ImportError:
        found.doubt("pynvml", "the package nvidia-ml-py is not installed", "no NVIDIA cards")
        return found
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        found.doubt("NVML", f"the driver does not answer: {error}", "no NVIDIA cards but what the PCI bus shows")
        return found
    reader = _Reader(nvml, tree, host_bytes, found)
    reader.cards()
    reader.ask("nvmlShutdown")
    return found


class _Reader:
    """One pass over all cards."""

    def __init__(self, nvml: ModuleType, tree: Tree, host_bytes: int | None, found: NvidiaFound) -> None:
        self.nvml, self.tree, self.host_bytes, self.found = nvml, tree, host_bytes, found

    def cards(self) -> None:
        count = self.ask("nvmlDeviceGetCount")
        if count is None:
            self.found.doubt(
                "NVML", "does not say how many cards there are", "no NVIDIA cards but what the PCI bus shows"
            )
            return
        handles: dict[str, Any] = {}
        for index in range(min(count, _CARD_LIMIT)):
            handle = self.ask("nvmlDeviceGetHandleByIndex", index)
            if handle is None:
                self.found.doubt(f"NVML card {index}", "cannot be opened: lost, or not given to this user", "left out")
                continue
            card = self.card(index, handle)
            if card is not None:
                handles[card.id] = handle
                self.found.cards.append(card)
        for number, card in enumerate(self.found.cards):
            if card.id in handles:
                self.found.cards[number] = replace(card, peers=self.peers(card.id, handles))

    def ask(self, name: str, *args: Any) -> Any:
        """One call's answer; None where the driver, or an old pynvml, has none."""
        try:
            return getattr(self.nvml, name)(*args)
        except (self.nvml.NVMLError, AttributeError, TypeError, ValueError):
            # The last three are pynvml's: no such function, no such parameter, a name that is no text.
            return None

    def card(self, index: int, handle: Any) -> Card | None:
        ask = self.ask
        pci = self.address(handle)
        if pci is not None:
            self.found.addresses.add(pci)
        uuid = ask("nvmlDeviceGetUUID", handle) or pci or f"nvidia-{index}"
        name = ask("nvmlDeviceGetName", handle) or "NVIDIA GPU"
        capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
        arch = f"sm_{capability[0]}{capability[1]}" if capability else None
        mode = ask("nvmlDeviceGetMigMode", handle)
        if mode and mode[0] == 1:
            slices = self.slices(handle, arch, pci, name)
            self.found.cards.extend(slices)
            what = f"{name} is cut into MIG slices: the whole card computes nothing"
            self.found.doubt(f"NVML {uuid}", what, f"its {len(slices)} slices" if slices else "its memory is unknown")
            return None if slices else Card("nvidia", uuid, name, arch, pci=pci)
        unified = tuple(capability or ()) in _UNIFIED
        memory = self.memory(uuid, handle, unified)
        bar1 = ask("nvmlDeviceGetBAR1MemoryInfo", handle)
        gen, width = (
            ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
        )
        display = ask("nvmlDeviceGetDisplayActive", handle)
        return Card(
            vendor="nvidia",
            id=uuid,
            name=name,
            arch=arch,
            unified=unified,
            total_bytes=memory.total,
            reserved_bytes=memory.reserved,
            used_bytes=memory.used,
            free_bytes=memory.free,
            gtt_total_bytes=self.host_bytes if unified else None,
            bar1_total_bytes=(bar1.bar1Total or None) if bar1 else None,
            bar1_free_bytes=bar1.bar1Free if bar1 and bar1.bar1Total else None,
            link=Link(gen or None, width or None) if gen or width else None,
            display=None if display is None else bool(display),
            pci=pci,
            numa_node=numa_node(self.tree, pci) if pci else None,
            bandwidth_bytes_s=self.bandwidth(handle),
        )

    def memory(self, uuid: str, handle: Any, unified: bool) -> _Memory:
        where = f"NVML {uuid}"
        second = self.ask("nvmlDeviceGetMemoryInfo", handle, _MEMORY_V2)
        if second is not None and second.total:
            return self.checked(where, _Memory(second.total, second.reserved, second.used, second.free))
        first = self.ask("nvmlDeviceGetMemoryInfo", handle)
        if first is not None and first.total:
            what = f"the driver does not say what it reserves; its used ({first.used >> 20} MiB) may contain it"
            self.found.doubt(where, what, "total and free as they are, used and reserved unknown")
            return self.checked(where, _Memory(first.total, None, None, first.free))
        if unified:
            what = "says no memory size: this chip computes in the host's memory"
            self.found.doubt(where, what, "the host's memory, all of which it may pin")
        else:
            self.found.doubt(where, "says no memory size", "its memory is unknown")
        return _Memory()

    def checked(self, where: str, memory: _Memory) -> _Memory:
        total, free = memory.total, memory.free
        if total is not None and free is not None and free > total:
            self.found.doubt(where, f"says {free >> 20} MiB free of {total >> 20} MiB", "free is unknown")
            return _Memory(total, memory.reserved, memory.used, None)
        return memory

    def slices(self, parent: Any, arch: str | None, pci: str | None, name: str) -> list[Card]:
        found: list[Card] = []
        for index in range(min(self.ask("nvmlDeviceGetMaxMigDeviceCount", parent) or 0, _CARD_LIMIT)):
            handle = self.ask("nvmlDeviceGetMigDeviceHandleByIndex", parent, index)
            if handle is None:
                continue
            uuid = self.ask("nvmlDeviceGetUUID", handle) or f"{pci or name}-mig-{index}"
            memory = self.ask("nvmlDeviceGetMemoryInfo", handle)
            card = Card(
                vendor="nvidia",
                id=uuid,
                name=self.ask("nvmlDeviceGetName", handle) or f"{name} MIG slice {index}",
                arch=arch,
                total_bytes=(memory.total or None) if memory else None,
                free_bytes=memory.free if memory and memory.total else None,
                # Without the parent's address: slices of one card are not one device.
                numa_node=numa_node(self.tree, pci) if pci else None,
            )
            found.append(card)
        return found

    def address(self, handle: Any) -> str | None:
        info = self.ask("nvmlDeviceGetPciInfo", handle)
        text = getattr(info, "busId", None)
        found = address(text.decode("ascii", "replace") if isinstance(text, bytes) else text)
        return None if found == _NOT_A_BUS_ADDRESS else found

    def bandwidth(self, handle: Any) -> float | None:
        """Bytes a second: wires / 8, two transfers for each clock that NVML counts (3090: 384, 9751 MHz, 936 GB/s)."""
        bits = self.ask("nvmlDeviceGetMemoryBusWidth", handle)
        clock_mhz = self.ask("nvmlDeviceGetMaxClockInfo", handle, _CLOCK_MEMORY)
        return bits / 8 * clock_mhz * 1e6 * 2 if bits and clock_mhz else None

    def peers(self, own: str, handles: dict[str, Any]) -> dict[str, str]:
        """What the driver says of mapping each other card's memory, for reading and for writing: the worse of both."""
        found: dict[str, str] = {}
        for other, handle in handles.items():
            if other == own:
                continue
            said = []
            for index in _PEER_READ_WRITE:
                status = self.ask("nvmlDeviceGetP2PStatus", handles[own], handle, index)
                said.append(_PEER.get(status, "U") if status is not None else "U")
            found[other] = next((code for code in said if code != "OK"), "OK")
        return found


@dataclass(frozen=True)
class _Memory:
    total: int | None = None
    reserved: int | None = None
    used: int | None = None
    free: int | None = None
