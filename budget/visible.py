"""Which cards the environment hides from the compute drivers. Pure.

NVML and sysfs show every card of the box. The drivers that compute show those that these variables let through:

    NVIDIA   CUDA_VISIBLE_DEVICES
    AMD      ROCR_VISIBLE_DEVICES, and of what that leaves HIP_VISIBLE_DEVICES (some versions of HIP read
             CUDA_VISIBLE_DEVICES without it, others do not: that is left to the driver to say)

Each is a list of numbers and, but for HIP's, of UUIDs, of which a beginning will do that no other card has. What comes
behind the first word that names no card does not count; an empty list hides all. The driver counts in an order of its
own: CUDA the fastest card first unless CUDA_DEVICE_ORDER=PCI_BUS_ID, ROCm as KFD lists them. Where it cannot be known
from outside which card a number means, nothing is said, and the worker's own error tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from budget.facts import Card

CUDA, ROCR, HIP = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
CUDA_ORDER = "CUDA_DEVICE_ORDER"
NAMES = (CUDA, CUDA_ORDER, ROCR, HIP)


@dataclass(frozen=True)
class Hidden:
    """A card that `variable` with the text `value` does not let through."""

    variable: str
    value: str


def hidden(cards: Sequence[Card], environ: Mapping[str, str]) -> dict[str, Hidden]:
    """Of the cards of a box, by id, those that are certainly hidden."""
    found: dict[str, Hidden] = {}
    nvidia = [card for card in cards if card.vendor == "nvidia"]
    found |= _behind(nvidia, CUDA, environ, order=_cuda_order(nvidia, environ))
    amd = [card for card in cards if card.vendor == "amd"]
    found |= _behind(amd, ROCR, environ, order=_kfd_order(amd))
    left = [card for card in amd if card.id not in found]
    known = ROCR not in environ or len(left) == 1  # ROCR's list also says in which order HIP counts
    found |= _behind(left, HIP, environ, order=_kfd_order(left) if known else None, by_uuid=False)
    return found


def _behind(
    cards: Sequence[Card],
    variable: str,
    environ: Mapping[str, str],
    *,
    order: Sequence[Card] | None,
    by_uuid: bool = True,
) -> dict[str, Hidden]:
    """Of `cards`, those that one variable hides; `order`: as the driver counts them, None: not known."""
    value = environ.get(variable)
    if value is None:
        return {}
    let_through: list[Card] = []
    for word in filter(None, map(str.strip, value.split(","))):
        if word.isascii() and word.isdigit():
            if int(word[:9]) >= len(cards):
                break
            if order is None:
                return {}
            let_through.append(order[int(word[:9])])
            continue
        named = [card for card in cards if by_uuid and _begins(card, word)]
        if len(named) != 1:
            break
        let_through += named
    through = {card.id for card in let_through}
    return {card.id: Hidden(variable, value) for card in cards if card.id not in through}


def _begins(card: Card, word: str) -> bool:
    """Of a slice (MIG-...) the whole name, of a card at least one digit behind GPU-."""
    if word.upper().startswith("MIG-"):
        return card.id.lower() == word.lower()
    return len(word) > len("GPU-") and (card.twin or card.id).lower().startswith(word.lower())


def _cuda_order(cards: Sequence[Card], environ: Mapping[str, str]) -> Sequence[Card] | None:
    """By address where that was asked for, and where all are alike; the probe lists them so."""
    alike = len({(card.name, card.arch) for card in cards}) <= 1
    return cards if alike or environ.get(CUDA_ORDER) == "PCI_BUS_ID" else None


def _kfd_order(cards: Sequence[Card]) -> Sequence[Card] | None:
    places = [card.order for card in cards]
    if len(cards) > 1 and (None in places or len(set(places)) < len(places)):
        return None
    return sorted(cards, key=lambda card: card.order or 0)
