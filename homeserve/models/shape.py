"""From declarations and a checkpoint's real tensors to the `ModelShape` that the budget plans with.

Bytes are never computed from measurements here: each tensor of the checkpoint is counted once, in the layer and the
part that declares it, and what no layer declares is counted as "other". So the parts sum to the tensors of the file
exactly. What follows from the declarations alone: KV elements of a token, recurrent states, widths, and in how many
parts a tensor layout can cut a layer without cutting a quant block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from backends.base import TensorView
from budget.facts import KvShape, LayerShape, ModelShape
from homeserve.layouts import partition
from homeserve.models.config import OUTPUT, OUTPUT_BIAS, TOKEN_EMBD, TOKEN_INPUT, ModelConfig, settle
from homeserve.models.dividing import form_of
from homeserve.models.family import Family
from homeserve.models.stage_shards import layer_shards
from homeserve.models.stages import Attention, Dense, Experts, GatedDeltaNet, Stage, TokenInput
from homeserve.models.widths import (
    divided_elements,
    draft_elements,
    held_elements,
    held_thread_elements,
    partial_elements,
    row_elements,
    work_of,
)


def shape_of(
    family: Family,
    config: ModelConfig,
    tensors: Mapping[str, TensorView],
    *,
    name: str,
    quant: str,
) -> ModelShape:
    """The shape of a checkpoint. `weights_bytes` of it are the bytes of all `tensors`."""
    config = settle(config, tensors.keys())
    names = [family.tensor_names(config, index) for index in range(config.layers + config.nextn)]
    parts = [{role: tensors[of] for role, of in _once(each).items() if of in tensors} for each in names]
    trunk = [family.stage_facts(config, index) for index in range(config.layers)]
    blocks = [] if family.nextn_facts is None else [family.nextn_facts(config, index) for index in range(config.nextn)]
    joining = [view for part in parts for role, view in part.items() if role.startswith("nextn.")]
    own_tables = {part: [each[part] for each in parts if part in each] for part in _DRAFT_TABLES}
    embedding = _bytes(tensors[of] for of in (TOKEN_EMBD,) if of in tensors)
    head = _bytes(tensors[of] for of in (OUTPUT, OUTPUT_BIAS) if of in tensors)
    tables = tuple(_bytes(tensors[of] for of in (name,) if of in tensors) for name in TOKEN_INPUT[:2])
    layers = tuple(_layer(stages, part, tables) for stages, part in zip(trunk, parts, strict=False))
    counted = sum(_bytes(part.values()) for part in parts) + embedding + head
    counted += sum(layer.table_bytes for layer in layers)
    return ModelShape(
        name=name,
        arch=config.arch,
        quant=quant,
        layers=layers,
        hidden=config.hidden,
        mixer_width=max(_mixer_width(stages) for stages in (*trunk, *blocks)),
        ffn=config.ffn,
        vocab=config.vocab,
        context=config.context,
        embedding_bytes=embedding,
        head_bytes=head,
        tied=OUTPUT not in tensors,
        nextn=tuple(
            _drafting_layer(stages, part, config.hidden)
            for stages, part in zip(blocks, parts[config.layers :], strict=False)
        ),
        nextn_bytes=_bytes(joining),
        nextn_params=sum(view.rows * view.cols for view in joining),
        nextn_table_bytes=sum(_bytes(views) for views in own_tables.values()),
        nextn_units=_join_units(config.hidden, parts[config.layers :]),
        nextn_embeds=bool(own_tables[_DRAFT_TABLES[0]]),
        other_bytes=_bytes(tensors.values()) - counted,
        row_elements=row_elements(config.hidden, zip(trunk, parts, strict=False)),
        draft_elements=draft_elements(
            config.hidden, zip(trunk, parts, strict=False), zip(blocks, parts[config.layers :], strict=False)
        ),
        held_thread_elements=held_thread_elements(stage for stages in trunk for stage in stages),
        partial_elements=partial_elements(stage for stages in trunk for stage in stages),
        divided_elements=divided_elements(zip(trunk, parts, strict=False)),
        query_heads=min((stage.heads for _, stage in _attentions(trunk)), default=0),
        attended_elements=max((stage.heads * (stage.head_dim + 1) for _, stage in _attentions(trunk)), default=0),
        kv_sources=tuple((at, stage.kv_source) for at, stage in _attentions(trunk) if stage.kv_source is not None),
    )


def _attentions(trunk: Iterable[Iterable[Stage]]) -> Iterable[tuple[int, Attention]]:
    return ((at, stage) for at, stages in enumerate(trunk) for stage in stages if isinstance(stage, Attention))


def _once(names: Mapping[str, str]) -> dict[str, str]:
    """Each tensor under one role."""
    return {role: of for of, role in {of: role for role, of in names.items()}.items()}


def _layer(stages: Sequence[Stage], present: Mapping[str, TensorView], tables: Sequence[int]) -> LayerShape:
    """`tables` are the bytes of the table of inputs by token and of its projection; each layer that has such inputs has
    its columns of one and its rows of the other."""
    kv, mixer_units, ffn_units, kv_bytes = None, 1, 1, 0
    state_elements = conv_elements = held = table_bytes = table_copies = 0
    used_experts = 0.0
    for stage in stages:
        match stage:
            case Attention():
                if stage.kv_source is None:
                    kv = KvShape(2 * stage.kv_heads * stage.head_dim, stage.window, stage.kv_heads, stage.head_dim)
                    kv_bytes = _kv_bytes(stage, present)
                block = _block_len(present.get("attn_output"))
                mixer_units = partition.query_heads(stage.heads, stage.head_dim, block, _ALONE).units
            case GatedDeltaNet():
                values = stage.value_heads * stage.value_dim
                state_elements = values * stage.key_dim
                conv_elements = _FLOAT32_AS_16_BITS * stage.channels * (stage.kernel - 1)
                held = held_elements(stage)
                sizes = (stage.key_heads, stage.value_heads // stage.key_heads, stage.value_dim, stage.tiled)
                mixer_units = partition.key_heads(*sizes, _block_len(present.get("ssm_out")), _ALONE).units
            case Dense():
                ffn_units = partition.ffn_columns(stage.width, _block_len(present.get("ffn_down")), _ALONE).units
            case Experts():
                block = _block_len(present.get("ffn_down_exps"))
                ffn_units = partition.experts(stage.count, stage.width, block, _ALONE).units
                used_experts = stage.used / stage.count
            case TokenInput():
                table_copies = tables[1] * stage.width // stage.columns
                table_bytes = tables[0] * stage.width // stage.columns + table_copies
    inner = {role: view for role, view in present.items() if not role.startswith("nextn.")}
    routed = _bytes(view for role, view in inner.items() if role.partition(".")[0].endswith("_exps"))
    ffn = _bytes(view for role, view in inner.items() if role.startswith(_FEED_FORWARD)) - routed
    copies = _copies(stages, inner)
    ffn_copies = sum(size for role, size in copies.items() if role.startswith(_FEED_FORWARD))
    return LayerShape(
        mixer_bytes=_bytes(inner.values()) - ffn - routed,
        ffn_bytes=ffn,
        made_bytes=_bytes(view for role, view in inner.items() if role.endswith(_MADE)),
        shared_bytes=_bytes(view for role, view in inner.items() if role in _OF_SHARED),
        expert_bytes=routed,
        used_experts=used_experts,
        kv_bytes=kv_bytes,
        params=sum(view.rows * view.cols for view in inner.values()),
        mixer_units=mixer_units,
        ffn_units=ffn_units,
        kv=kv,
        state_elements=state_elements,
        conv_elements=conv_elements,
        held_elements=held,
        mixer_copies=sum(copies.values()) - ffn_copies,
        ffn_copies=ffn_copies,
        table_bytes=table_bytes,
        table_copies=table_copies,
        work=work_of(stages, {role: view.type.block_len for role, view in present.items()}),
    )


def _drafting_layer(stages: Sequence[Stage], present: Mapping[str, TensorView], hidden: int) -> LayerShape:
    """A drafting block's layer, with the hidden state that it keeps of a request: one row of floats, a state like a
    convolution's window, and held like one."""
    return replace(
        _layer(stages, present, (0, 0)), conv_elements=_FLOAT32_AS_16_BITS * hidden, held_elements=held_elements(hidden)
    )


def _join_units(hidden: int, blocks: Sequence[Mapping[str, TensorView]]) -> int:
    """In how many parts the columns of each half of the joining projection can be cut; 0: there is none."""
    matrix = next((part["nextn.eh_proj"] for part in blocks if "nextn.eh_proj" in part), None)
    return partition.ffn_columns(hidden, _block_len(matrix), _ALONE).units if matrix is not None else 0


def _copies(stages: Sequence[Stage], present: Mapping[str, TensorView]) -> dict[str, int]:
    """By role, the bytes of what every rank of a tensor layout has whole."""
    forms = {role: form_of(view) for role, view in present.items()}
    splits = layer_shards(stages, forms, _ALONE).splits
    return {role: sum(piece.nbytes(forms[role]) for piece in own if piece.copied) for role, (own,) in splits.items()}


_DRAFT_TABLES = ("nextn.embed_tokens", "nextn.shared_head_head")
"""A drafting block's own embedding and head, where it has them."""
_FEED_FORWARD = ("ffn_", "exp_probs")
"""Beginnings of the roles of a feed-forward."""
_MADE = ("_exps.bias", "ssm_ba")
"""Ends of the roles of tensors that are put together anew for a rank (`TensorSource.take_flat`, `take_reordered`)."""
_OF_SHARED = ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
_ALONE = (1,)
"""The weight vector of one rank: it has all units."""
_FLOAT32_AS_16_BITS = 2
"""The budget counts a convolution window's elements at 16 bits; ours are float32."""


def _kv_bytes(stage: Attention, present: Mapping[str, TensorView]) -> int:
    """Of the K and V projections, also where one tensor holds them with Q: all its rows have the same length."""
    own = ("attn_k", "attn_v", "attn_k.bias", "attn_v.bias")
    fused = (present[role] for role in ("attn_qkv", "attn_qkv.bias") if role in present)
    kv_rows = 2 * stage.kv_heads * stage.head_dim
    together = stage.heads * stage.q_step + kv_rows
    return _bytes(present[role] for role in own if role in present) + sum(
        view.nbytes * kv_rows // together for view in fused
    )


def _block_len(matrix: TensorView | None) -> int:
    """Of the matrix that sums over what is cut: a shard ends between two of its blocks."""
    return matrix.type.block_len if matrix is not None else 1


def _mixer_width(stages: Iterable[Stage]) -> int:
    """What the projections of the widest mixer give for a token, together."""
    widths = [0]
    for stage in stages:
        match stage:
            case Attention():
                widths.append(stage.heads * stage.q_step + 2 * stage.kv_heads * stage.head_dim)
            case GatedDeltaNet():
                widths.append(stage.channels + stage.value_heads * (stage.value_dim + 2))
            case _:
                pass
    return max(widths)


def _bytes(views: Iterable[TensorView]) -> int:
    return sum(view.nbytes for view in views)
