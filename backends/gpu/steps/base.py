"""What steps are told: sizes before memory is had, addresses after, and the shape of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from backends.base import Buffer, KvPool, Limits, Rope, StatePool, TensorView, Weight
from backends.gpu.device import CardFacts
from backends.gpu.forms import Forms
from backends.gpu.ops.buffers import Planes, Rows
from backends.gpu.ops.quants import quantised_bytes
from backends.quant import QuantType

ROW_FLOATS = 16
"""A row's stride is a multiple."""
QUANTISED = ("quantised hi", "quantised lo", "quantised scale", "quantised sum")
"""Scratch of the planes that one op writes and the next one reads, in the order of `ops.buffers.Planes`."""


@dataclass(frozen=True)
class Context:
    """Of a program, before it has any memory. `rows`: the most rows of the op at hand; `weights` by name; `ranks` of
    the fleet."""

    facts: CardFacts
    limits: Limits
    kv: KvPool
    states: StatePool
    weights: Mapping[str, TensorView]
    rows: int
    ranks: int = 1


@dataclass(frozen=True)
class Stored:
    """A matrix or a stack of them in the arena: planes of `quant` (backends.gpu.planes) at `at`."""

    quant: QuantType
    at: int
    rows: int
    cols: int


@dataclass(frozen=True)
class BatchShape:
    """What of a batch its launches depend on; equal shapes have equal launches.

    rows          rows of the op at hand: behind SelectRows an op is told those whose logits are wanted
    logit_rows    rows whose logits are wanted (of a step of drafting all of them)
    lanes         rows of the tables
    few, many     (tiles, rows of the longest) for the forms of attention: lanes with few rows, a tile each, and
                  tiles of lanes with many
    runs          (chunks, rows of the longest lane that goes row by row): of lanes with states (ops.delta.LaneRuns)
    """

    rows: int
    logit_rows: int
    lanes: int
    few: tuple[int, int] = (0, 0)
    many: tuple[int, int] = (0, 0)
    chunks: int = 0
    single: int = 0

    @property
    def empty(self) -> bool:
        return self.rows == 0


class Places(Protocol):
    """Where everything of a bound program lies. Addresses never change."""

    facts: CardFacts
    limits: Limits
    kv: KvPool
    states: StatePool
    ranks: int
    forms: Forms
    library: int
    """Of the slab of backends.gpu.library_gemm; 0: no form takes it."""

    def rows(self, buffer: Buffer) -> Rows: ...

    def matrix(self, weight: Weight) -> Stored: ...

    def vector(self, weight: Weight | None) -> int:
        """Of float32, row after row without padding: of what is no operand of a product (DeltaNet's `conv` too); 0
        without one."""
        ...

    def scratch(self, name: str) -> int:
        """Of what `scratch` asked for under this name; ops share it, each as long as it runs."""
        ...

    def batch(self, name: str) -> int:
        """int32 arrays that each run fills in: tokens, positions, lanes, logit_rows, chain, few, many (tiles),
        runs, chunks (`LaneRuns`); `accepts` of `delta.accepts_of`, that each accept does."""
        ...

    def turns(self, rope: Rope) -> int:
        """Of `ops.attention.rope_turns`."""
        ...

    def slots(self, layer: int) -> int:
        """Of the layer's KV group: int32 [rows]."""
        ...

    def tables(self, layer: int) -> int:
        """Of the layer's KV group: int32 [lanes, limits.lane_pages]."""
        ...

    def kv_pool(self, layer: int) -> tuple[int, int, int]:
        """(K, V, pages of the layer, that of padding among them)."""
        ...

    def state(self, layer: int) -> tuple[int, int, int]:
        """Of slot 0: (rows of the window, matrices, bytes from one slot to the next)."""
        ...

    def kept(self, layer: int) -> tuple[int, int]:
        """Where rows of held lanes are kept: (results of the convolution, or columns of JoinHidden; rows of `mixed`), a
        row as long as `steps.recurrent.kept` says; 0 where nothing is ever held."""
        ...


def stride_of(width: int) -> int:
    """Floats from one row of a buffer to the next."""
    return -(-width // ROW_FLOATS) * ROW_FLOATS


def quantised_scratch(rows: int, width: int) -> dict[str, int]:
    """Bytes of the planes for so many rows."""
    return dict(zip(QUANTISED, quantised_bytes(rows, width), strict=True))


def quantised(places: Places) -> Planes:
    """Where they are."""
    return Planes(*(places.scratch(name) for name in QUANTISED))
