"""Both layouts of a rank have the same rows and address every slot, or its load is refused with both numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flip_rig import FakeLayouts, hybrid

from backends.base import PAGE_LEN, KvLayer, KvPool
from backends.quant import QuantType
from homeserve.errors import SettingError, UnsupportedModel
from homeserve.layouts.moves import FlipGeometry
from homeserve.layouts.owner import OwnerRule
from homeserve.layouts.share import PIPELINE, TENSOR
from homeserve.worker.flipping import check_pools, check_rows

RULE = OwnerRule.of((2, 1, 1), PAGE_LEN)
SLOTS = 8 * PAGE_LEN


def pool(pages: int) -> KvPool:
    return KvPool((KvLayer(2, 4),), pages * PAGE_LEN, QuantType.F16)


def test_layouts_with_the_same_rows_pass() -> None:
    for rank in range(3):
        check_rows(hybrid(), FakeLayouts(hybrid(), rank), rank)
    check_pools(RULE, (SLOTS,), 0, {PIPELINE: pool(8), TENSOR: pool(5)}, unified=False)


@pytest.mark.parametrize("layout", [PIPELINE, TENSOR])
@pytest.mark.parametrize("rank", [0, 1])
def test_d25_a_row_of_another_length_is_refused_with_both(layout: str, rank: int) -> None:
    layouts = FakeLayouts(hybrid(), rank)
    layouts.short[layout] = 1
    with pytest.raises(
        UnsupportedModel, match="takes [0-9]+ bytes in the pipeline layout and [0-9]+ in the tensor"
    ) as told:
        check_rows(hybrid(), layouts, rank)
    assert told.value.field == "flip"


def test_d25_a_page_that_is_longer_in_the_tensor_layout_is_named_by_its_layer() -> None:
    geometry = hybrid()
    kv = (geometry.kv[0], replace(geometry.kv[1], page_bytes=9), *geometry.kv[2:])
    changed: FlipGeometry = replace(geometry, kv=kv)
    with pytest.raises(
        UnsupportedModel, match="a page of attention layer 1 takes 7 bytes .* and 9 in the tensor layout"
    ):
        check_rows(changed, FakeLayouts(geometry, 0), 0)


def test_e5_a_tensor_pool_that_is_too_short_for_the_slots_is_refused_with_both_numbers() -> None:
    with pytest.raises(SettingError, match="can address 64 slots and the pipeline layout 128: rank 0 binds") as told:
        check_pools(RULE, (SLOTS,), 0, {PIPELINE: pool(8), TENSOR: pool(4)}, unified=False)
    assert "--token-vector" in (told.value.fix or "")


def test_e5_in_unified_memory_there_is_one_pool() -> None:
    check_pools(RULE, (SLOTS,), 0, {PIPELINE: pool(8), TENSOR: pool(9)}, unified=True)
    with pytest.raises(AssertionError, match="the pipeline layout has 112 rows for 128 slots"):
        check_pools(RULE, (SLOTS,), 0, {PIPELINE: pool(7), TENSOR: pool(9)}, unified=True)
