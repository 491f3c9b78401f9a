"""A folder of `transformers` as a GGUF file: written for the tests alone, with nothing of homeserve's own reader.

What other converters do to names, shapes and values is done here once more, from the description of the format: rows of
q and k of llama permuted, norms plus one, value heads of qwen35's delta nets tiled, experts stacked and split.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

ARCHS = {
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gpt_oss": "gpt-oss",
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
}
PLUS_ONE = ("gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next")
OUTPUT_NORMS = ("gemma2", "gemma3", "gemma4")
LATE_NORM = ("gpt-oss", "qwen35", "qwen35moe", "qwen3next")
"""Whose norm before the feed-forward is called post_attention_norm."""
NAMES = {
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.o_proj": "attn_output",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "router.proj": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
EXPERT_PARTS = {"w1": "gate", "w2": "down", "w3": "up"}
PATTERNS = (
    (r"self_attn\.([qkv])_proj", r"attn_\1"),
    (r"self_attn\.([qk])_norm", r"attn_\1_norm"),
    (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
    (r"mlp\.shared_expert\.(gate|up|down)_proj", r"ffn_\1_shexp"),
)


def export(folder: Path, target: Path, fused: bool = False) -> Path:
    """Write `target`, float32. `fused`: q, k and v as one tensor, and gate and up of experts, where there are some."""
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHS[config["model_type"]]
    writer = gguf.GGUFWriter(str(target), arch)
    for key, value in _metadata(config, arch).items():
        _add(writer, f"{arch}.{key}", value)
    tensors = dict(_tensors(folder, config, arch))
    for name, values in (_fuse(tensors) if fused else tensors).items():
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


# ---------------------------------------------------------------------------------------------------------- metadata


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _metadata(config: dict[str, Any], arch: str) -> dict[str, Any]:
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    types = config.get("layer_types") or []
    keys = {
        "block_count": layers,
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "vocab_size": config["vocab_size"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "expert_count": config.get("num_local_experts") or config.get("num_experts"),
        "expert_used_count": config.get("num_experts_per_tok") or config.get("top_k_experts"),
        "expert_feed_forward_length": config.get("moe_intermediate_size")
        or (config["intermediate_size"] if arch == "gpt-oss" else None),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        "attention.sliding_window": config.get("sliding_window"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }
    if "query_pre_attn_scalar" in config:
        keys["attention.scale"] = 1 / math.sqrt(config["query_pre_attn_scalar"])
    if "sliding_attention" in types:
        keys["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in types]
    if "linear_attention" in types:
        keys |= _delta_metadata(config, types)
    keys |= _rope_metadata(config, arch, head_dim)
    if arch == "gemma4":
        keys |= _gemma4_metadata(config, types)
    return {key: value for key, value in keys.items() if value is not None}


def _gemma4_metadata(config: dict[str, Any], types: list[str]) -> dict[str, Any]:
    """Layers that see everything have heads of another width, perhaps another number of kv heads."""
    own = config["per_layer_config"]
    wide = {int(layer): values for layer, values in own.items()}
    kv_heads = [wide.get(i, {}).get("num_key_value_heads", config["num_key_value_heads"]) for i in range(len(types))]
    full = next(values["head_dim"] for values in wide.values())
    shared, ffn = config["num_kv_shared_layers"], config["intermediate_size"]
    doubled = [ffn * (2 if i >= len(types) - shared else 1) for i in range(len(types))]
    return {
        "attention.head_count_kv": kv_heads if len(set(kv_heads)) > 1 else kv_heads[0],
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "feed_forward_length": doubled if config["use_double_wide_mlp"] else ffn,
        "rope.dimension_count": full,
        "rope.dimension_count_swa": config["head_dim"],
    }


def _delta_metadata(config: dict[str, Any], types: list[str]) -> dict[str, Any]:
    value_heads = config["linear_num_value_heads"]
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": value_heads,
        "ssm.inner_size": value_heads * config["linear_value_head_dim"],
        "attention.recurrent_layers": [each == "linear_attention" for each in types],
    }


def _rope_metadata(config: dict[str, Any], arch: str, head_dim: int) -> dict[str, Any]:
    rope = config["rope_parameters"]
    keys: dict[str, Any] = {}
    if "sliding_attention" in rope:
        keys["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    keys["rope.freq_base"] = float(rope["rope_theta"])
    keys["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return keys


# ----------------------------------------------------------------------------------------------------------- tensors


def _tensors(folder: Path, config: dict[str, Any], arch: str) -> Iterator[tuple[str, np.ndarray]]:
    stacks: dict[str, dict[int, np.ndarray]] = {}
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():
            values = file.get_tensor(name).float().numpy()
            layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
            if layer is None:
                yield from _outside(name, values, arch)
                continue
            block, rest = f"blk.{layer[1]}.", layer[2]
            expert = re.fullmatch(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight", rest)
            if expert:
                part = EXPERT_PARTS.get(expert[2], expert[2].removesuffix("_proj"))
                stacks.setdefault(f"{block}ffn_{part}_exps.weight", {})[int(expert[1])] = values
            else:
                yield from ((block + role, each) for role, each in _inside(rest, values, config, arch))
    for name, stack in stacks.items():
        yield name, np.stack([stack[i] for i in range(len(stack))])
    if config["rope_parameters"].get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(config)
    if arch == "gemma4":
        yield "rope_freqs.weight", _part_of_a_head(config)


def _outside(name: str, values: np.ndarray, arch: str) -> Iterator[tuple[str, np.ndarray]]:
    stem, suffix = name.rsplit(".", 1)
    role = OUTSIDE[stem]
    yield f"{role}.{suffix}", values + 1 if role == "output_norm" and arch in PLUS_ONE else values


def _inside(rest: str, values: np.ndarray, config: dict[str, Any], arch: str) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a layer that one of the folder becomes."""
    match rest:
        case "layer_scalar":
            yield "layer_output_scale.weight", values
        case "router.scale":
            yield "ffn_gate_inp.scale", values
        case "router.per_expert_scale":
            yield "ffn_down_exps.scale", values
        case "experts.gate_up_proj":
            yield "ffn_gate_up_exps.weight", values
        case "experts.down_proj":
            yield "ffn_down_exps.weight", values
        case "self_attn.sinks":
            yield "attn_sinks.weight", values
        case "linear_attn.A_log":
            yield "ssm_a", _tiled("ssm_a", -np.exp(values), config, arch)
        case "linear_attn.dt_bias":
            yield "ssm_dt.bias", _tiled("ssm_dt", values, config, arch)
        case "linear_attn.in_proj_qkvz.weight":
            yield from _unmixed(values, config)
        case "mlp.experts.gate_up_proj":
            yield "ffn_gate_exps.weight", values[:, :, 0::2].transpose(0, 2, 1)
            yield "ffn_up_exps.weight", values[:, :, 1::2].transpose(0, 2, 1)
        case "mlp.experts.gate_up_proj_bias":
            yield "ffn_gate_exps.bias", values[:, 0::2]
            yield "ffn_up_exps.bias", values[:, 1::2]
        case "mlp.experts.down_proj":
            yield "ffn_down_exps.weight", values.transpose(0, 2, 1)
        case "mlp.experts.down_proj_bias":
            yield "ffn_down_exps.bias", values
        case _:
            stem, suffix = rest.rsplit(".", 1)
            role = _role(stem, arch)
            yield f"{role}.{suffix}", _value(role, values, config, arch)


def _role(stem: str, arch: str) -> str:
    if stem == "post_attention_layernorm":
        return "post_attention_norm" if arch in (*OUTPUT_NORMS, *LATE_NORM) else "ffn_norm"
    for pattern, role in PATTERNS:
        if re.fullmatch(pattern, stem):
            return re.sub(pattern, role, stem)
    return NAMES[stem]


def _value(role: str, values: np.ndarray, config: dict[str, Any], arch: str) -> np.ndarray:
    if role.endswith("_norm") and role != "ssm_norm" and arch in PLUS_ONE:
        return values + 1
    if role in ("attn_q", "attn_k") and arch == "llama":
        return _paired(values, config["num_attention_heads" if role == "attn_q" else "num_key_value_heads"])
    if role == "ssm_conv1d":
        values = values[:, 0]
    return _tiled(role, values, config, arch)


def _paired(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows i and i + n/2 of each head side by side."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _tiled(role: str, values: np.ndarray, config: dict[str, Any], arch: str) -> np.ndarray:
    """Value heads (g, j) from g * r + j to j * key_heads + g: in qwen35 alone."""
    if arch not in ("qwen35", "qwen35moe"):
        return values
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]

    def tile(part: np.ndarray) -> np.ndarray:
        heads = part.reshape(key_heads, value_heads // key_heads, -1, *part.shape[1:])
        return heads.swapaxes(0, 1).reshape(part.shape)

    keys = 2 * key_heads * config["linear_key_head_dim"]
    match role:
        case "attn_qkv" | "ssm_conv1d":
            return np.concatenate([values[:keys], tile(values[keys:])])
        case "attn_gate" | "ssm_beta" | "ssm_alpha" | "ssm_a" | "ssm_dt":
            return tile(values)
        case "ssm_out":
            return tile(values.T).T
    return values


def _unmixed(values: np.ndarray, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """q, k, v and z, which lie together for each key head, apart."""
    key_heads, dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    wide = config["linear_num_value_heads"] // key_heads * config["linear_value_head_dim"]
    heads = values.reshape(key_heads, 2 * dim + 2 * wide, -1)
    parts = np.split(heads, [dim, 2 * dim, 2 * dim + wide], axis=1)
    q, k, v, z = (part.reshape(-1, values.shape[1]) for part in parts)
    yield "attn_qkv.weight", np.concatenate([q, k, v])
    yield "attn_gate.weight", z


def _llama3_factors(config: dict[str, Any]) -> np.ndarray:
    rope = config["rope_parameters"]
    dims = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] / (
        2 * math.pi * rope["rope_theta"] ** (np.arange(0, dims, 2) / dims)
    )
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _part_of_a_head(config: dict[str, Any]) -> np.ndarray:
    """gemma4's wide heads turn their first pairs only: the others are divided by so much that they stand still."""
    pairs = next(values["head_dim"] for values in config["per_layer_config"].values()) // 2
    turned = int(pairs * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    return np.where(np.arange(pairs) < turned, 1.0, 1e30)


def _fuse(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """q, k and v of attention layers as `attn_qkv`, gate and up of experts as `ffn_gate_up_exps`."""
    fused = dict(tensors)
    for name in tensors:
        stem, suffix = name.rsplit(".", 1)
        if stem.endswith("attn_q"):
            block = stem.removesuffix("attn_q")
            if f"{block}attn_v.{suffix}" not in tensors:
                continue
            parts = [fused.pop(f"{block}attn_{part}.{suffix}") for part in "qkv"]
            fused[f"{block}attn_qkv.{suffix}"] = np.concatenate(parts)
        elif stem.endswith("ffn_gate_exps"):
            block = stem.removesuffix("ffn_gate_exps")
            parts = [fused.pop(f"{block}ffn_{part}_exps.{suffix}") for part in ("gate", "up")]
            fused[f"{block}ffn_gate_up_exps.{suffix}"] = np.concatenate(parts, axis=1)
    return fused
