"""`qwen2moe`: Qwen 1.5 and 2 with experts in every layer.

Softmax over all experts, the chosen weights as they are; beside them a shared expert that goes through a gate. q, k and
v have biases.
"""

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
    keys = Keys(metadata, "qwen2moe")
    return read_core(keys, interleaved=False, experts=read_experts(keys, normalise=False, shared=True))


def stage_facts(config: ModelConfig, layer: int) -> tuple[Stage, ...]:
    """Attention with biases, then experts with a gated shared one."""
    mixer = attention(config, layer, q_bias=True, k_bias=True, v_bias=True)
    return mixer, experts(config, layer, gated_shared=True)


FAMILY = Family(name="qwen2moe", config_from=config_from, stage_facts=stage_facts, tensor_names=layer_tensors)
