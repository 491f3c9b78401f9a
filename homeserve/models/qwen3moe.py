"""`qwen3moe`: Qwen 3 with experts in every layer (softmax over all, the chosen weights normalised)."""

from __future__ import annotations

from collections.abc import Mapping

from homeserve.models.config import ModelConfig
from homeserve.models.declare import attention, experts, layer_tensors
from homeserve.models.family import Family
from homeserve.models.keys import Keys
from homeserve.models.reading import read_core, read_experts
from homeserve.models.stages import Stage


def config_from(metadata: Mapping[str, object]) -> ModelConfig:
    """Raises InvalidModelFile naming the key, UnsupportedModel."""
    keys = Keys(metadata, "qwen3moe")
    return read_core(keys, interleaved=False, experts=read_experts(keys))


def stage_facts(config: ModelConfig, layer: int) -> tuple[Stage, ...]:
    """Attention with head norms, then experts."""
    return attention(config, layer, q_norm=True, k_norm=True), experts(config, layer)


FAMILY = Family(name="qwen3moe", config_from=config_from, stage_facts=stage_facts, tensor_names=layer_tensors)
