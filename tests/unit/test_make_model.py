"""Synthetic models: what is written is what the format's own reader reads; no block repeats; files are whole."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "benchmarks"))

import make_model  # noqa: E402
import quantise  # noqa: E402
import shapes  # noqa: E402
import subjects  # noqa: E402

from backends.quant import QuantType  # noqa: E402
from homeserve.checkpoint import gguf as reader  # noqa: E402
from homeserve.models import registry  # noqa: E402
from homeserve.models.config import settle  # noqa: E402

ERRORS = {"Q8_0": 0.006, "Q4_0": 0.10, "MXFP4": 0.15, "Q2_K": 0.36, "Q3_K": 0.17, "Q4_K": 0.09, "Q6_K": 0.021}
"""The largest root mean square of the error, of that of the values."""


@pytest.mark.parametrize("kind", quantise.QUANTISERS)
def test_blocks_mean_what_was_quantised(kind: QuantType) -> None:
    values = np.random.default_rng(3).standard_normal((16, 1024)).astype(np.float32) * np.float32(0.03)
    data = quantise.quantise(kind, values)
    back = gguf.dequantize(data, gguf.GGMLQuantizationType[kind.name]).reshape(values.shape)
    assert np.sqrt(np.mean((back - values) ** 2) / np.mean(values**2)) < ERRORS[kind.name]
    blocks = data.reshape(-1, kind.block_bytes)
    assert len(np.unique(blocks, axis=0)) == len(blocks)


def test_a_type_that_is_not_written_is_refused() -> None:
    with pytest.raises(ValueError, match="Q5_K is not among"):
        quantise.quantise(QuantType.Q5_K, np.zeros((1, 256), np.float32))


def test_a_file_is_what_its_shape_says_and_can_be_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_model, "tokenizer", lambda: {"tokenizer.ggml.model": "gpt2"})
    tensors = (
        shapes.Tensor("token_embd.weight", 8, 256, spread=0.5),
        shapes.Tensor("blk.0.attn_norm.weight", 1, 256, mean=1.0, spread=0.05, vector=True),
        shapes.Tensor("blk.0.attn_v.weight", 4, 256, spread=0.06),
        shapes.Tensor("blk.1.attn_q.weight", 4, 256, spread=0.06),
        shapes.Tensor("blk.1.ffn_gate_exps.weight", 2, 256, experts=3, spread=0.06),
    )
    shape = shapes.Shape("llama", {"block_count": 2, "expert_count": 3, "expert_used_count": 1}, tensors)
    for name in ("one", "two"):
        make_model.write(shape, "Q4_K_M", "made", tmp_path / f"{name}.gguf", seed=1)
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["one.gguf", "two.gguf"]
    file = reader.read(str(tmp_path / "one.gguf"))
    kinds = {name: view.type.name for name, view in file.tensors.items()}
    assert kinds == {
        "token_embd.weight": "Q6_K",
        "blk.0.attn_norm.weight": "F32",
        "blk.0.attn_v.weight": "Q4_K",
        "blk.1.attn_q.weight": "Q4_K",
        "blk.1.ffn_gate_exps.weight": "Q4_K",
    }
    assert file.tensors["blk.1.ffn_gate_exps.weight"].rows == 6
    done = subjects.work(file.tensors, file.metadata)
    assert done.ops_per_token == 2 * 256 * (4 + 4 + 2)
    expert = file.tensors["blk.1.ffn_gate_exps.weight"].nbytes
    assert done.bytes_per_token == sum(view.nbytes for view in file.tensors.values()) - expert * 2 // 3


def test_every_model_of_the_table_can_be_made() -> None:
    ours = {subject.name for subject in subjects.SUBJECTS if subject.kind != subjects.SMOL}
    assert ours == set(make_model.NAMES)
    for build, mix in shapes.MODELS.values():
        names = [tensor.name for tensor in build().tensors]
        assert len(names) == len(set(names)) and mix in shapes.MIXES


@pytest.mark.parametrize("name", ["qwen35-nextn.Q4_K_M", "qwen35-nextn-small.Q4_K_M"])
def test_a_model_that_drafts_is_one_that_the_family_knows(name: str) -> None:
    """Its tensors are some that the family declares; the drafting block has those of a layer with attention."""
    build, mix = shapes.MODELS[name]
    shape = build()
    metadata = {f"{shape.arch}.{key}": value for key, value in shape.metadata.items()}
    family = registry.family(shape.arch)
    tensors = {tensor.name: tensor for tensor in shape.tensors}
    config = settle(family.config_from(metadata | {"general.architecture": shape.arch}), tensors.keys())
    assert (config.nextn, metadata["qwen35.block_count"]) == (1, config.layers + 1)
    declared = {name for layer in range(config.layers + 1) for name in family.tensor_names(config, layer).values()}
    assert tensors.keys() == declared & tensors.keys() | {"token_embd.weight", "output_norm.weight"}
    inside, block = (
        {role for role, name in family.tensor_names(config, at).items() if name in tensors} for at in (3, config.layers)
    )
    assert block - inside == {f"nextn.{part}" for part in ("eh_proj", "enorm", "hnorm", "shared_head_norm")}
    assert inside <= block and "attn_q_norm" in inside
    join = tensors[f"blk.{config.layers}.nextn.eh_proj.weight"]
    assert (join.rows, join.cols) == (config.hidden, 2 * config.hidden)
    kinds = {each.name: shapes.MIXES[mix][0](each, 0, config.layers) for each in shape.tensors if not each.vector}
    size = sum(each.rows * kinds[each.name].row_bytes(each.cols) for each in shape.tensors if not each.vector)
    assert size > 1e9 if "small" not in name else size < 2e7
    assert all(each.spread > 0 for each in shape.tensors)
