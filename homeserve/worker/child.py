"""A worker's life from its boot record to its exit status.

Until Hello this process must not die silently or outlive its parent, so the first things that it does are about that:

- SIGINT is ignored: a Ctrl-C in the terminal is the engine's to handle.
- On Linux the kernel kills it when the parent dies (PR_SET_PDEATHSIG); everywhere a thread waits on a pipe that ends
  with the parent. Both, because the first does not exist everywhere and the second needs a scheduler that is not stuck.
- SIGUSR1 writes every thread's stack to a file that the engine reads (homeserve.fleet.capture); a crash writes them
  there and to stderr.

Exit status (`homeserve.wire.exit_status`): 0 after STOP; others on a damaged plan log, when the engine went first, and
when the rank's card is lost. That one ends the process at once: to give back what it held would ask the driver again.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading

from homeserve import log as logs
from homeserve.errors import WireError
from homeserve.wire.codec import decode
from homeserve.wire.doorbell import BellReader, BellWriter
from homeserve.wire.exit_status import EXIT_DEVICE_LOST, EXIT_ENGINE_GONE, EXIT_OK, EXIT_WIRE
from homeserve.wire.faults import parse
from homeserve.wire.records import Boot, Hello
from homeserve.wire.ring import PlanLogReader, ReportWriter, Slots, ring_bytes
from homeserve.wire.segments import Segment

log = logging.getLogger(__name__)

BOOT_BYTES_MAX = 64 * 1024
_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Entry of `python -m homeserve.worker BOOT_FD`: the boot record waits in the pipe BOOT_FD."""
    if len(argv) != 1 or not argv[0].isdigit():
        sys.stderr.write("homeserve.worker is started by homeserve itself: run `homeserve up`\n")
        return 2
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    boot: Boot = decode(_read_all(int(argv[0])), Boot)
    _die_with_parent(boot)
    faulthandler.enable(file=sys.stderr, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=boot.stacks_fd, all_threads=True, chain=False)
    logs.setup("json", boot.log_level)
    _limit_numpy_threads(boot)
    try:
        _serve(boot)
    except WireError as error:
        log.error("the plan log cannot be trusted any more: %s", error.message)
        return EXIT_WIRE
    return EXIT_OK


def _serve(boot: Boot) -> None:
    # Imported after the parent's death is watched for: NumPy takes a while.
    from backends.gpu.errors import DeviceLost
    from homeserve.worker.faults import FaultPoint
    from homeserve.worker.loop import EngineGone, Reports, ThrottledProgress, run_plans
    from homeserve.worker.runner import Runner

    plan_memory = Segment.attach(boot.log_fd, ring_bytes(boot.log_slots, boot.log_slot_bytes))
    report_memory = Segment.attach(boot.report_fd, ring_bytes(boot.report_slots, boot.report_slot_bytes))
    plan_slots = Slots(plan_memory.view, boot.log_slots, boot.log_slot_bytes, create=False)
    report_slots = Slots(report_memory.view, boot.report_slots, boot.report_slot_bytes, create=False)
    reports = Reports(ReportWriter(report_slots, reserve=boot.log_slots), BellWriter(boot.report_bell_fd))
    bell = BellReader(boot.plan_bell_fd, blocking=True)
    faults = FaultPoint(parse(boot.fault))
    runner = Runner(boot, ThrottledProgress(boot.rank, reports), faults)
    try:
        reports.send(Hello(boot.rank, os.getpid()))
        run_plans(boot.rank, PlanLogReader(plan_slots), bell, reports, runner, faults)
    except DeviceLost as error:
        log.critical("%s", error.message, extra={"fix": error.fix, "card": error.card or boot.device_name})
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_DEVICE_LOST)
    except EngineGone:
        log.warning("the engine is gone")
        sys.exit(EXIT_ENGINE_GONE)
    finally:
        runner.close()


def _die_with_parent(boot: Boot) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != boot.parent_pid:  # it died before the line above
            os._exit(EXIT_ENGINE_GONE)
    threading.Thread(target=_wait_for_parent, args=(boot.life_fd,), name="parent", daemon=True).start()


def _wait_for_parent(life_fd: int) -> None:
    while os.read(life_fd, 1):
        pass
    os._exit(EXIT_ENGINE_GONE)


def _limit_numpy_threads(boot: Boot) -> None:
    """NumPy's matrix library (whichever it was built with) reads its number once, when it is imported."""
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
        os.environ[name] = str(max(1, boot.threads))


def _read_all(fd: int) -> bytes:
    data = b""
    while len(data) <= BOOT_BYTES_MAX and (part := os.read(fd, 4096)):
        data += part
    os.close(fd)
    return data
