"""The op list of a rank as it grows, with the one rule of sums: an update that is owed is added exactly once.

The residual stream is the buffer `x`. A stage writes its output to `update` and *owes* it: the next norm adds it to `x`
before it reads (`Norm.add`), so the sum costs no op of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from backends.base import AddGated, Buffer, KvLayer, LinearPart, Norm, Op, Scale, StateLayer
from homeserve.models.stages import Stage, UpdateKind
from homeserve.models.tensors import TensorSource


class OpList:
    """`kv_index[layer]` is the pool layer that holds the K and V of a global layer; `state_layers` likewise in order of
    the recurrent layers. `windows` are those of the whole model: layers of windows[i] lie in KV group i + 1. `owed` is
    the update that nobody has added to the residual yet."""

    def __init__(self, hidden: int, source: TensorSource, windows: tuple[int, ...] = (), *, owed: bool) -> None:
        self.source = source
        self.ops: list[Op] = []
        self.windows = windows
        self.kv_layers: list[KvLayer] = []
        self.kv_index: dict[int, int] = {}
        self.state_layers: list[StateLayer] = []
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

    def add(self, op: Op) -> None:
        self.ops.append(op)

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

    def owe(self, stage: Stage, names: Mapping[str, str], post_norm: str) -> None:
        """The stage is done, its output in `target`: normalised here where it declares so, then owed; or added here
        where the residual takes a factor. One that waits is joined by the next stage's."""
        target = self.target(stage)
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

    def part(self, names: Mapping[str, str], role: str, cols: int, out: Buffer, biased: bool = False) -> LinearPart:
        weight = self.source.take(names[role], out.width, cols)
        bias = self.source.take(names[f"{role}.bias"], 1, out.width) if biased else None
        return LinearPart(weight, out, bias)

    def stream(self) -> tuple[Buffer, ...]:
        """What travels to the next rank: the residual, and the update that is complete and not yet added."""
        return (self.x,) if self.owed is None else (self.x, self.owed)
