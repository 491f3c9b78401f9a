"""`qwen3`: Qwen 3 dense.

As `llama`, but each head of q and k is normalised before rope, rope pairs the halves of a head, and a head's width is
free (`attention.key_length`).
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
    return read_core(Keys(metadata, "qwen3"), interleaved=False)


def stage_facts(config: ModelConfig, layer: int) -> tuple[Stage, ...]:
    """Attention with head norms, then a dense feed-forward."""
    return attention(config, layer, q_norm=True, k_norm=True), dense(config, layer)


FAMILY = Family(name="qwen3", config_from=config_from, stage_facts=stage_facts, tensor_names=layer_tensors)
