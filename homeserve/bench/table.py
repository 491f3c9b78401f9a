"""The table in a terminal, line by line as results come.

Where the terminal is wide enough every line has the model's columns, as llama-bench has them; in a narrow one they
stand once above, and a line has the test and its result.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from budget.page import Style, safe
from homeserve.bench.document import Row, half, said
from homeserve.bench.subject import Subject

RESULT = 22
"""Width of `12345.6 ± 1234.5 tok/s`."""
MODEL_LEAST, MODEL_MOST = 8, 32
NARROWEST = 30
UNKNOWN = "-"


class Table:
    """`labels`: of all rows that may come."""

    def __init__(self, subject: Subject, labels: Sequence[str], width: int, style: Style) -> None:
        self._width = max(width, NARROWEST)
        self._style = style
        self._test = max([len("test"), *map(len, labels)])
        self._facts = _facts(subject)
        self._why: str | None = None
        self._columns = self._fitted()

    def _fitted(self) -> list[tuple[str, str, int]]:
        """(Name, what stands in every line, width) of the columns before the test; none where they do not fit."""
        rest = [(name, value, max(len(name), len(value))) for name, value in self._facts[1:]]
        left = self._width - self._test - RESULT - 2 - sum(width + 1 for _, _, width in rest)
        if left < MODEL_LEAST + 1:
            return []
        name, value = self._facts[0]
        width = min(left - 1, max(len(name), len(value)), MODEL_MOST)
        return [(name, value if len(value) <= width else f"{value[: width - 1]}…", width), *rest]

    def head(self) -> list[str]:
        """What stands above the first row."""
        lines: list[str] = []
        if not self._columns:
            told = " · ".join(value if name == "model" else f"{name} {value}" for name, value in self._facts)
            lines += textwrap.wrap(told, self._width)
        names = [*(name.ljust(width) for name, _, width in self._columns), "test".ljust(self._test)]
        line = " ".join([*names, "median ± spread".rjust(RESULT)])
        return [*lines, self._style.paint(line if self._fits(line) else "test, median ± spread", "head")]

    def row(self, row: Row) -> list[str]:
        """One line; where there is no result, or not all of it, also why."""
        facts = [value.ljust(width) for _, value, width in self._columns]
        label = row.label.ljust(self._test)
        lines = [" ".join([*facts, label, _result(row).rjust(RESULT)]).rstrip()]
        if not self._fits(lines[0]):
            lines = [row.label, _result(row).rjust(min(self._width, RESULT + 2)).rstrip()]
        # Said once for rows that follow each other.
        repeated, self._why = row.why == self._why, row.why
        if row.why and not repeated:
            lines += textwrap.wrap(safe(row.why), self._width, initial_indent="  ", subsequent_indent="  ")
        return lines

    def _fits(self, line: str) -> bool:
        return len(line) <= self._width


def _result(row: Row) -> str:
    if row.median is None:
        return "not measured"
    return f"{said(row.median)} ± {said(half(row))} {row.unit.ljust(5)}"


def _facts(subject: Subject) -> list[tuple[str, str]]:
    """The model's columns: those whose value is not known have a dash."""
    size = UNKNOWN if subject.size_bytes is None else f"{subject.size_bytes / (1 << 20):.1f}Mi"
    if subject.size_bytes is not None and subject.size_bytes >= 1 << 30:
        size = f"{subject.size_bytes / (1 << 30):.2f}Gi"
    return [
        ("model", safe(subject.model)),
        ("size", size),
        ("params", UNKNOWN if subject.params is None else _count(subject.params)),
        ("quant", subject.quant or UNKNOWN),
        ("backend", subject.backend or UNKNOWN),
        ("thr", _threads(subject)),
    ]


def _count(number: int) -> str:
    """134515008 -> '134.5M'."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.{2 if unit == 'B' else 1}f}{unit}"
    return str(number)


def _threads(subject: Subject) -> str:
    """Threads of a rank on the CPU, `2x1` where several have one each; of cards how many there are."""
    if subject.threads is None:
        return UNKNOWN if subject.ranks is None else str(subject.ranks)
    return f"{subject.ranks}x{subject.threads}" if subject.several else str(subject.threads)
