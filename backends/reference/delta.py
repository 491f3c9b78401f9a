"""The gated delta rule, one row after the other, and the states that it leaves.

A slot of a layer holds what the next row of a sequence needs:

    conv    [kernel - 1, channels]              the last rows of `mixed`, the oldest first
    matrix  [value_heads, key_dim, value_dim]   M of each value head (a layer without heads: none)

Both are of the backend's dtype, as an F32 KV pool is. A row at position 0 starts from zeros whatever its slot holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backends.base import DeltaNet, StateLayer, StatePool
from backends.reference.compute import Array, Ints, rms_norm, sigmoid, silu, softplus


@dataclass(frozen=True)
class DeltaWeights:
    """conv [channels, kernel], dt_bias and a [value_heads], norm [value_dim]."""

    conv: Array
    dt_bias: Array
    a: Array
    norm: Array


class States:
    """Every recurrent layer's slots."""

    def __init__(self, pool: StatePool, dtype: np.dtype[np.floating]) -> None:
        self.conv = [np.zeros((pool.slots, layer.kernel - 1, layer.channels), dtype) for layer in pool.layers]
        self.matrix = [np.zeros((pool.slots, *matrix_shape(layer)), dtype) for layer in pool.layers]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slots (source, target) of all layers, one pair after the other."""
        for source, target in pairs:
            for slots in (*self.conv, *self.matrix):
                slots[target] = slots[source]

    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.conv, *self.matrix))


def matrix_shape(layer: StateLayer) -> tuple[int, int, int]:
    return layer.heads, layer.key_dim, layer.value_dim


def state_bytes(pool: StatePool, dtype: np.dtype[np.floating]) -> int:
    """Bytes that the states of `pool` take in this backend."""
    per_slot = sum(
        (layer.kernel - 1) * layer.channels + layer.heads * layer.key_dim * layer.value_dim for layer in pool.layers
    )
    return pool.slots * per_slot * dtype.itemsize


def run_delta_rows(
    op: DeltaNet,
    weights: DeltaWeights,
    conv: Array,
    matrix: Array,
    positions: Ints,
    mixed: Array,
    z: Array,
    beta: Array,
    alpha: Array,
) -> Array:
    """Rows of one sequence, from its state `conv`, `matrix`, which is changed in place; each from what the row before
    it left. Gives [rows, value_heads * value_dim]."""
    out = np.empty_like(z)
    for row, position in enumerate(positions):
        if position == 0:
            conv[:] = 0
            matrix[:] = 0
        channels = _convolve(conv, mixed[row], weights.conv)
        q, k, v = _split_heads(op, channels)
        gates = sigmoid(beta[row]), softplus(alpha[row] + weights.dt_bias) * weights.a
        read = delta_step(matrix, q, k, v, *gates)
        gated = rms_norm(read, weights.norm, op.eps) * silu(z[row].reshape(read.shape))
        out[row] = gated.reshape(-1)
    return out


def delta_step(matrix: Array, q: Array, k: Array, v: Array, b: Array, g: Array) -> Array:
    """One row of the delta rule, for all value heads; `matrix` [heads, key_dim, value_dim] is changed in place.

    q and k [heads, key_dim], v [heads, value_dim], b and g [heads]; gives M^T q, [heads, value_dim].
    """
    matrix *= np.exp(g)[:, None, None]
    change = b[:, None] * (v - (matrix * k[:, :, None]).sum(axis=1))
    matrix += k[:, :, None] * change[:, None, :]
    read: Array = (matrix * q[:, :, None]).sum(axis=1)
    return read


def _convolve(conv: Array, mixed: Array, weight: Array) -> Array:
    """silu of the causal convolution at this row; the row joins the state, the oldest one leaves it."""
    seen = np.concatenate([conv, mixed[None]])
    conv[:] = seen[1:]
    return silu((seen * weight.T).sum(axis=0))


def _split_heads(op: DeltaNet, channels: Array) -> tuple[Array, Array, Array]:
    """q, k and v of each value head, q and k of unit length, q also divided by sqrt(key_dim)."""
    keys = op.key_heads * op.key_dim
    q = _unit(channels[:keys].reshape(op.key_heads, op.key_dim), op.eps)
    k = _unit(channels[keys : 2 * keys].reshape(op.key_heads, op.key_dim), op.eps)
    v = channels[2 * keys :].reshape(op.value_heads, op.value_dim)
    heads = np.arange(op.value_heads)
    mine = heads % op.key_heads if op.tiled else heads // (op.value_heads // op.key_heads)
    return q[mine] / np.sqrt(q.dtype.type(op.key_dim)), k[mine], v


def _unit(heads: Array, eps: float) -> Array:
    """Each row divided by sqrt(sum of squares + eps)."""
    unit: Array = heads / np.sqrt(np.vecdot(heads, heads) + heads.dtype.type(eps))[:, None]
    return unit
