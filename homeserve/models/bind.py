"""Bind: declarations and tensors become the op list that a backend runs.

    stage_facts(config, layer) for the layers of this rank
      │  one Norm, the stage's own ops, one owed update each (`stage_ops`, into an `OpList`)
      ▼
    EmbedRows? · (Norm … Linear) x stages · (SelectRows · Norm · Linear · Softcap?)?

The residual stream is the buffer `x`. A stage writes its output to `update` and *owes* it: the next norm adds it to
`x` before it reads (`Norm.add`), so the sum costs no op of its own and is done exactly once. The rows whose logits are
wanted are selected before the final norm, with the last update added there.

In the pipeline layout a rank that holds layers [a, b) embeds only if a = 0 and has a head only if b is the number of
layers. Between ranks the two buffers `x` and `update` travel (`Bound.gives`; the first op receives them, the last one
sends them), the update complete and not yet added: the receiver's first norm adds it, once. What the neighbour is like
is read from `stage_facts` at its index; no layer is built to be looked at, and a weight of a layer outside the range is
never touched. A layer that reads the K and V of another one must be on the rank of that one.

A drafting block behind the trunk is bound where the caller asks for `drafts` (`draft_ops`): its K and V and its state
are filled by the list of the last rank, and where that rank is alone, or every rank has a part of each layer, a second
list behind the mark `DraftStep` is one step of drafting. Otherwise its tensors are known by name and left alone.

The rank that samples has one more op behind the mark `HiddenStep`: the output norm of all rows, for embeddings. It runs
where it is asked for and else costs nothing; a list that drafts has those rows anyway.

In the tensor layout every rank has a part of every layer. The same functions build its list from a `TensorSource` that
hands out this rank's part of each tensor (`dividing`), and the exchanges stand between the ops: one sum behind each
stage, a gather and a merge in each attention, a sum behind the embedding, a gather behind the head (docs/LAYOUTS.md).

After building, the ops are read back and compared with the declarations (`conform`; in terms of the rank's share,
`conform_parts`), and every partial sum is followed to where it is completed (`conform_sums`): what runs is what was
declared.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from backends.base import (
    Buffer,
    DraftStep,
    KvLayer,
    KvPool,
    KvWindow,
    Op,
    ReceiveRows,
    Rope,
    SendRows,
    StateLayer,
    StatePart,
    TensorView,
)
from backends.quant import QuantType
from homeserve.errors import InvalidModelFile, UnsupportedModel
from homeserve.layouts.share import PIPELINE, TENSOR, Share
from homeserve.layouts.transition import StateForm
from homeserve.models import attention_ops, end_ops, stage_ops
from homeserve.models.config import (
    OUTPUT,
    OUTPUT_BIAS,
    OUTPUT_NORM,
    ROPE_FREQS,
    TOKEN_EMBD,
    TOKEN_INPUT,
    ModelConfig,
    settle,
)
from homeserve.models.conform import check_hidden, check_layers, check_updates
from homeserve.models.conform_drafts import block_of, check_fill, check_step
from homeserve.models.conform_parts import Parts
from homeserve.models.conform_sums import check_sums
from homeserve.models.dividing import divided
from homeserve.models.draft_ops import FINAL, Drafting, checked_stages, lacks_block
from homeserve.models.family import Family
from homeserve.models.op_list import OpList
from homeserve.models.rope import resolve_rope
from homeserve.models.stages import Attention, Dense, Experts, GatedDeltaNet, RopeFacts, Stage, TokenInput
from homeserve.models.tensors import SOURCE, TensorSource


@dataclass(frozen=True)
class Bound:
    """What one rank runs. `kv_layers[i]` is the pool layer that ops address as i, `state_layers` likewise the recurrent
    ones; `kv_places` and `state_parts` say which layers, and what part of them, they are in pools of the whole model.
    `windows` are the KV groups of the whole model that keep the last tokens only (`kv_windows`). `takes` and
    `gives` are the buffers that come from the previous rank and go to the next one (empty at the ends of the model).
    `embedding_ranks` are told drawn tokens, because they look up rows by token and others draw; `samples`: the logits
    are here. `drafting_block`: the K and V of the drafting block, or this rank's part of the block, are here; they are
    the last ones of `kv_layers`."""

    config: ModelConfig
    layers: range
    ops: tuple[Op, ...]
    weights: Mapping[str, TensorView]
    kv_layers: tuple[KvLayer, ...]
    state_layers: tuple[StateLayer, ...] = ()
    takes: tuple[Buffer, ...] = ()
    gives: tuple[Buffer, ...] = ()
    windows: tuple[int, ...] = ()
    share: Share | None = None
    embedding_ranks: tuple[int, ...] = (0,)
    samples: bool = True
    kv_places: tuple[int, ...] = ()
    state_parts: tuple[StatePart, ...] = ()
    drafting_block: bool = False

    @property
    def drafts(self) -> bool:
        """Whether there is a step of drafting."""
        return any(isinstance(op, DraftStep) for op in self.ops)

    @property
    def embeds(self) -> bool:
        return (self.share.rank if self.share else 0) in self.embedding_ranks

    def kv_pool(self, slots: int, kind: QuantType, window_slots: Sequence[int] | None = None) -> KvPool:
        """Its pool: `slots` for the layers that keep every token, and for each window `window_slots` (or as many)."""
        each = [slots] * len(self.windows) if window_slots is None else window_slots
        windows = tuple(KvWindow(window, own) for window, own in zip(self.windows, each, strict=True))
        return KvPool(self.kv_layers, slots, kind, windows)


def kv_windows(family: Family, config: ModelConfig) -> tuple[int, ...]:
    """The distinct windows of a model's attention layers, ascending, those of its drafting blocks among them."""
    stages = [stage for layer in range(config.layers) for stage in family.stage_facts(config, layer)]
    if family.nextn_facts is not None:
        stages += [stage for index in range(config.nextn) for stage in family.nextn_facts(config, index)]
    return tuple(sorted({stage.window for stage in stages if isinstance(stage, Attention) and stage.window}))


def bind(
    family: Family,
    config: ModelConfig,
    checkpoint_tensors: Mapping[str, TensorView],
    share: Share | None = None,
    *,
    drafts: bool = False,
) -> Bound:
    """Bind what `share` says; None: one rank runs everything. `drafts`: with the model's drafting block.

    Raises InvalidModelFile naming a tensor that is missing, misshapen or unknown, UnsupportedModel for layers that
    cannot be cut there and for a drafting block that there is not, and SettingError for a vector that cannot be
    followed."""
    if drafts and (why := lacks_block(family, config, checkpoint_tensors.keys())):
        raise UnsupportedModel(why, field="draft")
    if share is not None and share.layout == TENSOR:
        return _bind_part_of_each(family, config, checkpoint_tensors, share, drafts)
    blocks, config = config.nextn, settle(config, checkpoint_tensors.keys())
    layers = range(config.layers) if share is None else share.layers
    last = share is None or share.is_last
    assert layers.stop <= config.layers and last == (layers.stop == config.layers), f"cannot bind {share}"
    build = _Build(family, config, TensorSource(checkpoint_tensors), layers, share, drafts=drafts)
    declared = build.all_ops()
    build.refuse_leftovers(blocks)
    bound = build.bound()
    build.check(declared)
    _check_updates(bound)
    return bound


def _bind_part_of_each(
    family: Family, config: ModelConfig, tensors: Mapping[str, TensorView], share: Share, drafts: bool
) -> Bound:
    """A rank of the tensor layout. What is wrong with the checkpoint is told as it is for one rank, which runs all."""
    whole = bind(family, config, tensors, drafts=drafts)
    if not share.divides:
        return replace(whole, share=share)
    division = divided(family, whole.config, tensors, share.weight_vector, drafts=drafts)
    source = TensorSource(tensors, division.splits, share.rank)
    build = _Build(family, whole.config, source, whole.layers, share, drafts=drafts)
    declared = build.all_ops()
    bound = build.bound()
    build.check(declared, Parts(division.parts, share.rank), division.states)
    _check_updates(bound)
    check_sums(bound.ops, source.cut)
    return bound


def _check_updates(bound: Bound) -> None:
    names = [{buffer.name for buffer in buffers} for buffers in (bound.takes, bound.gives)]
    check_updates(bound.ops, owed="update" in names[0], handed_on="update" in names[1])
    check_hidden(bound.ops, samples=bound.samples)


def why_no_drafts(family: Family, config: ModelConfig, checkpoint_tensors: Mapping[str, TensorView]) -> str:
    """Why this model cannot draft, with the tensor that is missing, misshapen or unknown; empty: it can. Raises what
    `bind` does for a model that cannot be run at all."""
    bind(family, config, checkpoint_tensors)
    try:
        bind(family, config, checkpoint_tensors, drafts=True)
    except (InvalidModelFile, UnsupportedModel) as error:
        return str(error)
    return ""


class _Build:
    def __init__(
        self,
        family: Family,
        config: ModelConfig,
        source: TensorSource,
        layers: range,
        share: Share | None,
        *,
        drafts: bool,
    ) -> None:
        self.share = share
        self.drafts = drafts
        self.family = family
        self.config = config
        self.source = source
        self.layers = layers
        self.layer_ops: dict[int, list[Op]] = {}
        self.fill_ops: list[Op] = []
        self.step_ops: list[Op] = []
        self._ropes: dict[RopeFacts, Rope] = {}
        # Where only layers without stages lie before, the residual arrives and nothing is owed on it.
        self.windows = kv_windows(family, config)
        self._kv_before, states_before = self._layers_before(layers.start)
        self.list = OpList(config.hidden, source, self.windows, states_before, owed=self._is_owed())
        self.takes = self.list.stream() if layers.start else ()

    def all_ops(self) -> Mapping[int, tuple[Stage, ...]]:
        """Build the list. Gives what was declared of each layer."""
        declared = {layer: self.family.stage_facts(self.config, layer) for layer in self.layers}
        rank = self.share.rank if self.share is not None else 0
        if self.layers.start:
            self.list.add(ReceiveRows(self.takes, rank - 1, f"stream {rank - 1}"))
        else:
            end_ops.embed(self.list, self.config, self.list.x, "embed")
        if any(isinstance(stage, TokenInput) for stages in declared.values() for stage in stages):
            end_ops.embed(self.list, self.config, self.list.embedded, "embedded")
        for layer, stages in declared.items():
            self.layer(layer, stages)
        if self.layers.stop < self.config.layers:
            self.list.add(SendRows(self.list.stream(), rank + 1, f"stream {rank}"))
        elif self.drafts:
            declared |= self.drafting()
            if self.samples:
                end_ops.hidden(self.list, None, Buffer(FINAL, self.config.hidden))
        else:
            norm = end_ops.head(self.list, self.config)
            if self.samples:
                end_ops.hidden(self.list, norm)
        return declared

    @property
    def samples(self) -> bool:
        return self.share is None or self.share.is_last

    def drafting(self) -> Mapping[int, tuple[Stage, ...]]:
        """The end of a list that drafts: the block is filled, and where the rank has all that it takes, the step."""
        out, config, block = self.list, self.config, self.config.layers
        names = self.family.tensor_names(config, block)
        stages = checked_stages(self.family.stages(config, block), block)
        rope = self.resolved(stages[0].rope) if stages[0].rope else None
        final, first = end_ops.final_of_all(out, config), len(out.ops)
        made = Drafting(out, config, block, names)
        made.fill()
        attention_ops.keys_and_values(out, stages[0], block, names, rope)
        self.fill_ops = out.ops[first:]
        end_ops.head_of(out, config, final)
        if self.share is not None and self.share.layout == PIPELINE and self.share.ranks > 1:
            return {}
        out.add(DraftStep())
        out.drafting, first = True, len(out.ops)
        made.begin_step()
        inner = len(out.ops)
        self.layer(block, stages)
        end = len(out.ops)
        made.end_step()
        self.step_ops = [*out.ops[first:inner], *out.ops[end:]]
        return {block: stages}

    def check(
        self,
        declared: Mapping[int, tuple[Stage, ...]],
        parts: Parts | None = None,
        states: Mapping[int, StateForm] | None = None,
    ) -> None:
        """What was built is what was declared."""
        check_layers(declared, self.layer_ops, self.resolved, self.list.kv_index, parts)
        if not self.fill_ops:
            return
        before = self._layers_before(self.config.layers)[1]
        block = block_of(self.list, self.family, self.config, self.resolved, before, parts, states)
        kept = self.list.state_layers, self.list.state_parts
        own = (kept[0][-1], kept[1][-1]) if block.columns.size else (None, None)
        check_fill(block, self.fill_ops, own)
        if self.step_ops:
            check_step(block, self.step_ops)

    def layer(self, layer: int, stages: tuple[Stage, ...]) -> None:
        names = self.family.tensor_names(self.config, layer)
        first = len(self.list.ops)
        for stage in stages:
            match stage:
                case Attention(rope=rope):
                    attention_ops.attention(self.list, stage, layer, names, self.resolved(rope) if rope else None)
                case GatedDeltaNet():
                    stage_ops.delta_net(self.list, stage, layer, names)
                case Dense():
                    stage_ops.dense(self.list, stage, layer, names)
                case Experts():
                    stage_ops.experts(self.list, stage, layer, names)
                case TokenInput():
                    stage_ops.token_input(self.list, stage, layer, names, self.config.vocab)
        self.layer_ops[layer] = self.list.ops[first:]

    def refuse_leftovers(self, blocks: int) -> None:
        """A tensor that belongs here and that nobody asked for means a part of the model that we do not know. Those of
        drafting blocks, of which the keys name so many, are left alone unless they are bound."""
        config = self.config
        known = {TOKEN_EMBD, OUTPUT_NORM, OUTPUT, OUTPUT_BIAS, ROPE_FREQS}
        known |= set(TOKEN_INPUT if config.token_input else ())
        own = list(self.layers)
        for layer in range(config.layers, config.layers + blocks):
            known |= set(self.family.tensor_names(config, layer).values())
            own += [layer] if layer in self.layer_ops else []
        unknown = [name for layer in own for name in self.source.leftovers(f"blk.{layer}.", self.family.ignored)]
        checked = tuple(f"blk.{layer}." for layer in {*range(config.layers), *own})
        unknown += [name for name in self.source.leftovers("") if not name.startswith(checked) and name not in known]
        if unknown:
            shown = ", ".join(unknown[:12]) + (f" and {len(unknown) - 12} more" if len(unknown) > 12 else "")
            raise InvalidModelFile(
                SOURCE,
                unknown[0],
                f"{self.config.arch} does not know what to do with these tensors, and leaving them out would change"
                f" the text: {shown}",
            )

    def bound(self) -> Bound:
        last = self.layers.stop == self.config.layers
        return Bound(
            self.config,
            self.layers,
            tuple(self.list.ops),
            self.source.taken,
            tuple(self.list.kv_layers),
            tuple(self.list.state_layers),
            self.takes,
            () if last else self.list.stream(),
            self.windows,
            self.share,
            self._embedding_ranks(),
            self.samples,
            tuple(range(self._kv_before, self._kv_before + len(self.list.kv_layers))),
            tuple(self.list.state_parts),
            bool(self.fill_ops),
        )

    def _embedding_ranks(self) -> tuple[int, ...]:
        """In the pipeline layout rank 0, or every one where layers have inputs by token."""
        share = self.share
        if share is None or (share.layout == PIPELINE and not self.config.token_input):
            return (0,)
        return tuple(range(share.ranks))

    def resolved(self, facts: RopeFacts) -> Rope:
        """The op's rope for a declared one; the factor tensor is read once."""
        if facts not in self._ropes:
            self._ropes[facts] = resolve_rope(facts, self._rope_factors(facts))
        return self._ropes[facts]

    def _is_owed(self) -> bool:
        """Whether the last stage before this rank's layers, walking outwards over layers that declare none, owes."""
        for layer in reversed(range(self.layers.start)):
            if stages := self.family.stage_facts(self.config, layer):
                return not stages[-1].update.scales_residual
        return False

    def _layers_before(self, end: int) -> tuple[int, int]:
        """(layers with K and V of their own, recurrent layers) of the model before layer `end`."""
        before = [stage for at in range(end) for stage in self.family.stage_facts(self.config, at)]
        kv = sum(isinstance(stage, Attention) and stage.kv_source is None for stage in before)
        return kv, sum(isinstance(stage, GatedDeltaNet) for stage in before)

    def _rope_factors(self, facts: RopeFacts) -> tuple[float, ...]:
        if not facts.factor_tensor:
            return ()
        pairs = facts.dims // 2
        view = self.source.checked(facts.factor_tensor, 1, pairs)
        if view.type is not QuantType.F32:
            raise InvalidModelFile(SOURCE, facts.factor_tensor, f"is of type {view.type.name}, F32 is needed")
        factors = struct.unpack(f"<{pairs}f", view.data.tobytes())
        if not all(0.0 < factor < float("inf") for factor in factors):
            raise InvalidModelFile(SOURCE, facts.factor_tensor, "holds a factor that is not a positive number")
        return factors
