"""What a report says beside the sums: what to change, how fast it may be, what else was looked at, what is in doubt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from budget.facts import Doubt
from budget.flip import capped_words
from budget.ledger import PIPELINE, TENSOR
from budget.page import INDENT, Cell, Column, Style, gained, grouped, mib, regrouped, table, wrapped
from budget.plan import Advice, Plan, Priced, Refusal
from budget.question import Question, flags
from budget.speed import LayoutSpeed
from budget.sums import has_room

DOUBTS_MAX = 40


def advice_lines(style: Style, advice: Sequence[Advice], asked: Question) -> list[str]:
    """What to change, and what it gives. What `up` of this version refuses is told all the same, and marked."""
    if not advice:
        return []
    rows: list[list[Cell]] = [
        [(" ".join(flags(each.flags)), "mark"), f"{gained(each.gain_tokens)} tokens of {each.of}", _cost(each, asked)]
        for each in advice
    ]
    columns = [Column("change", limit=44), Column("gives", right=True), Column("")]
    return [style.paint("What to change, and what it gives", "head"), *table(style, columns, rows)]


def _cost(advice: Advice, asked: Question) -> str:
    return advice.text + (" (not in this version)" if asked.refused(advice.flags) else "")


def speed_lines(style: Style, plan: Plan) -> list[str]:
    """Tokens per second of each layout, as a number and a range, and what the way from one to the other costs."""
    if not plan.speeds:
        return []
    rows: list[list[Cell]] = [
        [layout, _range(speed, speed.prefill_tok_s), _range(speed, speed.decode_tok_s), (speed.note, "soft")]
        for layout, speed in plan.speeds.items()
    ]
    columns = [
        Column("layout"),
        Column("prefill tokens/s", right=True),
        Column("decode tokens/s, one user", right=True),
        Column("how sure", limit=0),
    ]
    head = "Speed that the devices' own numbers allow (estimated, not measured)"
    lines = [style.paint(head, "head"), *table(style, columns, rows)]
    if plan.flip.why_not:
        lines += wrapped(regrouped(f"No flip between the layouts: {plan.flip.why_not}."), INDENT, INDENT * 2)
    if plan.flip_s is not None:
        worth = (
            "it never pays here"
            if plan.break_even_tokens is None
            else f"it pays from {grouped(plan.break_even_tokens)} prompt tokens on"
        )
        lines += wrapped(f"Flip from one layout to the other: {plan.flip_s:.2f} s; {worth}.", INDENT, INDENT * 2)
        lines += _flip_lines(plan)
    return lines


_HOMES = {
    "copy": "weights are filled from one copy in host memory",
    "images": "weights are filled from an image of each rank, the other layout's is on disk",
    "resident": "the weights of both layouts lie on the devices",
    "unified": "nothing moves: both layouts read the same memory",
}


def _flip_lines(plan: Plan) -> list[str]:
    """Where weights come from at a flip, how much one may carry, and what is held while it is on."""
    terms = plan.flip
    if not terms.fits:
        return []
    text = f"It rests in the {terms.resting} layout; {_HOMES[terms.home]}"
    if terms.transit_bytes:
        text += f"; what is live may take {mib(terms.transit_bytes)} MiB on its way, else the flip waits"
    words = [text, capped_words(terms, plan.most_tokens)] if not has_room(plan) else [text]
    return wrapped(regrouped("; ".join(filter(None, words)) + "."), INDENT, INDENT * 2)


ONE = ", one request at a time"
"""What stands behind an option's name where it was looked at with one request instead of several."""
_PRICED = (
    Column("option", limit=34),
    Column("at once", right=True),
    Column("tokens", right=True),
    Column("prefill/s", right=True),
    Column("decode/s", right=True),
    Column("why not"),
)


def priced_lines(
    style: Style, asked_of: Plan | Refusal, several: int, own: Callable[[Priced], str] = lambda each: each.why_not
) -> list[str]:
    """The options that were looked at: the one that was taken first, then the others with the reason against each.

    `several`: requests at once of options that were not cut down to one; `own` how a reason is told.
    """
    taken = asked_of if isinstance(asked_of, Plan) else None
    others = [each for each in asked_of.priced if each.why_not]
    one = any(each.option.endswith(ONE) for each in asked_of.priced)
    rows: list[list[Cell]] = []
    for each in others:
        running = 1 if each.option.endswith(ONE) else several
        rows.append([each.option.removesuffix(ONE), *_numbers(each, running if one else None), regrouped(own(each))])
    if asked_of.ceilings.devices[-1].ceiling_bytes is None and not asked_of.wish.devices:
        why = "not looked at, its memory is unknown (--assume-ram-mib N)"
        rows.append(["with the host", "", "-", "-", "-", why])
    if not rows:
        return []
    if taken is not None:
        mine = next((each for each in taken.priced if not each.why_not), None)
        prefill, decode = _of_plan(taken) if mine is None else (mine.prefill_tok_s, mine.decode_tok_s)
        chosen = Priced(taken.option, taken.kv_tokens, prefill, decode, "")
        cells = (taken.option, *_numbers(chosen, taken.running if one else None), "<- taken")
        rows.insert(0, [(cell, "mark") for cell in cells])
    head = "Looked at, and not taken" if taken is None else "What was looked at"
    return [style.paint(head, "head"), *table(style, _PRICED, rows)]


def _numbers(each: Priced, running: int | None) -> list[str]:
    at_once = "" if running is None else grouped(running)
    return [at_once, _number(each.kv_tokens), _number(each.prefill_tok_s), _number(each.decode_tok_s)]


def _of_plan(plan: Plan) -> tuple[float | None, float | None]:
    """Tokens per second of prompts and of answers, each in the layout that does it."""
    prefill = plan.speeds.get(PIPELINE) or plan.speeds.get(TENSOR)
    decode = plan.speeds.get(TENSOR) or prefill
    if prefill is None or decode is None:
        return None, None
    return prefill.prefill_tok_s, decode.decode_tok_s


def doubt_lines(style: Style, doubts: Iterable[Doubt]) -> list[str]:
    """What could not be known or cannot be believed. What this build lacks stands first."""
    each = sorted(dict.fromkeys(doubts), key=lambda doubt: doubt.where != "backend")
    if not each:
        return []
    lines = [style.paint("What is in doubt", "head")]
    for doubt in each[:DOUBTS_MAX]:
        taken = doubt.taken.removeprefix("taken as ").removeprefix("taken: ")
        text = f"{doubt.where}: {doubt.what}" + (f"; taken: {taken}" if taken else "")
        lines += wrapped(regrouped(text), f"{INDENT}- ", INDENT * 2)
    if len(each) > DOUBTS_MAX:
        lines.append(f"{INDENT}- and {len(each) - DOUBTS_MAX} more (--json has them all)")
    return lines


def _range(speed: LayoutSpeed, tok_s: float) -> str:
    low, high = tok_s * speed.low, tok_s * speed.high
    digits = 0 if high >= 100 else 1
    return f"{_number(tok_s)} ({grouped(low, digits)} to {grouped(high, digits)})"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return grouped(value, 0 if isinstance(value, int) or value >= 100 else 1)
