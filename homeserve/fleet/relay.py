"""A worker's stdout and stderr, line by line into the engine's log, marked with its rank.

A worker logs JSON lines (homeserve.log), which become log records here with their level and facts; any other line (a
library's, a crash's stack) is a warning as it stands. Both length and rate are bounded: a worker that floods its log
slows down nobody, and what was left out is counted and said.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque

log = logging.getLogger("homeserve.worker")

LINE_BYTES_MAX = 8192
LINES_PER_SECOND = 100
TAIL_LINES = 50
FATAL = "Fatal Python error:"
"""What a crash begins with (faulthandler)."""
_OWN = ("at", "level", "from", "event", "rank")


class Relay:
    """The lines of one worker. `tail` keeps the last of them, for errors and captures."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._second = -1
        self._count = 0
        self.dropped = 0
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._fatal = ""

    async def run(self, stream: asyncio.StreamReader) -> None:
        """Relay until the stream ends."""
        rest = b""
        while data := await stream.read(LINE_BYTES_MAX):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._line(line)
            if len(rest) > LINE_BYTES_MAX:
                self._line(rest)
                rest = b""
        if rest:
            self._line(rest)
        if self.dropped:
            log.warning("log lines left out", extra={"rank": self._rank, "count": self.dropped})

    def last_words(self) -> str:
        """For an error about a worker that is gone: what Python said of its death, which has the stacks of all threads
        behind it, else the last line; empty if it said nothing."""
        if self._fatal:
            return self._fatal[:500]
        return self.tail[-1][:500] if self.tail else ""

    def _line(self, raw: bytes) -> None:
        text = raw[:LINE_BYTES_MAX].decode(errors="replace").rstrip()
        if not text:
            return
        level, event, facts = _parse(text)
        self.tail.append(event)
        if text.startswith(FATAL):
            self._fatal = text
        if self._passes(int(asyncio.get_running_loop().time())):
            log.log(level, "%s", event, extra={**facts, "rank": self._rank})
        else:
            self.dropped += 1

    def _passes(self, second: int) -> bool:
        if second != self._second:
            self._second, self._count = second, 0
        self._count += 1
        return self._count <= LINES_PER_SECOND


def _parse(text: str) -> tuple[int, str, dict[str, object]]:
    """Level, event and facts of a line."""
    if text.startswith("{"):
        try:
            line = json.loads(text)
            level = logging.getLevelNamesMapping()[str(line["level"]).upper()]
            facts = {f"worker_{name}": value for name, value in line.items() if name not in _OWN}
            trace = str(facts.pop("worker_trace", ""))
            return level, f"{line['event']}\n{trace}" if trace else str(line["event"]), facts
        except (ValueError, KeyError, RecursionError):
            pass  # it only looked like one of ours; shown as it stands
    return logging.WARNING, text, {}
