"""KFD topology: what AMD's compute driver says it can offer.

Nodes are CPUs and GPUs alike, one CPU node for each socket, in no order that means anything. A node is a GPU when it
has SIMDs (`simd_count`), and for no other reason: CPU nodes have memory banks too, and the largest ones.
`local_mem_size` is often 0, so memory is the sum of the banks that are not the host's. On an APU the banks follow GTT,
not the carve-out.
"""

from __future__ import annotations

from dataclasses import dataclass

from budget.tree import Tree

_NODES = "sys/class/kfd/kfd/topology/nodes"

_HOST_HEAP = 0
_HBM_WIDTH = 1024
"""No other memory has as many wires; it makes two transfers a clock."""
_TRANSFERS_PER_CLOCK = {
    "gfx803": 4,
    **dict.fromkeys(("gfx1010", "gfx1011", "gfx1012", "gfx1030", "gfx1031", "gfx1032", "gfx1034"), 16),
    **dict.fromkeys(("gfx1100", "gfx1101", "gfx1102", "gfx1200", "gfx1201"), 16),
}
"""Transfers for one clock that the driver counts: GDDR5 4, GDDR6 16. Others are not guessed at."""
_BANDWIDTH_S = (1e9, 2e13)
"""What a device's memory can be believed to do, bytes a second."""


@dataclass(frozen=True)
class KfdNode:
    """One GPU of the topology. `pci` is None where the node has no address (location 0 is the host bridge)."""

    index: int
    pci: str | None
    render_minor: int | None
    arch: str | None
    cpu_cores: int
    device: int | None
    total_bytes: int | None
    used_bytes: int | None
    bandwidth_bytes_s: float | None
    unique: int | None

    @property
    def where(self) -> str:
        return f"{_NODES}/{self.index}"


def kfd_gpus(tree: Tree) -> list[KfdNode]:
    """GPU nodes in the order of their numbers. A node that cannot be read (of a GPU that this container was not given)
    is a doubt."""
    found = []
    for name in tree.names(_NODES, r"[0-9]{1,6}"):
        facts = tree.pairs(f"{_NODES}/{name}/properties")
        if facts and facts.get("simd_count", 0) > 0:
            found.append(_gpu(tree, name, facts))
    return found


def arch_of(version: int | None) -> str | None:
    """gfx_target_version (major * 10000 + minor * 100 + step) as compilers write it: minor and step in hexadecimal."""
    if version is None or not 0 < version < 1_000_000:
        return None
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _gpu(tree: Tree, name: str, facts: dict[str, int]) -> KfdNode:
    arch = arch_of(facts.get("gfx_target_version"))
    location = facts.get("location_id", 0)
    total, used, bandwidth = _banks(tree, f"{_NODES}/{name}/mem_banks", arch)
    low, high = _BANDWIDTH_S
    return KfdNode(
        index=int(name),
        pci=_address(facts.get("domain", 0), location) if location > 0 else None,
        render_minor=facts.get("drm_render_minor") or None,
        arch=arch,
        cpu_cores=facts.get("cpu_cores_count", 0),
        device=facts.get("device_id"),
        total_bytes=total or facts.get("local_mem_size") or None,
        used_bytes=used,
        bandwidth_bytes_s=bandwidth if low <= bandwidth <= high else None,
        unique=facts.get("unique_id") or None,
    )


def _banks(tree: Tree, folder: str, arch: str | None) -> tuple[int, int | None, float]:
    """Bytes of all banks, bytes used of them (None: not told), bytes a second of the fastest."""
    total, used, bandwidth = 0, None, 0.0
    for name in tree.names(folder, r"[0-9]{1,3}"):
        facts = tree.pairs(f"{folder}/{name}/properties") or {}
        if facts.get("heap_type") == _HOST_HEAP:
            continue
        total += max(0, facts.get("size_in_bytes", 0))
        if tree.there(f"{folder}/{name}/used_memory"):
            used = (used or 0) + (tree.number(f"{folder}/{name}/used_memory") or 0)
        width, clock_hz = facts.get("width", 0), facts.get("mem_clk_max", 0) * 1e6
        transfers = 2 if width >= _HBM_WIDTH else _TRANSFERS_PER_CLOCK.get(arch or "", 0)
        bandwidth = max(bandwidth, width / 8 * clock_hz * transfers)
    return total, used, bandwidth


def _address(domain: int, location: int) -> str:
    """location_id is bus, device and function as PCI packs them."""
    return f"{domain & 0xFFFFFFFF:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"
