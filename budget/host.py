"""What the host has, read from /proc and /sys below a root folder (so that recorded trees can be read as well).

Memory: MemTotal says what the machine has, not what this process may use. A container, a systemd unit or a user slice
sets a limit on a *control group*, and limits of all its ancestors hold at once, so the least of them is the truth. In a
nested container the innermost file often says `max` while a parent is limited, and /proc/meminfo may be rewritten by
lxcfs to either side of the truth. Page cache counts as used by a group, but the kernel gives `inactive_file` back
before it kills anything, so it counts as available: `limit - current` alone calls a box full that only read a file.

Cores: a thread for each hardware thread is too many where two of them share a core (decode is bound by memory, and the
second adds nothing) and where a quota allows less time than there are cores: spinning threads would eat it up.

Version 1 and 2 of control groups can be mounted side by side (hybrid); both are read. The mount's own root is taken off
the group's path, and a path that does not exist below the mount (another namespace) is shortened until it does.

This is the only reader of control groups: backends take their thread count from here, the fleet its count of kills.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from budget.facts import CpuFacts, HostFacts, MemoryFacts

_UNLIMITED = 1 << 60
"""Version 1 writes 'no limit' as the largest page-aligned int64."""
_FILE_LIMIT_BYTES = 1 << 22


def read_host(root: str | Path = "/", allowed: Iterable[int] | None = None) -> HostFacts:
    """Memory and cores of the host whose /proc and /sys lie below `root`; `allowed` as in `read_cpu`."""
    return HostFacts(read_memory(root), read_cpu(root, allowed))


def read_memory(root: str | Path = "/") -> MemoryFacts:
    """Raises OSError when the system has no /proc/meminfo and no sysconf to ask instead."""
    tree = Path(root)
    meminfo = parse_meminfo(_read(tree / "proc/meminfo") or "")
    if "MemTotal" not in meminfo:
        return _memory_by_sysconf()
    total = meminfo["MemTotal"]
    available = meminfo.get("MemAvailable", meminfo.get("MemFree", 0) + meminfo.get("Cached", 0))
    limit, source, free = total, "MemTotal", min(available, total)
    for group in _groups(tree, "memory"):
        known = _group_memory(group)
        if known is None:
            continue
        if known.limit < limit:
            limit, source = known.limit, known.source
        free = min(free, max(0, known.limit - known.held))
    return MemoryFacts(total, limit, source, free, meminfo.get("SwapTotal"))


def read_cpu(root: str | Path = "/", allowed: Iterable[int] | None = None) -> CpuFacts:
    """`allowed` are the hardware threads that the scheduler lets this process use; None asks the kernel."""
    tree = Path(root)
    threads = allowed_threads() if allowed is None else tuple(allowed)
    info = _read(tree / "proc/cpuinfo") or ""
    logical = len(re.findall(r"^processor\s*:", info, re.M)) or len(threads)
    usable, source = len(threads), "affinity" if len(threads) < logical else "processors"
    cores = physical_cores(threads, tree)
    if len(cores) < usable:
        usable, source = len(cores), "physical cores"
    for group in _groups(tree, "cpu"):
        quota = _group_cores(group)
        if quota is not None and quota[0] < usable:
            usable, source = quota
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", info, re.M)
    name = re.search(r"^(?:model name|Model)\s*:\s*(.*)$", info, re.M)
    return CpuFacts(
        name=name.group(1).strip() if name else platform.processor() or platform.machine(),
        logical=logical,
        usable=max(1, usable),
        source=source,
        flags=frozenset(flags.group(1).split()) if flags else frozenset(),
    )


def allowed_threads() -> tuple[int, ...]:
    """The hardware threads that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def physical_cores(threads: Iterable[int], root: str | Path = "/") -> tuple[int, ...]:
    """The first of `threads` on each physical core; all of them where the system does not say."""
    first: dict[str, int] = {}
    for thread in threads:
        path = Path(root) / f"sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list"
        first.setdefault((_read(path) or "").strip() or f"thread {thread}", thread)
    return tuple(first.values())


def oom_kills(root: str | Path = "/") -> int | None:
    """Processes that the kernel has killed for want of memory in this process's control group; None where it does not
    tell.

    The kernel counts a kill in the group of the victim, whichever ancestor's limit was hit, so the innermost counter is
    the right one: an ancestor's counts the kills of neighbours as well. Where the own group has none (no memory
    controller in it, or another namespace) the nearest ancestor's is the group that the process is accounted to. In the
    root group, which has no counter, it is the machine's.
    """
    tree = Path(root)
    for group in _groups(tree, "memory"):
        name = "memory.events" if group.version == 2 else "memory.oom_control"
        count = _stat(group.folder / name).get("oom_kill")
        if count is not None:
            return count
    return _stat(tree / "proc/vmstat").get("oom_kill")


def parse_meminfo(text: str) -> dict[str, int]:
    """Bytes of every field. The unit is read, not assumed: some kernels and recordings write plain bytes."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        match = re.match(r"([\w()]+):\s+(\d+)(?:\s+(kB))?\s*$", line)
        if match:
            found[match.group(1)] = int(match.group(2)) * (1024 if match.group(3) else 1)
    return found


# ------------------------------------------------------------------------------------------------------ control groups


@dataclass(frozen=True)
class _Group:
    """One folder of a control-group mount, from the process's own up to the mount point."""

    version: int
    folder: Path


@dataclass(frozen=True)
class _GroupMemory:
    limit: int
    held: int
    source: str


def _groups(tree: Path, controller: str) -> list[_Group]:
    """Own group and all its ancestors, in every hierarchy that has `controller`."""
    own = _own_paths(_read(tree / "proc/self/cgroup") or "")
    found: list[_Group] = []
    for version, mount_root, mount_point, options in _mounts(_read(tree / "proc/self/mountinfo") or ""):
        if version == 1 and controller not in options:
            continue
        path = own.get("" if version == 2 else controller)
        if path is None:
            continue
        point = tree / mount_point.lstrip("/")
        folder = point / _below(path, mount_root)
        while folder != point and not folder.is_dir():
            folder = folder.parent
        while True:
            found.append(_Group(version, folder))
            if folder == point:
                break
            folder = folder.parent
    return found


def _own_paths(text: str) -> dict[str, str]:
    """Controller -> path of this process's group; the unified hierarchy has the controller ""."""
    paths: dict[str, str] = {}
    for line in text.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                paths[controller] = parts[2]
    return paths


def _mounts(text: str) -> list[tuple[int, str, str, tuple[str, ...]]]:
    """(version, root, mount point, controllers) of each control-group mount of a mountinfo."""
    found = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        root, point = (part.replace("\\040", " ") for part in fields[3:5])
        found.append((2 if kind[0] == "cgroup2" else 1, root, point, tuple(kind[2].split(","))))
    return found


def _below(path: str, mount_root: str) -> str:
    """`path` relative to a mount that shows the subtree `mount_root`; "." for what lies outside of it."""
    if ".." in PurePosixPath(path).parts:
        return "."
    own, root = PurePosixPath(path), PurePosixPath(mount_root)
    if mount_root != "/" and own.is_relative_to(root):
        own = PurePosixPath("/") / own.relative_to(root)
    return str(own).lstrip("/") or "."


def _group_memory(group: _Group) -> _GroupMemory | None:
    """Limit and held bytes of one group; None where it has no limit of its own."""
    stat = _stat(group.folder / "memory.stat")
    if group.version == 2:
        limits = {name: _number(group.folder / name) for name in ("memory.max", "memory.high")}
        held = _number(group.folder / "memory.current")
        idle = stat.get("inactive_file", 0)
    else:
        limits = {"memory.limit_in_bytes": _number(group.folder / "memory.limit_in_bytes")}
        limits["memory.stat hierarchical_memory_limit"] = stat.get("hierarchical_memory_limit")
        held = _number(group.folder / "memory.usage_in_bytes")
        idle = stat.get("total_inactive_file", stat.get("inactive_file", 0))
    known = {name: limit for name, limit in limits.items() if limit is not None and limit < _UNLIMITED}
    if not known:
        return None
    name = min(known, key=lambda key: known[key])
    return _GroupMemory(known[name], max(0, (held or 0) - idle), f"{group.folder}/{name}")


def _group_cores(group: _Group) -> tuple[int, str] | None:
    """Whole cores that a group's quota allows. Part of a core is not counted: a thread on it would be held up."""
    if group.version == 2:
        name = "cpu.max"
        words = (_read(group.folder / name) or "").split()
        quota, period = (words[0], words[1]) if len(words) == 2 else ("max", "0")
    else:
        name = "cpu.cfs_quota_us"
        quota = (_read(group.folder / name) or "-1").strip()
        period = (_read(group.folder / "cpu.cfs_period_us") or "0").strip()
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return None
    return max(1, int(quota) // int(period)), f"{group.folder}/{name}"


def _stat(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in (_read(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str | None:
    """Text of a small file; None where it is not there or not to be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_FILE_LIMIT_BYTES)
    except OSError:
        return None


def _memory_by_sysconf() -> MemoryFacts:
    """Where there is no /proc: all of the machine's memory, available or not (macOS counts cache as used)."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return MemoryFacts(total, total, "sysconf", total, None)
