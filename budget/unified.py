"""What a device that computes in the host's memory may hold.

On an AMD APU the firmware carves a part out of the DRAM before the system starts (the "VRAM" of the APU), and the
kernel driver may pin some of what is left, at most GTT bytes of it:

    DRAM  |  carve-out  |            what the system sees (MemTotal)             |
                        |<-------- GTT: may be pinned -------->|
                        |  in use by others  |<---------- available ------------>|

So the device reaches carve-out + GTT, and of the GTT no more than the host has to give. Which of the bounds is the
least differs from box to box, and each of them has been wrong somewhere: a GTT above MemTotal, a carve-out of 0, a host
whose control group allows a part of what is available. Hence always the least.

On other unified devices (GB10, Jetson, Intel) nothing is carved out that the driver tells of: all is the host's.

Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from budget.belief import label, mib
from budget.facts import GIB, Box, Card, Doubt


@dataclass(frozen=True)
class Share:
    """A unified device's part: its ceiling, of which `private_bytes` are its own and the rest is the host's."""

    ceiling_bytes: int
    private_bytes: int
    gtt_bytes: int | None
    made_of: str


def pinned_share(
    card: Card, box: Box, host_bytes: int | None, floor: int, held: int, doubts: list[Doubt]
) -> Share | None:
    """The share of an AMD device; None where neither its carve-out nor its GTT is known.

    `host_bytes` is the host's ceiling, `held` what homeserve itself holds on the device.
    """
    private = _carve_out(card, held, doubts)
    gtt, pinnable = _gtt(card, box, held, doubts)
    if private is None and gtt is None:
        return None
    own, shared = private or 0, pinnable or 0
    room, made_of = own + shared - floor, f"{mib(own)} carve-out + {mib(shared)} pinned of the host (GTT)"
    if host_bytes is not None and own + host_bytes < room:
        room, made_of = own + host_bytes, f"{mib(own)} carve-out + {mib(host_bytes)} that the host can give"
    elif floor:
        made_of += f" - {mib(floor)} floor"
    if host_bytes is None and gtt is not None:
        what = "how much memory the host has is not known; GTT is a bound on what may be pinned, not a promise"
        doubts.append(Doubt(label(card), what, f"all of GTT: {mib(shared)}"))
    _two_pools(card, box, gtt, doubts)
    room = max(0, room)
    return Share(room, min(own, room), gtt, made_of)


def whole_share(card: Card, host_bytes: int | None, more: int, floor: int, doubts: list[Doubt]) -> Share | None:
    """The share of a device without carve-out and GTT: the host's memory less `more` bytes of headroom.

    What the driver calls its total is the host's memory once more, not a second pool.
    """
    if host_bytes is None:
        return None
    room = max(0, host_bytes - more)
    made_of = f"{mib(room + floor)} of the host - {mib(floor)} floor"
    if card.total_bytes is not None and card.total_bytes < room:
        room, made_of = card.total_bytes, f"{mib(card.total_bytes)} that the driver allows"
    what = "it computes in the host's memory, and allocations have failed while more was said to be available"
    doubts.append(Doubt(label(card), what, f"{mib(floor)} of the host's memory stay free"))
    return Share(room, 0, None, made_of)


def free_carve_out(card: Card) -> int | None:
    """What others leave of the carve-out, where that is known: what is free, and no more than what is not in use."""
    if card.total_bytes is None or card.used_bytes is None:
        return card.free_bytes
    unused = card.total_bytes - card.used_bytes
    return unused if card.free_bytes is None else min(card.free_bytes, unused)


def _carve_out(card: Card, held: int, doubts: list[Doubt]) -> int | None:
    """The carve-out without what others use. What homeserve holds is given back only as far as it cannot be GTT."""
    if card.total_bytes is None:
        return None
    free = free_carve_out(card)
    if free is None:
        doubts.append(Doubt(label(card), "how much of its carve-out others hold is not known", "nothing: it is free"))
        return card.total_bytes
    return min(card.total_bytes, free + max(0, held - (card.gtt_used_bytes or 0)))


def _gtt(card: Card, box: Box, held: int, doubts: list[Doubt]) -> tuple[int | None, int | None]:
    """(GTT, what others leave of it); (None, None) where nothing tells."""
    ram = None if box.memory is None else box.memory.total_bytes or box.memory.limit_bytes
    total = card.gtt_total_bytes
    if total is None:
        if ram is None:
            what = "neither the host's memory nor how much of it may be pinned (GTT) is known"
            taken = "nothing: its own memory is not known either" if card.total_bytes is None else "the carve-out alone"
            doubts.append(Doubt(label(card), what, taken))
            return None, None
        total, rule = _default_gtt(card, ram, box.kernel)
        what = f"how much of the host's memory may be pinned (GTT) is not said; {rule}"
        doubts.append(Doubt(label(card), what, mib(total)))
    elif ram is not None and total > ram:
        what = f"GTT allows {mib(total)} to be pinned, more than the {mib(ram)} of memory that the host has"
        doubts.append(Doubt(label(card), what, mib(ram)))
        total = ram
    if card.gtt_used_bytes is None:
        return total, total
    others = max(0, min(total, card.gtt_used_bytes) - max(0, held - (card.used_bytes or 0)))
    return total, total - others


def _default_gtt(card: Card, ram: int, kernel: str | None) -> tuple[int, str]:
    """amdgpu's own default: before Linux 6.0 min(max(3 GiB, VRAM), 3/4 RAM), since then max(3 GiB, RAM/2).

    RAM is what the system sees, after the carve-out.
    """
    version = _version(kernel)
    if version is not None and version < (6, 0):
        size = min(max(3 * GIB, card.total_bytes or 0), ram * 3 // 4)
        return size, f"before Linux 6.0 it is the carve-out or 3 GiB, and at most 3/4 of {mib(ram)}"
    return min(ram, max(3 * GIB, ram // 2)), f"by default it is half of {mib(ram)}, at least 3 GiB"


def _two_pools(card: Card, box: Box, gtt: int | None, doubts: list[Doubt]) -> None:
    """Since Linux 6.10 compute programs are given one of the two pools (apu_prefer_gtt): both numbers are shown."""
    version = _version(box.kernel)
    if version is None or version < (6, 10) or gtt is None or card.total_bytes is None:
        return
    one = f"the carve-out of {mib(card.total_bytes)}" if card.total_bytes >= gtt else f"GTT of {mib(gtt)}"
    what = (
        f"carve-out {mib(card.total_bytes)}, GTT {mib(gtt)}: since Linux 6.10 what a program asks for as device memory "
        f"comes from one of them, here from {one}"
    )
    doubts.append(Doubt(label(card), what, "both: the rest is asked for as pinned host memory"))


def _version(kernel: str | None) -> tuple[int, int] | None:
    match = re.match(r"(\d{1,4})\.(\d{1,4})", kernel or "")
    return (int(match[1]), int(match[2])) if match else None
