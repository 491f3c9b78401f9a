"""What processes of ours hold now of the host's memory, cheaply: for a plan that others are in the way of.

Of each process the kernel's own sum: what is anonymous, and its share of shared memory. Pages of files are left out:
the kernel counts those as available, whoever maps them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_COUNTED = ("Pss_Anon:", "Pss_Shmem:")
_KIB = 1024


def held_bytes(pids: Iterable[int], root: str | Path = "/") -> int | None:
    """None where the system does not tell. A process that has gone holds nothing."""
    found = [_of_process(Path(root, f"proc/{pid}/smaps_rollup")) for pid in pids]
    known = [size for size in found if size is not None]
    return sum(known) if known else None


def _of_process(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    words = [line.split() for line in lines]
    sizes = [int(word[1]) * _KIB for word in words if len(word) == 3 and word[0] in _COUNTED]
    return sum(sizes) if len(sizes) == len(_COUNTED) else None
