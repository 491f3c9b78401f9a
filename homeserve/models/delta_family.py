"""What the families of delta nets and gated attention share: three layers of the one, then one of the other.

    mixer           a gated delta net, or attention whose q brings a gate and whose heads are normalised (q and k)
    feed-forward    dense, or experts with a gated shared one, in every layer; its norm is called `post_attention_norm`

A drafting block behind the trunk is a layer with attention. What sets a family apart is said by its own file: whether
its layers have experts, and in what order its GGUF files hold the value heads of a delta net.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from homeserve.models.config import ModelConfig
from homeserve.models.declare import attention, delta_net, dense, experts, layer_tensors
from homeserve.models.family import Family
from homeserve.models.keys import Keys
from homeserve.models.reading import read_core, read_delta, read_experts, read_recurrent
from homeserve.models.stages import FeedForward, Stage


def delta_family(name: str, *, tiled: bool, routed: bool) -> Family:
    """The family of architecture `name`. `tiled`: value head h of its files goes with key head h % key_heads; `routed`:
    its feed-forwards are experts."""

    def config_from(metadata: Mapping[str, object]) -> ModelConfig:
        """Raises InvalidModelFile naming the key, UnsupportedModel."""
        keys = Keys(metadata, name)
        numbers = read_experts(keys, shared=True) if routed else None
        config = read_core(keys, interleaved=False, drafts=True, experts=numbers)
        recurrent = read_recurrent(keys, config.layers, config.nextn)
        return replace(config, recurrent=recurrent, delta=read_delta(keys, tiled=tiled) if any(recurrent) else None)

    return Family(
        name=name,
        config_from=config_from,
        stage_facts=_stage_facts,
        tensor_names=_tensor_names,
        nextn_facts=lambda config, index: _stage_facts(config, config.layers + index),
    )


def _stage_facts(config: ModelConfig, layer: int) -> tuple[Stage, ...]:
    feed: FeedForward = dense(config, layer) if config.experts is None else experts(config, layer, gated_shared=True)
    if config.is_recurrent(layer):
        return delta_net(config), feed
    return attention(config, layer, gated=True, q_norm=True, k_norm=True), feed


def _tensor_names(config: ModelConfig, layer: int) -> Mapping[str, str]:
    return layer_tensors(config, layer, ffn_norm="post_attention_norm")
