"""What the exit status of a worker says of its death, and what to do about it. Pure.

status                    what is said                     fix
EXIT_DEVICE_LOST          lost its card                    DEVICE_LOST_FIX
SIGSEGV, SIGBUS, ...      was killed by it                 CRASH_FIX, where the rank is a card: our own code there is
                                                           Python, and what crashes below it is the driver's
SIGKILL, and the group's  was killed for want of memory    another budget (`homeserve.sizing.killed_for_memory`)
counter beside it
SIGTERM, ...              was killed by it: from outside   none
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from homeserve.layouts.ranks import RankDevice
from homeserve.wire.exit_status import EXIT_DEVICE_LOST

DEVICE_LOST_FIX = (
    "look at what the kernel says of the card (dmesg: lines with Xid or NVRM, or with amdgpu), reset it or restart the"
    " machine, or serve without it (--devices)"
)
CRASH_FIX = (
    "that is most likely the card's driver: homeserve doctor opens it by itself; look at what the kernel says (dmesg),"
    " update the driver, or serve without this card (--devices)"
)
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
ASKED_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Death:
    """`why` goes behind "rank N". The rest is as in `homeserve.fleet.spec.Loss`."""

    why: str
    oom: bool = False
    outside: bool = False
    device: bool = False
    crash: bool = False


def death_of(status: int, device: RankDevice, *, oom_kills_more: bool) -> Death:
    """Of a worker on `device`; `status` is negative for a signal. `oom_kills_more`: the kernel has killed for memory
    since the fleet started."""
    if status == EXIT_DEVICE_LOST:
        return Death(f"lost its card ({device.told})", device=True)
    if status >= 0:
        return Death(f"ended with status {status}")
    oom = -status == signal.SIGKILL and oom_kills_more
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    crash = device.is_card and -status in CRASHES
    where = f" on {device.told}" if crash else ""
    why = f"was killed by {name}{where}" + (" for want of memory" if oom else "")
    return Death(why, oom, -status in ASKED_TO_END, crash=crash)
