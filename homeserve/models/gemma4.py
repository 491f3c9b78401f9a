"""`gemma4`: layers with a window, every few one that sees everything; with or without inputs by token, and experts.

Embeddings grow by sqrt(hidden), scores are not scaled, each head of q, k and v is normalised (v without weights), norms
lie before and behind each stage, with weights as stored. Layers that see everything have wider heads, perhaps fewer kv
heads, and no v projection: v is k before its norm. Their rope turns a part of a head, by a tensor of factors; windowed
layers have a base of their own. The last layers may read the K and V of the last one of their kind. A layer ends with a
factor on the residual.

Experts lie beside the dense feed-forward: both read the same residual, each by a norm of its own and with one behind
it, and the sum is normalised once more. The router has a third norm of the residual, without weights but with a factor
for each column that is divided by sqrt(hidden); what an expert gives is multiplied by a number of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from homeserve.models.config import ModelConfig
from homeserve.models.declare import attention, dense, experts, layer_tensors, token_input
from homeserve.models.family import Family
from homeserve.models.keys import CONTEXT_MAX, Keys
from homeserve.models.reading import has_experts, read_core, read_experts, read_pattern, read_rope_swa
from homeserve.models.stages import Activation, Stage, Update, UpdateKind

_GAINS = "ffn_down_exps.scale"


def config_from(metadata: Mapping[str, object]) -> ModelConfig:
    """Raises InvalidModelFile naming the key, UnsupportedModel."""
    keys = Keys(metadata, "gemma4")
    routed = read_experts(keys, beside=True) if has_experts(keys) else None
    config = read_core(keys, interleaved=False, experts=routed)
    swa_dim = keys.integer("attention.key_length_swa", config.head_dim)
    return replace(
        config,
        attention_scale=1.0,
        window=keys.integer("attention.sliding_window", high=CONTEXT_MAX),
        windowed=read_pattern(keys, config.layers, 6),
        head_dim_swa=swa_dim,
        rope_swa=read_rope_swa(keys, swa_dim, config.rope, 10000.0),
        kv_shared=keys.integer("attention.shared_kv_layers", 0, low=0, high=config.layers - 1),
        token_input=keys.integer("embedding_length_per_layer_input", 0, low=0),
        embedding_scale=math.sqrt(config.hidden),
        logit_softcap=keys.number("final_logit_softcapping", 0.0, low=-1e-9),
    )


def stage_facts(config: ModelConfig, layer: int) -> tuple[Stage, ...]:
    """Attention, a feed-forward in one or two stages, perhaps an input by token; the last of them scales the
    residual."""
    update = Update(post_norm_eps=config.norm_eps)
    mixer = attention(
        config,
        layer,
        q_norm=True,
        k_norm=True,
        v_norm=True,
        v_from_k=_has_no_v(config, layer),
        kv_source=_kv_source(config, layer),
        update=update,
    )
    scales = f"blk.{layer}.layer_output_scale.weight" in config.optional
    last = replace(update, scales_residual=scales)
    if not config.token_input:
        return mixer, *_feed_forward(config, layer, last)
    told = token_input(config, layer, update=replace(last, post_norm_eps=2 * config.norm_eps))
    return mixer, *_feed_forward(config, layer, update), told


def _feed_forward(config: ModelConfig, layer: int, update: Update) -> tuple[Stage, ...]:
    """A dense one; where the config has experts, these join it."""
    gelu = Activation.GELU
    if config.experts is None:
        return (dense(config, layer, activation=gelu, update=update),)
    waits = Update(UpdateKind.HOLD, post_norm_eps=config.norm_eps)
    joins = replace(update, kind=UpdateKind.JOIN, joined_eps=config.norm_eps)
    gains = f"blk.{layer}.{_GAINS}" in config.optional
    routed = experts(config, layer, activation=gelu, router_eps=config.norm_eps, gains=gains, update=joins)
    return dense(config, layer, activation=gelu, update=waits), routed


def tensor_names(config: ModelConfig, layer: int) -> Mapping[str, str]:
    behind = {"attn_post_norm": "post_attention_norm", "ffn_post_norm": "post_ffw_norm", "token_post_norm": "post_norm"}
    own: dict[str, str] = {}
    if config.experts is not None:
        own = {name: f"blk.{layer}.{name}" for name in ("ffn_gate_inp.scale", _GAINS)}
        behind |= {"ffn_post_norm": "post_ffw_norm_1", "ffn_experts_norm": "pre_ffw_norm_2"}
        behind |= {"ffn_experts_post_norm": "post_ffw_norm_2", "ffn_joined_norm": "post_ffw_norm"}
    return {**layer_tensors(config, layer, **behind), **own}


def _kv_source(config: ModelConfig, layer: int) -> int | None:
    """The last layer of the same kind that has K and V of its own, where this one has none."""
    own = config.layers - config.kv_shared
    if layer < own:
        return None
    return max((at for at in range(own) if config.is_windowed(at) == config.is_windowed(layer)), default=None)


def _has_no_v(config: ModelConfig, layer: int) -> bool:
    """Only layers that see everything, and have K and V of their own, may go without."""
    if config.is_windowed(layer) or _kv_source(config, layer) is not None:
        return False
    tensors = (f"blk.{layer}.attn_v.weight", f"blk.{layer}.attn_qkv.weight")
    return not any(name in config.optional for name in tensors)


FAMILY = Family(name="gemma4", config_from=config_from, stage_facts=stage_facts, tensor_names=tensor_names)
