"""`gpt-oss`: experts with clamped activations, sinks in attention, every other layer with a window.

Biases everywhere; the softmax runs over the chosen experts' logits alone; rope is stretched by yarn. The norm in front
of the experts is called `post_attention_norm` in the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from homeserve.models.config import ModelConfig
from homeserve.models.declare import attention, experts, layer_tensors
from homeserve.models.family import Family
from homeserve.models.keys import CONTEXT_MAX, Keys
from homeserve.models.reading import read_core, read_experts, read_pattern
from homeserve.models.stages import Activation, RoutingFunc, Stage


def config_from(metadata: Mapping[str, object]) -> ModelConfig:
    """Raises InvalidModelFile naming the key, UnsupportedModel."""
    keys = Keys(metadata, "gpt-oss")
    config = read_core(keys, interleaved=False, experts=read_experts(keys, func=RoutingFunc.CHOSEN))
    return replace(
        config,
        window=keys.integer("attention.sliding_window", high=CONTEXT_MAX),
        windowed=read_pattern(keys, config.layers, 2),
    )


def stage_facts(config: ModelConfig, layer: int) -> tuple[Stage, ...]:
    """Attention with sinks, then experts; all projections have biases."""
    mixer = attention(config, layer, sinks=True, q_bias=True, k_bias=True, v_bias=True, output_bias=True)
    biases = {"router_bias": True, "gate_bias": True, "up_bias": True, "down_bias": True}
    return mixer, experts(config, layer, activation=Activation.SWIGLU_OAI, **biases)


def tensor_names(config: ModelConfig, layer: int) -> Mapping[str, str]:
    return layer_tensors(config, layer, ffn_norm="post_attention_norm")


FAMILY = Family(name="gpt-oss", config_from=config_from, stage_facts=stage_facts, tensor_names=tensor_names)
