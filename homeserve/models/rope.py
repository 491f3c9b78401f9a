"""From rope facts to the frequencies that an op carries: all scaling ends here.

Backends rotate pair i by `position * frequencies[i]` and multiply by `magnitude`; which kind of scaling made these
numbers is no business of theirs. Formulas: linear and yarn as GGML computes them, llama-3 as `transformers` does.
Computed in double precision; pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from backends.base import Rope
from homeserve.models.stages import LinearScaling, Llama3Scaling, RopeFacts, Scaling, YarnScaling


def resolve_rope(facts: RopeFacts, factors: Sequence[float] = ()) -> Rope:
    """The op-level rope of `facts`. `factors` (dims/2 numbers, or none) divide the unscaled frequencies first."""
    pairs = facts.dims // 2
    assert not factors or len(factors) == pairs, "the caller checked the factor tensor's shape"
    plain = [facts.base ** (-2.0 * i / facts.dims) for i in range(pairs)]
    if factors:
        plain = [theta / factor for theta, factor in zip(plain, factors, strict=True)]
    scaled = _scale(plain, facts)
    return Rope(interleaved=facts.interleaved, frequencies=tuple(scaled), magnitude=_magnitude(facts.scaling))


def _scale(plain: list[float], facts: RopeFacts) -> list[float]:
    match facts.scaling:
        case None:
            return plain
        case LinearScaling(factor=factor):
            return [theta / factor for theta in plain]
        case Llama3Scaling() as llama3:
            return [theta / _llama3_divisor(theta, llama3) for theta in plain]
        case YarnScaling() as yarn:
            return _yarn(plain, facts, yarn)


def _llama3_divisor(theta: float, scaling: Llama3Scaling) -> float:
    wavelength = 2.0 * math.pi / theta
    if wavelength < scaling.original_context / scaling.high_freq:
        return 1.0
    if wavelength > scaling.original_context / scaling.low_freq:
        return scaling.factor
    smooth = (scaling.original_context / wavelength - scaling.low_freq) / (scaling.high_freq - scaling.low_freq)
    return 1.0 / ((1.0 - smooth) / scaling.factor + smooth)


def _yarn(plain: list[float], facts: RopeFacts, scaling: YarnScaling) -> list[float]:
    """Pairs that turn more than beta_fast times in the original context keep their frequency; those that turn less
    than beta_slow times are interpolated; the ramp between is linear in the pair's index."""
    low, high = (_yarn_pair(beta, facts, scaling) for beta in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(0.0, low), min(facts.dims - 1.0, high)
    scaled = []
    for i, theta in enumerate(plain):
        kept = 1.0 - min(1.0, max(0.0, (i - low) / max(0.001, high - low)))
        kept *= scaling.ext_factor
        scaled.append(theta / scaling.factor * (1.0 - kept) + theta * kept)
    return scaled


def _yarn_pair(turns: float, facts: RopeFacts, scaling: YarnScaling) -> float:
    """Index of the pair that turns `turns` times within the original context."""
    return facts.dims * math.log(scaling.original_context / (turns * 2.0 * math.pi)) / (2.0 * math.log(facts.base))


def _magnitude(scaling: Scaling | None) -> float:
    if not isinstance(scaling, YarnScaling):
        return 1.0
    grown = 0.1 * math.log(scaling.factor)
    return (grown + 1.0) / (grown * scaling.log_multiplier + 1.0) * scaling.attn_factor
