"""Shape files: what a model's measurements say of its parts, and what a wrong file is told."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budget.facts import MIB, ModelShape
from budget.quants import LADDER, QUANTS, bits_per_weight, block_weights
from budget.shape import ShapeError, built_in, load_shape, requantised, shape_from_json

SHAPES = Path(__file__).parent.parent / "data/shapes"
few = settings(max_examples=30, deadline=None)

Shape = dict[str, Any]


def read(name: str) -> ModelShape:
    return load_shape(str(SHAPES / f"{name}.json"))


def small(**changes: object) -> Shape:
    """A dense model of a few layers; None takes a field away."""
    shape = {"arch": "llama", "layers": 4, "hidden": 512, "ffn": 1024, "heads": 8, "kv_heads": 2, "vocab": 1000}
    shape |= {"quant": "Q4_K_M"}
    return shape | changes


MOE = {"experts": 16, "experts_used": 2, "expert_ffn": 256, "ffn": None}
LINEAR = {"key_heads": 4, "value_heads": 8, "key_dim": 64, "value_dim": 64, "conv": 4}


# ------------------------------------------------------------------------------------------ figures of known models


def without_draft(shape: ModelShape) -> ModelShape:
    return replace(shape, nextn=())


def test_moe_hybrid_keeps_kv_in_ten_of_forty_layers() -> None:
    shape = without_draft(read("moe35b"))
    assert sum(layer.kv is not None for layer in shape.layers) == 10
    assert shape.kv_bytes_per_token("f16") == 20 * 1024
    assert shape.kv_bytes_per_token("f8") == 10 * 1024


def test_the_drafting_layer_keeps_kv_as_well() -> None:
    assert read("moe35b").kv_bytes_per_token("f16") == 22 * 1024


def test_moe_hybrid_state_of_a_request() -> None:
    shape = read("moe35b")
    assert shape.state_bytes_per_request(32) / MIB == 61.875
    assert shape.state_bytes_per_request(16) / MIB == 31.875


def test_moe_hybrid_weighs_what_its_file_does() -> None:
    shape = read("moe35b")
    assert shape.weights_bytes == 22_663_387_424
    assert math.ceil(shape.weights_bytes / MIB) == 21614
    assert shape.vision_bytes == 818 * MIB
    assert len(shape.nextn) == 1 and shape.nextn[0].bytes > 500 * MIB


def test_a_dense_copy_of_the_moe_hybrid_weighs_three_times_as_much() -> None:
    """1604.2 MiB a layer in bf16, whatever the mix; with tables and tower about 67 GiB, 2.27 times a 29.5 GiB box."""
    shape = read("moe35b")
    layer = sum(each.params for each in shape.layers) / len(shape.layers) * 2
    assert layer / MIB == pytest.approx(1604.2, rel=0.0005)
    assert layer / (506.2 * MIB) == pytest.approx(3.17, abs=0.005)
    tables = 2 * shape.vocab * shape.hidden * 2
    whole = (layer * 41 + tables + shape.vision_bytes) / 2**30
    assert whole == pytest.approx(67, abs=0.2)
    assert whole / 29.5 == pytest.approx(2.27, abs=0.01)


def test_dense_hybrid_rows_and_states() -> None:
    shape = read("dense27b")
    cells = [layer.kv for layer in shape.layers if layer.kv is not None]
    assert len(cells) == 16 and {cell.elements for cell in cells} == {2048}
    assert without_draft(shape).kv_bytes_per_token("f8") == 16 * 2048
    recurrent = sum(layer.state_elements for layer in shape.layers)
    assert (recurrent * 4, recurrent * 2) == (144 * MIB, 72 * MIB)
    assert shape.state_bytes_per_request(16) / MIB == pytest.approx(75, abs=1)


def test_dense_hybrid_is_cut_by_pairs_of_key_heads() -> None:
    """Three value heads of 128 to a key head: only two together have whole blocks of 256 columns."""
    linear, full = read("dense27b").layers[0], read("dense27b").layers[3]
    assert (linear.mixer_units, full.mixer_units) == (8, 24)
    assert linear.ffn_units == 17408 // 256


def test_plain_model_at_eight_bits() -> None:
    shape = read("dense8b")
    assert shape.weights_bytes == 8_540_771_328
    assert shape.kv_bytes_per_token("f16") == 128 * 1024
    assert shape.kv_bytes_per_token("q8_0") == 68 * 1024
    assert shape.context == 131072


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama3.1-8b", 8.03),
        ("llama3.3-70b", 70.55),
        ("qwen3-4b", 4.02),
        ("qwen3-30b-a3b", 30.53),
        ("qwen3-next-80b-a3b", 79.67),
        ("gemma3-27b", 27.0),
        ("gpt-oss-120b", 116.8),
        ("deepseek-v2-lite", 15.7),
        ("deepseek-v3", 671.0),
    ],
)
def test_weights_are_counted(name: str, billions: float) -> None:
    shape = load_shape(name)
    counted = sum(layer.params for layer in shape.layers) + shape.vocab * shape.hidden * (1 if shape.tied else 2)
    assert counted / 1e9 == pytest.approx(billions, rel=0.002)


def test_active_weights_of_a_mixture() -> None:
    """Of 30.5 billion weights one token reads about 3 (with the head, without the embedding table)."""
    shape = load_shape("qwen3-30b-a3b")
    assert shape.read_bytes / shape.weights_bytes == pytest.approx(3.0 / 30.5, rel=0.05)


def test_latent_attention_keeps_one_row_whatever_the_heads() -> None:
    kv = load_shape("deepseek-v3").layers[10].kv
    assert kv is not None and (kv.elements, kv.heads) == (512 + 64, 1)
    dense, sparse = load_shape("deepseek-v3").layers[2:4]
    assert (dense.expert_bytes, sparse.expert_bytes > 0) == (0, True)


def test_windows_in_five_of_six_layers() -> None:
    shape = load_shape("gemma3-12b")
    windows = [layer.kv.window for layer in shape.layers if layer.kv is not None]
    assert windows == [1024, 1024, 1024, 1024, 1024, 0] * 8
    assert shape.kv_bytes_per_token("f16") * 6 == shape.kv_bytes_per_token("f16", windows=True)


def test_the_packaged_shape_is_the_file_that_is_served_by_default() -> None:
    shape = load_shape("smollm2-135m-q4_1")
    assert (shape.weights_bytes, shape.embedding_bytes, shape.head_bytes) == (96_576_768, 30_081_024, 0)
    layer = shape.layers[0]
    assert layer.bytes == pytest.approx(4 * 69_120 + 207_360 + 3 * 552_960 + 2 * 2304 + 69_120, rel=0.002)
    assert shape.kv_bytes_per_token("f16") == 30 * 2 * 3 * 64 * 2


# ------------------------------------------------------------------------------------------------------- properties


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Sound shapes of every kind."""
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    made = small(layers=draw(st.integers(1, 12)), hidden=64 * draw(st.integers(1, 16)), heads=heads, head_dim=64)
    made |= {"kv_heads": draw(st.sampled_from([n for n in (1, 2, 4, 8) if heads % n == 0]))}
    made |= {"nextn_layers": draw(st.integers(0, 2)), "tied": draw(st.booleans()), "head_gate": draw(st.booleans())}
    if draw(st.booleans()):
        made |= MOE | {"shared_ffn": draw(st.sampled_from([0, 128]))}
    kind = draw(st.sampled_from(["plain", "linear", "window", "mla"]))
    every = draw(st.integers(1, made["layers"]))
    if kind == "linear":
        made |= {"linear": LINEAR, "full_attention_every": every}
    elif kind == "window":
        made |= {"window": draw(st.integers(1, 4096)), "full_attention_every": every}
    elif kind == "mla":
        made |= {"mla": {"kv_rank": 32, "rope_dim": 16, "q_rank": draw(st.sampled_from([0, 48]))}}
    made["quant"] = draw(st.sampled_from(sorted(QUANTS)))
    return made


@few
@given(shapes(), st.integers(0, 10**6))
def test_parts_sum_to_the_file(made: Shape, more: int) -> None:
    size = shape_from_json(made, "made").weights_bytes + more % 1000
    shape = shape_from_json(made | {"weights_bytes": size}, "made")
    layers = (*shape.layers, *shape.nextn)
    parts = [shape.embedding_bytes, shape.head_bytes, shape.nextn_bytes, shape.other_bytes]
    parts += [part for layer in layers for part in (layer.mixer_bytes, layer.ffn_bytes, layer.expert_bytes)]
    assert sum(parts) == shape.weights_bytes == size
    assert min(parts) >= 0
    for layer in layers:
        assert 0 <= layer.kv_bytes <= layer.mixer_bytes
        assert 0 < layer.read_bytes <= layer.bytes
        assert min(layer.mixer_units, layer.ffn_units, layer.params) >= 1
    assert 0 < shape.read_bytes <= size


@few
@given(shapes())
def test_more_layers_never_need_less(made: Shape) -> None:
    one, two = (shape_from_json(made | {"layers": made["layers"] + more}, "made") for more in (0, 1))
    assert two.weights_bytes > one.weights_bytes
    assert two.kv_bytes_per_token("f16", windows=True) >= one.kv_bytes_per_token("f16", windows=True)
    assert two.state_bytes_per_request() >= one.state_bytes_per_request() >= 0
    assert two.read_bytes > one.read_bytes


@few
@given(shapes(), st.sampled_from(sorted(QUANTS)))
def test_another_mix_has_another_size_and_nothing_else(made: Shape, quant: str) -> None:
    shape = shape_from_json(made, "made")
    other = requantised(shape, quant)
    bits = bits_per_weight(quant)
    assert bits is not None
    assert other.weights_bytes / shape.weights_bytes == pytest.approx(bits / QUANTS[made["quant"]], rel=0.02)
    assert other.kv_bytes_per_token("f16") == shape.kv_bytes_per_token("f16")
    assert [layer.params for layer in other.layers] == [layer.params for layer in shape.layers]
    assert other.quant == quant and quant in other.name


def test_the_ladder_of_mixes_falls() -> None:
    assert list(QUANTS.values()) == sorted(QUANTS.values(), reverse=True)
    steps = [QUANTS[name] for name in LADDER]
    assert all(low < 0.95 * high for high, low in zip(steps, steps[1:], strict=False))


def test_blocks_of_a_mix() -> None:
    assert [block_weights(name) for name in ("f16", "Q8_0", "MXFP4", "q4_k_m", "whatever")] == [1, 32, 32, 256, 256]
    assert bits_per_weight("q4_1") == 5.11
    assert bits_per_weight("Q4_9") is None


def test_a_model_whose_weights_are_not_counted_cannot_be_weighed_again() -> None:
    empty = ModelShape("none", "none", "", (), 0, 0, 0, 0, 1, 0, 0, True)
    with pytest.raises(ValueError, match="not known"):
        requantised(empty, "Q8_0")
    with pytest.raises(ValueError, match="Q9"):
        requantised(read("dense8b"), "Q9")


# -------------------------------------------------------------------------------------------------------- bad input

WRONG: list[tuple[str, Callable[[], object], str]] = [
    ("a list", list, ""),
    ("a number", lambda: 7, ""),
    ("unknown field", lambda: small(layerz=3), "layerz"),
    ("no layers", lambda: small(layers=None), "layers"),
    ("zero layers", lambda: small(layers=0), "layers"),
    ("negative", lambda: small(hidden=-5), "hidden"),
    ("text", lambda: small(vocab="49152"), "vocab"),
    ("not a number", lambda: small(ffn=float("nan")), "ffn"),
    ("infinite", lambda: small(context=float("inf")), "context"),
    ("a fraction", lambda: small(heads=8.0), "heads"),
    ("a boolean", lambda: small(layers=True), "layers"),
    ("too many", lambda: small(layers=10**9), "layers"),
    ("far too many bytes", lambda: small(weights_bytes=10**30), "weights_bytes"),
    ("bytes of another unit", lambda: small(weights_bytes=4), "weights_bytes"),
    ("bytes of another model", lambda: small(weights_bytes=10**12), "weights_bytes"),
    ("neither bytes nor mix", lambda: small(quant=None), "weights_bytes"),
    ("kv heads", lambda: small(kv_heads=3), "kv_heads"),
    ("head dim", lambda: small(hidden=100, heads=8), "head_dim"),
    ("a name that is no text", lambda: small(name=5), "name"),
    ("a long name", lambda: small(name="x" * 1000), "name"),
    ("a flag", lambda: small(tied="yes"), "tied"),
    ("no feed-forward", lambda: small(ffn=None), "ffn"),
    ("more experts used than there are", lambda: small(**MOE | {"experts_used": 17}), "experts_used"),
    ("no experts used", lambda: small(**MOE | {"experts_used": None}), "experts_used"),
    ("no expert width", lambda: small(**MOE | {"expert_ffn": None}), "expert_ffn"),
    ("experts used of none", lambda: small(experts_used=2), "experts_used"),
    ("dense layers", lambda: small(**MOE | {"leading_dense": 5}), "leading_dense"),
    ("dense layers without a width", lambda: small(**MOE | {"leading_dense": 1}), "ffn"),
    ("linear is no object", lambda: small(linear=3), "linear."),
    ("linear lacks a field", lambda: small(linear=LINEAR | {"conv": None}, full_attention_every=2), "linear.conv"),
    ("value heads", lambda: small(linear=LINEAR | {"value_heads": 6}, full_attention_every=2), "linear.value_heads"),
    ("which layers attend", lambda: small(linear=LINEAR), "full_attention_every"),
    ("every of nothing", lambda: small(full_attention_every=2), "full_attention_every"),
    ("every beyond", lambda: small(full_attention_every=5, window=64), "full_attention_every"),
    ("two rules", lambda: small(full_attention_every=2, attention_layers=[1], window=9), "attention_layers"),
    ("layers that are not there", lambda: small(attention_layers=[4], window=9), "attention_layers"),
    ("a layer twice", lambda: small(attention_layers=[1, 1], window=9), "attention_layers"),
    ("layers as text", lambda: small(attention_layers="all", window=9), "attention_layers"),
    ("no rows at all", lambda: small(shared_kv_layers=4), "shared_kv_layers"),
    ("latent rank", lambda: small(mla={"rope_dim": 16}), "mla.kv_rank"),
    ("latent rotary part", lambda: small(head_dim=64, mla={"kv_rank": 32, "rope_dim": 65}), "mla.rope_dim"),
    ("a table as large as the model", lambda: small(embedding_bytes=10**9), "embedding_bytes"),
]


@pytest.mark.parametrize(
    ("made", "field"), [(made, field) for _, made, field in WRONG], ids=[name for name, *_ in WRONG]
)
def test_a_wrong_shape_names_its_field(made: Callable[[], object], field: str) -> None:
    with pytest.raises(ShapeError) as error:
        shape_from_json(made(), "a.json")
    assert error.value.field == field
    assert error.value.where == "a.json"
    assert error.value.fix and error.value.what
    assert str(error.value).startswith("a.json: ") and len(str(error.value)) < 700


@few
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5), st.lists), st.data())
def test_no_value_of_a_field_is_more_than_a_shape_error(value: object, data: st.DataObject) -> None:
    made = small(**MOE, linear=LINEAR, full_attention_every=2, mla=None)
    made[data.draw(st.sampled_from(sorted(made)))] = value
    try:
        assert shape_from_json(made, "made").weights_bytes > 0
    except ShapeError as error:
        assert error.fix


def test_a_shape_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="qwen3-8b"):
        load_shape(str(tmp_path / "none.json"))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"GGUF\x03"], ids=repr)
def test_a_file_that_is_no_json(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "shape.json"
    path.write_bytes(content)
    with pytest.raises(ShapeError):
        load_shape(str(path))


def test_a_folder_and_a_huge_file_are_no_shapes(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="cannot be read"):
        load_shape(str(tmp_path))
    path = tmp_path / "model.gguf"
    with open(path, "wb") as file:
        file.truncate(2 << 20)
    with pytest.raises(ShapeError, match="larger"):
        load_shape(str(path))


def test_a_shape_without_a_name_is_called_after_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(small()))
    assert load_shape(str(path)).name == "mine"


def test_a_built_in_shape_in_another_mix() -> None:
    assert load_shape("Qwen3-8B:q8_0").weights_bytes == pytest.approx(8.71e9, rel=0.01)
    with pytest.raises(ShapeError, match="Q4_K_M"):
        load_shape("qwen3-8b:Q9")


@pytest.mark.parametrize("name", built_in())
def test_built_in_shapes_are_sound(name: str) -> None:
    shape = load_shape(name)
    assert shape.name and shape.arch and shape.context > 0
    assert shape.kv_bytes_per_token("f16") > 0
    bits = bits_per_weight(shape.quant)
    tables = shape.vocab * shape.hidden * (2 - shape.tied)
    counted = tables + sum(layer.params for layer in (*shape.layers, *shape.nextn))
    assert bits is not None
    assert shape.weights_bytes * 8 / counted == pytest.approx(bits, rel=0.15)
