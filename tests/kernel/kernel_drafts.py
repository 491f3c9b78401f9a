"""A small hybrid model that drafts, as op lists: delta nets, a drafting layer's K and V, and one step of drafting.

    step      delta nets ─▶ hidden ─┬─▶ JoinHidden ─▶ k, v ─▶ RopeStore without q
                                    └─▶ the rows wanted ─▶ logits
    draft     JoinHidden, chained ─▶ q, k, v ─▶ attention ─▶ final, draft_hidden ─▶ logits

Token t brings row t of each table; the first delta net gets its rows from tables alone, so odd widths are no matter.
Lane l has pages of its own and, unless a batch says otherwise, state slot SLOTS[l].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import kernel_rig as rig
import numpy as np

from backends.base import (
    PAGE_LEN,
    Attention,
    Batch,
    Buffer,
    DeltaNet,
    DraftStep,
    JoinHidden,
    KvLayer,
    KvPool,
    Limits,
    Linear,
    LinearPart,
    MemoryRegion,
    Norm,
    Op,
    Rope,
    RopeStore,
    SelectRows,
    StateLayer,
    StatePool,
    Weight,
    Zero,
)
from backends.cpu.backend import CpuProgram
from backends.cpu.memory import floats_at
from backends.quant import QuantType
from backends.reference.backend import ReferenceBackend
from backends.reference.program import ReferenceProgram

LANES = 4
LANE_PAGES = 4
TOKENS = 64
HELD = 24
SLOTS = (5, 0, 3, 1)
VOCAB = 37


@dataclass(frozen=True)
class Net:
    """Shape of one delta net."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    tiled: bool

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state(self) -> StateLayer:
        return StateLayer(self.channels, self.kernel, self.value_heads, self.key_dim, self.value_dim)


def with_a_step(ops: Sequence[Op]) -> list[Op]:
    """Ops of a program that may hold rows, because it has a step of drafting: one that does nothing."""
    return [*ops, DraftStep(), Zero(Buffer("nothing", 1))]


def random_net(random: np.random.Generator) -> Net:
    """Heads, dims and windows with odd tails."""
    keys, share = int(random.integers(1, 4)), int(random.integers(1, 4))
    dims = int(random.integers(1, 40)), int(random.integers(1, 70))
    return Net(keys, keys * share, *dims, int(random.integers(1, 6)), bool(random.integers(2)))


class Hybrid:
    """Ops, weights and pools. `width` of the hidden state, of which the drafting layer gets columns first .. end."""

    def __init__(
        self, nets: Sequence[Net], width: int, first: int, end: int, *, kind: str = "F32", seed: int = 0
    ) -> None:
        self.nets, self.width, self.first, self.end = tuple(nets), width, first, end
        self._random = np.random.default_rng(seed)
        self._kind = kind
        self.views: dict[str, rig.TensorView] = {}
        self.step = self._step_ops()
        self.draft = self._draft_ops()
        joined = StateLayer(end - first, 2, 0, 0, 0)
        self.states = StatePool((*(net.state for net in nets), joined), 6)
        self.kv = KvPool((KvLayer(2, 32),), LANES * LANE_PAGES * PAGE_LEN, QuantType.F32)

    @property
    def ops(self) -> list[Op]:
        return [*self.step, DraftStep(), *self.draft]

    def bind(self, level: str, threads: int = 2, ops: Sequence[Op] | None = None, held: int = HELD) -> CpuProgram:
        limits = Limits(64, 64, LANES, LANE_PAGES, held)
        on = rig.backend(level, threads)
        return on.bind(ops or self.ops, self.views, self.kv, limits, lambda *_: None, self.states)

    def reference(self) -> ReferenceProgram:
        """In double precision."""
        opened = ReferenceBackend(rig.OpenOptions(extra={"dtype": "float64"}))
        limits = Limits(64, 64, LANES, LANE_PAGES, HELD)
        return opened.bind(self.ops, self.views, self.kv, limits, lambda *_: None, self.states)

    # ------------------------------------------------------------------------------------------------------- weights

    def weight(self, name: str, values: rig.F32) -> Weight:
        self.views[name] = rig.table_of(name, values)
        return Weight(name, *values.shape)

    def normal(self, rows: int, cols: int) -> rig.F32:
        return self._random.standard_normal((rows, cols)).astype(np.float32)

    def matrix(self, rows: int, cols: int) -> Weight:
        view, _ = rig.weights_of(self._kind if cols % 32 == 0 else "F32", rows, cols, seed=len(self.views))
        self.views[view.name] = view
        return Weight(view.name, rows, cols)

    def linear(self, src: Buffer, *outs: Buffer) -> Linear:
        return Linear(src, tuple(LinearPart(self.matrix(out.width, src.width), out) for out in outs))

    # ----------------------------------------------------------------------------------------------------------- ops

    def _given(self, ops: list[Op], name: str, width: int, size: float = 1.0) -> Buffer:
        feed, table, buffer = rig.feed(name, size * self.normal(TOKENS, width))
        ops.append(feed)
        self.views[table.name] = table
        return buffer

    def _delta(self, ops: list[Op], layer: int, net: Net) -> Buffer:
        values, heads = net.value_heads * net.value_dim, net.value_heads
        mixed, z = self._given(ops, f"mixed{layer}", net.channels), self._given(ops, f"z{layer}", values)
        beta, alpha = self._given(ops, f"beta{layer}", heads, 2.0), self._given(ops, f"alpha{layer}", heads, 3.0)
        out = Buffer(f"out{layer}", values)
        weights = {
            "conv": self.weight(f"conv{layer}", self.normal(net.channels, net.kernel)),
            "dt_bias": self.weight(f"dt{layer}", self.normal(1, heads)),
            "a": self.weight(f"a{layer}", -np.exp(self.normal(1, heads) - 1)),
            "norm": self.weight(f"norm{layer}", self.normal(1, net.value_dim)),
        }
        shape = (net.key_heads, heads, net.key_dim, net.value_dim, net.kernel, 1e-6, net.tiled)
        ops.append(DeltaNet(mixed, z, beta, alpha, out, layer, *weights.values(), *shape))
        return out

    def _step_ops(self) -> list[Op]:
        ops: list[Op] = []
        outs = [self._delta(ops, layer, net) for layer, net in enumerate(self.nets)]
        hidden, kv = Buffer("hidden", self.width), 2 * 32
        ops.append(self.linear(outs[-1], hidden))
        left = self._given(ops, "left", self.width)
        joined = Buffer("joined", 2 * (self.end - self.first))
        k, v, none, chosen = Buffer("k", kv), Buffer("v", kv), Buffer("no q", 0), Buffer("chosen", self.width)
        ops.append(JoinHidden(left, hidden, joined, len(self.nets), self.first, self.end))
        ops.append(self.linear(joined, k, v))
        self._rope = Rope(False, (1.0, 0.25, 0.01))
        ops.append(RopeStore(none, k, v, 0, 0, 2, 32, self._rope))
        ops.append(SelectRows(hidden, chosen))
        ops.append(self.linear(chosen, Buffer("logits", VOCAB)))
        return ops

    def _draft_ops(self) -> list[Op]:
        table = next(op for op in self.step if getattr(op, "out", None) == Buffer("left", self.width))
        left, joined = Buffer("draft_left", self.width), Buffer("joined", 2 * (self.end - self.first))
        hidden, final, x = (Buffer(name, self.width) for name in ("draft_hidden", "draft_final", "draft_x"))
        q, k, v, att = Buffer("q", 4 * 32), Buffer("k", 2 * 32), Buffer("v", 2 * 32), Buffer("att", 4 * 32)
        return [
            type(table)(table.table, left),
            JoinHidden(left, hidden, joined, len(self.nets), self.first, self.end, chained=True),
            self.linear(joined, q, k, v),
            RopeStore(q, k, v, 0, 4, 2, 32, self._rope),
            Attention(q, att, 0, 4, 2, 32, 32**-0.5),
            self.linear(att, x),
            Norm(x, self.weight("hnorm", self.normal(1, self.width)), 1e-6, hidden),
            Norm(x, self.weight("fnorm", self.normal(1, self.width)), 1e-6, final),
            self.linear(final, Buffer("draft_logits", VOCAB)),
        ]


def hybrid(seed: int, kind: str = "F32") -> Hybrid:
    """Two nets of random shape and a drafting layer over some columns."""
    random = np.random.default_rng(seed)
    width = 64 if kind != "F32" else int(random.integers(3, 70))
    first = 0 if kind != "F32" else int(random.integers(0, width))
    end = width if kind != "F32" else int(random.integers(first + 1, width + 1))
    return Hybrid([random_net(random), random_net(random)], width, first, end, kind=kind, seed=seed)


# ------------------------------------------------------------------------------------------------------------ batches


def batch(
    *runs: tuple[int, int, int],
    hold: dict[int, int] | None = None,
    chain: Sequence[int] | None = None,
    drafts: int = 0,
    slots: Sequence[int] = SLOTS,
) -> Batch:
    """Runs of (lane, first position, rows), all rows with logits. The token of a row is told by lane and position;
    from the `drafts`-th row of a held lane on it is another one."""
    lanes, positions, tokens = [], [], []
    for lane, first, rows in runs:
        lanes += [lane] * rows
        positions += range(first, first + rows)
        held = hold is not None and lane in hold
        tokens += [token_at(lane, first + row, wrong=held and 0 < drafts <= row) for row in range(rows)]
    tables = np.arange(LANES * LANE_PAGES, dtype=np.int32).reshape(1, LANES, LANE_PAGES)
    number = [np.array(values, np.int32) for values in (tokens, positions, lanes)]
    pool_slots = tables[0, number[2], number[1] // PAGE_LEN] * PAGE_LEN + number[1] % PAGE_LEN
    places = np.zeros(0, np.int32)
    if hold is not None:
        places = np.array([hold.get(lane, -1) for lane in range(LANES)], np.int32)
    rows = np.arange(len(tokens), dtype=np.int32)
    chained = np.array([] if chain is None else chain, np.int32)
    return Batch(
        *(number[0], number[1], pool_slots[None].astype(np.int32), number[2], tables),
        *(rows if chain is None else rows[:0], np.array(slots, np.int32)),
        hold=places,
        chain=chained,
    )


def token_at(lane: int, position: int, wrong: bool = False) -> int:
    return (17 * lane + position + (29 if wrong else 0)) % TOKENS


def floats_of(program: CpuProgram, line: str) -> rig.F32:
    """A view of the memory of a line."""
    regions: list[MemoryRegion] = [each for each in program.memory_regions() if each.line == line]
    return floats_at(regions[0].address, regions[0].bytes // 4)


def state_bits(program: CpuProgram) -> bytes:
    return floats_of(program, "state").tobytes()
