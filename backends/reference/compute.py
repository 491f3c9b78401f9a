"""The arithmetic of every op, on plain arrays: slow, obvious, and free of surprises.

The rule: a row's result may depend on that row alone. Matrix libraries break it (a blocked product sums in an order
that changes with the number of rows), so no matrix product is used. Every number of a linear layer is one dot product
of two contiguous vectors (`numpy.vecdot`), the same call whatever else is in the batch; attention is computed row by
row, over exactly the positions that the row sees.

All arrays are C-contiguous and of one dtype, float32 or float64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int32]

BLOCK_ROWS = 256
"""Rows of a weight that are used for all rows of a batch before the next ones are read: they stay in the cache."""


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight, by row. x [rows, width], weight [width]."""
    mean = np.vecdot(x, x)[:, None] / x.dtype.type(x.shape[1])
    normed: Array = x / np.sqrt(mean + x.dtype.type(eps)) * weight
    return normed


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x @ weight^T + bias. x [rows, in], weight [out, in], bias [out]; gives [rows, out]."""
    out = np.empty((x.shape[0], weight.shape[0]), dtype=x.dtype)
    for first in range(0, weight.shape[0], BLOCK_ROWS):
        block = slice(first, first + BLOCK_ROWS)
        np.vecdot(x[:, None, :], weight[block], out=out[:, block])
    if bias is not None:
        out += bias
    return out


def rotate(
    heads: Array, positions: Ints, frequencies: tuple[float, ...], magnitude: float, *, interleaved: bool
) -> Array:
    """Rotary embedding. heads [rows, heads, head_dim]; turns the first 2 * len(frequencies) dims of each head.

    Angles are float64 whatever the dtype: a float32 product of a large position and a frequency loses digits.
    """
    pairs = len(frequencies)
    angles = positions.astype(np.float64)[:, None] * np.asarray(frequencies, dtype=np.float64)
    cos = (np.cos(angles) * magnitude).astype(heads.dtype)[:, None, :]
    sin = (np.sin(angles) * magnitude).astype(heads.dtype)[:, None, :]
    first, second = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(0, pairs), slice(pairs, 2 * pairs))
    )
    a, b = heads[..., first], heads[..., second]
    turned = heads.copy()
    turned[..., first] = a * cos - b * sin
    turned[..., second] = a * sin + b * cos
    return turned


def attend(q: Array, k: Array, v: Array, scale: float) -> Array:
    """softmax(scale * q . k) v for one row. q [heads, dim], k and v [seen, kv_heads, dim]; gives [heads, dim].

    Query head h reads kv head h // (heads // kv_heads).
    """
    heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(kv_heads, heads // kv_heads, 1, dim)
    keys = np.ascontiguousarray(k.transpose(1, 0, 2))[:, None]
    values = np.ascontiguousarray(v.transpose(1, 2, 0))[:, None]
    scores = np.vecdot(grouped, keys) * q.dtype.type(scale)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: Array = np.vecdot(weights[:, :, None, :], values)
    return mixed.reshape(heads, dim)


def silu_gate(gate: Array, up: Array) -> Array:
    """silu(gate) * up, where silu(x) = x / (1 + exp(-x)).

    For x below about -88 the float32 exp is infinite and the quotient the right limit, -0; that is no error.
    """
    with np.errstate(over="ignore"):
        gated: Array = gate / (1 + np.exp(-gate)) * up
    return gated
