"""Bind: declarations and tensors become the op list that a backend runs.

    stage_facts(config, layer) for the layers of this rank
      │  one Norm, the stage's own ops, one owed update each
      ▼
    EmbedRows? · (Norm … Linear) x stages · (SelectRows · Norm · Linear)?

The residual stream is the buffer `x`. A stage writes its output to `update` and *owes* it: the next norm adds it to
`x` before it reads (`Norm.add`), so the sum costs no op of its own and is done exactly once. The rows whose logits are
wanted are selected before the final norm, with the last update added there.

A rank that holds layers [a, b) embeds only if a = 0 and has a head only if b is the number of layers. Between ranks the
two buffers `x` and `update` travel (`Bound.gives`), the update complete and not yet added: the receiver's first norm
adds it, once. What the neighbour is like is read from `stage_facts` at its index; no layer is built to be looked at,
and a weight of a layer outside the range is never touched.

After building, the ops are read back and compared with the declarations (`conform`): what runs is what was declared.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from backends.base import Attention as AttentionOp
from backends.base import (
    Buffer,
    EmbedRows,
    GatedActivation,
    KvLayer,
    Linear,
    LinearPart,
    Norm,
    Op,
    Rope,
    RopeStore,
    SelectRows,
    TensorView,
    Weight,
)
from backends.quant import QuantType
from homeserve.errors import CheckpointError
from homeserve.models.config import OUTPUT, OUTPUT_BIAS, OUTPUT_NORM, ROPE_FREQS, TOKEN_EMBD, ModelConfig, settle
from homeserve.models.conform import check_layers, check_updates
from homeserve.models.family import Family
from homeserve.models.rope import resolve_rope
from homeserve.models.stages import Attention, Dense, RopeFacts, Stage
from homeserve.models.tensors import SOURCE, TensorSource


@dataclass(frozen=True)
class Bound:
    """What one rank runs. `kv_layers[i]` is the pool layer that ops address as i. `takes` and `gives` are the buffers
    that come from the previous rank and go to the next one (empty at the ends of the model)."""

    config: ModelConfig
    layers: range
    ops: tuple[Op, ...]
    weights: Mapping[str, TensorView]
    kv_layers: tuple[KvLayer, ...]
    takes: tuple[Buffer, ...] = ()
    gives: tuple[Buffer, ...] = ()


def bind(
    family: Family, config: ModelConfig, checkpoint_tensors: Mapping[str, TensorView], layers: range | None = None
) -> Bound:
    """Bind `layers` (all by default). Raises CheckpointError naming a tensor that is missing, misshapen or unknown."""
    config = settle(config, checkpoint_tensors.keys())
    layers = range(config.layers) if layers is None else layers
    assert layers.step == 1 and 0 <= layers.start < layers.stop <= config.layers, f"no layers to bind: {layers}"
    build = _Build(family, config, TensorSource(checkpoint_tensors), layers)
    declared = {layer: family.stage_facts(config, layer) for layer in layers}
    if layers.start == 0:
        build.embed()
    for layer, stages in declared.items():
        build.layer(layer, stages)
    if layers.stop == config.layers:
        build.head()
    build.refuse_leftovers()
    bound = build.bound()
    check_layers(declared, build.layer_ops, build.resolved)
    check_updates(bound.ops, owed=build.update in bound.takes, handed_on=build.update in bound.gives)
    return bound


@dataclass
class _Build:
    """The list as it grows. `owed` is the update that nobody has added to the residual yet."""

    family: Family
    config: ModelConfig
    source: TensorSource
    layers: range
    ops: list[Op] = field(default_factory=list)
    layer_ops: dict[int, list[Op]] = field(default_factory=dict)
    kv_layers: list[KvLayer] = field(default_factory=list)
    ropes: dict[RopeFacts, Rope] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.x = Buffer("x", self.config.hidden)
        self.update = Buffer("update", self.config.hidden)
        self.normed = Buffer("normed", self.config.hidden)
        # Where only layers without stages lie before, the residual arrives and nothing is owed on it.
        self.owed: Buffer | None = self.update if self._earlier_stages() else None
        self.takes = self._stream() if self.layers.start else ()

    def embed(self) -> None:
        table = self.source.take(TOKEN_EMBD, self.config.vocab, self.config.hidden)
        self.ops.append(EmbedRows(table, self.x))

    def layer(self, layer: int, stages: tuple[Stage, ...]) -> None:
        names = self.family.tensor_names(self.config, layer)
        first = len(self.ops)
        for stage in stages:
            if isinstance(stage, Attention):
                self._attention(stage, names)
            else:
                self._dense(stage, names)
        self.layer_ops[layer] = self.ops[first:]

    def head(self) -> None:
        selected = Buffer("selected", self.config.hidden)
        final = Buffer("final", self.config.hidden)
        logits = Buffer("logits", self.config.vocab)
        norm = self.source.take(OUTPUT_NORM, 1, self.config.hidden)
        table = self.source.take(TOKEN_EMBD if self.config.tied_head else OUTPUT, self.config.vocab, self.config.hidden)
        bias = OUTPUT_BIAS in self.config.optional
        part = LinearPart(table, logits, self.source.take(OUTPUT_BIAS, 1, self.config.vocab) if bias else None)
        self.ops.append(SelectRows(self.x, selected, self._settle_owed()))
        self.ops.append(Norm(selected, norm, self.config.norm_eps, final))
        self.ops.append(Linear(final, (part,)))

    def refuse_leftovers(self) -> None:
        """A tensor that belongs here and that nobody asked for means a part of the model that we do not know."""
        unknown = [
            name for layer in self.layers for name in self.source.leftovers(f"blk.{layer}.", self.family.ignored)
        ]
        elsewhere = {TOKEN_EMBD, OUTPUT_NORM, OUTPUT, OUTPUT_BIAS, ROPE_FREQS}
        unknown += [name for name in self.source.leftovers("") if not name.startswith("blk.") and name not in elsewhere]
        if unknown:
            shown = ", ".join(unknown[:12]) + (f" and {len(unknown) - 12} more" if len(unknown) > 12 else "")
            raise CheckpointError(
                SOURCE,
                unknown[0],
                f"{self.config.arch} does not know what to do with these tensors, and leaving them out would change"
                f" the text: {shown}",
            )

    def bound(self) -> Bound:
        last = self.layers.stop == self.config.layers
        gives = () if last else self._stream()
        return Bound(
            self.config,
            self.layers,
            tuple(self.ops),
            self.source.taken,
            tuple(self.kv_layers),
            self.takes,
            gives,
        )

    def _stream(self) -> tuple[Buffer, ...]:
        return (self.x,) if self.owed is None else (self.x, self.owed)

    def resolved(self, facts: RopeFacts) -> Rope:
        """The op's rope for a declared one; the factor tensor is read once."""
        if facts not in self.ropes:
            self.ropes[facts] = resolve_rope(facts, self._rope_factors(facts))
        return self.ropes[facts]

    # ------------------------------------------------------------------------------------------------------ stages

    def _attention(self, stage: Attention, names: Mapping[str, str]) -> None:
        q = Buffer("q", stage.heads * stage.head_dim)
        k = Buffer("k", stage.kv_heads * stage.head_dim)
        v = Buffer("v", stage.kv_heads * stage.head_dim)
        mixed = Buffer("mixed", q.width)
        layer = len(self.kv_layers)
        self.kv_layers.append(KvLayer(stage.kv_heads, stage.head_dim))
        rope = self.resolved(stage.rope) if stage.rope else None
        self._read(stage, names["attn_norm"])
        self.ops.append(Linear(self.normed, self._qkv(stage, names, q, k, v)))
        self.ops.append(RopeStore(q, k, v, layer, stage.heads, stage.kv_heads, stage.head_dim, rope))
        self.ops.append(
            AttentionOp(
                q, mixed, layer, stage.heads, stage.kv_heads, stage.head_dim, scale=stage.scale, window=stage.window
            )
        )
        self.ops.append(Linear(mixed, (self._part(names, "attn_output", mixed.width, self.update, stage.output_bias),)))
        self.owed = self.update

    def _dense(self, stage: Dense, names: Mapping[str, str]) -> None:
        gate, up, act = (Buffer(name, stage.width) for name in ("gate", "up", "act"))
        self._read(stage, names["ffn_norm"])
        parts = (
            self._part(names, "ffn_gate", self.config.hidden, gate, stage.gate_bias),
            self._part(names, "ffn_up", self.config.hidden, up, stage.up_bias),
        )
        self.ops.append(Linear(self.normed, parts))
        self.ops.append(GatedActivation(gate, up, act, kind=stage.activation.value))
        self.ops.append(Linear(act, (self._part(names, "ffn_down", stage.width, self.update, stage.down_bias),)))
        self.owed = self.update

    def _read(self, stage: Stage, norm_name: str) -> None:
        weight = self.source.take(norm_name, 1, self.config.hidden)
        self.ops.append(Norm(self.x, weight, stage.read.eps, self.normed, self._settle_owed()))

    def _settle_owed(self) -> Buffer | None:
        owed, self.owed = self.owed, None
        return owed

    def _part(self, names: Mapping[str, str], role: str, cols: int, out: Buffer, biased: bool) -> LinearPart:
        weight = self.source.take(names[role], out.width, cols)
        bias = self.source.take(names[f"{role}.bias"], 1, out.width) if biased else None
        return LinearPart(weight, out, bias)

    def _qkv(
        self, stage: Attention, names: Mapping[str, str], q: Buffer, k: Buffer, v: Buffer
    ) -> tuple[LinearPart, ...]:
        """The three projections, from tensors of their own or as row ranges of a fused one (rows q | k | v)."""
        fused, fused_bias = names["attn_qkv"], names["attn_qkv.bias"]
        rows = q.width + k.width + v.width
        parts, first = [], 0
        projections = (("attn_q", q, stage.q_bias), ("attn_k", k, stage.k_bias), ("attn_v", v, stage.v_bias))
        for role, out, biased in projections:
            end = first + out.width
            weight = self._take_fused(names[role], fused, out.width, first, rows)
            bias: Weight | None = None
            if biased and self.source.has(fused_bias):
                bias = self.source.take_span(fused_bias, first, end, rows)
            elif biased:
                bias = self.source.take(names[f"{role}.bias"], 1, out.width)
            parts.append(LinearPart(weight, out, bias))
            first = end
        return tuple(parts)

    def _take_fused(self, own: str, fused: str, width: int, first: int, rows: int) -> Weight:
        if self.source.has(own) or not self.source.has(fused):
            return self.source.take(own, width, self.config.hidden)
        return self.source.take_rows(fused, first, first + width, rows, self.config.hidden)

    # -------------------------------------------------------------------------------------------------- neighbours

    def _earlier_stages(self) -> bool:
        """Whether a layer before this rank's declares a stage, walking outwards over layers that declare none."""
        return any(self.family.stage_facts(self.config, layer) for layer in reversed(range(self.layers.start)))

    def _rope_factors(self, facts: RopeFacts) -> tuple[float, ...]:
        if not facts.factor_tensor:
            return ()
        pairs = facts.dims // 2
        view = self.source.checked(facts.factor_tensor, 1, pairs)
        if view.type is not QuantType.F32:
            raise CheckpointError(SOURCE, facts.factor_tensor, f"is of type {view.type.name}, F32 is needed")
        factors = struct.unpack(f"<{pairs}f", view.data.tobytes())
        if not all(0.0 < factor < float("inf") for factor in factors):
            raise CheckpointError(SOURCE, facts.factor_tensor, "holds a factor that is not a positive number")
        return factors
