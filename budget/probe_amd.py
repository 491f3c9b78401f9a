"""AMD GPUs, from amdgpu's sysfs files and KFD's topology, matched by PCI address.

sysfs says what memory there is, KFD what kind of GPU it is and what the compute driver offers; neither opens a device.
Where the two disagree both numbers are shown, because either may be the one that an allocation meets.

The question that decides everything is whether a GPU computes in the host's memory. `vram_total` of an APU is only the
firmware's carve-out, and missing `mem_info` files, a vis_vram equal to vram, a fast link or a small VRAM prove nothing:
all of them are seen on APUs and on cards alike. What does prove it: a KFD node that has CPU cores and SIMDs (older
kernels), the firmware's carve-out switch, and the instruction set, since AMD gives each APU generation a number of its
own. Only MI300A shares its number with a card, and there the PCI id tells. Without KFD the PCI id decides. A target
that neither list has is taken for a card: its ceiling is then too small, never too large.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from budget.facts import MIB, Card
from budget.probe_gtt import GttLimits, gtt_limits
from budget.probe_kfd import KfdNode, kfd_gpus
from budget.probe_pci import AMD, address, link, name_of, numa_node
from budget.tree import Tree, whole

_DRM = "sys/class/drm"

_UNIFIED = frozenset(
    "gfx700 gfx703 gfx801 gfx810 gfx902 gfx909 gfx90c gfx1013 gfx1033 gfx1035 gfx1036 gfx1037 gfx1103 "
    "gfx1150 gfx1151 gfx1152 gfx1153".split()
)
_DISCRETE = frozenset(
    "gfx600 gfx601 gfx602 gfx701 gfx702 gfx704 gfx705 gfx802 gfx803 gfx805 gfx900 gfx904 gfx906 gfx908 gfx90a gfx940 "
    "gfx941 gfx942 gfx950 gfx1010 gfx1011 gfx1012 gfx1030 gfx1031 gfx1032 gfx1034 gfx1100 gfx1101 gfx1102 gfx1200 "
    "gfx1201".split()
)
_MI300A = 0x74A0
_UNIFIED_DEVICES: dict[int, str | None] = {
    0x15DD: "gfx902", 0x15D8: "gfx909", 0x15E7: "gfx90c", 0x1636: "gfx90c", 0x1638: "gfx90c", 0x164C: "gfx90c",
    0x13FE: "gfx1013", 0x143F: "gfx1013", 0x163F: "gfx1033", 0x1435: "gfx1033", 0x164D: "gfx1035", 0x1681: "gfx1035",
    0x164E: "gfx1036", 0x13C0: "gfx1036", 0x1506: "gfx1037", 0x15BF: "gfx1103", 0x15C8: "gfx1103", 0x1900: "gfx1103",
    0x1901: "gfx1103", 0x150E: "gfx1150", 0x1586: "gfx1151", 0x1114: "gfx1152", 0x98E4: "gfx810", 0x9874: "gfx801",
    _MI300A: "gfx942",
}  # fmt: skip
"""PCI ids of APUs -> target, for a box without KFD."""
_DISAGREE = 0.01
"""Two sources that differ by more than this share do not mean the same."""


@dataclass(frozen=True)
class _Files:
    """What one GPU's folder says. A number is None where the file is not there or holds none."""

    folder: str
    drm: str | None
    pci: str
    device: int | None
    vram: int | None
    vram_used: int | None
    visible: int | None
    gtt: int | None
    gtt_used: int | None


def read_amd(tree: Tree) -> list[Card]:
    """AMD's GPUs that have a driver, each once; what cannot be known or believed is added to `tree.doubts`."""
    nodes = kfd_gpus(tree)
    folders = _folders(tree)
    if not nodes and not folders:
        return []
    limits = gtt_limits(tree)
    cards, matched = [], set()
    for files in folders:
        node = _match(tree, files, nodes)
        matched.add(node)
        cards.append(_card(tree, files, node, limits))
    seen = {files.pci for files in folders}
    for node in nodes:
        if node in matched:
            continue
        if node.pci is not None and node.pci in seen:
            tree.doubt(node.where, f"one more node of the GPU at {node.pci} (a partition of it)", "counted once")
            continue
        seen.add(node.pci or node.where)
        cards.append(_from_kfd(tree, node))
    return _told_apart(cards)


def _folders(tree: Tree) -> list[_Files]:
    """One for each PCI address: cards are renumbered, listed twice, and named alike, an address is none of this."""
    found: dict[str, _Files] = {}
    for drm in tree.names(_DRM, r"card[0-9]{1,6}"):
        folder = f"{_DRM}/{drm}/device"
        if tree.number(f"{folder}/vendor") != AMD:
            continue
        uevent = re.search(r"^PCI_SLOT_NAME=(\S+)$", tree.text(f"{folder}/uevent") or "", re.M)
        pci = address(uevent.group(1) if uevent else tree.link(folder)) or f"amd-{drm}"
        if pci in found:
            tree.doubt(folder, f"the GPU at {pci} is listed more than once", "counted once")
            continue
        found[pci] = _files(tree, folder, drm, pci)
    return list(found.values())


def _files(tree: Tree, folder: str, drm: str, pci: str) -> _Files:
    def size(name: str) -> int | None:
        number = tree.number(f"{folder}/mem_info_{name}")
        if number is not None and number < 0:
            tree.doubt(f"{folder}/mem_info_{name}", f"says {number}", "unknown")
            return None
        return number

    vram, used = size("vram_total"), size("vram_used")
    if vram and used is not None and used > vram:
        tree.doubt(
            f"{folder}/mem_info_vram_used", f"says {used >> 20} MiB used of {vram >> 20} MiB", "what is used is unknown"
        )
        used = None
    return _Files(
        folder=folder,
        drm=drm,
        pci=pci,
        device=tree.number(f"{folder}/device"),
        vram=vram,
        vram_used=used,
        visible=size("vis_vram_total") or _bar0(tree, folder),
        gtt=size("gtt_total"),
        gtt_used=size("gtt_used"),
    )


def _match(tree: Tree, files: _Files, nodes: list[KfdNode]) -> KfdNode | None:
    """The GPU's KFD node: by address, or by the render node that both name."""
    for node in nodes:
        if node.pci == files.pci:
            return node
    minors = {whole(name.removeprefix("renderD")) for name in tree.names(f"{files.folder}/drm", r"renderD[0-9]{1,6}")}
    return next((node for node in nodes if node.pci is None and node.render_minor in minors), None)


def _card(tree: Tree, files: _Files, node: KfdNode | None, limits: GttLimits) -> Card:
    unified, arch = _is_unified(tree, files, node)
    vram = files.vram
    if vram is None:
        tree.doubt(
            f"{files.folder}/mem_info_vram_total", "is not there: the driver does not say how much memory", "unknown"
        )
    elif vram == 0:
        tree.doubt(f"{files.folder}/mem_info_vram_total", "says 0, which is no size", "unknown")
        vram = None
    gtt = _gtt(tree, files, node, limits) if unified else files.gtt
    _compare(tree, files, node, unified=unified, gtt=gtt)
    if vram is None and not unified and node is not None and node.total_bytes:
        vram = node.total_bytes
        tree.doubt(node.where, "is the only one to say how much memory the card has", f"{vram >> 20} MiB")
    free = vram - files.vram_used if vram is not None and files.vram_used is not None else None
    return Card(
        vendor="amd",
        id=_unique(tree, files, node) or files.pci,
        name=_name(tree, files, arch),
        arch=arch,
        unified=unified,
        total_bytes=vram,
        used_bytes=files.vram_used,
        free_bytes=free,
        visible_bytes=files.visible,
        gtt_total_bytes=gtt,
        gtt_used_bytes=files.gtt_used,
        # An APU's link speed and width are made up by the driver.
        link=None if unified else link(tree, files.folder),
        display=_display(tree, files.drm),
        pci=files.pci if address(files.pci) else None,
        numa_node=numa_node(tree, files.pci),
        bandwidth_bytes_s=node.bandwidth_bytes_s if node is not None else None,
        order=node.index if node is not None else None,
    )


def _from_kfd(tree: Tree, node: KfdNode) -> Card:
    """A GPU that only the compute driver lists: the graphics folders are not shown here."""
    unified = node.cpu_cores > 0 or node.arch in _UNIFIED or node.device == _MI300A
    tree.doubt(node.where, "a GPU that /sys/class/drm does not list", "what KFD says, its display and GTT are unknown")
    used = node.used_bytes
    free = (
        node.total_bytes - used
        if node.total_bytes is not None and used is not None and used <= node.total_bytes
        else None
    )
    name = name_of(tree, AMD, node.device)
    return Card(
        vendor="amd",
        id=node.pci or f"amd-{node.index}",
        name=f"AMD {name}" if name else f"AMD (1002:{node.device or 0:04x})",
        arch=node.arch,
        unified=unified,
        # Of an APU the banks are what it may pin of the host's memory; the carve-out is not told.
        total_bytes=None if unified else node.total_bytes,
        used_bytes=None if unified else used,
        free_bytes=None if unified else free,
        gtt_total_bytes=node.total_bytes if unified else None,
        pci=node.pci,
        numa_node=numa_node(tree, node.pci) if node.pci else None,
        bandwidth_bytes_s=node.bandwidth_bytes_s,
        order=node.index,
    )


def _is_unified(tree: Tree, files: _Files, node: KfdNode | None) -> tuple[bool, str | None]:
    """Whether it computes in the host's memory, and its target."""
    known = _UNIFIED_DEVICES.get(files.device) if files.device is not None else None
    arch = (node.arch if node is not None else None) or known
    if (node is not None and node.cpu_cores > 0) or tree.there(f"{files.folder}/uma/carveout"):
        return True, arch
    if files.device == _MI300A or arch in _UNIFIED:
        return True, arch
    if arch is None and node is None:
        tree.doubt(
            files.folder, "there is no KFD node for it, which would say its target", "a card with memory of its own"
        )
    elif arch is not None and arch not in _DISCRETE:
        tree.doubt(
            files.folder, f"whether {arch} shares the host's memory is not known here", "a card with memory of its own"
        )
    return False, arch


def _gtt(tree: Tree, files: _Files, node: KfdNode | None, limits: GttLimits) -> int | None:
    """What an APU may pin of the host's memory: the least of both limits."""
    name, gtt, pages = f"{files.folder}/mem_info_gtt_total", files.gtt or None, limits.pages_limit_bytes
    if gtt is None and pages is not None:
        tree.doubt(name, "does not say how much host memory the GPU may pin", f"{limits.source}, {pages >> 20} MiB")
        return pages
    if gtt is None and node is not None and node.total_bytes:
        tree.doubt(
            name, "does not say how much host memory the GPU may pin", f"what KFD offers, {node.total_bytes >> 20} MiB"
        )
        return node.total_bytes
    if gtt is None:
        tree.doubt(name, "does not say how much host memory the GPU may pin", "unknown")
        return None
    if pages is not None and pages < gtt:
        if _differ(pages, gtt):
            tree.doubt(
                name,
                f"says {gtt >> 20} MiB, {limits.source} allows {pages >> 20} MiB: both count",
                f"{pages >> 20} MiB",
            )
        return pages
    return gtt


def _compare(tree: Tree, files: _Files, node: KfdNode | None, *, unified: bool, gtt: int | None) -> None:
    """sysfs against KFD. On an APU newer kernels offer the larger one of GTT and carve-out, and not both."""
    if node is None or not node.total_bytes:
        return
    offered, carve = node.total_bytes, files.vram or 0
    if not unified:
        if carve and _differ(offered, carve):
            what = f"KFD says {offered >> 20} MiB, mem_info_vram_total {carve >> 20} MiB"
            tree.doubt(node.where, what, f"{carve >> 20} MiB")
        return
    if gtt is not None and not any(_same(offered, size) for size in (gtt, carve, gtt + carve)):
        what = f"KFD offers {offered >> 20} MiB, carve-out {carve >> 20} MiB and GTT {gtt >> 20} MiB say otherwise"
        tree.doubt(node.where, what, "carve-out and GTT; a compute runtime may get no more than KFD offers")
    elif gtt is not None and carve >= gtt and _same(offered, carve):
        what = (
            f"carve-out {carve >> 20} MiB, GTT {gtt >> 20} MiB: since kernel 6.10 compute gets the larger one, not both"
        )
        tree.doubt(node.where, what, "both, as the driver lists them")


def _differ(one: int, other: int) -> bool:
    return abs(one - other) > _DISAGREE * max(one, other)


def _same(one: int, other: int) -> bool:
    return other > 0 and not _differ(one, other)


def _bar0(tree: Tree, folder: str) -> int | None:
    """Size of the card's first window: first line of `resource`, start and end."""
    words = (tree.text(f"{folder}/resource") or "").split("\n")[0].split()
    bounds = [whole(word) for word in words[:2]]
    if len(bounds) != 2 or bounds[0] is None or bounds[1] is None or not 0 < bounds[0] < bounds[1]:
        return None
    size = bounds[1] - bounds[0] + 1
    return size if size >= 64 * MIB else None


def _display(tree: Tree, drm: str | None) -> bool | None:
    """Whether a screen is driven: a connector that is connected and enabled. boot_vga proves none."""
    names = tree.names(_DRM, rf"{drm}-.+")
    if not names:
        return None
    return any(
        tree.line(f"{_DRM}/{name}/status") == "connected" and tree.line(f"{_DRM}/{name}/enabled") != "disabled"
        for name in names
    )


def _unique(tree: Tree, files: _Files, node: KfdNode | None) -> str | None:
    """The UUID that AMD's own tools print, where the chip has one."""
    number = whole("0x" + (tree.line(f"{files.folder}/unique_id") or "")) or (node.unique if node is not None else None)
    return f"GPU-{number:016x}" if number else None


def _name(tree: Tree, files: _Files, arch: str | None) -> str:
    """The card's own name (servers), its marketing name by libdrm's list, by the PCI list, or its number."""
    own = tree.line(f"{files.folder}/product_name")
    if own:
        return own if own.startswith("AMD") else f"AMD {own}"
    if files.device is None:
        return f"AMD {arch or 'GPU'}"
    revision = tree.number(f"{files.folder}/revision")
    listed = tree.text("usr/share/libdrm/amdgpu.ids") or ""
    by_revision = re.search(rf"^{files.device:X},\s*{revision or 0:X},\s*(.+?)\s*$", listed, re.M)
    name = by_revision.group(1) if by_revision else name_of(tree, AMD, files.device)
    if name is None:
        return f"AMD (1002:{files.device:04x})"
    return name if name.startswith("AMD") else f"AMD {name}"


def _told_apart(cards: list[Card]) -> list[Card]:
    """Two chips that claim one UUID (some APUs have none and say so badly) are named by their addresses."""
    ids = [card.id for card in cards]
    return [replace(card, id=card.pci, twin=card.id) if ids.count(card.id) > 1 and card.pci else card for card in cards]
