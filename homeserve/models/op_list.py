"""The op list of a rank as it grows, with the two rules of sums: an update that is owed is added exactly once, and one
that ranks have parts of is summed over them exactly once, before anybody reads it.

The residual stream is the buffer `x`. A stage writes its output to `update` and *owes* it: the next norm adds it to `x`
before it reads (`Norm.add`), so the addition costs no op of its own. In the tensor layout (`divided`) each rank's
output is a partial one, and `owe` completes it: `SumRows`, then whatever changes the sum.
"""

from __future__ import annotations

from collections.abc import Mapping

from backends.base import (
    AddGated,
    Buffer,
    KvLayer,
    Linear,
    LinearPart,
    Norm,
    Op,
    Scale,
    StateLayer,
    StatePart,
    SumRows,
    Weight,
    Zero,
)
from homeserve.models.stages import Stage, UpdateKind
from homeserve.models.tensors import TensorSource


def held(weight: Weight | None) -> Weight | None:
    """None for a weight of which this rank holds nothing."""
    return weight if weight is not None and weight.rows * weight.cols else None


class OpList:
    """`kv_index[layer]` is the pool layer that holds the K and V of a global layer; `state_layers` likewise in order of
    the recurrent layers, and `state_parts` what they are of the whole model's, of which `states_before` come before
    those of this list. `windows` are those of the whole model: layers of windows[i] lie in KV group i + 1. `owed` is
    the update that nobody has added to the residual yet; `drafting`: the list is that of a step of drafting now."""

    def __init__(
        self, hidden: int, source: TensorSource, windows: tuple[int, ...] = (), states_before: int = 0, *, owed: bool
    ) -> None:
        self.source = source
        self.ops: list[Op] = []
        self.windows = windows
        self.kv_layers: list[KvLayer] = []
        self.kv_index: dict[int, int] = {}
        self.state_layers: list[StateLayer] = []
        self.state_parts: list[StatePart] = []
        self.drafting = False
        self._states = states_before
        self.x = Buffer("x", hidden)
        self.update = Buffer("update", hidden)
        self.normed = Buffer("normed", hidden)
        self.held = Buffer("held", hidden)
        self.embedded = Buffer("embedded", hidden)
        self.owed: Buffer | None = self.update if owed else None
        self._buffers: dict[str, Buffer] = {}

    @property
    def hidden(self) -> int:
        return self.x.width

    @property
    def divided(self) -> bool:
        """Whether this rank has a part of every layer."""
        return self.source.ranks > 1

    def add(self, op: Op) -> None:
        self.ops.append(op)

    def label(self, what: str, layer: int | None = None) -> str:
        """Of an exchange: what it completes, and where."""
        return f"{'draft ' if self.drafting else ''}{what}{'' if layer is None else f' {layer}'}"

    def buffer(self, name: str, width: int) -> Buffer:
        """A buffer of this width: equal names are the same memory, so that layers of another width get another name."""
        known = self._buffers.setdefault(name, Buffer(name, width))
        return known if known.width == width else Buffer(f"{name}.{width}", width)

    def read(self, stage: Stage, norm: str) -> None:
        """The stage's norm of the residual, into `normed`."""
        weight = self.source.take(norm, 1, self.hidden)
        self.add(Norm(self.x, weight, stage.read.eps, self.normed, self.settle_owed()))

    def settle_here(self) -> None:
        """Add what is owed to the residual now, for a reader without a norm or a factor on the sum."""
        if (owed := self.settle_owed()) is not None:
            self.add(AddGated(owed, self.x))

    def target(self, stage: Stage) -> Buffer:
        """Where the stage leaves its output."""
        return self.held if stage.update.kind is UpdateKind.HOLD else self.update

    def owe(self, stage: Stage, names: Mapping[str, str], post_norm: str, summed: str = "") -> None:
        """The stage is done, its output in `target`: summed over the ranks under the label `summed` ("": each has the
        whole), normalised here where it declares so, then owed; or added here where the residual takes a factor. One
        that waits is joined by the next stage's."""
        target = self.target(stage)
        if self.divided and summed:
            self.add(SumRows(target, summed))
        if stage.update.post_norm_eps:
            self._norm_behind(target, names[post_norm], stage.update.post_norm_eps)
        if stage.update.kind is UpdateKind.HOLD:
            return
        if stage.update.kind is UpdateKind.JOIN:
            self.add(AddGated(self.held, self.update))
            self._norm_behind(self.update, names["ffn_joined_norm"], stage.update.joined_eps)
        self.owed = self.update
        if stage.update.scales_residual:
            self.settle_here()
            self.add(Scale(self.x, self.source.take(names["layer_output_scale"], 1, 1)))

    def _norm_behind(self, buffer: Buffer, weight: str, eps: float) -> None:
        self.add(Norm(buffer, self.source.take(weight, 1, self.hidden), eps, buffer))

    def settle_owed(self) -> Buffer | None:
        """What the next reader has to add."""
        owed, self.owed = self.owed, None
        return owed

    def part(
        self, names: Mapping[str, str], role: str, rows: int, cols: int, out: Buffer, biased: bool = False
    ) -> LinearPart:
        """A matrix that must be `[rows, cols]`, and its bias, as far as this rank holds them."""
        weight = self.source.take(names[role], rows, cols)
        bias = self.source.take(names[f"{role}.bias"], 1, rows) if biased else None
        return LinearPart(weight, out, held(bias))

    def keep_state(self, own: StateLayer | None, first_key: int) -> None:
        """The next recurrent layer of the model: what this rank keeps of its state, from key head `first_key` on."""
        if own is not None:
            self.state_layers.append(own)
            self.state_parts.append(StatePart(self._states, first_key))
        self._states += 1

    def linear(self, src: Buffer, *parts: LinearPart) -> None:
        """The matrices of which this rank has something."""
        if here := tuple(part for part in parts if held(part.weight)):
            self.add(Linear(src, here))

    def project(
        self, src: Buffer, names: Mapping[str, str], role: str, cols: int, out: Buffer, biased: bool = False
    ) -> None:
        """From a stage's inner columns, `cols` on all ranks together, to its output. A rank without one adds 0."""
        part = self.part(names, role, self.hidden, cols, out, biased)
        self.add(Linear(src, (part,)) if src.width else Zero(out))

    def stream(self) -> tuple[Buffer, ...]:
        """What travels to the next rank: the residual, and the update that is complete and not yet added."""
        return (self.x,) if self.owed is None else (self.x, self.owed)
