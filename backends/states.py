"""Recurrent states in memory, the same on every device that keeps them by address, so that a flip's payload is too.

A state slot holds all recurrent layers, one after the other, so that a sequence's state is copied in one piece:

    layer   [kernel - 1][channels] floats, padded to 16, then [heads][blocks of 16 columns][key_dim][16] floats

A layer without heads is the first part alone: one row of `channels`, for `JoinHidden`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from backends.base import DeltaNet, JoinHidden, Op, StateLayer, StatePool

FLOAT_BYTES = 4
LANES = 16
"""Columns of a block of a matrix; floats that a window is padded to."""

Runs = tuple[tuple[int, int], ...]


def padded(count: int) -> int:
    """Rounded up to whole blocks of 16."""
    return -(-count // LANES) * LANES


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


def layer_at(states: StatePool, layer: int) -> int:
    """Floats of a slot before a layer."""
    return sum(layer_floats(before) for before in states.layers[:layer])


def key_heads_of(layer: StateLayer) -> int:
    """Of a layer that has heads."""
    return (layer.channels - layer.heads * layer.value_dim) // (2 * layer.key_dim)


# ------------------------------------------------------------------------------------------------- parts of a payload


def layer_parts(states: StatePool, layer: int, channels: Runs, heads: Runs) -> list[tuple[int, int]]:
    """(offset in a slot, bytes) of runs of a layer's channels, row after row of its window, then of runs of its heads,
    as `PoolRuns.parts` names them; padding is left out. Raises ValueError for a layer, channel or head that there is
    not."""
    if not 0 <= layer < len(states.layers):
        raise ValueError(f"state layer {layer} of {len(states.layers)}")
    shape = states.layers[layer]
    for what, some, there in (("channels", channels, shape.channels), ("heads", heads, shape.heads)):
        for first, end in some:
            if not 0 <= first <= end <= there:
                raise ValueError(f"{what} {first} to {end} of state layer {layer}, which has {there}")
    window = layer_at(states, layer)
    matrices = window + window_floats(shape)
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


# --------------------------------------------------------------------------------------------------------------- checks


def check(ops: Sequence[Op], states: StatePool) -> None:
    """Raise ValueError where op and pool do not fit each other, or an op's shapes do not."""
    for op in ops:
        if isinstance(op, JoinHidden):
            _check_join(op, states)
        if isinstance(op, DeltaNet):
            _check_delta(op, states)


def check_pairs(states: StatePool, pairs: Sequence[tuple[int, int]]) -> None:
    """Raise ValueError for a slot that there is not."""
    for slot in (slot for pair in pairs for slot in pair):
        if not 0 <= slot < states.slots:
            raise ValueError(f"state slot {slot} of {states.slots}")


def _check_delta(op: DeltaNet, states: StatePool) -> None:
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


def _check_join(op: JoinHidden, states: StatePool) -> None:
    if states.slots < 1 or not 0 <= op.layer < len(states.layers):
        raise ValueError(f"JoinHidden uses state layer {op.layer} of {len(states.layers)}, {states.slots} slots")
    width = op.end - op.first
    wanted = StateLayer(width, 2, 0, 0, 0)
    if states.layers[op.layer] != wanted:
        raise ValueError(f"state layer {op.layer} is {states.layers[op.layer]}, JoinHidden wants {wanted}")
    least = min(op.left.width, op.right.width)
    if not 0 <= op.first <= op.end <= least or op.out.width != 2 * width:
        raise ValueError(
            f"JoinHidden of columns {op.first} to {op.end}: {op.left.name} and {op.right.name} have {least},"
            f" {op.out.name} {op.out.width}"
        )
    if op.out.name in (op.left.name, op.right.name):
        raise ValueError(f"JoinHidden cannot write its own input {op.out.name}")
