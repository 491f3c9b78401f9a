"""How many threads this process may really keep busy, and on what.

What limits them (affinity, physical cores, control groups) is read in one place, `budget.host`, so that what `up`
announces is what the worker uses. `root` is `/`; tests give a tree of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from budget.host import allowed_threads, read_cpu


def allowed_cores() -> tuple[int, ...]:
    """The hardware threads that this process may run on."""
    return allowed_threads()


def thread_count(root: Path = Path("/"), allowed: Iterable[int] | None = None) -> int:
    """Threads for one worker that has the machine to itself; at least 1."""
    return read_cpu(root, allowed).usable


def cpu_name(root: Path = Path("/")) -> str:
    """The processor's name for people."""
    return read_cpu(root).name
