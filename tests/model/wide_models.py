"""Made-up models of every family with units enough to be cut unevenly: eight and more of each kind.

    query heads 16 · KV heads 8 (or 2, or 1) · key heads 8 · experts 8 · inner columns 48 · vocabulary 8 x 64

So (2,1,1), (30,17,17) and (28,26,20) all give unequal shards. Weights are random, seeded by name and scaled so that a
sum taken twice or a part of another rank shows (`tests/unit/families_rig.py`, whose models these are, made wider).
`save` writes one as a GGUF file with the tokenizer of the tiny checkpoints, for tests that need a server.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# The test folders are no package (pytest's importlib mode); the families lie among the unit tests.
sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

import families_rig as rig

from backends.base import TensorView
from backends.quant import QuantType
from homeserve import checkpoint
from homeserve.models import registry
from homeserve.models.config import ModelConfig
from homeserve.models.family import Family

TINY = Path(__file__).parent.parent / "data" / "tiny"
VOCAB = 512
_WIDE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "attention__head_count": 16,
    "attention__head_count_kv": 8,
    "attention__key_length": 8,
    "attention__value_length": 8,
}
_DELTA: dict[str, Any] = {
    "ssm__group_count": 8,
    "ssm__time_step_rank": 16,
    "ssm__inner_size": 128,
    "rope__dimension_count": 4,
}
_EXPERTS: dict[str, Any] = {"expert_count": 8, "expert_used_count": 3}
_DEALT = _EXPERTS | {"expert_feed_forward_length": 7}
"""Experts of seven columns are dealt out whole; of more, each is cut."""
_BIASES = {"attn_output": "hidden", "ffn_gate": "width", "ffn_up": "width", "ffn_down": "hidden"}


@dataclass(frozen=True)
class Form:
    """One model: its family in `families_rig`, the shape of its stack, what is changed in its metadata, and whether
    biases stand behind its sums."""

    arch: str
    stack: rig.Stack = rig.Stack(4)
    changes: Mapping[str, Any] = field(default_factory=dict)
    biased: bool = False
    quantised: bool = False


def _form(arch: str, *changes: Mapping[str, Any], tied: bool = False, fused: bool = False, **more: Any) -> Form:
    layers, nextn, biased, quantised = (more.pop(name, default) for name, default in _OPTIONS.items())
    merged = dict(_WIDE)
    for each in (*changes, more):
        merged |= each
    return Form(arch, rig.Stack(layers, tied=tied, fused=fused, nextn=nextn), merged, biased, quantised)


_OPTIONS: dict[str, Any] = {"layers": 4, "nextn": 0, "biased": False, "quantised": False}
_UNLIKE = {"attention__head_count_kv": [8, 1, 8, 2]}
_BLOCKS: dict[str, Any] = {"embedding_length": 64, "feed_forward_length": 256, "attention__key_length": 16}
FORMS: dict[str, Form] = {
    "gemma2": _form("gemma2", tied=True),
    "gemma3 one kv head": _form("gemma3", attention__head_count_kv=1, tied=True),
    "gemma4": _form("gemma4", _UNLIKE, tied=True),
    "gemma4 shared kv": _form("gemma4", attention__head_count_kv=[8, 2] * 4, attention__shared_kv_layers=3, layers=8),
    "gemma4 experts": _form("gemma4-experts", _EXPERTS, _UNLIKE, fused=True),
    "gpt-oss": _form("gpt-oss", _EXPERTS),
    "gpt-oss dealt": _form("gpt-oss", _DEALT, fused=True),
    "llama": _form("llama"),
    "llama biased": _form("llama", biased=True, tied=True),
    "llama blocks": _form("llama", _BLOCKS, attention__value_length=16, quantised=True),
    "llama experts": _form("llama-experts", _EXPERTS, feed_forward_length=7),
    "qwen2 fused": _form("qwen2", fused=True),
    "qwen2moe": _form("qwen2moe", _DEALT),
    "qwen3": _form("qwen3", attention__head_count_kv=2),
    "qwen3moe": _form("qwen3moe", _EXPERTS, fused=True),
    "qwen35": _form("qwen35", _DELTA),
    "qwen35moe": _form("qwen35moe", _DELTA, _EXPERTS, attention__head_count_kv=2),
    "qwen3next": _form("qwen3next", _DELTA, _DEALT),
}

_BLOCKS_OF_DELTA: dict[str, Any] = {"ssm__state_size": 32, "ssm__inner_size": 512}
DRAFTING: dict[str, Form] = {
    "qwen35": _form("qwen35", _DELTA, nextn=1),
    "qwen35 tied": _form("qwen35", _DELTA, tied=True, nextn=1, layers=3),
    "qwen35 blocks": _form(
        "qwen35", _DELTA, _BLOCKS, _BLOCKS_OF_DELTA, attention__value_length=16, quantised=True, nextn=1
    ),
    "qwen35moe": _form("qwen35moe", _DELTA, _EXPERTS, attention__head_count_kv=2, nextn=1),
    "qwen3next": _form("qwen3next", _DELTA, _DEALT, nextn=1),
}
"""With a drafting block behind the trunk."""


@dataclass(frozen=True)
class Wide:
    family: Family
    config: ModelConfig
    tensors: Mapping[str, TensorView]
    metadata: Mapping[str, Any]


@functools.cache
def wide(name: str, *, drafts: bool = False) -> Wide:
    return made((DRAFTING if drafts else FORMS)[name])


def made(form: Form) -> Wide:
    """The model of a form."""
    family = rig.family_of(form.arch)
    keys = rig.metadata(form.arch, form.stack, **form.changes)
    # A file holds floats of 32 bits.
    metadata = {key: float(np.float32(value)) if isinstance(value, float) else value for key, value in keys.items()}
    config = family.config_from(metadata)
    tensors = rig.tensors_of(family, config, form.stack, ())
    if form.biased:
        tensors |= _biases(config)
    if form.quantised:
        tensors = {each: _quantised(view) for each, view in tensors.items()}
    return Wide(family, config, tensors, metadata)


def _biases(config: ModelConfig) -> dict[str, TensorView]:
    widths = {"hidden": config.hidden, "width": config.ffn}
    names = {f"blk.{layer}.{role}.bias": widths[of] for layer in range(config.layers) for role, of in _BIASES.items()}
    return {name: rig.tensor(name, (1, width), ()) for name, width in names.items()}


def _quantised(view: TensorView) -> TensorView:
    """A matrix in blocks of 32."""
    if view.rows == 1 or view.name == "token_embd.weight" or view.cols % 32:
        return view
    values = np.frombuffer(view.data, np.float32).reshape(view.rows, -1, 32)
    scales = (np.abs(values).max(axis=2) / 127).astype(np.float16)
    codes = np.rint(values / scales.astype(np.float32)[..., None]).astype(np.int8)
    packed = np.concatenate([scales[..., None].view(np.uint8), codes.view(np.uint8)], axis=2)
    return TensorView(view.name, QuantType.Q8_0, view.rows, view.cols, packed.reshape(-1))


def save(name: str, target: Path) -> Path:
    """Write the model as a GGUF file."""
    return write(wide(name), target)


def write(model: Wide, target: Path) -> Path:
    """The same of any model."""
    import gguf

    writer = gguf.GGUFWriter(str(target), model.family.name)
    told = checkpoint.open(str(TINY / "llama.f32.gguf"), registry.folder_families)
    keys = {key: value for key, value in told.metadata.items() if key.startswith("tokenizer.")}
    told.close()
    for key, value in (keys | dict(model.metadata)).items():
        _add(writer, key, value)
    for tensor in model.tensors.values():
        shape = [tensor.cols] if tensor.rows == 1 and "ffn_gate_inp_shexp" not in tensor.name else _shape(tensor, model)
        kind = gguf.GGMLQuantizationType[tensor.type.name]
        data = np.array(tensor.data).reshape(*shape[:-1], -1)
        if tensor.type is QuantType.F32:
            writer.add_tensor(tensor.name, data.view(np.float32).reshape(shape))
        else:
            writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _shape(tensor: TensorView, model: Wide) -> list[int]:
    """A stack of experts has three dimensions."""
    experts = model.config.experts
    if experts is not None and "_exps.weight" in tensor.name:
        return [experts.count, tensor.rows // experts.count, tensor.cols]
    return [tensor.rows, tensor.cols]


def _add(writer: Any, key: str, value: object) -> None:
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
            writer.add_array(key, list(value))  # type: ignore[call-overload]
