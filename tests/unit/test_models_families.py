"""What sets the families apart: their facts from metadata, their tensors, what is refused, drafting blocks."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import families_rig as rig
import numpy as np
import pytest

from backends.base import (
    AddGated,
    Attention,
    DeltaNet,
    EmbedRows,
    Experts,
    Linear,
    Norm,
    RopeStore,
    Scale,
    Softcap,
    TensorView,
)
from backends.quant import QuantType
from budget.facts import ModelShape
from homeserve.errors import InvalidModelFile, UnsupportedModel
from homeserve.models import registry, stages
from homeserve.models.bind import Bound, bind
from homeserve.models.config import TOKEN_INPUT, ModelConfig
from homeserve.models.conform import before_hidden
from homeserve.models.rope import resolve_rope
from homeserve.models.shape import shape_of
from homeserve.models.stages import LinearScaling, YarnScaling
from homeserve.models.tensors import TensorSource

ARCHS = rig.NAMES
HYBRIDS = [arch for arch in registry.known() if registry.family(arch).nextn_facts is not None]
FOUR, FUSED, DRAFTING = rig.STACKS["four"], rig.STACKS["four, fused"], rig.STACKS["three, nextn"]


def config_of(arch: str, stack: rig.Stack = FOUR, **changes: Any) -> ModelConfig:
    return rig.family_of(arch).config_from(rig.metadata(arch, stack, **changes))


def mixers(arch: str, config: ModelConfig) -> list[Any]:
    return [rig.family_of(arch).stage_facts(config, layer)[0] for layer in range(config.layers)]


def dense(tensor: TensorView) -> np.ndarray:
    return np.frombuffer(tensor.data.tobytes(), np.float32).reshape(tensor.rows, tensor.cols)


def view(name: str, values: np.ndarray) -> TensorView:
    packed = np.ascontiguousarray(np.atleast_2d(values), np.float32)
    return TensorView(name, QuantType.F32, *packed.shape, np.frombuffer(packed.tobytes(), np.uint8))


def ops_of(bound: Bound, kind: type) -> list[Any]:
    return [op for op in bound.ops if isinstance(op, kind)]


# ---------------------------------------------------------------------------------------------------- sliding windows


@pytest.mark.parametrize(
    ("arch", "pattern", "windows"),
    [
        ("gemma2", None, [3, 0, 3, 0]),
        ("gemma3", None, [3, 3, 3, 3]),
        ("gpt-oss", None, [3, 0, 3, 0]),
        ("gemma3", 3, [3, 3, 0, 3]),
        ("gemma3", [True, False, False, True], [3, 0, 0, 3]),
        ("gemma3", 0, [0, 0, 0, 0]),
        ("gemma3", 1, [0, 0, 0, 0]),
    ],
)
def test_which_layers_have_a_window(arch: str, pattern: object, windows: list[int]) -> None:
    """By the family's period, by the file's number, by the file's array."""
    config = config_of(arch, attention__sliding_window_pattern=pattern)
    assert [mixer.window for mixer in mixers(arch, config)] == windows


def test_the_sixth_layer_sees_everything_and_has_the_other_rope() -> None:
    config = config_of("gemma3", rig.Stack(7), attention__sliding_window_pattern=None, rope__freq_base=1e6)
    made = mixers("gemma3", config)
    assert [mixer.window for mixer in made] == [3, 3, 3, 3, 3, 0, 3]
    assert made[5].rope.base == 1e6 and made[5].rope.scaling == LinearScaling(8.0)
    assert made[4].rope.base == 10000.0 and made[4].rope.scaling is None
    other = mixers("gemma3", config_of("gemma3", rope__freq_base_swa=5000.0))
    assert [mixer.rope.base for mixer in other] == [5000.0, 10000.0] * 2


def test_without_a_window_every_layer_sees_everything() -> None:
    made = mixers("gemma3", config_of("gemma3", attention__sliding_window=None, rope__freq_base=1e6))
    assert {(mixer.window, mixer.rope.base) for mixer in made} == {(0, 1e6)}


@pytest.mark.parametrize("bad", [[True, False], [1, 0, 1, 0], -1, "odd", 2.5])
def test_a_bad_pattern_is_named(bad: object) -> None:
    with pytest.raises(InvalidModelFile, match="sliding_window_pattern"):
        config_of("gpt-oss", attention__sliding_window_pattern=bad)


# -------------------------------------------------------------------------------------------------- scales and softcaps


def test_embeddings_grow_where_the_family_says_so() -> None:
    for arch in ARCHS:
        embed = ops_of(bind(*rig.made(arch, FOUR)), EmbedRows)[0]
        assert embed.scale == (math.sqrt(rig.HIDDEN) if arch.startswith("gemma") else 1.0)


@pytest.mark.parametrize(("arch", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_model_scales_by_hidden_over_heads(arch: str, layers: int) -> None:
    assert config_of(arch).attention_scale == 1 / math.sqrt(16)
    assert config_of(arch, rig.Stack(layers)).attention_scale == pytest.approx(1 / math.sqrt(rig.HIDDEN / 4))
    assert config_of(arch, rig.Stack(layers), attention__scale=0.5).attention_scale == 0.5


def test_soft_caps_have_the_family_defaults_and_reach_their_ops() -> None:
    bound = bind(*rig.made("gemma2", FOUR))
    assert {op.softcap for op in ops_of(bound, Attention)} == {50.0}
    *_, head, cap = before_hidden(bound.ops)
    assert cap == Softcap(head.parts[0].out, 30.0)  # type: ignore[union-attr]
    plain = config_of("gemma2", attn_logit_softcapping=0.0, final_logit_softcapping=0.0)
    bound = bind(registry.family("gemma2"), plain, rig.made("gemma2", FOUR)[2])
    assert not ops_of(bound, Softcap) and {op.softcap for op in ops_of(bound, Attention)} == {0.0}
    assert not ops_of(bind(*rig.made("gemma3", FOUR)), Softcap)
    assert config_of("gemma3", final_logit_softcapping=20.0).logit_softcap == 20.0


def test_a_stage_with_a_norm_behind_it_norms_before_it_owes() -> None:
    family, config, tensors = rig.made("gemma3", FOUR)
    bound = bind(family, config, tensors)
    behind = [op for op in ops_of(bound, Norm) if op.src.name == "update"]
    assert [op.weight.name.split(".")[2] for op in behind] == ["post_attention_norm", "post_ffw_norm"] * 4
    assert all(op.src == op.out and op.add is None for op in behind)
    twice = [op for op in bound.ops if not (isinstance(op, Norm) and op.src.name == "update")]
    assert np.abs(rig.run(bound, ops=twice)["logits"] - rig.run(bound)["logits"]).max() > 1e-2


# ------------------------------------------------------------------------------------------------------------- rope


def test_yarn_reaches_the_op_with_its_magnitude() -> None:
    config = config_of("gpt-oss", rope__scaling__factor=32.0, rope__scaling__original_context_length=4096)
    rope = mixers("gpt-oss", config)[0].rope
    assert rope.scaling == YarnScaling(32.0, 4096) and not rope.interleaved
    assert resolve_rope(rope).magnitude == pytest.approx(0.1 * math.log(32.0) + 1.0)
    halved = config_of("gpt-oss", rope__scaling__yarn_attn_factor=0.5).rope
    assert resolve_rope(halved).magnitude == pytest.approx(0.5 * (0.1 * math.log(8.0) + 1.0))


def test_a_ramp_of_parts_of_pairs_is_another_one() -> None:
    whole = config_of("gpt-oss").rope
    parts = registry.family("gpt-oss").config_from(
        rig.metadata("gpt-oss", FOUR) | {"homeserve.rope_yarn_truncate": False}
    )
    assert isinstance(parts.rope.scaling, YarnScaling) and not parts.rope.scaling.truncate
    assert resolve_rope(whole).frequencies != resolve_rope(parts.rope).frequencies


@pytest.mark.parametrize("arch", ARCHS)
def test_pairing_is_the_family_s_unless_the_checkpoint_says_otherwise(arch: str) -> None:
    assert config_of(arch).rope.interleaved == arch.startswith("llama")
    keys = rig.metadata(arch, FOUR) | {"homeserve.rope_interleaved": False}
    assert not rig.family_of(arch).config_from(keys).rope.interleaved


def test_only_a_part_of_a_head_turns_in_hybrids() -> None:
    stores = ops_of(bind(*rig.made("qwen35", FOUR)), RopeStore)
    assert {len(op.rope.frequencies) for op in stores} == {4} and {op.head_dim for op in stores} == {16}


# -------------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("arch", ["qwen2", "qwen2moe", "gpt-oss"])
def test_biases_that_a_family_always_has_are_demanded(arch: str) -> None:
    family, config, tensors = rig.made(arch, FOUR)
    left = {name: view for name, view in tensors.items() if name != "blk.2.attn_k.bias"}
    with pytest.raises(InvalidModelFile, match=r"blk\.2\.attn_k\.bias: is missing"):
        bind(family, config, left)


def test_q_carries_a_gate_where_attention_is_gated() -> None:
    bound = bind(*rig.made("qwen35", FOUR))
    attentions = ops_of(bound, Attention)
    assert [(op.q.width, op.q_step, op.out.width, op.gated) for op in attentions] == [(128, 32, 64, True)] * 2
    assert {op.q_step for op in ops_of(bound, RopeStore)} == {32}


@pytest.mark.parametrize("arch", ARCHS)
def test_fused_tensors_equal_their_parts(arch: str) -> None:
    """`attn_qkv` (not that of a delta net) and `ffn_gate_up_exps`, of every family."""
    family, config, fused = rig.made(arch, FUSED)
    apart = _taken_apart(config, family, dict(fused))
    assert set(apart) != set(fused)
    assert np.array_equal(
        rig.run(bind(family, config, fused))["logits"], rig.run(bind(family, config, apart))["logits"]
    )


def _taken_apart(config: ModelConfig, family: Any, tensors: dict[str, TensorView]) -> dict[str, TensorView]:
    for layer in range(config.layers):
        mixer, *feeds = family.stage_facts(config, layer)
        if isinstance(mixer, stages.Attention):
            whole = dense(tensors.pop(f"blk.{layer}.attn_qkv.weight"))
            q, kv = mixer.heads * mixer.q_step, mixer.kv_heads * mixer.head_dim
            for role, rows in zip("qkv", np.split(whole, [q, q + kv]), strict=True):
                tensors[f"blk.{layer}.attn_{role}.weight"] = view(f"blk.{layer}.attn_{role}.weight", rows)
        for feed in (each for each in feeds if isinstance(each, stages.Experts)):
            for end in ("weight", "bias"):
                if f"blk.{layer}.ffn_gate_up_exps.{end}" not in tensors:
                    continue
                both = dense(tensors.pop(f"blk.{layer}.ffn_gate_up_exps.{end}")).reshape(feed.count, 2, feed.width, -1)
                for part, role in enumerate(("gate", "up")):
                    name = f"blk.{layer}.ffn_{role}_exps.{end}"
                    rows = both[:, part].reshape(-1, both.shape[-1]) if end == "weight" else both[:, part, :, 0]
                    tensors[name] = view(name, rows)
    return tensors


# ----------------------------------------------------------------------------------------- inputs by token, shared rows


def test_wide_heads_see_everything_and_take_v_from_k() -> None:
    bound = bind(*rig.made("gemma4", FOUR))
    shapes = [(op.head_dim, op.kv_heads, op.window) for op in ops_of(bound, Attention)]
    assert shapes == [(8, 2, 3), (16, 1, 0)] * 2
    weights = [{part.out.name.partition(".")[0]: part.weight for part in op.parts} for op in ops_of(bound, Linear)]
    projections = [each for each in weights if "v" in each]
    assert [each["v"] == each["k"] for each in projections] == [False, True, False, True]
    assert all(op.v_norm for op in ops_of(bound, RopeStore))


def test_a_windowed_layer_without_v_is_damaged() -> None:
    family, config, tensors = rig.made("gemma4", FOUR)
    left = {name: each for name, each in tensors.items() if name != "blk.2.attn_v.weight"}
    with pytest.raises(InvalidModelFile, match=r"blk\.2\.attn_v\.weight: is missing"):
        bind(family, config, left)


def test_the_last_layers_read_the_last_of_their_kind() -> None:
    config = config_of("gemma4", attention__shared_kv_layers=2)
    assert [mixer.kv_source for mixer in mixers("gemma4", config)] == [None, None, 0, 1]
    longer = config_of("gemma4", rig.Stack(6), attention__shared_kv_layers=2)
    assert [mixer.kv_source for mixer in mixers("gemma4", longer)] == [None, None, None, None, 2, 3]
    assert config_of("gemma4").kv_shared == 0
    with pytest.raises(InvalidModelFile, match="shared_kv_layers"):
        config_of("gemma4", attention__shared_kv_layers=4)


def test_a_factor_on_the_residual_leaves_nothing_owed() -> None:
    family, config, tensors = rig.made("gemma4", FOUR)
    first = rig.bind_part(family, config, tensors, range(2))
    assert [buffer.name for buffer in first.gives] == ["x"] and isinstance(first.ops[-2], Scale)
    without = {name: each for name, each in tensors.items() if "layer_output_scale" not in name}
    plain = rig.bind_part(family, config, without, range(2))
    assert [buffer.name for buffer in plain.gives] == ["x", "update"] and not ops_of(plain, Scale)


def test_each_layer_takes_its_own_columns_and_rows() -> None:
    bound = bind(*rig.made("gemma4", FOUR))
    table, projection, norm = TOKEN_INPUT
    told = [op for op in ops_of(bound, EmbedRows) if op.table.name.startswith(table)]
    assert [op.table.name for op in told] == [f"{table}[,{first}:{first + 8}]" for first in (0, 8, 16, 24)]
    whole = dense(rig.made("gemma4", FOUR)[2][table])
    assert np.array_equal(dense(bound.weights[told[2].table.name]), whole[:, 16:24])
    assert {op.scale for op in told} == {math.sqrt(8)}
    rows = [name for name in bound.weights if name.startswith(projection)]
    assert rows == [f"{projection}[{first}:{first + 8}]" for first in (0, 8, 16, 24)]
    assert {op.eps for op in ops_of(bound, Norm) if op.weight.name == norm} == {1e-5 * rig.HIDDEN}
    again = rig.bind_part(*rig.made("gemma4", FOUR), range(2, 4))
    assert again.ops[1] == replace(bound.ops[0], out=replace(bound.ops[0].out, name="embedded"))  # type: ignore[union-attr, call-arg]


def test_columns_that_cut_a_block_are_refused() -> None:
    packed = TensorView("t", QuantType.Q8_0, 4, 64, np.arange(4 * 68, dtype=np.uint8))
    source = TensorSource({"t": packed})
    part = source.taken[source.take_columns("t", 32, 64, 4, 64).name]
    assert part.nbytes == 4 * 34 and np.array_equal(part.data.reshape(4, 34), packed.data.reshape(4, 68)[:, 34:])
    with pytest.raises(UnsupportedModel, match="columns 8 to 40 are no whole blocks"):
        source.take_columns("t", 8, 40, 4, 64)


def test_without_inputs_by_token_their_tensors_are_unknown() -> None:
    family, _, tensors = rig.made("gemma4", FOUR)
    plain = config_of("gemma4", embedding_length_per_layer_input=0)
    with pytest.raises(InvalidModelFile, match="inp_gate"):
        bind(family, plain, tensors)
    bare = {n: t for n, t in tensors.items() if not any(part in n for part in ("inp_gate", ".proj.", ".post_norm."))}
    with pytest.raises(InvalidModelFile, match="per_layer_"):
        bind(family, plain, bare)
    bare = {name: each for name, each in bare.items() if name not in TOKEN_INPUT}
    assert not [op for op in bind(family, plain, bare).ops if getattr(op, "src", None) == "embedded"]


def test_experts_beside_a_dense_part_read_the_same_residual_by_norms_of_their_own() -> None:
    """x + rms(rms(dense(rms(x))) + rms(experts(rms(x)))), and a router that reads x by a third norm."""
    family, config, tensors = rig.made("gemma4-experts", FOUR)
    bound = bind(family, config, tensors)
    norms = [op for op in bound.ops if isinstance(op, Norm) and op.weight.name.startswith("blk.1.")]
    assert [(op.weight.name[6:], op.src.name, op.out.name, op.add is not None) for op in norms[2:]] == [
        ("ffn_norm.weight", "x", "normed", True),
        ("post_ffw_norm_1.weight", "held", "held", False),
        ("pre_ffw_norm_2.weight", "x", "normed", False),
        ("ffn_gate_inp.scale[scaled]", "x", "router_in", False),
        ("post_ffw_norm_2.weight", "update", "update", False),
        ("post_ffw_norm.weight", "update", "update", False),
    ]
    routing = ops_of(bound, Experts)[0].routing
    assert (routing.func, routing.normalise, routing.gains.name) == ("softmax", True, "blk.0.ffn_down_exps.scale")
    factors = dense(bound.weights["blk.1.ffn_gate_inp.scale[scaled]"])
    assert np.allclose(factors, dense(tensors["blk.1.ffn_gate_inp.scale"]) / math.sqrt(rig.HIDDEN), rtol=1e-6)
    told = config_of("gemma4-experts", embedding_length_per_layer_input=8)
    assert [stages.stage_name(stage) for stage in family.stage_facts(told, 0)] == [
        *("attention", "dense", "experts", "token-input")
    ]


@pytest.mark.parametrize("part", ["pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2", "ffn_gate_inp", "ffn_gate"])
def test_a_half_of_two_feed_forwards_is_damaged(part: str) -> None:
    family, config, tensors = rig.made("gemma4-experts", FOUR)
    name = f"blk.2.{part}.weight"
    with pytest.raises(InvalidModelFile, match=re.escape(f"{name}: is missing")):
        bind(family, config, {of: each for of, each in tensors.items() if of != name})


@pytest.mark.parametrize("kind", [QuantType.F32, QuantType.F16])
def test_a_scaled_vector_is_made_of_floats(kind: QuantType) -> None:
    dtype = {QuantType.F32: np.float32, QuantType.F16: np.float16}[kind]
    stored = TensorView("t", kind, 1, 3, np.array([1, -2, 4], dtype).view(np.uint8))
    source = TensorSource({"t": stored, "packed": TensorView("packed", QuantType.Q8_0, 1, 32, np.zeros(34, np.uint8))})
    made = source.taken[source.take_scaled("t", 3, 0.5).name]
    assert (made.type, made.nbytes) == (QuantType.F32, 12) and dense(made).tolist() == [[0.5, -1.0, 2.0]]
    with pytest.raises(InvalidModelFile, match="packed: is of type Q8_0, floats are needed"):
        source.take_scaled("packed", 32, 0.5)


def test_experts_without_numbers_of_their_own_are_all_worth_the_same() -> None:
    family, config, tensors = rig.made("gemma4-experts", FOUR)
    left = {name: each for name, each in tensors.items() if not name.endswith("exps.scale")}
    ones = {f"blk.{layer}.ffn_down_exps.scale": np.ones(4) for layer in range(4)}
    even = rig.run(bind(family, config, left | {name: view(name, each) for name, each in ones.items()}))["logits"]
    plain = bind(family, config, left)
    assert ops_of(plain, Experts)[0].routing.gains is None
    assert np.array_equal(rig.run(plain)["logits"], even)
    assert np.abs(rig.run(bind(family, config, tensors))["logits"] - even).max() > 1e-3


def test_a_gguf_with_a_tensor_for_each_expert_is_refused_by_name() -> None:
    """As the first converters of Mixtral wrote them."""
    family, config, tensors = rig.made("llama-experts", FOUR)
    name = "blk.1.ffn_up_exps.weight"
    matrices = np.split(dense(tensors[name]), 4)
    apart = {f"blk.1.ffn_up.{e}.weight": view(f"blk.1.ffn_up.{e}.weight", each) for e, each in enumerate(matrices)}
    with pytest.raises(InvalidModelFile, match=re.escape(f"{name}: is missing")):
        bind(family, config, {of: each for of, each in tensors.items() if of != name} | apart)


def test_the_width_of_the_dense_part_is_no_experts_width() -> None:
    with pytest.raises(InvalidModelFile, match="expert_feed_forward_length"):
        config_of("gemma4-experts", expert_feed_forward_length=None)
    config = config_of("llama-experts")
    assert config.experts is not None and config.experts.width == 24, "where nothing is dense, it is"


# ----------------------------------------------------------------------------------------------------------- experts


def test_routing_is_the_family_s() -> None:
    found = {
        arch: ops_of(bind(*rig.made(arch, FOUR)), Experts)[0].routing
        for arch in ("gpt-oss", "qwen2moe", "qwen3moe", "qwen35moe", "qwen3next")
    }
    assert {arch: (made.func, made.normalise) for arch, made in found.items()} == {
        "gpt-oss": ("chosen", True),
        "qwen2moe": ("softmax", False),
        "qwen3moe": ("softmax", True),
        "qwen35moe": ("softmax", True),
        "qwen3next": ("softmax", True),
    }
    assert {(made.experts, made.used, made.scale) for made in found.values()} == {(4, 2, 1.0)}


def test_keys_of_a_file_win_over_the_family_s_routing() -> None:
    changed = config_of("qwen3moe", expert_gating_func=2, expert_weights_norm=False, expert_weights_scale=2.5).experts
    assert changed is not None
    assert (changed.func.value, changed.normalise, changed.scale) == ("sigmoid", False, 2.5)


@pytest.mark.parametrize("arch", ["qwen2moe", "qwen35moe", "qwen3next"])
def test_the_shared_expert_goes_through_its_gate(arch: str) -> None:
    bound = bind(*rig.made(arch, FOUR))
    added = ops_of(bound, AddGated)
    assert len(added) == 4 and all(op.gate is not None and op.gate.width == 1 for op in added)
    ungated = [replace(op, gate=None) if isinstance(op, AddGated) else op for op in bound.ops]
    assert np.abs(rig.run(bound, ops=ungated)["logits"] - rig.run(bound)["logits"]).max() > 1e-2


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("expert_count", 0, InvalidModelFile),
        ("expert_count", None, InvalidModelFile),
        ("expert_used_count", 5, InvalidModelFile),
        ("expert_used_count", [2, 2, 2, 1], UnsupportedModel),
        ("expert_feed_forward_length", None, InvalidModelFile),
        ("expert_feed_forward_length", [24, 24, 12, 24], UnsupportedModel),
        ("expert_gating_func", 4, UnsupportedModel),
        ("expert_group_count", 2, UnsupportedModel),
        ("expert_weights_norm", "yes", InvalidModelFile),
    ],
)
def test_bad_expert_keys_are_named(key: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"qwen3moe.{key}"):
        config_of("qwen3moe", **{key: value})


def test_one_number_for_each_layer_may_be_the_same_number() -> None:
    same = config_of("qwen3moe", expert_used_count=[2, 2, 2, 2]).experts
    assert same is not None and same.used == 2


def test_experts_biases_lie_as_one_vector() -> None:
    bound = bind(*rig.made("gpt-oss", FOUR))
    down = ops_of(bound, Experts)[0].down
    assert (down.bias.rows, down.bias.cols) == (1, 4 * rig.HIDDEN)
    assert bound.weights[down.bias.name].cols == 4 * rig.HIDDEN


# -------------------------------------------------------------------------------------------------------- delta nets


@pytest.mark.parametrize("arch", HYBRIDS)
def test_delta_nets_get_states_and_attention_gets_kv(arch: str) -> None:
    bound = bind(*rig.made(arch, FOUR))
    assert len(bound.kv_layers) == len(bound.state_layers) == 2
    assert [op.layer for op in ops_of(bound, DeltaNet)] == [0, 1]
    (state,) = set(bound.state_layers)
    assert (state.channels, state.kernel, state.heads, state.key_dim, state.value_dim) == (64, 4, 4, 8, 8)


@pytest.mark.parametrize("arch", HYBRIDS)
def test_which_layers_are_recurrent(arch: str) -> None:
    def recurrent(**changes: Any) -> list[bool]:
        return [isinstance(m, stages.GatedDeltaNet) for m in mixers(arch, config_of(arch, **changes))]

    assert recurrent(full_attention_interval=None) == [True, True, True, False]
    assert recurrent(full_attention_interval=2) == [True, False, True, False]
    assert recurrent(attention__recurrent_layers=[False, True, True, False]) == [False, True, True, False]
    with pytest.raises(InvalidModelFile, match="recurrent_layers"):
        recurrent(attention__recurrent_layers=[True])


def test_the_order_of_value_heads_is_the_checkpoint_s() -> None:
    for arch, tiled in (("qwen35", True), ("qwen35moe", True), ("qwen3next", False)):
        assert mixers(arch, config_of(arch))[0].tiled is tiled
        keys = rig.metadata(arch, FOUR) | {"homeserve.delta_tiled": not tiled}
        assert mixers(arch, registry.family(arch).config_from(keys))[0].tiled is not tiled


def test_tiled_and_grouped_value_heads_are_the_same_net_in_another_order() -> None:
    """Tensors permuted as converters do it: equal logits; not permuted: others."""
    family, config, tiled = rig.made("qwen35", FOUR)
    grouped_config = replace(config, delta=replace(config.delta, tiled=False))  # type: ignore[type-var]
    wrong = rig.run(bind(family, grouped_config, tiled))["logits"]
    grouped = dict(tiled)
    heads = np.array([0, 2, 1, 3])  # (group, j) at j * 2 + group -> at group * 2 + j
    wide = (heads[:, None] * 8 + np.arange(8)).reshape(-1)
    rows = {"attn_gate.weight": wide, "ssm_beta.weight": heads, "ssm_alpha.weight": heads}
    rows |= {"attn_qkv.weight": np.concatenate([np.arange(32), 32 + wide])}
    rows |= {"ssm_conv1d.weight": rows["attn_qkv.weight"]}
    for layer in (0, 2):
        for part, order in rows.items():
            name = f"blk.{layer}.{part}"
            grouped[name] = view(name, dense(tiled[name])[order])
        for part in ("ssm_a", "ssm_dt.bias"):
            name = f"blk.{layer}.{part}"
            grouped[name] = view(name, dense(tiled[name])[:, heads])
        name = f"blk.{layer}.ssm_out.weight"
        grouped[name] = view(name, dense(tiled[name])[:, wide])
    right = rig.run(bind(family, config, tiled))["logits"]
    assert np.allclose(rig.run(bind(family, grouped_config, grouped))["logits"], right, atol=1e-5)
    assert np.abs(wrong - right).max() > 1e-2


@pytest.mark.parametrize("tiled", [False, True])
def test_projections_ordered_by_key_head_equal_separate_ones(tiled: bool) -> None:
    """`ssm_ba`, and `ssm_in` of the first converters: for each key head q, k, and v and z of its value heads."""
    family, config, tensors = rig.made("qwen3next", FOUR)
    config = replace(config, delta=replace(config.delta, tiled=tiled))  # type: ignore[type-var]
    joined = {name: each for name, each in tensors.items() if "ssm_ba" not in name}
    apart = dict(joined)
    for layer in (0, 2):
        beta, alpha = np.split(dense(tensors[f"blk.{layer}.ssm_ba.weight"]), 2)
        qkv, z = (dense(joined.pop(f"blk.{layer}.attn_{role}.weight")) for role in ("qkv", "gate"))
        heads = {0: [0, 2], 1: [1, 3]} if tiled else {0: [0, 1], 1: [2, 3]}
        ba, whole = [], []
        for group, own in heads.items():
            ba += [beta[own], alpha[own]]
            values = [32 + head * 8 + i for head in own for i in range(8)]
            whole += [qkv[group * 8 :][:8], qkv[16 + group * 8 :][:8], qkv[values], z[np.array(values) - 32]]
        for role, rows in (("ssm_beta", beta), ("ssm_alpha", alpha)):
            apart[f"blk.{layer}.{role}.weight"] = view(f"blk.{layer}.{role}.weight", rows)
        for role, parts in (("ssm_ba", ba), ("ssm_in", whole)):
            joined[f"blk.{layer}.{role}.weight"] = view(f"blk.{layer}.{role}.weight", np.concatenate(parts))
    logits = rig.run(bind(family, config, joined))["logits"]
    assert np.array_equal(logits, rig.run(bind(family, config, apart))["logits"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ssm.time_step_rank", 3),
        ("ssm.inner_size", 33),
        ("ssm.conv_kernel", 1),
        ("ssm.conv_kernel", 1 << 20),
        ("ssm.state_size", None),
        ("ssm.group_count", 0),
    ],
)
def test_bad_delta_keys_are_named(key: str, value: object) -> None:
    with pytest.raises(InvalidModelFile, match=f"qwen35.{key}"):
        config_of("qwen35", **{key.replace(".", "__"): value})


# ---------------------------------------------------------------------------------------------------- drafting blocks


@pytest.mark.parametrize("arch", HYBRIDS)
def test_the_trunk_is_what_is_left_of_the_blocks(arch: str) -> None:
    family, config, tensors = rig.made(arch, DRAFTING)
    assert (config.layers, config.nextn) == (3, 1)
    bound = bind(family, config, tensors)
    assert bound.layers == range(3) and not [name for name in bound.weights if name.startswith("blk.3")]
    assert family.nextn_facts is not None
    mixer, feed = family.nextn_facts(bound.config, 0)
    assert isinstance(mixer, stages.Attention) and mixer.gated and feed == family.stage_facts(config, 0)[1]
    arrayed = config_of(arch, DRAFTING, attention__recurrent_layers=[True, False, True, True])
    assert arrayed.recurrent == (True, False, True, False), "a drafting block is never recurrent"


@pytest.mark.parametrize("arch", HYBRIDS)
def test_a_file_without_its_drafting_block_is_none_the_worse(arch: str) -> None:
    family, config, tensors = rig.made(arch, DRAFTING)
    bare = {name: each for name, each in tensors.items() if not name.startswith("blk.3")}
    bound = bind(family, config, bare)
    assert bound.config.nextn == 0
    assert np.array_equal(rig.run(bound)["logits"], rig.run(bind(family, config, tensors))["logits"])
    half = bare | {"blk.3.attn_q.weight": tensors["blk.3.attn_q.weight"]}
    assert bind(family, config, half).ops == bound.ops, "a part of a block that the keys name is left alone"
    with pytest.raises(InvalidModelFile, match=r"blk\.3\.attn_q\.weight"):
        bind(family, replace(config, nextn=0), half)


def test_a_drafting_block_with_an_unknown_part_is_refused_and_so_is_one_of_a_family_without() -> None:
    family, config, tensors = rig.made("qwen35", DRAFTING)
    for name in ("blk.3.nextn.odd.weight", "blk.4.attn_q.weight"):
        with pytest.raises(InvalidModelFile, match=name.replace(".", r"\.")):
            bind(family, config, tensors | {name: view(name, np.ones(rig.HIDDEN))})
    with pytest.raises(UnsupportedModel, match=r"qwen3\.nextn_predict_layers is 1"):
        config_of("qwen3", nextn_predict_layers=1)
    with pytest.raises(InvalidModelFile, match="nextn_predict_layers"):
        config_of("qwen35", nextn_predict_layers=4)


# ------------------------------------------------------------------------------------------------------------- shapes


def shape(arch: str, stack: rig.Stack) -> tuple[ModelShape, dict[str, TensorView]]:
    family, config, tensors = rig.made(arch, stack)
    return shape_of(family, config, tensors, name="made", quant="F32"), tensors


@pytest.mark.parametrize(("arch", "name"), [(arch, name) for arch in ARCHS for name in rig.stacks_of(arch)])
def test_every_tensor_is_counted_once_in_its_part(arch: str, name: str) -> None:
    read, tensors = shape(arch, rig.STACKS[name])
    assert read.weights_bytes == sum(each.nbytes for each in tensors.values())
    *tables, norm = TOKEN_INPUT
    elsewhere = ("output_norm.weight", "rope_freqs.weight", norm)
    assert read.other_bytes == sum(tensors[of].nbytes for of in elsewhere if of in tensors)
    experts = sum(each.nbytes for of, each in tensors.items() if "_exps." in of)
    layers = (*read.layers, *read.nextn)
    assert sum(layer.expert_bytes for layer in layers) == experts
    assert sum(layer.table_bytes for layer in layers) == sum(tensors[of].nbytes for of in tables if of in tensors)
    assert sum(layer.params for layer in layers) * 4 == sum(layer.bytes - layer.table_bytes for layer in layers)
    assert all(layer.mixer_bytes > 0 and layer.ffn_bytes > 0 for layer in layers)
    assert [layer.used_experts for layer in layers] == [0.5 if experts else 0.0] * len(layers)


@pytest.mark.parametrize("arch", HYBRIDS)
def test_a_hybrid_s_shape(arch: str) -> None:
    read, tensors = shape(arch, DRAFTING)
    delta, attention = read.layers[:2]
    assert delta.kv is None and (delta.state_elements, delta.mixer_units) == (4 * 8 * 8, 2)
    assert attention.kv is not None and attention.kv.elements == 2 * 2 * 16 and attention.state_elements == 0
    assert attention.kv_bytes == 2 * 32 * rig.HIDDEN * 4
    held = bind(*rig.made(arch, DRAFTING)).state_layers
    exact = sum(4 * ((each.kernel - 1) * each.channels + each.heads * each.key_dim * each.value_dim) for each in held)
    assert read.state_bytes_per_request() == exact, "what a backend holds in float32"
    assert len(read.nextn) == 1 and read.nextn[0].kv is not None
    assert read.nextn_bytes == sum(each.nbytes for of, each in tensors.items() if ".nextn." in of)
    assert read.mixer_width == 4 * 32 + 2 * 2 * 16


def test_windows_are_those_of_the_declared_layers() -> None:
    read, _ = shape("gemma2", FOUR)
    assert [layer.kv.window for layer in read.layers if layer.kv] == [3, 0, 3, 0]
    assert read.windows == (3,)


def test_fused_projections_count_their_share_of_kv() -> None:
    for arch in ("qwen3", "qwen35"):
        apart, fused = (shape(arch, stack)[0].layers for stack in (FOUR, FUSED))
        assert [layer.kv_bytes for layer in apart] == [layer.kv_bytes for layer in fused]


@pytest.mark.parametrize("arch", ARCHS)
def test_the_inner_width_is_what_one_token_computes(arch: str) -> None:
    config = config_of(arch)
    routed = 2 * 24 + config.experts.shared_width if config.experts else 0
    dense = 48 if config.experts is None or arch == "gemma4-experts" else 0
    assert config.ffn == dense + routed


@pytest.mark.parametrize("arch", ARCHS)
def test_buffers_have_one_width_and_are_written_before_they_are_read(arch: str) -> None:
    """Buffers with one name have one width, and no op reads a buffer that nothing wrote."""
    bound = bind(*rig.made(arch, FOUR))
    written = {"x"}
    widths: dict[str, int] = {}
    for op in bound.ops:
        sources = [getattr(op, name, None) for name in ("src", "add", "gate", "up", "logits", "mixed", "q")]
        parts = [part.out for part in op.parts] if isinstance(op, Linear) else [getattr(op, "out", None)]
        for buffer in (*sources, *parts):
            if buffer is not None and hasattr(buffer, "width"):
                assert widths.setdefault(buffer.name, buffer.width) == buffer.width
        assert all(source.name in written for source in sources if source is not None and hasattr(source, "width"))
        written |= {buffer.name for buffer in parts if buffer is not None}
