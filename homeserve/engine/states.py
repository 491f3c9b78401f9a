"""Slots of recurrent states: one for each lane, and the rest for checkpoints of the prefix tree.

A recurrent layer keeps one state for a request, not a row for each token, so a prefix hit needs the state as it was at
exactly that place. Lane i works in slot i. At chosen places (`checkpoint_after`) a plan copies the lane's state into a
checkpoint slot, and the tree's node that ends there remembers it. A hit is then only as deep as the deepest node of the
path that has a checkpoint; its state is copied into the newcomer's slot before its first row.

Every copy is part of a plan, and ranks run plans in order, restores before rows and saves after them. So a slot may be
given to another checkpoint as soon as that is drafted: whoever restored from it was in this plan or an earlier one. A
save can be restored from by the next plan, not by its own.

The slots are few and large (75 MiB each for a 27B model), so the least recently used checkpoint gives way.

Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from backends.base import PAGE_LEN
from homeserve.engine.pages import Node

SPACING = 128
"""Tokens between checkpoints, at least; a long prompt has about `MOST` of them."""
MOST = 8


@dataclass(frozen=True)
class StateCensus:
    """Slots by place; `free + live + cached == capacity`."""

    capacity: int
    free: int
    live: int
    cached: int


class StateSlots:
    """Who holds each checkpoint slot. Slots `lanes .. lanes + checkpoints - 1`; those below are the lanes' own."""

    def __init__(self, lanes: int, checkpoints: int) -> None:
        self._lanes = lanes
        self._capacity = lanes + checkpoints
        self._free = list(range(self._capacity - 1, lanes - 1, -1))
        self._kept: OrderedDict[int, Node] = OrderedDict()
        """Checkpoint slot -> its node, least recently used first."""

    def take(self) -> int | None:
        """A slot for a new checkpoint, taken from the least recently used one if it must be; None where there is none
        to have."""
        if self._free:
            return self._free.pop()
        if not self._kept:
            return None
        slot, node = self._kept.popitem(last=False)
        node.state = -1
        return slot

    def give_back(self, slot: int) -> None:
        """A taken slot that became nobody's checkpoint."""
        self._free.append(slot)

    def keep(self, slot: int, node: Node) -> None:
        """The taken slot holds the state behind `node` from now on. Where it has one already, the slot goes back."""
        if node.state >= 0:
            self.touch(node)
            self.give_back(slot)
            return
        node.state = slot
        self._kept[slot] = node

    def touch(self, node: Node) -> None:
        """The node's checkpoint was used now."""
        self._kept.move_to_end(node.state)

    def forget(self, node: Node) -> None:
        """The node gives its checkpoint up (it leaves the tree, or a later one replaces it)."""
        if node.state >= 0:
            del self._kept[node.state]
            self._free.append(node.state)
            node.state = -1

    @property
    def kept(self) -> int:
        """Checkpoints of the prefix tree,"""
        return len(self._kept)

    @property
    def taken(self) -> int:
        """and slots of those that plans have saved and no node has yet."""
        return self._capacity - self._lanes - len(self._free) - len(self._kept)

    def drop_oldest(self) -> bool:
        """Free the least recently used checkpoint; False where there is none."""
        if not self._kept:
            return False
        self.forget(next(iter(self._kept.values())))
        return True

    def held(self, lanes: Iterable[int]) -> bytes:
        """Bit map (bit i of byte i // 8, lowest first) of slots in use: those of `lanes`, and of checkpoints."""
        bits = bytearray(-(-self._capacity // 8))
        free = set(self._free)
        for slot in (*lanes, *(slot for slot in range(self._lanes, self._capacity) if slot not in free)):
            bits[slot >> 3] |= 1 << (slot & 7)
        return bytes(bits)

    def census(self, lanes_in_use: int) -> StateCensus:
        free = len(self._free) + self._lanes - lanes_in_use
        cached = len(self._kept)
        return StateCensus(self._capacity, free, self._capacity - free - cached, cached)


def checkpoint_after(start: int, target: int) -> int:
    """The next place at which the state of a prompt of `target` tokens is kept, beyond `start` computed ones: a
    multiple of the spacing, or the last page boundary of the prompt, which the next turn of the conversation will
    share; `target` where there is none."""
    last = (target - 1) // PAGE_LEN * PAGE_LEN
    if start >= last:
        return target
    spacing = SPACING
    while spacing * MOST < target:
        spacing *= 2
    return min(last, (start // spacing + 1) * spacing)
