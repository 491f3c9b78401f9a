"""From single runs to medians, ratios, goals and percents of the machine's limits: JSON and Markdown.

A sample is one line of the CSV, which is the only thing that is kept: every table of docs/benchmarks.md and
docs/PERFORMANCE.md is made from it again (document.py), so a figure in a page is a figure in the file.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import subjects
from measures import RESULTS

from homeserve.bench.spread import quantile, spread

OURS, MACHINE = "homeserve", "machine"
"""Engines of the CSV; every other name is the peer's. `machine` samples are what the machine could do in the same run,
and two constants of the model's file: bytes and operations of a token."""
NOISE = "noise:"
"""Before the name of a test: the peer's value of the same pair once more."""
PEAK = "int16_gop_s"
"""The peak that a prefill's percent is of: that of the instruction which the kernels use."""


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
                csv.writer(file, lineterminator="\n").writerow(self.names)

    def add(self, sample: Sample) -> None:
        if self.path:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self.names, lineterminator="\n").writerow(asdict(sample))

    @staticmethod
    def read(path: Path) -> list[Sample]:
        with path.open(newline="") as file:
            lines: list[dict[str, Any]] = list(csv.DictReader(file))
        for line in lines:
            line.update(threads=int(line["threads"]), run=int(line["run"]), value=float(line["value"]))
        return [Sample(**line) for line in lines]


def report(samples: Iterable[Sample]) -> dict[str, Any]:
    """The JSON document of one run: for each model the `rows` of each engine and test, and `ratios` of the pairs."""
    every = list(samples)
    models = list(dict.fromkeys(sample.model for sample in every))
    one = every[-1]
    return {
        "schema": 2,
        "commit": one.commit,
        "date": one.date,
        "command": one.command,
        "device": {"cpu": one.device, "threads": one.threads, **_machine(every)},
        "models": [_model([sample for sample in every if sample.model == model]) for model in models],
    }


def _machine(samples: Sequence[Sample]) -> dict[str, float]:
    """Medians of what the machine could do."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        if sample.engine == MACHINE and not sample.test.endswith("_per_token"):
            found.setdefault(sample.test, []).append(sample.value)
    return {test: round(statistics.median(values), 2) for test, values in found.items()}


def _model(samples: Sequence[Sample]) -> dict[str, Any]:
    groups: dict[tuple[str, str], dict[int, Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.engine, sample.test), {})[sample.run] = sample
    peer = next((name for name, _ in groups if name not in (OURS, MACHINE)), None)
    rows, ratios = [], []
    for test in RESULTS:
        ours, theirs = groups.get((OURS, test), {}), groups.get((peer or "", test), {})
        rows += [_row(list(runs.values())) for runs in (ours, theirs) if runs]
        paired = sorted(ours.keys() & theirs.keys())
        if paired:
            pairs = [RESULTS[test].ratio(ours[run].value, theirs[run].value) for run in paired]
            ratios.append(_ratio(test, ours[paired[0]], pairs))
    limits = {
        test: statistics.median(s.value for s in runs.values())
        for (who, test), runs in groups.items()
        if who == MACHINE
    }
    for row in rows:
        row["of_limit"] = _of_limit(row, limits)
    noise = {
        test: _noise(list(groups[peer or "", test].items()), list(runs.items()))
        for (_, name), runs in groups.items()
        if name.startswith(NOISE) and (peer or "", test := name.removeprefix(NOISE)) in groups
    }
    searched = [_row([sample]) for sample in samples if sample.test.startswith("search:")]
    return {
        "model": samples[0].model,
        "quant": samples[-1].quant,
        "peer": peer,
        "limits": limits,
        "rows": rows,
        "ratios": ratios,
        "searched": searched,
        "noise": noise,
    }


def _noise(first: Sequence[tuple[int, Sample]], second: Sequence[tuple[int, Sample]]) -> dict[str, float]:
    """Of the same engine asked twice in each pair: the second time over the first."""
    again = dict(second)
    ratios = [again[run].value / sample.value for run, sample in first if run in again]
    return {
        "pairs": len(ratios),
        "median": round(statistics.median(ratios), 3),
        "low": round(quantile(ratios, 0.1), 3),
        "high": round(quantile(ratios, 0.9), 3),
    }


def _row(samples: Sequence[Sample]) -> dict[str, Any]:
    values, one = [sample.value for sample in samples], samples[0]
    return {
        **{
            name: getattr(one, name)
            for name in ("engine", "version", "isa", "settings", "model", "quant", "test", "unit")
        },
        "layout": _told_by(one.settings, "--layout"),
        "draft": _told_by(one.settings, "--draft"),
        **asdict(spread(values)),
        "most": subjects.MOST.get(one.test) if one.engine == OURS else None,
    }


def _told_by(settings: str, option: str) -> str | None:
    """What an option of a program's settings is, where it has one."""
    words = settings.split()
    return words[words.index(option) + 1] if option in words else None


def _ratio(test: str, one: Sample, pairs: Sequence[float]) -> dict[str, Any]:
    median, goal = statistics.median(pairs), subjects.goal(one.model, test)
    return {
        "test": test,
        "model": one.model,
        "quant": one.quant,
        "pairs": len(pairs),
        "median": round(median, 3),
        "low": round(quantile(pairs, 0.1), 3),
        "high": round(quantile(pairs, 0.9), 3),
        "goal": goal,
        "met": None if goal is None else median >= goal,
    }


def _of_limit(row: dict[str, Any], limits: dict[str, float]) -> dict[str, float] | None:
    """Percents: of the bandwidth for one stream's decode, of the integer peaks for a prefill, of copying for a flip."""
    if row["unit"] == "GB/s" and "copy_gb_s" in limits:
        return {"copy_gb_s": round(100 * row["median"] / limits["copy_gb_s"], 1)}
    if row["test"] == "tg@0" and {"bytes_per_token", "read_gb_s"} <= limits.keys():
        return {"read_gb_s": _percent(row["median"] * limits["bytes_per_token"], limits["read_gb_s"])}
    if row["test"] in ("pp512", "pp2048") and {"ops_per_token", PEAK, "int8_gop_s"} <= limits.keys():
        return {kind: _percent(row["median"] * limits["ops_per_token"], limits[kind]) for kind in (PEAK, "int8_gop_s")}
    return None


def _percent(done: float, limit: float) -> float:
    return round(100 * done / (limit * 1e9), 1)


def table(model: dict[str, Any]) -> str:
    """Markdown of one model: a line per test with both medians, their spread, the ratio of paired runs and the goal."""
    rows = {(row["engine"], row["test"]): row for row in model["rows"]}
    peer, ratios = model["peer"], {ratio["test"]: ratio for ratio in model["ratios"]}
    lines = [
        f"| test | unit | homeserve | {peer or 'no peer'} | ratio | goal | of the limit |",
        "|---|---|---|---|---|---|---|",
    ]
    for test, result in RESULTS.items():
        ours, theirs = rows.get((OURS, test)), rows.get((peer or "", test))
        if ours is None:
            continue
        lines.append(
            f"| {result.title} | {result.unit} | {_spread(ours)} | {_spread(theirs)} | {_told(ratios.get(test))} | "
            f"{_goal(ratios.get(test)) or _most(ours)} | {_limit(ours)} |"
        )
    return "\n".join(lines)


def _told(ratio: dict[str, Any] | None) -> str:
    return f"**{ratio['median']:.2f}** ({ratio['low']:.2f}-{ratio['high']:.2f})" if ratio else ""


def _goal(ratio: dict[str, Any] | None) -> str:
    if ratio is None or ratio["goal"] is None:
        return ""
    return f"{ratio['goal']:g}: {'met' if ratio['met'] else 'missed'}"


def _most(row: dict[str, Any]) -> str:
    if row["most"] is None:
        return ""
    return f"at most {row['most']:g} {row['unit']}: {'met' if row['median'] <= row['most'] else 'missed'}"


def _limit(row: dict[str, Any]) -> str:
    found = row.get("of_limit")
    if not found:
        return ""
    if "read_gb_s" in found:
        return f"{found['read_gb_s']:.0f} % of reading"
    if "copy_gb_s" in found:
        least = subjects.LEAST.get(row["test"])
        goal = "" if least is None else f", at least {least:g}: {'met' if found['copy_gb_s'] >= least else 'missed'}"
        return f"{found['copy_gb_s']:.0f} % of copying{goal}"
    return f"{found[PEAK]:.0f} % of int16, {found['int8_gop_s']:.0f} % of int8"


def _spread(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    digits = 2 if row["median"] < 10 else 1
    return f"{row['median']:.{digits}f} ({row['p10']:.{digits}f}-{row['p90']:.{digits}f})"
