"""Recurrent layers on the CPU: where states lie, and the record of one `DeltaNet` op.

A state slot holds all recurrent layers, one after the other, so that a sequence's state is copied in one piece:

    layer   [kernel - 1][channels] floats, padded to 16, then [heads][blocks of 16 columns][key_dim][16] floats
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from backends.base import DeltaNet, Op, StateLayer, StatePool, Weight
from backends.cpu import abi
from backends.cpu.widths import FLOAT_BYTES, padded


def channels_of(op: DeltaNet) -> int:
    return 2 * op.key_heads * op.key_dim + op.value_heads * op.value_dim


def window_floats(layer: StateLayer) -> int:
    """The convolution's part of a layer's state; its matrices begin behind it."""
    return padded((layer.kernel - 1) * layer.channels)


def layer_floats(layer: StateLayer) -> int:
    return window_floats(layer) + layer.heads * layer.key_dim * padded(layer.value_dim)


def slot_bytes(states: StatePool) -> int:
    """Bytes of one sequence's states."""
    return FLOAT_BYTES * sum(layer_floats(layer) for layer in states.layers)


def convolved_floats(op: DeltaNet) -> int:
    """Scratch for one row: q, k and v of each head padded to 16, two gates for each value head."""
    keys, values = 2 * op.key_heads * padded(op.key_dim), op.value_heads * padded(op.value_dim)
    return keys + values + padded(2 * op.value_heads)


def check(ops: Sequence[Op], states: StatePool) -> None:
    """Raise ValueError where op and pool do not fit each other, or an op's shapes do not."""
    for op in ops:
        if not isinstance(op, DeltaNet):
            continue
        if states.slots < 1 or not 0 <= op.layer < len(states.layers):
            raise ValueError(f"DeltaNet uses state layer {op.layer} of {len(states.layers)}, {states.slots} slots")
        wanted = StateLayer(channels_of(op), op.kernel, op.value_heads, op.key_dim, op.value_dim)
        if states.layers[op.layer] != wanted:
            raise ValueError(f"state layer {op.layer} is {states.layers[op.layer]}, DeltaNet wants {wanted}")
        values = op.value_heads * op.value_dim
        shapes = {
            op.mixed.name: (op.mixed.width, channels_of(op)),
            op.z.name: (op.z.width, values),
            op.out.name: (op.out.width, values),
            op.beta.name: (op.beta.width, op.value_heads),
            op.alpha.name: (op.alpha.width, op.value_heads),
            op.conv.name: ((op.conv.rows, op.conv.cols), (channels_of(op), op.kernel)),
            op.dt_bias.name: ((op.dt_bias.rows, op.dt_bias.cols), (1, op.value_heads)),
            op.a.name: ((op.a.rows, op.a.cols), (1, op.value_heads)),
            op.norm.name: ((op.norm.rows, op.norm.cols), (1, op.value_dim)),
        }
        for name, (found, want) in shapes.items():
            if found != want:
                raise ValueError(f"{name} is {found}, DeltaNet wants {want}")
        if op.out.name in (op.mixed.name, op.z.name):
            raise ValueError(f"DeltaNet cannot write its own input {op.out.name}")
        if op.value_heads % op.key_heads:
            raise ValueError(f"{op.value_heads} value heads are no multiple of {op.key_heads} key heads")


def record(
    op: DeltaNet,
    states: StatePool,
    base: int,
    alpha: tuple[int, int],
    convolved: int,
    address_of: Callable[[Weight], int],
) -> abi.Delta:
    """`hs_delta` of an op. `base` is the address of state slot 0, `alpha` the buffer's address and stride, `convolved`
    the scratch's address; `address_of` gives a stored weight's."""
    before = sum(layer_floats(layer) for layer in states.layers[: op.layer])
    return abi.Delta(
        key_heads=op.key_heads,
        value_heads=op.value_heads,
        key_dim=op.key_dim,
        value_dim=op.value_dim,
        kernel=op.kernel,
        tiled=int(op.tiled),
        eps=op.eps,
        alpha=alpha[0],
        alpha_stride=alpha[1],
        conv=address_of(op.conv),
        dt_bias=address_of(op.dt_bias),
        a=address_of(op.a),
        norm=address_of(op.norm),
        convolved=convolved,
        convolved_stride=convolved_floats(op),
        states=base + FLOAT_BYTES * before,
        slot_floats=slot_bytes(states) // FLOAT_BYTES,
        matrix_at=window_floats(states.layers[op.layer]),
    )


def copy(base: int, states: StatePool, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy slots (source, target), in this order; without recurrent layers, which some ranks do not have, there are
    none. Raises ValueError, before anything is copied, for a slot that there is not."""
    if not states.layers:
        return
    for slot in (slot for pair in pairs for slot in pair):
        if not 0 <= slot < states.slots:
            raise ValueError(f"state slot {slot} of {states.slots}")
    size = slot_bytes(states)
    for source, target in pairs:
        if source != target:
            ctypes.memmove(base + size * target, base + size * source, size)
