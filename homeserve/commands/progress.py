"""Progress of bytes (and of kernels that are compiled) on a terminal as a bar, elsewhere as a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import IO, Any

from budget.facts import MIB

BAR_AFTER_S = 0.3
"""Work that is over sooner gets no bar: it would only flicker, and importing its library takes as long."""
LINE_EVERY_S = 2.0
COUNTED = {"compiling kernels": "kernels"}
"""Stages, by how they begin, whose progress is a number of things and not of bytes."""


class ProgressLines:
    """Stages of a load or a fetch, one after the other: each ends in one line with its bytes and seconds."""

    def __init__(self, out: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._stage: str | None = None
        self._began = 0.0
        self._last_line = 0.0
        self._ended = False
        self._bar: _Bar | None = None

    def update(self, stage: str, done_bytes: int | None, total_bytes: int | None) -> None:
        now = self._clock()
        if stage != self._stage:
            self.close()
            self._stage, self._began, self._last_line, self._ended = stage, now, now, False
        if self._ended or not done_bytes or not total_bytes:
            return
        if done_bytes >= total_bytes:
            self.close()
            self._ended = True
            self._say(f"{stage}: {_amount(stage, total_bytes)} in {now - self._began:.1f} s")
        elif self._out.isatty():
            self._draw(stage, done_bytes, total_bytes, now)
        elif now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            done, _, _ = _amount(stage, done_bytes).partition(" ")
            self._say(f"{stage}: {done} of {_amount(stage, total_bytes)} after {now - self._began:.0f} s")

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _draw(self, stage: str, done_bytes: int, total_bytes: int, now: float) -> None:
        if self._bar is None:
            if now - self._began < BAR_AFTER_S:
                return
            self._bar = _Bar(self._out, stage, total_bytes)
        self._bar.update(done_bytes)

    def _say(self, text: str) -> None:
        print(f"{'load':6} {text}", file=self._out, flush=True)


class _Bar:
    """A bar that is erased when its stage is over."""

    def __init__(self, out: IO[str], stage: str, total_bytes: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns: tuple[Any, ...] = (
            TextColumn("load   {task.description}"),
            BarColumn(),
            MofNCompleteColumn() if _unit(stage) else DownloadColumn(binary_units=True),
        )
        self._progress = Progress(*columns, TimeElapsedColumn(), console=Console(file=out), transient=True)
        self._task = self._progress.add_task(stage, total=total_bytes)
        self._progress.start()

    def update(self, done_bytes: int) -> None:
        self._progress.update(self._task, completed=done_bytes)

    def stop(self) -> None:
        self._progress.stop()


def _amount(stage: str, count: int) -> str:
    unit = _unit(stage)
    return f"{count} {unit}" if unit else f"{-(-count // MIB)} MiB"


def _unit(stage: str) -> str:
    """What a stage counts, where it counts no bytes."""
    return next((unit for begin, unit in COUNTED.items() if stage.startswith(begin)), "")
