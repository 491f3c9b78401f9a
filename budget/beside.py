"""A box as a model sees it that comes in beside others of the same server.

What is free now already lacks what the others hold now. A plan, though, promises them more than that (a vocabulary
that is read with the first guided answer), and some of them may leave before the load. So two amounts are told of each
device:

    gives    what comes back, or is counted elsewhere: what is held now by models that leave, or by all of them
    takes    what is promised: the plans of those that stay

and the new model may have what is free + gives - takes. On the host, where what is held can be read, gives is what all
of our processes hold now; on a card, where a load takes all at once, it is what the plans say.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from budget.facts import Box, Card, MemoryFacts
from budget.ledger import peak_bytes
from budget.outcome import Plan

HOST = "cpu"
"""The host's id among devices."""


def beside(box: Box, gives: Mapping[str, int], takes: Mapping[str, int]) -> Box:
    """`box` with so many bytes more and less free on each device, by its id."""
    cards = tuple(_card(card, gives.get(card.id, 0) - takes.get(card.id, 0)) for card in box.cards)
    more = gives.get(HOST, 0) - takes.get(HOST, 0)
    more += sum(_pinned(card, gives.get(card.id, 0) - takes.get(card.id, 0)) for card in box.cards if card.unified)
    return replace(box, memory=_host(box.memory, more), cards=cards)


def _host(memory: MemoryFacts | None, more: int) -> MemoryFacts | None:
    """Never more than the limit; where nobody tells what is available, the limit itself is less."""
    if memory is None or not more:
        return memory
    if memory.available_bytes is None:
        return replace(memory, limit_bytes=max(0, min(memory.limit_bytes, memory.limit_bytes + more)))
    return replace(memory, available_bytes=max(0, min(memory.limit_bytes, memory.available_bytes + more)))


def _card(card: Card, more: int) -> Card:
    """A unified device's own part alone; what it pins of the host's memory is the host's."""
    if not more:
        return card
    own = more - _pinned(card, more) if card.unified else more
    changed = card
    if card.free_bytes is not None:
        changed = replace(changed, free_bytes=max(0, card.free_bytes + own))
    if card.used_bytes is not None or card.free_bytes is None:
        changed = replace(changed, used_bytes=max(0, (card.used_bytes or 0) - own))
    if card.unified and card.gtt_used_bytes is not None:
        changed = replace(changed, gtt_used_bytes=max(0, card.gtt_used_bytes - _pinned(card, more)))
    return changed


def _pinned(card: Card, more: int) -> int:
    """Of what a unified device gives back, what is certainly of the host's memory: what its carve-out does not hold."""
    carve_out = (card.total_bytes or 0) if card.vendor == "amd" else 0
    used = carve_out if card.used_bytes is None else min(carve_out, card.used_bytes)
    return more if more < 0 else max(0, more - used)


def promised(plan: Plan) -> dict[str, int]:
    """What a plan promises its model at the peak, in bytes by the device's id."""
    devices = plan.ceilings.devices
    peaks = {device.id: peak_bytes(plan.lines, device.index) for device in devices}
    return {name: size for name, size in peaks.items() if size}
