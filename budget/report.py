"""The report for a person: what fits, what binds, what to change, in that order and from the page alone.

Each part is a list of lines; a report is its parts with an empty line between them. Nothing of it depends on colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from budget.asides import doubt_lines
from budget.facts import MIB, Doubt, MemoryFacts
from budget.fits import plan_parts
from budget.legend import legend_lines
from budget.page import Cell, Column, Style, counted, grouped, table
from budget.plan import Plan, Refusal, Unknown
from budget.question import Question
from budget.refused import refusal_parts, unknown_parts
from budget.sums import has_room, moments_of, peak_moment, what_binds

PLAIN = Style()
_TOLD_DEVICES = 4


class Measured(NamedTuple):
    """One line of predicted against measured, in MiB; None where it is not planned for, or could not be measured."""

    device: int
    line: str
    predicted_mib: float | None
    measured_mib: float | None
    how: str | None


def report(
    outcome: Plan | Refusal | Unknown,
    host: MemoryFacts | None,
    doubts: Iterable[Doubt],
    question: Question | None = None,
    style: Style = PLAIN,
) -> list[str]:
    """The page about one model, as lines."""
    doubts = tuple(doubts)
    asked = question or Question(None if isinstance(outcome, Unknown) else outcome.shape.name)
    match outcome:
        case Plan():
            parts = plan_parts(style, outcome, host, doubts, asked)
        case Refusal():
            parts = [*refusal_parts(style, outcome, host, doubts, asked), doubt_lines(style, doubts)]
        case Unknown():
            parts = [*unknown_parts(style, outcome, host), doubt_lines(style, doubts)]
    return joined([*parts, legend_lines(style, parts)])


def elsewhere(outcome: Plan | Refusal | Unknown) -> Plan | Refusal | Unknown:
    """The outcome for a box that is only a profile here: what was measured was measured on another one."""
    if isinstance(outcome, Unknown):
        return outcome
    lines = tuple(
        replace(line, source="reserve", note=": ".join(filter(None, ("measured elsewhere", line.note))))
        if line.source == "measured"
        else line
        for line in outcome.lines
    )
    return replace(outcome, lines=lines)


def joined(parts: Iterable[Sequence[str]]) -> list[str]:
    """The parts that say something, with an empty line between them."""
    lines: list[str] = []
    for part in parts:
        if part:
            lines += ["", *part] if lines else part
    return lines


# --------------------------------------------------------------------------------------------------- of `homeserve up`


def summary(plan: Plan) -> list[str]:
    """A few lines for `homeserve up`: what is planned, what each device will hold, what binds, how much is in doubt."""
    pool = f"{grouped(plan.kv_tokens)} tokens of {plan.wish.kv_type} KV"
    lines = [f"context {grouped(plan.context)}, {pool}, {counted(plan.running, 'request')} at once: {plan.option}"]
    lines += [plan.choice] if plan.choice else []
    lines += [f"nothing is drafted: {plan.no_drafts}"] if plan.no_drafts else []
    moments = moments_of(plan.layouts)
    used = [device for device in plan.ceilings.devices if any(line.device == device.index for line in plan.lines)]
    for device in used[:_TOLD_DEVICES]:
        when = peak_moment(plan.lines, device.index, moments)
        own = [line for line in plan.lines if line.device == device.index and when in line.held]
        held = " + ".join(f"{line.name} {whole(line.bytes)}" for line in own)
        peak = whole(sum(line.bytes for line in own))
        lines.append(f"{device.name}: {held} = {peak} of {whole(device.ceiling_bytes or 0)} MiB")
    if len(used) > _TOLD_DEVICES:
        lines.append(f"and {len(used) - _TOLD_DEVICES} devices more: homeserve budget tells them")
    if not has_room(plan):
        lines.append(what_binds(plan))
    if plan.doubts:
        lines.append(f"{len(plan.doubts)} doubt{'s' * (len(plan.doubts) != 1)}: homeserve budget tells them")
    return lines


def whole(count: int) -> str:
    """Bytes as whole MiB."""
    return grouped(round(count / MIB))


def measured_table(rows: Sequence[Measured], style: Style = PLAIN) -> list[str]:
    """Predicted against measured, line by line. The total is over the lines that could be measured, on both sides."""
    cells: list[list[Cell]] = []
    for device, line, predicted, measured, how in rows:
        difference = "" if measured is None or predicted is None else _difference(predicted, measured)
        said = "not planned" if predicted is None else grouped(predicted, 1)
        found = "not measured" if measured is None else grouped(measured, 1)
        cells.append([str(device), line, said, found, difference, (how or "", "soft")])
    both = [(row[2], row[3]) for row in rows if row[2] is not None and row[3] is not None]
    if len(both) > 1:
        predicted, measured = sum(each[0] for each in both), sum(each[1] for each in both)
        total = [
            "",
            "total measured",
            grouped(predicted, 1),
            grouped(measured, 1),
            _difference(predicted, measured),
            "",
        ]
        cells.append([(each, "head") for each in total])
    columns = [
        Column("device", right=True),
        Column("line", limit=30),
        Column("predicted", right=True),
        Column("measured MiB", right=True),
        Column("difference", right=True),
        Column("how"),
    ]
    return table(style, columns, cells)


def _difference(predicted: float, measured: float) -> str:
    off = measured - predicted
    share = f" ({off / predicted:+.0%})" if predicted else ""
    return f"{off:+.1f}{share}"
