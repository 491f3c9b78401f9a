"""Folders of every family: the tensors and keys of the GGUF of the same weights, whatever spelling they come in."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.numpy import load_file, save_file

from backends.base import TensorView
from backends.quant import QuantType
from homeserve import checkpoint
from homeserve.checkpoint import hf_config
from homeserve.checkpoint.hf_names import Piece, draft_blocks, pieces_of
from homeserve.checkpoint.safetensors_forms import MadeView
from homeserve.errors import InvalidModelFile, UnknownArchitecture
from homeserve.models.hf_families import FAMILIES
from homeserve.models.registry import folder_families

TINY = Path(__file__).parent.parent / "data" / "tiny"
SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "1", 16)
FOLDERS = (
    "gemma3_text", "gpt_oss", "qwen2", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next",
)  # fmt: skip
TILED = ("qwen3_5_moe_text", "qwen3_5_text")
KEY_HEADS, VALUE_HEADS, VALUE_DIM, KEY_DIM = 2, 4, 16, 16
"""Of the fixtures with delta nets."""

Write = Callable[..., str]


def opened_at(path: str) -> checkpoint.Checkpoint:
    return checkpoint.open(path, folder_families)


def values(view: TensorView) -> np.ndarray:
    return np.frombuffer(view.data, np.float32).reshape(view.rows, view.cols)


def grouped(name: str, tiled: np.ndarray) -> np.ndarray:
    """A GGUF tensor of a delta net with its value heads back in the order of the folder."""
    order = [j * KEY_HEADS + g for g in range(KEY_HEADS) for j in range(VALUE_HEADS // KEY_HEADS)]
    role = name.split(".")[2]
    if role in ("ssm_beta", "ssm_alpha"):
        return tiled[order]
    if role in ("ssm_a", "ssm_dt"):
        return tiled[:, order]
    rows = np.concatenate([np.arange(h * VALUE_DIM, (h + 1) * VALUE_DIM) for h in order])
    if role == "ssm_out":
        return tiled[:, rows]
    if role == "attn_gate":
        return tiled[rows]
    if role in ("attn_qkv", "ssm_conv1d"):
        keys = 2 * KEY_HEADS * KEY_DIM
        return np.concatenate([tiled[:keys], tiled[keys:][rows]])
    return tiled


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_and_its_gguf_hold_the_same_tensors(name: str) -> None:
    folder, file = opened_at(str(TINY / name)), opened_at(str(TINY / f"{name}.f32.gguf"))
    mine, theirs = dict(folder.tensors), dict(file.tensors)
    if name == "qwen3_next":  # The folder has q, k, v and z in one tensor, as old GGUF files do.
        for layer in range(3):
            fused = values(mine.pop(f"blk.{layer}.ssm_in.weight")).reshape(KEY_HEADS, -1, 64)
            q, k, v, z = np.split(fused, [16, 32, 64], axis=1)
            parts = [part.reshape(-1, 64) for part in (q, k, v, z)]
            assert np.array_equal(np.concatenate(parts[:3]), values(theirs.pop(f"blk.{layer}.attn_qkv.weight")))
            assert np.array_equal(parts[3], values(theirs.pop(f"blk.{layer}.attn_gate.weight")))
    assert mine.keys() == theirs.keys()
    for tensor, view in mine.items():
        other = theirs[tensor]
        assert (view.type, view.rows, view.cols) == (other.type, other.rows, other.cols), tensor
        wanted = values(other)
        if name in TILED and tensor.startswith("blk.") and not tensor.startswith("blk.3."):
            wanted = grouped(tensor, wanted)
        close = tensor.endswith("ssm_a")
        assert np.allclose(values(view), wanted, rtol=1e-6) if close else np.array_equal(values(view), wanted), tensor
    folder.close()
    file.close()


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_and_its_gguf_say_the_same(name: str) -> None:
    """Every key that both have; and what the family reads is among them or follows from it."""
    folder, file = opened_at(str(TINY / name)), opened_at(str(TINY / f"{name}.f32.gguf"))
    assert folder.arch == file.arch
    shared = [key for key in folder.metadata if key.startswith(f"{file.arch}.") and key in file.metadata]
    assert len(shared) > 7
    for key in shared:
        mine, theirs = folder.metadata[key], file.metadata[key]
        assert list(mine) == list(theirs) if isinstance(mine, list) else mine == pytest.approx(theirs), key
    assert folder.metadata["homeserve.rope_interleaved"] is False
    assert folder.metadata.get("homeserve.delta_tiled") is (False if "3_5" in name or "next" in name else None)


# --------------------------------------------------------------------------------------------- spellings of a config


def metadata(config: Mapping[str, Any]) -> dict[str, object]:
    inner = hf_config.text_config("config.json", config)
    return hf_config.metadata_from("config.json", inner, hf_config.rules_for("config.json", inner, FAMILIES))


def of_fixture(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fixture's config with changes; "absent" removes a setting."""
    config = json.loads((TINY / name / "config.json").read_text()) | changes
    return {key: value for key, value in config.items() if value != "absent"}


@pytest.mark.parametrize(
    ("name", "older"),
    [
        (
            "gemma3_text",
            {
                "rope_parameters": "absent",
                "rope_theta": 1000000.0,
                "rope_local_base_freq": 10000.0,
                "layer_types": "absent",
                "sliding_window_pattern": 6,
            },
        ),
        (
            "gpt_oss",
            {
                "rope_parameters": "absent",
                "rope_theta": 150000,
                "rope_scaling": {
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "factor": 32.0,
                    "original_max_position_embeddings": 4096,
                    "rope_type": "yarn",
                    "truncate": False,
                },
                "layer_types": "absent",
                "num_experts_per_tok": "absent",
                "experts_per_token": 2,
                "swiglu_alpha": "absent",
            },
        ),
        ("qwen2", {"rope_parameters": "absent", "rope_theta": 10000.0, "layer_types": "absent"}),
        ("qwen3_moe", {"num_local_experts": "absent", "num_experts": 8, "rope_parameters": "absent"}),
        (
            "qwen3_next",
            {
                "rope_parameters": "absent",
                "rope_theta": 10000,
                "partial_rotary_factor": 0.25,
                "rope_scaling": None,
            },
        ),
        ("qwen3_5_text", {"rope_parameters": {"rope_theta": 10000.0}, "partial_rotary_factor": 0.5}),
    ],
)
def test_the_older_spelling_says_the_same(name: str, older: dict[str, Any]) -> None:
    newer = of_fixture(name, {})
    assert metadata(of_fixture(name, older)) == metadata(newer)


def test_recurrent_layers_by_interval() -> None:
    given = of_fixture("qwen3_next", {"layer_types": "absent", "full_attention_interval": 2})
    found = metadata(given)
    assert found["qwen3next.full_attention_interval"] == 2 and "qwen3next.attention.recurrent_layers" not in found


def test_what_a_config_leaves_out_is_what_transformers_takes() -> None:
    """The text part of a published gemma-3 config: most settings are those of the class."""
    inner = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    found = metadata({"model_type": "gemma3", "text_config": inner, "vision_config": {}, "eos_token_id": [1, 106]})
    wanted = {
        "attention.head_count": 8,
        "attention.head_count_kv": 4,
        "attention.key_length": 256,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.scale": 1 / 16,
        "attention.sliding_window": 1024,
        "context_length": 131072,
        "embedding_length": 2560,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "rope.scaling.factor": 8.0,
        "rope.scaling.type": "linear",
        "vocab_size": 262208,
    }
    assert {key: found.get(f"gemma3.{key}") for key in wanted} == wanted
    assert found["gemma3.attention.sliding_window_pattern"] == [i % 6 < 5 for i in range(34)]


def test_null_means_no_soft_cap_and_nothing_means_the_usual_one() -> None:
    base = {"model_type": "gemma2", "num_hidden_layers": 2}
    usual, none = metadata(base), metadata(base | {"attn_logit_softcapping": None, "final_logit_softcapping": 20})
    caps = ("gemma2.attn_logit_softcapping", "gemma2.final_logit_softcapping")
    assert [usual[cap] for cap in caps] == [50.0, 30.0] and [none[cap] for cap in caps] == [0.0, 20.0]
    assert usual["gemma2.context_length"] == 8192 and "gemma2.rope.freq_base_swa" not in usual


GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "attention_k_eq_v": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
ROUTED = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 64}
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
}
WIDE = {"per_layer_config": {"5": {"head_dim": 64, "num_key_value_heads": 1}}}


def test_layers_that_see_everything_have_heads_of_their_own() -> None:
    newer, older = (
        metadata(GEMMA4 | changes) for changes in (WIDE, {"global_head_dim": 64, "num_global_key_value_heads": 1})
    )
    assert newer == older
    wanted = {
        "attention.head_count_kv": [4, 4, 4, 4, 4, 1],
        "attention.key_length": 64,
        "attention.key_length_swa": 256,
        "attention.shared_kv_layers": 2,
        "attention.sliding_window_pattern": [True] * 5 + [False],
        "embedding_length_per_layer_input": 256,
        "feed_forward_length": [9216] * 4 + [18432] * 2,
        "rope.dimension_count": 64,
        "rope.freq_base_swa": 1e4,
    }
    assert {key: newer.get(f"gemma4.{key}") for key in wanted} == wanted
    without = metadata(GEMMA4 | WIDE | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0})
    assert not {"gemma4.embedding_length_per_layer_input", "gemma4.attention.shared_kv_layers"} & without.keys()
    factors = hf_config.rope_factors("config.json", GEMMA4 | WIDE, FAMILIES["gemma4"])
    assert factors == [1.0] * 16 + [1e30] * 16
    assert hf_config.rope_factors("config.json", {}, FAMILIES["gemma3"]) is None


def test_mixtral_is_a_llama_with_experts() -> None:
    found = metadata(MIXTRAL)
    wanted = {"expert_count": 8, "expert_used_count": 2, "feed_forward_length": 96, "rope.freq_base": 1e6}
    assert {key: found[f"llama.{key}"] for key in wanted} == wanted, "what transformers takes"
    assert metadata(MIXTRAL | {"num_local_experts": 4})["llama.expert_count"] == 4
    with pytest.raises(InvalidModelFile, match="num_experts_per_tok"):
        metadata(MIXTRAL | {"num_experts_per_tok": "two"})


def test_experts_count_where_their_block_is_on() -> None:
    on = metadata(GEMMA4 | WIDE | ROUTED)
    wanted = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 64}
    assert {key: on[f"gemma4.{key}"] for key in wanted} == wanted
    for off in ({"enable_moe_block": False}, {"enable_moe_block": None}):
        assert not {f"gemma4.{key}" for key in wanted} & metadata(GEMMA4 | WIDE | ROUTED | off).keys()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"enable_moe_block": True}, "num_experts: is missing"),
        ({"enable_moe_block": 1}, "enable_moe_block"),
        ({"per_layer_config": {"5": {"head_dim": 64}, "4": {"head_dim": 32}}}, "2 widths"),
        ({"per_layer_config": {"5": {"sliding_window": 3}}}, r"per_layer_config\.5"),
        ({"global_head_dim": 1 << 30}, "global_head_dim.*limit"),
        ({"per_layer_config": {"9" * 5000: {"head_dim": 64}}}, "per_layer_config"),
        ({"per_layer_config": {"x": {}}}, r"per_layer_config\.x"),
        ({"per_layer_config": {"5": 3}}, r"per_layer_config\.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}}}, "partial"),
    ],
)
def test_heads_that_the_rules_cannot_express_are_refused(changes: dict[str, Any], words: str) -> None:
    config = GEMMA4 | changes
    with pytest.raises(InvalidModelFile, match=words):
        metadata(config)
        hf_config.rope_factors("config.json", config, FAMILIES["gemma4"])


def test_a_part_of_a_wide_head_is_nothing_that_other_families_know() -> None:
    with pytest.raises(InvalidModelFile, match="proportional"):
        metadata(of_fixture("qwen3", {"rope_parameters": {"rope_type": "proportional"}}))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gemma3_text", {"layer_types": ["full_attention"]}, "layer_types.*6 types"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 5 + ["chunked_attention"]}, "chunked_attention"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 2}}},
            r"rope_parameters\.sliding_attention\.rope_type",
        ),
        (
            "qwen3",
            {"rope_parameters": {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 6.0}}},
            "rope_parameters.*differs",
        ),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate"),
        ("qwen3_5_text", {"rope_parameters": {"partial_rotary_factor": 0.3}}, "partial_rotary_factor"),
        ("qwen3_5_text", {"linear_num_key_heads": 0}, "linear_num_key_heads"),
        ("qwen3_5_text", {"num_hidden_layers": 1 << 30}, "num_hidden_layers"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ("qwen3", {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ("qwen3", {"text_config": 3}, "text_config"),
    ],
)
def test_settings_that_the_rules_cannot_express_are_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(of_fixture(name, changes)))
    save_file({"model.norm.weight": np.ones(64, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidModelFile, match=words):
        opened_at(str(tmp_path))


STRANGE: list[Any] = [
    None, True, False, 0, -1, 3, 1 << 40, 1e308, float("inf"), float("nan"), 0.3, "x", [], [None], {}, {"rope_type": 3},
    {"rope_type": "yarn"}, {"full_attention": {}}, {"full_attention": 3, "sliding_attention": 4}, "9" * 50,
]  # fmt: skip


@pytest.mark.parametrize("round", range(500 if SLOW else 4))
def test_mutated_configs_are_read_or_refused(round: int) -> None:
    rng = random.Random(SEED * 7919 + round)
    configs = [*(of_fixture(name, {}) for name in FOLDERS), GEMMA4 | WIDE, GEMMA4 | WIDE | ROUTED, MIXTRAL]
    for _ in range(60):
        config = json.loads(json.dumps(rng.choice(configs)))
        for _ in range(rng.randint(1, 3)):
            place = config
            key = rng.choice(list(place))
            if isinstance(place[key], dict) and place[key] and rng.random() < 0.6:
                place = place[key]
                key = rng.choice(list(place))
            place[key] = rng.choice(STRANGE)
        with suppress(InvalidModelFile, UnknownArchitecture):
            metadata(config)
            inner = hf_config.text_config("config.json", config)
            rules = hf_config.rules_for("config.json", inner, FAMILIES)
            hf_config.trunk_layers("config.json", inner, rules)
            hf_config.rope_factors("config.json", inner, rules)


# ------------------------------------------------------------------------------------------------------------ tensors


@pytest.fixture
def rewrite(tmp_path: Path) -> Write:
    """`rewrite(name, change, config=...)`: a fixture's folder with its tensors changed, and settings changed."""

    def rewrite(name: str, change: Callable[[dict[str, Any]], dict[str, Any]], **config: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps(of_fixture(name, config)))
        save_file(change(load_file(TINY / name / "model.safetensors")), tmp_path / "model.safetensors")
        return str(tmp_path)

    return rewrite


def together(tensors: dict[str, Any]) -> dict[str, Any]:
    """Experts as stacks, as `transformers` 5 holds them in memory and newer checkpoints on disk."""
    rest = {name: each for name, each in tensors.items() if ".experts." not in name}
    for layer in range(4):
        block = f"model.layers.{layer}.mlp.experts"
        gates, ups, downs = (
            [tensors[f"{block}.{e}.{part}_proj.weight"] for e in range(8)] for part in ("gate", "up", "down")
        )
        rest[f"{block}.gate_up_proj"] = np.stack([np.concatenate(pair) for pair in zip(gates, ups, strict=True)])
        rest[f"{block}.down_proj"] = np.stack(downs)
    return rest


def test_stacked_experts_are_views_and_hold_the_same_matrices(rewrite: Write) -> None:
    one_by_one = opened_at(str(TINY / "qwen3_moe"))
    stacked = opened_at(rewrite("qwen3_moe", together))
    both, down = stacked.tensors["blk.2.ffn_gate_up_exps.weight"], stacked.tensors["blk.2.ffn_down_exps.weight"]
    assert (both.rows, both.cols) == (8 * 128, 64) and not both.data.flags.owndata and not isinstance(both, MadeView)
    gate, up = (one_by_one.tensors[f"blk.2.ffn_{part}_exps.weight"] for part in ("gate", "up"))
    whole = values(both).reshape(8, 2, 64, 64)
    assert np.array_equal(whole[:, 0].reshape(-1, 64), values(gate))
    assert np.array_equal(whole[:, 1].reshape(-1, 64), values(up))
    assert np.array_equal(values(down), values(one_by_one.tensors["blk.2.ffn_down_exps.weight"]))
    assert isinstance(gate, MadeView) and gate.nbytes == gate.data.nbytes and gate.data is not gate.data
    pieces = list(gate.pieces())
    assert [piece.nbytes for piece in pieces] == [gate.nbytes // 8] * 8 and not any(
        each.flags.owndata for each in pieces
    )
    assert np.array_equal(np.concatenate(pieces), gate.data)


def test_a_wrapped_model_is_read_without_its_other_parts(rewrite: Write) -> None:
    def wrap(tensors: dict[str, Any]) -> dict[str, Any]:
        named = {
            (n.replace("model.", "model.language_model.", 1) if n.startswith("model.") else n): each
            for n, each in tensors.items()
        }
        return named | {"model.visual.blocks.0.attn.proj.weight": np.ones((2, 2), np.float32)}

    inner = of_fixture("qwen3_5_text", {})
    path = rewrite("qwen3_5_text", wrap, model_type="qwen3_5", text_config=inner)
    plain = opened_at(str(TINY / "qwen3_5_text"))
    wrapped = opened_at(path)
    assert wrapped.tensors.keys() == plain.tensors.keys() and wrapped.arch == plain.arch
    for opened in (wrapped, plain):
        opened.metadata = {key: value for key, value in opened.metadata.items() if not key.startswith("tokenizer.")}
    assert {**wrapped.metadata, "general.name": ""} == {**plain.metadata, "general.name": ""}


def test_a_drafting_block_lies_behind_the_trunk(rewrite: Write) -> None:
    def draft(tensors: dict[str, Any]) -> dict[str, Any]:
        block = {
            n.replace("model.layers.3", "mtp.layers.0"): each
            for n, each in tensors.items()
            if n.startswith("model.layers.3")
        }
        ones = np.full(64, 0.5, np.float32)
        norms = {f"mtp.{n}.weight": ones for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
        return tensors | block | norms | {"mtp.fc.weight": np.ones((64, 128), np.float32)}

    opened = opened_at(rewrite("qwen3_5_text", draft))
    theirs = opened_at(str(TINY / "qwen3_5_text_mtp.f32.gguf"))
    assert opened.tensors.keys() == theirs.tensors.keys()
    for key in ("block_count", "nextn_predict_layers", "attention.recurrent_layers"):
        mine, other = opened.metadata[f"qwen35.{key}"], theirs.metadata[f"qwen35.{key}"]
        assert (list(mine) if isinstance(mine, list) else mine) == (list(other) if isinstance(mine, list) else other)
    assert values(opened.tensors["blk.4.nextn.enorm.weight"]).tolist() == [[1.5] * 64]
    assert np.array_equal(
        values(opened.tensors["blk.4.attn_norm.weight"]), values(opened.tensors["blk.3.attn_norm.weight"])
    )


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The numbers of 4 bits: a sign, two bits of exponent, one of mantissa."""


def four_bits(tensors: dict[str, Any], truth: dict[str, np.ndarray]) -> dict[str, Any]:
    """The experts of gpt-oss in blocks and scales; what they mean goes into `truth`."""
    rng = np.random.default_rng(5)
    rest = {n: each for n, each in tensors.items() if "_proj" not in n or ".experts." not in n or "bias" in n}
    for layer in range(4):
        for part, rows in (("gate_up_proj", 128), ("down_proj", 64)):
            name = f"model.layers.{layer}.mlp.experts.{part}"
            blocks = rng.integers(0, 256, (4, rows, 2, 16), dtype=np.uint8)
            scales = rng.integers(110, 130, (4, rows, 2), dtype=np.uint8)
            pairs = np.stack([FP4[blocks & 15], FP4[blocks >> 4]], axis=-1).reshape(4, rows, 2, 32)
            truth[name] = (pairs * np.exp2(scales[..., None].astype(float) - 127)).reshape(4, rows, 64)
            rest |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return rest


def test_experts_in_4_bits_mean_the_same_numbers(rewrite: Write) -> None:
    truth: dict[str, np.ndarray] = {}
    path = rewrite("gpt_oss", lambda tensors: four_bits(tensors, truth), quantization_config={"quant_method": "mxfp4"})
    opened = opened_at(path)
    for layer in (0, 3):
        fused = truth[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        wanted = {"gate": fused[:, 0::2], "up": fused[:, 1::2]}
        wanted["down"] = truth[f"model.layers.{layer}.mlp.experts.down_proj"]
        for part, dense in wanted.items():
            view = opened.tensors[f"blk.{layer}.ffn_{part}_exps.weight"]
            assert (view.type, view.rows, view.cols) == (QuantType.MXFP4, 4 * 64, 64) and isinstance(view, MadeView)
            assert [each.nbytes for each in view.pieces()] == [view.nbytes // 4] * 4
            got = dequantize(view.data.reshape(view.rows, -1), GGMLQuantizationType.MXFP4)
            assert np.array_equal(got, dense.reshape(-1, 64)), part


Change = Callable[[dict[str, Any]], dict[str, Any]]


def without(*names: str) -> Change:
    return lambda tensors: {name: each for name, each in tensors.items() if name not in names}


def with_(name: str, value: np.ndarray) -> Change:
    return lambda tensors: tensors | {name: value}


def broken_blocks(name: str, value: np.ndarray | None) -> Change:
    """4-bit experts, one of their tensors replaced or left out."""

    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        made = four_bits(tensors, {})
        return {n: each for n, each in made.items() if n != name} | ({} if value is None else {name: value})

    return change


MATRIX = np.ones((64, 64), np.float32)
EXPERTS = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("qwen3_moe", without(f"{EXPERTS}.3.up_proj.weight"), "8 experts of which 7 are there"),
        ("qwen3_moe", with_(f"{EXPERTS}.999999.up_proj.weight", MATRIX), "1000000 experts of which 9"),
        ("qwen3_moe", with_(f"{EXPERTS}.3.up_proj.weight", MATRIX[:32]), r"matrix \[32, 64\]"),
        ("qwen3_moe", with_(f"{EXPERTS}.3.up_proj.weight", MATRIX.astype(np.float16)), "F16"),
        ("qwen3_moe", with_(f"{EXPERTS}.3.up_proj.bias", MATRIX[0]), "no place"),
        ("qwen3_moe", with_(f"{EXPERTS}.down_proj", np.stack([MATRIX] * 8)), "as a stack as well"),
        ("qwen3", with_("mtp.fc.weight", MATRIX), "no place"),
        ("qwen3", with_("model.visual.x.weight", MATRIX), "no place"),
        ("gemma3_text", with_("model.layers.0.input_layernorm.weight", np.ones(64, np.int32)), "I32, floats are"),
        ("gpt_oss", with_(f"{EXPERTS}.gate_up_proj", MATRIX), "stack of matrices"),
        ("gpt_oss", with_(f"{EXPERTS}.gate_up_proj", np.ones((4, 64, 127), np.float32)), "rows of 127"),
        ("gpt_oss", with_(f"{EXPERTS}.gate_up_proj_bias", np.ones((4, 127), np.float32)), "rows of 127"),
        ("gpt_oss", with_(f"{EXPERTS}.down_proj_scales", np.ones((4, 64, 2), np.uint8)), "another form|no blocks"),
        ("gpt_oss", broken_blocks(f"{EXPERTS}.down_proj_scales", None), "has no scales"),
        ("gpt_oss", broken_blocks(f"{EXPERTS}.down_proj_blocks", None), "has no blocks"),
        ("gpt_oss", broken_blocks(f"{EXPERTS}.down_proj_blocks", np.ones((4, 64, 16), np.uint8)), "blocks of shape"),
        ("gpt_oss", broken_blocks(f"{EXPERTS}.down_proj_scales", np.ones((4, 64, 1), np.uint8)), "scales of"),
        ("gpt_oss", broken_blocks(f"{EXPERTS}.down_proj_scales", np.ones((4, 64, 2), np.float32)), "no bytes"),
    ],
)
def test_tensors_of_another_form_are_refused_by_name(rewrite: Write, name: str, change: Change, words: str) -> None:
    with pytest.raises(InvalidModelFile, match=words) as caught:
        opened_at(rewrite(name, change))
    assert "tensor" in str(caught.value)


def test_a_head_that_is_not_there_is_tied_only_where_that_is_usual(rewrite: Write) -> None:
    path = rewrite("gemma3_text", lambda tensors: tensors, tie_word_embeddings="absent")
    assert "output.weight" not in opened_at(path).tensors
    with pytest.raises(InvalidModelFile, match="lm_head"):
        opened_at(rewrite("qwen3", without("lm_head.weight"), tie_word_embeddings="absent"))


def test_names_of_drafting_blocks_count() -> None:
    assert draft_blocks(["mtp.layers.0.x", "mtp.layers.1.y", "mtp.fc.weight", "model.layers.7.z"]) == 2
    found = pieces_of("mtp.layers.1.mlp.up_proj.weight", FAMILIES["qwen3_5"], 32)
    assert found == (Piece("blk.33.ffn_up.weight"),)
