"""Models whose matrices are each of another type, so that one run has all kernels of weights to launch.

    patchwork("llama", folder)       a type for each matrix of four layers; "qwen3moe": for each stack of experts

Blocks are random bytes with scales that are small (kernel/gpu_weights.py). What such a model answers is nonsense, but
finite; that a kernel of a type computes what it should is shown in tests/kernel, each by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

# The test folders are no package (pytest's importlib mode).
sys.path.insert(0, str(Path(__file__).parent / "kernel"))
sys.path.insert(0, str(Path(__file__).parent / "model"))

import numpy as np
import wide_models
from gpu_weights import matrix

from backends.base import TensorView
from backends.gpu import gate
from backends.quant import QuantType

TYPES = tuple(
    quant
    for quant in QuantType
    if any(symbol.name == f"linear_few_{quant.name.lower()}_r1" for symbol in gate.symbols())
)
"""That kernels multiply with."""
BLOCK = 256
"""The longest block of a type: rows are of whole blocks."""
_SHAPE: Mapping[str, Any] = {
    "embedding_length": BLOCK,
    "feed_forward_length": BLOCK,
    "expert_feed_forward_length": BLOCK,
    "attention__head_count": 16,
    "attention__head_count_kv": 8,
    "attention__key_length": 32,
    "attention__key_length_swa": 32,
    "attention__value_length": 32,
    "attention__value_length_swa": 32,
}
_EXPERTS: dict[str, Any] = {"expert_count": 2, "expert_used_count": 2}
LAYERS = 9
"""Three stacks of experts in each make as many matrices as there are types."""


def patchwork(arch: str, folder: Path, types: Sequence[QuantType] = TYPES) -> Path:
    """A file of the model with these types."""
    known = wide_models.FORMS[arch]
    told = dict(known.changes) | {name: value for name, value in _SHAPE.items() if _has(known, name)}
    experts = "expert_count" in told
    layers = LAYERS if experts else 4
    form = replace(
        known, stack=replace(known.stack, layers=layers, fused=False), changes=told | (_EXPERTS if experts else {})
    )
    model = wide_models.made(form)
    tensors = dict(
        _packed(model.tensors, cycle(types), np.random.default_rng(11), "_exps.weight" if experts else ".weight")
    )
    return wide_models.write(replace(model, tensors=tensors), folder / f"{arch}-patchwork.gguf")


def _has(known: wide_models.Form, name: str) -> bool:
    if name.endswith("_swa"):
        return known.arch.startswith("gemma4")
    return not name.startswith("expert_") or "expert_count" in known.changes


def _packed(
    tensors: Mapping[str, TensorView], types: Iterator[QuantType], rng: np.random.Generator, ending: str
) -> Iterator[tuple[str, TensorView]]:
    """Matrices of layers whose names end so are packed, each as the next type."""
    for name, view in tensors.items():
        if not name.startswith("blk.") or not name.endswith(ending) or view.rows == 1 or view.cols % BLOCK:
            yield name, view
            continue
        quant = next(types)
        data = matrix(quant, view.rows, view.cols, rng).file
        yield name, TensorView(name, quant, view.rows, view.cols, data.reshape(-1).view(np.uint8))
