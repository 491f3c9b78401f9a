"""`homeserve ARGUMENTS...` that ends with its parent: python -m homeserve.integrations.tether PARENT_PID ARGUMENTS...

A process that is killed with SIGKILL ends nobody. On Linux the kernel can be asked, before anything is started, to
send this process a SIGTERM when its parent is gone; it then drains and takes down what it started, as after `homeserve
down`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

ORPHANED = 4
"""Exit code where the parent was gone before it began."""
_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> int:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(argv[0]):
        return ORPHANED
    from homeserve import cli

    return cli.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
