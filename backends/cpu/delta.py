"""Recurrent layers on the CPU: what a program has of the states, and the records of `DeltaNet` and `JoinHidden`.

How a slot is laid out: `backends.states`.

Where ranks hold states together a slot has all layers of the model at full width, and a program a part of each of some
layers (`Held`): it reads, writes and copies that alone, so ranks never wait for one another.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from backends.base import DeltaNet, JoinHidden, Op, StateLayer, StatePart, StatePool, Weight
from backends.cpu import abi
from backends.cpu.widths import FLOAT_BYTES, padded
from backends.states import channels_of as channels_of
from backends.states import check as check
from backends.states import key_heads_of, layer_at, layer_floats, window_floats
from backends.states import slot_bytes as slot_bytes


@dataclass(frozen=True)
class Held:
    """The states of a program: `parts[i]` of `pool`, whose slot 0 is at `base`, is its recurrent layer i."""

    pool: StatePool
    base: int
    parts: tuple[StatePart, ...]


def convolved_floats(op: DeltaNet) -> int:
    """Scratch for one row: q, k and v of each head padded to 16, two gates for each value head."""
    keys, values = 2 * op.key_heads * padded(op.key_dim), op.value_heads * padded(op.value_dim)
    return keys + values + padded(2 * op.value_heads)


def check_part(part: StatePart, own: StateLayer, pool: StatePool) -> None:
    """Raise ValueError where a program's layer `own` is no part of the pool's."""
    if not 0 <= part.layer < len(pool.layers):
        raise ValueError(f"state layer {part.layer} of {len(pool.layers)}")
    whole = pool.layers[part.layer]
    if not own.heads and not whole.heads:
        if whole.kernel != own.kernel or not 0 <= part.first_key <= whole.channels - own.channels:
            raise ValueError(f"{own} from channel {part.first_key} on is no part of state layer {part.layer}, {whole}")
        return
    if not own.heads or not whole.heads:
        raise ValueError(f"{own} is no part of state layer {part.layer}, {whole}")
    keys, own_keys = key_heads_of(whole), key_heads_of(own)
    alike = (whole.kernel, whole.key_dim, whole.value_dim) == (own.kernel, own.key_dim, own.value_dim)
    if not alike or whole.heads * own_keys != own.heads * keys:
        raise ValueError(f"{own} is no part of state layer {part.layer}, {whole}")
    if not 0 <= part.first_key <= part.first_key + own_keys <= keys:
        raise ValueError(f"key heads from {part.first_key} on, {own_keys} of them, of state layer {part.layer}: {keys}")


def record(
    op: DeltaNet,
    held: Held,
    alpha: tuple[int, int],
    convolved: int,
    kept: Mapping[str, int],
    address_of: Callable[[Weight], int],
) -> abi.Delta:
    """`hs_delta` of an op. `alpha` is the buffer's address and stride, `convolved` the scratch's address, `kept` what
    `backends.cpu.held` has for it; `address_of` gives a stored weight's."""
    part = held.parts[op.layer]
    whole = held.pool.layers[part.layer]
    return abi.Delta(
        key_heads=op.key_heads,
        value_heads=op.value_heads,
        key_dim=op.key_dim,
        value_dim=op.value_dim,
        kernel=op.kernel,
        tiled=int(op.tiled),
        eps=op.eps,
        first_key=part.first_key,
        state_key_heads=key_heads_of(whole),
        state_value_heads=whole.heads,
        alpha=alpha[0],
        alpha_stride=alpha[1],
        conv=address_of(op.conv),
        dt_bias=address_of(op.dt_bias),
        a=address_of(op.a),
        norm=address_of(op.norm),
        convolved=convolved,
        convolved_stride=convolved_floats(op),
        states=held.base + FLOAT_BYTES * layer_at(held.pool, part.layer),
        slot_floats=slot_bytes(held.pool) // FLOAT_BYTES,
        matrix_at=window_floats(whole),
        **kept,
    )


def record_join(op: JoinHidden, held: Held, kept: Mapping[str, int]) -> abi.Join:
    """`hs_join` of an op."""
    part = held.parts[op.layer]
    return abi.Join(
        chained=int(op.chained),
        states=held.base + FLOAT_BYTES * (layer_at(held.pool, part.layer) + part.first_key),
        slot_floats=slot_bytes(held.pool) // FLOAT_BYTES,
        **kept,
    )


def runs_of(ops: Sequence[Op], held: Held) -> list[tuple[int, int]]:
    """(offset, bytes) of what a program has of a slot, ascending, as few runs as there are."""
    runs: list[tuple[int, int]] = []
    for op in ops:
        match op:
            case DeltaNet():
                own = _layer_runs(op, held)
            case JoinHidden(chained=False):
                own = _row_runs(op, held)
            case _:
                continue
        first = layer_at(held.pool, held.parts[op.layer].layer)
        runs += [(first + at, count) for at, count in own]
    merged: list[tuple[int, int]] = []
    for at, count in sorted(runs):
        if merged and merged[-1][0] + merged[-1][1] == at:
            merged[-1] = (merged[-1][0], merged[-1][1] + count)
        else:
            merged.append((at, count))
    return [(FLOAT_BYTES * at, FLOAT_BYTES * count) for at, count in merged]


def _layer_runs(op: DeltaNet, held: Held) -> Iterator[tuple[int, int]]:
    """(first float, floats) in a layer of the pool."""
    part = held.parts[op.layer]
    whole = held.pool.layers[part.layer]
    if op.value_heads == whole.heads:
        yield 0, layer_floats(whole)
        return
    keys, heads = key_heads_of(whole), value_runs(op, whole, part.first_key)
    channels = [((first + part.first_key) * op.key_dim, op.key_heads * op.key_dim) for first in (0, keys)]
    behind = 2 * keys * op.key_dim
    channels += [(behind + first * op.value_dim, count * op.value_dim) for first, count in heads]
    for row in range(op.kernel - 1):
        yield from ((row * whole.channels + at, count) for at, count in channels)
    each = op.key_dim * padded(op.value_dim)
    yield from ((window_floats(whole) + first * each, count * each) for first, count in heads)


def _row_runs(op: JoinHidden, held: Held) -> Iterator[tuple[int, int]]:
    """The same of a layer without heads."""
    part = held.parts[op.layer]
    whole = held.pool.layers[part.layer]
    width = op.end - op.first
    yield (0, layer_floats(whole)) if width == whole.channels else (part.first_key, width)


def value_runs(op: DeltaNet, whole: StateLayer, first_key: int) -> list[tuple[int, int]]:
    """(first, count) of the value heads of an op among those of the whole layer."""
    share = op.value_heads // op.key_heads
    if not op.tiled:
        return [(first_key * share, op.value_heads)]
    keys = key_heads_of(whole)
    return [(tile * keys + first_key, op.key_heads) for tile in range(share)]


def copy(held: Held, runs: Sequence[tuple[int, int]], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy slots (source, target), in this order; without recurrent layers, which some ranks do not have, there are
    none. Raises ValueError, before anything is copied, for a slot that there is not."""
    if not held.parts:
        return
    for slot in (slot for pair in pairs for slot in pair):
        if not 0 <= slot < held.pool.slots:
            raise ValueError(f"state slot {slot} of {held.pool.slots}")
    size = slot_bytes(held.pool)
    for source, target in pairs:
        if source != target:
            for at, count in runs:
                ctypes.memmove(held.base + size * target + at, held.base + size * source + at, count)
