"""The shape that a checkpoint's tensors and declarations give: exact in bytes, and by itself readable from headers."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import TensorView
from backends.quant import QuantType
from budget.facts import ModelShape
from homeserve import checkpoint
from homeserve.errors import InvalidModelFile, ModelNotFound, SettingError, UnknownArchitecture
from homeserve.model_facts import read_shape
from homeserve.models import registry
from homeserve.models.facts import kv_quant_type
from homeserve.models.shape import shape_of

TINY = Path(__file__).parent.parent / "data/tiny"
LLAMA: dict[str, Any] = {
    "llama.block_count": 3,
    "llama.context_length": 512,
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 512,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.attention.sliding_window": 64,
    "llama.vocab_size": 100,
}


def view(name: str, rows: int, cols: int, kind: QuantType = QuantType.F32) -> TensorView:
    return TensorView(name, kind, rows, cols, np.zeros(rows * kind.row_bytes(cols), np.uint8))


def tensors(kind: QuantType = QuantType.F32, *, fused: bool = False, tied: bool = True) -> dict[str, TensorView]:
    """The tensors of LLAMA, with a leftover that nothing declares."""
    found = [view("token_embd.weight", 100, 256, kind), view("output_norm.weight", 1, 256), view("odd.weight", 1, 7)]
    found += [] if tied else [view("output.weight", 100, 256, kind), view("output.bias", 1, 100)]
    for layer in range(3):
        shapes = {"attn_output": (256, 256), "ffn_gate": (512, 256), "ffn_up": (512, 256), "ffn_down": (256, 512)}
        apart = {"attn_q": (256, 256), "attn_k": (64, 256), "attn_v": (64, 256)}
        shapes |= {"attn_qkv": (384, 256)} if fused else apart
        found += [view(f"blk.{layer}.{role}.weight", *shape, kind) for role, shape in shapes.items()]
        found += [view(f"blk.{layer}.{role}_norm.weight", 1, 256) for role in ("attn", "ffn")]
    return {each.name: each for each in found}


def shape(given: dict[str, TensorView], *, window: int = 64) -> ModelShape:
    family = registry.family("llama")
    metadata = LLAMA | {"llama.attention.sliding_window": window}
    return shape_of(family, family.config_from(metadata), given, name="made", quant="Q4_K")


@pytest.mark.parametrize("name", ["llama", "llama3rope", "mistral"])
def test_parts_of_a_checkpoint_sum_to_its_tensors(name: str) -> None:
    path = str(TINY / f"{name}.f32.gguf")
    opened = checkpoint.open(path)
    size = sum(tensor.data.nbytes for tensor in opened.tensors.values())
    opened.close()
    read = read_shape(path)
    assert read.weights_bytes == size
    assert (read.name, read.arch, read.quant) == (f"{name}.f32", "llama", "F32")
    weights = sum(layer.params for layer in read.layers)
    assert weights * 4 == sum(layer.bytes for layer in read.layers)


def test_a_folder_has_the_shape_of_its_gguf() -> None:
    folder, file = read_shape(str(TINY / "llama")), read_shape(str(TINY / "llama.f32.gguf"))
    assert folder.name == "llama"
    assert folder.weights_bytes == file.weights_bytes
    assert replace(folder, name=file.name, quant=file.quant) == file


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([QuantType.F32, QuantType.F16, QuantType.Q8_0, QuantType.Q4_K]), st.booleans(), st.booleans())
def test_whatever_is_in_the_file_is_counted_once(kind: QuantType, fused: bool, tied: bool) -> None:
    made = tensors(kind, fused=fused, tied=tied)
    read = shape(made)
    assert read.weights_bytes == sum(tensor.data.nbytes for tensor in made.values())
    assert read.other_bytes == 4 * (256 + 7)
    assert read.tied == tied == (read.head_bytes == 0)
    assert read.layers[0].kv_bytes == 128 * kind.row_bytes(256)
    assert read.layers[0].ffn_bytes == 3 * 512 * kind.row_bytes(256) + 1024


def test_a_tensor_layout_cuts_at_whole_blocks_and_heads() -> None:
    """Heads of 32 columns: each alone in blocks of 32, eight together in a block of 256. Columns go 16 together."""
    units = {kind: shape(tensors(kind)).layers[0] for kind in (QuantType.F32, QuantType.Q8_0, QuantType.Q4_K)}
    assert [layer.mixer_units for layer in units.values()] == [8, 8, 1]
    assert [layer.ffn_units for layer in units.values()] == [32, 16, 2]


def test_a_windowed_layer_is_told_with_its_window_and_the_size_of_its_heads() -> None:
    """Rows of the pool that keeps every token are those of the other layers alone."""
    every, windowed = shape(tensors(), window=0), shape(tensors())
    assert [(layer.kv.window, layer.kv.head_dim) for layer in every.layers if layer.kv] == [(0, 32)] * 3
    assert [(layer.kv.window, layer.kv.head_dim) for layer in windowed.layers if layer.kv] == [(64, 32)] * 3
    assert (every.windows, windowed.windows) == ((), (64,))
    assert every.kv_bytes_per_token("f16") == 3 * 2 * (2 * 32) * 2
    assert every.kv_bytes_per_token("f32") == 2 * every.kv_bytes_per_token("f16")
    assert windowed.kv_bytes_per_token("f16") == 0
    assert windowed.kv_bytes_per_token("f16", windows=True) == every.kv_bytes_per_token("f16")
    assert windowed.state_bytes_per_request() == 0


def test_widths_are_those_of_the_widest_layer() -> None:
    read = shape(tensors())
    assert (read.hidden, read.mixer_width, read.ffn, read.vocab, read.context) == (256, 256 + 2 * 64, 512, 100, 512)


def test_the_pool_of_the_engine_knows_its_types() -> None:
    assert kv_quant_type("F16") is QuantType.F16
    assert (kv_quant_type("q8_0"), kv_quant_type("f8")) == (QuantType.Q8_0, QuantType.F8)
    with pytest.raises(SettingError, match="kv_type"):
        kv_quant_type("q4_0")


# -------------------------------------------------------------------------------------------------------- bad input


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def file(path: Path, keys: dict[str, str | int]) -> str:
    """A GGUF of keys alone."""
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys))
    for name, value in keys.items():
        text = isinstance(value, str)
        raw += string(name) + struct.pack("<I", 8 if text else 4)
        raw += string(value) if isinstance(value, str) else struct.pack("<I", value)
    path.write_bytes(raw + bytes(64))
    return str(path)


def test_an_unknown_architecture_points_to_shapes(tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitecture, match="qwen99") as error:
        read_shape(file(tmp_path / "a.gguf", {"general.architecture": "qwen99"}))
    assert error.value.fix is not None and "--shape" in error.value.fix


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound) as error:
        read_shape(str(tmp_path / "none.gguf"))
    assert error.value.fix and "none.gguf" in error.value.message


def test_a_split_model_that_lacks_a_part(tmp_path: Path) -> None:
    keys: dict[str, str | int] = {"general.architecture": "llama", "split.no": 0, "split.count": 2}
    with pytest.raises(InvalidModelFile, match="part 2 of 2 is missing") as error:
        read_shape(file(tmp_path / "a-00001-of-00002.gguf", keys))
    assert error.value.fix == "fetch all parts"


def test_a_model_without_its_keys_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelFile, match="block_count"):
        read_shape(file(tmp_path / "a.gguf", {"general.architecture": "llama"}))
