"""The arithmetic of every op, on plain arrays: slow, obvious, and free of surprises.

The rule: a row's result may depend on that row alone. Matrix libraries break it (a blocked product sums in an order
that changes with the number of rows), so no matrix product is used. Every number of a linear layer is one dot product
of two contiguous vectors (`numpy.vecdot`), the same call whatever else is in the batch; attention is computed row by
row, over exactly the positions that the row sees.

All arrays are C-contiguous and of one dtype, float32 or float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

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


def head_norm(heads: Array, weight: Array | None, eps: float) -> Array:
    """RMS norm of every head by itself. heads [rows, heads, head_dim], weight [head_dim]; None: all ones."""
    ones = np.ones(heads.shape[-1], heads.dtype)
    flat = np.ascontiguousarray(heads).reshape(-1, heads.shape[-1])
    return rms_norm(flat, ones if weight is None else weight, eps).reshape(heads.shape)


def attend(q: Array, k: Array, v: Array, scale: float, softcap: float = 0.0, sinks: Array | None = None) -> Array:
    """softmax(scale * q . k) v for one row. q [heads, dim], k and v [seen, kv_heads, dim]; gives [heads, dim].

    Query head h reads kv head h // (heads // kv_heads). `softcap` > 0 bends the scores, `sinks` [heads] join the
    denominator.
    """
    scores = _scores(q, k, scale, softcap)
    largest = scores.max(axis=-1, keepdims=True)
    if sinks is None:
        weights = np.exp(scores - largest)
        weights /= weights.sum(axis=-1, keepdims=True)
    else:
        sink = sinks.reshape(*scores.shape[:2], 1)
        largest = np.maximum(largest, sink)
        weights = np.exp(scores - largest)
        weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sink - largest)
    return _average(weights, v)


def attend_some(q: Array, k: Array, v: Array, scale: float, softcap: float = 0.0) -> tuple[Array, Array]:
    """`attend` over the rows that a rank has, maybe none, with what it takes to merge it with that of others: (out
    [heads, dim], the natural logarithm of each softmax's denominator [heads]); (0, -inf) without a row."""
    if not len(k):
        return np.zeros_like(q), np.full(len(q), -np.inf, q.dtype)
    scores = _scores(q, k, scale, softcap)
    largest = scores.max(axis=-1, keepdims=True)
    powers = np.exp(scores - largest)
    total = powers.sum(axis=-1, keepdims=True)
    return _average(powers / total, v), (largest + np.log(total)).reshape(len(q))


def merge_parts(outs: Array, lses: Array, sinks: Array | None = None) -> Array:
    """Attention over all rows from that over each rank's: sum of exp(lse_r - L) out_r, L = log(sum of exp(lse_r)).

    outs [rows, ranks, heads, dim], lses [rows, ranks, heads], sinks [heads] (one more term of L); gives [rows, heads,
    dim]. The largest logarithm is taken off first, so no exp overflows; where no rank has a row, there is none to take
    off (-inf - -inf is no number), and the result is 0.
    """
    largest = lses.max(axis=1)
    if sinks is not None:
        largest = np.maximum(largest, sinks)
    largest = np.where(np.isneginf(largest), 0, largest)
    weights = np.exp(lses - largest[:, None])
    total = np.zeros_like(largest) if sinks is None else np.exp(sinks - largest)
    mixed = np.zeros_like(outs[:, 0])
    for rank in range(outs.shape[1]):
        total = total + weights[:, rank]
        mixed += weights[:, rank, :, None] * outs[:, rank]
    merged: Array = mixed / np.where(total > 0, total, 1)[..., None]
    return merged


def _scores(q: Array, k: Array, scale: float, softcap: float) -> Array:
    """What the softmax is of: [kv_heads, heads // kv_heads, seen]."""
    heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(kv_heads, heads // kv_heads, 1, dim)
    keys = np.ascontiguousarray(k.transpose(1, 0, 2))[:, None]
    scores: Array = np.vecdot(grouped, keys) * q.dtype.type(scale)
    return soft_cap(scores, softcap) if softcap else scores


def _average(weights: Array, v: Array) -> Array:
    """The values of each head by its weights [kv_heads, heads // kv_heads, seen]; gives [heads, dim]."""
    values = np.ascontiguousarray(v.transpose(1, 2, 0))[:, None]
    mixed: Array = np.vecdot(weights[:, :, None, :], values)
    return mixed.reshape(-1, v.shape[2])


def soft_cap(x: Array, cap: float) -> Array:
    """cap * tanh(x / cap)"""
    capped: Array = np.tanh(x / x.dtype.type(cap)) * x.dtype.type(cap)
    return capped


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)). Far below zero the exp is infinite and the quotient the right limit, 0; that is no error."""
    with np.errstate(over="ignore"):
        result: Array = 1 / (1 + np.exp(-x))
    return result


def softplus(x: Array) -> Array:
    """log(1 + exp(x)), without overflow."""
    result: Array = np.logaddexp(x, x.dtype.type(0))
    return result


def silu(x: Array) -> Array:
    """x * sigmoid(x), written as one quotient."""
    with np.errstate(over="ignore"):
        result: Array = x / (1 + np.exp(-x))
    return result


def silu_gate(gate: Array, up: Array) -> Array:
    """silu(gate) * up"""
    return silu(gate) * up


def gelu_gate(gate: Array, up: Array) -> Array:
    """gelu(gate) * up, in the form with tanh."""
    one = gate.dtype.type
    with np.errstate(over="ignore"):
        inner = one(math.sqrt(2 / math.pi)) * (gate + one(0.044715) * gate * gate * gate)
    gelu: Array = one(0.5) * gate * (1 + np.tanh(inner))
    return gelu * up


def swiglu_oai_gate(gate: Array, up: Array) -> Array:
    """g * sigmoid(1.702 g) * (u + 1), with g = gate held under 7 and u = up within +-7."""
    one = gate.dtype.type
    held, within = np.minimum(gate, one(7)), np.clip(up, one(-7), one(7))
    result: Array = held * sigmoid(one(1.702) * held) * (within + 1)
    return result


GATES: Mapping[str, Callable[[Array, Array], Array]] = {
    "silu": silu_gate,
    "gelu": gelu_gate,
    "swiglu_oai": swiglu_oai_gate,
}
"""act(gate) * up by the name of the activation. gate and up [rows, width]."""
