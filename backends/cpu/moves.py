"""Rows of pools as pieces of a payload.

    KV       each layer, each page: K of the page of head 0, 1, …, then V           (`hs_step.k_pool` has the layout)
    states   each slot, each layer: row after row of the window its channels, then its heads     (`backends.cpu.delta`)

Padding stays behind. A page, a channel and a head are as long in every layout, so the same rows make the same payload
wherever they lie: whole, or packed one behind the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from backends.base import PAGE_LEN, PoolRuns, StateLayer
from backends.cpu import delta
from backends.cpu.pieces import Int64s, Pieces, joined
from backends.cpu.pools import CpuPools, kv_layer_bytes
from backends.cpu.widths import FLOAT_BYTES, LANES, padded

Runs = tuple[tuple[int, int], ...]


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
    found = [part for layer, channels, heads in runs.parts for part in _layer_parts(pools, layer, channels, heads)]
    offsets = np.array([offset for offset, _ in found], np.int64)
    lengths = np.array([length for _, length in found], np.int64)
    places = pools.state_base + slots[:, None] * delta.slot_bytes(held) + offsets
    return places.reshape(-1), np.tile(lengths, len(slots))


def _layer_parts(pools: CpuPools, layer: int, channels: Runs, heads: Runs) -> list[tuple[int, int]]:
    """(offset in a slot, bytes)."""
    if not 0 <= layer < len(pools.states.layers):
        raise ValueError(f"state layer {layer} of {len(pools.states.layers)}")
    shape = pools.states.layers[layer]
    for what, some, there in (("channels", channels, shape.channels), ("heads", heads, shape.heads)):
        for first, end in some:
            if not 0 <= first <= end <= there:
                raise ValueError(f"{what} {first} to {end} of state layer {layer}, which has {there}")
    window = delta.layer_at(pools.states, layer)
    matrices = window + delta.window_floats(shape)
    rows = [window + row * shape.channels for row in range(shape.kernel - 1)]
    floats = [(row + first, end - first) for row in rows for first, end in channels]
    floats += [part for run in heads for part in _heads(shape, matrices, run)]
    return [(FLOAT_BYTES * at, FLOAT_BYTES * count) for at, count in floats]


def _heads(shape: StateLayer, matrices: int, run: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """(offset, floats) of the matrices of some heads, which lie in blocks of 16 columns: of the last block only the
    columns that there are."""
    key_dim, value_dim = shape.key_dim, shape.value_dim
    each, whole, rest = key_dim * padded(value_dim), value_dim // LANES * LANES, value_dim % LANES
    first, end = run
    if not rest:
        yield matrices + first * each, (end - first) * each
        return
    for head in range(first, end):
        at = matrices + head * each
        yield at, key_dim * whole
        yield from ((at + key_dim * whole + row * LANES, rest) for row in range(key_dim))
