"""What steps are told: sizes before memory is had, addresses after, and the shape of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from backends.base import Buffer, KvPool, Limits, StatePool, TensorView, Weight
from backends.gpu.device import CardFacts
from backends.gpu.ops.buffers import Rows
from backends.quant import QuantType


@dataclass(frozen=True)
class Context:
    """Of a program, before it has any memory. `rows`: the most rows of the op at hand; `weights` by name."""

    facts: CardFacts
    limits: Limits
    kv: KvPool
    states: StatePool
    weights: Mapping[str, TensorView]
    rows: int


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

    rows          rows of ops before SelectRows, `logit_rows` behind it (of a step of drafting both are its rows)
    lanes         rows of the tables
    few, many     runs of rows for the two forms of attention: tiles of at most `few_rows` rows of one lane each, and of
                  at most `many_rows`; the longest run decides the launch
    runs          (chunks, rows of the longest lane that goes row by row): of lanes with states (ops.delta.LaneRuns)
    held          whether any lane's states are held
    """

    rows: int
    logit_rows: int
    lanes: int
    few: tuple[int, int] = (0, 0)
    many: tuple[int, int] = (0, 0)
    chunks: int = 0
    single: int = 0
    held: bool = False

    @property
    def empty(self) -> bool:
        return self.rows == 0


class Places(Protocol):
    """Where everything of a bound program lies. Addresses never change."""

    facts: CardFacts
    limits: Limits
    kv: KvPool
    states: StatePool

    def rows(self, buffer: Buffer) -> Rows: ...

    def matrix(self, weight: Weight) -> Stored: ...

    def vector(self, weight: Weight | None) -> int:
        """Of float32; 0 without one."""
        ...

    def scratch(self, name: str) -> int:
        """Of what `scratch` asked for under this name; ops share it, each as long as it runs."""
        ...

    def batch(self, name: str) -> int:
        """int32 arrays that each run fills in: tokens, positions, lanes, logit_rows, chain, few, many (tiles),
        runs, chunks (`LaneRuns`)."""
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
        """Where rows of held lanes are kept: (results of the convolution, or columns of JoinHidden; rows of `mixed`); 0
        where nothing is ever held."""
        ...
