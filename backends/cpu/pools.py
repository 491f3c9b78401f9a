"""Pools on the CPU: KV rows and states of some layers, apart from the programs that use them.

    kv      layer after layer: K of all its rows, then V
    state   slot after slot (`backends.states`)

A pool is this rank's own, or one for all ranks of the box. Then it has all layers of the model at full width, and each
rank addresses what it runs (`PoolParts`), in either layout at the same places:

    pipeline layout, rank 1                        tensor layout, rank 1
    kv      layers 2, 3: all rows                  every layer: rows of its pages, others into the page behind the pool
    state   layers 2, 3 of each slot               of every layer of each slot: its heads and their channels

So nothing moves when the layout changes. Memory is zeroed when it is new; binds and closes of programs leave it alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from backends.base import KvPool, LoadProgress, MemoryRegion, PoolParts, Pools, SharedPools, StatePart, StatePool
from backends.cpu import delta
from backends.cpu.widths import padded
from backends.host.memory import Mapping as MemoryMapping
from backends.host.memory import SharedMapping
from backends.quant import QuantType

KV, STATE = "kv", "state"


class CpuPools:
    """`kv` and `states` in memory. Resident after `commit`. Raises MemoryError with the arithmetic."""

    def __init__(self, library: ctypes.CDLL, kv: KvPool, states: StatePool, shared: SharedPools | None = None) -> None:
        self.kv, self.states = kv, states
        self._library = library
        self._held: list[MemoryMapping | SharedMapping] = []
        sizes = [kv_layer_bytes(kv, layer) for layer in range(len(kv.layers))]
        size, self._kv_offsets = 0, list[tuple[int, int]]()
        for k, v in sizes:
            self._kv_offsets.append((size, size + k))
            size += k + v
        try:
            self._kv_base = self._map(KV, size, _kv_arithmetic(kv, sizes), shared)
            self.state_base = self._map_states(shared)
        except BaseException:
            self.close()
            raise

    def _map_states(self, shared: SharedPools | None) -> int:
        """Address of state slot 0. Where there are no recurrent layers there is no such line."""
        if not self.states.layers:
            return 0
        each, slots, layers = delta.slot_bytes(self.states), self.states.slots, len(self.states.layers)
        return self._map(STATE, each * slots, f"{slots} states of {each} bytes in {layers} layers", shared)

    def _map(self, line: str, size: int, arithmetic: str, shared: SharedPools | None) -> int:
        mapping: MemoryMapping | SharedMapping
        if shared is None:
            mapping = MemoryMapping(self._library, size, line, arithmetic)
        else:
            fd = shared.kv_fd if line == KV else shared.state_fd
            part = size * shared.rank // shared.ranks, size * (shared.rank + 1) // shared.ranks
            mapping = SharedMapping(self._library, fd, size, line, arithmetic, part)
        self._held.append(mapping)
        return mapping.address

    def commit(self, team: int, progress: LoadProgress) -> None:
        """Have the system hold this rank's part now. What is there stays. Raises MemoryError."""
        for mapping in self._held:
            mapping.commit(team, progress)

    def release(self) -> None:
        """Give the memory of pools that are this rank's own back, until the next `commit`; addresses stay. Raises
        OSError."""
        for mapping in self.own_mappings():
            mapping.release()

    def own_mappings(self) -> list[MemoryMapping]:
        """Those of pools that are this rank's own."""
        own = [mapping for mapping in self._held if isinstance(mapping, MemoryMapping)]
        assert len(own) == len(self._held), "others use what ranks hold together"
        return own

    def kv_addresses(self, layer: int) -> tuple[int, int]:
        """Of K and V."""
        k, v = self._kv_offsets[layer]
        return self._kv_base + k, self._kv_base + v

    def memory_lines(self) -> dict[str, int]:
        return {mapping.purpose: mapping.filled_here for mapping in self._held}

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        return tuple(MemoryRegion(each.purpose, each.address, each.size) for each in self._held if each.size)

    def close(self) -> None:
        for mapping in self._held:
            mapping.close()
        self._held.clear()


def kv_layer_bytes(kv: KvPool, layer: int) -> tuple[int, int]:
    """Bytes of one layer's K and V. V rows are padded to 16 dims; Q8_0 has none to pad (`capability`)."""
    shape = kv.layers[layer]
    rows = kv.group_slots[shape.group] * shape.kv_heads
    if kv.type is QuantType.Q8_0:
        each = rows * kv.type.row_bytes(shape.head_dim)
        return each, each
    each = rows * kv.type.block_bytes
    return each * shape.head_dim, each * padded(shape.head_dim)


def checked_parts(parts: PoolParts, kv: KvPool, states: StatePool) -> CpuPools:
    """The pools of `parts`, which a program with pools `kv` and `states` may use. Raises ValueError where rows, layers
    or heads are not what the program takes them for."""
    pools: Pools = parts.pools
    assert isinstance(pools, CpuPools), "pools of this backend"
    if (pools.kv.type, pools.kv.group_slots) != (kv.type, kv.group_slots):
        raise ValueError(
            f"the program takes KV rows for {kv.type.name} in {kv.group_slots} slots, they are {pools.kv.type.name} in"
            f" {pools.kv.group_slots}"
        )
    if tuple(pools.kv.layers[layer] for layer in parts.kv_layers) != kv.layers:
        raise ValueError(f"layers {parts.kv_layers} of the KV pool are not the program's")
    if len(parts.states) != len(states.layers):
        raise ValueError(f"{len(parts.states)} parts of states for {len(states.layers)} recurrent layers")
    if states.layers and states.slots != pools.states.slots:
        raise ValueError(f"the program takes {states.slots} state slots for granted, there are {pools.states.slots}")
    for part, own in zip(parts.states, states.layers, strict=True):
        delta.check_part(part, own, pools.states)
    return pools


def all_of(pools: CpuPools) -> PoolParts:
    """A program that has the pools for itself."""
    states = tuple(StatePart(layer) for layer in range(len(pools.states.layers)))
    return PoolParts(pools, tuple(range(len(pools.kv.layers))), states)


def _kv_arithmetic(kv: KvPool, sizes: Sequence[tuple[int, int]]) -> str:
    """Of what the KV pool is made, for the message that it does not fit."""
    parts = []
    for group, (slots, window) in enumerate(zip(kv.group_slots, kv.group_windows, strict=True)):
        layers = [layer for layer, shape in enumerate(kv.layers) if shape.group == group]
        if layers and slots:
            each = sum(sum(sizes[layer]) for layer in layers) // slots
            of = f"{len(layers)} layers" + (f" that see {window} tokens" if window else "")
            parts.append(f"{slots} slots of {each} bytes in {of}")
    return ", ".join(parts)
