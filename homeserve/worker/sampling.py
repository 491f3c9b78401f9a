"""Drawing a token from one row of logits: NumPy, one row at a time, so that no row can depend on its neighbours.

Before all steps a guide takes out what an answer must not have here (`homeserve.worker.guide`): a row comes with minus
infinity in these places. The steps, in this order; each sees what the one before left, and the filters see it
renormalised:

    repetition_penalty   tokens of prompt and output: positive logits divided by it, negative ones multiplied
    presence, frequency  tokens of the output: minus presence, minus frequency times their count
    dry                  tokens that would go on a repetition: minus what `homeserve.worker.past` says
    logit_bias           added
    forbidden            cannot be drawn while fewer than `min_tokens` are out, unless nothing else is left
    temperature          0: the largest logit, among equals the lowest id, and nothing below is looked at
    top_n_sigma          those within n standard deviations of the most likely one, of the model's own logits: what was
                         taken from a few tokens above makes it no wider
    top_k                the k most likely tokens
    typical_p            those nearest to the distribution's entropy, until their mass reaches it
    top_p                the most likely ones, until their mass reaches it
    min_p                those at least min_p times as likely as the most likely one
    xtc                  at some positions (`xtc_probability`): all but the least likely one of those that are at least
                         `xtc_threshold` likely are left out

It is llama.cpp's order, but for the bias, which comes first there, and for the temperature, which comes last there: a
threshold here is one of the distribution that is drawn from. Equal tokens are taken by lowest id. The remaining ones
lie on [0, 1) in order of id, as wide as they are likely, and the random number picks one.

**A random number is a function of (seed, position)**, `uniform`, and of nothing else: no generator has a state that a
restart, a preemption or another batch could disturb. Whether XTC acts is told by a stream of its own: were it the
number that draws, the tokens that XTC leaves would only ever be picked by its low part.

**Cost.** Greedy without penalties is one argmax. Of the filters and of DRY their modules tell.

Log-probabilities are the log-softmax of the logits as the model gave them, before any step above.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from homeserve.wire.records import Logprobs, Sampling
from homeserve.worker.filters import candidates, smallest
from homeserve.worker.past import Past

Floats = npt.NDArray[np.floating]

TEMPERATURE_MIN = 1e-5
"""Below it is greedy: the division would only overflow."""
TOP_LOGPROBS_MAX = 20
LOGPROB_MIN = -9999.0
"""Stands for minus infinity, which JSON has not."""

_RUN_LEN = 256
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_XTC = 0x5D588B656C078965
"""Turns the stream that draws into the one that says whether XTC acts."""


class NotANumber(Exception):
    """A row of logits holds NaN or nothing that can be drawn."""


def draw(logits: Floats, sampling: Sampling, past: Past | None, position: int, generated: int) -> int:
    """The token that takes `position`, from logits float32 `[vocab]` (not changed), in which a guide may have taken
    out what is not allowed.

    `past` is what came before it, where `sampling` looks back; `generated` is the number of output tokens so far.
    Raises NotANumber.
    """
    z = adjusted(logits, sampling, past, generated)
    best = int(z.argmax())
    if not z[best] > -math.inf:  # NaN wins every argmax, so this sees one anywhere in the row
        raise NotANumber(f"logits at position {position - 1}: {'NaN' if math.isnan(z[best]) else 'nothing to draw'}")
    if sampling.temperature < TEMPERATURE_MIN or z[best] == math.inf:
        return best
    xtc = sampling.xtc_probability > 0 and uniform(sampling.seed, position, _XTC) < sampling.xtc_probability
    ids, weights = candidates(logits, z, float(z[best]), sampling, xtc=xtc)
    index = _place(weights, uniform(sampling.seed, position))
    return index if ids is None else int(ids[index])


def logprobs(logits: Floats, token: int, top: int) -> Logprobs:
    """Log-softmax of `logits` float32 `[vocab]` at `token` and at its `top` largest entries."""
    best = float(logits.max())
    below = best - logits  # float32 [vocab], 0 for the most likely
    log_total = math.log(float(np.exp(-below).sum(dtype=np.float64)))
    largest = smallest(below, min(top, TOP_LOGPROBS_MAX))
    return Logprobs(
        token,
        _finite(-float(below[token]) - log_total),
        tuple((int(i), _finite(-float(below[i]) - log_total)) for i in largest),
    )


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) with 53 random bits: splitmix64 of the position, on one of the streams that the seed selects.
    Stream 0 draws."""
    state = _mix((seed + _GOLDEN) & _MASK)
    if stream:
        state = _mix(state ^ stream)
    return (_mix((state + (position + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def adjusted(logits: Floats, sampling: Sampling, past: Past | None, generated: int) -> Floats:
    """The logits that the steps before temperature leave; `logits` themselves where there are none."""
    forbids = bool(sampling.forbidden) and generated < sampling.min_tokens
    if past is None and not sampling.logit_bias and not forbids:
        return logits
    z = logits.copy()
    if past is not None:
        _punish(z, sampling, past)
    for token, bias in sampling.logit_bias:
        z[token] += bias
    if forbids:
        ids = list(sampling.forbidden)
        before = z[ids]
        z[ids] = -math.inf
        if sampling.guide is not None and z.max() == -math.inf:
            z[ids] = before
    return z


# ------------------------------------------------------------------------------------------------------------- steps


def _punish(z: Floats, sampling: Sampling, past: Past) -> None:
    if past.counts is not None:
        if sampling.repetition_penalty != 1.0:
            ids = past.counts.seen()
            seen = z[ids]
            z[ids] = np.where(seen > 0, seen / sampling.repetition_penalty, seen * sampling.repetition_penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            ids, times = past.counts.generated()
            z[ids] -= (sampling.presence_penalty + sampling.frequency_penalty * times).astype(z.dtype)
    if past.order is not None:
        ids, losses = past.order.penalties()
        z[ids] -= losses.astype(z.dtype)


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


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _finite(value: float) -> float:
    return max(value, LOGPROB_MIN)
