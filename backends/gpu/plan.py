"""What a program needs of a card's memory: sizes and offsets first, addresses when it has been had.

    ops ──Plan──▶ sizes ──Device.allocate──▶ addresses ──Placed──▶ steps ask where things are

    workspace   buffers │ scratch │ turns of ropes │ the batch's arrays          one allocation, zeroed
    drafts      rows of held lanes, layer by layer                               another, of programs that draft

- *Buffers.* Equal names share memory; a row is padded to 16 floats, and padding stays zero.
- *Scratch.* Shared by name between ops, as large as the largest wants it: one op runs after the other.
- *Turns.* Of each distinct `Rope` the frequencies as turns per position (ops/attention.py), uploaded once.

Everything is had at a bind, so no batch within the limits fails for memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from backends.base import (
    Buffer,
    EmbedRows,
    JoinHidden,
    KvPool,
    Limits,
    Op,
    Rope,
    RopeStore,
    StatePool,
    TensorView,
    Weight,
)
from backends.gpu.batch import INT_BYTES, BlockLayout, Rules
from backends.gpu.device import CardFacts
from backends.gpu.forms import Forms
from backends.gpu.held import held_limit, kept_bytes
from backends.gpu.ops.attention import rope_turns
from backends.gpu.ops.buffers import Rows
from backends.gpu.steps import kinds
from backends.gpu.steps.base import Context, Stored, stride_of
from backends.kv_shapes import partial_groups
from backends.sections import buffers_of, left_by, rows_of, scopes_of, sections_of

ALIGN = 256
FLOAT_BYTES = 4
ROWS_MOST = 65535
"""Of a batch: the second and third dimension of a grid are no larger."""


class Sizes:
    """Runs of one allocation."""

    def __init__(self) -> None:
        self.nbytes = 0

    def reserve(self, nbytes: int) -> int:
        """The offset of so many bytes."""
        at = self.nbytes
        self.nbytes += -(-nbytes // ALIGN) * ALIGN
        return at


@dataclass(frozen=True)
class Output:
    """What the last op of a section leaves: of `buffer` all rows (scope 0), or those whose logits are wanted (1).
    Without a buffer this rank gets nothing, `[0, width]`."""

    buffer: Buffer | None
    width: int
    scope: int


class Plan:
    """Sizes and offsets of a program's workspace. `forms`: those that its batches may be given, the ones without
    measuring first; sizes have room for any. Raises ValueError where ops do not fit each other."""

    def __init__(
        self,
        facts: CardFacts,
        ops: Sequence[Op],
        weights: Mapping[str, TensorView],
        kv: KvPool,
        limits: Limits,
        states: StatePool,
        rank: int | None = None,
        ranks: int = 1,
        forms: Sequence[Forms] = (),
    ) -> None:
        self.forms = tuple(forms) or (Forms(facts.arch),)
        self.facts, self.ops, self.weights = facts, tuple(ops), weights
        self.kv, self.limits, self.states = kv, limits, states
        self.rank, self.ranks = rank, ranks
        if max(limits.rows, limits.logit_rows, limits.lanes) > ROWS_MOST:
            told = f"{limits.rows} rows, logits of {limits.logit_rows}, in {limits.lanes} lanes"
            raise ValueError(f"batches of {told}: at most {ROWS_MOST} of each")
        self.sections = sections_of(self.ops)
        self.scopes = tuple(scopes_of(self.ops))
        self._rows_by_scope = rows_of(self.ops, limits)
        self.op_rows = tuple(rows[scope] for rows, scope in zip(self._rows_by_scope, self.scopes, strict=True))
        self.held_rows = held_limit(self.ops, limits) if states.layers else 0
        self.workspace, self.drafts = Sizes(), Sizes()
        self.buffers = self._buffers()
        self.scratch = self._scratch()
        self.turns = self._turns()
        self.block = BlockLayout(limits, len(kv.group_slots))
        self.block_at = self.workspace.reserve(self.block.nbytes)
        self.kept = self._kept()

    def context(self, op: int) -> Context:
        """Of op number `op`."""
        return Context(self.facts, self.limits, self.kv, self.states, self.weights, self.op_rows[op], self.ranks)

    def rules(self, section: int) -> Rules:
        """What a batch of section 0, or of a step of drafting, is checked against."""
        ops = [self.ops[at] for at in self.sections[section]]
        tables = [op.table.rows for op in ops if isinstance(op, EmbedRows) and op.first is None]
        rows, logit_rows = self._rows_by_scope[self.sections[section][0]]
        return Rules(
            self.limits,
            self.kv,
            rows,
            logit_rows,
            min(tables, default=0),
            self.states.slots if self.states.layers else 0,
            self.held_rows,
            partial_groups(self.ops, self.kv),
            any(isinstance(op, JoinHidden) and op.chained for op in ops),
        )

    def output(self, section: int) -> Output:
        """Raises ValueError where a section ends with an op that leaves no rows."""
        last = self.sections[section][-1]
        buffer = left_by(self.ops[last], self.rank)
        scope = self.scopes[last]
        if isinstance(buffer, Buffer):
            return Output(buffer, buffer.width, scope)
        return Output(None, buffer, scope)

    def exchanged_rows(self) -> list[tuple[Op, int]]:
        """Each op with the most rows that it ever has."""
        return list(zip(self.ops, self.op_rows, strict=True))

    # ---------------------------------------------------------------------------------------------------------- inside

    def _buffers(self) -> dict[str, tuple[Buffer, int]]:
        rows_in: dict[str, int] = {}
        found: dict[str, Buffer] = {}
        for op, scope, rows in zip(self.ops, self.scopes, self._rows_by_scope, strict=True):
            for buffer, own_scope in buffers_of(op, scope, self.rank):
                known = found.setdefault(buffer.name, buffer)
                if known != buffer:
                    raise ValueError(f"buffer {buffer.name} is used with widths {known.width} and {buffer.width}")
                rows_in[buffer.name] = max(rows_in.get(buffer.name, 0), rows[own_scope])
        return {
            name: (buffer, self.workspace.reserve(rows_in[name] * stride_of(buffer.width) * FLOAT_BYTES))
            for name, buffer in found.items()
        }

    def _scratch(self) -> dict[str, int]:
        most: dict[str, int] = {}
        for at, op in enumerate(self.ops):
            for name, nbytes in kinds.scratch(op, self.context(at)).items():
                most[name] = max(most.get(name, 0), nbytes)
        return {name: self.workspace.reserve(nbytes) for name, nbytes in most.items()}

    def _turns(self) -> dict[Rope, int]:
        found: dict[Rope, int] = {}
        for op in self.ops:
            if isinstance(op, RopeStore) and op.rope is not None and op.rope not in found:
                pairs = len(op.rope.frequencies)
                if 2 * pairs > op.head_dim:
                    raise ValueError(f"rope turns {2 * pairs} dims of a head of {op.head_dim}")
                found[op.rope] = self.workspace.reserve(8 * pairs)
        return found

    def _kept(self) -> dict[int, tuple[int, int]]:
        """Of each state layer whose rows may be held: offsets of both arrays."""
        sizes = kept_bytes(self.ops, self.held_rows)
        return {
            layer: (self.drafts.reserve(first), self.drafts.reserve(second)) for layer, (first, second) in sizes.items()
        }


# ------------------------------------------------------------------------------------------------------------ addresses


class WeightPlaces(Protocol):
    """Where weights are (backends.gpu.weights)."""

    def matrix(self, weight: Weight) -> Stored: ...

    def vector(self, weight: Weight) -> int: ...


class PoolPlaces(Protocol):
    """Where pools are (backends.gpu.pools), by a pool's own layers."""

    def kv_pool(self, layer: int) -> tuple[int, int, int]: ...

    def state(self, layer: int) -> tuple[int, int, int]: ...


@dataclass(frozen=True)
class Bases:
    """Addresses of a plan's allocations; `drafts` 0 where nothing is ever held."""

    workspace: int
    drafts: int = 0


class Placed:
    """`Places` of a plan that has its memory. `kv_layers`, `state_layers`: of the program's layers those of the pools.
    `forms` and `library` are set once, by who measures, before the first batch."""

    def __init__(
        self,
        plan: Plan,
        bases: Bases,
        weights: WeightPlaces,
        pools: PoolPlaces,
        kv_layers: Sequence[int],
        state_layers: Sequence[int],
    ) -> None:
        self.facts, self.limits, self.kv, self.states = plan.facts, plan.limits, plan.kv, plan.states
        self.ranks = plan.ranks
        self.forms, self.library = plan.forms[0], 0
        self._plan, self._bases = plan, bases
        self._weights, self._pools = weights, pools
        self._kv_layers, self._state_layers = tuple(kv_layers), tuple(state_layers)

    def rows(self, buffer: Buffer) -> Rows:
        _, offset = self._plan.buffers[buffer.name]
        return Rows(self._bases.workspace + offset, stride_of(buffer.width))

    def matrix(self, weight: Weight) -> Stored:
        return self._weights.matrix(weight)

    def vector(self, weight: Weight | None) -> int:
        return 0 if weight is None else self._weights.vector(weight)

    def scratch(self, name: str) -> int:
        return self._bases.workspace + self._plan.scratch[name]

    def batch(self, name: str) -> int:
        plan = self._plan
        return self._bases.workspace + plan.block_at + INT_BYTES * plan.block.at[name]

    def turns(self, rope: Rope) -> int:
        return self._bases.workspace + self._plan.turns[rope]

    def slots(self, layer: int) -> int:
        return self.batch(f"slots {self.kv.layers[layer].group}")

    def tables(self, layer: int) -> int:
        return self.batch(f"tables {self.kv.layers[layer].group}")

    def kv_pool(self, layer: int) -> tuple[int, int, int]:
        return self._pools.kv_pool(self._kv_layers[layer])

    def state(self, layer: int) -> tuple[int, int, int]:
        return self._pools.state(self._state_layers[layer])

    def kept(self, layer: int) -> tuple[int, int]:
        if layer not in self._plan.kept:
            return 0, 0
        first, second = self._plan.kept[layer]
        return self._bases.drafts + first, self._bases.drafts + second

    @property
    def block(self) -> int:
        """Of the batch's arrays, the whole of them."""
        return self._bases.workspace + self._plan.block_at


SKETCHED = 1 << 20
"""An address for launches that are only looked at: aligned like any."""


class Sketch:
    """Weights and pools without memory: for the symbols that a program will launch."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def matrix(self, weight: Weight) -> Stored:
        view = self._plan.weights[weight.name]
        return Stored(view.type, SKETCHED, view.rows, view.cols)

    def vector(self, weight: Weight) -> int:
        return SKETCHED

    def kv_pool(self, layer: int) -> tuple[int, int, int]:
        return SKETCHED, SKETCHED, 1

    def state(self, layer: int) -> tuple[int, int, int]:
        return SKETCHED, SKETCHED, ALIGN


def sketched(plan: Plan, forms: Forms | None = None) -> Placed:
    """Places for looking at launches, with other forms than the plan's first."""
    sketch, layers = Sketch(plan), (range(len(plan.kv.layers)), range(len(plan.states.layers)))
    placed = Placed(plan, Bases(SKETCHED, SKETCHED), sketch, sketch, *layers)
    placed.forms, placed.library = forms or plan.forms[0], SKETCHED
    return placed


def turns_of(plan: Plan) -> list[tuple[int, npt.NDArray[np.uint64]]]:
    """(offset in the workspace, what lies there) of each rope."""
    return [(at, rope_turns(rope.frequencies)) for rope, at in plan.turns.items()]
