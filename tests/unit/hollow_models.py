"""Models of real measurements without a byte of weights: what a plan, and the budget, would say of each.

The tensors have shapes and types and no contents, so a model of any size is there in no time. Matrices are packed, as a
file of that mix has them: Q4_K where a row is whole blocks of 256, Q8_0 where it is whole blocks of 32.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import families_rig as rig

from backends.base import TensorView
from backends.quant import QuantType
from budget.facts import ModelShape
from homeserve.models.config import ModelConfig
from homeserve.models.family import Family
from homeserve.models.shape import shape_of

_FLOATS = (".bias", "conv1d", "ssm_alpha", "ssm_beta", "ssm_ba", "ffn_gate_inp", "exp_probs", "rope_freqs")
"""Tensors that files of every mix have as floats."""


@dataclass(frozen=True)
class Hollow:
    """A model without weights."""

    family: Family
    config: ModelConfig
    tensors: Mapping[str, TensorView]
    shape: ModelShape


def _like(heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "attention__head_count": heads,
        "attention__head_count_kv": kv_heads,
        "attention__key_length": head_dim,
        "attention__value_length": head_dim,
    }


def _experts(count: int, used: int, width: int, shared: int = 0) -> dict[str, Any]:
    found = {"expert_count": count, "expert_used_count": used, "expert_feed_forward_length": width}
    return found | ({"expert_shared_feed_forward_length": shared} if shared else {})


_DELTA = {
    "ssm__state_size": 128,
    "ssm__group_count": 16,
    "ssm__time_step_rank": 32,
    "ssm__inner_size": 4096,
    "full_attention_interval": 4,
    "rope__dimension_count": 64,
}
MODELS: dict[str, tuple[str, rig.Stack, dict[str, Any]]] = {
    "llama 8B": (
        "llama",
        rig.Stack(4),
        {"embedding_length": 4096, "feed_forward_length": 14336, "vocab_size": 128256} | _like(32, 8, 128),
    ),
    "gemma3 12B": (
        "gemma3",
        rig.Stack(6, tied=True),
        {"embedding_length": 3840, "feed_forward_length": 15360, "vocab_size": 262208}
        | {"attention__sliding_window": 1024, "attention__sliding_window_pattern": 6}
        | _like(16, 8, 256),
    ),
    "qwen3 30B-A3B": (
        "qwen3moe",
        rig.Stack(4),
        {"embedding_length": 2048, "vocab_size": 151936} | _experts(128, 8, 768) | _like(32, 4, 128),
    ),
    "gpt-oss 20B": (
        "gpt-oss",
        rig.Stack(4),
        {"embedding_length": 2880, "vocab_size": 201088, "attention__sliding_window": 128}
        | _experts(32, 4, 2880)
        | _like(64, 8, 64),
    ),
    "qwen3.6 27B": (
        "qwen35",
        rig.Stack(4, nextn=1),
        {"embedding_length": 5120, "feed_forward_length": 17408, "vocab_size": 248320}
        | _DELTA
        | {"ssm__time_step_rank": 48, "ssm__inner_size": 6144}
        | _like(24, 4, 256),
    ),
    "qwen3.6 35B-A3B": (
        "qwen35moe",
        rig.Stack(4, nextn=1),
        {"embedding_length": 2048, "vocab_size": 248320} | _DELTA | _experts(256, 8, 512, 512) | _like(16, 2, 256),
    ),
}
"""Measurements of models that people run, each with a few layers of every kind that it has."""


@functools.cache
def hollow(name: str) -> Hollow:
    arch, stack, changes = MODELS[name]
    family = rig.family_of(arch)
    keys = rig.metadata(arch, stack, **(changes | {"context_length": 131072}))
    config = family.config_from(keys)
    shapes = rig.shapes_of(family, config, stack)
    tensors = {each: _tensor(each, *shape) for each, shape in shapes.items()}
    return Hollow(family, config, tensors, shape_of(family, config, tensors, name=name, quant="Q4_K_M"))


def _tensor(name: str, rows: int, cols: int) -> TensorView:
    kind = QuantType.F32
    if rows > 1 and not any(part in name for part in _FLOATS):
        kind = QuantType.Q4_K if not cols % 256 else QuantType.Q8_0 if not cols % 32 else QuantType.F32
    one = np.zeros(1, np.uint8)
    return TensorView(
        name, kind, rows, cols, np.lib.stride_tricks.as_strided(one, (rows * kind.row_bytes(cols),), (0,))
    )
