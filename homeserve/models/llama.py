"""`llama`: Llama 2 and 3, SmolLM2, Mistral, and what was converted under that name.

Pre-norm blocks of grouped attention and a SiLU-gated feed-forward. GGUF files have the rows of q and k permuted so that
rope pairs neighbouring dims. Llama-3 rope scaling comes as the tensor `rope_freqs.weight` in GGUF and as four keys from
a `config.json`. Files of this architecture with experts (Mixtral) are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from homeserve.errors import UnsupportedModel
from homeserve.models.config import CONTEXT_MAX, LAYERS_MAX, Keys, ModelConfig, read_rope, read_vocab
from homeserve.models.family import Family
from homeserve.models.stages import Attention, Dense, Read, Stage

_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_NORMS = ("attn_norm", "ffn_norm")


def config_from(metadata: Mapping[str, object]) -> ModelConfig:
    """Raises CheckpointError naming the key, UnsupportedModel for what this family's files may ask for and we lack."""
    keys = Keys(metadata, "llama")
    layers = keys.integer("block_count", high=LAYERS_MAX)
    hidden = keys.integer("embedding_length")
    _refuse_what_is_missing(keys)
    heads = keys.per_layer("attention.head_count", layers)
    kv_heads = keys.per_layer("attention.head_count_kv", layers, heads)
    for query, kv in zip(heads, kv_heads, strict=True):
        if query % kv:
            raise keys.error("attention.head_count_kv", f"{query} query heads cannot share {kv} kv heads evenly")
    head_dim = _head_dim(keys, hidden, heads[0])
    return ModelConfig(
        arch="llama",
        layers=layers,
        hidden=hidden,
        vocab=read_vocab(keys),
        context=keys.integer("context_length", high=CONTEXT_MAX),
        layer_heads=heads,
        layer_kv_heads=kv_heads,
        layer_ffn=keys.per_layer("feed_forward_length", layers),
        head_dim=head_dim,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon", high=1.0),
        rope=read_rope(keys, head_dim, interleaved=True),
        attention_scale=keys.number("attention.scale", 0.0, low=-1e-9) or 1.0 / math.sqrt(head_dim),
        window=keys.integer("attention.sliding_window", 0, low=0, high=CONTEXT_MAX),
    )


def stage_facts(config: ModelConfig, layer: int) -> tuple[Stage, ...]:
    """Attention, then a dense feed-forward: every layer declares both."""
    names = tensor_names(config, layer)

    def biased(role: str) -> bool:
        return names[f"{role}.bias"] in config.optional

    read = Read(eps=config.norm_eps)
    attention = Attention(
        heads=config.layer_heads[layer],
        kv_heads=config.layer_kv_heads[layer],
        head_dim=config.head_dim,
        scale=config.attention_scale,
        read=read,
        rope=config.rope,
        window=config.window,
        q_bias=biased("attn_q") or biased("attn_qkv"),
        k_bias=biased("attn_k") or biased("attn_qkv"),
        v_bias=biased("attn_v") or biased("attn_qkv"),
        output_bias=biased("attn_output"),
    )
    dense = Dense(
        width=config.layer_ffn[layer],
        read=read,
        gate_bias=biased("ffn_gate"),
        up_bias=biased("ffn_up"),
        down_bias=biased("ffn_down"),
    )
    return attention, dense


def tensor_names(config: ModelConfig, layer: int) -> Mapping[str, str]:
    """Role -> tensor. `attn_qkv` may stand for the three projections together."""
    block = f"blk.{layer}"
    names = {role: f"{block}.{role}.weight" for role in (*_NORMS, *_MATRICES, "attn_qkv")}
    return names | {f"{role}.bias": f"{block}.{role}.bias" for role in (*_MATRICES, "attn_qkv")}


FAMILY = Family(
    name="llama",
    config_from=config_from,
    stage_facts=stage_facts,
    tensor_names=tensor_names,
    # Old converters stored the rope frequencies of each layer; they follow from rope.freq_base.
    ignored=("attn_rot_embd.weight",),
)


def _head_dim(keys: Keys, hidden: int, heads: int) -> int:
    if not keys.has("attention.key_length") and hidden % heads:
        raise keys.error("attention.key_length", f"is missing, and {hidden} does not divide into {heads} heads")
    head_dim = keys.integer("attention.key_length", max(1, hidden // heads))
    value_dim = keys.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise UnsupportedModel(
            f"llama.attention.value_length is {value_dim} and key_length {head_dim}: they must be equal for llama",
            field="llama.attention.value_length",
        )
    return head_dim


def _refuse_what_is_missing(keys: Keys) -> None:
    experts = keys.integer("expert_count", 0, low=0)
    if experts:
        raise UnsupportedModel(
            f"llama.expert_count is {experts}: mixture-of-experts files of architecture llama (Mixtral) cannot be run",
            field="llama.expert_count",
            fix="use a dense model",
        )
    if not keys.flag("attention.causal", True):
        raise UnsupportedModel(
            "llama.attention.causal is false: models that see later tokens cannot generate",
            field="llama.attention.causal",
        )
