"""Rows of scripts/gpu_check, and what the process of a part says of itself.

A part runs in a process of its own (gpu_part.py) and says a line of JSON for each thing, at once, so that what was
found stands when the process dies:

    {"at": "linear_few_q4_k_r1"}                       begun; named where nothing comes after it
    {"case": ["linear_few_q4_k_r1", 0.31, ""]}         a kernel's case: the share of its tolerance, what was wrong
    {"row": {"part": "bandwidth", ...}}                a row of the table
    {"cases": 741}                                     how many there are
    {"end": true}                                      the part went through
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

COLUMNS = "part,what,value,unit,of,fraction,goal,ok,device,driver,commit,note".split(",")
WHAT_WIDTH = 56


@dataclass(frozen=True)
class Row:
    """One thing that was found. `of`: what `value` is a fraction of, in the same unit; `goal`: the least fraction;
    `note`: why it is not ok, or what has to be known. A row without a value is something that is missing."""

    part: str
    what: str
    value: float | None = None
    unit: str = ""
    of: float | None = None
    goal: float | None = None
    ok: bool = True
    note: str = ""

    @property
    def fraction(self) -> float | None:
        return self.value / self.of if self.value is not None and self.of else None


def judged(row: Row) -> Row:
    """Not ok where the fraction is below the goal."""
    short = row.goal is not None and (row.fraction is None or row.fraction < row.goal)
    return Row(**asdict(row) | {"ok": row.ok and not short})


@dataclass(frozen=True)
class Place:
    """What every row is of."""

    device: str
    driver: str
    commit: str


class Teller:
    """Says what a part finds, on the standard output of its process."""

    def __init__(self, part: str) -> None:
        self.part = part

    def at(self, what: str) -> None:
        self._say({"at": what})

    def row(
        self,
        what: str,
        value: float | None = None,
        unit: str = "",
        *,
        of: float | None = None,
        goal: float | None = None,
        ok: bool = True,
        note: str = "",
    ) -> None:
        self._say({"row": asdict(judged(Row(self.part, what, value, unit, of, goal, ok, note)))})

    def case(self, name: str, used: float, wrong: str = "") -> None:
        self._say({"case": [name, used, wrong]})

    def cases(self, count: int) -> None:
        self._say({"cases": count})

    def end(self) -> None:
        self._say({"end": True})

    def _say(self, what: dict[str, object]) -> None:
        print(json.dumps(what), flush=True)


# ----------------------------------------------------------------------------------------------------------- the table


def line_of(row: Row) -> str:
    what = row.what if len(row.what) <= WHAT_WIDTH else row.what[: WHAT_WIDTH - 1] + "…"
    value = "" if row.value is None else f"{row.value:.4g}"
    share = "" if row.fraction is None else f"{100 * row.fraction:.0f} %"
    goal = "" if row.goal is None else f"≥ {100 * row.goal:.0f} %"
    of = "" if row.of is None else f"{row.of:.4g}"
    mark = "ok" if row.ok else "NO"
    note = f"  {row.note}" if row.note else ""
    return f"{row.part:10} {what:{WHAT_WIDTH}} {value:>9} {row.unit:8} {of:>9} {share:>6} {goal:>7} {mark:2}{note}"


HEAD = f"{'part':10} {'what':{WHAT_WIDTH}} {'value':>9} {'unit':8} {'of':>9} {'':>6} {'goal':>7} ok"


def write_csv(path: Path, rows: Sequence[Row], place: Place) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(_record(row, place) for row in rows)


def _record(row: Row, place: Place) -> dict[str, object]:
    told = asdict(row) | asdict(place) | {"fraction": row.fraction, "ok": "yes" if row.ok else "no"}
    return {name: "" if told[name] is None else told[name] for name in COLUMNS}


def verdict(rows: Iterable[Row]) -> str:
    rows = list(rows)
    wrong = [row for row in rows if not row.ok]
    if not wrong:
        return f"{len(rows)} rows, all ok"
    return f"{len(wrong)} of {len(rows)} rows are not ok: " + "; ".join(f"{row.part}: {row.what}" for row in wrong[:5])


def complain(text: str, fix: str) -> None:
    print(f"gpu_check: {text}\n  next: {fix}", file=sys.stderr)
