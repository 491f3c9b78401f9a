"""Was it the kernel's out-of-memory killer? A SIGKILL alone does not tell; the control group's counter beside it does.

The counter is read when a fleet starts and again when a rank was killed. Workers are in the group of their parent.
"""

from __future__ import annotations

from pathlib import Path

from budget.host import oom_kills


def oom_kill_count(root: Path = Path("/")) -> int | None:
    """Processes of our control group that the kernel has killed for memory; None where it does not say."""
    return oom_kills(root)
