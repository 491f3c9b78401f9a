"""Evidence of a hang, taken before anything is killed: one folder with what every rank was doing.

    event.json             why, when, ring positions, processes
    plans.json             the last plans as they lie in the plan log
    rank-N-stacks.txt      Python stacks of all threads (SIGUSR1, faulthandler), or why there are none
    rank-N-process.txt     the kernel's view: state, where it sleeps, memory
    rank-N-log.txt         its last log lines

Taking evidence changes nothing: a stopped process stays stopped, and its stack file says that it did not answer. It
cannot make things worse either: it is bounded in time and in the number of folders per server, and a failure to write
is logged and forgotten. Plans hold token ids of requests, so the folder is readable by its owner only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from homeserve.wire.records import Plan

log = logging.getLogger(__name__)

CAPTURES_MAX = 8
"""Folders that one server writes in its life."""
STACKS_TIMEOUT_S = 1.0
_STACKS_BYTES_MAX = 1 << 20
_PROCESS_FILES = ("status", "wchan", "syscall", "stack")


@dataclass(frozen=True)
class RankEvidence:
    """What a capture needs of a rank. `stacks_fd` is the file that its faulthandler writes to."""

    rank: int
    pid: int
    stacks_fd: int
    answered: int
    reports_published: int
    reports_taken: int
    log_tail: Sequence[str]


@dataclass
class Captures:
    """Writes evidence folders, each with its own number, up to `CAPTURES_MAX`."""

    parent: str | None
    taken: int = field(default=0, init=False)

    async def take(self, why: str, issued: int, plans: Sequence[Plan | str], ranks: Sequence[RankEvidence]) -> str:
        """Write one folder; returns its path, or in parentheses why there is none. Never raises."""
        if self.taken >= CAPTURES_MAX:
            return f"(no more than {CAPTURES_MAX} captures are kept)"
        self.taken += 1
        stacks = {rank.rank: await _stacks(rank) for rank in ranks}
        event = {
            "why": why,
            "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "engine_pid": os.getpid(),
            "plans_issued": issued,
            "ranks": [
                {
                    "rank": rank.rank,
                    "pid": rank.pid,
                    "answered": rank.answered,
                    "reports_published": rank.reports_published,
                    "reports_taken": rank.reports_taken,
                }
                for rank in ranks
            ],
        }
        try:
            return await asyncio.to_thread(self._write, event, plans, ranks, stacks)
        except OSError as error:
            log.warning("evidence of a hang could not be written", extra={"why": str(error)})
            return f"(not written: {error.strerror})"

    def _write(
        self, event: dict[str, Any], plans: Sequence[Plan | str], ranks: Sequence[RankEvidence], stacks: dict[int, str]
    ) -> str:
        parent = Path(self.parent or tempfile.gettempdir())
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"homeserve-capture-{os.getpid()}-{self.taken}-", dir=parent))
        (folder / "event.json").write_text(json.dumps(event, indent=1) + "\n")
        shown = [plan if isinstance(plan, str) else _readable(plan) for plan in plans]
        (folder / "plans.json").write_text(json.dumps(shown, indent=1) + "\n")
        for rank in ranks:
            (folder / f"rank-{rank.rank}-stacks.txt").write_text(stacks[rank.rank])
            (folder / f"rank-{rank.rank}-process.txt").write_text(_process(rank.pid))
            (folder / f"rank-{rank.rank}-log.txt").write_text("\n".join(rank.log_tail) + "\n")
        return str(folder)


async def _stacks(rank: RankEvidence) -> str:
    """Ask one rank for its stacks and wait until its file stops growing."""
    start = size = os.fstat(rank.stacks_fd).st_size
    try:
        os.kill(rank.pid, signal.SIGUSR1)
    except ProcessLookupError:
        return f"process {rank.pid} is gone\n"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STACKS_TIMEOUT_S):
            while True:
                await asyncio.sleep(0.02)
                now = os.fstat(rank.stacks_fd).st_size
                if now == size and now > start:
                    break
                size = now
    text = os.pread(rank.stacks_fd, _STACKS_BYTES_MAX, start).decode(errors="replace")
    return text or f"process {rank.pid} did not answer within {STACKS_TIMEOUT_S} s\n"


def _process(pid: int) -> str:
    parts = []
    for name in _PROCESS_FILES:
        try:
            parts.append(f"== {name}\n{Path(f'/proc/{pid}/{name}').read_text(errors='replace').rstrip()}\n")
        except OSError as error:
            parts.append(f"== {name}: {error.strerror}\n")
    return "".join(parts)


def _readable(plan: Plan) -> dict[str, Any]:
    """A plan as JSON: token and page numbers in full, they are what a hang is about."""
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
    return shown
