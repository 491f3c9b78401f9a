"""The probe: what this box is, from what its kernel and drivers tell without being opened.

It never fails. A source that is missing, unreadable, absurd or silent costs its field (None) and, where a plan depends
on it, leaves a doubt that says where, what, and what was taken instead. It opens no device context and no device node;
NVML opens its own. Each source can be replaced by a recording: a folder in place of `/`, a library in place of NVML.

Who tells what:

    host           /proc/meminfo, control groups, /proc/cpuinfo, topology                       budget.host
    system         os-release, kernel, what firmware and cgroups betray of VM and container     budget.system
    NVIDIA         NVML in a helper thread with a deadline                                      budget.probe_nvidia
    AMD            amdgpu sysfs, KFD topology, GTT and TTM limits, the command line             budget.probe_amd
    what is left   the PCI bus: Intel, cards without a driver                                   budget.probe_pci

Cards are told apart by PCI address and named by UUID where they have one, never by index. Nothing is listed twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from budget.facts import Box, Card, CpuFacts, MemoryFacts
from budget.host import examine_cpu, examine_memory
from budget.probe_amd import read_amd
from budget.probe_amdsmi import second_opinion
from budget.probe_nvidia import NvidiaFound, read_nvidia
from budget.probe_pci import other_cards
from budget.system import read_system
from budget.tree import Tree

_VENDORS = ("nvidia", "amd", "intel", "other")
_DOUBT_LIMIT = 200


@dataclass(frozen=True)
class Sources:
    """Where the probe reads.

    `root` stands for `/`. `nvml` is the path of a library; None is the system's own on the live root and none on a
    recorded one. `cards` stands for `/` where AMD's cards and the PCI bus are read (None: `root`).
    `amdsmi` asks AMD's library as well, which opens render nodes: only `homeserve probe` does. `allowed` are the
    hardware threads that may be used, None asks the system. `deadline_s` bounds each of the vendors' libraries:
    a driver without persistence takes seconds to start, a hung one never answers.
    """

    root: str = "/"
    nvml: str | None = None
    cards: str | None = None
    amdsmi: bool = False
    allowed: tuple[int, ...] | None = None
    deadline_s: float = 20.0


def read_box(sources: Sources | None = None) -> Box:
    """What this box is. Never raises for anything that a source says or fails to say."""
    sources = sources or Sources()
    tree = Tree(sources.root)
    system = read_system(tree)
    memory, cpu = _memory(tree), _cpu(tree, sources.allowed)
    nvidia = NvidiaFound()
    if tree.live or sources.nvml is not None:
        nvidia = read_nvidia(tree, sources.nvml, sources.deadline_s, memory.total_bytes if memory else None)
    bus = tree if sources.cards is None else Tree(sources.cards)
    cards = [*nvidia.cards, *read_amd(bus)]
    cards += other_cards(bus, nvidia.addresses | {card.pci for card in cards if card.pci})
    if system.environment == "wsl2" and not cards and tree.there("dev/dxg"):
        tree.doubt("dev/dxg", "Windows shares a GPU that only NVML could name here, and it names none", "no GPU")
    doubts = [*nvidia.doubts, *tree.doubts, *(bus.doubts if bus is not tree else ())]
    if sources.amdsmi and tree.live:
        doubts += second_opinion(cards, sources.deadline_s)
    return Box(
        id="here",
        memory=memory,
        cpu=cpu,
        cards=tuple(_in_order(cards)),
        os=system.os,
        kernel=system.kernel,
        environment=system.environment,
        notes=system.notes,
        doubts=tuple(dict.fromkeys(doubts))[:_DOUBT_LIMIT],
    )


def _memory(tree: Tree) -> MemoryFacts | None:
    try:
        return examine_memory(tree)
    except OSError as error:
        tree.doubt(
            error.filename or "proc/meminfo", error.strerror or str(error), "how much memory there is is unknown"
        )
        return None


def _cpu(tree: Tree, allowed: tuple[int, ...] | None) -> CpuFacts | None:
    if not tree.live and not tree.there("proc/cpuinfo"):
        tree.doubt("proc/cpuinfo", "is not there", "what computes is unknown")
        return None
    return examine_cpu(tree, allowed)


def _in_order(cards: Iterable[Card]) -> list[Card]:
    """By vendor, then by address, those without one last. A second card with an id that is taken gets its place's, and
    both say whose twin they are."""
    found: dict[str, Card] = {}
    for number, card in enumerate(sorted(cards, key=_place)):
        if card.id in found:
            found[card.id] = replace(found[card.id], twin=card.id)
            card = replace(card, id=f"{card.vendor}-{number}", twin=card.id)
        found[card.id] = card
    return list(found.values())


def _place(card: Card) -> tuple[int, bool, int, str, str]:
    return _VENDORS.index(card.vendor), card.pci is None, len(card.pci or ""), card.pci or "", card.id
