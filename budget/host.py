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

What is read may be a lie. lxcfs is told by the sums that it gets wrong: more active memory than there is, or as much
available as free although nothing is ever that tidy. Then the control groups' own counters are the truth.

This is the only reader of control groups: backends take their thread count from here, the fleet its count of kills.
"""

from __future__ import annotations

import errno
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from budget.facts import CpuFacts, HostFacts, MemoryFacts
from budget.tree import Tree, whole

_UNLIMITED = 1 << 60
"""Version 1 writes 'no limit' as the largest page-aligned int64."""
_MOUNT_LIMIT = 64
_DEPTH_LIMIT = 128
"""Control groups deeper than this are counted to their ancestor: no limit is set so far down."""
_THREAD_LIMIT = 1 << 14
_GROUPS_LIMIT = 256
_KEPT_BYTES = 1 << 16
"""More than any of these files holds."""
_MEMINFO = "proc/meminfo"
_MEMINFO_LINE = re.compile(r"^([\w()]+):[ \t]+([0-9]{1,18})(?:[ \t]+(kB))?[ \t\r]*$", re.M)


def read_host(root: str | Path = "/", allowed: Iterable[int] | None = None) -> HostFacts:
    """Memory and cores of the host whose /proc and /sys lie below `root`; `allowed` as in `read_cpu`."""
    tree = Tree(root)
    return HostFacts(examine_memory(tree), examine_cpu(tree, allowed))


def read_memory(root: str | Path = "/") -> MemoryFacts:
    """Raises OSError when the system has no /proc/meminfo and no sysconf to ask instead."""
    return examine_memory(Tree(root))


def examine_memory(tree: Tree) -> MemoryFacts:
    """As `read_memory`; what cannot be known or believed is added to `tree.doubts`."""
    meminfo = parse_meminfo(tree.text(_MEMINFO) or "")
    total = meminfo.get("MemTotal")
    if not total:
        return _memory_without_proc(tree)
    groups = [known for group in _groups(tree, "memory") if (known := _group_memory(tree, group)) is not None]
    limit, source = min(
        [(total, "MemTotal"), *((group.limit, group.source) for group in groups)], key=lambda pair: pair[0]
    )
    room = [max(0, group.limit - group.held) for group in groups]
    available = _available(meminfo, tree)
    lie = _lie(meminfo)
    if lie is not None:
        tree.doubt(
            _MEMINFO, lie, "the control groups' counters" if groups else "the least that it says, nothing else tells"
        )
    if available is not None and not (lie and groups):
        room.append(min(available, total))
    return MemoryFacts(total, limit, source, min(room) if room else None, meminfo.get("SwapTotal"))


def read_cpu(root: str | Path = "/", allowed: Iterable[int] | None = None) -> CpuFacts:
    """`allowed` are the hardware threads that the scheduler lets this process use; None asks the system."""
    return examine_cpu(Tree(root), allowed)


def examine_cpu(tree: Tree, allowed: Iterable[int] | None = None) -> CpuFacts:
    """As `read_cpu`; what could not be read is added to `tree.doubts`."""
    threads = _allowed(tree) if allowed is None else tuple(allowed)
    info = tree.text("proc/cpuinfo") or ""
    logical = len(re.findall(r"^processor\s*:", info, re.M)) or len(threads)
    usable, source = len(threads), "affinity" if len(threads) < logical else "processors"
    cores = _first_of_each_core(threads, tree)
    if len(cores) < usable:
        usable, source = len(cores), "physical cores"
    for group in _groups(tree, "cpu"):
        quota = _group_cores(tree, group)
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
        numa_nodes=_numa_nodes(threads, tree),
    )


def allowed_threads() -> tuple[int, ...]:
    """The hardware threads that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def physical_cores(threads: Iterable[int], root: str | Path = "/") -> tuple[int, ...]:
    """The first of `threads` on each physical core; all of them where the system does not say."""
    return _first_of_each_core(threads, Tree(root))


def oom_kills(root: str | Path = "/") -> int | None:
    """Processes that the kernel has killed for want of memory in this process's control group; None where it does not
    tell.

    The kernel counts a kill in the group of the victim, whichever ancestor's limit was hit, so the innermost counter is
    the right one: an ancestor's counts the kills of neighbours as well. Where the own group has none (no memory
    controller in it, or another namespace) the nearest ancestor's is the group that the process is accounted to. In the
    root group, which has no counter, it is the machine's.
    """
    tree = Tree(root)
    for group in _groups(tree, "memory"):
        name = "memory.events" if group.version == 2 else "memory.oom_control"
        count = (tree.pairs(f"{group.folder}/{name}") or {}).get("oom_kill")
        if count is not None:
            return count
    return (tree.pairs("proc/vmstat") or {}).get("oom_kill")


@dataclass(frozen=True)
class GroupUse:
    """The control group that this process's memory is accounted to: what it holds, page cache that the kernel gives
    back first left out, and which processes are in it or below it."""

    folder: str
    held_bytes: int
    pids: frozenset[int]


def own_group(root: str | Path = "/") -> GroupUse | None:
    """None where there is no memory controller, the group does not say what it holds, or it is too large to list."""
    tree = Tree(root)
    groups = _groups(tree, "memory")
    group = next((each for each in groups if tree.there(f"{each.folder}/{_usage_file(each)}")), None)
    if group is None:
        return None
    held, stat = tree.number(f"{group.folder}/{_usage_file(group)}"), tree.pairs(f"{group.folder}/memory.stat") or {}
    pids = _pids_below(tree, group.folder)
    if held is None or pids is None:
        return None
    return GroupUse(str(tree.path(group.folder)), max(0, held - _idle_file_bytes(group, stat)), pids)


class AvailableMemory:
    """`read_memory(root).available_bytes` for a sampler: the limited groups are found once, and every file is opened
    once. A group that gets its first limit later is not seen."""

    def __init__(self, root: str | Path = "/") -> None:
        self._tree = tree = _KeptTree(root)
        self._groups = [group for group in _groups(tree, "memory") if _group_memory(tree, group) is not None]

    def read(self) -> int | None:
        """Bytes; None where nothing tells."""
        tree = self._tree
        tree.doubts.clear()
        meminfo = parse_meminfo(tree.text(_MEMINFO) or "")
        if not meminfo.get("MemTotal"):
            return None
        known = [found for group in self._groups if (found := _group_memory(tree, group)) is not None]
        room = [max(0, group.limit - group.held) for group in known]
        available = _available(meminfo, tree)
        if available is not None and not (known and _lie(meminfo)):
            room.append(min(available, meminfo["MemTotal"]))
        return min(room) if room else None

    def close(self) -> None:
        self._tree.close()


class _KeptTree(Tree):
    """A tree whose files stay open: the kernel makes their text anew for each reading from the start."""

    def __init__(self, root: str | Path) -> None:
        super().__init__(root)
        self._open: dict[str, int] = {}

    def text(self, name: str) -> str | None:
        try:
            if name not in self._open:
                self._open[name] = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            return os.pread(self._open[name], _KEPT_BYTES, 0).decode("utf-8", "replace").replace("\0", "")
        except OSError:
            return None

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def parse_meminfo(text: str) -> dict[str, int]:
    """Bytes of every field. The unit is read, not assumed: some kernels and recordings write plain bytes."""
    return {name: int(number) << 10 if unit else int(number) for name, number, unit in _MEMINFO_LINE.findall(text)}


# ------------------------------------------------------------------------------------------------------ control groups


@dataclass(frozen=True)
class _Group:
    """One folder of a control-group mount, from the process's own up to the mount point."""

    version: int
    folder: str


@dataclass(frozen=True)
class _GroupMemory:
    limit: int
    held: int
    source: str


def _groups(tree: Tree, controller: str) -> list[_Group]:
    """Own group and all its ancestors, in every hierarchy that has `controller`; each folder once."""
    own = _own_paths(tree.text("proc/self/cgroup") or "")
    found: dict[str, _Group] = {}
    for version, mount_root, mount_point, options in _mounts(tree.text("proc/self/mountinfo") or ""):
        if version == 1 and controller not in options:
            continue
        path = own.get("" if version == 2 else controller)
        if path is None:
            continue
        point = mount_point.strip("/")
        parts = _below(path, mount_root)
        while parts and not os.path.isdir(tree.path("/".join((point, *parts)))):
            parts = parts[:-1]
        for count in range(len(parts), -1, -1):
            folder = "/".join((point, *parts[:count]))
            found.setdefault(folder, _Group(version, folder))
    return list(found.values())


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
    return found[:_MOUNT_LIMIT]


def _below(path: str, mount_root: str) -> tuple[str, ...]:
    """Folders from a mount that shows the subtree `mount_root` down to `path`; none for what lies outside of it."""
    if ".." in PurePosixPath(path).parts:
        return ()
    own, root = PurePosixPath(path), PurePosixPath(mount_root)
    if mount_root != "/" and own.is_relative_to(root):
        own = PurePosixPath("/") / own.relative_to(root)
    return tuple(part for part in own.parts if part != "/")[:_DEPTH_LIMIT]


def _group_memory(tree: Tree, group: _Group) -> _GroupMemory | None:
    """Limit and held bytes of one group; None where it has no limit of its own."""
    stat = tree.pairs(f"{group.folder}/memory.stat") or {}
    if group.version == 2:
        limits = {name: _limit(tree, f"{group.folder}/{name}") for name in ("memory.max", "memory.high")}
    else:
        limits = {"memory.limit_in_bytes": _limit(tree, f"{group.folder}/memory.limit_in_bytes")}
        limits["memory.stat hierarchical_memory_limit"] = stat.get("hierarchical_memory_limit")
    usage, idle = _usage_file(group), _idle_file_bytes(group, stat)
    known = {name: limit for name, limit in limits.items() if limit is not None and 0 <= limit < _UNLIMITED}
    if not known:
        return None
    held = tree.number(f"{group.folder}/{usage}")
    if held is None:
        tree.doubt(f"{group.folder}/{usage}", "the group is limited and does not say how much it holds", "nothing held")
    name = min(known, key=lambda key: known[key])
    return _GroupMemory(known[name], max(0, (held or 0) - idle), str(tree.path(group.folder) / name))


def _usage_file(group: _Group) -> str:
    return "memory.current" if group.version == 2 else "memory.usage_in_bytes"


def _idle_file_bytes(group: _Group, stat: dict[str, int]) -> int:
    """Page cache that nobody has asked for twice. Version 1 counts the groups below apart."""
    own = stat.get("inactive_file", 0)
    return own if group.version == 2 else stat.get("total_inactive_file", own)


def _pids_below(tree: Tree, folder: str) -> frozenset[int] | None:
    """Processes in a group and in those below it; None where they are more than anybody needs to list."""
    found: set[int] = set()
    for count, (path, _, files) in enumerate(os.walk(tree.path(folder))):
        if count >= _GROUPS_LIMIT:
            return None
        if "cgroup.procs" in files:
            name = os.path.join(path, "cgroup.procs")
            text = tree.text(os.path.relpath(name, tree.root))
            found.update(pid for word in (text or "").split() if (pid := whole(word)) is not None)
    return frozenset(found)


def _limit(tree: Tree, name: str) -> int | None:
    """A limit's file: a number, or `max` for none."""
    return None if tree.line(name) == "max" else tree.number(name)


def _group_cores(tree: Tree, group: _Group) -> tuple[int, str] | None:
    """Whole cores that a group's quota allows. Part of a core is not counted: a thread on it would be held up."""
    if group.version == 2:
        name = "cpu.max"
        words = (tree.text(f"{group.folder}/{name}") or "").split()
        quota, period = (whole(word) for word in words) if len(words) == 2 else (None, None)
    else:
        name = "cpu.cfs_quota_us"
        quota, period = tree.number(f"{group.folder}/{name}"), tree.number(f"{group.folder}/cpu.cfs_period_us")
    if quota is None or quota < 0 or period is None or period <= 0:
        return None
    return max(1, quota // period), str(tree.path(group.folder) / name)


# ------------------------------------------------------------------------------------------------------------- meminfo


def _available(meminfo: dict[str, int], tree: Tree) -> int | None:
    """MemAvailable, or what old kernels let one guess it from."""
    if "MemAvailable" in meminfo:
        return meminfo["MemAvailable"]
    if "MemFree" not in meminfo:
        tree.doubt(_MEMINFO, "says neither MemAvailable nor MemFree", "unknown")
        return None
    tree.doubt(_MEMINFO, "says no MemAvailable (kernels before 3.14 do not)", "MemFree + Cached - Shmem")
    return meminfo["MemFree"] + max(0, meminfo.get("Cached", 0) - meminfo.get("Shmem", 0))


def _lie(meminfo: dict[str, int]) -> str | None:
    """What no kernel says of itself: the marks of a file that lxcfs rewrites in part."""
    total, available = meminfo["MemTotal"], meminfo.get("MemAvailable")
    for name in ("Active", "MemFree", "MemAvailable"):
        if meminfo.get(name, 0) > total:
            return f"is rewritten (lxcfs?): {name} {meminfo[name] >> 20} MiB of MemTotal {total >> 20} MiB"
    if available is not None and available == meminfo.get("MemFree"):
        return (
            f"is rewritten (lxcfs?): MemAvailable is MemFree, {available >> 20} MiB, as if no cache could be given back"
        )
    return None


def _memory_without_proc(tree: Tree) -> MemoryFacts:
    """All of the machine's memory where there is no /proc. A recorded tree must not be filled from this machine."""
    if not tree.live:
        raise FileNotFoundError(errno.ENOENT, "it says no MemTotal", "/" + _MEMINFO)
    if hasattr(os, "sysconf"):
        # Whether it is available is not known here, and macOS would count its cache as used.
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        tree.doubt(_MEMINFO, "is not there: nothing says how much memory is available", "all of it")
        return MemoryFacts(total, total, "sysconf", total, None)
    raise OSError(errno.ENOSYS, "this system does not say how much memory it has")


# --------------------------------------------------------------------------------------------------------------- cores


def _first_of_each_core(threads: Iterable[int], tree: Tree) -> tuple[int, ...]:
    first: dict[str, int] = {}
    for thread in threads:
        siblings = tree.line(f"sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list")
        first.setdefault(siblings or f"thread {thread}", thread)
    return tuple(first.values())


def _allowed(tree: Tree) -> tuple[int, ...]:
    """The threads that this process may use; of a recorded tree those that the recording process might, or all."""
    if tree.live:
        return allowed_threads()
    status = re.search(r"^Cpus_allowed_list:\s*(\S+)", tree.text("proc/self/status") or "", re.M)
    there = {int(n) for n in re.findall(r"^processor\s*:\s*([0-9]{1,5})\s*$", tree.text("proc/cpuinfo") or "", re.M)}
    return tuple(sorted(_cpu_list(status.group(1)) & there if status and there else there))


def _numa_nodes(threads: Iterable[int], tree: Tree) -> int:
    """Memory nodes with a core that we may use, 1 where the system does not say. Nodes of memory alone (CXL, a GPU's)
    get no rank."""
    folder = "sys/devices/system/node"
    allowed = set(threads)
    lists = (tree.line(f"{folder}/{name}/cpulist") or "" for name in tree.names(folder, r"node[0-9]+"))
    return max(1, sum(1 for text in lists if allowed & _cpu_list(text)))


def _cpu_list(text: str) -> set[int]:
    """Threads of a list such as 0-3,8."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = whole(first), whole(last or first)
        if low is not None and high is not None and 0 <= low <= high < _THREAD_LIMIT:
            found.update(range(low, high + 1))
    return found
