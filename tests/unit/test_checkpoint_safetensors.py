"""Safetensors folders: the library's files are read, configs of both spellings translated, damage refused by name."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from backends.quant import QuantType
from homeserve import checkpoint
from homeserve.checkpoint import hf_config, safetensors_header
from homeserve.errors import InvalidModelFile, UnknownArchitecture
from homeserve.models.registry import folder_families

TINY = Path(__file__).parent.parent / "data" / "tiny"
SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "1", 16)

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "max_position_embeddings": 128,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 10,
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
}
TENSORS = {
    "model.embed_tokens.weight": np.arange(80, dtype=np.float32).reshape(10, 8),
    "model.layers.0.self_attn.q_proj.weight": np.ones((8, 8), np.float16),
    "model.layers.0.self_attn.q_proj.bias": np.ones(8, np.float16),
    "model.layers.0.mlp.down_proj.weight": np.full((8, 16), 2, np.float32),
    "model.norm.weight": np.ones(8, np.float32),
}

Write = Callable[..., str]
open_model = partial(checkpoint.open, families=folder_families)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a folder: config changes, and files of tensors by name."""

    def write(changes: dict[str, Any] | None = None, files: dict[str, Any] | None = None, **texts: Any) -> str:
        config = {key: value for key, value in (CONFIG | (changes or {})).items() if value != "absent"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        for name, tensors in (files or {"model.safetensors": TENSORS}).items():
            save_file(tensors, tmp_path / name)
        for name, value in texts.items():
            content = value if isinstance(value, str) else json.dumps(value)
            (tmp_path / name.replace("__", ".")).write_text(content)
        return str(tmp_path)

    return write


def refused(path: str, words: str) -> None:
    with pytest.raises(InvalidModelFile, match=words) as caught:
        open_model(path)
    assert caught.value.path.startswith(path)


# --------------------------------------------------------------------------------------------------------- sound ones


@pytest.mark.parametrize("name", ["llama", "llama3rope", "mistral"])
def test_a_folder_and_its_gguf_are_the_same_checkpoint(name: str) -> None:
    folder, file = open_model(str(TINY / name)), open_model(str(TINY / f"{name}.f32.gguf"))
    assert set(folder.tensors) == set(file.tensors) - {"rope_freqs.weight"}
    for tensor, view in folder.tensors.items():
        other = file.tensors[tensor]
        assert (view.type, view.rows, view.cols) == (other.type, other.rows, other.cols)
        if not tensor.endswith(("attn_q.weight", "attn_k.weight")):
            assert np.array_equal(view.data, other.data)
    translated = [key for key in folder.metadata if key.startswith("llama.")]
    assert len(translated) > 9
    for key in translated:
        assert folder.metadata[key] == pytest.approx(file.metadata[key])
    assert folder.metadata["homeserve.rope_interleaved"] is False
    assert folder.arch == file.arch and folder.quant_label == file.quant_label == "F32"
    assert "<|im_start|>" in folder.chat_templates["default"]


def test_llama3_rope_is_told_by_its_keys() -> None:
    metadata = open_model(str(TINY / "llama3rope")).metadata
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_context")
    assert [metadata[f"homeserve.rope_llama3_{key}"] for key in keys] == [8.0, 1.0, 4.0, 64]


def test_tensors_keep_type_shape_and_bytes(write: Write) -> None:
    opened = open_model(write())
    embed, q, bias = (opened.tensors[n] for n in ("token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_q.bias"))
    assert (embed.type, embed.rows, embed.cols) == (QuantType.F32, 10, 8)
    assert embed.data.view(np.float32).tolist() == list(range(80)) and not embed.data.flags.owndata
    assert (q.type, q.rows, q.cols) == (QuantType.F16, 8, 8) and (bias.rows, bias.cols) == (1, 8)
    assert opened.file_bytes == (Path(opened.path) / "model.safetensors").stat().st_size
    opened.close()


def test_bf16_is_read(tmp_path: Path) -> None:
    header = json.dumps({"t": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}).encode()
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(header)) + header + bytes(range(12)))
    view = safetensors_header.read(str(tmp_path / "a")).tensors["t"]
    assert (view.type, view.rows, view.cols, bytes(view.data)) == (QuantType.BF16, 2, 3, bytes(range(12)))


def test_shards_by_index(write: Write) -> None:
    names = list(TENSORS)
    files = {"a.safetensors": {n: TENSORS[n] for n in names[:2]}, "b.safetensors": {n: TENSORS[n] for n in names[2:]}}
    weights = {name: file for file, tensors in files.items() for name in tensors}
    path = write(None, files, model__safetensors__index__json={"metadata": {}, "weight_map": weights})
    assert len(open_model(path).tensors) == len(TENSORS)
    (Path(path) / "b.safetensors").unlink()
    refused(path, r"b\.safetensors.*missing")


ROPE_SPELLINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"llama.rope.freq_base": 5000.0}),
    ({"rope_theta": "absent"}, {"llama.rope.freq_base": 10000.0}),
    ({"rope_theta": "absent", "rope_parameters": {"rope_theta": 7.0}}, {"llama.rope.freq_base": 7.0}),
    ({"rope_scaling": None}, {"llama.rope.freq_base": 5000.0}),
    (
        {"rope_scaling": {"type": "linear", "factor": 4}},
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0, "llama.rope.freq_base": 5000.0},
    ),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.0, "beta_fast": 16}},
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.original_context_length": 128,
            "llama.rope.scaling.yarn_beta_fast": 16.0,
            "llama.rope.scaling.attn_factor": pytest.approx(1 / (0.1 * np.log(2) + 1)),
        },
    ),
    (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}},
        {"homeserve.rope_llama3_factor": 8.0, "homeserve.rope_llama3_original_context": 128},
    ),
]


@pytest.mark.parametrize(("changes", "wanted"), ROPE_SPELLINGS)
def test_rope_in_both_spellings(changes: dict[str, Any], wanted: dict[str, Any]) -> None:
    config = {key: value for key, value in (CONFIG | changes).items() if value != "absent"}
    metadata = hf_config.metadata_from(
        "config.json", config, hf_config.rules_for("config.json", config, folder_families())
    )
    assert {key: metadata.get(key) for key in wanted} == wanted


def test_templates_and_end_tokens(write: Write, tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}, {"name": 3}]
    path = write(
        {"eos_token_id": 7, "bos_token_id": 1},
        tokenizer_config__json={"chat_template": named, "bos_token": {"content": "<s>"}, "add_bos_token": True},
        generation_config__json={"eos_token_id": [7, 9, None, "x"]},
    )
    opened = open_model(path)
    assert opened.chat_templates == {"default": "D", "tool_use": "T"}
    keys = opened.tokenizer.metadata
    assert keys["tokenizer.homeserve.end_token_ids"] == (7, 9) and keys["tokenizer.homeserve.bos_text"] == "<s>"
    assert keys["tokenizer.ggml.bos_token_id"] == 1 and keys["tokenizer.ggml.add_bos_token"] is True
    assert opened.tokenizer.json_path is None
    (tmp_path / "chat_template.jinja").write_text("J")
    assert open_model(path).chat_templates["default"] == "J"


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": 3}, "model_type"),
        ({"hidden_size": "absent"}, "hidden_size: is missing"),
        ({"hidden_size": -8}, "hidden_size"),
        ({"hidden_size": 8.5}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor: is missing"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "mscale": 1}}, "mscale"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"tie_word_embeddings": False}, "lm_head"),
    ],
)
def test_configs_that_cannot_be_used(write: Write, changes: dict[str, Any], words: str) -> None:
    refused(write(changes), words)


def test_unknown_families_are_named(write: Write) -> None:
    with pytest.raises(UnknownArchitecture, match="'mamba9'.*llama"):
        open_model(write({"model_type": "mamba9"}))


def test_tensors_without_a_place(write: Write) -> None:
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    open_model(write(None, {"model.safetensors": TENSORS | inverse}))
    odd = {"model.layers.0.self_attn.q_norm.weight": np.ones(4, np.float32)}
    refused(write(None, {"model.safetensors": TENSORS | odd}), "q_norm.*has no place")


def test_damaged_folders(write: Write, tmp_path: Path) -> None:
    path = write()
    for text, words in (("{", "config.json"), ("[1]", "config.json"), ("\udcff", "config.json")):
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        refused(path, words)
    (tmp_path / "config.json").unlink()
    refused(path, "config.json.*missing")


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "x.bin", 3, None])
def test_an_index_cannot_lead_out_of_the_folder(write: Write, shard: object) -> None:
    path = write(None, model__safetensors__index__json={"weight_map": {"model.norm.weight": shard}})
    refused(path, "weight_map")


def test_several_files_need_an_index(write: Write) -> None:
    refused(write(None, {"a.safetensors": TENSORS, "b.safetensors": {}}), "index")
    refused(write(None, {"a.safetensors": TENSORS}, model__safetensors__index__json={"weight_map": {}}), "weight_map")


def entry(dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (entry("F8_E4M3"), "F8_E4M3"),
        (entry(7), "damaged"),
        (entry(shape=()), "shape"),
        (entry(shape=(0, 4)), "shape"),
        (entry(shape=(-2, -2)), "shape"),
        (entry(shape=(1 << 62, 1 << 62)), "needs"),
        (entry(shape=(5,)), "needs 20|its shape"),
        (entry(offsets=(0, 1 << 40)), "bytes of data"),
        (entry(offsets=(16, 0)), "bytes of data"),
        (entry(offsets=(-16, 0)), "bytes of data"),
        (entry(offsets=(0,)), "damaged"),
        (entry() | {"u": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}, "overlaps"),
        ({"t": 3}, "damaged"),
    ],
)
def test_hostile_headers(tmp_path: Path, header: dict[str, Any], words: str) -> None:
    raw = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(32))
    with pytest.raises(InvalidModelFile, match=words):
        safetensors_header.read(str(path))


@pytest.mark.parametrize("data", [b"", b"{", bytes(8), struct.pack("<Q", 1 << 60) + b"{}", b"GGUF" + bytes(40)])
def test_what_is_no_safetensors_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(InvalidModelFile):
        safetensors_header.read(str(path))


@pytest.mark.parametrize("round", range(1000 if SLOW else 8))
def test_mutated_files_open_or_are_refused(tmp_path: Path, round: int) -> None:
    rng = random.Random(SEED * 7919 + round)
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    for _ in range(40):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(8 + length)
            data[at : at + rng.randint(0, 3)] = bytes(rng.choices(b'0123456789[]{}",:-eE\xff ', k=rng.randint(0, 3)))
        path.write_bytes(data)
        try:
            tensors = safetensors_header.read(str(path)).tensors
        except InvalidModelFile:
            continue
        assert all(view.data.nbytes == view.rows * view.type.row_bytes(view.cols) for view in tensors.values())
