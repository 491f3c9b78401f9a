"""`qwen35`: Qwen 3.5 and later, dense: three layers with a delta net, then one with gated attention.

The norm in front of the feed-forward is called `post_attention_norm` in the files. Rope turns the first part of a head;
its sections matter for images only. GGUF files have the value heads of the delta nets in tiled order. A NEXTN block may
lie behind the trunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from homeserve.models.config import ModelConfig
from homeserve.models.declare import attention, delta_net, dense, layer_tensors
from homeserve.models.family import Family
from homeserve.models.keys import Keys
from homeserve.models.reading import read_core, read_delta, read_recurrent
from homeserve.models.stages import FeedForward, Stage


def config_from(metadata: Mapping[str, object]) -> ModelConfig:
    """Raises InvalidModelFile naming the key, UnsupportedModel."""
    keys = Keys(metadata, "qwen35")
    config = read_core(keys, interleaved=False, drafts=True)
    recurrent = read_recurrent(keys, config.layers, config.nextn)
    return replace(config, recurrent=recurrent, delta=read_delta(keys, tiled=True) if any(recurrent) else None)


def stage_facts(config: ModelConfig, layer: int) -> tuple[Stage, ...]:
    """A delta net or gated attention, then a dense feed-forward."""
    if config.is_recurrent(layer):
        return delta_net(config), _feed_forward(config, layer)
    return attention(config, layer, gated=True, q_norm=True, k_norm=True), _feed_forward(config, layer)


def nextn_facts(config: ModelConfig, index: int) -> tuple[Stage, ...]:
    """The drafting block is a layer with gated attention."""
    return stage_facts(config, config.layers + index)


def tensor_names(config: ModelConfig, layer: int) -> Mapping[str, str]:
    return layer_tensors(config, layer, ffn_norm="post_attention_norm")


def _feed_forward(config: ModelConfig, layer: int) -> FeedForward:
    return dense(config, layer)


FAMILY = Family(
    name="qwen35",
    config_from=config_from,
    stage_facts=stage_facts,
    tensor_names=tensor_names,
    nextn_facts=nextn_facts,
)
