"""`qwen2`: Qwen 1.5, 2 and 2.5 dense, and distilled models on them.

As `llama`, but q, k and v always have biases, and rope pairs the halves of a head.
"""

from __future__ import annotations

from collections.abc import Mapping

from homeserve.models.config import ModelConfig
from homeserve.models.declare import attention, dense, layer_tensors
from homeserve.models.family import Family
from homeserve.models.keys import Keys
from homeserve.models.reading import read_core
from homeserve.models.stages import Stage


def config_from(metadata: Mapping[str, object]) -> ModelConfig:
    """Raises InvalidModelFile naming the key, UnsupportedModel."""
    return read_core(Keys(metadata, "qwen2"), interleaved=False)


def stage_facts(config: ModelConfig, layer: int) -> tuple[Stage, ...]:
    """Attention with biases, then a dense feed-forward."""
    return attention(config, layer, q_bias=True, k_bias=True, v_bias=True), dense(config, layer)


FAMILY = Family(name="qwen2", config_from=config_from, stage_facts=stage_facts, tensor_names=layer_tensors)
