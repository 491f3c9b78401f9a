"""Rows of pools as pieces of a payload.

    KV       each layer, each page: K of the page of head 0, 1, …, then V           (`hs_step.k_pool` has the layout)
    states   each slot, each layer: row after row of the window its channels, then its heads     (`backends.states`)

Padding stays behind. A page, a channel and a head are as long in every layout, so the same rows make the same payload
wherever they lie: whole, or packed one behind the other.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from backends.base import PAGE_LEN, PoolRuns
from backends.cpu.pieces import Int64s, Pieces, joined
from backends.cpu.pools import CpuPools, kv_layer_bytes
from backends.states import layer_parts, slot_bytes


def pieces_of(pools: CpuPools, runs: PoolRuns) -> Pieces:
    """Raises ValueError for a layer, page, slot, channel or head that there is not."""
    parts = [_pages(pools, layer, pages) for layers, pages in runs.kv for layer in layers]
    if len(runs.states) and runs.parts:
        parts.append(_states(pools, runs))
    return joined(parts)


def _pages(pools: CpuPools, layer: int, pages: npt.NDArray[np.int32]) -> tuple[Int64s, Int64s]:
    """(places, lengths) of pages of one layer."""
    if not 0 <= layer < len(pools.kv.layers):
        raise ValueError(f"KV layer {layer} of {len(pools.kv.layers)}")
    shape = pools.kv.layers[layer]
    there = pools.kv.group_slots[shape.group] // PAGE_LEN
    if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < there:
        raise ValueError(f"pages {int(pages.min())} to {int(pages.max())} of layer {layer}, which has {there}")
    heads = np.arange(shape.kv_heads, dtype=np.int64)
    columns, sizes = [], []
    for base, size in zip(pools.kv_addresses(layer), kv_layer_bytes(pools.kv, layer), strict=True):
        each = size // max(1, shape.kv_heads * there)
        columns.append(base + heads * (each * there) + pages.astype(np.int64)[:, None] * each)
        sizes.append(np.full((len(pages), len(heads)), each, np.int64))
    return np.concatenate(columns, axis=1).reshape(-1), np.concatenate(sizes, axis=1).reshape(-1)


def _states(pools: CpuPools, runs: PoolRuns) -> tuple[Int64s, Int64s]:
    """(places, lengths) of parts of slots."""
    slots, held = runs.states.astype(np.int64), pools.states
    if not 0 <= int(slots.min()) <= int(slots.max()) < held.slots:
        raise ValueError(f"state slots {int(slots.min())} to {int(slots.max())} of {held.slots}")
    found = [part for layer, channels, heads in runs.parts for part in layer_parts(held, layer, channels, heads)]
    offsets = np.array([offset for offset, _ in found], np.int64)
    lengths = np.array([length for _, length in found], np.int64)
    places = pools.state_base + slots[:, None] * slot_bytes(held) + offsets
    return places.reshape(-1), np.tile(lengths, len(slots))
