"""`Places` for tests of steps: an address book over NumPy arrays, one for each thing that a step may ask for.

Each array has exactly the bytes that were said to be needed, and `GUARD` more behind them that nothing may touch
(`check`). What nobody has written is NaN, but for the padding of rows, which is zero and stays so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import gpu_weights
import numpy as np
import numpy.typing as npt
import simt_rig as rig
from gpu_cases import Array, address, nothing

from backends.base import (
    NO_STATES,
    Batch,
    Buffer,
    DeltaNet,
    JoinHidden,
    KvPool,
    Limits,
    Rope,
    StatePool,
    TensorView,
    Weight,
)
from backends.gpu import states as layout
from backends.gpu.arch import arch
from backends.gpu.device import CardFacts
from backends.gpu.forms import Forms
from backends.gpu.launch import Launch
from backends.gpu.ops import delta
from backends.gpu.ops.buffers import Rows
from backends.gpu.steps import recurrent
from backends.gpu.steps.base import BatchShape, Context, Stored
from backends.quant import QuantType

GUARD = 256
FACTS = CardFacts(
    *("nvidia", 0, "GPU-0", "0000:01:00.0", "a card of tests", arch("sm_86"), 32, 4, 1 << 30),
    *(False, "none", True, 1 << 16),
)
NO_KV = KvPool((), 0, QuantType.F32)


F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
DOUBLE = np.dtype(np.float64)


def run(launches: Iterable[Launch], vendor: rig.Vendor, warp: int, *, backwards: bool = False) -> None:
    for launch in launches:
        rig.load(launch.symbol.file, vendor, warp).run(launch, backwards=backwards)


def normal(rng: np.random.Generator, *size: int) -> F32:
    return rng.standard_normal(size).astype(np.float32)


def guarded(nbytes: int) -> Array:
    return nothing((nbytes + GUARD,), np.uint8)


@dataclass
class Book:
    """`Places` of ops whose weights are made by `add_weights`, states and buffers on demand."""

    limits: Limits
    states: StatePool = NO_STATES
    held_rows: int = 0
    ranks: int = 1
    facts: CardFacts = FACTS
    kv: KvPool = NO_KV
    forms: Forms = Forms(FACTS.arch)
    library: int = 0
    scratches: dict[str, Array] = field(default_factory=dict)
    buffers: dict[str, tuple[Buffer, Array]] = field(default_factory=dict)
    matrices: dict[str, gpu_weights.Matrix] = field(default_factory=dict)
    vectors: dict[str, Array] = field(default_factory=dict)
    batches: dict[str, Array] = field(default_factory=dict)
    keeps: dict[int, tuple[Array, Array]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        floats = layout.slot_bytes(self.states) // 4
        self.slots_memory = guarded(4 * self.states.slots * floats)
        self.pool = self.slots_memory[:-GUARD].view(np.float32).reshape(self.states.slots, floats)
        self.pool[...] = 0

    # --------------------------------------------------------------------------------------------------- before a run

    @property
    def views(self) -> dict[str, TensorView]:
        return {
            name: TensorView(name, each.quant, each.rows, each.cols, each.file.reshape(-1))
            for name, each in self.matrices.items()
        }

    @property
    def dense(self) -> dict[str, npt.NDArray[np.float64]]:
        """Weights as the reference takes them."""
        found = {name: each.meaning.astype(np.float64) for name, each in self.matrices.items()}
        return found | {name: each.astype(np.float64) for name, each in self.vectors.items()}

    def add_vector(self, weight: Weight, values: npt.NDArray[np.float32]) -> None:
        self.vectors[weight.name] = _copy(values.reshape(weight.rows, weight.cols))

    def add_scratch(self, sizes: Mapping[str, int]) -> None:
        for name, nbytes in sizes.items():
            known = self.scratches.get(name)
            if known is None or len(known) < nbytes + GUARD:
                self.scratches[name] = guarded(nbytes)

    def context(self, rows: int) -> Context:
        return Context(self.facts, self.limits, self.kv, self.states, self.views, rows)

    def prepare(self, *ops: DeltaNet | JoinHidden) -> None:
        """Scratch of recurrent ops, and what is kept of held lanes."""
        for op in ops:
            self.add_scratch(recurrent.scratch(op, self.context(self.limits.rows)))
            if self.held_rows and any(recurrent.kept(op)):
                first, second = (guarded(4 * self.held_rows * floats) for floats in recurrent.kept(op))
                self.keeps[op.layer] = first, second

    def give(self, buffer: Buffer, values: npt.NDArray[np.float32]) -> None:
        """The rows that an op reads."""
        self.rows_of(buffer)[: len(values)] = values

    def take(self, batch: Batch) -> BatchShape:
        """The arrays of a batch."""
        lanes = batch.tables.shape[1]
        runs = delta.lane_runs(batch, lanes)
        arrays = {"runs": runs.runs, "chunks": runs.chunks, "lanes": batch.lanes, "chain": batch.chain}
        self.batches |= {name: _copy(each) for name, each in arrays.items()}
        return BatchShape(len(batch.tokens), len(batch.logit_rows), lanes, chunks=len(runs.chunks), single=runs.rows)

    # ---------------------------------------------------------------------------------------------------- after a run

    def rows_of(self, buffer: Buffer) -> Array:
        """[limits.rows, width]"""
        whole = self._buffer(buffer)
        return whole[:-GUARD].view(np.float32).reshape(self.limits.rows, -1)[:, : buffer.width]

    def check(self) -> None:
        """Nothing was written past the end of anything, nor into padding."""
        arrays = [*self.scratches.values(), *(each for pair in self.keeps.values() for each in pair), self.slots_memory]
        for array in (*arrays, *(array for _, array in self.buffers.values())):
            assert (array[-GUARD:] == 0xFF).all(), "written past the end"
        for buffer, array in self.buffers.values():
            rows = array[:-GUARD].view(np.float32).reshape(self.limits.rows, -1)
            assert not rows[:, buffer.width :].any(), "padding of a row was written"

    # --------------------------------------------------------------------------------------------------------- Places

    def rows(self, buffer: Buffer) -> Rows:
        return Rows(address(self._buffer(buffer)), layout.padded(buffer.width))

    def matrix(self, weight: Weight) -> Stored:
        found = self.matrices[weight.name]
        return Stored(found.quant, address(found.planes), found.rows, found.cols)

    def vector(self, weight: Weight | None) -> int:
        return 0 if weight is None else address(self.vectors[weight.name])

    def scratch(self, name: str) -> int:
        return address(self.scratches[name])

    def batch(self, name: str) -> int:
        return address(self.batches[name])

    def state(self, layer: int) -> tuple[int, int, int]:
        return layout.layer_addresses(self.states, address(self.slots_memory), layer)

    def kept(self, layer: int) -> tuple[int, int]:
        if layer not in self.keeps:
            return 0, 0
        first, second = self.keeps[layer]
        return address(first), address(second)

    def turns(self, rope: Rope) -> int:
        raise NotImplementedError("no op of these tests turns")

    def slots(self, layer: int) -> int:
        raise NotImplementedError("no op of these tests has KV rows")

    tables = slots

    def kv_pool(self, layer: int) -> tuple[int, int, int]:
        raise NotImplementedError("no op of these tests has KV rows")

    def _buffer(self, buffer: Buffer) -> Array:
        if buffer.name not in self.buffers:
            whole = guarded(4 * self.limits.rows * layout.padded(buffer.width))
            whole[:-GUARD].view(np.float32).reshape(self.limits.rows, -1)[:, buffer.width :] = 0
            self.buffers[buffer.name] = buffer, whole
        assert self.buffers[buffer.name][0] == buffer
        return self.buffers[buffer.name][1]


def _copy(array: Array) -> Array:
    found = nothing(array.shape, array.dtype)
    found[...] = array
    return found
