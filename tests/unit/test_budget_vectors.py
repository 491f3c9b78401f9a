"""Units of weights over ranks, rows of the KV pool over ranks, and what a flip moves."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budget.vectors import (
    apportion,
    best_token_vector,
    capacity,
    moved_cells,
    moved_of_owned,
    owned,
    owned_of_first,
    owner,
    pool_rows,
    reduced,
    row,
    units,
)

CELL_BYTES = 2048
"""K and V of one token in one layer: 4 heads x 256 x 2 in 8 bits."""

few = settings(max_examples=40, deadline=None)
vectors = st.lists(st.integers(1, 12), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("whole", "parts"), [(16, (8, 4, 4)), (64, (30, 17, 17)), (24, (11, 7, 6)), (4, (2, 1, 1))], ids=str
)
def test_units_by_largest_remainder(whole: int, parts: tuple[int, ...]) -> None:
    assert apportion(whole, (30, 17, 17), at_least=1) == parts


def test_value_heads_follow_the_key_head_units() -> None:
    """48 value heads lie in 16 groups, one per key head: the groups are cut, never a count of channels."""
    assert tuple(3 * part for part in apportion(16, (30, 17, 17))) == (24, 12, 12)


def test_equal_fractions_go_to_the_lower_rank() -> None:
    assert apportion(2, (1, 1, 1)) == (1, 1, 0)


def test_a_minimum_is_taken_from_whoever_has_most_above_its_quota() -> None:
    assert apportion(8, (100, 1, 1), at_least=1) == (6, 1, 1)
    assert apportion(3, (5, 5, 1), at_least=1) == (1, 1, 1)


def test_a_rank_may_get_nothing_where_no_minimum_is_asked() -> None:
    assert apportion(2, (8, 1, 1)) == (2, 0, 0)


@pytest.mark.parametrize("weights", [(), (0, 0), (1, -1), (1, float("nan")), (float("inf"), 1)], ids=str)
def test_weights_that_mean_nothing_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="weights"):
        apportion(4, weights)


def test_fewer_units_than_ranks_are_refused_where_each_needs_one() -> None:
    with pytest.raises(ValueError, match="too few"):
        apportion(2, (1, 1, 1), at_least=1)


@few
@given(
    st.integers(0, 300), st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any), st.integers(0, 3), st.data()
)
def test_units_are_all_given_out_and_near_their_quota(
    whole: int, weights: list[int], at_least: int, data: st.DataObject
) -> None:
    whole = max(whole, at_least * len(weights))
    parts = apportion(whole, weights, at_least)
    assert sum(parts) == whole
    assert min(parts) >= at_least
    if not at_least:
        assert all(abs(part - whole * weight / sum(weights)) < 1 for part, weight in zip(parts, weights, strict=True))
    factor = data.draw(st.integers(1, 9))
    assert apportion(whole, [factor * weight for weight in weights], at_least) == parts


def test_a_vector_is_reduced_by_its_divisor() -> None:
    assert reduced((28, 26, 20)) == (14, 13, 10)
    assert reduced((5,)) == (1,)


@pytest.mark.parametrize("vector", [(), (3, 0), (3, -1)], ids=str)
def test_a_vector_has_one_positive_entry_for_each_rank(vector: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="positive entry"):
        reduced(vector)


def test_the_drawing_of_the_owner_rule() -> None:
    slots = range(9)
    assert [owner(slot, (4, 2, 1)) for slot in slots] == [0, 0, 0, 0, 1, 1, 2, 0, 0]
    assert [row(slot, (4, 2, 1)) for slot in slots] == [0, 1, 2, 3, 0, 1, 0, 4, 5]


def test_pages_stay_whole() -> None:
    """With a grain of a page, a page's slots lie on one rank in consecutive rows."""
    places = [(owner(slot, (2, 1), 16), row(slot, (2, 1), 16)) for slot in range(16 * 7)]
    for page in range(7):
        first, *rest = places[page * 16 : page * 16 + 16]
        assert rest == [(first[0], first[1] + step) for step in range(1, 16)]


@few
@given(vectors, st.integers(1, 4), st.integers(0, 400))
def test_owner_rule_gives_every_slot_one_row_of_its_own(vector: list[int], grain: int, slots: int) -> None:
    places = [(owner(slot, vector, grain), row(slot, vector, grain)) for slot in range(slots)]
    rows = pool_rows(slots, vector, grain)
    assert len(set(places)) == slots
    assert all(0 <= place < rows[rank] for rank, place in places)
    full = grain * sum(vector)
    if slots % full == 0:  # whole rounds leave no hole
        assert set(places) == {(rank, place) for rank, count in enumerate(rows) for place in range(count)}


@few
@given(vectors, st.integers(1, 4), st.integers(0, 400))
def test_owned_slots_are_counted_without_walking_them(vector: list[int], grain: int, slots: int) -> None:
    assert owned_of_first(slots, vector, grain) == owned(range(slots), vector, grain)


def test_a_pool_is_rounded_up_to_a_whole_round() -> None:
    """Slot 3000 of rank 0 has row 1147 there; whole rounds rounded down would have ended at 1120."""
    vector, last = (28, 26, 20), 3000
    highest = max(row(slot, vector) for slot in range(last + 1) if owner(slot, vector) == 0)
    assert highest == 1147
    assert pool_rows(last + 1, vector)[0] == 1148 == (last // 74 + 1) * 28


ROWS = (12750, 68646, 30515)


def test_capacity_under_one_vector() -> None:
    assert units(ROWS, (30, 17, 17)) == (425, 4038, 1795)
    assert capacity(ROWS, (30, 17, 17)) == 27200


def test_the_vector_that_follows_the_rows_addresses_four_times_as_much() -> None:
    assert capacity(ROWS, (7, 39, 18)) == 108480
    best = best_token_vector(ROWS)
    assert capacity(ROWS, best) >= 108480
    assert capacity(ROWS, best) > 3.9 * 27200
    assert sum(best) <= 64


def test_a_matching_vector_equalises_units() -> None:
    """Units 7679, 7451 and 7413 under 21,24,22: all within 4 %, and the least of them makes the capacity."""
    rows = (7679 * 21, 7451 * 24, 7413 * 22)
    assert units(rows, (21, 24, 22)) == (7679, 7451, 7413)
    assert capacity(rows, (21, 24, 22)) == 496671


@few
@given(st.lists(st.integers(0, 90), min_size=1, max_size=3), st.integers(1, 9))
def test_no_other_vector_addresses_more(rows: list[int], largest_sum: int) -> None:
    best = best_token_vector(rows, largest_sum)
    assert min(best) >= 1
    assert sum(best) <= max(largest_sum, len(rows))
    others = product(range(1, largest_sum + 1), repeat=len(rows))
    most = max((capacity(rows, other) for other in others if sum(other) <= largest_sum), default=0)
    assert capacity(rows, best) >= most


@few
@given(st.lists(st.integers(1, 2_000_000), min_size=1, max_size=8))
def test_a_chosen_vector_wastes_little(rows: list[int]) -> None:
    best = best_token_vector(rows)
    assert best == reduced(best) == best_token_vector(rows)
    assert len(rows) * min(rows) <= capacity(rows, best) <= sum(rows)


def test_a_rank_without_room_makes_the_capacity_nothing() -> None:
    assert best_token_vector((100, 0, 50)) == (1, 1, 1)
    assert capacity((100, 0, 50), (1, 1, 1)) == 0
    with pytest.raises(ValueError, match="no rank"):
        best_token_vector(())


def test_cells_that_a_flip_moves() -> None:
    moved = moved_cells((8, 4, 4), (28, 26, 20), range(1, 81))
    assert moved.sent == (368, 216, 240)
    assert moved.received == (272, 312, 240)
    assert (moved.local, moved.total) == (456, 80 * 16)
    assert round(moved.sent[0] * CELL_BYTES / 2**20, 2) == 0.72
    assert round(moved.received[0] * CELL_BYTES / 2**20, 2) == 0.53


def test_cells_that_a_longer_flip_moves() -> None:
    moved = moved_cells((8, 4, 4), (30, 17, 17), range(1, 1032))
    assert moved.sent[0] * CELL_BYTES / 2**20 == 8.5
    assert round(moved.received[1] * CELL_BYTES / 2**20, 1) == 6.4


def test_an_empty_live_set_moves_nothing() -> None:
    assert moved_cells((8, 4, 4), (28, 26, 20), ()).total == 0


@few
@given(vectors, st.integers(0, 300), st.data())
def test_what_is_sent_is_received(vector: list[int], live: int, data: st.DataObject) -> None:
    layers = data.draw(st.lists(st.integers(0, 20), min_size=len(vector), max_size=len(vector)))
    moved = moved_cells(layers, vector, range(live))
    assert sum(moved.sent) == sum(moved.received)
    assert sum(moved.sent) + moved.local == moved.total == sum(layers) * live
    assert moved == moved_of_owned(layers, owned_of_first(live, vector))
