"""The pages that show measurements, made from docs/benchmarks.csv: `scripts/bench --doc`.

docs/benchmarks.md gets one table for each model, docs/PERFORMANCE.md one table of ratios over all models, and
docs/benchmarks.svg a bar for each ratio. Each model is shown by its last measured commit; text outside of the markers
is left alone. A test makes the pages again and compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measures import DRAFTING, RESULTS
from report import MACHINE, OURS, Sample, SampleFile, report, table

from homeserve.bench.svg import Bar, bars

DRAFTING_MODELS = ", drafting"
"""How the names of models end under which draft_tests.py keeps its samples."""
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"


def write(docs: Path) -> None:
    """Write the three files of the folder `docs` from its benchmarks.csv."""
    for name, text in pages(docs).items():
        (docs / name).write_text(text)


def pages(docs: Path) -> dict[str, str]:
    """File name -> what it holds, from the CSV and from what stands around the markers."""
    documents = latest(SampleFile.read(docs / "benchmarks.csv"))
    made = {"benchmarks.md": "\n".join(map(section, documents)), "PERFORMANCE.md": summary(documents)}
    found = {name: _between(docs / name, text) for name, text in made.items()}
    return found | {"benchmarks.svg": plot(documents)}


def _between(path: Path, text: str) -> str:
    head, begin, rest = path.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise RuntimeError(f"{path.name} lacks {BEGIN} or {END}")
    return f"{head}{begin}\n\n{text.strip()}\n\n{end}{tail}"


def latest(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """A report for each model, of the commit that it was measured on last."""
    last = {sample.model: sample.commit for sample in samples}
    return [
        report(sample for sample in samples if (sample.model, sample.commit) == (model, commit))
        for model, commit in last.items()
    ]


def section(document: dict[str, Any]) -> str:
    """Heading, caption and table of one model."""
    model = document["models"][0]
    device = document["device"]
    ours = next(row for row in model["rows"] if row["engine"] == OURS)
    theirs = [row for row in model["rows"] if row["engine"] not in (OURS, MACHINE)]
    runs = max(row["runs"] for row in model["rows"])
    words = [
        f"{device['cpu']}, {device['threads']} threads",
        *_limits(device),
        f"commit {document['commit']}",
        document["date"],
        f"`{document['command']}`",
        f"{runs} runs, median (p10-p90)",
    ]
    if ours["isa"]:
        words.append(f"homeserve: {ours['isa']}")
    if theirs:
        chosen = dict.fromkeys(f"`{row['settings']}`" for row in theirs if row["settings"])
        peer = f"{model['peer']} {theirs[0]['version']}" + (f": {theirs[0]['isa']}" if theirs[0]["isa"] else "")
        best = "its best settings" if model["peer"] == "llama-server" else "started with"
        words.append(f"{peer}; {best}: {', '.join(chosen)}" if chosen else peer)
    for noise in model["noise"].values():
        spread = f"{noise['median']:.2f} ({noise['low']:.2f}-{noise['high']:.2f})"
        words.append(f"{model['peer']} against itself in each pair: {spread}")
    return f"### {model['model']}\n\n{' · '.join(words)}\n\n{table(model)}\n"


def _limits(device: dict[str, Any]) -> list[str]:
    words = [f"load average {device['load']:.0f} at the pairs"] if "load" in device else []
    if "read_gb_s" in device:
        words.append(
            f"reads {device['read_gb_s']:.1f} GB/s, {device['int16_gop_s']:.0f} GOP/s of int16, "
            f"{device['int8_gop_s']:.0f} of int8 in the same run"
        )
    return words


def summary(documents: Sequence[dict[str, Any]]) -> str:
    """A line for each model, a column for each result that any of them has: the ratio, bold where its goal is met. What
    drafting is worth has a table of its own, the other way round."""
    beside = [document for document in documents if document["models"][0]["model"].endswith(DRAFTING_MODELS)]
    documents = [document for document in documents if document not in beside]
    ratios = {document["models"][0]["model"]: document["models"][0]["ratios"] for document in documents}
    tests = [test for test in RESULTS if any(ratio["test"] == test for found in ratios.values() for ratio in found)]
    lines = [f"| | {' | '.join(RESULTS[test].title for test in tests)} | commit |", "|---" * (len(tests) + 2) + "|"]
    for document in documents:
        model = document["models"][0]["model"]
        by_test = {ratio["test"]: ratio for ratio in ratios[model]}
        cells = [_cell(by_test.get(test)) for test in tests]
        lines.append(f"| {model} | {' | '.join(cells)} | {document['commit']} |")
    return "\n".join(lines) + (f"\n\n{drafting(beside)}" if beside else "")


def drafting(documents: Sequence[dict[str, Any]]) -> str:
    """A line for each result, a column for each model."""
    found = [document["models"][0] for document in documents]
    names = [f"{model['model']} ({document['commit']})" for model, document in zip(found, documents, strict=True)]
    lines = [f"| one stream, beside no drafting | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for test, result in RESULTS.items():
        ratios = [next((each for each in model["ratios"] if each["test"] == test), None) for model in found]
        if test in DRAFTING and any(ratios) and result.unit == "tok/s":
            lines.append(f"| {result.title} | {' | '.join(_cell(ratio) for ratio in ratios)} |")
    return "\n".join(lines)


def _cell(ratio: dict[str, Any] | None) -> str:
    if ratio is None:
        return ""
    value = f"{ratio['median']:.2f}"
    if ratio["goal"] is None:
        return value
    return f"**{value}** of {ratio['goal']:g}" if ratio["met"] else f"{value} of {ratio['goal']:g}"


def plot(documents: Sequence[dict[str, Any]]) -> str:
    """An SVG of all ratios as bars around 1, readable on light and dark. What is far above is cut at the edge."""
    rows: list[Bar | str] = []
    for document in documents:
        rows.append(document["models"][0]["model"])
        for ratio in document["models"][0]["ratios"]:
            value = ratio["median"]
            rows.append(Bar(RESULTS[ratio["test"]].title, value, f"{value:.2f}", low=value < 1))
    most = min(max([2.0, *(row.value for row in rows if isinstance(row, Bar))]), 8.0)
    return bars("homeserve against its peer: above 1 homeserve did better", rows, 360 / most, mark=1.0)
