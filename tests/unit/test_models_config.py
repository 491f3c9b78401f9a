"""Config from metadata, rope frequencies, and the numbers that the budget reads."""

from __future__ import annotations

import math
from typing import Any

import pytest

from homeserve.errors import InvalidModelFile, UnknownArchitecture, UnsupportedModel
from homeserve.models import registry
from homeserve.models.config import settle
from homeserve.models.family import Family
from homeserve.models.rope import resolve_rope
from homeserve.models.stages import Attention, LinearScaling, Llama3Scaling, RopeFacts, YarnScaling

LLAMA: dict[str, Any] = {
    "llama.block_count": 3,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 100,
}


def config(**changes: Any) -> Any:
    """A llama config with keys changed; `__` stands for a dot, None removes the key."""
    metadata = dict(LLAMA)
    for name, value in changes.items():
        key = name.replace("__", ".")
        key = key if key.startswith(("homeserve.", "tokenizer.")) else f"llama.{key}"
        metadata.pop(key, None)
        if value is not None:
            metadata[key] = value
    return registry.family("llama").config_from(metadata)


def test_config_of_a_plain_model() -> None:
    made = config()
    assert (made.layers, made.hidden, made.vocab, made.context) == (3, 64, 100, 512)
    assert (made.heads, made.kv_heads, made.head_dim, made.ffn) == (4, 2, 16, 96)
    assert made.rope == RopeFacts(dims=16, base=10000.0, interleaved=True)
    assert made.attention_scale == pytest.approx(0.25)
    assert made.window == 0


def test_defaults_follow_the_format() -> None:
    made = config(attention__head_count_kv=None, vocab_size=None, tokenizer__ggml__tokens=["a"] * 7)
    assert made.kv_heads == 4
    assert made.vocab == 7
    assert config(attention__key_length=32, attention__value_length=32).head_dim == 32


def test_numbers_may_differ_by_layer() -> None:
    made = config(feed_forward_length=[32, 64, 96], attention__head_count_kv=[4, 2, 1])
    stages = [registry.family("llama").stage_facts(made, layer) for layer in range(3)]
    assert [stage[1].width for stage in stages] == [32, 64, 96]
    assert [stage[0].kv_heads for stage in stages] == [4, 2, 1]
    assert made.ffn == 96


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", None),
        ("block_count", 0),
        ("block_count", 10**9),
        ("block_count", "3"),
        ("block_count", True),
        ("block_count", 3.0),
        ("embedding_length", -64),
        ("attention.head_count", 0),
        ("attention.head_count", [4, 4]),
        ("attention.head_count", [4, 4, "x"]),
        ("attention.head_count_kv", 3),
        ("attention.layer_norm_rms_epsilon", 0.0),
        ("attention.layer_norm_rms_epsilon", math.nan),
        ("attention.layer_norm_rms_epsilon", None),
        ("rope.freq_base", math.inf),
        ("rope.freq_base", 0.5),
        ("rope.dimension_count", 15),
        ("rope.dimension_count", 18),
        ("context_length", None),
        ("vocab_size", None),
        ("attention.sliding_window", -1),
        ("rope.scaling.type", 7),
    ],
)
def test_a_bad_key_is_named(key: str, value: object) -> None:
    with pytest.raises(InvalidModelFile) as caught:
        config(**{key.replace(".", "__"): value})
    assert caught.value.where == f"llama.{key}"
    assert f"llama.{key}" in caught.value.message


def test_a_long_hostile_value_does_not_fill_the_error() -> None:
    with pytest.raises(InvalidModelFile) as caught:
        config(block_count="x" * 10_000)
    assert len(caught.value.message) < 200


def test_experts_and_unknown_scaling_are_refused_by_name() -> None:
    dense = {key.replace("llama.", "qwen3."): value for key, value in LLAMA.items()}
    with pytest.raises(UnsupportedModel, match="qwen3.expert_count is 8"):
        registry.family("qwen3").config_from(dense | {"qwen3.expert_count": 8})
    with pytest.raises(UnsupportedModel, match="longrope"):
        config(rope__scaling__type="longrope")
    with pytest.raises(UnsupportedModel, match="value_length"):
        config(attention__value_length=8)
    with pytest.raises(UnsupportedModel, match="causal"):
        config(attention__causal=False)


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(UnknownArchitecture) as caught:
        registry.family("warpdrive")
    assert "warpdrive" in caught.value.message and "llama" in caught.value.message


def test_a_family_without_stage_facts_fails_at_construction_by_name() -> None:
    known = registry.family("llama")
    with pytest.raises(TypeError, match=r"'halfling' lacks stage_facts"):
        Family("halfling", known.config_from, None, known.tensor_names)  # type: ignore[arg-type]


def test_a_declaration_is_an_immutable_value() -> None:
    """Rule 1: no tensor, no module: two declarations from equal configs are equal, hashable and frozen."""
    declare = registry.family("llama").stage_facts
    first, second = declare(config(), 1), declare(config(), 1)
    assert first == second and hash(first) == hash(second) and first is not second
    with pytest.raises(AttributeError):
        first[0].heads = 8  # type: ignore[misc]


def test_settle_decides_what_only_tensors_say() -> None:
    """Rule 2: one rule for optional parts; declaration and builder read the settled config."""
    names = {"output.weight", "blk.1.attn_q.bias", "rope_freqs.weight", "blk.0.attn_q.weight"}
    plain, settled = settle(config(), []), settle(config(), names)
    assert plain.tied_head and not settled.tied_head
    assert plain.rope.factor_tensor == "" and settled.rope.factor_tensor == "rope_freqs.weight"
    biases = [registry.family("llama").stage_facts(settled, layer)[0].q_bias for layer in range(3)]
    assert biases == [False, True, False]


# ------------------------------------------------------------------------------------------------------------- rope


def test_plain_rope_frequencies() -> None:
    rope = resolve_rope(RopeFacts(dims=4, base=100.0, interleaved=False))
    assert rope.frequencies == pytest.approx((1.0, 0.1))
    assert rope.magnitude == 1.0 and not rope.interleaved


def test_linear_scaling_divides_and_a_factor_of_one_is_none() -> None:
    scaled = config(rope__scaling__type="linear", rope__scaling__factor=4.0).rope
    assert scaled.scaling == LinearScaling(4.0)
    assert resolve_rope(scaled).frequencies[0] == 0.25
    assert config(rope__scaling__type="linear", rope__scaling__factor=1.0).rope.scaling is None
    assert config(rope__scale_linear=2.0).rope.scaling == LinearScaling(2.0)


def test_llama3_scaling_keeps_short_and_divides_long_wavelengths() -> None:
    made = config(
        homeserve__rope_llama3_factor=8.0,
        homeserve__rope_llama3_low_freq_factor=1.0,
        homeserve__rope_llama3_high_freq_factor=4.0,
        homeserve__rope_llama3_original_context=64,
        homeserve__rope_interleaved=False,
        rope__freq_base=500000.0,
    ).rope
    assert made.scaling == Llama3Scaling(8.0, 1.0, 4.0, 64) and not made.interleaved
    plain = [500000.0 ** (-2 * i / 16) for i in range(8)]
    ratios = [p / f for p, f in zip(plain, resolve_rope(made).frequencies, strict=True)]
    assert ratios[0] == 1.0
    assert ratios[-1] == pytest.approx(8.0)
    assert all(1.0 <= ratio <= 8.0 + 1e-9 for ratio in ratios)
    # Pair 1 has wavelength 2 pi / 0.194 = 32.4, between 64/4 and 64/1: the smooth part, by the formula.
    smooth = (64 / (2 * math.pi / plain[1]) - 1.0) / 3.0
    assert ratios[1] == pytest.approx(1.0 / ((1.0 - smooth) / 8.0 + smooth))


def test_llama3_factors_that_cross_are_refused() -> None:
    with pytest.raises(InvalidModelFile, match="high_freq"):
        config(
            homeserve__rope_llama3_factor=8.0,
            homeserve__rope_llama3_low_freq_factor=4.0,
            homeserve__rope_llama3_high_freq_factor=4.0,
            homeserve__rope_llama3_original_context=64,
        )


def test_yarn_keeps_fast_pairs_divides_slow_ones_and_grows() -> None:
    made = config(
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=2048,
        rope__freq_base=10000.0,
        attention__key_length=64,
        attention__value_length=64,
    ).rope
    assert isinstance(made.scaling, YarnScaling) and made.scaling.original_context == 2048
    resolved = resolve_rope(made)
    plain = [10000.0 ** (-2 * i / 64) for i in range(32)]
    assert resolved.frequencies[0] == pytest.approx(plain[0])
    assert resolved.frequencies[-1] == pytest.approx(plain[-1] / 4)
    assert resolved.magnitude == pytest.approx(0.1 * math.log(4.0) + 1.0)
    flat = RopeFacts(64, 10000.0, False, YarnScaling(4.0, 2048, log_multiplier=1.0))
    assert resolve_rope(flat).magnitude == pytest.approx(1.0)


def test_factors_divide_the_frequencies() -> None:
    facts_ = RopeFacts(dims=4, base=100.0, interleaved=True)
    assert resolve_rope(facts_, (2.0, 5.0)).frequencies == pytest.approx((0.5, 0.02))


def test_a_window_is_declared_on_every_layer() -> None:
    made = config(attention__sliding_window=128)
    stages = [registry.family("llama").stage_facts(made, layer)[0] for layer in range(3)]
    assert all(isinstance(stage, Attention) and stage.window == 128 for stage in stages)
