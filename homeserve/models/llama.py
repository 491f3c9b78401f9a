"""`llama`: Llama 2 and 3, SmolLM2, Mistral, and what was converted under that name.

Pre-norm blocks of grouped attention and a SiLU-gated feed-forward. GGUF files have the rows of q and k permuted so that
rope pairs neighbouring dims. Llama-3 rope scaling comes as the tensor `rope_freqs.weight` in GGUF and as four keys from
a `config.json`. Files with experts (Mixtral) have them in every layer: softmax over all, the chosen weights normalised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from homeserve.models.config import ModelConfig
from homeserve.models.declare import attention, dense, experts, layer_tensors
from homeserve.models.family import Family
from homeserve.models.keys import CONTEXT_MAX, Keys
from homeserve.models.reading import has_experts, read_core, read_experts
from homeserve.models.stages import Stage


def config_from(metadata: Mapping[str, object]) -> ModelConfig:
    """Raises InvalidModelFile naming the key, UnsupportedModel for what this family's files may ask for and we lack."""
    keys = Keys(metadata, "llama")
    window = keys.integer("attention.sliding_window", 0, low=0, high=CONTEXT_MAX)
    routed = read_experts(keys) if has_experts(keys) else None
    return replace(read_core(keys, interleaved=True, experts=routed), window=window)


def stage_facts(config: ModelConfig, layer: int) -> tuple[Stage, ...]:
    """Attention, then a feed-forward, dense or of experts: every layer declares both."""
    feed = dense(config, layer) if config.experts is None else experts(config, layer)
    return attention(config, layer), feed


FAMILY = Family(
    name="llama",
    config_from=config_from,
    stage_facts=stage_facts,
    tensor_names=layer_tensors,
    # Old converters stored the rope frequencies of each layer; they follow from rope.freq_base.
    ignored=("attn_rot_embd.weight",),
)
