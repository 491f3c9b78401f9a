"""Drawing a token from one row of logits: NumPy, one row at a time, so that no row can depend on its neighbours.

The steps, in this order; each sees what the one before left, and the filters see it renormalised:

    repetition_penalty   tokens of prompt and output: positive logits divided by it, negative ones multiplied
    presence, frequency  tokens of the output: minus presence, minus frequency times their count
    logit_bias           added
    forbidden            cannot be drawn while fewer than `min_tokens` are out
    temperature          0: the largest logit, among equals the lowest id, and nothing below is looked at
    top_k                the k most likely tokens
    typical_p            those nearest to the distribution's entropy, until their mass reaches it
    top_p                the most likely ones, until their mass reaches it
    min_p                those at least min_p times as likely as the most likely one

Equal tokens are taken by lowest id. The remaining ones lie on [0, 1) in order of id, as wide as they are likely, and
the random number picks one.

**The random number is a function of (seed, position)**, `uniform`, and of nothing else: no generator has a state that a
restart, a preemption or another batch could disturb.

**Cost.** Greedy without penalties is one argmax. The filters need an order, and sorting a whole vocabulary costs more
than a small model's layer; so `_first` and `_first_mass` look only at tokens within some distance of the best and widen
it until the prefix asked for lies inside. That is exact, not an estimate: what is left out comes later in the order.

Log-probabilities are the log-softmax of the logits as the model gave them, before any step above.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from homeserve.wire.records import Logprobs, Sampling

Floats = npt.NDArray[np.floating]
Ids = npt.NDArray[np.int64]

TEMPERATURE_MIN = 1e-5
"""Below it is greedy: the division would only overflow."""
TOP_LOGPROBS_MAX = 20
LOGPROB_MIN = -9999.0
"""Stands for minus infinity, which JSON has not."""

_WIDTHS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Distances from the best, in logits over temperature, at which to look for the end of a prefix."""
_SHELL_LEN = 512
_HALVINGS_MAX = 40
_RUN_LEN = 256
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


class NotANumber(Exception):
    """A row of logits holds NaN or nothing that can be drawn."""


class TokenCounts:
    """Which tokens a sequence has seen, and how often each was generated: what penalties need.

    Made of a sequence's *input* tokens alone, so it can be rebuilt from them at any time.
    """

    def __init__(self, vocab: int) -> None:
        self._count = np.zeros(vocab, np.int32)
        self._generated = np.zeros(vocab, np.int32)

    def add(self, tokens: npt.NDArray[np.int32], generated: npt.NDArray[np.bool_] | bool) -> None:
        """Count tokens, int32 `[n]`; `generated` tells which of them are output."""
        np.add.at(self._count, tokens, 1)
        np.add.at(self._generated, tokens, np.asarray(generated, np.int32))

    def take_back(self, tokens: npt.NDArray[np.int32], generated: npt.NDArray[np.bool_] | bool) -> None:
        """Undo an `add` of the same."""
        np.subtract.at(self._count, tokens, 1)
        np.subtract.at(self._generated, tokens, np.asarray(generated, np.int32))

    def seen(self) -> Ids:
        """Ids of all tokens so far."""
        return np.flatnonzero(self._count)

    def generated(self) -> tuple[Ids, npt.NDArray[np.int32]]:
        """Ids of generated tokens, and their counts."""
        ids = np.flatnonzero(self._generated)
        return ids, self._generated[ids]


def needs_counts(sampling: Sampling) -> bool:
    """Whether a request's penalties look back at its tokens."""
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def draw(logits: Floats, sampling: Sampling, counts: TokenCounts | None, position: int, generated: int) -> int:
    """The token that takes `position`, from logits float32 `[vocab]` (not changed).

    `generated` is the number of output tokens so far. Raises NotANumber.
    """
    z = _adjusted(logits, sampling, counts, generated)
    best = int(z.argmax())
    if not z[best] > -math.inf:  # NaN wins every argmax, so this sees one anywhere in the row
        raise NotANumber(f"logits at position {position - 1}: {'NaN' if math.isnan(z[best]) else 'nothing to draw'}")
    if sampling.temperature < TEMPERATURE_MIN or z[best] == math.inf:
        return best
    return _drawn(z, float(z[best]), sampling, uniform(sampling.seed, position))


def logprobs(logits: Floats, token: int, top: int) -> Logprobs:
    """Log-softmax of `logits` float32 `[vocab]` at `token` and at its `top` largest entries."""
    best = float(logits.max())
    below = best - logits  # float32 [vocab], 0 for the most likely
    log_total = math.log(float(np.exp(-below).sum(dtype=np.float64)))
    largest = _first(below, min(top, TOP_LOGPROBS_MAX))
    return Logprobs(
        token,
        _finite(-float(below[token]) - log_total),
        tuple((int(i), _finite(-float(below[i]) - log_total)) for i in largest),
    )


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: splitmix64 of the position, on the stream that the seed selects."""
    stream = _mix((seed + _GOLDEN) & _MASK)
    return (_mix((stream + (position + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def candidates(z: Floats, sampling: Sampling) -> tuple[Ids | None, Floats]:
    """What temperature and the filters leave of adjusted logits `[vocab]`: token ids ascending (None: all of them) and
    their weights float64, unnormalised. For `temperature` > 0."""
    return _filtered(z, float(z.max()), sampling)


# ------------------------------------------------------------------------------------------------------------- steps


def _adjusted(logits: Floats, sampling: Sampling, counts: TokenCounts | None, generated: int) -> Floats:
    forbids = bool(sampling.forbidden) and generated < sampling.min_tokens
    if counts is None and not sampling.logit_bias and not forbids:
        return logits
    z = logits.copy()
    if counts is not None:
        if sampling.repetition_penalty != 1.0:
            ids = counts.seen()
            seen = z[ids]
            z[ids] = np.where(seen > 0, seen / sampling.repetition_penalty, seen * sampling.repetition_penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            ids, times = counts.generated()
            z[ids] -= (sampling.presence_penalty + sampling.frequency_penalty * times).astype(z.dtype)
    for token, bias in sampling.logit_bias:
        z[token] += bias
    if forbids:
        z[list(sampling.forbidden)] = -math.inf
    return z


def _drawn(z: Floats, best: float, sampling: Sampling, chance: float) -> int:
    ids, weights = _filtered(z, best, sampling)
    index = _place(weights, chance)
    return index if ids is None else int(ids[index])


def _place(weights: Floats, chance: float) -> int:
    """Index of the weight that `chance` of all of them falls on. Never one without any weight.

    First the run of `_RUN_LEN` weights, by the sums of the runs, then the place in it. NumPy adds up a run many numbers
    at a time; a running sum of a whole vocabulary makes its additions one after the other.
    """
    whole = len(weights) // _RUN_LEN * _RUN_LEN
    sums = weights[:whole].reshape(-1, _RUN_LEN).sum(axis=1, dtype=np.float64)
    ends = np.cumsum(np.append(sums, weights[whole:].sum(dtype=np.float64)))
    run = _first_beyond(ends, chance * float(ends[-1]))
    before = float(ends[run - 1]) if run else 0.0
    first = run * _RUN_LEN
    edges = before + np.cumsum(weights[first : first + _RUN_LEN], dtype=np.float64)
    return first + _first_beyond(edges, chance * float(ends[-1]))


def _first_beyond(edges: Floats, target: float) -> int:
    # The target may be rounded up to the whole; the last place with any weight is meant then.
    return min(int(edges.searchsorted(target, side="right")), int(edges.searchsorted(edges[-1], side="left")))


def _filtered(z: Floats, best: float, sampling: Sampling) -> tuple[Ids | None, Floats]:
    with np.errstate(over="ignore"):
        below = (best - z) / z.dtype.type(sampling.temperature)  # [vocab], 0 for the most likely
    ids: Ids | None = None
    if 0 < sampling.top_k < len(z):
        ids = np.sort(_first(below, sampling.top_k))
    if sampling.typical_p < 1.0:
        ids = _typical(below, ids, sampling.typical_p)
    if sampling.top_p < 1.0:
        ids = _nucleus(below, ids, sampling.top_p)
    if sampling.min_p > 0.0:
        reach = -math.log(min(sampling.min_p, 1.0))
        ids = np.flatnonzero(below <= reach) if ids is None else ids[below[ids] <= below[ids].min() + reach]
    return ids, _weights(below, ids)


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


def _weights(below: Floats, ids: Ids | None) -> Floats:
    """exp(-below): float32 for the whole vocabulary, float64 for a selection of it."""
    return np.exp(-below) if ids is None else np.exp(-below[ids].astype(np.float64))


# ------------------------------------------------------------------------------------------------------------- order


def _first(keys: Floats, count: int) -> Ids:
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


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _finite(value: float) -> float:
    return max(value, LOGPROB_MIN)
