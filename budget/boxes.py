"""The report of a box alone: its devices, what may be held on each, and which of the models on disk fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from budget.asides import doubt_lines
from budget.ceilings import Ceilings
from budget.document import mib as mib_number
from budget.facts import Box, Doubt
from budget.legend import legend_lines
from budget.page import INDENT, Cell, Column, Style, grouped, mib, table, wrapped
from budget.plan import Plan, Refusal, Unknown
from budget.question import Question
from budget.refused import ceiling_sums, device_table
from budget.report import joined


@dataclass(frozen=True)
class ModelRow:
    """A model on disk: where it lies, and what planning it gave, or why it could not be planned (`problem`)."""

    path: str
    outcome: Plan | Refusal | Unknown | None
    problem: str

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def file(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def lacking_bytes(self) -> int | None:
        if not isinstance(self.outcome, Refusal):
            return None
        return max(0, self.outcome.needed_bytes - self.outcome.available_bytes)


def box_report(
    box: Box,
    ceilings: Ceilings,
    doubts: Iterable[Doubt],
    models: Sequence[ModelRow],
    more: int,
    style: Style,
    beside: tuple[str, ...] = (),
) -> list[str]:
    """The page about a box. `more` models on disk were not looked at; `beside` are words that a second look needs."""
    parts = [
        _headline(style, box, ceilings),
        device_table(style, ceilings),
        ceiling_sums(ceilings, box.memory),
        _models(style, models, more),
        doubt_lines(style, doubts),
        _next(style, models, beside),
    ]
    return joined([*parts, legend_lines(style, parts)])


def model_json(row: ModelRow) -> dict[str, Any]:
    """A row of `models` of the document: `fits` is null where it cannot be said."""
    plan = row.outcome if isinstance(row.outcome, Plan) else None
    shape = row.outcome.shape if isinstance(row.outcome, Plan | Refusal) else None
    fits = {Plan: True, Refusal: False}.get(type(row.outcome))
    why = row.problem or (row.outcome.why if isinstance(row.outcome, Unknown) else "")
    return {
        "path": row.path,
        "name": None if shape is None else shape.name,
        "weights_mib": None if shape is None else mib_number(shape.weights_bytes),
        "fits": fits,
        "context_tokens": None if plan is None else plan.context,
        "kv_tokens": None if plan is None else plan.kv_tokens,
        "lacking_mib": mib_number(row.lacking_bytes),
        "why": why or None,
    }


# ------------------------------------------------------------------------------------------------------------- details


def _headline(style: Style, box: Box, ceilings: Ceilings) -> list[str]:
    usable = [device for device in ceilings.devices if device.usable and device.ceiling_bytes is not None]
    if not usable:
        return wrapped("This box says nothing about its memory: no plan can be made for it.")
    cards = [device for device in usable if device.kind != "cpu"]
    best = max(cards or usable, key=lambda device: device.ceiling_bytes or 0)
    what = " + ".join(device.name for device in cards) or "CPU only"
    names = {"vm": "a VM", "container": "a container", "wsl2": "WSL2", "windows": "Windows"}
    where = f", in {names[box.environment]}" if box.environment in names else ""
    most = f"up to {mib(best.ceiling_bytes)} MiB may be held on device {best.index} at the peak"
    return [style.paint(line, "head") for line in wrapped(f"{box.id}: {what}{where}; {most}.")]


def _models(style: Style, models: Sequence[ModelRow], more: int) -> list[str]:
    """A table for each folder, so that a file's name stays whole."""
    if not models:
        text = "none in this folder, the cache or the hub's cache. homeserve pull fetches one."
        return [style.paint("Models on disk", "head"), *wrapped(text, INDENT, INDENT)]
    lines = []
    for folder in dict.fromkeys(model.folder for model in models):
        rows = [_row(model) for model in models if model.folder == folder]
        columns = [
            Column("model", limit=48),
            Column("weights MiB", right=True),
            Column("fits"),
            Column("context", right=True),
            Column("pool", right=True),
            Column("how, or why not"),
        ]
        where = f", in {folder}" if folder else ", in this folder"
        lines += [style.paint(f"Models on disk{where}", "head"), *table(style, columns, rows)]
    if more:
        lines += wrapped(f"and {more} more that were not looked at: homeserve budget FILE", INDENT, INDENT)
    return lines


def _row(model: ModelRow) -> list[Cell]:
    match model.outcome:
        case Plan() as plan:
            size = mib(plan.shape.weights_bytes)
            return [model.file, size, ("yes", "good"), grouped(plan.context), grouped(plan.kv_tokens), plan.option]
        case Refusal() as refusal:
            lack = f"{mib(model.lacking_bytes)} MiB lack on device {refusal.device}"
            return [model.file, mib(refusal.shape.weights_bytes), ("no", "bad"), "", "", lack]
        case Unknown() as unknown:
            return [model.file, "", ("unknown", "unsure"), "", "", unknown.why]
    return [model.file, "", ("unknown", "unsure"), "", "", model.problem]


def _next(style: Style, models: Sequence[ModelRow], beside: tuple[str, ...]) -> list[str]:
    """What to ask next, as a command: about the first model that fits, or about a shape."""
    first = next((model for model in models if isinstance(model.outcome, Plan)), None)
    question = Question(first.path, None, beside) if first else Question(None, "qwen3-8b", beside)
    what = "More about one of them" if first else "A model that is not here can be planned for by its shape"
    return [style.paint(what, "head"), INDENT + question.budget_line({})]
