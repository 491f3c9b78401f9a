"""Both layouts of a rank have the same rows and address every slot, or its load is refused with both numbers."""

from __future__ import annotations

from dataclasses import replace

import families_rig
import pytest
from flip_rig import FakeLayouts, hybrid

from backends.base import PAGE_LEN, KvLayer, KvPool
from backends.quant import QuantType
from homeserve.errors import SettingError, UnsupportedModel
from homeserve.layouts.moves import FlipGeometry, StateHome
from homeserve.layouts.owner import OwnerRule
from homeserve.layouts.partition import Run
from homeserve.layouts.share import PIPELINE, TENSOR, Share
from homeserve.layouts.transition import StateForm
from homeserve.models.bind import bind
from homeserve.models.dividing import divided
from homeserve.worker.flipping import check_pools, check_rows, checked_geometry

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


# ------------------------------------------------------------------------------------------------------ drafting blocks

VECTOR, GROUP = (2, 1, 1), (8 * PAGE_LEN,)


def geometry_of(rank: int, layouts: FakeLayouts, *, drafts: bool) -> FlipGeometry:
    """Of a made-up model with a drafting block behind three layers, on ranks of one layer each."""
    family, config, tensors = families_rig.made("qwen35", families_rig.STACKS["three, nextn"])
    ranges = [(0, 1), (1, 2), (2, 3)]
    bounds = [bind(family, config, tensors, Share.pipeline(at, ranges), drafts=drafts) for at in range(3)]
    forms = divided(family, config, tensors, VECTOR, drafts=drafts).states
    pools = {PIPELINE: pool(9), TENSOR: pool(6)}
    return checked_geometry(bounds, forms, VECTOR, GROUP, SLOTS_OF_STATES, layouts, rank, pools, unified=True)


SLOTS_OF_STATES = 4


def test_a_drafting_block_moves_as_the_last_layer_of_the_last_rank() -> None:
    layouts = FakeLayouts(hybrid(), 0)
    plain, drafts = (geometry_of(0, layouts, drafts=each) for each in (False, True))
    assert [home.stage for home in plain.kv] == [1] and [home.stage for home in drafts.kv] == [1, 2]
    assert [home.stage for home in plain.states] == [0, 2] and [home.stage for home in drafts.states] == [0, 2, 2]
    last = drafts.states[-1].form
    assert last.channels == ((Run(0, 16),), (Run(16, 24),), (Run(24, 32),)) and last.heads == ((), (), ())
    assert drafts.kv_layers(PIPELINE, 2) == (1,) and drafts.state_layers(PIPELINE, 2) == (1, 2)
    assert [drafts.state_layers(TENSOR, rank)[-1] for rank in range(3)] == [2, 2, 2]


def test_a_row_without_heads_of_another_length_is_refused() -> None:
    """Of a row of 4 bytes a value, which rank 1 has no value of."""
    form = StateForm(((Run(0, 3),), (), (Run(3, 5),)), ((), (), ()), 4, 0)
    geometry = replace(hybrid(), states=(*hybrid().states, StateHome(1, form)))
    for rank in range(3):
        check_rows(geometry, FakeLayouts(geometry, rank), rank)
    other = replace(geometry, states=(*hybrid().states, StateHome(1, replace(form, channel_bytes=8))))
    for rank, takes in ((0, "24 bytes in the pipeline layout and 12"), (1, "12 bytes in the pipeline layout and 24")):
        with pytest.raises(UnsupportedModel, match=f"states of linear layer 2 takes {takes} in the tensor layout"):
            check_rows(other, FakeLayouts(geometry, rank), rank)
