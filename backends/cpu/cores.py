"""How many threads this process may really keep busy: affinity, physical cores, and the cgroup's CPU quota.

A thread per hardware thread would be too many where two of them share a core (decode is bound by memory, and the second
adds nothing) and where a container may use less time than it sees cores: a quota of 2 on 64 cores would be eaten by
spinning threads. `root` is `/`; tests give a tree of their own.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable
from pathlib import Path

V1_CONTROLLERS = ("cpu", "cpu,cpuacct", "cpuacct,cpu")

_QuotaReader = Callable[[Path], float | None]


def allowed_cores() -> tuple[int, ...]:
    """The hardware threads that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def physical_cores(allowed: Iterable[int], root: Path = Path("/")) -> tuple[int, ...]:
    """The first allowed hardware thread of each physical core; all of them where the system does not say."""
    seen: dict[str, int] = {}
    for core in allowed:
        siblings = _read(root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        seen.setdefault(siblings or str(core), core)
    return tuple(seen.values())


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that the cgroups of this process allow, the least of all levels; None without a limit."""
    limits: list[float] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        if hierarchy == "0":
            limits += _walk_up(root / "sys/fs/cgroup", path, _quota_v2)
        elif "cpu" in controllers.split(","):
            for mount in V1_CONTROLLERS:
                limits += _walk_up(root / "sys/fs/cgroup" / mount, path, _quota_v1)
    return min(limits, default=None)


def thread_count(root: Path = Path("/"), allowed: Iterable[int] | None = None) -> int:
    """Threads for one worker that has the machine to itself; at least 1."""
    cores = len(physical_cores(allowed_cores() if allowed is None else allowed, root))
    quota = cpu_quota(root)
    return max(1, cores if quota is None else min(cores, int(quota)))


def cpu_name(root: Path = Path("/")) -> str:
    """The processor's name for people."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()


def _walk_up(mount: Path, path: str, quota_of: _QuotaReader) -> list[float]:
    """Quotas of the group and of all groups above it; a container may see only its own, at the mount itself."""
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    folders = [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [quota for folder in folders if (quota := quota_of(folder)) is not None]


def _quota_v2(folder: Path) -> float | None:
    fields = _read(folder / "cpu.max").split()
    return _ratio(fields[0], fields[1]) if len(fields) == 2 else None


def _quota_v1(folder: Path) -> float | None:
    return _ratio(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> float | None:
    """None for "max", -1 and anything that is no number."""
    try:
        time, of = int(quota), int(period)
    except ValueError:
        return None
    return time / of if time > 0 and of > 0 else None


def _read(path: Path) -> str:
    """A file that is not there, or not ours to read, says nothing."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
