"""What `homeserve bench` says while it runs: rows as they come, which test is under way, notes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import IO

from budget.page import safe, style_of
from homeserve.bench.document import Row
from homeserve.bench.subject import Subject
from homeserve.bench.table import Table

_CLEAR = "\r\x1b[2K"


class Told:
    """Rows go to `out`, all else to `err`. On a terminal `err` has a last line that says what is measured now."""

    def __init__(self, out: IO[str], err: IO[str], environ: Mapping[str, str]) -> None:
        self.notes: list[str] = []
        self._out, self._err, self._environ = out, err, environ
        self._live = err.isatty() and environ.get("TERM") != "dumb"
        self._shown = False
        self._table: Table | None = None

    def begin(self, about: Subject, labels: Sequence[str], cpu: str | None) -> None:
        self._clear()
        width = shutil.get_terminal_size().columns
        self._table = Table(about, labels, width, style_of(self._out, self._environ))
        engine = f"{about.engine} {about.version}" if about.version else about.engine
        told = [about.model, engine, cpu, about.isa, f"{about.layout} layout" if about.layout else None]
        for line in (*wrap(" · ".join(safe(word) for word in told if word), width), *self._table.head()):
            self._say(self._out, line)

    def row(self, row: Row) -> None:
        assert self._table is not None, "it has begun"
        self._clear()
        for line in self._table.row(row):
            self._say(self._out, line)

    def doing(self, test: str, run: int, runs: int) -> None:
        if self._live:
            said = f"run {run} of {runs}" if run else "once before"
            width = shutil.get_terminal_size().columns
            self._err.write(f"{_CLEAR}{f'{test}: {said}'[: max(1, width - 1)]}")
            self._err.flush()
            self._shown = True

    def note(self, text: str, *, keep: bool = True) -> None:
        """`keep`: it belongs to the result."""
        self._clear()
        if keep:
            self.notes.append(text)
        self._say(self._err, safe(text))

    def end(self) -> None:
        """Leave the terminal as it was."""
        self._clear()

    def _clear(self) -> None:
        if self._shown:
            self._err.write(_CLEAR)
            self._err.flush()
            self._shown = False

    def _say(self, stream: IO[str], line: str) -> None:
        """A name that the terminal's encoding lacks is shown with replacements, not refused."""
        encoding = getattr(stream, "encoding", None) or "utf-8"
        print(line.encode(encoding, "replace").decode(encoding), file=stream, flush=True)
