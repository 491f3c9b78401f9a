"""Was it the kernel's out-of-memory killer? A SIGKILL alone does not tell; the cgroup's counter beside it does.

The counter of this process's own cgroup is read when a fleet starts and again when a rank was killed. Workers are in
the same cgroup as their parent. cgroup v2 keeps `oom_kill` in memory.events, v1 in memory.oom_control.
"""

from __future__ import annotations

from pathlib import Path


def oom_kill_count(proc: Path = Path("/proc/self"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Processes of this cgroup that the kernel has killed for memory; None where it does not say."""
    try:
        lines = (proc / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        relative = path.lstrip("/")
        if controllers == "":
            candidates = [root / relative / "memory.events", root / "unified" / relative / "memory.events"]
        elif "memory" in controllers.split(","):
            # In a container the path is the host's; what is mounted is the container's own cgroup.
            candidates = [root / "memory" / relative / "memory.oom_control", root / "memory" / "memory.oom_control"]
        else:
            continue
        for file in candidates:
            if (count := _read(file)) is not None:
                return count
    return None


def _read(file: Path) -> int | None:
    try:
        for line in file.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        return None
    return None
