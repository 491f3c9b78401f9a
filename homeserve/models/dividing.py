"""The tensor layout of one checkpoint: what each rank holds of every tensor, and of what each stage is made.

The one definition is `stage_shards`; here it is asked for every layer of a model and put under the tensors' names, so
that a `TensorSource` can hand out parts.

Pure: headers of tensors are read, no bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backends.base import TensorView
from homeserve.layouts.partition import Partition
from homeserve.layouts.shards import Split, TensorForm
from homeserve.layouts.transition import StateForm
from homeserve.models.config import ModelConfig
from homeserve.models.family import Family
from homeserve.models.stage_shards import layer_shards, model_shards


@dataclass(frozen=True)
class Division:
    """`splits` by tensor; `parts[layer][stage]` are the partitions of a stage by their names (`stage_shards`);
    `states[layer]` says who has which part of the state of a linear layer, or of a drafting block."""

    splits: Mapping[str, Split]
    parts: Mapping[int, Sequence[Mapping[str, Partition]]]
    states: Mapping[int, StateForm]


def divided(
    family: Family,
    config: ModelConfig,
    tensors: Mapping[str, TensorView],
    vector: Sequence[int],
    *,
    drafts: bool = False,
) -> Division:
    """Of the layers of a settled config, with `drafts` of its drafting block, and of what lies beside them. Raises
    SettingError for a vector with a zero and for more ranks than query heads, UnsupportedModel for a tensor that nobody
    divides."""
    splits: dict[str, Split] = {}
    parts: dict[int, Sequence[Mapping[str, Partition]]] = {}
    states: dict[int, StateForm] = {}
    for layer in range(config.layers + (config.nextn if drafts else 0)):
        names = family.tensor_names(config, layer)
        present = {role: form_of(tensors[name]) for role, name in names.items() if name in tensors}
        shards = layer_shards(family.stages(config, layer), present, vector)
        splits |= {names[role]: split for role, split in shards.splits.items()}
        parts[layer] = shards.stages
        if shards.state is not None:
            states[layer] = shards.state
    beside = {name: form_of(view) for name, view in tensors.items() if not name.startswith("blk.")}
    return Division(splits | dict(model_shards(beside, vector)), parts, states)


def form_of(view: TensorView) -> TensorForm:
    return TensorForm(view.rows, view.cols, view.type.block_len, view.type.block_bytes)
