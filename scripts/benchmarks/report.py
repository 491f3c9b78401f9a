"""From single runs to medians, ratios, JSON, CSV, a Markdown table and a plot."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from measures import MEASURES, TITLES


@dataclass(frozen=True)
class Sample:
    """One run of one measure on one engine: a line of the CSV. `settings` are what the peer was told besides."""

    date: str
    commit: str
    device: str
    command: str
    engine: str
    version: str
    isa: str
    settings: str
    model: str
    quant: str
    threads: int
    test: str
    unit: str
    run: int
    value: float


class SampleFile:
    """The CSV: one line appended per sample, so that an interrupted run can be resumed from what it left."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.names = [field.name for field in fields(Sample)]
        if path and (not path.exists() or not path.stat().st_size):
            with path.open("w", newline="") as file:
                csv.writer(file).writerow(self.names)

    def add(self, sample: Sample) -> None:
        if self.path:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self.names).writerow(asdict(sample))

    @staticmethod
    def read(path: Path) -> list[Sample]:
        with path.open(newline="") as file:
            lines = list(csv.DictReader(file))
        for line in lines:
            line.update(threads=int(line["threads"]), run=int(line["run"]), value=float(line["value"]))
        return [Sample(**line) for line in lines]


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest of the sorted values."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def report(samples: Iterable[Sample], commit: str, date: str, command: str, device: dict[str, Any]) -> dict[str, Any]:
    """The JSON document: `rows` per engine and test, `ratios` of paired runs per test."""
    groups: dict[tuple[str, str], dict[int, Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.engine, sample.test), {})[sample.run] = sample
    rows, ratios = [], []
    for measure in MEASURES:
        ours, theirs = groups.get(("homeserve", measure.name), {}), groups.get(("llama-server", measure.name), {})
        for runs in (ours, theirs):
            if runs:
                rows.append(_row(list(runs.values())))
        pairs = [measure.ratio(ours[run].value, theirs[run].value) for run in sorted(ours.keys() & theirs.keys())]
        if pairs:
            ratios.append(_ratio(measure.name, ours[min(ours)], pairs, measure.goal))
    ratios += _scaling(groups)
    return {
        "schema": 1,
        "commit": commit,
        "date": date,
        "command": command,
        "device": device,
        "rows": rows,
        "ratios": ratios,
    }


def _row(samples: list[Sample]) -> dict[str, Any]:
    values = [sample.value for sample in samples]
    one = samples[0]
    return {
        "engine": one.engine,
        "version": one.version,
        "isa": one.isa,
        "settings": one.settings,
        "model": one.model,
        "quant": one.quant,
        "test": one.test,
        "layout": None,
        "draft": None,
        "unit": one.unit,
        "runs": len(values),
        "median": round(statistics.median(values), 3),
        "p10": round(quantile(values, 0.1), 3),
        "p90": round(quantile(values, 0.9), 3),
    }


def _ratio(test: str, one: Sample, pairs: list[float], goal: float | None) -> dict[str, Any]:
    median = statistics.median(pairs)
    return {
        "test": test,
        "model": one.model,
        "quant": one.quant,
        "median": round(median, 3),
        "low": round(quantile(pairs, 0.1), 3),
        "high": round(quantile(pairs, 0.9), 3),
        "goal": goal,
        "met": None if goal is None else median >= goal,
    }


def _scaling(groups: dict[tuple[str, str], dict[int, Sample]]) -> list[dict[str, Any]]:
    """How much more 8 streams give than one, by the same engine: `conc8/conc1`. The goal is homeserve's."""
    found = []
    for engine, goal in (("homeserve", 2.0), ("llama-server", None)):
        one, eight = groups.get((engine, "conc1"), {}), groups.get((engine, "conc8"), {})
        pairs = [eight[run].value / one[run].value for run in sorted(one.keys() & eight.keys())]
        if pairs:
            found.append({**_ratio("conc8/conc1", one[min(one)], pairs, goal), "engine": engine})
    return found


def table(document: dict[str, Any]) -> str:
    """Markdown: one line per test with both medians, their spread and the ratio of paired runs."""
    rows = {(row["engine"], row["test"]): row for row in document["rows"]}
    lines = ["| test | unit | homeserve | llama-server | ratio | goal |", "|---|---|---|---|---|---|"]
    for ratio in document["ratios"]:
        if "engine" in ratio:
            continue
        test = ratio["test"]
        ours, theirs = rows["homeserve", test], rows["llama-server", test]
        goal = "" if ratio["goal"] is None else f"{ratio['goal']}: {'met' if ratio['met'] else 'missed'}"
        lines.append(
            f"| {TITLES[test]} | {ours['unit']} | {_spread(ours)} | {_spread(theirs)} | "
            f"**{ratio['median']:.2f}** ({ratio['low']:.2f}-{ratio['high']:.2f}) | {goal} |"
        )
    for ratio in document["ratios"]:
        if "engine" in ratio:
            goal = "" if ratio["goal"] is None else f" Goal {ratio['goal']}: {'met' if ratio['met'] else 'missed'}."
            lines += ["", f"8 streams give {ratio['median']:.2f} times what one gives on {ratio['engine']}.{goal}"]
    return "\n".join(lines)


def _spread(row: dict[str, Any]) -> str:
    digits = 2 if row["median"] < 10 else 1
    return f"{row['median']:.{digits}f} ({row['p10']:.{digits}f}-{row['p90']:.{digits}f})"


def plot(document: dict[str, Any]) -> str:
    """An SVG of the ratios as bars around 1, readable on light and dark."""
    ratios = [ratio for ratio in document["ratios"] if "engine" not in ratio]
    height = 60 + 26 * len(ratios)
    most = max([2.0, *(ratio["high"] for ratio in ratios)])
    scale = 360 / most
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" font-family="system-ui, sans-serif" '
        'font-size="13">',
        "<style>text{fill:#24292f}.bar{fill:#2f7ed8}.low{fill:#c2703d}line{stroke:#6e7781}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.bar{fill:#58a6ff}.low{fill:#e0925f}line{stroke:#8b949e}}</style>",
        '<text x="10" y="22" font-weight="600">homeserve against llama-server: above 1 homeserve did better</text>',
    ]
    for index, ratio in enumerate(ratios):
        y = 40 + 26 * index
        width = ratio["median"] * scale
        kind = "bar" if ratio["median"] >= 1 else "low"
        parts += [
            f'<text x="270" y="{y + 13}" text-anchor="end">{TITLES[ratio["test"]]}</text>',
            f'<rect class="{kind}" x="280" y="{y}" width="{width:.1f}" height="17" rx="2"/>',
            f'<line x1="{280 + ratio["low"] * scale:.1f}" x2="{280 + ratio["high"] * scale:.1f}" '
            f'y1="{y + 8.5}" y2="{y + 8.5}"/>',
            f'<text x="{286 + max(width, ratio["high"] * scale):.1f}" y="{y + 13}">{ratio["median"]:.2f}</text>',
        ]
    parts += [
        f'<line x1="{280 + scale:.1f}" x2="{280 + scale:.1f}" y1="32" y2="{height - 16}" stroke-dasharray="3 3"/>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
