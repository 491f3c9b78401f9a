"""Layers over the ranks of the pipeline layout, and cuts that are refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeserve.errors import SettingError
from homeserve.layouts.cut import cut_by_ratio, cut_of_ranges, legal_ends
from homeserve.layouts.partition import Run

few = settings(max_examples=25, deadline=None)


def test_f20_a_ratio_of_two_one_one() -> None:
    cut = cut_by_ratio((2, 1, 1), 64, {})
    assert [run.size for run in cut.ranges] == [32, 16, 16]
    attention = [layer for layer in range(64) if layer % 4 == 3]
    linear = [layer for layer in range(64) if layer % 4 != 3]
    assert [len(layers) for layers in cut.held(attention)] == [8, 4, 4]
    assert [len(layers) for layers in cut.held(linear)] == [24, 12, 12]


def test_numbers_that_sum_to_the_layers_are_layers() -> None:
    assert cut_by_ratio((11, 2, 27), 40, {}).ranges == (Run(0, 11), Run(11, 13), Run(13, 40))


def test_b11_a_ratio_that_counts_the_drafting_block_is_refused() -> None:
    with pytest.raises(SettingError, match=r"14\+13\+14 = 41, and the backbone has 40 layers \(41 with the drafting"):
        cut_by_ratio((14, 13, 14), 40, {}, nextn=1)


def test_a_ratio_with_a_zero_is_refused() -> None:
    with pytest.raises(SettingError, match="rank 1 has 0"):
        cut_by_ratio((2, 0), 30, {})


def test_first_and_last_rank_have_the_ends_of_the_model() -> None:
    cut = cut_by_ratio((2, 1, 1), 64, {})
    assert (cut.embedding_rank, cut.head_rank) == (0, 2)
    assert cut.rank_of(64) == 2  # the drafting block
    assert [cut.rank_of(layer) for layer in (0, 31, 32, 47, 48, 63)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        (((0, 3), (4, 8)), "layers 3 to 3 are on no rank"),
        (((0, 5), (4, 8)), "layers 4 to 4 are on two ranks"),
        (((1, 8),), "layers 0 to 0 are on no rank"),
        (((0, 8), (8, 8)), "rank 1 has no layer"),
        (((0, 4), (4, 7)), "end with layer 6, and there are 8"),
        (((0, 4), (4, 9)), "end with layer 8, and there are 8"),
    ],
    ids=str,
)
def test_e13_ranges_that_are_no_partition_are_refused(ranges: tuple[tuple[int, int], ...], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        cut_of_ranges(ranges, 8, {})


def test_more_ranks_than_layers_are_refused() -> None:
    with pytest.raises(SettingError, match=r"1\+1\+1 = 3, and the backbone has 2 layers"):
        cut_by_ratio((1, 1, 1), 2, {})


SOURCES = {5: 3, 6: 4, 7: 3}


def test_a_layer_stays_with_the_source_of_its_keys() -> None:
    assert legal_ends(8, SOURCES) == (1, 2, 3)
    with pytest.raises(SettingError, match=r"layer 5 reads the K and V of layer 3, and rank 0 ends before layer 4"):
        cut_by_ratio((1, 1), 8, SOURCES)
    assert cut_by_ratio((3, 5), 8, SOURCES).rank_of(3) == 1


@few
@given(
    st.integers(1, 40).flatmap(
        lambda layers: st.tuples(st.just(layers), st.lists(st.integers(1, 9), min_size=1, max_size=min(layers, 6)))
    )
)
def test_every_layer_is_on_one_rank(case: tuple[int, list[int]]) -> None:
    layers, ratio = case
    if sum(ratio) > layers:
        with pytest.raises(SettingError, match="backbone"):
            cut_by_ratio(ratio, layers, {})
        return
    cut = cut_by_ratio(ratio, layers, {})
    held = cut.held(range(layers))
    assert [layer for each in held for layer in each] == list(range(layers))
    assert all(held)


@few
@given(st.integers(2, 20), st.data())
def test_legal_ends_are_the_cuts_that_pass(layers: int, data: st.DataObject) -> None:
    readers = data.draw(st.sets(st.integers(1, layers - 1), max_size=4))
    sources = {reader: data.draw(st.integers(0, reader - 1)) for reader in readers}
    passed = []
    for end in range(1, layers):
        try:
            cut = cut_of_ranges(((0, end), (end, layers)), layers, sources)
        except SettingError:
            continue
        assert all(cut.rank_of(reader) == cut.rank_of(source) for reader, source in sources.items())
        passed.append(end)
    assert tuple(passed) == legal_ends(layers, sources)
    apart = {end for end in range(1, layers) for r, s in sources.items() if s < end <= r}
    assert apart.isdisjoint(passed)
    assert len(passed) + len(apart) == layers - 1
