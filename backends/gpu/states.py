"""States on a card: where a layer lies in a pool, and what a program may have of it.

A slot is laid out as on the CPU (`backends.states`). A program on a card has whole layers, all that the pool has and in
its order: kernels copy a slot in one piece, and read a layer's heads as if they were all of them.
"""

from __future__ import annotations

from backends.base import PoolParts, StatePart, StatePool
from backends.states import FLOAT_BYTES as FLOAT_BYTES
from backends.states import channels_of as channels_of
from backends.states import check as check
from backends.states import check_pairs as check_pairs
from backends.states import layer_at as layer_at
from backends.states import layer_floats as layer_floats
from backends.states import layer_parts as layer_parts
from backends.states import padded as padded
from backends.states import slot_bytes as slot_bytes
from backends.states import window_floats as window_floats


def layer_addresses(states: StatePool, base: int, layer: int) -> tuple[int, int, int]:
    """Of a pool whose slot 0 is at `base`: addresses of the layer's window and of its matrices there, and bytes from
    one slot to the next (`Places.state`)."""
    window = base + FLOAT_BYTES * layer_at(states, layer)
    return window, window + FLOAT_BYTES * window_floats(states.layers[layer]), slot_bytes(states)


def check_parts(parts: PoolParts, states: StatePool) -> None:
    """Raise ValueError where a program with pool `states` would have other states of `parts.pools` than all of them."""
    pool = parts.pools.states
    if states.layers and states.slots != pool.slots:
        raise ValueError(f"the program takes {states.slots} state slots for granted, there are {pool.slots}")
    if len(parts.states) != len(states.layers):
        raise ValueError(f"{len(parts.states)} parts of states for {len(states.layers)} recurrent layers")
    whole = tuple(StatePart(layer) for layer in range(len(pool.layers)))
    if parts.states != whole or states.layers != pool.layers:
        raise ValueError(
            f"states that ranks hold together in one memory are not supported on cards yet: the program has a part of"
            f" the pool's {len(pool.layers)} recurrent layers; give each rank pools of its own"
        )
