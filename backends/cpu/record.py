"""A recorder: the op list of a model becomes an array of native steps, with every address filled in.

    ops ──Plan──▶ what must lie where (weights, buffers, scratch) ──place──▶ addresses ──record──▶ hs_step[]

What is decided here, once, so that the native walk decides nothing:
- *Buffers.* Equal names share memory; a row is padded to 16 floats, and padding stays zero.
- *Sections.* What a plan runs, and behind the marks a step of drafting and what makes the rows of embeddings
  (`backends.sections`).
- *Scope.* After `SelectRows` an op works on the rows whose logits are wanted.
- *Quantisation.* A `Linear` with packed weights needs its input as int16. The op before it quantises its own output
  while it is in cache, where it can (`Norm`, `GatedActivation`, `Attention`); otherwise a step of its own does.
- *Rope tables.* Sines and cosines of a batch's positions are computed once per distinct `Rope` of a section, not once
  per layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from backends.base import (
    NO_STATES,
    AddGated,
    Attention,
    Buffer,
    DeltaNet,
    EmbedRows,
    Experts,
    GatedActivation,
    GatherRows,
    JoinHidden,
    KvPool,
    Limits,
    Linear,
    MergeAttention,
    Norm,
    Op,
    ReceiveRows,
    Rope,
    RopeStore,
    Scale,
    SelectRows,
    SendRows,
    Softcap,
    StatePool,
    SumRows,
    TensorView,
    Weight,
    Zero,
)
from backends.cpu import abi, delta, exchanges, experts
from backends.cpu.capability import PACKED_TYPES
from backends.cpu.held import HeldStore
from backends.cpu.memory import Arena
from backends.cpu.stored import Elsewhere, StoredWeights
from backends.cpu.widths import FLOAT_BYTES, padded
from backends.held import held_limit
from backends.host.collective import HostCollective
from backends.kv_shapes import partial_groups, q_step
from backends.sections import buffers_of, rows_of, scopes_of, sections_of

DOUBLE_BYTES = 8
INT_BYTES = 4
ACTIVATION_BLOCK = 32


class Plan:
    """Sizes and offsets of everything that a program needs besides the KV pool."""

    def __init__(
        self,
        library: ctypes.CDLL,
        ops: Sequence[Op],
        weights: Mapping[str, TensorView],
        kv: KvPool,
        limits: Limits,
        threads: int,
        states: StatePool = NO_STATES,
        collective: HostCollective | None = None,
        shared: Elsewhere | None = None,
    ) -> None:
        self.library = library
        self.ops = tuple(ops)
        self.kv = kv
        self.states = states
        self.collective = collective
        self.rank = collective.rank if collective is not None else None
        self.limits = limits
        self.workspace = Arena()
        self.weights = StoredWeights(library, self.ops, weights, shared)
        self.buffers: dict[str, tuple[Buffer, int]] = {}
        self.ropes: dict[Rope, tuple[int, int]] = {}
        self.sections = sections_of(self.ops)
        self.scopes = tuple(scopes_of(self.ops))
        self._rows_by_scope = rows_of(self.ops, limits)
        self.op_rows = tuple(rows[scope] for rows, scope in zip(self._rows_by_scope, self.scopes, strict=True))
        most_rows = max(limits.rows, *(self._rows_by_scope[section[0]][0] for section in self.sections))
        rows_in: dict[str, int] = {}
        widths: dict[str, Buffer] = {}
        for op, scope, rows in zip(self.ops, self.scopes, self._rows_by_scope, strict=True):
            for buffer, buffer_scope in buffers_of(op, scope, self.rank):
                if widths.setdefault(buffer.name, buffer) != buffer:
                    raise ValueError(
                        f"buffer {buffer.name} is used with widths {widths[buffer.name].width} and {buffer.width}"
                    )
                rows_in[buffer.name] = max(rows_in.get(buffer.name, 0), rows[buffer_scope])
        for name, buffer in widths.items():
            size = rows_in[name] * padded(buffer.width) * FLOAT_BYTES
            self.buffers[name] = (buffer, self.workspace.reserve(size))
        self.activation = self.workspace.reserve(self._activation_bytes())
        self.partials = self.workspace.reserve(self._partial_bytes(threads))
        self.tiles = self.workspace.reserve(2 * most_rows * INT_BYTES)
        self.lane_runs = self.workspace.reserve(2 * most_rows * INT_BYTES) if states.layers else None
        self.kept = HeldStore(self.ops, held_limit(self.ops, limits) if states.layers else 0, threads)
        self.places = self.workspace.reserve(limits.rows * INT_BYTES) if self.kept.rows else None
        convolved = [delta.convolved_floats(op) for op in self.ops if isinstance(op, DeltaNet)]
        self.convolved = self.workspace.reserve(max(convolved, default=0) * limits.rows * FLOAT_BYTES)
        scratch = experts.scratch_bytes(self.ops, self.op_rows, weights, library)
        self.expert_scratch = {field: self.workspace.reserve(size) for field, size in scratch.items()}
        for op in self.ops:
            if isinstance(op, RopeStore) and op.rope is not None and op.rope not in self.ropes:
                pairs = len(op.rope.frequencies)
                if 2 * pairs > op.head_dim:
                    raise ValueError(f"rope turns {2 * pairs} dims of a head of {op.head_dim}")
                table = self.workspace.reserve(most_rows * 2 * pairs * FLOAT_BYTES)
                self.ropes[op.rope] = (self.workspace.reserve(pairs * DOUBLE_BYTES), table)

    def _activation_bytes(self) -> int:
        sizes = [
            rows * self.library.hs_activation_bytes(op.src.width)
            for op, rows in zip(self.ops, self.op_rows, strict=True)
            if isinstance(op, Linear | Experts)
        ]
        return max(sizes, default=0)

    def _partial_bytes(self, threads: int) -> int:
        floats = [
            self.library.hs_partial_floats(threads, op.heads, op.kv_heads, op.head_dim, self.limits.lane_pages)
            for op in self.ops
            if isinstance(op, Attention)
        ]
        return max(floats, default=0) * FLOAT_BYTES

    def kv_groups(self) -> list[abi.KvGroup]:
        """What a batch is checked against in each KV group. Pages may be -1 where no attention reads them all."""
        partial = partial_groups(self.ops, self.kv)
        sizes = zip(self.kv.group_slots, self.kv.group_windows, partial, strict=True)
        return [abi.KvGroup(slots, window, int(some)) for slots, window, some in sizes]

    def rows_of(self, section: range) -> int:
        """The most rows of a batch of a section."""
        return self._rows_by_scope[section[0]][0]

    def ropes_of(self, section: range) -> list[Rope]:
        """Each once, in order of first use."""
        found = [
            op.rope for op in (self.ops[at] for at in section) if isinstance(op, RopeStore) and op.rope is not None
        ]
        return list(dict.fromkeys(found))


@dataclass
class Recorded:
    """The steps of a section: which of the array's, the label of each that exchanges rows and the numbers of those that
    write states, both counted from the section's first."""

    first: int
    count: int = 0
    labels: dict[int, str] = field(default_factory=dict)
    state_steps: list[int] = field(default_factory=list)


class Recorder:
    """Turns a placed plan into native steps. Keeps alive what the steps point to (`parts`)."""

    def __init__(self, plan: Plan, kv_addresses: Sequence[tuple[int, int]], states: delta.Held) -> None:
        self._plan = plan
        self._kv = kv_addresses
        self._states = states
        self._parts: list[ctypes.Array[abi.Part] | ctypes.Structure] = []
        self._steps: list[abi.Step] = []
        self.sections: list[Recorded] = []

    def record(self) -> tuple[ctypes.Array[abi.Step], list[ctypes.Array[abi.Part] | ctypes.Structure]]:
        for section in self._plan.sections:
            self.sections.append(Recorded(len(self._steps)))
            self._rope_tables(section)
            for index in section:
                self._op(index, self._plan.ops[index], self._plan.scopes[index])
            self.sections[-1].count = len(self._steps) - self.sections[-1].first
        return (abi.Step * len(self._steps))(*self._steps), self._parts

    def _rope_tables(self, section: range) -> None:
        plan = self._plan
        for rope in plan.ropes_of(section):
            frequencies, table = plan.ropes[rope]
            self._emit(
                abi.STEP_ROPE_TABLE,
                0,
                rope_pairs=len(rope.frequencies),
                scale=rope.magnitude,
                frequencies=plan.workspace.address(frequencies),
                table=plan.workspace.address(table),
            )

    def _op(self, index: int, op: Op, scope: int) -> None:
        match op:
            case EmbedRows():
                self._embed(op, scope)
            case Norm():
                self._norm(index, op, scope)
            case Linear():
                self._linear(index, op, scope)
            case RopeStore():
                self._rope_store(op, scope)
            case Attention():
                self._attention(index, op, scope)
            case GatedActivation():
                self._gate(index, op, scope)
            case AddGated():
                self._add_gated(op, scope)
            case Softcap():
                self._softcap(op, scope)
            case Scale():
                self._scale(op, scope)
            case Experts():
                self._experts(op, scope)
            case DeltaNet():
                self._delta(index, op, scope)
            case JoinHidden():
                self._join(op, scope)
            case SelectRows():
                self._select(op)
            case Zero():
                self._emit(abi.STEP_ZERO, scope, width=op.out.width, **self._at("dst", op.out))
            case SumRows() | GatherRows() | MergeAttention() | SendRows() | ReceiveRows():
                self._exchange(op, scope)

    def _embed(self, op: EmbedRows, scope: int) -> None:
        ((_, table),) = self._matrices(op.table)
        part = abi.Part(matrix=table)
        self._emit(
            abi.STEP_EMBED,
            scope,
            width=op.out.width,
            first=-1 if op.first is None else op.first,
            scale=op.scale,
            part_count=1,
            parts=self._keep([part]),
            **self._at("dst", op.out),
        )

    def _norm(self, index: int, op: Norm, scope: int) -> None:
        self._emit(
            abi.STEP_NORM,
            scope,
            width=op.src.width,
            eps=op.eps,
            weight=self._vector(op.weight),
            activation=self._activation_for(index, op.out, op.out.width),
            **self._at("src", op.src),
            **self._at("add", op.add),
            **self._at("dst", op.out),
        )

    def _linear(self, index: int, op: Linear, scope: int) -> None:
        plan = self._plan
        if any(part.out.name == op.src.name for part in op.parts):
            raise ValueError(f"a linear op cannot write its own input {op.src.name}")
        packed = _is_packed(op, plan.weights)
        before = plan.ops[index - 1] if index else None
        if packed and not (before is not None and _quantises(before, op.src)):
            self._emit(
                abi.STEP_QUANTISE,
                scope,
                width=op.src.width,
                activation=self._activation_address(),
                **self._at("src", op.src),
            )
        parts = []
        for part in op.parts:
            address, stride = self._place(part.out)
            bias = self._vector(part.bias) if part.bias is not None else None
            for first, matrix in self._matrices(part.weight):
                skipped = first * FLOAT_BYTES
                own_bias = None if bias is None else bias + skipped
                parts.append(abi.Part(matrix=matrix, bias=own_bias, dst=address + skipped, dst_stride=stride))
        self._emit(
            abi.STEP_LINEAR,
            scope,
            width=op.src.width,
            part_count=len(parts),
            parts=self._keep(parts),
            activation=self._activation_address() if packed else None,
            **self._at("src", op.src),
        )

    def _rope_store(self, op: RopeStore, scope: int) -> None:
        rope = op.rope
        table = self._plan.workspace.address(self._plan.ropes[rope][1]) if rope is not None else None
        k_pool, v_pool = self._kv[op.layer]
        self._emit(
            abi.STEP_ROPE_STORE,
            scope,
            heads=op.heads,
            kv_heads=op.kv_heads,
            head_dim=op.head_dim,
            rope_pairs=len(rope.frequencies) if rope is not None else 0,
            interleaved=int(rope is not None and rope.interleaved),
            kv_type=self._plan.kv.type.gguf_id,
            kv_group=self._plan.kv.layers[op.layer].group,
            q_step=q_step(op),
            v_norm=int(op.v_norm),
            eps=op.norm_eps,
            weight=self._vector(op.q_norm) if op.q_norm is not None else None,
            k_weight=self._vector(op.k_norm) if op.k_norm is not None else None,
            table=table,
            k_pool=k_pool,
            v_pool=v_pool,
            **self._at("src", op.q),
            **self._at("add", op.k),
            **self._at("third", op.v),
        )

    def _attention(self, index: int, op: Attention, scope: int) -> None:
        k_pool, v_pool = self._kv[op.layer]
        self._emit(
            abi.STEP_ATTENTION,
            scope,
            width=op.out.width,
            heads=op.heads,
            kv_heads=op.kv_heads,
            head_dim=op.head_dim,
            window=op.window,
            scale=op.scale,
            kv_type=self._plan.kv.type.gguf_id,
            kv_group=self._plan.kv.layers[op.layer].group,
            q_step=q_step(op),
            gated=int(op.gated),
            partial=int(op.partial),
            softcap=op.softcap,
            weight=self._vector(op.sinks) if op.sinks is not None else None,
            k_pool=k_pool,
            v_pool=v_pool,
            partials=self._plan.workspace.address(self._plan.partials),
            activation=None if op.partial else self._activation_for(index, op.out, op.head_dim),
            **self._at("src", op.q),
            **self._at("dst", op.out),
        )

    def _gate(self, index: int, op: GatedActivation, scope: int) -> None:
        self._emit(
            abi.STEP_GATE,
            scope,
            width=op.out.width,
            gate=abi.GATES[op.kind],
            activation=self._activation_for(index, op.out, op.out.width),
            **self._at("src", op.gate),
            **self._at("add", op.up),
            **self._at("dst", op.out),
        )

    def _add_gated(self, op: AddGated, scope: int) -> None:
        self._emit(
            abi.STEP_ADD_GATED,
            scope,
            width=op.into.width,
            **self._at("src", op.src),
            **self._at("add", op.gate),
            **self._at("dst", op.into),
        )

    def _softcap(self, op: Softcap, scope: int) -> None:
        self._emit(abi.STEP_SOFTCAP, scope, width=op.src.width, scale=op.cap, **self._at("src", op.src))

    def _scale(self, op: Scale, scope: int) -> None:
        weight = self._vector(op.weight)
        self._emit(abi.STEP_SCALE, scope, width=op.src.width, weight=weight, **self._at("src", op.src))

    def _experts(self, op: Experts, scope: int) -> None:
        plan = self._plan
        views = {stored.view.name: stored.view for stored in plan.weights.by_name.values()}
        packed = experts.is_packed([op.gate.weight, op.up.weight], views)
        if packed:
            self._emit(
                abi.STEP_QUANTISE,
                scope,
                width=op.src.width,
                activation=self._activation_address(),
                **self._at("src", op.src),
            )
        scratch = {field: plan.workspace.address(offset) for field, offset in plan.expert_scratch.items()}
        detail = experts.record(op, views, scratch, plan.weights.by_name)
        self._parts.append(detail)
        self._emit(
            abi.STEP_EXPERTS,
            scope,
            width=op.src.width,
            gate=abi.GATES[op.kind],
            experts=ctypes.pointer(detail),
            activation=self._activation_address() if packed else None,
            **self._at("src", op.src),
            **self._at("add", op.logits),
            **self._at("dst", op.out),
        )

    def _delta(self, index: int, op: DeltaNet, scope: int) -> None:
        plan = self._plan
        at = self._at("alpha", op.alpha)
        alpha, convolved = (at["alpha"], at["alpha_stride"]), plan.workspace.address(plan.convolved)
        detail = delta.record(op, self._states, alpha, convolved, plan.kept.of_delta(op), self._vector)
        self._parts.append(detail)
        self._writes_states()
        self._emit(
            abi.STEP_DELTA,
            scope,
            width=op.out.width,
            delta=ctypes.pointer(detail),
            activation=self._activation_for(index, op.out, op.value_dim),
            **self._at("src", op.mixed),
            **self._at("add", op.z),
            **self._at("third", op.beta),
            **self._at("dst", op.out),
        )

    def _join(self, op: JoinHidden, scope: int) -> None:
        if op.first == op.end:
            return
        detail = delta.record_join(op, self._states, self._plan.kept.of_join(op))
        self._parts.append(detail)
        if not op.chained:
            self._writes_states()
        self._emit(
            abi.STEP_JOIN,
            scope,
            width=op.end - op.first,
            first=op.first,
            join=ctypes.pointer(detail),
            **self._at("src", op.left),
            **self._at("add", op.right),
            **self._at("dst", op.out),
        )

    def _select(self, op: SelectRows) -> None:
        self._emit(
            abi.STEP_SELECT,
            1,
            width=op.out.width,
            **self._at("src", op.src),
            **self._at("add", op.add),
            **self._at("dst", op.out),
        )

    def _exchange(self, op: exchanges.Exchange, scope: int) -> None:
        collective = self._plan.collective
        assert collective is not None, "checked before"
        kind, fields, act = exchanges.record(op, collective, self._place, self._vector)
        self._parts.append(act)
        section = self.sections[-1]
        section.labels[len(self._steps) - section.first] = op.label
        self._emit(kind, scope, act=exchanges.pointer_to(act), **fields)

    def _writes_states(self) -> None:
        """The step that is recorded next does."""
        section = self.sections[-1]
        section.state_steps.append(len(self._steps) - section.first)

    def _emit(self, kind: int, scope: int, **fields: object) -> None:
        self._steps.append(
            abi.Step(kind=kind, scope=scope, **{name: value for name, value in fields.items() if value is not None})
        )

    def _at(self, field: str, buffer: Buffer | None) -> dict[str, int]:
        if buffer is None:
            return {}
        address, stride = self._place(buffer)
        return {field: address, f"{field}_stride": stride}

    def _place(self, buffer: Buffer) -> tuple[int, int]:
        _, offset = self._plan.buffers[buffer.name]
        return self._plan.workspace.address(offset), padded(buffer.width)

    def _matrices(self, weight: Weight) -> Iterator[tuple[int, abi.Matrix]]:
        """(first row, matrix) of each run of a weight."""
        stored = self._plan.weights.by_name[weight.name]
        for run in stored.runs:
            address, kind = stored.arena.address(run.offset), stored.view.type.gguf_id
            yield run.first, abi.Matrix(address, kind, run.count, weight.cols, stored.stored_cols)

    def _vector(self, weight: Weight) -> int:
        return self._plan.weights.by_name[weight.name].address

    def _activation_address(self) -> int:
        return self._plan.workspace.address(self._plan.activation)

    def _activation_for(self, index: int, out: Buffer, unit: int) -> int | None:
        """Where op `index` should put the int16 of its output: only if the next op is a packed Linear that reads it.

        `unit` is the width that one work item of the op completes: it must be a whole number of activation blocks.
        """
        following = self._plan.ops[index + 1] if index + 1 < len(self._plan.ops) else None
        wanted = (
            isinstance(following, Linear)
            and following.src.name == out.name
            and _is_packed(following, self._plan.weights)
        )
        return self._activation_address() if wanted and unit % ACTIVATION_BLOCK == 0 else None

    def _keep(self, parts: list[abi.Part]) -> ctypes.Array[abi.Part]:
        array = (abi.Part * len(parts))(*parts)
        self._parts.append(array)
        return array


def _quantises(op: Op, out: Buffer) -> bool:
    """Whether `_activation_for` made op `op` quantise `out` for the Linear that follows it."""
    match op:
        case Norm(out=written) | GatedActivation(out=written):
            unit = written.width
        case Attention(out=written, head_dim=head_dim, partial=False):
            unit = head_dim
        case DeltaNet(out=written, value_dim=value_dim):
            unit = value_dim
        case _:
            return False
    return written.name == out.name and unit % ACTIVATION_BLOCK == 0


def _is_packed(op: Linear, weights: StoredWeights) -> bool:
    return any(weights.by_name[part.weight.name].view.type in PACKED_TYPES for part in op.parts)
