"""Who keeps which slot, at a grain of a page, and what both layouts can address."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeserve.errors import SettingError
from homeserve.layouts.owner import GroupRows, OwnerRule, check_addressable, group_rows
from homeserve.layouts.partition import Run

few = settings(max_examples=25, deadline=None)
vectors = st.lists(st.integers(1, 12), min_size=1, max_size=5)


def test_f5_pages_stay_whole_and_rows_are_dense() -> None:
    rule = OwnerRule.of((4, 2, 2))
    assert rule.vector == (2, 1, 1)
    assert [rule.place(16 * page) for page in range(6)] == [(0, 0), (0, 16), (1, 0), (2, 0), (0, 32), (0, 48)]
    assert rule.place(16 * 5 + 7) == (0, 55)
    assert rule.round_slots == 64


@few
@given(vectors, st.sampled_from((1, 4, 16)), st.integers(0, 300))
def test_every_slot_has_one_row_and_every_row_one_slot(vector: list[int], grain: int, slots: int) -> None:
    rule = OwnerRule.of(vector, grain)
    places = {rule.place(slot): slot for slot in range(slots)}
    assert len(places) == slots
    assert all(rule.slot(*place) == slot for place, slot in places.items())
    whole = slots // rule.round_slots * rule.round_slots
    rows = rule.pool_rows(whole)
    assert sorted(rule.slot(rank, row) for rank, own in enumerate(rows) for row in range(own)) == list(range(whole))
    assert sum(rule.pool_rows(slots)) - slots < rule.round_slots


def test_f6_a_pool_is_rounded_up_to_a_whole_round() -> None:
    """3000 slots under 28,26,20: row 1147 is used (whole rounds rounded down would have ended at 1120)."""
    rule = OwnerRule((28, 26, 20), 1)
    assert max(row for rank, row in map(rule.place, range(3001)) if rank == 0) == 1147
    assert rule.pool_rows(3001) == (1148, 1066, 820)


def test_f7_capacity_is_what_the_fullest_rank_allows() -> None:
    """Rows as measured plus the padding, which is taken off first."""
    rows = (12750, 68646, 30515)
    one = OwnerRule((30, 17, 17), 1)
    assert one.capacity([have + 1 for have in rows]) == 27200
    assert one.capacity(rows) == 27136
    paged = OwnerRule((30, 17, 17), 16)
    assert paged.capacity([16 * have + 16 for have in rows]) == 16 * 27200


def test_capacity_takes_the_padding_off_first() -> None:
    rule = OwnerRule((2, 1), 16)
    assert rule.capacity((48, 32)) == 48
    assert rule.capacity((47, 32)) == 0
    assert rule.capacity((15, 32)) == 0


@few
@given(vectors, st.integers(1, 40))
def test_slots_of_whole_rounds_need_exactly_their_rows(vector: list[int], turns: int) -> None:
    rule = OwnerRule.of(vector)
    slots = turns * rule.round_slots
    rows = GroupRows(slots, rule).tensor_rows
    assert rule.capacity(rows) == slots
    check_addressable(slots, rows, rule)
    short = (rows[0] - 16, *rows[1:])
    assert rule.capacity(short) == slots - rule.round_slots


def test_padding_lies_behind_the_last_row_of_each_pool() -> None:
    (full, window) = group_rows((256, 64), OwnerRule((2, 1, 1)))
    assert (full.pipeline_rows, full.tensor_rows, full.tensor_padding) == (272, (144, 80, 80), (128, 64, 64))
    assert (window.pipeline_rows, window.tensor_rows, window.tensor_padding) == (80, (48, 32, 32), (32, 16, 16))


def test_slots_that_are_no_whole_pages_are_refused() -> None:
    with pytest.raises(SettingError, match="KV group 1: 100 slots"):
        group_rows((256, 100), OwnerRule((2, 1, 1)))


def test_e5_slots_that_the_tensor_layout_cannot_address_are_refused() -> None:
    rule = OwnerRule((2, 1), 16)
    with pytest.raises(SettingError, match=r"address 96 slots and the pipeline layout 144: rank 1 binds") as caught:
        check_addressable(144, (112, 48), rule)
    assert caught.value.fix is not None
    assert "--token-vector" in caught.value.fix
    check_addressable(96, (112, 48), rule)


def test_f18_a_token_vector_with_a_zero_is_refused() -> None:
    with pytest.raises(SettingError, match="token_vector 3,0: rank 1 has 0"):
        OwnerRule.of((3, 0))


def test_stretches_join_what_is_next_to_each_other() -> None:
    rule = OwnerRule((2, 1), 16)
    found = rule.stretches([3, 0, 1, 1, 2, 5])
    assert [(each.rank, each.slots, each.rows) for each in found] == [
        (0, Run(0, 32), Run(0, 32)),
        (1, Run(32, 48), Run(0, 16)),
        (0, Run(48, 64), Run(32, 48)),
        (1, Run(80, 96), Run(16, 32)),
    ]


def test_one_rank_has_one_stretch() -> None:
    assert len(OwnerRule((1,)).stretches(range(50))) == 1


@few
@given(vectors, st.sets(st.integers(0, 60)))
def test_stretches_are_the_places_of_their_slots(vector: list[int], pages: set[int]) -> None:
    rule = OwnerRule.of(vector, 4)
    seen = []
    for each in rule.stretches(pages):
        assert each.slots.size == each.rows.size
        for slot, row in zip(
            range(each.slots.first, each.slots.end), range(each.rows.first, each.rows.end), strict=True
        ):
            assert rule.place(slot) == (each.rank, row)
            seen.append(slot)
    assert seen == [4 * page + step for page in sorted(pages) for step in range(4)]
