"""Every partial sum is completed once, before anybody reads it: the ops of a rank of the tensor layout, read as types.

A buffer holds one of four things:

    WHOLE      the same on every rank                        what a norm, a router, RopeStore and the residual need
    OWN        this rank's columns of it                     inner columns of a stage, own heads, own logits
    PARTIAL    this rank's summand                           what a matrix by columns makes of OWN; Zero
    ATTENDED   all heads over this rank's rows

and an op says which it takes and which it leaves:

    WHOLE ─matrix by rows─▶ OWN ─matrix by columns─▶ PARTIAL ─SumRows─▶ WHOLE
    WHOLE ─JoinHidden─▶ OWN (columns of two buffers)
             OWN ─GatherRows─▶ WHOLE ─Attention─▶ ATTENDED ─MergeAttention─▶ OWN

A sum that is missing leaves PARTIAL where WHOLE is read, one that is taken twice finds WHOLE; a bias of a sum that
every rank has would be added by each. Which weights are parts of a whole comes from the split (`TensorSource.cut`), not
from the builder.

`check_exchanges` holds the lists of all ranks against each other: the same exchanges in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum

from backends.base import (
    EXCHANGES,
    AddGated,
    Attention,
    Buffer,
    DeltaNet,
    DraftStep,
    EmbedRows,
    ExpertMatrix,
    Experts,
    GatedActivation,
    GatherRows,
    JoinHidden,
    Linear,
    LinearPart,
    MergeAttention,
    Norm,
    Op,
    ReceiveRows,
    RopeStore,
    Scale,
    SelectRows,
    SendRows,
    Softcap,
    SumRows,
    Weight,
    Zero,
)
from homeserve.models.conform import DeclarationMismatch, before_hidden

_SUMMED = ("x", "embedded", "update", "held")
"""Buffers that are complete before another stage writes them; a shared expert's share is added to one of them."""


_KEPT = (*_SUMMED, "final")
"""Buffers that are read over the beginning of another stage; a drafting block lies between the final norm and the
head."""


class Holds(Enum):
    WHOLE = "the whole"
    OWN = "this rank's columns"
    PARTIAL = "a partial sum"
    ATTENDED = "this rank's rows attended to"


def check_sums(ops: Sequence[Op], cut: Collection[str]) -> None:
    """`cut` are the names of weights of which this rank has a part. Raises DeclarationMismatch with the index of the op
    that reads what is not complete, or completes what is."""
    _Check(cut).run(ops)


class _Check:
    def __init__(self, cut: Collection[str]) -> None:
        self.cut = cut
        self.holds: dict[str, Holds] = {}
        self.chained: list[Buffer] = []
        self.where = ""

    def run(self, ops: Sequence[Op]) -> None:
        """A step of drafting begins with nothing but what the step before left whole. The rows of embeddings are what
        the head reads (`check_hidden`)."""
        for index, op in enumerate(before_hidden(ops)):
            self.where = f"op {index} ({type(op).__name__})"
            if isinstance(op, DraftStep):
                self._end()
                self.holds = {}
            else:
                self._op(op)
        self._end()
        self.where = "the next step of drafting"
        self._need(Holds.WHOLE, *self.chained)

    def _end(self) -> None:
        if left := [name for name in _SUMMED if self.holds.get(name) is Holds.PARTIAL]:
            raise DeclarationMismatch(f"{left[0]} is left a partial sum that nobody completes")

    def _op(self, op: Op) -> None:
        match op:
            case EmbedRows():
                self._leave(op.out, self._partial_of(op.table))
            case Zero():
                self._leave(op.out, Holds.PARTIAL)
            case SumRows():
                self._need(Holds.PARTIAL, op.buffer)
                self.holds[op.buffer.name] = Holds.WHOLE
            case Linear():
                for part in op.parts:
                    self._linear(op.src, part)
            case GatherRows():
                for gather in op.parts:
                    if gather.src.width:
                        self._need(Holds.OWN, gather.src)
                    self._leave(gather.out, Holds.WHOLE)
            case RopeStore():
                self._need(Holds.WHOLE, op.q if op.heads else None, op.k, op.v)
            case Attention():
                self._need(Holds.WHOLE, op.q)
                self._leave(op.out, Holds.ATTENDED if op.partial else Holds.WHOLE)
            case MergeAttention():
                self._need(Holds.ATTENDED, op.src)
                self._need(Holds.OWN, op.gate)
                self._leave(op.out, Holds.OWN)
            case Experts():
                self._experts(op)
            case DeltaNet():
                self._need(Holds.OWN, op.mixed, op.z, op.beta, op.alpha)
                self._leave(op.out, Holds.OWN)
            case JoinHidden():
                self._need(Holds.WHOLE, op.left)
                if op.chained:
                    self.chained.append(op.right)
                else:
                    self._need(Holds.WHOLE, op.right)
                self._leave(op.out, Holds.OWN)
            case _:
                self._elementwise(op)

    def _elementwise(self, op: Op) -> None:
        match op:
            case Norm() | SelectRows():
                self._need(Holds.WHOLE, op.src, op.add)
                self._forget(op)
                self._leave(op.out, Holds.WHOLE)
            case GatedActivation():
                self._need(self._held(op.gate), op.up)
                self._leave(op.out, self._held(op.gate))
            case AddGated():
                self._need(Holds.WHOLE, op.gate)
                self._need(self._held(op.into), op.src)
            case Scale():
                self._need(Holds.WHOLE, op.src)
            case Softcap():
                self._need(Holds.OWN, op.src)
            case _:
                raise DeclarationMismatch(f"{self.where} has no place in the tensor layout")

    def _linear(self, src: Buffer, part: LinearPart) -> None:
        source, is_cut = self._held(src), part.weight.name in self.cut
        if source not in (Holds.WHOLE, Holds.OWN) or (source is Holds.OWN and not is_cut):
            raise DeclarationMismatch(f"{self.where} multiplies {part.weight.name} by {source.value}, {src.name}")
        if part.bias is not None and (part.bias.name in self.cut) != is_cut:
            raise DeclarationMismatch(
                f"{self.where} adds {part.bias.name} on every rank, and the sum is taken over all"
            )
        self._leave(part.out, source if not is_cut else Holds.OWN if source is Holds.WHOLE else Holds.PARTIAL)

    def _experts(self, op: Experts) -> None:
        self._need(Holds.WHOLE, op.src, op.logits)
        matrices: tuple[ExpertMatrix, ...] = (op.gate, op.up, op.down)
        weights = [weight for matrix in matrices for weight in (matrix.weight, matrix.bias) if weight is not None]
        if whole := [weight.name for weight in weights if weight.name not in self.cut]:
            raise DeclarationMismatch(f"{self.where} uses {whole[0]}, which every rank has, and the sum is over all")
        self._leave(op.out, Holds.PARTIAL)

    def _partial_of(self, weight: Weight) -> Holds:
        return Holds.PARTIAL if weight.name in self.cut else Holds.WHOLE

    def _held(self, buffer: Buffer) -> Holds:
        if buffer.name not in self.holds:
            raise DeclarationMismatch(f"{self.where} reads {buffer.name}, which nobody has written")
        return self.holds[buffer.name]

    def _need(self, needed: Holds, *buffers: Buffer | None) -> None:
        for buffer in buffers:
            if buffer is not None and (found := self._held(buffer)) is not needed:
                raise DeclarationMismatch(f"{self.where} needs {needed.value} in {buffer.name}, there is {found.value}")

    def _forget(self, op: Norm | SelectRows) -> None:
        """An update that was added is nobody's any more, and where a stage begins nothing of the one before is left."""
        if op.add is not None:
            del self.holds[op.add.name]
        if op.src.name == "x" and op.out.name != "router_in":
            self.holds = {name: holds for name, holds in self.holds.items() if name in _KEPT}

    def _leave(self, buffer: Buffer, holds: Holds) -> None:
        if self.holds.get(buffer.name) is Holds.PARTIAL and buffer.name in _SUMMED:
            raise DeclarationMismatch(f"{self.where} overwrites {buffer.name}, a partial sum that nobody completed")
        self.holds[buffer.name] = holds


# ------------------------------------------------------------------------------------------------------ between ranks


def exchanges(ops: Iterable[Op]) -> tuple[tuple[object, ...], ...]:
    """What all ranks must agree on, in order: the kind of each exchange, its label, and the widths that all give."""
    return tuple(_agreed(op) for op in ops if isinstance(op, EXCHANGES))


def _agreed(op: Op) -> tuple[object, ...]:
    match op:
        case SumRows():
            return "sum", op.label, op.buffer
        case GatherRows():
            return "gather", op.label, tuple((part.widths, part.out) for part in op.parts), op.target
        case MergeAttention():
            return "merge", op.label, op.src, op.heads, op.head_dim
        case SendRows() | ReceiveRows():
            return "stream", op.label, op.buffers
    raise AssertionError(f"{type(op).__name__} is no exchange")


def check_exchanges(lists: Sequence[Sequence[Op]]) -> None:
    """`lists[rank]` are the ops of a fleet in the tensor layout. Raises DeclarationMismatch with the first exchange in
    which two ranks would miss each other."""
    first = exchanges(lists[0])
    for rank, ops in enumerate(lists):
        for index, (known, found) in enumerate(zip(first, exchanges(ops), strict=False)):
            if known != found:
                raise DeclarationMismatch(f"exchange {index}: rank 0 has {known}, rank {rank} {found}")
        if len(exchanges(ops)) != len(first):
            raise DeclarationMismatch(f"rank 0 has {len(first)} exchanges, rank {rank} {len(exchanges(ops))}")


def check_streams(lists: Sequence[Sequence[Op]]) -> None:
    """The same for ranks of the pipeline layout: what one sends is what the next one receives."""
    for rank, (left, right) in enumerate(zip(lists, lists[1:], strict=False)):
        sent = [(op.target, op.label, op.buffers) for op in left if isinstance(op, SendRows)]
        awaited = [(rank + 1, op.label, op.buffers) for op in right if isinstance(op, ReceiveRows)]
        sources = {op.source for op in right if isinstance(op, ReceiveRows)}
        if sent != awaited or sources != {rank} or len(sent) != 1:
            raise DeclarationMismatch(f"rank {rank} sends {sent}, rank {rank + 1} awaits {awaited} from {sources}")
