"""The report of what does not fit, as a sum that a person can check, and of what cannot be known."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from budget.asides import priced_lines
from budget.ceilings import Ceilings, Device
from budget.facts import MIB, Doubt, MemoryFacts
from budget.fits import cannot_run
from budget.job import settle
from budget.ledger import MOMENTS, Line, held_bytes, peak_bytes
from budget.page import INDENT, Cell, Column, Style, a, counted, mib, regrouped, shown, table, tenths, wrapped
from budget.plan import Priced, Refusal, Unknown
from budget.question import BUDGET_ONLY, Question
from budget.sums import arithmetic, heading, named, peak_moment, shared_pools, title, word_of


def refusal_parts(
    style: Style, refusal: Refusal, host: MemoryFacts | None, doubts: Sequence[Doubt], asked: Question
) -> list[list[str]]:
    device = refusal.ceilings.devices[refusal.device]
    total = _sum_of(refusal, device)

    def told(each: Priced) -> str:
        """What lacks is told in one rounding, that of the sum."""
        said = f"{-(-(refusal.needed_bytes - refusal.available_bytes) // MIB)} MiB lack"
        mine = each.why_not.startswith(f"{said} on {device.name}")
        return f"{shown(total.lacking)} MiB lack on {device.name}" if mine else each.why_not

    sums = wrapped(arithmetic(device, host), INDENT, INDENT * 2)
    return [
        _headline(style, refusal, device, total),
        [*heading(style, device, refusal.ceilings.devices), *sums, *_sum(style, total)],
        _others(refusal.ceilings, refusal.lines, device),
        shared_pools(refusal.ceilings, refusal.lines),
        priced_lines(style, refusal, settle(refusal.shape, refusal.wish).running, told),
        _nearest(style, refusal, doubts, asked),
    ]


def unknown_parts(style: Style, unknown: Unknown, host: MemoryFacts | None) -> list[list[str]]:
    lines = wrapped(f"UNKNOWN: whether it fits cannot be said: {unknown.why}.".replace("..", "."))
    lines[0] = lines[0].replace("UNKNOWN", style.paint("UNKNOWN", "unsure"), 1)
    return [lines, device_table(style, unknown.ceilings), ceiling_sums(unknown.ceilings, host)]


def device_table(style: Style, ceilings: Ceilings) -> list[str]:
    """Every device, what it has and what may be held there."""
    rows: list[list[Cell]] = [
        [
            str(device.index),
            word_of(device, ceilings.devices),
            device.name,
            device.kind,
            mib(device.total_bytes),
            (mib(device.ceiling_bytes), "head"),
            ("yes", "good") if device.usable else (f"no: {device.why_not}", "unsure"),
        ]
        for device in ceilings.devices
    ]
    columns = [
        Column("device", right=True),
        Column("--devices", limit=14),
        Column("name", limit=34),
        Column("kind"),
        Column("total MiB", right=True),
        Column("ceiling MiB", right=True),
        Column("used by plans"),
    ]
    return [style.paint("Devices", "head"), *table(style, columns, rows)]


def ceiling_sums(ceilings: Ceilings, host: MemoryFacts | None) -> list[str]:
    """How each known ceiling came about, a line each."""
    lines: list[str] = []
    for device in ceilings.devices:
        if device.ceiling_bytes is not None:
            lines += wrapped(f"device {device.index}: {arithmetic(device, host)}", INDENT, INDENT * 2)
    return ["What may be held on each at the peak (MiB)", *lines] if lines else []


# ------------------------------------------------------------------------------------------------------------- details


@dataclass(frozen=True)
class _Sum:
    """What lacks, as a sum in tenths of a MiB: (sign, amount, words, how it was made) in turn."""

    rows: tuple[tuple[str, int, str, str], ...]
    moment: str
    needed: int
    there: int
    shared: bool
    """It is the memory that several devices share which does not suffice."""

    @property
    def lacking(self) -> int:
        return max(0, self.needed - self.there)


def _headline(style: Style, refusal: Refusal, device: Device, total: _Sum) -> list[str]:
    wish = refusal.wish
    asked = f" with {counted(wish.context, 'token')} of context" if wish.context else ""
    if wish.kv_tokens:
        asked += f"{' and' if asked else ' with'} a pool of {counted(wish.kv_tokens, 'token')}"
    least = re.search(r" with (\d+) tokens? of context does not fit: ", refusal.reason)
    if not asked and least is not None:
        asked = f" even with {counted(int(least[1]), 'token')} of context"
    running = f" and {counted(wish.running, 'request')} at once (--max-running)" if wish.running and asked else ""
    where = " of the memory that it shares" if total.shared else ""
    text = (
        f"DOES NOT FIT: {title(refusal.shape)}{asked}{running}: {named(device)} lacks {shown(total.lacking)} MiB{where}"
        f" (needed {shown(total.needed)}, there is {shown(total.there)})."
    )
    lines = wrapped(text)
    lines[0] = lines[0].replace("DOES NOT FIT", style.paint("DOES NOT FIT", "bad"), 1)
    if why := _why(refusal):
        lines += wrapped(regrouped(f"Why: {why}"))
    return lines + (wrapped(f"The option that came nearest: {refusal.option}") if refusal.option else [])


def _why(refusal: Refusal) -> str:
    """The reason, without the sentence that says what the first line says."""
    first, _, rest = refusal.reason.partition(" MiB are missing")
    return rest.lstrip(". ") if " does not fit: it would hold " in first and rest != refusal.reason else refusal.reason


def _sum_of(refusal: Refusal, device: Device) -> _Sum:
    """Line + line + ... = needed; needed - what may be held = lacking. At the moment that is the worst."""
    devices = refusal.ceilings.devices
    members = [each for each in devices if each.pool == device.pool and each.index != device.index]
    alone = any(held_bytes(refusal.lines, device.index, moment) == refusal.needed_bytes for moment in MOMENTS)
    shared = not alone and refusal.available_bytes == refusal.ceilings.pools[device.pool] and bool(members)
    moment = _moment(refusal, (device, *members) if shared else ())
    held = sorted(
        (line for line in refusal.lines if line.device == device.index and moment in line.held),
        key=lambda line: -line.bytes,
    )
    rows = [("+" if at else "", tenths(line.bytes), line.name, _made(line)) for at, line in enumerate(held)]
    total = sum(row[1] for row in rows)
    if shared:
        if own := min(total, tenths(device.private_bytes)):
            rows.append(("-", own, "of it in the carve-out, which is not shared", ""))
            total -= own
        for each in members:
            of_it = max(0, held_bytes(refusal.lines, each.index, moment) - each.private_bytes)
            if more := tenths(of_it):
                rows.append(("+", more, f"held by {named(each)}", ""))
                total += more
    beyond = tenths(refusal.needed_bytes) - total
    # A few tenths are rounding; more is what no line tells.
    if abs(beyond) > len(rows) + 1:
        sign = "+" if beyond > 0 else "-"
        rows.append((sign, abs(beyond), "held by other devices of this memory", ""))
        total += beyond
    return _Sum(tuple(rows), moment, total, tenths(refusal.available_bytes), shared)


def _sum(style: Style, total: _Sum) -> list[str]:
    rows: list[list[Cell]] = [[sign, shown(size), name, (made, "soft")] for sign, size, name, made in total.rows]
    rows.append(["=", shown(total.needed), (f"needed at this moment ({total.moment})", "head"), ""])
    rows.append(["-", shown(total.there), "what may be held there", ""])
    rows.append(["=", (shown(total.lacking), "bad"), ("MiB lack", "bad"), ""])
    return table(style, [Column(""), Column("MiB", right=True), Column("line", limit=44), Column("")], rows)


def _moment(refusal: Refusal, members: Sequence[Device]) -> str:
    """The moment whose sum is what was needed (of the memory that `members` share, where there are any); else the worst
    one."""
    lines = refusal.lines
    if members:
        return max(
            MOMENTS,
            key=lambda moment: sum(max(0, held_bytes(lines, d.index, moment) - d.private_bytes) for d in members),
        )
    exact = [moment for moment in MOMENTS if held_bytes(lines, refusal.device, moment) == refusal.needed_bytes]
    return exact[0] if exact else peak_moment(lines, refusal.device)


def _made(line: Line) -> str:
    return regrouped(f"{line.source}: {line.note}" if line.note else line.source)


def _others(ceilings: Ceilings, lines: Sequence[Line], named_already: Device) -> list[str]:
    """The other devices that this option would use, and how they stand."""
    found: list[str] = []
    for device in ceilings.devices:
        if device.index == named_already.index or not any(line.device == device.index for line in lines):
            continue
        peak = peak_bytes(lines, device.index)
        stand = f"{named(device)} would hold {mib(peak)} of {mib(device.ceiling_bytes)} MiB"
        if device.ceiling_bytes is not None and peak > device.ceiling_bytes:
            stand += f": {mib(peak - device.ceiling_bytes)} lack"
        found += wrapped(f"D{stand[1:]}", "", INDENT)
    return found


def _nearest(style: Style, refusal: Refusal, doubts: Sequence[Doubt], asked: Question) -> list[str]:
    head = style.paint("The nearest plan that fits", "head")
    if refusal.nearest is None:
        return [head, *wrapped(refusal.nearest_text or "none was found: nothing smaller fits either", INDENT, INDENT)]
    lines = [head]
    if refusal.nearest_text:
        lines += wrapped(regrouped(refusal.nearest_text), INDENT, INDENT)
    quant = refusal.nearest.get("quant")
    if quant is not None:
        lines += wrapped(f"It needs {a(str(quant))} file of {asked.model or refusal.shape.name}.", INDENT, INDENT)
    lines.append(f"{INDENT}look at it   {asked.budget_line(refusal.nearest)}")
    if not _beyond_up(refusal.nearest):
        lacks = cannot_run(doubts, asked.refused(refusal.nearest))
        head_of_it = "run it       " if not lacks else "run it, not in this version   "
        lines.append(f"{INDENT}{head_of_it}{asked.up_line(refusal.nearest)}")
    return lines


def _beyond_up(settings: Mapping[str, str | int]) -> bool:
    """Whether the settings ask for another file or another box, which no `homeserve up` with this model can give."""
    return any(name in BUDGET_ONLY and value not in ("off", "auto") for name, value in settings.items())
