"""One worker process as the engine holds it: the process, its memory, its bells, its log lines.

    engine                                     worker
      log segment, report segment    ═══════▶  mapped from inherited descriptors
      plan bell     write end ───────────────▶ read end      a plan is in the log; ends with the engine
      report bell   read end  ◀─────────────── write end     a report is in the ring; ends with the worker
      acts segment            ═══════════════  mapped from an inherited descriptor, where ranks exchange anything
      life pipe     write end ───────────────▶ read end      never written; ends with the engine
      boot pipe     the boot record, then end ▶ read once
      stacks file   read at a capture  ◀────── written on SIGUSR1
      stdout and stderr  ◀──────────────────── log lines

The worker is in a session of its own, so that a Ctrl-C in the terminal reaches the engine alone, which then stops it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from homeserve.fleet.acts import ActsMemory
from homeserve.fleet.capture import RankEvidence
from homeserve.fleet.relay import Relay
from homeserve.fleet.spec import ActSizes, Exchanges, FleetSpec
from homeserve.wire.children import environment
from homeserve.wire.codec import encode
from homeserve.wire.doorbell import BellReader, BellWriter
from homeserve.wire.records import Boot, RankFacts, Result
from homeserve.wire.ring import PROGRESS_SLOTS, ReportReader, Slots, ring_bytes, slot_bytes_for
from homeserve.wire.segments import Segment


class RankProcess:
    """Rank `rank` of one fleet life. Whatever it holds is released by `close`, also after a spawn that failed."""

    def __init__(
        self, rank: int, spec: FleetSpec, plan_memory: Segment, fault: str, acts: ActsMemory | None = None
    ) -> None:
        self.rank = rank
        self.process: Process | None = None
        self.relay = Relay(rank)
        self.greeted = False
        self.pending = 0
        """Reports announced and not taken yet."""
        self.facts: RankFacts | None = None
        self.busy_us = self.waited_us = self.idle_us = 0
        """Computing, waiting for other ranks inside plans, and waiting for plans."""
        self.exchanges = Exchanges()
        self._child_fds: list[int] = []
        with ExitStack() as held:
            held.callback(self._close_child_fds)
            report_slots = spec.plans_in_flight + PROGRESS_SLOTS
            report_slot_bytes = slot_bytes_for(spec.report_slot_bytes)
            memory = Segment.create(f"report-{rank}", ring_bytes(report_slots, report_slot_bytes))
            held.callback(memory.close)
            slots = Slots(memory.view, report_slots, report_slot_bytes, create=True)
            held.callback(slots.release)
            stacks = held.enter_context(tempfile.TemporaryFile())
            plan_bell_fd, write_fd = self._pipe_to_child()
            self._plan_bell = BellWriter(write_fd)
            held.callback(self._plan_bell.close)
            read_fd, report_bell_fd = self._pipe_from_child()
            self.bell = BellReader(read_fd, blocking=False)
            held.callback(self.bell.close)
            life_fd, write_fd = self._pipe_to_child()
            held.callback(os.close, write_fd)
            self._held = held.pop_all()
        self.reports = ReportReader(slots)
        self._report_memory = memory
        self._stacks_fd = stacks.fileno()
        sizes = acts.sizes if acts is not None else ActSizes(0, 0, 0, 0)
        device = spec.device(rank)
        self._boot = Boot(
            rank=rank,
            ranks=spec.ranks,
            log_slots=spec.plans_in_flight,
            log_slot_bytes=slot_bytes_for(spec.slot_bytes),
            report_slots=report_slots,
            report_slot_bytes=report_slot_bytes,
            backend=device.backend,
            device_index=device.index,
            device=device.id,
            device_name=device.name,
            fleet=tuple(spec.device(each).backend for each in range(spec.ranks)),
            threads=spec.threads,
            cores=spec.cores[rank] if spec.cores else (),
            isa=spec.isa,
            fault=fault,
            log_level=spec.log_level,
            log_fd=plan_memory.fd,
            report_fd=memory.fd,
            plan_bell_fd=plan_bell_fd,
            report_bell_fd=report_bell_fd,
            life_fd=life_fd,
            stacks_fd=self._stacks_fd,
            parent_pid=os.getpid(),
            acts_fd=acts.fd if acts is not None else -1,
            weights_fd=acts.weights_fd if acts is not None else -1,
            kv_fd=acts.kv_fd if acts is not None else -1,
            state_fd=acts.state_fd if acts is not None else -1,
            transit_fd=acts.transit_fd if acts is not None else -1,
            piece_floats=sizes.piece_floats,
            message_floats=sizes.message_floats,
            token_floats=sizes.token_floats,
            acts_depth=sizes.depth,
            exchange_timeout_s=spec.exchange_allowed_s,
            spin_us=spec.spin_us,
        )

    async def spawn(self) -> None:
        """Start the process. Raises OSError where the system cannot."""
        boot_fd, write_fd = self._pipe_to_child()
        os.write(write_fd, encode(self._boot))  # far below what a pipe holds
        os.close(write_fd)
        boot = self._boot
        together = (boot.acts_fd, boot.weights_fd, boot.kv_fd, boot.state_fd, boot.transit_fd)
        shared = [fd for fd in (boot.log_fd, boot.report_fd, boot.stacks_fd, *together) if fd >= 0]
        try:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # what lies in the current folder is not imported
                "-m",
                "homeserve.worker",
                str(boot_fd),
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                env=environment(os.environ),
                pass_fds=(*self._child_fds, *shared),
                start_new_session=True,
            )
        finally:
            self._close_child_fds()

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    def announce(self) -> None:
        """Ring for one plan. A worker that is gone does not hear it; its death is told elsewhere."""
        self._plan_bell.ring()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process; to its whole session where it is to die at once."""
        if self.process is None or self.process.returncode is not None:
            return
        try:
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                os.kill(self.process.pid, number)
        except ProcessLookupError:
            pass  # it ended a moment ago and is about to be reaped

    def count(self, result: Result) -> None:
        """Keep what a result says of the rank itself."""
        self.busy_us += result.busy_us - result.waited_us
        self.waited_us += result.waited_us
        self.idle_us += result.idle_us
        self.exchanges.count(result)
        self.facts = result.facts or self.facts

    def evidence(self) -> RankEvidence:
        alive = self.process is not None and self.process.returncode is None
        return RankEvidence(self.rank, self.pid if alive else None, self._stacks_fd, tuple(self.relay.tail))

    def positions(self, answered: int) -> dict[str, Any]:
        """Where its report ring stands, as plain data."""
        boot, reports = self._boot, self.reports
        ring = {"slots": boot.report_slots, "published": reports.published, "taken": reports.taken}
        return {"rank": self.rank, "pid": self.pid, "answered": answered, "reports": ring}

    def rss_mib(self) -> float | None:
        """Resident memory now; None where the system does not tell or the process is gone."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        except (OSError, IndexError, ValueError):
            return None
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    @property
    def memory_name(self) -> str | None:
        return self._report_memory.path.name if self._report_memory.path is not None else None

    def unlink(self) -> None:
        self._report_memory.unlink()

    def close(self) -> None:
        """Release memory and descriptors. The process has ended, or has lost its last tie to this one."""
        self._held.close()

    # -------------------------------------------------------------------------------------------------------- pipes

    def _pipe_to_child(self) -> tuple[int, int]:
        """(child's read end, our write end)"""
        read_fd, write_fd = os.pipe()
        self._child_fds.append(read_fd)
        return read_fd, write_fd

    def _pipe_from_child(self) -> tuple[int, int]:
        """(our read end, child's write end)"""
        read_fd, write_fd = os.pipe()
        self._child_fds.append(write_fd)
        return read_fd, write_fd

    def _close_child_fds(self) -> None:
        while self._child_fds:
            os.close(self._child_fds.pop())
