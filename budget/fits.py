"""The report of a plan that fits: what binds, what each device holds and when, what each rank could hold alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from budget.asides import advice_lines, doubt_lines, priced_lines, speed_lines
from budget.facts import Doubt, MemoryFacts
from budget.job import settle
from budget.page import INDENT, Cell, Column, Style, a, counted, grouped, regrouped, table, wrapped
from budget.plan import Plan
from budget.question import Question, run_settings
from budget.sums import arithmetic, has_room, heading, ledger_table, moments_of, named, shared_pools, title, what_binds
from budget.wish import PAGE


def plan_parts(
    style: Style, plan: Plan, host: MemoryFacts | None, doubts: Sequence[Doubt], asked: Question
) -> list[list[str]]:
    lacks = cannot_run(doubts, asked.refused(run_settings(plan)))
    return [
        _headline(style, plan, lacks),
        *_devices(style, plan, host),
        shared_pools(plan.ceilings, plan.lines),
        _ranks(style, plan),
        advice_lines(style, plan.advice, asked),
        speed_lines(style, plan),
        priced_lines(style, plan, settle(plan.shape, plan.wish).running),
        doubt_lines(style, doubts),
        _command(style, plan, asked, lacks),
    ]


# ---------------------------------------------------------------------------------------------------------- what binds


def cannot_run(doubts: Iterable[Doubt], refused: Sequence[str]) -> str:
    """Why this version cannot run a plan; "" where it can."""
    found = list(dict.fromkeys(doubt.what for doubt in doubts if doubt.where == "backend"))
    if refused:
        found.append(f"this version has no {' '.join(refused)}")
    return "; ".join(found)


def _headline(style: Style, plan: Plan, lacks: str) -> list[str]:
    trained = "" if plan.context >= plan.shape.context else f" (the model allows {grouped(plan.shape.context)})"
    kv = f"{grouped(plan.kv_tokens)} tokens of {plan.wish.kv_type} KV"
    each = plan.kv_tokens // plan.running
    each = min(plan.context, each // PAGE * PAGE or each)
    share = f" in all: {grouped(each)} tokens for each of {grouped(plan.running)} at once" if plan.running > 1 else ""
    text = (
        f"FITS{f', but {lacks}.' if lacks else ':'} {title(plan.shape)} with {grouped(plan.context)} tokens of"
        f" context{trained}, {counted(plan.running, 'request')} at once (--max-running), {kv}{share};"
        f" {what_binds(plan)}."
    )
    lines = wrapped(regrouped(text))
    lines[0] = lines[0].replace("FITS", style.paint("FITS", "good" if not lacks else "unsure"), 1)
    if plan.binds.why and not has_room(plan):
        lines += wrapped(regrouped(f"Why it binds: {plan.binds.why}"))
    lines += wrapped(f"How it runs: {plan.option}{f' ({plan.choice})' if plan.choice else ''}")
    return lines + (wrapped(f"Drafting: none; {plan.no_drafts}") if plan.no_drafts else [])


def _devices(style: Style, plan: Plan, host: MemoryFacts | None) -> list[list[str]]:
    """A table for each device that holds something; the others in a line each."""
    parts, idle = [], []
    moments = moments_of(plan.layouts)
    for device in plan.ceilings.devices:
        if any(line.device == device.index for line in plan.lines):
            binding = plan.binds.line if device.index == plan.binds.device and not has_room(plan) else ""
            sums = wrapped(arithmetic(device, host), INDENT, INDENT * 2)
            parts.append(
                [
                    *heading(style, device, plan.ceilings.devices),
                    *sums,
                    *ledger_table(style, device, plan.lines, moments, binding),
                ]
            )
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


def _command(style: Style, plan: Plan, asked: Question, lacks: str) -> list[str]:
    notes = [] if asked.here else ["MODEL is the file, which is not here"]
    if asked.quant is not None:
        notes = [f"MODEL is {a(plan.shape.quant)} file of {asked.model or asked.shape}, which is not here"]
    if lacks:
        notes.append("not in this version, see the first line")
    head = "To run it" + (f" ({'; '.join(notes)})" if notes else "")
    lines = [style.paint(line, "head") for line in wrapped(head)]
    return [*lines, INDENT + asked.up_line(run_settings(plan))]
