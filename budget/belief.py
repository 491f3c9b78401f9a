"""What a box says of itself, put right where it contradicts itself.

Drivers, containers and old profiles report amounts that cannot be: more free than there is (a runtime that takes the
host's memory for the card's), a size of 0 that means "not known", one card that two drivers list. Every sum downstream
relies on these rules, so they are applied once, here, before anything is added up:

- an amount that is negative or larger than any machine is no amount: it becomes unknown;
- 0 is never a size of memory: it becomes unknown;
- a part is never larger than its whole: what is used, kept back or free is cut down to the total. It is cut and not
  dropped, because a number that is too large still says "a lot", and a plan must not hold more because of it;
- a card is counted once, however often it is listed.

Each correction leaves a doubt that says what was read, why it is not believed and what was taken. What is already right
passes unchanged, so believing twice is believing once.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from budget.facts import MIB, Box, Card, Doubt, MemoryFacts

MOST_BYTES = 1 << 50
"""1 PiB: no box that this is for has as much; beyond it a number is a counter gone wrong or a word for "no limit"."""
_SUM_SLACK_BYTES = 64 * MIB
"""The parts of a card's memory are rounded one by one, and an idle card changes between two reads."""
_KEPT_BYTES = 1024 * MIB
"""More than any driver was seen to keep for itself (66 to 869 MiB)."""

_SIZES = ("total_bytes", "visible_bytes", "gtt_total_bytes", "bar1_total_bytes")
_PARTS = (
    ("reserved_bytes", "total_bytes", "kept back by the driver"),
    ("used_bytes", "total_bytes", "in use"),
    ("free_bytes", "total_bytes", "free"),
    ("gtt_used_bytes", "gtt_total_bytes", "of the host's memory in use"),
    ("bar1_free_bytes", "bar1_total_bytes", "of the BAR1 window free"),
)
_WORDS = {
    "total_bytes": "memory",
    "visible_bytes": "memory that the host can map",
    "gtt_total_bytes": "host memory that it may pin (GTT)",
    "bar1_total_bytes": "BAR1 window",
    "reserved_bytes": "memory kept back by the driver",
    "used_bytes": "memory in use",
    "free_bytes": "free memory",
    "gtt_used_bytes": "pinned host memory in use",
    "bar1_free_bytes": "free part of the BAR1 window",
}


def believe(box: Box) -> Box:
    """`box` without contradictions, its doubts extended by one for each correction."""
    doubts = list(box.doubts)
    memory = _memory(box.memory, doubts) if box.memory is not None else None
    cards = [_card(card, doubts) for card in box.cards]
    return replace(box, memory=memory, cards=_once(cards, doubts), doubts=tuple(dict.fromkeys(doubts)))


def label(card: Card) -> str:
    """How a doubt names a card."""
    return f"{card.name} ({card.id})"


def mib(size: float) -> str:
    """Bytes as a person reads them."""
    return f"{size / MIB:.0f} MiB"


# ------------------------------------------------------------------------------------------------------------ the host


def _memory(memory: MemoryFacts, doubts: list[Doubt]) -> MemoryFacts | None:
    total, available, swap = memory.total_bytes, memory.available_bytes, memory.swap_bytes
    if total is not None and not 0 < total <= MOST_BYTES:
        doubts.append(Doubt("host memory", f"a machine with {mib(total)} of memory cannot be", "not known"))
        total = None
    limit, source = memory.limit_bytes, memory.limit_source
    if not 0 < limit <= MOST_BYTES:
        if total is None:
            doubts.append(Doubt("host memory", f"a limit of {mib(limit)} cannot be", "not known"))
            return None
        doubts.append(Doubt(f"host memory, {source}", f"a limit of {mib(limit)} cannot be", f"no limit: {mib(total)}"))
        limit, source = total, "MemTotal"
    elif total is not None and limit > total:
        what = f"it allows {mib(limit)}, more than the {mib(total)} that the machine has"
        doubts.append(Doubt(f"host memory, {source}", what, mib(total)))
        limit, source = total, "MemTotal"
    if total is None:
        what = f"how much the machine has is not known, only a limit of {mib(limit)} ({source})"
        doubts.append(Doubt("host memory", what, f"the limit: {mib(limit)}"))
    if available is not None and not 0 <= available <= MOST_BYTES:
        doubts.append(Doubt("host memory", f"{mib(available)} cannot be available", "not known"))
        available = None
    if available is not None and available > limit:
        what = f"{mib(available)} are said to be available, more than the {mib(limit)} that may be used ({source})"
        doubts.append(Doubt("host memory", what, mib(limit)))
        available = limit
    if swap is not None and not 0 <= swap <= MOST_BYTES:
        doubts.append(Doubt("swap", f"{mib(swap)} of swap cannot be", "not known"))
        swap = None
    return MemoryFacts(total, limit, source, available, swap)


# ----------------------------------------------------------------------------------------------------------- one card


def _card(card: Card, doubts: list[Doubt]) -> Card:
    for name, word in _WORDS.items():
        value = getattr(card, name)
        if value is None:
            continue
        if value == 0 and name in _SIZES:
            taken = "not known; what it shares with the host counts" if card.unified else "not known"
            doubts.append(Doubt(label(card), f"{word}: 0 is what a driver says when it does not know", taken))
            card = _with(card, name, None)
        elif not 0 <= value <= MOST_BYTES:
            doubts.append(Doubt(label(card), f"{word}: {mib(value)} cannot be", "not known"))
            card = _with(card, name, None)
    for part, whole, word in _PARTS:
        value, most = getattr(card, part), getattr(card, whole)
        if value is not None and most is not None and value > most:
            what = f"{mib(value)} are said to be {word}, more than the {mib(most)} that there are"
            doubts.append(Doubt(label(card), what, mib(most)))
            card = _with(card, part, most)
    if card.bandwidth_bytes_s is not None and not (
        math.isfinite(card.bandwidth_bytes_s) and card.bandwidth_bytes_s > 0
    ):
        doubts.append(Doubt(label(card), f"memory bandwidth: {card.bandwidth_bytes_s} cannot be", "not known"))
        card = replace(card, bandwidth_bytes_s=None)
    return _add_up(card, doubts)


def _with(card: Card, name: str, value: int | None) -> Card:
    changed: dict[str, Any] = {name: value}
    return replace(card, **changed)


def _add_up(card: Card, doubts: list[Doubt]) -> Card:
    """Free, used and kept back should be the whole. Where much is missing, nobody says who has it; where they are more
    than the whole, free is what some programming interfaces answer that cannot tell: the total."""
    if card.total_bytes is None or card.free_bytes is None or card.used_bytes is None:
        return card
    gap = card.total_bytes - card.free_bytes - card.used_bytes - (card.reserved_bytes or 0)
    if gap < -_SUM_SLACK_BYTES:
        what = (
            f"{mib(card.free_bytes)} of {mib(card.total_bytes)} are said to be free while {mib(card.used_bytes)} are in"
            " use: free is not known there"
        )
        doubts.append(Doubt(label(card), what, "not known; what is in use counts"))
        return _with(card, "free_bytes", None)
    if gap > (_SUM_SLACK_BYTES if card.reserved_bytes is not None else _KEPT_BYTES):
        what = (
            f"of {mib(card.total_bytes)}, {mib(card.free_bytes)} are free and {mib(card.used_bytes)} in use: "
            f"nobody says where the other {mib(gap)} are"
        )
        doubts.append(Doubt(label(card), what, f"what is free now: {mib(card.free_bytes)}"))
    return card


# ----------------------------------------------------------------------------------------------------- each card once


def _once(cards: Sequence[Card], doubts: list[Doubt]) -> tuple[Card, ...]:
    """Every card once. Of entries for one card the one that knows most stays, in the place of the first."""
    found: list[Card] = []
    for card in cards:
        twin = next((index for index, other in enumerate(found) if _same(card, other)), None)
        if twin is None:
            found.append(card)
            continue
        stays = max(found[twin], card, key=_known)
        where = f"at {card.pci}" if card.pci and card.pci == found[twin].pci else f"as {card.id}"
        what = f"listed more than once {where}"
        doubts.append(Doubt(label(found[twin]), what, f"one card: {stays.name}"))
        found[twin] = replace(stays, id=found[twin].id)
    sliced = {card.pci for card in found if is_slice(card) and card.pci}
    for card in found:
        if card.pci in sliced and not is_slice(card):
            doubts.append(Doubt(label(card), "cut into MIG slices that are listed as well", "the slices alone"))
    return tuple(card for card in found if is_slice(card) or card.pci not in sliced or not card.pci)


def _same(card: Card, other: Card) -> bool:
    if card.id == other.id:
        return True
    return card.pci is not None and card.pci == other.pci and not (is_slice(card) or is_slice(other))


def is_slice(card: Card) -> bool:
    """Whether it is a MIG slice: a part of a card that the driver lists like a card."""
    return card.vendor == "nvidia" and "MIG" in card.name.split()


def _known(card: Card) -> int:
    return sum(getattr(card, field.name) is not None for field in fields(card))
