"""`gemma2`: every other layer with a window, soft caps on scores and logits, norms before and behind each stage.

Embeddings grow by sqrt(hidden). Queries are scaled by the head's width, in the largest model by hidden / heads. Norm
weights as in `gemma3`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from homeserve.models.config import ModelConfig
from homeserve.models.declare import attention, dense, layer_tensors
from homeserve.models.family import Family
from homeserve.models.keys import CONTEXT_MAX, Keys
from homeserve.models.reading import read_core, read_pattern
from homeserve.models.stages import Activation, Stage, Update

_LAYERS_OF_THE_LARGEST = 46


def config_from(metadata: Mapping[str, object]) -> ModelConfig:
    """Raises InvalidModelFile naming the key, UnsupportedModel."""
    keys = Keys(metadata, "gemma2")
    config = read_core(keys, interleaved=False)
    if config.layers == _LAYERS_OF_THE_LARGEST and not keys.has("attention.scale"):
        config = replace(config, attention_scale=math.sqrt(config.heads / config.hidden))
    return replace(
        config,
        window=keys.integer("attention.sliding_window", 4096, low=0, high=CONTEXT_MAX),
        windowed=read_pattern(keys, config.layers, 2),
        embedding_scale=math.sqrt(config.hidden),
        attention_softcap=keys.number("attn_logit_softcapping", 50.0, low=-1e-9),
        logit_softcap=keys.number("final_logit_softcapping", 30.0, low=-1e-9),
    )


def stage_facts(config: ModelConfig, layer: int) -> tuple[Stage, ...]:
    """Attention, then a dense feed-forward; both normalise what they give."""
    update = Update(post_norm_eps=config.norm_eps)
    mixer = attention(config, layer, update=update)
    return mixer, dense(config, layer, activation=Activation.GELU, update=update)


def tensor_names(config: ModelConfig, layer: int) -> Mapping[str, str]:
    return layer_tensors(config, layer, attn_post_norm="post_attention_norm", ffn_post_norm="post_ffw_norm")


FAMILY = Family(name="gemma2", config_from=config_from, stage_facts=stage_facts, tensor_names=tensor_names)
