"""Where the engine's pages lie in this rank's pools.

The engine counts the pages of each KV group once for the whole fleet. A rank that keeps all of them has page p at place
p (one rank, and the pipeline layout). In the tensor layout each page has one owner (`layouts.owner`): the others have
no place for it, ABSENT in their tables, and write the rows of such a page into a page of padding behind their pool,
where nobody reads.

    engine's page      0   1   2   3 | 4   5 ...        token vector 2,1,1
    rank 0's place     0   1   -   - | 2   3
    rank 1's place     -   -   0   - | -   -
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.base import PAGE_LEN
from homeserve.layouts.owner import GroupRows, OwnerRule

Ints = npt.NDArray[np.int32]

ABSENT = -1


@dataclass(frozen=True)
class PagePlaces:
    """Of each KV group: `places[group][page]` is the page's place here or ABSENT, with one entry more at the end, so
    that ABSENT stays ABSENT; `padding[group]` is the place that takes the rows of other ranks' pages; `slots[group]` is
    how long the rank's pool is, padding included."""

    places: tuple[Ints, ...]
    padding: tuple[int, ...]
    slots: tuple[int, ...]

    def of(self, group: int, pages: Ints) -> Ints:
        """Places of the engine's `pages`."""
        return self.places[group][pages]

    def for_writing(self, group: int, places: Ints) -> Ints:
        """The same with the padding in place of ABSENT."""
        return np.where(places == ABSENT, np.int32(self.padding[group]), places)


def own_pages(group_slots: Sequence[int], token_vector: Sequence[int], rank: int) -> PagePlaces:
    """Rank `rank` keeps what the token vector gives it. Raises SettingError for a vector with a zero."""
    rule = OwnerRule.of(token_vector, PAGE_LEN)
    places, padding, lengths = [], [], []
    for slots in group_slots:
        rows = GroupRows(slots, rule)
        found = np.full(slots // PAGE_LEN + 1, ABSENT, np.int32)
        for page in range(slots // PAGE_LEN):
            owner, row = rule.place(page * PAGE_LEN)
            if owner == rank:
                found[page] = row // PAGE_LEN
        places.append(found)
        padding.append(rows.tensor_padding[rank] // PAGE_LEN)
        lengths.append(rows.tensor_rows[rank])
    return PagePlaces(tuple(places), tuple(padding), tuple(lengths))


def shared_pages(group_slots: Sequence[int], token_vector: Sequence[int], rank: int) -> PagePlaces:
    """One pool for all ranks: a page's place is the page, on its owner. The others have no place for it, and write its
    rows into the page behind the pool. Raises SettingError for a vector with a zero."""
    rule = OwnerRule.of(token_vector, PAGE_LEN)
    places = []
    for slots in group_slots:
        pages = np.arange(slots // PAGE_LEN + 1, dtype=np.int32)
        owned = [rule.place(page * PAGE_LEN)[0] == rank for page in range(slots // PAGE_LEN)]
        places.append(np.where([*owned, False], pages, np.int32(ABSENT)))
    padding = tuple(slots // PAGE_LEN for slots in group_slots)
    return PagePlaces(tuple(places), padding, tuple(slots + PAGE_LEN for slots in group_slots))
