"""What one life of the fleet holds for sequences: pages and their tables, lanes, slots of recurrent states.

Checkpoints. Where a model is recurrent and prefixes are kept, a plan saves the state of a sequence at chosen places
(`states`). The slot is taken as the row is drafted, belongs to the sequence from the moment its plan is issued
(`Sequence.saves`), and to the tree's node that ends at that place as soon as there is one.

Pure.
"""

from __future__ import annotations

from backends.base import PAGE_LEN
from homeserve.engine.draft import Draft
from homeserve.engine.pages import PagePool
from homeserve.engine.request import EngineLimits
from homeserve.engine.sequence import Sequence
from homeserve.engine.states import SPACING, StateSlots
from homeserve.engine.tables import PageTables


class Memory:
    """Of one life; the next one begins with another."""

    def __init__(self, limits: EngineLimits) -> None:
        self.states = StateSlots(limits.running, limits.checkpoints)
        groups = [(max(1, slots // PAGE_LEN), window) for slots, window in limits.groups]
        self.pool = PagePool(groups, self.states.forget)
        self.tables = PageTables(self.pool, shared=limits.prefix_cache)
        self.free_lanes = list(range(limits.running - 1, -1, -1))
        self.keeps_checkpoints = limits.recurrent and limits.prefix_cache and limits.checkpoints > 0
        self.token_limit = min(limits.context, self.pool.capacity * PAGE_LEN)
        """Most tokens that one sequence may have."""
        self._drops: list[int] = []

    def take_drops(self) -> tuple[int, ...]:
        """Lanes released since the last plan."""
        drops = tuple(self._drops)
        self._drops.clear()
        return drops

    def release(self, sequence: Sequence) -> None:
        """Take back lane and pages. Nothing in flight names the sequence."""
        assert sequence.in_flight == 0
        self.tables.share(sequence, leaving=True)
        self.attach_checkpoints(sequence)
        for _, slot in sequence.saves:
            self.states.give_back(slot)
        sequence.saves = []
        self.tables.release(sequence)
        self._drops.append(sequence.lane)
        self.free_lanes.append(sequence.lane)

    # ------------------------------------------------------------------------------------------------ checkpoints

    def rows_to_checkpoint(self, computed: int) -> int | None:
        """How many rows behind `computed` ones the next place is at which a decoding sequence's state is saved; None
        where no state is."""
        return SPACING - computed % SPACING if self.keeps_checkpoints else None

    def save_slot(self, draft: Draft, sequence: Sequence, computed: int) -> int:
        """A slot into which the draft saves the sequence's state behind `computed` positions; -1 where there is
        none."""
        slot = self.states.take() if self.keeps_checkpoints else None
        if slot is None:
            return -1
        draft.saves.append((sequence, computed, slot))
        return slot

    def attach_checkpoints(self, sequence: Sequence) -> None:
        """Give saved states to the nodes that end where they were saved, as far as those are in the tree by now.

        A node that another sequence filled serves as well: the state behind the same tokens is the same.
        """
        if not sequence.saves:
            return
        left = []
        for computed, slot in sequence.saves:
            path = self.pool.match(sequence.tokens, computed // PAGE_LEN) if computed <= len(sequence.tokens) else []
            if path and len(path) * PAGE_LEN == computed:
                self.states.keep(slot, path[-1])
            else:
                left.append((computed, slot))
        sequence.saves = left
