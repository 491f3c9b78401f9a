"""The result of a run: rows, as JSON, as CSV and as a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from homeserve.bench.svg import Bar, bars

SCHEMA = 1
BAR_LONGEST = 300.0
"""Of the picture's 720 units: behind it the figure has room."""

KINDS = {"pp": "prompts", "tg": "answers", "conc": "answers", "ttft": "first token", "step": "engine, for each step"}
"""Heading of bars, by how the name of a test begins; the others have their own."""


@dataclass(frozen=True)
class Row:
    """One result: the median of `runs` and where eight of ten of them lie. Without a run the figures are None, and
    `why` says why. `layout`: of several ranks; of a flip, the one that it leads to."""

    engine: str
    model: str
    quant: str | None
    test: str
    layout: str | None
    draft: str | None
    unit: str
    runs: int = 0
    median: float | None = None
    p10: float | None = None
    p90: float | None = None
    why: str | None = None

    @property
    def label(self) -> str:
        return f"{self.test} {self.layout}" if self.layout else self.test


def document(rows: Sequence[Row], facts: Mapping[str, Any]) -> dict[str, Any]:
    """`facts`: commit, date, command, device and what else is known of the run. Ratios need a peer: scripts/bench."""
    return {"schema": SCHEMA, **facts, "rows": [asdict(row) for row in rows], "ratios": []}


def as_csv(rows: Sequence[Row]) -> str:
    """A line for each row; what is not known is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return out.getvalue()


def from_csv(text: str) -> list[Row]:
    """What `as_csv` wrote. Raises ValueError."""
    return [_row(line) for line in csv.DictReader(io.StringIO(text))]


def _row(line: Mapping[str, str]) -> Row:
    told: dict[str, Any] = {name: value or None for name, value in line.items()}
    for name in ("median", "p10", "p90"):
        told[name] = None if told[name] is None else float(told[name])
    return Row(**told | {"runs": int(line["runs"])})


def picture(title: str, rows: Sequence[Row]) -> str:
    """An SVG with a bar for each row that has a figure; each kind of figure has a scale of its own."""
    lines: list[Bar | str] = []
    for kind in dict.fromkeys(map(_kind, rows)):
        known = [(row, row.median) for row in rows if _kind(row) == kind and row.median is not None]
        most = max((median for _, median in known), default=0.0) or 1.0
        if known:
            lines.append(kind)
        lines += [Bar(row.label, median / most, f"{said(median)} ± {said(half(row))}") for row, median in known]
    return bars(title, lines, BAR_LONGEST)


def _kind(row: Row) -> str:
    """What a bar can be compared with: a prompt is read many times as fast as an answer is written."""
    found = next((name for start, name in KINDS.items() if row.test.startswith(start)), row.test)
    return f"{found}, {row.unit}"


def half(row: Row) -> float:
    """Half of the way from the tenth to the ninetieth of a hundred runs: what stands behind ±."""
    return 0.0 if row.p10 is None or row.p90 is None else (row.p90 - row.p10) / 2


def said(value: float) -> str:
    return f"{value:.{2 if abs(value) < 10 else 1}f}"
