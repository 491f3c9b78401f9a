"""The sums of a report: how a ceiling came about, what a device holds line by line, what stays free.

A page shows tenths of a MiB. Every total on it is the sum of the tenths above it, not the rounded exact total, so that
whoever adds up gets what stands there.
"""

from __future__ import annotations

from collections.abc import Sequence

from budget.ceilings import Ceilings, Device
from budget.facts import MemoryFacts, ModelShape
from budget.ledger import MOMENTS, Line, held_bytes
from budget.page import INDENT, Cell, Column, Style, grouped, mib, regrouped, shown, table, tenths, wrapped
from budget.plan import Plan

BAR = 12


def named(device: Device) -> str:
    """How a page calls a device."""
    return f"device {device.index} ({device.name})"


def title(shape: ModelShape) -> str:
    """A model and its mix, once."""
    return shape.name if shape.quant.lower() in shape.name.lower() else f"{shape.name} ({shape.quant})"


def word_of(device: Device, devices: Sequence[Device]) -> str:
    """The word of `--devices` that names it: cpu, cuda:N, rocm:N, else its id."""
    kind = {"nvidia": "cuda", "amd": "rocm"}.get(device.vendor)
    if kind is None:
        return device.id
    return f"{kind}:{[other.index for other in devices if other.vendor == device.vendor].index(device.index)}"


def has_room(plan: Plan) -> bool:
    """Whether a larger pool would fit than the one that is planned, which nobody asked for."""
    return plan.most_tokens > plan.kv_tokens


def what_binds(plan: Plan) -> str:
    """The line that leaves no room for more, and where; or that there is room."""
    where = f"{plan.binds.line!r} on {named(plan.ceilings.devices[plan.binds.device])}"
    if not has_room(plan):
        return f"{where} binds"
    return f"nothing binds yet: {grouped(plan.most_tokens)} tokens would fit, then {where} would bind"


def heading(style: Style, device: Device, devices: Sequence[Device]) -> list[str]:
    """Which device this is, in one line: how `--devices` names it, and its id where it has one of its own."""
    words = [device.kind if device.kind == "cpu" else f"{device.vendor} {device.kind}"]
    words += [word for word in (device.arch, device.id if device.id != device.kind else None) if word]
    head = style.paint(f"Device {device.index}, {word_of(device, devices)}: {device.name}", "head")
    return [head + style.paint(f"  {', '.join(words)}", "soft")]


def arithmetic(device: Device, host: MemoryFacts | None) -> str:
    """The ceiling as a sum: total - reserved - what others hold - floor."""
    if device.ceiling_bytes is None:
        return f"ceiling unknown: {device.why_not or 'its memory is unknown'}"
    if device.kind == "cpu":
        return _host_sum(device, device.ceiling_bytes, host)
    if device.kind == "uma":
        return _unified_sum(device, device.ceiling_bytes)
    return _card_sum(device, device.ceiling_bytes)


def moments_of(layouts: Sequence[str]) -> tuple[str, ...]:
    """The moments that a plan with these layouts goes through."""
    flips = ("flip",) if len(layouts) > 1 else ()
    return tuple(moment for moment in MOMENTS if moment == "boot" or moment in layouts or moment in flips)


def peak_moment(lines: Sequence[Line], device: int, moments: Sequence[str] = MOMENTS) -> str:
    return max(moments, key=lambda moment: held_bytes(lines, device, moment))


def ledger_table(
    style: Style, device: Device, lines: Sequence[Line], moments: Sequence[str], binding: str = ""
) -> list[str]:
    """The lines of a device, the largest first, then what it holds at each moment, its peak and what is left."""
    mine = sorted((line for line in lines if line.device == device.index), key=lambda line: -line.bytes)
    rows: list[list[Cell]] = []
    for line in mine:
        paint = "mark" if line.name == binding else ""
        made = f"{line.source}: {line.note}" if line.note else line.source
        share = (style.bar(line.bytes / device.ceiling_bytes, BAR) if device.ceiling_bytes else "", "bar")
        rows.append(
            [(line.name, paint), (mib(line.bytes), paint), share, _held(line, moments), (regrouped(made), "soft")]
        )
    columns = [
        Column("line", limit=26),
        Column("MiB", right=True),
        Column("of ceiling", limit=BAR),
        Column("held", limit=18),
        Column("source"),
    ]
    return [*table(style, columns, rows), *_totals(style, device, mine, moments)]


def shared_pools(ceilings: Ceilings, lines: Sequence[Line]) -> list[str]:
    """For each memory that several devices draw from: what they may hold of it together, and do at the worst moment."""
    found: list[str] = []
    for number, pool in enumerate(ceilings.pools):
        members = [device for device in ceilings.devices if device.pool == number]
        if pool is None or len(members) < 2:
            continue
        worst = max(MOMENTS, key=lambda moment: sum(_shared(lines, each, moment) for each in members))
        total = sum(_shared(lines, each, worst) for each in members)
        parts = [part for each in members for part in _parts(lines, each, worst)]
        of = f" = {' + '.join(parts)}" if len(parts) > 1 or "carve-out" in " ".join(parts) else ""
        numbers = [str(each.index) for each in members]
        names = f"{', '.join(numbers[:-1])} and {numbers[-1]}"
        found += wrapped(
            f"Devices {names} draw from the same memory. Together they may hold {mib(pool)} MiB of it; at the worst"
            f" moment ({worst}) they hold {shown(total)}{of}."
        )
    return found


def _parts(lines: Sequence[Line], device: Device, moment: str) -> list[str]:
    """What a device holds at a moment, and how much of it lies outside the shared memory; nothing where it holds
    nothing."""
    held = sum(tenths(line.bytes) for line in lines if line.device == device.index and moment in line.held)
    own = min(held, tenths(device.private_bytes))
    away = f" - {shown(own)} of it in the carve-out, which does not count here" if own else ""
    return [f"{shown(held)} on device {device.index}{away}"] if held else []


def _shared(lines: Sequence[Line], device: Device, moment: str) -> int:
    """Tenths of a MiB that a device holds of the memory that it shares."""
    held = sum(tenths(line.bytes) for line in lines if line.device == device.index and moment in line.held)
    return max(0, held - tenths(device.private_bytes))


# ------------------------------------------------------------------------------------------------------------- details


def _card_sum(device: Device, ceiling: int) -> str:
    if device.total_bytes is None:
        return f"ceiling {mib(ceiling)} MiB"
    total, reserved = tenths(device.total_bytes), tenths(device.reserved_bytes or 0)
    floor, top = tenths(device.floor_bytes), tenths(ceiling)
    others = total - reserved - floor - top
    parts = [f"{shown(total)} total"]
    parts.append("reserved (unknown)" if device.reserved_bytes is None else f"{shown(reserved)} reserved")
    if device.free_bytes is None and others <= 0:
        parts.append("used by others (unknown)")
    else:
        others_are = "used by others" if device.reserved_bytes is not None else "kept back or used by others"
        parts.append(f"{shown(max(0, others))} {others_are}")
    parts.append(f"{shown(floor)} floor")
    if others < 0:  # nothing is left after the floor: the ceiling is not below zero
        return f"{' - '.join(parts)}: nothing is left, ceiling {shown(top)}"
    return f"{' - '.join(parts)} = ceiling {shown(top)}"


def _unified_sum(device: Device, ceiling: int) -> str:
    carve = device.total_bytes
    if carve is None or device.gtt_bytes is None:
        return f"ceiling {mib(ceiling)} MiB, of the host's own memory"
    own, gtt, top = tenths(carve), tenths(device.gtt_bytes), tenths(ceiling)
    floor = tenths(device.floor_bytes)
    text = f"{shown(own)} carve-out + {shown(gtt)} GTT"
    if lacking := own + gtt - floor - top:
        text += f" - {shown(lacking)} that others hold or the host does not have"
    if floor:
        text += f" - {shown(floor)} floor"
    return f"{text} = ceiling {shown(top)} (GTT is the host's memory: it is counted once)"


def _host_sum(device: Device, ceiling: int, host: MemoryFacts | None) -> str:
    floor, top = tenths(device.floor_bytes), tenths(ceiling)
    if host is None:
        return f"ceiling {shown(top)} MiB"
    limit = tenths(host.limit_bytes)
    others = limit - floor - top
    what = "total" if host.limit_source == "MemTotal" else f"limit ({host.limit_source})"
    if others < 0:
        return f"{shown(limit)} {what} - {shown(floor)} floor: nothing is left, ceiling {shown(top)}"
    used = "kept back, what is free being unknown" if host.available_bytes is None else "used by others"
    return f"{shown(limit)} {what} - {shown(others)} {used} - {shown(floor)} floor = ceiling {shown(top)}"


def _held(line: Line, moments: Sequence[str]) -> str:
    """`always`, or the moments that this plan goes through."""
    if set(moments) <= set(line.held):
        return "always"
    return ", ".join(moment for moment in line.held if moment in moments) or ", ".join(line.held)


def _totals(style: Style, device: Device, lines: Sequence[Line], moments: Sequence[str]) -> list[str]:
    sums = {moment: sum(tenths(line.bytes) for line in lines if moment in line.held) for moment in moments}
    worst = max(moments, key=lambda moment: sums[moment])
    found = wrapped("sums: " + ", ".join(f"{moment} {shown(sums[moment])}" for moment in moments), INDENT, INDENT * 2)
    peak = f"peak {shown(sums[worst])} ({worst})"
    if device.ceiling_bytes is None:
        return [*found, f"{INDENT}{peak} of an unknown ceiling"]
    top = tenths(device.ceiling_bytes)
    exact = device.ceiling_bytes - max(held_bytes(lines, device.index, moment) for moment in moments)
    left = top - sums[worst]
    if exact >= 0:
        # Rounding of many lines may take a tenth too much; what fits is never shown as lacking.
        end = f"{shown(max(0, left))} left"
        paint = "good"
    else:
        end, paint = f"{shown(max(1, -left))} MiB lack", "bad"
    return [*found, f"{INDENT}{peak} of {shown(top)}: " + style.paint(end, paint)]
