"""What ops of a card's program take beside their buffers: bounded, and never less for a longer context."""

from __future__ import annotations

import pytest

from backends.base import Attention, Buffer, KvLayer, KvPool, Limits, StatePool
from backends.gpu.arch import arch
from backends.gpu.device import CardFacts
from backends.gpu.ops import attention as ops
from backends.gpu.ops import delta
from backends.gpu.steps import attention
from backends.gpu.steps.base import Context
from backends.quant import QuantType

KIND = arch("sm_86")
FACTS = CardFacts(KIND.vendor, 0, "GPU-1", "0000:01:00.0", "A card", KIND, 32, 80, 8 << 30, False, "12", True, 1 << 21)
KV = KvPool((KvLayer(8, 128),), 1 << 20, QuantType.F16)


@pytest.mark.parametrize("window", [0, 1024])
@pytest.mark.parametrize("heads", [8, 64, 1024])
def test_a_longer_context_never_takes_less_and_always_what_is_used(heads: int, window: int) -> None:
    op = Attention(Buffer("q", heads * 128), Buffer("o", heads * 128), 0, heads, 8, 128, scale=1.0, window=window)
    before = 0
    for pages in (*range(1, 6000, 37), 65536):
        limits = Limits(272, 48, 16, pages)
        found = sum(attention.scratch(op, Context(FACTS, limits, KV, StatePool(), {}, 272)).values())
        shape, tiles = attention._shape(op, KV, limits), attention._most_tiles(limits)
        used = 4 * sum(ops.part_floats(shape, tiles, attention._parts(shape, limits)))
        largest = 4 * sum(ops.part_floats(shape, tiles, ops.parts(ops.MAX_PART_PAGES, shape, tiles.rows)))
        assert max(before, used) <= found <= max(attention.PART_BYTES, largest)
        before = found


@pytest.mark.parametrize(("rows", "lanes", "most"), [(31, 4, 0), (32, 1, 2), (2048, 1, 33), (2240, 64, 66)])
def test_chunks_of_a_batch_are_bounded_however_many_lanes_there_are(rows: int, lanes: int, most: int) -> None:
    assert delta.most_chunks(rows, lanes) == most
