"""Helpers with which a family writes its declarations: a config's numbers for one layer as stages, and the roles of a
layer's tensors. A family adds the facts that set it apart as keyword arguments; nothing here knows a family's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from homeserve.models.config import ModelConfig
from homeserve.models.stages import Attention, Dense, Experts, GatedDeltaNet, NormKind, Read, SharedExpert, TokenInput

MATRICES = (
    *("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output"),
    *("ffn_gate", "ffn_up", "ffn_down"),
    *("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps"),
)
"""Roles of tensors that may have a bias."""
WEIGHTS = (
    *("attn_norm", "attn_q_norm", "attn_k_norm", "attn_sinks", "ffn_norm"),
    *("ffn_gate_inp_shexp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
    *("inp_gate", "proj", "layer_output_scale"),
    *("attn_gate", "ssm_in", "ssm_ba", "ssm_beta", "ssm_alpha", "ssm_conv1d", "ssm_norm", "ssm_out"),
)
NEXTN = ("eh_proj", "enorm", "hnorm", "shared_head_norm", "shared_head_head", "embed_tokens")


def layer_tensors(config: ModelConfig, layer: int, **renamed: str) -> Mapping[str, str]:
    """Role -> tensor of every part that a layer may have. `renamed` gives roles another name in the file (without
    `.weight`); the roles of norms behind a stage, `attn_post_norm` and `ffn_post_norm`, exist only where so named."""
    block = f"blk.{layer}"
    names = {role: f"{block}.{renamed.get(role, role)}.weight" for role in (*MATRICES, *WEIGHTS)}
    names |= {role: f"{block}.{file_name}.weight" for role, file_name in renamed.items()}
    names |= {f"{role}.bias": f"{block}.{role}.bias" for role in MATRICES}
    names |= {"ssm_dt": f"{block}.ssm_dt.bias", "ssm_a": f"{block}.ssm_a", "exp_probs_b": f"{block}.exp_probs_b.bias"}
    if layer >= config.layers:
        names |= {f"nextn.{part}": f"{block}.nextn.{part}.weight" for part in NEXTN}
    return names


def attention(config: ModelConfig, layer: int, **facts: Any) -> Attention:
    """The attention of `layer`. Biases are there where the checkpoint has them, unless `facts` demand them."""
    fused = _has_bias(config, layer, "attn_qkv")
    given: dict[str, Any] = {
        "heads": config.layer_heads[layer],
        "kv_heads": config.layer_kv_heads[layer],
        "head_dim": config.layer_head_dim(layer),
        "scale": config.attention_scale,
        "read": Read(config.norm_eps),
        "rope": config.layer_rope(layer),
        "window": config.window if config.is_windowed(layer) else 0,
        "softcap": config.attention_softcap,
        "q_bias": fused or _has_bias(config, layer, "attn_q"),
        "k_bias": fused or _has_bias(config, layer, "attn_k"),
        "v_bias": fused or _has_bias(config, layer, "attn_v"),
        "output_bias": _has_bias(config, layer, "attn_output"),
    }
    return Attention(**given | facts)


def delta_net(config: ModelConfig, **facts: Any) -> GatedDeltaNet:
    delta = config.delta
    assert delta is not None, "the family read no numbers of delta nets"
    given: dict[str, Any] = {
        "key_heads": delta.key_heads,
        "value_heads": delta.value_heads,
        "key_dim": delta.key_dim,
        "value_dim": delta.value_dim,
        "kernel": delta.kernel,
        "tiled": delta.tiled,
        "read": Read(config.norm_eps),
    }
    return GatedDeltaNet(**given | facts)


def dense(config: ModelConfig, layer: int, **facts: Any) -> Dense:
    given: dict[str, Any] = {
        "width": config.layer_ffn[layer],
        "read": Read(config.norm_eps),
        "gate_bias": _has_bias(config, layer, "ffn_gate"),
        "up_bias": _has_bias(config, layer, "ffn_up"),
        "down_bias": _has_bias(config, layer, "ffn_down"),
    }
    return Dense(**given | facts)


def experts(config: ModelConfig, layer: int, *, gated_shared: bool = False, **facts: Any) -> Experts:
    """The experts of `layer`; `gated_shared`: the shared one, if the config has one, goes through a gate."""
    numbers = config.experts
    fused = _has_bias(config, layer, "ffn_gate_up_exps")
    assert numbers is not None, "the family read no numbers of experts"
    given: dict[str, Any] = {
        "count": numbers.count,
        "used": numbers.used,
        "width": numbers.width,
        "read": Read(config.norm_eps),
        "func": numbers.func,
        "normalise": numbers.normalise,
        "scale": numbers.scale,
        "router_bias": _has_bias(config, layer, "ffn_gate_inp"),
        "selection_bias": _has_bias(config, layer, "exp_probs_b"),
        "gate_bias": fused or _has_bias(config, layer, "ffn_gate_exps"),
        "up_bias": fused or _has_bias(config, layer, "ffn_up_exps"),
        "down_bias": _has_bias(config, layer, "ffn_down_exps"),
        "shared": SharedExpert(numbers.shared_width, gated_shared) if numbers.shared_width else None,
    }
    return Experts(**given | facts)


def token_input(config: ModelConfig, layer: int, **facts: Any) -> TokenInput:
    """The input by token of `layer`; the trunk's layers all have one of the same width."""
    given: dict[str, Any] = {
        "width": config.token_input,
        "columns": config.token_input * config.layers,
        "first": config.token_input * layer,
        "projection_eps": config.norm_eps * config.hidden,
        "read": Read(0.0, NormKind.NONE),
    }
    return TokenInput(**given | facts)


def _has_bias(config: ModelConfig, layer: int, tensor: str) -> bool:
    return f"blk.{layer}.{tensor}.bias" in config.optional
