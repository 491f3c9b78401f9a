"""Filters: which tokens of a row can be drawn at all, and how likely each is then.

A row is looked at as `below` float `[vocab]`: how far each logit, over temperature, lies below the largest one. What a
filter leaves are `ids`, ascending; None stands for the whole vocabulary.

**Cost.** The filters need an order, and sorting a whole vocabulary costs more than a small model's layer; so
`smallest` and `_first_mass` look only at tokens within some distance of the best and widen it until the prefix that was
asked for lies inside. That is exact, not an estimate: what is left out comes later in the order.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from homeserve.wire.records import Sampling

Floats = npt.NDArray[np.floating]
Ids = npt.NDArray[np.int64]

_WIDTHS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Distances from the best, in logits over temperature, at which to look for the end of a prefix."""
_SHELL_LEN = 512
_HALVINGS_MAX = 40


def candidates(
    logits: Floats, z: Floats, best: float, sampling: Sampling, *, xtc: bool = False
) -> tuple[Ids | None, Floats]:
    """What temperature and the filters leave of adjusted logits `z` `[vocab]`, whose largest is `best`: token ids, and
    their weights (float32 where no filter looked at them, else float64), unnormalised. For `temperature` > 0.

    `logits` `[vocab]` are the model's own. `xtc`: whether the top choices are left out this time.
    """
    with np.errstate(over="ignore"):
        below = (best - z) / z.dtype.type(sampling.temperature)  # [vocab], 0 for the most likely
    ids: Ids | None = None
    if sampling.top_n_sigma > 0.0:
        ids = _within_sigmas(below, logits, sampling)
    if 0 < sampling.top_k < (len(z) if ids is None else len(ids)):
        ids = _top(below, ids, sampling.top_k)
    if sampling.typical_p < 1.0:
        ids = _typical(below, ids, sampling.typical_p)
    if sampling.top_p < 1.0:
        ids = _nucleus(below, ids, sampling.top_p)
    if sampling.min_p > 0.0:
        reach = -math.log(min(sampling.min_p, 1.0))
        ids = np.flatnonzero(below <= reach) if ids is None else ids[below[ids] <= below[ids].min() + reach]
    weights = _weights(below, ids)
    return _without_top_choices(ids, weights, sampling.xtc_threshold) if xtc else (ids, weights)


def _within_sigmas(below: Floats, logits: Floats, sampling: Sampling) -> Ids:
    sigma = float(logits[np.isfinite(logits)].std(dtype=np.float64))
    return np.flatnonzero(below <= sampling.top_n_sigma * sigma / sampling.temperature)


def _top(below: Floats, ids: Ids | None, count: int) -> Ids:
    if ids is None:
        return np.sort(smallest(below, count))
    return np.sort(ids[smallest(below[ids], count)])


def _nucleus(below: Floats, ids: Ids | None, mass: float) -> Ids:
    weights = _weights(below, ids)
    keys = below if ids is None else below[ids]
    kept = _first_mass(keys, weights, mass)
    return kept if ids is None else ids[kept]


def _typical(below: Floats, ids: Ids | None, mass: float) -> Ids:
    support = np.flatnonzero(_weights(below, ids) > 0)
    ids = support if ids is None else ids[support]
    weights = _weights(below, ids)
    total = weights.sum()
    surprise = below[ids] + math.log(total)
    entropy = float((weights * surprise).sum() / total)
    return ids[_first_mass(np.abs(surprise - entropy), weights, mass)]


def _without_top_choices(ids: Ids | None, weights: Floats, threshold: float) -> tuple[Ids | None, Floats]:
    """Of those that are at least `threshold` likely, only the least likely one stays (of equals the highest id)."""
    least_weight = threshold * float(weights.sum(dtype=np.float64))
    likely = np.flatnonzero((weights >= least_weight) & (weights > 0))
    if len(likely) < 2:
        return ids, weights
    least = np.flatnonzero(weights[likely] == weights[likely].min())[-1]
    kept = np.ones(len(weights), bool)
    kept[np.delete(likely, least)] = False
    return (np.flatnonzero(kept) if ids is None else ids[kept]), weights[kept]


def _weights(below: Floats, ids: Ids | None) -> Floats:
    """exp(-below): float32 for the whole vocabulary, float64 for a selection of it."""
    return np.exp(-below) if ids is None else np.exp(-below[ids].astype(np.float64))


# ------------------------------------------------------------------------------------------------------------- order


def smallest(keys: Floats, count: int) -> Ids:
    """Indices of the `count` smallest keys in ascending order; equal keys by index."""
    if count <= 0:
        return np.empty(0, np.int64)
    count = min(count, len(keys))
    least = float(keys.min())
    for width in _WIDTHS:
        head = np.flatnonzero(keys <= least + width)
        if len(head) >= count:
            break
    else:
        head = np.arange(len(keys))
    if len(head) > 8 * count + 1024:  # a flat row: find the last key that counts before sorting
        last = np.partition(keys[head], count - 1)[count - 1]
        head = head[keys[head] <= last]
    return head[np.argsort(keys[head], kind="stable")[:count]]


def _first_mass(keys: Floats, weights: Floats, mass: float) -> Ids:
    """Indices, ascending, of the smallest keys (equal ones by index) whose weights sum to `mass` of all; at least one.

    Only the shell between a distance that is too near and one that is far enough needs an order; it is halved until
    sorting it costs nothing.
    """
    target = mass * float(weights.sum(dtype=np.float64))
    least = float(keys.min())
    near, inner = -math.inf, 0.0
    for far in (*(least + width for width in _WIDTHS), float(keys[keys < math.inf].max())):
        shell = np.flatnonzero((keys > near) & (keys <= far))
        outer = inner + float(weights[shell].sum(dtype=np.float64))
        if outer >= target:
            break
        near, inner = far, outer
    for _ in range(_HALVINGS_MAX):
        if len(shell) <= _SHELL_LEN:
            break
        middle = (max(near, least) + far) / 2
        below = keys[shell] <= middle
        reached = inner + float(weights[shell[below]].sum(dtype=np.float64))
        if reached >= target:
            far, shell = middle, shell[below]
        else:
            near, inner, shell = middle, reached, shell[~below]
    order = shell[np.argsort(keys[shell], kind="stable")]
    needed = int((inner + np.cumsum(weights[order], dtype=np.float64)).searchsorted(target, side="left")) + 1
    return np.sort(np.concatenate((np.flatnonzero(keys <= near), order[:needed])))
