"""Who keeps which slot: the KV pools of both layouts.

A slot is the global id of one token's K and V in one KV group, the same for the life of the process: a flip rewrites no
table. What changes is where its row lies.

    pipeline layout   on every rank, in the pools of the rank's own layers; row = slot
    tensor layout     on its owner alone, in the pools of all layers; row by the owner rule (`budget.vectors`)
    unified memory    one pool for all ranks, row = slot in both layouts; the rule only says who attends to it

The grain of the rule is a page, so pages stay whole. Each KV group counts its slots for itself, all by one rule. A pool
ends with a page of padding, to which rows point that count for nothing:

    rows of a rank's pool   | round 0: v[r] pages | round 1 | ... | padding |
                            0                                  pool_rows     pool_rows + grain

Both layouts must be able to address every slot: `check_addressable` at boot, with both numbers. What the tensor layout
could address beyond that is memory for nothing, so its pool is sized from the slots (`GroupRows`), never from the room.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from budget import vectors
from budget.wish import PAGE
from homeserve.errors import SettingError
from homeserve.layouts.partition import Run, checked_vector

FIELD = "token_vector"


@dataclass(frozen=True)
class Stretch:
    """Slots that lie in consecutive rows of one rank."""

    rank: int
    slots: Run
    rows: Run


@dataclass(frozen=True)
class OwnerRule:
    """The rule of one token vector, reduced by its divisor."""

    vector: tuple[int, ...]
    grain: int = PAGE

    @staticmethod
    def of(vector: Sequence[int], grain: int = PAGE) -> OwnerRule:
        """Raises SettingError for an entry that is not positive: a rank that holds a shard of the weights and no rows
        cannot be expressed."""
        return OwnerRule(vectors.reduced(checked_vector(vector, FIELD)), grain)

    @property
    def ranks(self) -> int:
        return len(self.vector)

    @property
    def round_slots(self) -> int:
        """Slots after which the pattern of owners repeats."""
        return self.grain * sum(self.vector)

    def place(self, slot: int) -> tuple[int, int]:
        """Rank and row of `slot`."""
        return vectors.owner(slot, self.vector, self.grain), vectors.row(slot, self.vector, self.grain)

    def slot(self, rank: int, row: int) -> int:
        return vectors.slot_of(rank, row, self.vector, self.grain)

    def pool_rows(self, slots: int) -> tuple[int, ...]:
        """Rows of each rank for slots 0 .. slots-1, padding apart."""
        return vectors.pool_rows(slots, self.vector, self.grain)

    def capacity(self, rows: Sequence[int]) -> int:
        """Slots that all ranks can address with pools of `rows`, of which one grain is the padding's."""
        usable = [max(0, have - self.grain) // self.grain for have in rows]
        return self.grain * vectors.capacity(usable, self.vector)

    def stretches(self, pages: Iterable[int]) -> tuple[Stretch, ...]:
        """The slots of `pages` (blocks of a grain), ascending, in as few stretches as there are."""
        found: list[Stretch] = []
        for page in sorted(set(pages)):
            slots = Run(page, page + 1).times(self.grain)
            rank, row = self.place(slots.first)
            rows = Run(row, row + self.grain)
            last = found[-1] if found else None
            if last is not None and (last.rank, last.slots.end, last.rows.end) == (rank, slots.first, row):
                found[-1] = Stretch(rank, Run(last.slots.first, slots.end), Run(last.rows.first, rows.end))
            else:
                found.append(Stretch(rank, slots, rows))
        return tuple(found)


@dataclass(frozen=True)
class GroupRows:
    """The pools of one KV group with `slots` slots, in both layouts."""

    slots: int
    rule: OwnerRule

    @property
    def pipeline_rows(self) -> int:
        """Of each rank that has a layer of the group, with the padding."""
        return self.slots + self.rule.grain

    @property
    def tensor_rows(self) -> tuple[int, ...]:
        """Of each rank, with the padding."""
        return tuple(rows + self.rule.grain for rows in self.rule.pool_rows(self.slots))

    @property
    def tensor_padding(self) -> tuple[int, ...]:
        """The first row of each rank's padding page."""
        return self.rule.pool_rows(self.slots)


def group_rows(group_slots: Sequence[int], rule: OwnerRule) -> tuple[GroupRows, ...]:
    """For each KV group. Raises SettingError for slots that are no whole pages."""
    for group, slots in enumerate(group_slots):
        if slots % rule.grain:
            raise SettingError(f"KV group {group}: {slots} slots are no whole pages of {rule.grain}", field="kv_slots")
    return tuple(GroupRows(slots, rule) for slots in group_slots)


def check_addressable(slots: int, rows: Sequence[int], rule: OwnerRule) -> None:
    """Raises SettingError where pools of `rows` (padding included) cannot hold all `slots` in the tensor layout."""
    capacity = rule.capacity(rows)
    if capacity >= slots:
        return
    rounds = vectors.units([max(0, have - rule.grain) // rule.grain for have in rows], rule.vector)
    least = min(range(rule.ranks), key=rounds.__getitem__)
    raise SettingError(
        f"the tensor layout can address {capacity} slots and the pipeline layout {slots}: rank {least} binds, its"
        f" {rows[least]} rows are {rounds[least]} rounds of {rule.vector[least]} pages after the padding"
        f" (rounds of each rank: {', '.join(map(str, rounds))})",
        field=FIELD,
        fix=f"give a smaller share to rank {least} in --token-vector",
    )
