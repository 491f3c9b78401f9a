"""The report of what does not fit, as a sum that a person can check, and of what cannot be known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from budget.asides import priced_lines
from budget.ceilings import Ceilings, Device
from budget.facts import MemoryFacts
from budget.ledger import MOMENTS, Line, held_bytes, peak_bytes
from budget.page import INDENT, Cell, Column, Style, grouped, mib, shown, table, tenths, wrapped
from budget.plan import Refusal, Unknown
from budget.question import BUDGET_ONLY, Question
from budget.sums import arithmetic, heading, named, peak_moment, shared_pools


def refusal_parts(style: Style, refusal: Refusal, host: MemoryFacts | None, asked: Question) -> list[list[str]]:
    device = refusal.ceilings.devices[refusal.device]
    return [
        _headline(style, refusal, device),
        [*heading(style, device), *_sum(style, refusal, device, host)],
        _others(refusal.ceilings, refusal.lines, device),
        shared_pools(refusal.ceilings, refusal.lines),
        priced_lines(style, refusal.priced),
        _nearest(style, refusal, asked),
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


def _headline(style: Style, refusal: Refusal, device: Device) -> list[str]:
    lacking = refusal.needed_bytes - refusal.available_bytes
    wish = refusal.wish
    asked = f" with {grouped(wish.context)} tokens of context" if wish.context else ""
    running = f" and {wish.running} request{'s' * (wish.running != 1)} at once" if wish.running else ""
    text = (
        f"DOES NOT FIT: {refusal.shape.name} ({refusal.shape.quant}){asked}{running if asked else ''}:"
        f" {named(device)} lacks {mib(max(0, lacking))} MiB (needed {mib(refusal.needed_bytes)}, there is"
        f" {mib(refusal.available_bytes)})."
    )
    lines = wrapped(text)
    lines[0] = lines[0].replace("DOES NOT FIT", style.paint("DOES NOT FIT", "bad"), 1)
    if refusal.reason and not refusal.reason.startswith(f"{refusal.shape.name} does not fit"):
        lines += wrapped(f"Why: {refusal.reason}")
    return lines + (wrapped(f"The option that came nearest: {refusal.option}") if refusal.option else [])


def _sum(style: Style, refusal: Refusal, device: Device, host: MemoryFacts | None) -> list[str]:
    """Line + line + ... = needed; needed - ceiling = lacking. At the moment that is the worst for this device."""
    moment = _moment(refusal, device.index)
    held = sorted(
        (line for line in refusal.lines if line.device == device.index and moment in line.held),
        key=lambda line: -line.bytes,
    )
    lines = wrapped(arithmetic(device, host), INDENT, INDENT * 2)
    total = sum(tenths(line.bytes) for line in held)
    there = tenths(refusal.available_bytes)
    rows: list[list[Cell]] = [
        ["+" if at else "", mib(line.bytes), line.name, (_made(line), "soft")] for at, line in enumerate(held)
    ]
    beyond = tenths(refusal.needed_bytes) - total
    # A few tenths are rounding; more is what other devices hold of the same memory.
    if abs(beyond) > len(held) + 1:
        rows.append(["+" if beyond > 0 else "-", shown(abs(beyond)), "held by other devices of this memory", ""])
        total += beyond
    rows.append(["=", shown(total), (f"needed at this moment ({moment})", "head"), ""])
    rows.append(["-", shown(there), "what may be held there", ""])
    rows.append(["=", (shown(total - there), "bad"), ("MiB lack", "bad"), ""])
    return [*lines, *table(style, [Column(""), Column("MiB", right=True), Column("line", limit=40), Column("")], rows)]


def _moment(refusal: Refusal, device: int) -> str:
    """The moment whose sum is what was needed; else the worst one."""
    exact = [moment for moment in MOMENTS if held_bytes(refusal.lines, device, moment) == refusal.needed_bytes]
    return exact[0] if exact else peak_moment(refusal.lines, device)


def _made(line: Line) -> str:
    return f"{line.source}: {line.note}" if line.note else line.source


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


def _nearest(style: Style, refusal: Refusal, asked: Question) -> list[str]:
    head = style.paint("The nearest plan that fits", "head")
    if refusal.nearest is None:
        return [head, *wrapped(refusal.nearest_text or "none was found: nothing smaller fits either", INDENT, INDENT)]
    lines = [head]
    if refusal.nearest_text:
        lines += wrapped(refusal.nearest_text, INDENT, INDENT)
    lines.append(f"{INDENT}look at it   {asked.budget_line(refusal.nearest)}")
    if not _beyond_up(refusal.nearest):
        lines.append(f"{INDENT}run it       {asked.up_line(refusal.nearest)}")
    return lines


def _beyond_up(settings: Mapping[str, str | int]) -> bool:
    """Whether the settings ask for another file or another box, which no `homeserve up` with this model can give."""
    return any(name in BUDGET_ONLY and value not in ("off", "auto") for name, value in settings.items())
