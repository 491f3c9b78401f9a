"""Stage kinds: what a layer of a model *declares*, as values.

A layer is a short sequence of stages. Each reads the residual stream (usually through a norm), computes, and owes the
stream one update:

    residual ──read──▶ [Attention | GatedDeltaNet] ──update──▶ residual ──read──▶ [Dense | Experts] ──update──▶ …

The rule this module keeps: a declaration is an immutable value made from the config and the *global* layer index. It
holds no tensor, no module and no plan, so the same value can serve the rank that runs the layer, a neighbour rank that
only has to know what it is next to, the layouts that shard it and the budget that counts it; and two of them can be
compared field by field. Families differ by the facts in these values, not by code: a field's default means "not there".

Pure: no clock, no file, no array.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class NormKind(Enum):
    """How a stage normalises what it reads. RMS: x / sqrt(mean(x^2) + eps) * weight."""

    RMS = "rms"
    NONE = "none"


class UpdateKind(Enum):
    """How a stage's output enters the residual stream.

    ADD    residual += output
    HOLD   the output waits for the next stage of the layer, which reads the same residual
    JOIN   residual += rms(output that waits + output)
    """

    ADD = "add"
    HOLD = "hold"
    JOIN = "join"


class Activation(Enum):
    """The function on the gate of a gated feed-forward: out = activation(gate) * up. Formulas: `backends.base`."""

    SILU = "silu"
    GELU = "gelu"
    SWIGLU_OAI = "swiglu_oai"


class RoutingFunc(Enum):
    """From a router's logits to the weights of experts. CHOSEN: softmax over the logits of the chosen ones alone."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    CHOSEN = "chosen"


@dataclass(frozen=True)
class Read:
    """How a stage reads the residual: through a norm of this kind and epsilon, before it computes. NONE: as it is."""

    eps: float
    norm: NormKind = NormKind.RMS


@dataclass(frozen=True)
class Update:
    """How a stage's output updates the residual. `post_norm_eps` > 0: the output is normalised first (RMS, by the stage
    itself, so that no other rank ever has to). `scales_residual`: the sum of the residual and the output is multiplied
    by a weight of one value, so that nothing is owed after it. `joined_eps`: of the norm of a JOIN."""

    kind: UpdateKind = UpdateKind.ADD
    post_norm_eps: float = 0.0
    joined_eps: float = 0.0
    scales_residual: bool = False


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
    truncate: bool = True
    """Whether the ends of the ramp are whole pairs (as GGML does it for every model)."""


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

    window       > 0: a query at position p sees keys j with p - j < window
    softcap      > 0: scores become softcap * tanh(score / softcap)
    q_norm, k_norm   an RMS norm with weights over each head, before rope, with the epsilon of `read`; v_norm: one
                 without weights
    sinks        one more logit a head, in the denominator only
    gated        q's projection gives [query | gate] for each head; the output is multiplied by sigmoid(gate)
    v_from_k     there is no v projection: v is the k projection before norm and rope
    kv_source    the global layer whose K and V this one reads; it has no k and v of its own then
    *_bias       which projections have a bias

    Widths: q `heads * head_dim` (twice that where gated), k and v `kv_heads * head_dim`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    read: Read
    rope: RopeFacts | None = None
    window: int = 0
    softcap: float = 0.0
    q_norm: bool = False
    k_norm: bool = False
    v_norm: bool = False
    sinks: bool = False
    gated: bool = False
    v_from_k: bool = False
    kv_source: int | None = None
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    output_bias: bool = False
    update: Update = Update()

    @property
    def q_step(self) -> int:
        """Values of q's projection for each head."""
        return self.head_dim * (2 if self.gated else 1)


@dataclass(frozen=True)
class GatedDeltaNet:
    """A recurrent mixer: causal convolution, gated delta rule, gated norm, output projection.

    Projections: q | k | v together (`key_heads * key_dim` twice, `value_heads * value_dim`), z, beta and alpha (one
    value for each value head). `tiled`: value head h goes with key head h % key_heads, otherwise with h // (value_heads
    // key_heads); a fact of the checkpoint, not of the model. The norms inside have the epsilon of `read`.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    read: Read
    tiled: bool = False
    update: Update = Update()

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v together."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


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


@dataclass(frozen=True)
class SharedExpert:
    """A feed-forward that every row runs beside its routed experts. `gated`: its output is multiplied by the sigmoid of
    one logit a row."""

    width: int
    gated: bool = False


@dataclass(frozen=True)
class Experts:
    """`count` feed-forwards of `width`, of which a router chooses `used` for each row.

    func, normalise, scale   how the router's logits become weights (`backends.base.Routing`)
    selection_bias           a value for each expert that counts in choosing only
    router_eps               > 0: the router reads the residual by a norm of its own, of this epsilon, whose weights are
                             divided by sqrt(hidden)
    gains                    a number for each expert that its output is multiplied by
    router_bias, *_bias      which matrices have biases
    """

    count: int
    used: int
    width: int
    read: Read
    activation: Activation = Activation.SILU
    func: RoutingFunc = RoutingFunc.SOFTMAX
    normalise: bool = True
    scale: float = 1.0
    selection_bias: bool = False
    router_eps: float = 0.0
    gains: bool = False
    router_bias: bool = False
    gate_bias: bool = False
    up_bias: bool = False
    down_bias: bool = False
    shared: SharedExpert | None = None
    update: Update = Update()


@dataclass(frozen=True)
class TokenInput:
    """What a table of this layer's own says of the token, let through by the residual:

        t = sqrt(width) table[token][first : first + width] + rms(project(e), eps * hidden)
        out = down(activation(gate(x)) * t)

    `e` is the row of the embedding table with its scale, `table` (`columns` wide) and `project` (as many rows) hold the
    parts of all layers one behind the other. The published formula has projections scaled by 1 / sqrt(hidden) and a sum
    scaled by 1 / sqrt(2), each in front of an RMS norm, which takes such a factor off again: what is left of it is in
    the epsilons, here and in the one behind this stage.
    """

    width: int
    columns: int
    first: int
    projection_eps: float
    read: Read
    activation: Activation = Activation.GELU
    update: Update = Update()


Stage = Attention | GatedDeltaNet | Dense | Experts | TokenInput
Mixer = Attention | GatedDeltaNet
FeedForward = Dense | Experts


def stage_name(stage: Stage) -> str:
    """The kind in one word, as messages and the budget print it."""
    match stage:
        case Attention():
            return "attention"
        case GatedDeltaNet():
            return "delta-net"
        case Dense():
            return "dense"
        case Experts():
            return "experts"
        case TokenInput():
            return "token-input"
