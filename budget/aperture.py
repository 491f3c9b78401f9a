"""Whether cards can reach each other's memory, and whether the windows for it are large enough.

A card shows its memory to others on the bus through a window: BAR1 on NVIDIA cards, BAR 0 (its "visible" memory) on AMD
ones. The window is an address range and never memory: it adds nothing to a ceiling.

Whether peer access *works* is rarely known before somebody tries. So there are three answers, and "yes" needs a
transfer on record:

    no        one card; another vendor; another generation; the driver refuses; the window is smaller than the memory
    yes       a transfer is on record for this box, and none of the above holds for the pair
    unknown   everything else: a driver that says OK has been seen to hang in the first collective, and what a virtual
              machine shows of the window is the emulated bridge's, not the card's

Windows are used up by process groups: each group that maps peer buffers takes its share on every card, and while both
layouts live there are twice as many groups. `check_groups` adds them up before any is built.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from budget.belief import is_slice, label, mib
from budget.facts import MIB, Box, Card

_REFUSALS = {
    "CNS": "the chipset is not supported",
    "GNS": "the card is not supported",
    "TNS": "the way between the cards is not supported",
    "NS": "not supported",
    "DR": "switched off by a setting of the driver",
}
"""What `nvidia-smi topo -p2p` answers instead of OK."""

_REFUSED_MODELS = ("4060 Ti",)
"""Refused on record with a card of the same generation."""

_RANK = {"yes": 2, "unknown": 1, "no": 0}


@dataclass(frozen=True)
class Aperture:
    """BAR1 of a card: bytes of it, and whether peers can map it. `p2p` is yes, no or unknown, `why` says from what."""

    total_bytes: int | None
    free_bytes: int | None
    p2p: str
    why: str


def aperture_of(card: Card, box: Box) -> Aperture:
    """The window of a discrete card, and the best answer among its peers in the box."""
    peers = [other for other in box.cards if other.id != card.id and not other.unified]
    if not peers:
        p2p, why = "no", "there is no other card"
    else:
        answers = [_pair(card, peer, box) for peer in peers]
        p2p = max((answer for answer, _ in answers), key=_RANK.__getitem__)
        why = "; ".join(dict.fromkeys(reason for answer, reason in answers if answer == p2p))
    return Aperture(card.bar1_total_bytes, card.bar1_free_bytes, p2p, why)


def check_groups(groups: Sequence[int], usable_bytes: int) -> str | None:
    """None where the windows of all process groups (bytes of each, on one card) fit into `usable_bytes`; else the sum.

    The caller passes every group that lives at once: with both layouts up, the groups of both.
    """
    if any(group < 0 for group in groups) or usable_bytes < 0:
        raise ValueError(f"a window cannot be negative: {list(groups)}, {usable_bytes}")
    total = sum(groups)
    if total <= usable_bytes:
        return None
    if len(set(groups)) == 1:
        count = len(groups)
        asked = f"{count} {'group' if count == 1 else 'groups'} x {_mib(groups[0])} MiB = {_mib(total)} MiB"
    else:
        asked = " + ".join(_mib(group) for group in groups) + f" = {_mib(total)} MiB"
    return (
        f"{asked} of peer window against {_mib(usable_bytes)} MiB usable: {_mib(total - usable_bytes)} MiB too much; "
        f"{_mib(usable_bytes // len(groups) // MIB * MIB)} MiB a group would fit"
    )


def _mib(size: int) -> str:
    return f"{size / MIB:.10g}" if size % MIB == 0 else f"{size / MIB:.2f}"


# ------------------------------------------------------------------------------------------------------------ one pair


def _pair(card: Card, peer: Card, box: Box) -> tuple[str, str]:
    """Answer and reason for two discrete cards of one box. What forbids is asked first, evidence for it last."""
    return (
        _different(card, peer)
        or _refused(card, peer, box)
        or _recorded(box)
        or _narrow(card, peer, box)
        or ("unknown", _not_tried(card, peer, box))
    )


def _different(card: Card, peer: Card) -> tuple[str, str] | None:
    if is_slice(card) or is_slice(peer):
        return "no", "a MIG slice has no peers"
    if card.vendor != peer.vendor:
        return "no", f"{peer.name} is from another vendor"
    if card.vendor == "nvidia" and card.arch and peer.arch and card.arch != peer.arch:
        return "no", f"{peer.name} is of another generation ({card.arch} and {peer.arch})"
    if card.name != peer.name:
        refused = next((model for model in _REFUSED_MODELS if model in card.name or model in peer.name), None)
        if refused is not None:
            return "no", f"a {refused} is refused as a peer even by cards of its generation"
    return None


def _refused(card: Card, peer: Card, box: Box) -> tuple[str, str] | None:
    code = card.peers.get(peer.id) or peer.peers.get(card.id)
    if code in _REFUSALS:
        return "no", f"the driver says {code}: {_REFUSALS[code]}"
    text = box.p2p or ""
    said = re.search(rf"\b({'|'.join(_REFUSALS)})\b", text)
    if said:
        return "no", f"the driver says {said[1]}: {_REFUSALS[said[1]]}"
    if re.search(r"\b(off|disabled|not supported|unsupported)\b", text, re.I):
        return "no", "it is switched off or not supported here"
    return None


def _recorded(box: Box) -> tuple[str, str] | None:
    text = box.p2p or ""
    works = re.search(r"\b(works?|worked|transferred|verified by transfer)\b", text, re.I)
    if works and not re.search(r"\b(no|not|never|hangs?|hung|fail\w*|broken|corrupt\w*)\b", text, re.I):
        return "yes", f"a transfer is on record: {text}"
    return None


def _narrow(card: Card, peer: Card, box: Box) -> tuple[str, str] | None:
    if box.environment == "vm":
        return "unknown", "a virtual machine shows its own window, not the card's; only a transfer tells"
    for end in (card, peer):
        window = end.visible_bytes if end.vendor == "amd" else end.bar1_total_bytes
        if window is not None and end.total_bytes is not None and window < end.total_bytes:
            what = f"the window of {label(end)} ({mib(window)}) is smaller than its memory ({mib(end.total_bytes)})"
            return "no", what
    return None


def _not_tried(card: Card, peer: Card, box: Box) -> str:
    if card.peers.get(peer.id) == "OK" or re.search(r"\bOK\b", box.p2p or ""):
        return "the driver says OK, which has been seen to hang; only a transfer tells"
    return "nobody has tried a transfer"
