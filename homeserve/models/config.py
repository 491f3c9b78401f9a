"""Hyper-parameters of a model as values; `keys` and `reading` make them from metadata.

What metadata cannot say, the list of tensors does: whether the head is tied, which projections have a bias, whether a
rope factor tensor is there. `settle` asks it once, in one place, and the declaration, the builder and the budget read
the settled config; none of them looks at the tensors again to decide what a layer is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from homeserve.models.stages import RopeFacts, RoutingFunc

TOKEN_EMBD = "token_embd.weight"
OUTPUT_NORM = "output_norm.weight"
OUTPUT = "output.weight"
TOKEN_INPUT = ("per_layer_token_embd.weight", "per_layer_model_proj.weight", "per_layer_proj_norm.weight")
"""Of all layers with a `stages.TokenInput`: table, projection, the projection's norm."""
OUTPUT_BIAS = "output.bias"
ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True)
class DeltaFacts:
    """Of gated delta nets: the numbers of `stages.GatedDeltaNet`."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    tiled: bool


@dataclass(frozen=True)
class ExpertFacts:
    """Of layers with experts: the numbers of `stages.Experts`. `shared_width` is 0 without a shared expert. `beside`: a
    dense feed-forward of its own width, `ModelConfig.layer_ffn`, lies beside them."""

    count: int
    used: int
    width: int
    shared_width: int = 0
    func: RoutingFunc = RoutingFunc.SOFTMAX
    normalise: bool = True
    scale: float = 1.0
    beside: bool = False

    @property
    def columns(self) -> int:
        """Inner columns that one row runs."""
        return self.used * self.width + self.shared_width


@dataclass(frozen=True)
class ModelConfig:
    """What a family's declarations are made from.

    `layers` counts the trunk; `nextn` drafting blocks lie behind it in the file. Per-layer numbers are tuples with an
    entry for each block of the file; `heads`, `kv_heads` and `ffn` give the largest of them. `optional` holds the
    optional tensors that the checkpoint has (see `settle`); before that it is empty and `tied_head` is True.

    window           0 is full attention; `windowed` says which layers have one (empty: all)
    rope_swa, head_dim_swa   of the windowed layers where they differ (None, 0: they do not)
    recurrent        which layers mix by a delta net (empty: none)
    kv_shared        so many last layers read the K and V of an earlier one
    token_input      width of the layers' own inputs by token; 0: there are none
    softcaps         0 is none
    """

    arch: str
    layers: int
    hidden: int
    vocab: int
    context: int
    layer_heads: tuple[int, ...]
    layer_kv_heads: tuple[int, ...]
    layer_ffn: tuple[int, ...]
    head_dim: int
    norm_eps: float
    rope: RopeFacts
    attention_scale: float
    window: int = 0
    windowed: tuple[bool, ...] = ()
    rope_swa: RopeFacts | None = None
    head_dim_swa: int = 0
    recurrent: tuple[bool, ...] = ()
    delta: DeltaFacts | None = None
    experts: ExpertFacts | None = None
    kv_shared: int = 0
    token_input: int = 0
    embedding_scale: float = 1.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    nextn: int = 0
    tied_head: bool = True
    optional: frozenset[str] = frozenset()

    @property
    def heads(self) -> int:
        return max(self.layer_heads)

    @property
    def kv_heads(self) -> int:
        return max(self.layer_kv_heads)

    @property
    def ffn(self) -> int:
        """Inner columns of the feed-forwards that one row runs in a layer."""
        beside = self.experts.columns if self.experts is not None and self.experts.beside else 0
        return max(self.layer_ffn) + beside

    def is_windowed(self, layer: int) -> bool:
        return self.window > 0 and (not self.windowed or self.windowed[layer])

    def is_recurrent(self, layer: int) -> bool:
        return bool(self.recurrent) and self.recurrent[layer]

    def layer_rope(self, layer: int) -> RopeFacts:
        return self.rope_swa if self.rope_swa is not None and self.is_windowed(layer) else self.rope

    def layer_head_dim(self, layer: int) -> int:
        return self.head_dim_swa if self.head_dim_swa and self.is_windowed(layer) else self.head_dim


def settle(config: ModelConfig, tensor_names: Collection[str]) -> ModelConfig:
    """The same config with everything decided that only the checkpoint's tensors can decide."""
    optional = frozenset(name for name in tensor_names if name.endswith(_DECIDING) or name in (OUTPUT, ROPE_FREQS))
    rope = replace(config.rope, factor_tensor=ROPE_FREQS if ROPE_FREQS in optional else "")
    nextn = config.nextn if any(name.endswith(NEXTN_JOIN) for name in optional) else 0
    return replace(config, optional=optional, tied_head=OUTPUT not in optional, rope=rope, nextn=nextn)


NEXTN_JOIN = ".nextn.eh_proj.weight"
"""A file without it has no drafting block, whatever its keys say (repacked ones keep them)."""
_DECIDING = (
    *(".bias", ".attn_v.weight", ".attn_qkv.weight", ".layer_output_scale.weight", ".ffn_down_exps.scale"),
    NEXTN_JOIN,
)
