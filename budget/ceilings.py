"""What homeserve may hold on each device of a box at the peak.

Three kinds of device, three sums. All amounts are bytes; a number that is not known stays None and is said as a doubt.

A **discrete card** has memory of its own. The driver keeps some of it back and others use some:

    ceiling = min(total - reserved, free now + what homeserve itself holds there) - floor

The floor is what must *remain* free at the peak. It is taken off once, here. Free memory counts before "total - used":
that overstates it by what the driver keeps back.

A **unified device** (an APU) computes in the host's memory. The firmware has carved out a part that only it sees, and
the driver lets it pin some of the rest (GTT). GTT is no memory: it is a bound on how much of the host's may be pinned.
So

    ceiling = min(carve-out + GTT, carve-out + ceiling of the host)

and the device shares one pool of DRAM with the CPU and with every other unified device: what they hold together, beyond
their carve-outs, must stay under the ceiling of the host. Never is carve-out + GTT + RAM a sum that anything may use.
`budget.unified` has the rules.

The **host** has what its control groups leave of it, whatever /proc/meminfo says (`budget.host` reads that truth):

    ceiling = min(limit, available now + what homeserve itself holds) - floor

A discrete card beside a unified device means that the unified one drives the screen: it is listed, and used when it is
named.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from budget.aperture import Aperture, aperture_of
from budget.belief import believe, label, mib
from budget.facts import MIB, Box, Card, Doubt
from budget.unified import free_carve_out, pinned_share, whole_share
from budget.wish import DEFAULT_CARD_FLOOR, DEFAULT_HOST_FLOOR

__all__ = ["Aperture", "Ceilings", "Device", "ceilings"]

HOST_USE_BYTES = 1024 * MIB
"""What a running system holds of the host's memory, where nothing says how much is available."""
WSL_RESERVE_BYTES = 1341 * MIB
"""1.31 GiB: what Windows and a context hold of every card under WSL2, whatever the driver says of it."""
BACKENDS = frozenset({"nvidia", "amd"})
"""Vendors whose cards a backend computes on."""

_NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class Device:
    """A device with its ceiling: what may be held there at the peak, the floor already taken off. None is unknown.

    `pool` is the number of the DRAM that it draws from. Discrete cards have one of their own; the CPU and every unified
    device share one. Of a unified device `private_bytes` (the carve-out) lie outside the shared pool: of what it holds,
    the first `private_bytes` take nothing from it. `made_of` says in words how the ceiling came about.
    """

    index: int
    id: str
    vendor: str
    name: str
    arch: str | None
    kind: str
    """discrete | uma | cpu"""
    usable: bool
    why_not: str | None
    total_bytes: int | None
    reserved_bytes: int | None
    free_bytes: int | None
    gtt_bytes: int | None
    ceiling_bytes: int | None
    floor_bytes: int
    bar1: Aperture | None = None
    card: Card | None = None
    pool: int = 0
    private_bytes: int = 0
    made_of: str = ""


@dataclass(frozen=True)
class Ceilings:
    """Every device of a box, the CPU last.

    `pools[n]` is what devices of pool n may hold together beyond their private bytes (None: unknown). Pool 0 is the
    host's DRAM. `doubts` are all: those that the box came with first.
    """

    devices: tuple[Device, ...]
    pools: tuple[int | None, ...]
    doubts: tuple[Doubt, ...]


def ceilings(
    box: Box,
    floor_bytes: int | None,
    held_bytes: Mapping[str, int] = _NOTHING,
    named: frozenset[str] = frozenset(),
) -> Ceilings:
    """The ceilings of `box`.

    floor_bytes   what must remain free on every device; None takes the defaults (1024 MiB a card, 256 MiB of the host,
                  nothing on a unified AMD device)
    held_bytes    by device id, what homeserve itself holds now: it would be free without it
    named         ids (or PCI addresses) of devices that were asked for by name: an integrated GPU beside a card is
                  usable only so
    """
    box = believe(box)
    doubts = list(box.doubts)
    if box.environment == "windows":
        doubts.append(Doubt("Windows", "homeserve has not run on native Windows", "as if it could; WSL2 works"))
    host = _host(box, floor_bytes, held_bytes, doubts)
    devices: list[Device] = []
    pools: list[int | None] = [host.ceiling_bytes]
    for index, card in enumerate(box.cards):
        held = max(0, held_bytes.get(card.id, 0))
        why_not = _left_out(card, box, named)
        said = doubts if why_not is None else []  # what is not used raises no doubts
        if card.unified:
            device = _unified(index, card, box, host, floor_bytes, held, said)
        else:
            device = replace(_discrete(index, card, box, floor_bytes, held, said), pool=len(pools))
            pools.append(device.ceiling_bytes)
        if why_not is None and device.ceiling_bytes is None:
            why_not = "its memory is unknown"
        devices.append(replace(device, usable=why_not is None, why_not=why_not))
    if host.ceiling_bytes is None:
        pools[0] = _largest_pinned(devices)
    devices.append(replace(host, index=len(devices)))
    return Ceilings(tuple(devices), tuple(pools), _gathered(doubts, box.cards))


# ------------------------------------------------------------------------------------------------------ discrete cards


def _discrete(index: int, card: Card, box: Box, floor_bytes: int | None, held: int, doubts: list[Doubt]) -> Device:
    floor = DEFAULT_CARD_FLOOR if floor_bytes is None else floor_bytes
    device = _device(index, card, "discrete", floor)
    device = replace(device, bar1=aperture_of(card, box))
    if card.total_bytes is None:
        return device
    kept = _kept(card, box, floor, doubts)
    most = max(0, card.total_bytes - kept)
    free, words = _free(card, most, kept, doubts)
    room = min(most, free + held)
    made_of = f"{words}{f' + {mib(held)} held by homeserve' if held else ''} - {mib(floor)} floor"
    if free + held > most:
        made_of = f"{mib(card.total_bytes)} - {mib(kept)} kept back - {mib(floor)} floor"
    return replace(
        device,
        free_bytes=_said_free(card),
        ceiling_bytes=max(0, room - floor),
        made_of=made_of,
    )


def _kept(card: Card, box: Box, floor: int, doubts: list[Doubt]) -> int:
    """Bytes of a card that nobody is ever given."""
    if box.environment == "wsl2":
        kept = max(WSL_RESERVE_BYTES, card.reserved_bytes or 0)
        what = "under WSL2 every card has about 1.31 GiB that Windows and a context hold and the driver does not show"
        doubts.append(Doubt(label(card), what, f"{mib(kept)} kept back"))
        return kept
    if card.reserved_bytes is None and card.free_bytes is None:
        what = "how much the driver keeps for itself is not known (other cards: 66 to 869 MiB)"
        taken = f"nothing; the floor of {mib(floor)} has to cover it" if floor else "nothing"
        doubts.append(Doubt(label(card), what, taken))
    return card.reserved_bytes or 0


def _free(card: Card, most: int, kept: int, doubts: list[Doubt]) -> tuple[int, str]:
    """What others leave of a card, and how that is known."""
    assert card.total_bytes is not None
    if card.free_bytes is not None:
        return card.free_bytes, f"{mib(card.free_bytes)} free"
    if card.used_bytes is not None:
        free = max(0, most - card.used_bytes)
        words = f"{mib(card.total_bytes)} - {mib(kept)} kept back - {mib(card.used_bytes)} in use"
        doubts.append(Doubt(label(card), "how much is free is not said", f"{words} = {mib(free)}"))
        return free, words
    screen = "; a screen hangs on it, which takes up to 1600 MiB" if card.display else ""
    doubts.append(Doubt(label(card), f"how much others hold is not known{screen}", "nothing: all of it is free"))
    return most, f"{mib(card.total_bytes)} - {mib(kept)} kept back"


def _said_free(card: Card) -> int | None:
    """Free bytes as far as they are known; what rests on an assumption is not."""
    if card.free_bytes is not None or card.total_bytes is None:
        return card.free_bytes
    if card.used_bytes is None or card.reserved_bytes is None:
        return None
    return max(0, card.total_bytes - card.reserved_bytes - card.used_bytes)


# ----------------------------------------------------------------------------------------------------- unified devices


def _unified(
    index: int, card: Card, box: Box, host: Device, floor_bytes: int | None, held: int, doubts: list[Doubt]
) -> Device:
    if card.vendor == "amd":
        floor = 0 if floor_bytes is None else floor_bytes
        share = pinned_share(card, box, host.ceiling_bytes, floor, held, doubts)
    else:
        floor = DEFAULT_CARD_FLOOR if floor_bytes is None else floor_bytes
        # The host's own floor is a part of this device's, not one more.
        more = max(0, floor - host.floor_bytes)
        share = whole_share(card, host.ceiling_bytes, more, floor, doubts)
    device = _device(index, card, "uma", floor)
    if share is None:
        return device
    return replace(
        device,
        free_bytes=free_carve_out(card),
        gtt_bytes=share.gtt_bytes,
        ceiling_bytes=share.ceiling_bytes,
        private_bytes=share.private_bytes,
        made_of=share.made_of,
    )


# ------------------------------------------------------------------------------------------------------------ the host


def _host(box: Box, floor_bytes: int | None, held_bytes: Mapping[str, int], doubts: list[Doubt]) -> Device:
    """The CPU. Its ceiling is also the size of the pool that unified devices share with it."""
    floor = DEFAULT_HOST_FLOOR if floor_bytes is None else floor_bytes
    device = Device(
        index=0,
        id="cpu",
        vendor="cpu",
        name=box.cpu.name if box.cpu and box.cpu.name else "CPU",
        arch=box.cpu.isa if box.cpu and box.cpu.flags else None,
        kind="cpu",
        usable=False,
        why_not="its memory is unknown",
        total_bytes=None,
        reserved_bytes=None,
        free_bytes=None,
        gtt_bytes=None,
        ceiling_bytes=None,
        floor_bytes=floor,
    )
    memory = box.memory
    if memory is None:
        return device
    free, words = memory.available_bytes, "available"
    if free is None:
        use = HOST_USE_BYTES if memory.limit_source == "MemTotal" else 0
        free, words = max(0, memory.limit_bytes - use), f"limit - {mib(use)} for the system"
        what = f"how much of {mib(memory.limit_bytes)} ({memory.limit_source}) is available is not known"
        doubts.append(Doubt("host memory", what, f"{mib(free)}: {mib(use)} for the running system"))
    held = max(0, held_bytes.get("cpu", 0)) + sum(_pinned(box.cards, held_bytes))
    room = min(memory.limit_bytes, free + held)
    return replace(
        device,
        usable=True,
        why_not=None,
        total_bytes=memory.total_bytes,
        free_bytes=memory.available_bytes,
        ceiling_bytes=max(0, room - floor),
        made_of=f"{mib(room)} ({words}) - {mib(floor)} floor",
    )


def _pinned(cards: Iterable[Card], held_bytes: Mapping[str, int]) -> Iterable[int]:
    """What homeserve certainly holds of the host's memory by unified devices: what their carve-outs cannot hold."""
    for card in cards:
        if card.unified:
            carve_out = card.total_bytes or 0 if card.vendor == "amd" else 0
            used = carve_out if card.used_bytes is None else min(carve_out, card.used_bytes)
            yield max(0, held_bytes.get(card.id, 0) - used)


# -------------------------------------------------------------------------------------------------------------- common


def _device(index: int, card: Card, kind: str, floor: int) -> Device:
    return Device(
        index=index,
        id=card.id,
        vendor=card.vendor,
        name=card.name,
        arch=card.arch,
        kind=kind,
        usable=True,
        why_not=None,
        total_bytes=card.total_bytes,
        reserved_bytes=card.reserved_bytes,
        free_bytes=card.free_bytes,
        gtt_bytes=card.gtt_total_bytes,
        ceiling_bytes=None,
        floor_bytes=floor,
        card=card,
    )


def _left_out(card: Card, box: Box, named: frozenset[str]) -> str | None:
    """Why nothing is planned on a card whatever memory it has; None where nothing speaks against it."""
    if card.vendor not in BACKENDS:
        return f"no backend for {card.vendor} devices"
    beside = next((other for other in box.cards if not other.unified and other.vendor in BACKENDS), None)
    if card.unified and beside is not None and not named & {card.id, card.pci}:
        return f"integrated, beside {beside.name}; --devices {card.id} would use it"
    return None


def _largest_pinned(devices: Iterable[Device]) -> int | None:
    """What unified devices may hold together of a host whose memory is unknown: GTT of all is a bound on one DRAM."""
    shared = [
        device.ceiling_bytes - device.private_bytes
        for device in devices
        if device.kind == "uma" and device.gtt_bytes is not None and device.ceiling_bytes is not None
    ]
    return max(shared, default=None)


def _gathered(doubts: Iterable[Doubt], cards: Sequence[Card]) -> tuple[Doubt, ...]:
    """Each doubt once; the same doubt of several equal cards as one."""
    named = {label(card): card.name for card in cards}
    wheres: dict[tuple[str, str, str], list[str]] = {}
    for doubt in doubts:
        same = wheres.setdefault((named.get(doubt.where, doubt.where), doubt.what, doubt.taken), [])
        if doubt.where not in same:
            same.append(doubt.where)
    return tuple(
        Doubt(found[0] if len(found) == 1 else f"{len(found)} x {name}", what, taken)
        for (name, what, taken), found in wheres.items()
    )
