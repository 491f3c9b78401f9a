"""From declarations and a checkpoint's real tensors to the `ModelShape` that the budget plans with.

Bytes are never computed from measurements here: each tensor of the checkpoint is counted once, in the layer and the
part that declares it, and what no layer declares is counted as "other". So the parts sum to the tensors of the file
exactly. What follows from the declarations alone: KV elements of a token, recurrent states, widths, and in how many
parts a tensor layout can cut a layer without cutting a quant block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from backends.base import TensorView
from budget.facts import KvShape, LayerShape, ModelShape
from homeserve.models.config import OUTPUT, OUTPUT_BIAS, TOKEN_EMBD, ModelConfig
from homeserve.models.family import Family
from homeserve.models.stages import Attention, Dense, Stage


def shape_of(
    family: Family,
    config: ModelConfig,
    tensors: Mapping[str, TensorView],
    *,
    name: str,
    quant: str,
    windows: bool = False,
) -> ModelShape:
    """The shape of a checkpoint. `weights_bytes` of it are the bytes of all `tensors`.

    With `windows`, layers that see only the last tokens are said to keep only those. That is what a model allows, not
    what the engine does: it keeps every token of every layer in one pool, and a plan must not promise memory that is
    then not there.
    """
    layers, counted = [], 0
    for index in range(config.layers):
        present = {role: tensors[of] for role, of in family.tensor_names(config, index).items() if of in tensors}
        layers.append(_layer(family.stage_facts(config, index), present, windows))
        counted += _bytes(present.values())
    embedding = _bytes(tensors[of] for of in (TOKEN_EMBD,) if of in tensors)
    head = _bytes(tensors[of] for of in (OUTPUT, OUTPUT_BIAS) if of in tensors)
    return ModelShape(
        name=name,
        arch=config.arch,
        quant=quant,
        layers=tuple(layers),
        hidden=config.hidden,
        mixer_width=max(_mixer_width(family.stage_facts(config, index)) for index in range(config.layers)),
        ffn=config.ffn,
        vocab=config.vocab,
        context=config.context,
        embedding_bytes=embedding,
        head_bytes=head,
        tied=OUTPUT not in tensors,
        other_bytes=_bytes(tensors.values()) - counted - embedding - head,
    )


def _layer(stages: Iterable[Stage], present: Mapping[str, TensorView], windows: bool) -> LayerShape:
    kv, mixer_units, ffn_units, kv_bytes = None, 1, 1, 0
    for stage in stages:
        match stage:
            case Attention():
                kv = KvShape(2 * stage.kv_heads * stage.head_dim, stage.window if windows else 0, stage.kv_heads)
                kv_bytes = _kv_bytes(stage, present)
                mixer_units = _units(stage.heads * stage.head_dim, stage.head_dim, present.get("attn_output"))
            case Dense():
                ffn_units = _units(stage.width, 1, present.get("ffn_down"))
    ffn = _bytes(view for role, view in present.items() if role.startswith("ffn_"))
    return LayerShape(
        mixer_bytes=_bytes(present.values()) - ffn,
        ffn_bytes=ffn,
        kv_bytes=kv_bytes,
        params=sum(view.rows * view.cols for view in present.values()),
        mixer_units=mixer_units,
        ffn_units=ffn_units,
        kv=kv,
    )


def _kv_bytes(stage: Attention, present: Mapping[str, TensorView]) -> int:
    """Of the K and V projections, also where one tensor holds them with Q: all its rows have the same length."""
    own = ("attn_k", "attn_v", "attn_k.bias", "attn_v.bias")
    fused = (present[role] for role in ("attn_qkv", "attn_qkv.bias") if role in present)
    together = stage.heads + 2 * stage.kv_heads
    return _bytes(present[role] for role in own if role in present) + sum(
        view.nbytes * 2 * stage.kv_heads // together for view in fused
    )


def _units(columns: int, unit: int, matrix: TensorView | None) -> int:
    """Parts of `columns` that are whole multiples of `unit` and whole blocks of the matrix that sums over them."""
    block = matrix.type.block_len if matrix is not None else 1
    return max(1, columns // math.lcm(unit, block))


def _mixer_width(stages: Iterable[Stage]) -> int:
    """q, k and v of a token together, in the widest stage."""
    widths = [(stage.heads + 2 * stage.kv_heads) * stage.head_dim for stage in stages if isinstance(stage, Attention)]
    return max(widths, default=0)


def _bytes(views: Iterable[TensorView]) -> int:
    return sum(view.nbytes for view in views)
