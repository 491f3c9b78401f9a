"""Pools on a card: KV rows and states of some layers, apart from the programs that use them.

    kv      layer after layer: K of all its rows, then V                    (kernels/kv.h draws a page)
    state   slot after slot                                                 (backends.states)

Bytes and places within a pool are those of the CPU backend, so that a flip may carry a page or a head's matrix from any
rank to any other. The page of padding that rows of other ranks' pages go to is the last one of each group's slots: a
`KvPool` counts it, and it is memory like the others.

Where layouts take turns their pools lie behind reserved addresses (`Device.reserve`), and hold memory from `commit` to
`release` alone. Else they hold it from the beginning to the end. Memory is zeroed when it is new.
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.base import PAGE_LEN, KvPool, MemoryRegion, PoolParts, Pools, StatePart, StatePool
from backends.gpu import states as layout
from backends.gpu.device import Backing, Device, Memory
from backends.quant import QuantType

KV, STATE = "kv", "state"


class GpuPools:
    """`kv` and `states` on `device`; with `in_turns` they hold no memory before `commit`. Raises OutOfDeviceMemory, and
    DriverError for pools in turns on a card without virtual memory."""

    def __init__(self, device: Device, kv: KvPool, states: StatePool, *, in_turns: bool = False) -> None:
        self.kv, self.states = kv, states
        self._device = device
        self._held: list[Memory] = []
        self._in_turns: list[Backing] = []
        sizes = [kv_layer_bytes(kv, layer) for layer in range(len(kv.layers))]
        size, self._kv_offsets = 0, list[tuple[int, int]]()
        for k, v in sizes:
            self._kv_offsets.append((size, size + k))
            size += k + v
        each = layout.slot_bytes(states)
        of_states = f"{states.slots} states of {each} bytes in {len(states.layers)} layers"
        try:
            self._kv_base = self._have(KV, size, _kv_arithmetic(kv, sizes), in_turns)
            self.state_base = self._have(STATE, each * states.slots, of_states, in_turns)
        except BaseException:
            self.close()
            raise

    def _have(self, line: str, nbytes: int, arithmetic: str, in_turns: bool) -> int:
        """An address; 0 where there is nothing to hold."""
        if not nbytes:
            return 0
        if in_turns:
            backing = self._device.reserve(nbytes, line, arithmetic)
            self._in_turns.append(backing)
            return backing.address
        self._held.append(self._device.allocate(nbytes, line, arithmetic))
        return self._held[-1].address

    # ---------------------------------------------------------------------------------------------------------- memory

    def commit(self) -> None:
        """Hold memory, zeroed where it is new. Raises OutOfDeviceMemory, and pools in turns hold none then."""
        try:
            for backing in self._in_turns:
                backing.back()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give the memory of pools in turns back, until the next `commit`. Addresses stay. Waits for the stream."""
        for backing in self._in_turns:
            backing.release()

    @property
    def backed(self) -> bool:
        """Whether they hold memory now."""
        return all(backing.backed for backing in self._in_turns)

    def memory_lines(self) -> dict[str, int]:
        """Of pools in turns what they hold now."""
        lines = {KV: 0} | ({STATE: 0} if self.states.layers else {})
        for memory in (*self._held, *(backing for backing in self._in_turns if backing.backed)):
            lines[memory.line] += memory.nbytes
        return lines

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        """None: they are in no mapping of the process."""
        return ()

    def close(self) -> None:
        for memory in (*self._held, *self._in_turns):
            memory.close()
        self._held.clear()
        self._in_turns.clear()

    # ------------------------------------------------------------------------------------------------------- addresses

    def kv_addresses(self, layer: int) -> tuple[int, int]:
        """Of K and V."""
        k, v = self._kv_offsets[layer]
        return self._kv_base + k, self._kv_base + v

    def kv_pages(self, layer: int) -> int:
        """Pages of the layer, that of padding among them."""
        return self.kv.group_slots[self.kv.layers[layer].group] // PAGE_LEN

    def kv_pool(self, layer: int) -> tuple[int, int, int]:
        """`Places.kv_pool` of a layer of the pool."""
        return (*self.kv_addresses(layer), self.kv_pages(layer))

    def state(self, layer: int) -> tuple[int, int, int]:
        """`Places.state` of a layer of the pool."""
        return layout.layer_addresses(self.states, self.state_base, layer)


def kv_layer_bytes(kv: KvPool, layer: int) -> tuple[int, int]:
    """Bytes of one layer's K and V. V rows are padded to 16 dims; of Q8_0 heads are whole blocks of 32 dims."""
    shape = kv.layers[layer]
    rows = kv.group_slots[shape.group] * shape.kv_heads
    if kv.type is QuantType.Q8_0:
        each = rows * kv.type.row_bytes(shape.head_dim)
        return each, each
    each = rows * kv.type.block_bytes
    return each * shape.head_dim, each * layout.padded(shape.head_dim)


def all_of(pools: GpuPools) -> PoolParts:
    """A program that has the pools for itself."""
    states = tuple(StatePart(layer) for layer in range(len(pools.states.layers)))
    return PoolParts(pools, tuple(range(len(pools.kv.layers))), states)


def checked_parts(parts: PoolParts, kv: KvPool, states: StatePool) -> GpuPools:
    """The pools of `parts`, which a program with pools `kv` and `states` may use. Raises ValueError where rows or
    layers are not what the program takes them for, or it has a part of the states."""
    pools: Pools = parts.pools
    assert isinstance(pools, GpuPools), "pools of this backend"
    if (pools.kv.type, pools.kv.group_slots) != (kv.type, kv.group_slots):
        raise ValueError(
            f"the program takes KV rows for {kv.type.name} in {kv.group_slots} slots, they are {pools.kv.type.name} in"
            f" {pools.kv.group_slots}"
        )
    if tuple(pools.kv.layers[layer] for layer in parts.kv_layers) != kv.layers:
        raise ValueError(f"layers {parts.kv_layers} of the KV pool are not the program's")
    layout.check_parts(parts, states)
    return pools


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
