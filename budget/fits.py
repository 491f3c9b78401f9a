"""The report of a plan that fits: what binds, what each device holds and when, what each rank could hold alone."""

from __future__ import annotations

from collections.abc import Sequence

from budget.asides import advice_lines, doubt_lines, priced_lines, speed_lines
from budget.facts import Doubt, MemoryFacts
from budget.page import INDENT, Cell, Column, Style, grouped, table, wrapped
from budget.plan import Plan
from budget.question import Question, run_settings
from budget.sums import arithmetic, has_room, heading, ledger_table, moments_of, named, shared_pools, what_binds


def plan_parts(
    style: Style, plan: Plan, host: MemoryFacts | None, doubts: Sequence[Doubt], asked: Question
) -> list[list[str]]:
    return [
        _headline(style, plan),
        *_devices(style, plan, host),
        shared_pools(plan.ceilings, plan.lines),
        _ranks(style, plan),
        advice_lines(style, plan.advice),
        speed_lines(style, plan),
        priced_lines(style, plan.priced),
        doubt_lines(style, doubts),
        _command(style, plan, asked),
    ]


# ---------------------------------------------------------------------------------------------------------- what binds


def _headline(style: Style, plan: Plan) -> list[str]:
    trained = "" if plan.context >= plan.shape.context else f" (the model allows {grouped(plan.shape.context)})"
    text = (
        f"FITS: {plan.shape.name} ({plan.shape.quant}) with {grouped(plan.context)} tokens of context{trained},"
        f" {plan.running} request{'s' * (plan.running != 1)} at once, {grouped(plan.kv_tokens)} tokens of"
        f" {plan.wish.kv_type} KV in all; {what_binds(plan)}."
    )
    lines = wrapped(text)
    lines[0] = lines[0].replace("FITS", style.paint("FITS", "good"), 1)
    if plan.binds.why and not has_room(plan):
        lines += wrapped(f"Why it binds: {plan.binds.why}")
    return lines + wrapped(f"How it runs: {plan.option}")


def _devices(style: Style, plan: Plan, host: MemoryFacts | None) -> list[list[str]]:
    """A table for each device that holds something; the others in a line each."""
    parts, idle = [], []
    moments = moments_of(plan.layouts)
    for device in plan.ceilings.devices:
        if any(line.device == device.index for line in plan.lines):
            binding = plan.binds.line if device.index == plan.binds.device and not has_room(plan) else ""
            sums = wrapped(arithmetic(device, host), INDENT, INDENT * 2)
            parts.append([*heading(style, device), *sums, *ledger_table(style, device, plan.lines, moments, binding)])
        else:
            why = "holds nothing in this plan" if device.usable else f"is not used: {device.why_not}"
            idle += wrapped(f"D{named(device)[1:]} {why}", "", INDENT)
    return [*parts, idle]


def _ranks(style: Style, plan: Plan) -> list[str]:
    if len(plan.ranks) < 2:
        return []
    rows: list[list[Cell]] = []
    least = min(plan.rank_tokens, default=0)
    for rank, index in enumerate(plan.ranks):
        tokens = plan.rank_tokens[rank] if rank < len(plan.rank_tokens) else None
        binds = tokens is not None and tokens == least
        span = plan.ranges[rank] if rank < len(plan.ranges) else None
        rows.append(
            [
                str(rank),
                named(plan.ceilings.devices[index]),
                "" if span is None else f"{span[0]} to {span[1] - 1}" if span[1] > span[0] else "none",
                str(plan.weight_vector[rank]) if rank < len(plan.weight_vector) else "",
                str(plan.token_vector[rank]) if rank < len(plan.token_vector) else "",
                ("unknown" if tokens is None else grouped(tokens), "mark" if binds else ""),
                ("<- binds", "mark") if binds else "",
            ]
        )
    columns = [
        Column("rank", right=True),
        Column("device", limit=40),
        Column("layers", right=True),
        Column("weights", right=True),
        Column("KV rows", right=True),
        Column("tokens alone", right=True),
        Column(""),
    ]
    head = "Ranks: what each could hold alone; the least of them is what all can hold"
    return [style.paint(head, "head"), *table(style, columns, rows)]


def _command(style: Style, plan: Plan, asked: Question) -> list[str]:
    head = "To run it" if asked.here else "To run it (MODEL is the file, which is not here)"
    return [style.paint(head, "head"), INDENT + asked.up_line(run_settings(plan))]
