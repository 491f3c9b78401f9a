"""Tiny models of every family with random weights, made by `transformers` and saved as folders, with their logits.

Sizes are chosen to tell mistakes apart: hidden, head and expert widths differ from each other, value heads are three to
a key head, rope turns part of a head where it may, windows are shorter than the prompt. Norm weights are not all one
(nor less one: all zero), biases and sinks are not zero.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

VOCAB, TOKENS = 300, 40

_CORE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 3}
_SHARED = {"shared_expert_intermediate_size": 128}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GEMMA3 = {
    "num_hidden_layers": 7,
    "head_dim": 32,
    "sliding_window": 9,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
_GPT_OSS = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "intermediate_size": 64,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 9,
}
_GEMMA4 = {
    "num_hidden_layers": 7,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 9,
    "final_logit_softcapping": 6.0,
    "tie_word_embeddings": True,
    "layer_types": [
        *("sliding_attention", "sliding_attention", "full_attention", "sliding_attention"),
        *("full_attention", "sliding_attention", "full_attention"),
    ],
}
_GEMMA4_TOKEN_INPUTS = {
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
_GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "top_k_experts": 3,
}
_GEMMA4_WITHOUT_V = {
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}


@dataclass(frozen=True)
class Tiny:
    """One model: the names of its classes in `transformers`, and its settings."""

    config: str
    model: str
    settings: dict[str, Any]


def _tiny(family: str, *settings: dict[str, Any], config: str = "", **more: Any) -> Tiny:
    merged = dict(_CORE)
    for each in (*settings, more):
        merged |= each
    return Tiny(config or f"{family}Config", f"{family}ForCausalLM", merged)


def rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | more}


MODELS: dict[str, Tiny] = {
    "llama": _tiny("Llama", rope(10000.0)),
    "llama_tied_biased": _tiny("Llama", rope(1e5), tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama3": _tiny("Llama", rope(500000.0, **_LLAMA3)),
    "llama_yarn": _tiny("Llama", rope(10000.0, **_YARN)),
    "llama_linear": _tiny("Llama", rope(10000.0, rope_type="linear", factor=3.0)),
    "mistral_window": _tiny("Mistral", rope(10000.0), head_dim=24, sliding_window=9),
    "mixtral": _tiny("Mixtral", rope(1e6), num_local_experts=8, num_experts_per_tok=3),
    "qwen2": _tiny("Qwen2", rope(1e6)),
    "qwen2_yarn": _tiny("Qwen2", rope(1e6, **_YARN)),
    "qwen2_moe": _tiny("Qwen2Moe", rope(1e6), _EXPERTS, _SHARED),
    "qwen3": _tiny("Qwen3", rope(1e6), head_dim=32),
    "qwen3_moe": _tiny("Qwen3Moe", rope(1e6), _EXPERTS, head_dim=32, norm_topk_prob=True),
    "qwen3_next": _tiny("Qwen3Next", rope(1e7, partial_rotary_factor=0.25), _DELTA, _EXPERTS, _SHARED),
    "qwen3_5": _tiny("Qwen3_5", rope(1e7, partial_rotary_factor=0.25), _DELTA, config="Qwen3_5TextConfig"),
    "qwen3_5_moe": _tiny(
        "Qwen3_5Moe",
        rope(1e7, partial_rotary_factor=0.5),
        _DELTA,
        _EXPERTS,
        _SHARED,
        config="Qwen3_5MoeTextConfig",
    ),
    "gemma2": _tiny(
        "Gemma2",
        rope(10000.0),
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=9,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=6.0,
        tie_word_embeddings=True,
    ),
    "gemma3": _tiny("Gemma3", _GEMMA3, config="Gemma3TextConfig", query_pre_attn_scalar=32),
    "gemma3_scaled": _tiny("Gemma3", _GEMMA3, config="Gemma3TextConfig", query_pre_attn_scalar=20),
    "gemma4": _tiny("Gemma4", _GEMMA4, _GEMMA4_TOKEN_INPUTS, config="Gemma4TextConfig"),
    "gemma4_without_v": _tiny("Gemma4", _GEMMA4, _GEMMA4_WITHOUT_V, config="Gemma4TextConfig"),
    "gemma4_experts": _tiny("Gemma4", _GEMMA4, _GEMMA4_WITHOUT_V, _GEMMA4_EXPERTS, config="Gemma4TextConfig"),
    "gemma4_experts_token_inputs": _tiny(
        "Gemma4", _GEMMA4, _GEMMA4_TOKEN_INPUTS, _GEMMA4_EXPERTS, config="Gemma4TextConfig"
    ),
    "gpt_oss": _tiny("GptOss", _GPT_OSS, rope(150000.0, **_YARN, truncate=True)),
    "gpt_oss_ramp": _tiny("GptOss", _GPT_OSS, rope(150000.0, **_YARN, truncate=False)),
}


@dataclass(frozen=True)
class Made:
    """A folder, and the logits of `transformers` in float32, `[len(ids), vocab]`."""

    folder: Path
    ids: list[int]
    logits: np.ndarray


def make(name: str, folder: Path, dtype: str = "float32") -> Made:
    """Save the model called `name`, its weights rounded to `dtype`, and run it."""
    torch.manual_seed(sum(name.encode()))
    tiny = MODELS[name]
    config = getattr(transformers, tiny.config)(**tiny.settings, attn_implementation="eager")
    model = getattr(transformers, tiny.model)(config).eval()
    with torch.no_grad():
        for label, weights in model.named_parameters():
            _fill(label, weights)
        model.to(getattr(torch, dtype)).save_pretrained(folder)
        # Read again: a model that was cast keeps rounded rope frequencies.
        model = type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        ids = np.random.default_rng(len(name)).integers(0, VOCAB, TOKENS).tolist()
        logits = model(torch.tensor([ids])).logits[0].numpy()
    return Made(folder, ids, logits)


def change_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change settings of a saved folder."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def older_gemma4(config: dict[str, Any]) -> dict[str, Any]:
    """What `per_layer_config` says in the words of older configs."""
    wide = next(iter(config["per_layer_config"].values()))
    return {"global_head_dim": wide["head_dim"], "num_global_key_value_heads": wide.get("num_key_value_heads")}


def _fill(label: str, weights: Any) -> None:
    """Random weights of the size that a trained model's would have about; of vectors, whatever they stood at is the
    middle."""
    if label.endswith("A_log"):
        weights.copy_(torch.rand_like(weights) * 2 - 1)
    elif weights.dim() == 1 or label.endswith("bias") or "_bias" in label:
        weights.add_(torch.randn_like(weights) * 0.3)
    elif "conv1d" in label:
        weights.copy_(torch.randn_like(weights) * 0.5)
    elif "embed_tokens" in label:
        weights.copy_(torch.randn_like(weights) * 0.2)
    else:
        weights.copy_(torch.randn_like(weights) * 1.2 / weights.shape[-1] ** 0.5)
