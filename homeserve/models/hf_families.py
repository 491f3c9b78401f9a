"""The families whose safetensors folders are read, by `model_type`: one value each, made from the parts they share.

Defaults are those of `transformers` (5.24), whose published configs leave out what equals them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from homeserve.checkpoint.hf_rules import BlockedPlace, FamilyRules, Form, Kind, LayerTypes, Place, Row

_CORE = (
    Row("block_count", "num_hidden_layers"),
    Row("context_length", "max_position_embeddings"),
    Row("embedding_length", "hidden_size"),
    Row("attention.head_count", "num_attention_heads"),
    Row("attention.head_count_kv", "num_key_value_heads", required=False),
    Row("attention.key_length", "head_dim", required=False),
    Row("attention.value_length", "head_dim", required=False),
    Row("attention.layer_norm_rms_epsilon", "rms_norm_eps", Kind.REAL),
    Row("vocab_size", "vocab_size"),
)
_FEED_FORWARD = Row("feed_forward_length", "intermediate_size")
_WINDOW = Row("attention.sliding_window", "sliding_window", required=False)

_TENSORS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_ATTENTION = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_DENSE = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_SECOND_NORM = {"post_attention_layernorm": "ffn_norm"}
_ROUTER = {"mlp.gate": "ffn_gate_inp"}
_SHARED_EXPERT = {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_EXPERTS = {
    "mlp.experts.*.gate_proj.weight": "ffn_gate_exps.weight",
    "mlp.experts.*.up_proj.weight": "ffn_up_exps.weight",
    "mlp.experts.*.down_proj.weight": "ffn_down_exps.weight",
}
_STACKED_EXPERTS = {
    "mlp.experts.gate_up_proj": (Place("ffn_gate_up_exps.weight"),),
    "mlp.experts.down_proj": (Place("ffn_down_exps.weight"),),
}
_SILU: Mapping[str, tuple[object, ...]] = {"hidden_act": ("silu", "swish", None)}
_NO_PARTIAL_ROPE: Mapping[str, tuple[object, ...]] = {"partial_rotary_factor": (1, 1.0, None)}
_NO_WINDOW: Mapping[str, tuple[object, ...]] = {"use_sliding_window": (False, None)}
_ALL_EXPERTS: Mapping[str, tuple[object, ...]] = {"decoder_sparse_step": (1, None), "mlp_only_layers": ([], None)}


def _expert_rows(count: int, used: int, width: int, *more: str) -> tuple[Row, ...]:
    return (
        Row("expert_count", "num_experts", default=count, other_names=("num_local_experts", *more)),
        Row("expert_used_count", "num_experts_per_tok", default=used, other_names=("experts_per_token",)),
        Row("expert_feed_forward_length", "moe_intermediate_size", default=width),
    )


def _head_dim(default: int) -> tuple[Row, ...]:
    """Of families whose heads are not hidden / heads wide."""
    return (
        Row("attention.key_length", "head_dim", default=default),
        Row("attention.value_length", "head_dim", default=default),
    )


def _shared_expert(default: int) -> Row:
    return Row("expert_shared_feed_forward_length", "shared_expert_intermediate_size", default=default)


def _normalise(default: bool) -> Row:
    return Row("expert_weights_norm", "norm_topk_prob", Kind.FLAG, default=default)


# ------------------------------------------------------------------------------------------------------- llama, qwen

_LLAMA = FamilyRules(
    arch="llama",
    rows=(*_CORE, _FEED_FORWARD, _WINDOW),
    tensors=_TENSORS,
    layer_tensors=_ATTENTION | _SECOND_NORM | _DENSE,
    must_equal={**_SILU, **_NO_PARTIAL_ROPE},
)
_MIXTRAL = replace(
    _LLAMA,
    rows=(
        *_LLAMA.rows,
        Row("expert_count", "num_local_experts", default=8, other_names=("num_experts",)),
        Row("expert_used_count", "num_experts_per_tok", default=2),
    ),
    layer_tensors=_ATTENTION | _SECOND_NORM | {"block_sparse_moe.gate": "ffn_gate_inp"},
    experts={
        "block_sparse_moe.experts.*.w1.weight": "ffn_gate_exps.weight",
        "block_sparse_moe.experts.*.w2.weight": "ffn_down_exps.weight",
        "block_sparse_moe.experts.*.w3.weight": "ffn_up_exps.weight",
    },
    rope_base=1e6,
)
_QWEN2 = replace(
    _LLAMA, arch="qwen2", rows=(*_CORE, _FEED_FORWARD), must_equal={**_SILU, **_NO_PARTIAL_ROPE, **_NO_WINDOW}
)
_QWEN2_MOE = replace(
    _QWEN2,
    arch="qwen2moe",
    rows=(*_CORE, _FEED_FORWARD, *_expert_rows(60, 4, 1408), _shared_expert(5632), _normalise(False)),
    layer_tensors=_ATTENTION | _SECOND_NORM | _ROUTER | _SHARED_EXPERT,
    bare=_STACKED_EXPERTS,
    experts=_EXPERTS,
    must_equal={**_SILU, **_NO_PARTIAL_ROPE, **_NO_WINDOW, **_ALL_EXPERTS, "qkv_bias": (True, None)},
)
_QWEN3 = replace(
    _QWEN2,
    arch="qwen3",
    rows=(*_CORE, _FEED_FORWARD, *_head_dim(128)),
    layer_tensors=_ATTENTION | _HEAD_NORMS | _SECOND_NORM | _DENSE,
)
_QWEN3_MOE = replace(
    _QWEN3,
    arch="qwen3moe",
    rows=(*_CORE, _FEED_FORWARD, *_expert_rows(128, 8, 768), _normalise(False)),
    layer_tensors=_ATTENTION | _HEAD_NORMS | _SECOND_NORM | _ROUTER,
    bare=_STACKED_EXPERTS,
    experts=_EXPERTS,
    must_equal={**_SILU, **_NO_PARTIAL_ROPE, **_NO_WINDOW, **_ALL_EXPERTS},
)

# -------------------------------------------------------------------------------------------------------- delta nets

_DELTA_ROWS = (
    *_head_dim(256),
    Row("ssm.conv_kernel", "linear_conv_kernel_dim", default=4),
    Row("ssm.state_size", "linear_key_head_dim", default=128),
    Row("ssm.group_count", "linear_num_key_heads", default=16),
    Row("ssm.time_step_rank", "linear_num_value_heads", default=32),
)
_DELTA_NET = {
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_DELTA_VECTORS = {
    "linear_attn.A_log": (Place("ssm_a", Form.MINUS_EXP),),
    "linear_attn.dt_bias": (Place("ssm_dt.bias"),),
}
_MIXED_NORM = {"post_attention_layernorm": "post_attention_norm"}
_QWEN35 = FamilyRules(
    arch="qwen35",
    rows=(*_CORE, _FEED_FORWARD, *_DELTA_ROWS),
    tensors=_TENSORS,
    layer_tensors=_ATTENTION
    | _HEAD_NORMS
    | _MIXED_NORM
    | _DENSE
    | _DELTA_NET
    | {
        "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate",
        "linear_attn.in_proj_b": "ssm_beta",
        "linear_attn.in_proj_a": "ssm_alpha",
    },
    bare=_DELTA_VECTORS,
    plus_one=frozenset({"attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm"}),
    must_equal={**_SILU, "attn_output_gate": (True, None)},
    layer_types=LayerTypes(
        "attention.recurrent_layers", "linear_attention", "full_attention_interval", ("full_attention_interval",), 4
    ),
    rope_dims=0.25,
    delta=True,
    drafts=True,
    fixed={"homeserve.delta_tiled": False},
)
_QWEN35_MOE = replace(
    _QWEN35,
    arch="qwen35moe",
    rows=(*_CORE, *_DELTA_ROWS, *_expert_rows(256, 8, 512), _shared_expert(512)),
    layer_tensors={**_QWEN35.layer_tensors, **_ROUTER, **_SHARED_EXPERT},
    bare=_DELTA_VECTORS | _STACKED_EXPERTS,
    experts=_EXPERTS,
)
_QWEN3_NEXT = replace(
    _QWEN35_MOE,
    arch="qwen3next",
    rows=(*_CORE, *_DELTA_ROWS, *_expert_rows(512, 10, 512), _shared_expert(512), _normalise(True)),
    layer_tensors={
        **_ATTENTION,
        **_HEAD_NORMS,
        **_MIXED_NORM,
        **_DELTA_NET,
        **_ROUTER,
        **_SHARED_EXPERT,
        "linear_attn.in_proj_qkvz": "ssm_in",
        "linear_attn.in_proj_ba": "ssm_ba",
    },
    must_equal={**_QWEN35.must_equal, **_ALL_EXPERTS},
)

# ------------------------------------------------------------------------------------------------------------- gemma

_GEMMA_ROWS = (
    Row("block_count", "num_hidden_layers", default=26),
    Row("context_length", "max_position_embeddings", default=131072),
    Row("embedding_length", "hidden_size", default=2304),
    Row("attention.head_count", "num_attention_heads", default=8),
    Row("attention.head_count_kv", "num_key_value_heads", default=4),
    Row("attention.layer_norm_rms_epsilon", "rms_norm_eps", Kind.REAL, default=1e-6),
    Row("feed_forward_length", "intermediate_size", default=9216),
    Row("attention.scale", "query_pre_attn_scalar", Kind.ROOT, default=256),
    Row("attention.sliding_window", "sliding_window", default=4096),
    *_head_dim(256),
)
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GELU: Mapping[str, tuple[object, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh", None),
    "use_bidirectional_attention": (False, None),
}
_GEMMA3 = FamilyRules(
    arch="gemma3",
    rows=(
        *_GEMMA_ROWS,
        Row("vocab_size", "vocab_size", default=262208),
        Row("attn_logit_softcapping", "attn_logit_softcapping", Kind.CAP, required=False),
        Row("final_logit_softcapping", "final_logit_softcapping", Kind.CAP, required=False),
    ),
    tensors=_TENSORS,
    layer_tensors=_ATTENTION | _HEAD_NORMS | _GEMMA_NORMS | _DENSE,
    must_equal=_GELU,
    plus_one=frozenset(
        {"attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm", "output_norm"}
    ),
    layer_types=LayerTypes(
        "attention.sliding_window_pattern",
        "sliding_attention",
        "attention.sliding_window_pattern",
        ("sliding_window_pattern", "_sliding_window_pattern"),
        6,
    ),
    rope_base=1e6,
    rope_swa_base=10000.0,
    tied=True,
)
_GEMMA2 = replace(
    _GEMMA3,
    arch="gemma2",
    rows=(
        *_GEMMA_ROWS,
        Row("vocab_size", "vocab_size", default=256000),
        Row("context_length", "max_position_embeddings", default=8192),
        Row("attn_logit_softcapping", "attn_logit_softcapping", Kind.CAP, default=50.0),
        Row("final_logit_softcapping", "final_logit_softcapping", Kind.CAP, default=30.0),
    ),
    layer_tensors=_ATTENTION | _GEMMA_NORMS | _DENSE,
    layer_types=LayerTypes(
        "attention.sliding_window_pattern", "sliding_attention", "attention.sliding_window_pattern", (), 2
    ),
    rope_base=10000.0,
    rope_swa_base=0.0,
)

_GEMMA4 = replace(
    _GEMMA3,
    arch="gemma4",
    rows=(
        *(row for row in _GEMMA_ROWS if row.key != "attention.scale"),
        Row("block_count", "num_hidden_layers", default=30),
        Row("attention.sliding_window", "sliding_window", default=512),
        Row("vocab_size", "vocab_size", default=262144),
        Row("final_logit_softcapping", "final_logit_softcapping", Kind.CAP, required=False),
        Row("attention.shared_kv_layers", "num_kv_shared_layers", Kind.SOME, required=False),
        Row("embedding_length_per_layer_input", "hidden_size_per_layer_input", Kind.SOME, default=256),
        Row("expert_count", "num_experts", when="enable_moe_block"),
        Row("expert_used_count", "top_k_experts", when="enable_moe_block"),
        Row("expert_feed_forward_length", "moe_intermediate_size", when="enable_moe_block"),
    ),
    tensors={
        **_TENSORS,
        "model.embed_tokens_per_layer": "per_layer_token_embd",
        "model.per_layer_model_projection": "per_layer_model_proj",
        "model.per_layer_projection_norm": "per_layer_proj_norm",
    },
    layer_tensors={
        **_GEMMA3.layer_tensors,
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "router.proj": "ffn_gate_inp",
    },
    bare={
        "layer_scalar": (Place("layer_output_scale.weight"),),
        "router.scale": (Place("ffn_gate_inp.scale"),),
        "router.per_expert_scale": (Place("ffn_down_exps.scale"),),
        "experts.gate_up_proj": (Place("ffn_gate_up_exps.weight"),),
        "experts.down_proj": (Place("ffn_down_exps.weight"),),
    },
    must_equal=_GELU,
    plus_one=frozenset(),
    rope_dims=0.25,
    wide_heads=512,
)

# ----------------------------------------------------------------------------------------------------------- gpt-oss

_GPT_OSS = FamilyRules(
    arch="gpt-oss",
    rows=(
        *_CORE,
        _FEED_FORWARD,
        *_head_dim(64),
        Row("expert_count", "num_local_experts"),
        Row("expert_used_count", "num_experts_per_tok", default=4, other_names=("experts_per_token",)),
        Row("expert_feed_forward_length", "intermediate_size"),
        Row("attention.sliding_window", "sliding_window", default=128),
    ),
    tensors=_TENSORS,
    layer_tensors=_ATTENTION | _MIXED_NORM | {"mlp.router": "ffn_gate_inp"},
    bare={
        "self_attn.sinks": (Place("attn_sinks.weight"),),
        "mlp.experts.gate_up_proj": (
            Place("ffn_gate_exps.weight", Form.EVEN_COLS_TRANSPOSED),
            Place("ffn_up_exps.weight", Form.ODD_COLS_TRANSPOSED),
        ),
        "mlp.experts.gate_up_proj_bias": (
            Place("ffn_gate_exps.bias", Form.EVEN_COLS),
            Place("ffn_up_exps.bias", Form.ODD_COLS),
        ),
        "mlp.experts.down_proj": (Place("ffn_down_exps.weight", Form.TRANSPOSED),),
        "mlp.experts.down_proj_bias": (Place("ffn_down_exps.bias"),),
    },
    blocked={
        "mlp.experts.gate_up_proj": (
            BlockedPlace("ffn_gate_exps.weight", 0, 2),
            BlockedPlace("ffn_up_exps.weight", 1, 2),
        ),
        "mlp.experts.down_proj": (BlockedPlace("ffn_down_exps.weight"),),
    },
    must_equal={
        **_SILU,
        **_NO_PARTIAL_ROPE,
        "attention_bias": (True, None),
        "swiglu_limit": (7.0, 7, None),
        "swiglu_alpha": (1.702, None),
    },
    layer_types=LayerTypes(
        "attention.sliding_window_pattern", "sliding_attention", "attention.sliding_window_pattern", (), 2
    ),
    rope_base=150000.0,
    quant_methods=("mxfp4",),
)

FAMILIES: Mapping[str, FamilyRules] = {
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "gpt_oss": _GPT_OSS,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _MIXTRAL,
    "qwen2": _QWEN2,
    "qwen2_moe": _QWEN2_MOE,
    "qwen3": _QWEN3,
    "qwen3_5": _QWEN35,
    "qwen3_5_moe": _QWEN35_MOE,
    "qwen3_5_moe_text": _QWEN35_MOE,
    "qwen3_5_text": _QWEN35,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_next": _QWEN3_NEXT,
}
"""By `model_type`; of a config with a `text_config`, that one's."""
