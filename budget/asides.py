"""What a report says beside the sums: what to change, how fast it may be, what else was looked at, what is in doubt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from budget.facts import Doubt
from budget.page import INDENT, Cell, Column, Style, gained, grouped, table, wrapped
from budget.plan import Advice, Plan, Priced
from budget.question import flags
from budget.speed import LayoutSpeed

DOUBTS_MAX = 40


def advice_lines(style: Style, advice: Sequence[Advice]) -> list[str]:
    """What to change, and what it gives."""
    if not advice:
        return []
    rows: list[list[Cell]] = [
        [(" ".join(flags(each.flags)), "mark"), f"{gained(each.gain_tokens)} tokens of {each.of}", each.text]
        for each in advice
    ]
    columns = [Column("change", limit=44), Column("gives", right=True), Column("")]
    return [style.paint("What to change, and what it gives", "head"), *table(style, columns, rows)]


def speed_lines(style: Style, plan: Plan) -> list[str]:
    """Tokens per second of each layout as a range, and what the way from one to the other costs."""
    if not plan.speeds:
        return []
    rows: list[list[Cell]] = [
        [layout, _range(speed, speed.prefill_tok_s), _range(speed, speed.decode_tok_s), (speed.note, "soft")]
        for layout, speed in plan.speeds.items()
    ]
    columns = [
        Column("layout"),
        Column("prefill tokens/s", right=True),
        Column("decode tokens/s", right=True),
        Column("how sure", limit=0),
    ]
    head = "Speed that the devices' own numbers allow (estimated, not measured)"
    lines = [style.paint(head, "head"), *table(style, columns, rows)]
    if plan.flip_s is not None:
        worth = (
            "it never pays here"
            if plan.break_even_tokens is None
            else f"it pays from {grouped(plan.break_even_tokens)} prompt tokens on"
        )
        lines += wrapped(f"Flip from one layout to the other: {plan.flip_s:.2f} s; {worth}.", INDENT, INDENT * 2)
    return lines


def priced_lines(style: Style, priced: Sequence[Priced]) -> list[str]:
    """The options that were looked at and not taken."""
    rows: list[list[Cell]] = [
        [each.option, _number(each.kv_tokens), _number(each.prefill_tok_s), _number(each.decode_tok_s), each.why_not]
        for each in priced
        if each.why_not
    ]
    if not rows:
        return []
    columns = [
        Column("option", limit=34),
        Column("tokens", right=True),
        Column("prefill/s", right=True),
        Column("decode/s", right=True),
        Column("why not"),
    ]
    return [style.paint("Looked at, and not taken", "head"), *table(style, columns, rows)]


def doubt_lines(style: Style, doubts: Iterable[Doubt]) -> list[str]:
    """What could not be known or cannot be believed. What this build lacks stands first."""
    each = sorted(dict.fromkeys(doubts), key=lambda doubt: doubt.where != "backend")
    if not each:
        return []
    lines = [style.paint("What is in doubt", "head")]
    for doubt in each[:DOUBTS_MAX]:
        text = f"{doubt.where}: {doubt.what}" + (f"; taken: {doubt.taken}" if doubt.taken else "")
        lines += wrapped(text, f"{INDENT}- ", INDENT * 2)
    if len(each) > DOUBTS_MAX:
        lines.append(f"{INDENT}- and {len(each) - DOUBTS_MAX} more (--json has them all)")
    return lines


def _range(speed: LayoutSpeed, tok_s: float) -> str:
    low, high = tok_s * speed.low, tok_s * speed.high
    digits = 0 if high >= 100 else 1
    return f"{grouped(low, digits)} to {grouped(high, digits)}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return grouped(value, 0 if isinstance(value, int) or value >= 100 else 1)
