"""`qwen35moe`: as `qwen35`, with experts and a gated shared expert in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from homeserve.models.config import ModelConfig
from homeserve.models.declare import attention, delta_net, experts, layer_tensors
from homeserve.models.family import Family
from homeserve.models.keys import Keys
from homeserve.models.reading import read_core, read_delta, read_experts, read_recurrent
from homeserve.models.stages import FeedForward, Stage


def config_from(metadata: Mapping[str, object]) -> ModelConfig:
    """Raises InvalidModelFile naming the key, UnsupportedModel."""
    keys = Keys(metadata, "qwen35moe")
    config = read_core(keys, interleaved=False, drafts=True, experts=read_experts(keys, shared=True))
    recurrent = read_recurrent(keys, config.layers, config.nextn)
    return replace(config, recurrent=recurrent, delta=read_delta(keys, tiled=True) if any(recurrent) else None)


def stage_facts(config: ModelConfig, layer: int) -> tuple[Stage, ...]:
    """A delta net or gated attention, then experts with a gated shared one."""
    if config.is_recurrent(layer):
        return delta_net(config), _feed_forward(config, layer)
    return attention(config, layer, gated=True, q_norm=True, k_norm=True), _feed_forward(config, layer)


def nextn_facts(config: ModelConfig, index: int) -> tuple[Stage, ...]:
    """The drafting block is a layer with gated attention."""
    return stage_facts(config, config.layers + index)


def tensor_names(config: ModelConfig, layer: int) -> Mapping[str, str]:
    return layer_tensors(config, layer, ffn_norm="post_attention_norm")


def _feed_forward(config: ModelConfig, layer: int) -> FeedForward:
    return experts(config, layer, gated_shared=True)


FAMILY = Family(
    name="qwen35moe",
    config_from=config_from,
    stage_facts=stage_facts,
    tensor_names=tensor_names,
    nextn_facts=nextn_facts,
)
