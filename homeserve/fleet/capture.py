"""Evidence of a life that cannot go on, taken before anything is killed: one folder with what every rank was doing.

    event.json     why, when, who is named, who waited for whom
    plans.json     the last plans as they lie in the plan log, and who still owes an answer to each
    rings.json     positions of the plan log, of each rank's report ring, and of the mailboxes and channels of acts
    rankK.stack    Python stacks of all threads (SIGUSR1, faulthandler), or why there are none; then the kernel's view:
                   state, where it sleeps, memory
    rankK.log      its last log lines

All ranks are looked at, at the same moment. A process that was stopped (SIGSTOP) shows the kernel's view first; when
everything else is written down it is continued, because only then can it write where it had stopped. Nothing that it
does after that is believed, and it is about to be killed.

Taking evidence cannot make things worse: it is bounded in time and in the number of folders per server, and a failure
to write is logged and forgotten. Plans hold token ids of requests, so the folder is readable by its owner only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from homeserve.wire.records import FlipOrder, Plan

log = logging.getLogger(__name__)

CAPTURES_MAX = 8
"""Folders that one server writes in its life."""
STACKS_TIMEOUT_S = 1.0
POLL_S = 0.02
STILL_POLLS = 3
"""Looks in a row at which a file of stacks has not grown, after which it is whole."""
STOPPED = "T"
_STACKS_BYTES_MAX = 1 << 20
_PROCESS_FILES = ("status", "wchan", "syscall", "stack")


@dataclass(frozen=True)
class RankEvidence:
    """What a capture needs of a rank. `pid` None: its process has ended. `stacks_fd` is the file that its faulthandler
    writes to."""

    rank: int
    pid: int | None
    stacks_fd: int
    log_tail: Sequence[str]


@dataclass(frozen=True)
class Sight:
    """What was seen of a rank: `state` is the kernel's letter (T: stopped), empty where the process has ended or the
    system does not tell."""

    rank: int
    state: str
    text: str
    log_tail: Sequence[str]


@dataclass
class Captures:
    """Writes evidence folders, each with its own number, up to `CAPTURES_MAX`."""

    parent: str | None
    taken: int = field(default=0, init=False)

    async def look(self, ranks: Sequence[RankEvidence]) -> tuple[Sight, ...]:
        """Look at every rank now. Never raises. Without stacks where no folder will be written."""
        states = {rank.rank: process_state(rank.pid) for rank in ranks}
        views = {rank.rank: _process(rank.pid) for rank in ranks}
        stacks = {rank.rank: "" for rank in ranks}
        if self.taken < CAPTURES_MAX:
            running = [rank for rank in ranks if states[rank.rank] != STOPPED]
            stopped = [rank for rank in ranks if states[rank.rank] == STOPPED]
            for group in (running, stopped):
                found = await asyncio.gather(*(_stacks(rank, wake=group is stopped) for rank in group))
                stacks |= {rank.rank: text for rank, text in zip(group, found, strict=True)}
        return tuple(
            Sight(rank.rank, states[rank.rank], stacks[rank.rank] + views[rank.rank], rank.log_tail) for rank in ranks
        )

    async def write(
        self,
        event: Mapping[str, Any],
        plans: Sequence[Mapping[str, Any]],
        rings: Mapping[str, Any],
        sights: Sequence[Sight],
    ) -> str:
        """Write one folder; returns its path, or in parentheses why there is none. Never raises."""
        if self.taken >= CAPTURES_MAX:
            return f"(no more than {CAPTURES_MAX} captures are kept)"
        self.taken += 1
        try:
            return await asyncio.to_thread(self._write, event, plans, rings, sights)
        except OSError as error:
            log.warning("evidence of a loss could not be written", extra={"why": str(error)})
            return f"(not written: {error.strerror})"

    def _write(
        self,
        event: Mapping[str, Any],
        plans: Sequence[Mapping[str, Any]],
        rings: Mapping[str, Any],
        sights: Sequence[Sight],
    ) -> str:
        parent = Path(self.parent or tempfile.gettempdir())
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"homeserve-capture-{os.getpid()}-{self.taken}-", dir=parent))
        head = {"at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "engine_pid": os.getpid()}
        for name, content in (("event", {**head, **event}), ("plans", plans), ("rings", rings)):
            (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
        for sight in sights:
            (folder / f"rank{sight.rank}.stack").write_text(sight.text)
            (folder / f"rank{sight.rank}.log").write_text("\n".join(sight.log_tail) + "\n")
        return str(folder)


async def _stacks(rank: RankEvidence, *, wake: bool) -> str:
    """Ask one rank for its stacks and wait until its file stops growing. `wake`: it is stopped, and continued for
    this."""
    if rank.pid is None:
        return "its process has ended\n"
    start = size = os.fstat(rank.stacks_fd).st_size
    try:
        if wake:
            _signal_main_thread(rank.pid)
            os.kill(rank.pid, signal.SIGCONT)
        else:
            os.kill(rank.pid, signal.SIGUSR1)
    except ProcessLookupError:
        return f"process {rank.pid} is gone\n"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STACKS_TIMEOUT_S):
            still = 0
            while still < STILL_POLLS:
                await asyncio.sleep(POLL_S)
                now = os.fstat(rank.stacks_fd).st_size
                still = still + 1 if now == size > start else 0
                size = now
    text = os.pread(rank.stacks_fd, _STACKS_BYTES_MAX, start).decode(errors="replace")
    head = f"process {rank.pid} was stopped, and was continued to write this\n" if wake else ""
    return head + (text or f"process {rank.pid} did not answer within {STACKS_TIMEOUT_S} s\n")


def _signal_main_thread(pid: int) -> None:
    """SIGUSR1 for the thread that runs plans. Sent to the process, any thread that wakes up might take it, while the
    main one goes on."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is None or tgkill(pid, pid, signal.SIGUSR1) != 0:
        os.kill(pid, signal.SIGUSR1)


def process_state(pid: int | None) -> str:
    """The kernel's letter for a process: R, S, D, T, Z …; empty where it does not tell."""
    if pid is None:
        return ""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _process(pid: int | None) -> str:
    if pid is None:
        return ""
    parts = []
    for name in _PROCESS_FILES:
        try:
            parts.append(f"== {name}\n{Path(f'/proc/{pid}/{name}').read_text(errors='replace').rstrip()}\n")
        except OSError as error:
            parts.append(f"== {name}: {error.strerror}\n")
    return "".join(parts)


def readable(plan: Plan | str, answered: Sequence[int]) -> dict[str, Any]:
    """A plan of the log as JSON, or why it cannot be read. Token and page numbers in full: they are what a hang is
    about. `answered`: the last plan that each rank has answered."""
    if isinstance(plan, str):
        return {"unreadable": plan}
    shown: dict[str, Any] = msgspec.structs.asdict(plan)
    shown["new"] = [
        {"lane": n.lane, "request": n.request, "prompt_len": n.prompt_len, "history": len(n.history) // 4}
        for n in plan.new
    ]
    shown["rows"] = [
        {
            "lane": r.lane,
            "request": r.request,
            "start": r.start,
            "tokens": memoryview(r.tokens).cast("i").tolist(),
            "pages": memoryview(r.pages).cast("i").tolist(),
            "sample": r.sample,
        }
        for r in plan.rows
    ]
    shown["load"] = None if plan.load is None else msgspec.structs.asdict(plan.load)
    shown["flip"] = None if plan.flip is None else _readable_order(plan.flip)
    shown["owed_by"] = [rank for rank, last in enumerate(answered) if last < plan.seq]
    return shown


def _readable_order(order: FlipOrder) -> dict[str, Any]:
    """What is live is told by how much it is."""
    shown: dict[str, Any] = {"flip": order.flip, "epoch": order.epoch, "to": order.to, "stage": order.stage}
    if order.live is not None:
        shown["live_pages"] = [int.from_bytes(pages, "little").bit_count() for pages in order.live.pages]
        shown["live_states"] = int.from_bytes(order.live.states, "little").bit_count()
    shown["digests"] = [msgspec.structs.asdict(each) for each in order.digests]
    return shown
