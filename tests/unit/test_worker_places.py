"""Pages of the engine and their places on ranks: each is kept by one rank, and rows of others go into the padding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base import PAGE_LEN
from homeserve.errors import SettingError
from homeserve.layouts.owner import OwnerRule
from homeserve.worker.places import ABSENT, own_pages

VECTORS = st.lists(st.integers(1, 30), min_size=1, max_size=4)


@given(VECTORS, st.lists(st.integers(1, 60), min_size=1, max_size=3))
def test_every_page_is_kept_by_one_rank_at_a_place_of_its_own(vector: list[int], pages: list[int]) -> None:
    slots = [count * PAGE_LEN for count in pages]
    ranks = [own_pages(slots, vector, rank) for rank in range(len(vector))]
    for group, count in enumerate(pages):
        held = np.stack([rank.of(group, np.arange(count)) for rank in ranks])
        assert ((held != ABSENT).sum(axis=0) == 1).all()
        for rank, own in zip(ranks, held, strict=True):
            kept = own[own != ABSENT]
            assert len(set(kept.tolist())) == len(kept)
            assert (kept < rank.padding[group]).all()
            assert rank.slots[group] == (rank.padding[group] + 1) * PAGE_LEN


def test_a_place_is_what_the_owner_rule_says() -> None:
    rule = OwnerRule.of((2, 1, 1))
    for page in range(12):
        owner, row = rule.place(page * PAGE_LEN)
        for rank in range(3):
            place = own_pages([12 * PAGE_LEN], (2, 1, 1), rank).of(0, np.array([page]))[0]
            assert place == (row // PAGE_LEN if rank == owner else ABSENT)


def test_what_another_rank_keeps_is_written_into_the_padding_and_absent_stays_absent() -> None:
    places = own_pages([4 * PAGE_LEN], (1, 1), 1)
    found = places.of(0, np.array([0, 1, 2, 3, ABSENT]))
    assert found.tolist() == [ABSENT, 0, ABSENT, 1, ABSENT]
    assert places.for_writing(0, found).tolist() == [2, 0, 2, 1, 2]


def test_a_vector_with_a_zero_is_refused() -> None:
    with pytest.raises(SettingError, match="rank 1 has 0"):
        own_pages([PAGE_LEN], (1, 0), 0)
