"""Fires the one fault that a test asked for (homeserve.wire.faults), at the step and time it names."""

from __future__ import annotations

import errno
import os
import signal
import time

from homeserve.wire.faults import Fault
from homeserve.wire.records import Plan, PlanKind


class FaultRefused(Exception):
    """The plan is to be answered with this reason."""


class FaultPoint:
    """Counts the steps of this worker's life. `corrupts` is set once an answer is to be damaged."""

    def __init__(self, fault: Fault | None) -> None:
        self._fault = fault
        self._seen = 0
        self.corrupts = False

    def before(self, plan: Plan) -> None:
        """To be called before a plan runs: its steps, and a corrupt one damages its answer. May not return, return
        late, or raise FaultRefused or OSError."""
        if self._fault is not None and self._fault.step in steps_of(plan) and self.at(self._fault.step):
            self.corrupts = True

    def at(self, step: str) -> bool:
        """To be called before a step that is not the whole plan. True: what it makes is to be spoilt. Otherwise as
        `before`."""
        fault = self._fault
        if fault is None or fault.step != step:
            return False
        self._seen += 1
        if self._seen != fault.nth:
            return False
        self._fault = None
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.action == "delay":
            time.sleep(fault.delay_ms / 1000)
        elif fault.action == "refuse":
            raise FaultRefused(f"refused by a fault for tests ({fault.step}, {fault.nth})")
        elif fault.action == "enospc":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        else:
            return True
        return False

    def damaging(self, step: str) -> None:
        """The same for a step that makes nothing: its plan's answer is damaged instead."""
        if self.at(step):
            self.corrupts = True


def steps_of(plan: Plan) -> frozenset[str]:
    """Which steps a plan is as a whole: several where prefill runs beside decode. Rows with drafts continue."""
    if plan.kind == PlanKind.LOAD:
        return frozenset({"load"})
    return frozenset("prefill" if rows.tokens and not rows.drafts else "decode" for rows in plan.rows)
