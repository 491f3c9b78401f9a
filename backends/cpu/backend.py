"""`CpuBackend`: the fast CPU backend. Weights stay packed, a plan is one native call.

CpuBackend(options)    chooses the ISA level, loads its library, starts the team of threads
  .bind(ops, …)        plans memory, repacks the weights, records the steps
    CpuProgram.run     fills in the batch and calls hs_run, which releases the GIL
              .draft   the same with the steps behind the mark `DraftStep`
              .hidden  the same with those behind the mark `HiddenStep`
              .accept  writes the states that the last run held
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_int32
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from backends import kv_shapes
from backends.base import (
    NO_STATES,
    Batch,
    Binding,
    Buffer,
    Capability,
    Collective,
    DeviceFacts,
    JoinHidden,
    KvPool,
    Limits,
    LoadProgress,
    MemoryRegion,
    Op,
    OpenOptions,
    PoolParts,
    Shared,
    SharedPools,
    StatePool,
    TensorView,
    WeightHome,
)
from backends.cpu import abi, capability, cores, delta, exchanges, levels
from backends.cpu.held import LINE, kept_record
from backends.cpu.layouts import CpuLayouts
from backends.cpu.load import load_weights
from backends.cpu.memory import doubles_at, floats_at
from backends.cpu.pools import CpuPools, all_of, checked_parts
from backends.cpu.record import Plan, Recorded, Recorder
from backends.cpu.shared import SharedWeights, pack_together
from backends.cpu.widths import padded
from backends.held import HeldLanes
from backends.host.collective import HostCollective
from backends.host.memory import Mapping as MemoryMapping
from backends.host.memory import SharedMapping
from backends.host.team import Team
from backends.needs import refuse_missing
from backends.sections import draft_section, hidden_rows, left_by

Ints = npt.NDArray[np.int32]

SPIN_PAUSES = 4000
"""How long a waiting thread spins before it sleeps, in pause instructions: some 50 to 150 microseconds."""


class CpuBackend:
    """The CPU of this machine, opened by one worker. `options.extra["library"]` names another build of the library.

    Raises `levels.LevelError` for an ISA level that the CPU lacks, `abi.NativeLibraryError` where the library was not
    built, and ValueError for a thread count or a core list that cannot be.
    """

    def __init__(self, options: OpenOptions) -> None:
        if options.threads < 0:
            raise ValueError(f"{options.threads} threads: give a positive number, or 0 for one per core")
        if "library" in options.extra:
            self.library = abi.load(Path(options.extra["library"]))
        else:
            self.library = levels.load(levels.choose(options.isa, levels.host_levels()))
        level: str = self.library.hs_level().decode("ascii")
        self.threads = options.threads or len(options.cores) or cores.thread_count()
        usable = len(options.cores) or len(cores.allowed_cores())
        spin = SPIN_PAUSES if self.threads <= usable else 0
        self._team = Team(self.library, self.threads, cores=options.cores, spin=spin)
        self.facts = DeviceFacts(
            backend="cpu", name=cores.cpu_name(), isa=level, threads=self.threads, batch_invariant=True
        )

    @property
    def team(self) -> int:
        """What functions of the library take."""
        return self._team.handle

    def capabilities(self) -> tuple[Capability, ...]:
        return capability.TABLE

    def pools(
        self, kv: KvPool, states: StatePool, progress: LoadProgress, shared: SharedPools | None = None
    ) -> CpuPools:
        """KV rows and states of these shapes, resident. Raises MemoryError with the arithmetic."""
        made = CpuPools(self.library, kv, states, shared)
        try:
            made.commit(self.team, progress)
        except BaseException:
            made.close()
            raise
        return made

    def bind(
        self,
        ops: Sequence[Op],
        weights: Mapping[str, TensorView],
        kv: KvPool,
        limits: Limits,
        progress: LoadProgress,
        states: StatePool = NO_STATES,
        collective: Collective | None = None,
        shared: Shared | None = None,
        parts: PoolParts | None = None,
    ) -> CpuProgram:
        """Repack the weights, reserve pools (without `parts`) and buffers, record the steps.

        Raises Unsupported with everything that is missing, ValueError where ops, weights and pool do not fit each
        other, MemoryError with the arithmetic. Nothing refers to `weights` afterwards.
        """
        assert shared is None or collective is not None, "ranks that share memory meet in an exchange"
        together = SharedWeights(self.library, shared) if shared is not None else None
        plan = self._plan(ops, weights, kv, limits, states, collective, together)
        if parts is not None:
            checked_parts(parts, kv, states)
        return CpuProgram(self, plan, progress, together, parts)

    def bind_layouts(
        self,
        bindings: Sequence[Binding],
        limits: Limits,
        progress: LoadProgress,
        collective: Collective,
        home: WeightHome,
    ) -> CpuLayouts:
        """Plan every layout, fill the arena once with each, record every program (`backends.cpu.layouts`)."""
        assert isinstance(collective, HostCollective), "CPU ranks exchange through shared memory"
        plans = {
            each.name: self._plan(each.ops, each.weights, each.kv, limits, each.states, collective) for each in bindings
        }
        return CpuLayouts(self, bindings, plans, collective, home, progress)

    def program(self, plan: Plan, progress: LoadProgress, parts: PoolParts, arena: int) -> CpuProgram:
        """A program of weights that the caller fills, at address `arena`, and pools of the caller."""
        return CpuProgram(self, plan, progress, None, parts, arena)

    def _plan(
        self,
        ops: Sequence[Op],
        weights: Mapping[str, TensorView],
        kv: KvPool,
        limits: Limits,
        states: StatePool,
        collective: Collective | None,
        together: SharedWeights | None = None,
    ) -> Plan:
        """What a program needs, checked."""
        refuse_missing("cpu", capability.TABLE, ops, weights, kv)
        capability.refuse_shapes("cpu", ops, kv.type)
        capability.refuse_vectors("cpu", ops, weights)
        assert collective is None or isinstance(collective, HostCollective), "CPU ranks exchange through shared memory"
        exchanges.check(ops, collective)
        plan = Plan(self.library, ops, weights, kv, limits, self.threads, states, collective, together)
        kv_shapes.check(ops, kv)
        delta.check(ops, states)
        return plan

    def close(self) -> None:
        """Stop the threads. Programs must be closed before."""
        self._team.close()


@dataclass(frozen=True)
class Section:
    """The steps of a plan, those of a step of drafting, or those that make the rows of embeddings: what is called, the
    label of each step that exchanges rows, and what the last step writes: of all rows, or of those whose logits are
    wanted."""

    record: abi.ProgramRecord
    labels: Mapping[int, str]
    output: npt.NDArray[np.float32]
    scope: int


class CpuProgram:
    """A bound op list. One call at a time, from any thread."""

    def __init__(
        self,
        backend: CpuBackend,
        plan: Plan,
        progress: LoadProgress,
        together: SharedWeights | None = None,
        parts: PoolParts | None = None,
        arena: int | None = None,
    ) -> None:
        self._backend = backend
        self._library = backend.library
        self._mappings: list[MemoryMapping] = []
        self._shared: list[SharedMapping] = []
        self._own_pools: CpuPools | None = None
        try:
            if together is not None:
                assert plan.collective is not None, "checked at bind"
                self._shared.append(
                    pack_together(self._library, backend.team, together, plan.collective, "weights", progress)
                )
            self._place(plan, progress, parts, arena)
        except BaseException:
            self.close()
            raise

    def _place(self, plan: Plan, progress: LoadProgress, parts: PoolParts | None, arena: int | None) -> None:
        own = plan.weights.own if arena is None else []
        if arena is None:
            weights = self._map("weights", plan.weights.arena.size, f"{len(own)} tensors, packed")
        plan.weights.arena.place(weights.address if arena is None else arena)
        if parts is None:
            self._own_pools = CpuPools(self._library, plan.kv, plan.states)
            parts = all_of(self._own_pools)
        kept = plan.kept
        if kept.arena.size:
            drafts = self._map(LINE, kept.arena.size, f"{kept.rows} rows whose states are held, of {len(plan.ops)} ops")
            kept.arena.place(drafts.address)
            drafts.commit(self._backend.team, progress)
        workspace = self._map(
            "workspace", plan.workspace.size, f"{len(plan.buffers)} buffers for {plan.limits.rows} rows, and scratch"
        )
        plan.workspace.place(workspace.address)
        if own:
            load_weights(self._library, self._backend.team, own, progress)  # which touches all of them
        workspace.commit(self._backend.team, progress)
        if self._own_pools is not None:
            self._own_pools.commit(self._backend.team, progress)
        for rope, (frequencies, _) in plan.ropes.items():
            doubles_at(plan.workspace.address(frequencies), len(rope.frequencies))[:] = rope.frequencies
        pools = parts.pools
        assert isinstance(pools, CpuPools), "checked at bind"
        self._states = delta.Held(pools.states, pools.state_base, parts.states)
        self._state_runs = delta.runs_of(plan.ops, self._states)
        recorder = Recorder(plan, [pools.kv_addresses(layer) for layer in parts.kv_layers], self._states)
        self._steps, self._parts = recorder.record()
        self._collective = plan.collective
        groups = plan.kv_groups()
        self._kv_groups = (abi.KvGroup * len(groups))(*groups)
        self._sections = [
            self._section(plan, ops, steps) for ops, steps in zip(plan.sections, recorder.sections, strict=True)
        ]
        self._draft_section = draft_section(plan.ops)
        self._hidden = hidden_rows(plan.ops)
        self._hidden_rows = (
            _rows_view(plan, self._hidden.buffer, plan.limits.rows) if self._hidden is not None else None
        )
        self._held = HeldLanes()
        self._drafted = 0  # rows of the last step of drafting
        self._ran = 0  # rows of the last run, while what it left is there

    def _section(self, plan: Plan, ops: range, recorded: Recorded) -> Section:
        steps = self._steps[recorded.first : recorded.first + recorded.count]
        tables = (step.parts[0].matrix.rows for step in steps if step.kind == abi.STEP_EMBED and step.first < 0)
        chained = any(isinstance(op, JoinHidden) and op.chained for op in (plan.ops[at] for at in ops))
        record = abi.ProgramRecord(
            steps=ctypes.cast(ctypes.byref(self._steps, recorded.first * ctypes.sizeof(abi.Step)), POINTER(abi.Step)),
            step_count=recorded.count,
            vocab_rows=min(tables, default=0),
            group_count=len(self._kv_groups) if plan.kv.layers else 0,
            groups=self._kv_groups,
            max_rows=plan.rows_of(ops),
            max_logit_rows=plan.limits.logit_rows,
            state_slots=plan.states.slots if plan.states.layers else 0,
            held_rows=plan.kept.rows,
            chained=int(chained),
            state_step_count=len(recorded.state_steps),
            state_steps=(c_int32 * len(recorded.state_steps))(*recorded.state_steps),
            places=plan.workspace.address(plan.places) if plan.places is not None else None,
            tiles=plan.workspace.address(plan.tiles),
            lane_runs=plan.workspace.address(plan.lane_runs) if plan.lane_runs is not None else None,
        )
        return Section(record, recorded.labels, _output_view(plan, ops), plan.scopes[ops[-1]])

    def _map(self, line: str, size: int, arithmetic: str) -> MemoryMapping:
        mapping = MemoryMapping(self._library, size, line, arithmetic)
        self._mappings.append(mapping)
        return mapping

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Execute every op up to the first mark. Returns logits float32 `[len(logit_rows), vocab]`, valid until the
        next call.

        Raises ValueError for a batch that exceeds the limits or points outside vocabulary, tables, pool or store of
        held rows, and what its collective raises (backends.acts.ExchangeError).
        """
        self._held.forget()
        self._drafted = self._ran = 0
        hold = _int32(batch.hold)
        if len(hold) and len(hold) != batch.tables.shape[1]:
            raise ValueError(f"{len(hold)} places of held lanes for {batch.tables.shape[1]} lanes")
        holds = bool(len(hold)) and bool((hold != -1).any())
        logits = self._call(self._sections[0], batch, _int32(batch.logit_rows), hold=hold if holds else None)
        if holds:
            self._held.note(hold, batch.states, batch.lanes, batch.positions)
        self._ran = len(batch.tokens)
        return logits

    def hidden(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Every row of the last run, whose batch it was, behind the output norm: float32 `[rows, hidden]`, valid until
        the next call. Raises ValueError on a rank that does not have them, and for another batch."""
        if self._hidden is None or self._hidden_rows is None:
            raise ValueError("this rank has no rows behind the output norm")
        if not self._ran or len(batch.tokens) != self._ran:
            raise ValueError("the batch is not that of the last run")
        if self._hidden.section is not None:
            self._ran = 0  # the residual has its last update now
            self._call(self._sections[self._hidden.section], batch, np.zeros(0, np.int32))
        return self._hidden_rows[: len(batch.tokens)]

    def draft(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Execute the ops behind the mark: one row of each lane. Returns logits of all rows, and raises, as `run` does;
        ValueError too where there is no mark, or `batch.chain` names a row that the step before did not have."""
        if self._draft_section is None:
            raise ValueError("this program has no step of drafting")
        if len(batch.chain) != len(batch.tokens):
            raise ValueError(f"a chain of {len(batch.chain)} rows for a step of drafting of {len(batch.tokens)}")
        before, self._drafted, self._ran = self._drafted, 0, 0
        none, section = np.zeros(0, np.int32), self._sections[self._draft_section]
        logits = self._call(section, batch, none, chain=_int32(batch.chain), chain_rows=before)
        self._drafted = len(batch.tokens)
        return logits

    def accept(self, kept: Sequence[tuple[int, int]]) -> None:
        """States of (lane, rows) that the last run held become what the lane's first rows leave. Raises ValueError,
        before anything is written, for a lane that is not held, or was accepted, or has not so many rows."""
        lanes = self._held.taken(kept)
        if not lanes or not self._states.parts:
            return
        record = self._sections[0].record
        records = (abi.Kept * len(lanes))(*map(kept_record, lanes))
        code = self._library.hs_accept(self._backend.team, byref(record), records, len(lanes))
        if code != abi.OK:
            raise ValueError(abi.ERRORS[code])

    def _call(
        self,
        section: Section,
        batch: Batch,
        logit_rows: Ints,
        *,
        hold: Ints | None = None,
        chain: Ints | None = None,
        chain_rows: int = 0,
    ) -> npt.NDArray[np.float32]:
        tokens, positions, slots = _int32(batch.tokens), _int32(batch.positions), _int32(batch.slots)
        row_lanes, tables, states = _int32(batch.lanes), _int32(batch.tables), _int32(batch.states)
        rows = len(tokens)
        if not len(positions) == len(row_lanes) == rows:
            raise ValueError("tokens, positions and lanes must be of one length")
        groups = len(self._kv_groups)
        if slots.shape != (groups, rows) or tables.ndim != 3 or tables.shape[0] != groups:
            raise ValueError(
                f"slots and tables of {slots.shape} and {tables.shape} for {groups} KV groups, {rows} rows"
            )
        if self._states.parts and len(states) != tables.shape[1]:
            raise ValueError(f"{len(states)} states for {tables.shape[1]} lanes")
        record = abi.BatchRecord(
            rows,
            len(logit_rows),
            tables.shape[1],
            tables.shape[2],
            tokens.ctypes.data,
            positions.ctypes.data,
            slots.ctypes.data,
            row_lanes.ctypes.data,
            tables.ctypes.data,
            logit_rows.ctypes.data,
            states.ctypes.data,
            None if hold is None else hold.ctypes.data,
            None if chain is None else chain.ctypes.data,
            batch.epoch,
            batch.seq,
            failed_step=-1,
            chain_rows=chain_rows,
        )
        if self._collective is not None:
            self._collective.check_usable()
        code = self._library.hs_run(self._backend.team, byref(section.record), byref(record))
        if code != abi.OK and self._collective is not None and record.failed_step in section.labels:
            self._collective.fail(section.labels[record.failed_step], code)
        if code != abi.OK:
            raise ValueError(abi.ERRORS[code])
        return section.output[: len(logit_rows) if section.scope else rows]

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy state slots (source, target) of all layers, in this order. Raises ValueError for a slot that there is
        not."""
        delta.copy(self._states, self._state_runs, pairs)

    def memory_lines(self) -> Mapping[str, int]:
        """Bytes held: packed weights, own pools, buffers and scratch. All of it is resident since the bind. Of memory
        that ranks share each tells what it has filled, so that together they tell all of it."""
        lines: dict[str, int] = {}
        for mapping in self._every():
            lines[mapping.purpose] = lines.get(mapping.purpose, 0) + mapping.filled_here
        return lines | (self._own_pools.memory_lines() if self._own_pools is not None else {})

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        """Each line is one mapping of its own, and one more for what it has of memory that ranks share."""
        own = tuple(MemoryRegion(each.purpose, each.address, each.size) for each in self._every() if each.size)
        return own + (self._own_pools.memory_regions() if self._own_pools is not None else ())

    def close(self) -> None:
        """Give the memory back. Arrays returned by `run` are invalid from here on."""
        for mapping in self._every():
            mapping.close()
        self._mappings.clear()
        self._shared.clear()
        if self._own_pools is not None:
            self._own_pools.close()

    def _every(self) -> list[MemoryMapping | SharedMapping]:
        return [*self._mappings, *self._shared]


def _output_view(plan: Plan, section: range) -> npt.NDArray[np.float32]:
    """What a section leaves, all its rows, without the padding."""
    left = left_by(plan.ops[section[-1]], plan.rank)
    if not isinstance(left, Buffer):
        return np.zeros((0, left), np.float32)
    return _rows_view(plan, left, plan.op_rows[section[-1]])


def _rows_view(plan: Plan, buffer: Buffer, rows: int) -> npt.NDArray[np.float32]:
    """So many rows of a buffer, without the padding."""
    _, offset = plan.buffers[buffer.name]
    stride = padded(buffer.width)
    return floats_at(plan.workspace.address(offset), rows * stride).reshape(rows, stride)[:, : buffer.width]


def _int32(array: Ints) -> Ints:
    return np.ascontiguousarray(array, dtype=np.int32)
