"""`gemma3`: five layers with a window, then one that sees everything; norms before and behind each stage.

Embeddings grow by sqrt(hidden); each head of q and k is normalised. Layers with a window have a rope base of their own
and no scaling. Queries are scaled by the head's width, in the largest model by hidden / heads. The weights of the norms
are those that multiply: what a file stores less one, the checkpoint gives whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from homeserve.models.config import ModelConfig
from homeserve.models.declare import attention, dense, layer_tensors
from homeserve.models.family import Family
from homeserve.models.keys import CONTEXT_MAX, Keys
from homeserve.models.reading import read_core, read_pattern, read_rope_swa
from homeserve.models.stages import Activation, Stage, Update

_LAYERS_OF_THE_LARGEST = 62


def config_from(metadata: Mapping[str, object]) -> ModelConfig:
    """Raises InvalidModelFile naming the key, UnsupportedModel."""
    keys = Keys(metadata, "gemma3")
    config = read_core(keys, interleaved=False)
    if config.layers == _LAYERS_OF_THE_LARGEST and not keys.has("attention.scale"):
        config = replace(config, attention_scale=math.sqrt(config.heads / config.hidden))
    return replace(
        config,
        window=keys.integer("attention.sliding_window", 0, low=0, high=CONTEXT_MAX),
        windowed=read_pattern(keys, config.layers, 6),
        rope_swa=read_rope_swa(keys, config.head_dim, config.rope, 10000.0),
        embedding_scale=math.sqrt(config.hidden),
        attention_softcap=keys.number("attn_logit_softcapping", 0.0, low=-1e-9),
        logit_softcap=keys.number("final_logit_softcapping", 0.0, low=-1e-9),
    )


def stage_facts(config: ModelConfig, layer: int) -> tuple[Stage, ...]:
    """Attention with head norms, then a dense feed-forward; both normalise what they give."""
    update = Update(post_norm_eps=config.norm_eps)
    mixer = attention(config, layer, q_norm=True, k_norm=True, update=update)
    return mixer, dense(config, layer, activation=Activation.GELU, update=update)


def tensor_names(config: ModelConfig, layer: int) -> Mapping[str, str]:
    return layer_tensors(config, layer, attn_post_norm="post_attention_norm", ffn_post_norm="post_ffw_norm")


FAMILY = Family(name="gemma3", config_from=config_from, stage_facts=stage_facts, tensor_names=tensor_names)
