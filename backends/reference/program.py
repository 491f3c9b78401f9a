"""The op list, walked in NumPy: one method per op, in the order of `backends.base`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from backends.base import (
    NO_STATES,
    AddGated,
    Attention,
    Batch,
    Buffer,
    Collective,
    DeltaNet,
    DraftStep,
    EmbedRows,
    ExpertMatrix,
    Experts,
    GatedActivation,
    GatherRows,
    HiddenStep,
    JoinHidden,
    KvPool,
    Limits,
    Linear,
    MemoryRegion,
    MergeAttention,
    Norm,
    Op,
    ReceiveRows,
    RopeStore,
    Scale,
    SelectRows,
    SendRows,
    Softcap,
    Stamp,
    StatePool,
    SumRows,
    Weight,
    Zero,
)
from backends.reference.compute import (
    GATES,
    Array,
    attend,
    attend_some,
    head_norm,
    linear,
    rms_norm,
    rotate,
    sigmoid,
    soft_cap,
)
from backends.reference.delta import DeltaWeights, States
from backends.reference.exchange import (
    Exchanges,
    gather_rows,
    merge_attention,
    receive_rows,
    send_rows,
    sum_rows,
)
from backends.reference.experts import DenseExperts, route, run_experts
from backends.reference.held import Held, held_rows, join_chained, join_hidden, kept_elements, run_delta_net
from backends.reference.pools import Pools, slots_here, slots_of
from backends.sections import MARKS, hidden_rows

Buffers = dict[str, Array]
NOTHING: Mapping[str, Array] = {}


class ReferenceProgram:
    """A bound op list with dense weights. `weights` are `[rows, cols]` of `dtype`, by name."""

    def __init__(
        self,
        ops: Sequence[Op],
        weights: Mapping[str, Array],
        kv: KvPool,
        limits: Limits,
        dtype: np.dtype[np.floating],
        states: StatePool = NO_STATES,
        collective: Collective | None = None,
    ) -> None:
        marks = [at for at, op in enumerate(ops) if isinstance(op, MARKS)]
        behind = {
            type(ops[at]): tuple(ops[at + 1 : end]) for at, end in zip(marks, [*marks[1:], len(ops)], strict=False)
        }
        self.ops = tuple(ops[: marks[0] if marks else len(ops)])
        self.draft_ops = behind.get(DraftStep, ())
        self.hidden_ops = behind.get(HiddenStep, ())
        self._hidden = hidden_rows(ops)
        self._read_behind = [self._hidden.buffer.name] if self._hidden is not None else []
        self._read_behind += [name for op in self.hidden_ops for name in _read_by(op)]
        self._left: Buffers | None = None
        """What the last run left for `hidden`; None: nothing that counts any more."""
        self.weights = weights
        self.limits = limits
        self.dtype = dtype
        self.pools = Pools(kv, dtype)
        self.states = States(states, dtype)
        self._acts = None if collective is None else Exchanges(collective, dtype)
        self._held = Held()
        self._step_before: Buffers = {}
        self._drafted = 0
        """Rows of the step of drafting before, if there was one since the last run."""

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        """The logits. `[0, 0]` on a rank that sends its rows on: its ops do not know the vocabulary."""
        return _logits(self.ops, self.run_from(batch, {}))

    def hidden(self, batch: Batch) -> npt.NDArray[np.float32]:
        if self._hidden is None:
            raise ValueError("this rank has no rows behind the output norm")
        left = self._left
        if left is None or len(batch.tokens) != len(next(iter(left.values()))):
            raise ValueError("the batch is not that of the last run")
        self._run_ops(self.hidden_ops, batch, left, Held())
        self._left = None
        return left[self._hidden.buffer.name].astype(np.float32, copy=False)

    def run_from(self, batch: Batch, given: Mapping[str, Array]) -> Buffers:
        """Execute every op up to the mark, starting from the buffers `given` (a previous rank's residual). Gives all
        buffers."""
        self._check(batch)
        self._step_before, self._drafted, self._left = {}, 0, None
        self._held, held = Held(), Held(held_rows(batch))
        buffers: Buffers = {name: np.array(values, dtype=self.dtype) for name, values in given.items()}
        self._run_ops(self.ops, batch, buffers, held)
        self._held = held
        if self._hidden is not None:
            self._left = {name: buffers[name] for name in self._read_behind if name in buffers}
        return buffers

    def draft(self, batch: Batch) -> npt.NDArray[np.float32]:
        assert self.draft_ops and len(batch.chain) == len(batch.tokens), "no step of drafting"
        self._check(batch)
        self._check_chain(batch)
        buffers: Buffers = {}
        step_before, self._step_before, self._drafted, self._left = self._step_before, {}, 0, None
        self._run_ops(self.draft_ops, batch, buffers, Held(), step_before)
        chained = {op.right.name for op in self.draft_ops if isinstance(op, JoinHidden) and op.chained}
        self._step_before, self._drafted = {name: buffers[name] for name in chained}, len(batch.tokens)
        return _logits(self.draft_ops, buffers)

    def accept(self, kept: Sequence[tuple[int, int]]) -> None:
        self._held.accept(kept)

    def _run_ops(
        self, ops: Sequence[Op], batch: Batch, buffers: Buffers, held: Held, step_before: Mapping[str, Array] = NOTHING
    ) -> None:
        rows = len(batch.tokens)
        for op in ops:
            match op:
                case Zero():
                    buffers[op.out.name] = np.zeros((rows, op.out.width), self.dtype)
                case SumRows() | GatherRows() | MergeAttention() | SendRows() | ReceiveRows():
                    buffers.update(self._exchange(op, Stamp(batch.epoch, batch.seq, rows, op.label), buffers))
                case DeltaNet():
                    weights = self._delta_weights(op)
                    buffers[op.out.name] = run_delta_net(op, weights, self.states, batch, buffers, held)
                case JoinHidden(chained=True):
                    left = buffers[op.left.name]
                    buffers[op.out.name] = join_chained(op, self.states, batch, left, step_before)
                case JoinHidden():
                    buffers[op.out.name] = join_hidden(op, self.states, batch, buffers, held)
                case _:
                    self._run_op(op, batch, buffers)
            if isinstance(op, SelectRows):
                rows = len(batch.logit_rows)

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.states.copy(pairs)

    def memory_lines(self) -> Mapping[str, int]:
        rows = self.limits.rows * self.dtype.itemsize
        every = (*self.ops, *self.draft_ops, *self.hidden_ops)
        widths = {buffer.name: buffer.width for op in every for buffer in _written(op)}
        held_rows = self.limits.held_rows if self.draft_ops else 0
        kept = held_rows * kept_elements(self.ops) * self.dtype.itemsize
        return {
            "weights": sum(array.nbytes for array in self.weights.values()),
            "kv": self.pools.nbytes(),
            "state": self.states.nbytes(),
            "workspace": rows * sum(widths.values()),
            **({"drafts": kept} if kept else {}),
        }

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        """None: arrays share the mappings of the interpreter's heap, and buffers come and go with each run."""
        return ()

    def close(self) -> None:
        """Let go of weights, pools and states. The program cannot run after."""
        self.weights = {}
        self._held, self._step_before, self._left = Held(), {}, None
        self.states = States(NO_STATES, self.dtype)
        self.pools = Pools(KvPool((), 0, self.pools.type), self.dtype)

    def _check(self, batch: Batch) -> None:
        rows = len(batch.tokens)
        assert rows <= self.limits.rows and len(batch.logit_rows) <= self.limits.logit_rows, "over the limits of bind"
        assert rows == len(batch.positions) == batch.slots.shape[1] == len(batch.lanes)
        assert len(batch.slots) == len(batch.tables), "slots and tables of other numbers of KV groups"
        places = [int(batch.hold[lane]) + row for lane, rows in held_rows(batch).items() for row in range(rows)]
        assert len(set(places)) == len(places), "two rows are held at one place"
        assert max(places, default=-1) < self.limits.held_rows, "more rows are held than bind was told"

    def _check_chain(self, batch: Batch) -> None:
        """Raises ValueError for rows that the step before, if there was one since the last run, did not have."""
        before = self._drafted
        if ((batch.chain < -1) | (batch.chain >= before)).any():
            raise ValueError(f"a chain of rows {batch.chain.tolist()} behind a step of drafting of {before}")

    def _vector(self, weight: Weight | None) -> Array | None:
        return None if weight is None else self.weights[weight.name][0]

    def _needed(self, weight: Weight) -> Array:
        vector: Array = self.weights[weight.name][0]
        return vector

    def _run_op(self, op: Op, batch: Batch, buffers: Buffers) -> None:
        match op:
            case EmbedRows():
                buffers[op.out.name] = self._embed(op, batch.tokens) * self.dtype.type(op.scale)
            case Norm():
                if op.add is not None:
                    buffers[op.src.name] = buffers[op.src.name] + buffers[op.add.name]
                buffers[op.out.name] = rms_norm(buffers[op.src.name], self._needed(op.weight), op.eps)
            case Linear():
                for part in op.parts:
                    weight = self.weights[part.weight.name]
                    buffers[part.out.name] = linear(buffers[op.src.name], weight, self._vector(part.bias))
            case RopeStore():
                self._rope_store(op, batch, buffers)
            case Attention():
                buffers[op.out.name] = self._attention(op, batch, buffers[op.q.name])
            case GatedActivation():
                buffers[op.out.name] = GATES[op.kind](buffers[op.gate.name], buffers[op.up.name])
            case Experts():
                buffers[op.out.name] = self._experts(op, buffers)
            case AddGated():
                added = buffers[op.src.name]
                if op.gate is not None:
                    added = added * sigmoid(buffers[op.gate.name])
                buffers[op.into.name] = buffers[op.into.name] + added
            case Softcap():
                buffers[op.src.name] = soft_cap(buffers[op.src.name], op.cap)
            case Scale():
                buffers[op.src.name] = buffers[op.src.name] * self._needed(op.weight)[0]
            case SelectRows():
                chosen = buffers[op.src.name][batch.logit_rows]
                if op.add is not None:
                    chosen = chosen + buffers[op.add.name][batch.logit_rows]
                buffers[op.out.name] = chosen

    def _exchange(
        self,
        op: SumRows | GatherRows | MergeAttention | SendRows | ReceiveRows,
        stamp: Stamp,
        buffers: Buffers,
    ) -> Buffers:
        """The buffers that an exchange fills."""
        assert self._acts is not None, "refused at bind"
        match op:
            case SumRows():
                return sum_rows(op, self._acts, stamp, buffers)
            case GatherRows():
                return gather_rows(op, self._acts, stamp, buffers)
            case MergeAttention():
                return merge_attention(op, self._acts, stamp, buffers, self._vector(op.sinks))
            case SendRows():
                return send_rows(op, self._acts, stamp, buffers)
            case ReceiveRows():
                return receive_rows(op, self._acts, stamp)

    def _embed(self, op: EmbedRows, tokens: npt.NDArray[np.int32]) -> Array:
        table = self.weights[op.table.name]
        if op.first is None:
            found: Array = table[tokens]
            return found
        rows = np.zeros((len(tokens), table.shape[1]), self.dtype)
        here = (tokens >= op.first) & (tokens < op.first + len(table))
        rows[here] = table[tokens[here] - op.first]
        return rows

    def _rope_store(self, op: RopeStore, batch: Batch, buffers: Buffers) -> None:
        rows = len(batch.tokens)
        step = op.q_step or op.head_dim
        if op.heads:
            queries = buffers[op.q.name].reshape(rows, op.heads, step)
            q = self._norm_and_turn(op, batch, queries[..., : op.head_dim], op.q_norm)
            buffers[op.q.name] = np.concatenate([q, queries[..., op.head_dim :]], axis=2).reshape(rows, op.heads * step)
        if op.k is None or op.v is None:
            assert op.k is None and op.v is None, "k and v are stored both or not at all"
            return
        k = self._norm_and_turn(op, batch, buffers[op.k.name].reshape(rows, op.kv_heads, op.head_dim), op.k_norm)
        v = buffers[op.v.name].reshape(rows, op.kv_heads, op.head_dim)
        if op.v_norm:
            v = head_norm(v, None, op.norm_eps)
        buffers[op.k.name] = k.reshape(rows, op.kv_heads * op.head_dim)
        self.pools.store(op.layer, batch.slots[self.pools.groups[op.layer]], k, v)

    def _norm_and_turn(self, op: RopeStore, batch: Batch, heads: Array, norm: Weight | None) -> Array:
        if norm is not None:
            heads = head_norm(heads, self._needed(norm), op.norm_eps)
        if op.rope is None:
            return heads
        turn = (batch.positions, op.rope.frequencies, op.rope.magnitude)
        return rotate(heads, *turn, interleaved=op.rope.interleaved)

    def _attention(self, op: Attention, batch: Batch, q: Array) -> Array:
        rows = len(batch.tokens)
        both = q.reshape(rows, op.heads, op.q_step or op.head_dim)
        queries = np.ascontiguousarray(both[..., : op.head_dim])
        sinks = self._vector(op.sinks)
        out = np.empty((rows, op.heads, op.head_dim), q.dtype)
        lses = np.empty((rows, op.heads), q.dtype)
        tables = batch.tables[self.pools.groups[op.layer]]
        for row, position in enumerate(batch.positions):
            end = int(position) + 1
            first = max(0, end - op.window) if op.window else 0
            table = tables[batch.lanes[row]]
            slots = slots_here(table, first, end) if op.partial else slots_of(table, first, end)
            seen = queries[row], *self.pools.rows(op.layer, slots)
            if op.partial:
                out[row], lses[row] = attend_some(*seen, op.scale, op.softcap)
            else:
                out[row] = attend(*seen, op.scale, op.softcap, sinks)
        if op.gated:
            out *= sigmoid(both[..., op.head_dim : 2 * op.head_dim])
        flat = out.reshape(rows, op.heads * op.head_dim)
        return np.concatenate([flat, lses], axis=1) if op.partial else flat

    def _experts(self, op: Experts, buffers: Buffers) -> Array:
        vectors = self._vector(op.routing.selection), self._vector(op.routing.gains)
        chosen, weights = route(buffers[op.logits.name], op.routing, *vectors)
        held = 0 if op.held is None else op.held[0]
        gate, up, down = (self._stack(matrix, held) for matrix in (op.gate, op.up, op.down))
        return run_experts(buffers[op.src.name], chosen, weights, gate, up, down, op.kind, op.held)

    def _stack(self, matrix: ExpertMatrix, held: int) -> DenseExperts:
        return DenseExperts(matrix, self.weights[matrix.weight.name], self._vector(matrix.bias), held)

    def _delta_weights(self, op: DeltaNet) -> DeltaWeights:
        return DeltaWeights(
            self.weights[op.conv.name], self._needed(op.dt_bias), self._needed(op.a), self._needed(op.norm)
        )


def _logits(ops: Sequence[Op], buffers: Buffers) -> npt.NDArray[np.float32]:
    """What the last of `ops` wrote, where this rank gets it."""
    last = ops[-1]
    if isinstance(last, SendRows):
        return np.empty((0, 0), np.float32)
    written = _written(last)[-1]
    if written.name not in buffers:
        return np.empty((0, written.width), np.float32)
    return buffers[written.name].astype(np.float32, copy=False)


def _read_by(op: Op) -> list[str]:
    """Names of the rows that an op behind `HiddenStep` reads."""
    assert isinstance(op, Norm), "checked with the sections"
    return [buffer.name for buffer in (op.src, op.add) if buffer is not None]


def _written(op: Op) -> tuple[Buffer, ...]:
    """The buffers that an op writes, but for those that it only changes in place before attention."""
    match op:
        case Linear(parts=parts):
            return tuple(part.out for part in parts)
        case RopeStore() | SendRows() | DraftStep() | HiddenStep():
            return ()
        case GatherRows(parts=gathers):
            return tuple(gather.out for gather in gathers)
        case SumRows(buffer=buffer):
            return (buffer,)
        case ReceiveRows(buffers=buffers):
            return buffers
        case AddGated(into=into):
            return (into,)
        case Softcap(src=src) | Scale(src=src):
            return (src,)
        case _:
            return (op.out,)
