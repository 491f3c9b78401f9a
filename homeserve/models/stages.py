"""Stage kinds: what a layer of a model *declares*, as values.

A layer is a short sequence of stages. Each reads the residual stream (usually through a norm), computes, and owes the
stream one update:

    residual ──read──▶ [Attention] ──update──▶ residual ──read──▶ [Dense] ──update──▶ residual ──▶ next layer

The rule this module keeps: a declaration is an immutable value made from the config and the *global* layer index. It
holds no tensor, no module and no plan, so the same value can serve the rank that runs the layer, a neighbour rank that
only has to know what it is next to, the layouts that shard it and the budget that counts it; and two of them can be
compared field by field. Families differ by the facts in these values, not by code. A later family adds fields with a
default that means "not there" (a norm on q and k, a soft cap, sinks, an output gate) or a new kind beside these two.

Pure: no clock, no file, no array.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class NormKind(Enum):
    """How a stage normalises what it reads. RMS: x / sqrt(mean(x^2) + eps) * weight."""

    RMS = "rms"


class UpdateKind(Enum):
    """How a stage's output enters the residual stream. ADD: residual += output."""

    ADD = "add"


class Activation(Enum):
    """The function on the gate of a gated feed-forward: out = activation(gate) * up."""

    SILU = "silu"


@dataclass(frozen=True)
class Read:
    """How a stage reads the residual: through a norm of this kind and epsilon, before it computes."""

    eps: float
    norm: NormKind = NormKind.RMS


@dataclass(frozen=True)
class Update:
    """How a stage's output updates the residual."""

    kind: UpdateKind = UpdateKind.ADD


# ------------------------------------------------------------------------------------------------ rotary positions


@dataclass(frozen=True)
class LinearScaling:
    """Every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class YarnScaling:
    """Long wavelengths are divided by `factor`, short ones kept, a ramp between; q and k grow by a magnitude."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    ext_factor: float = 1.0
    attn_factor: float = 1.0
    log_multiplier: float = 0.0


@dataclass(frozen=True)
class Llama3Scaling:
    """Wavelengths over `original_context / low_freq` are divided by `factor`, those under `/ high_freq` kept."""

    factor: float
    low_freq: float
    high_freq: float
    original_context: int


Scaling = LinearScaling | YarnScaling | Llama3Scaling


@dataclass(frozen=True)
class RopeFacts:
    """Rotary embedding of the first `dims` of a head.

    `interleaved` pairs dims (2i, 2i+1), otherwise (i, i + dims/2). Pair i turns by `position * base^(-2i/dims)`, before
    `scaling`. `factor_tensor` names a tensor of dims/2 divisors of the frequencies (`""`: none); files that carry one
    have their scaling in it.
    """

    dims: int
    base: float
    interleaved: bool
    scaling: Scaling | None = None
    factor_tensor: str = ""


# ---------------------------------------------------------------------------------------------------------- stages


@dataclass(frozen=True)
class Attention:
    """Causal softmax attention with grouped kv heads: q, k, v projections, rope, attention, output projection.

    `window` > 0: a query at position p sees keys j with p - j < window. The four flags say which projections have a
    bias. Widths: q and output `heads * head_dim`, k and v `kv_heads * head_dim`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    read: Read
    rope: RopeFacts | None = None
    window: int = 0
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    output_bias: bool = False
    update: Update = Update()


@dataclass(frozen=True)
class Dense:
    """A gated feed-forward of `width`: down(activation(gate(x)) * up(x)). The flags say which matrices have a bias."""

    width: int
    read: Read
    activation: Activation = Activation.SILU
    gate_bias: bool = False
    up_bias: bool = False
    down_bias: bool = False
    update: Update = Update()


Stage = Attention | Dense


def stage_name(stage: Stage) -> str:
    """The kind in one word, as messages and the budget print it."""
    return "attention" if isinstance(stage, Attention) else "dense"
