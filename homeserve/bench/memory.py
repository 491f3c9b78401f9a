"""What a process and all below it hold."""

from __future__ import annotations

import re
from pathlib import Path

import psutil  # type: ignore[import-untyped]

ProcessError = psutil.Error
"""What is raised for a process that is gone, or somebody else's."""


def memory_mib(pid: int) -> float:
    """Proportional set size of the whole process tree: shared pages count once over all who share them."""
    root = psutil.Process(pid)
    return sum(_pss_kib(process.pid) for process in [root, *root.children(recursive=True)]) / 1024


def _pss_kib(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it ended meanwhile
        return 0
    match = re.search(r"^Pss: +(\d+) kB", text, flags=re.MULTILINE)
    return int(match[1]) if match else 0
