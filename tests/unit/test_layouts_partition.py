"""Units of a family over ranks: whole quant blocks, largest remainders, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeserve.errors import SettingError
from homeserve.layouts import partition
from homeserve.layouts.partition import Partition, Run

few = settings(max_examples=25, deadline=None)
VECTORS = ((2, 1, 1), (30, 17, 17), (28, 26, 20))


def sizes(whole: Partition | None) -> tuple[int, ...]:
    assert whole is not None
    return whole.sizes


@pytest.mark.parametrize(
    ("vector", "heads", "keys", "columns", "kv"),
    [
        (VECTORS[0], (12, 6, 6), (8, 4, 4), (8704, 4352, 4352), (2, 1, 1)),
        (VECTORS[1], (11, 7, 6), (8, 4, 4), (8192, 4608, 4608), (2, 1, 1)),
        (VECTORS[2], (9, 8, 7), (6, 6, 4), (6656, 6144, 4608), (2, 1, 1)),
    ],
    ids=str,
)
def test_shard_sizes_of_a_hybrid_of_27_billion(
    vector: tuple[int, ...],
    heads: tuple[int, ...],
    keys: tuple[int, ...],
    columns: tuple[int, ...],
    kv: tuple[int, ...],
) -> None:
    """24 query heads of 256, 16 key heads with 3 value heads of 128 each, 17408 columns; blocks of 256."""
    assert sizes(partition.query_heads(24, 256, 256, vector)) == heads
    assert sizes(partition.key_heads(16, 3, 128, True, 256, vector)) == keys
    assert sizes(partition.ffn_columns(17408, 256, vector)) == columns
    assert sizes(partition.kv_heads(4, vector)) == kv


def test_f11_units_by_largest_remainder() -> None:
    assert partition.experts(16, 512, 256, VECTORS[1]).parts == (8, 4, 4)
    assert partition.experts(64, 512, 256, VECTORS[1]).parts == (30, 17, 17)
    assert partition.query_heads(24, 256, 256, VECTORS[1]).parts == (11, 7, 6)


def test_f12_value_heads_follow_key_heads_and_no_total_of_channels() -> None:
    keys = partition.key_heads(16, 3, 128, True, 1, VECTORS[1])
    assert tuple(3 * size for size in keys.sizes) == (24, 12, 12)
    by_channels = tuple(6144 * part // 64 // 128 for part in VECTORS[1])
    assert by_channels == (22, 12, 12)
    assert sum(by_channels) != 48


def test_two_heads_of_128_share_a_block_of_256() -> None:
    assert partition.query_heads(32, 128, 256, (1, 1)).unit == 2
    assert partition.query_heads(32, 128, 32, (1, 1)).unit == 1
    assert partition.query_heads(16, 64, 256, VECTORS[1]).sizes == (8, 4, 4)


def test_a_tiled_order_needs_whole_blocks_in_each_tile() -> None:
    """Two value heads of 128 are a block together, but in the tiled order they are not neighbours."""
    assert partition.key_heads(16, 2, 128, False, 256, (1, 1)).unit == 1
    assert partition.key_heads(16, 2, 128, True, 256, (1, 1)).unit == 2


def test_what_no_cut_can_divide_is_one_unit() -> None:
    """Three key heads: the second tile begins inside a block wherever the first one is cut."""
    keys = partition.key_heads(3, 2, 128, True, 256, (2, 1))
    assert (keys.unit, keys.sizes) == (3, (3, 0))


def test_wide_experts_are_cut_by_columns_and_narrow_ones_dealt_out() -> None:
    wide, narrow = partition.experts(32, 2880, 32, (2, 1)), partition.experts(128, 768, 256, (2, 1))
    assert (wide.family, wide.sizes) == ("columns", (1920, 960))
    assert (narrow.family, narrow.sizes) == ("experts", (85, 43))
    assert partition.experts(4, 8 * 256, 256, (1,)).family == "columns"
    assert partition.experts(4, 7 * 256, 256, (1,)).family == "experts"


def test_kv_heads_are_copied_where_there_are_fewer_than_ranks() -> None:
    assert partition.kv_heads(2, VECTORS[0]) is None
    assert sizes(partition.kv_heads(3, VECTORS[0])) == (1, 1, 1)


def test_a_rank_without_a_unit_is_legal_and_the_first_holder_is_known() -> None:
    columns = partition.ffn_columns(256, 256, (1, 1, 2))
    assert columns.sizes == (0, 0, 256)
    assert columns.first_holder == 2
    assert columns.runs == (Run(0, 0), Run(0, 0), Run(0, 256))


def test_vocabulary_ends_with_a_short_unit() -> None:
    rows = partition.vocabulary(100, (1, 1))
    assert rows.sizes == (64, 36)


@few
@given(
    st.integers(1, 40),
    st.sampled_from((32, 64, 80, 128, 256)),
    st.sampled_from((1, 32, 64, 256)),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
)
def test_query_heads_are_all_given_out_at_block_boundaries(
    heads: int, head_dim: int, block: int, vector: list[int]
) -> None:
    if len(vector) > heads:
        vector = vector[:heads]
    found = partition.query_heads(heads, head_dim, block, vector)
    assert [head for run in found.runs for head in range(run.first, run.end)] == list(range(heads))
    if heads * head_dim % block == 0:
        assert all(run.times(head_dim).first % block == 0 for run in found.runs)
        smaller = range(1, found.unit)
        assert found.unit == heads or all(count * head_dim % block for count in smaller)


def test_more_ranks_than_query_heads_are_refused_with_both_numbers() -> None:
    with pytest.raises(SettingError, match=r"3 ranks .* 2 query heads: 1 ranks") as caught:
        partition.query_heads(2, 64, 32, (1, 1, 1))
    assert caught.value.fix is not None
    assert "at most 2 devices" in caught.value.fix
    assert partition.query_heads(3, 64, 32, (1, 1, 1)).sizes == (1, 1, 1)


@pytest.mark.parametrize("vector", [(), (3, 0, 1), (3, -1)], ids=str)
def test_f18_a_vector_with_a_zero_is_refused(vector: tuple[int, ...]) -> None:
    with pytest.raises(SettingError, match="weight_vector"):
        partition.checked_vector(vector, "weight_vector")


def test_the_refusal_names_the_rank_and_the_sum() -> None:
    with pytest.raises(SettingError, match=r"3,0,1: rank 1 has 0 of 4 parts"):
        partition.checked_vector((3, 0, 1), "weight_vector")
