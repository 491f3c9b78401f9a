"""A model bound on an emulated card and on the oracle, and driven batch by batch, the same batches for both.

Sequences have a lane each; their pages are shuffled, so that a mistake in addressing shows. The recurrent states of
lanes lie in slots of their own, in another order; `SPARE` more slots keep copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from emulated_device import EmulatedDevice

from backends.base import PAGE_LEN, Backend, Batch, Limits, OpenOptions, Program, StatePool, TensorView
from backends.gpu.backend import GpuBackend
from backends.quant import QuantType
from backends.reference.backend import ReferenceBackend
from homeserve import checkpoint
from homeserve.models import registry
from homeserve.models.bind import Bound, bind

TINY = Path(__file__).parent.parent / "data" / "tiny"
LANES, LANE_PAGES, ROWS, SPARE, HELD_ROWS = 4, 6, 80, 2, 8
Piece = tuple[int, int, Sequence[int]]
"""Lane, first position, tokens."""
Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass
class Sides:
    """One model on both. `device` is the card."""

    path: Path
    arch: str = "sm_86"
    kv_type: str = "F32"
    drafts: bool = False
    rows: int = ROWS
    lanes: int = LANES
    lane_pages: int = LANE_PAGES
    quant: str = ""
    """Matrices are packed as this type, where it takes rows of their length."""
    device: EmulatedDevice = field(init=False)

    def __post_init__(self) -> None:
        self.checkpoint = checkpoint.open(str(self.path), registry.folder_families)
        family = registry.family(self.checkpoint.arch)
        self.bound: Bound = bind(
            family, family.config_from(self.checkpoint.metadata), self.checkpoint.tensors, drafts=self.drafts
        )
        self.weights = {name: self._packed(name, view) for name, view in self.bound.weights.items()}
        self.device = EmulatedDevice(self.arch)
        self.card = GpuBackend(self.device)
        self.limits = Limits(self.rows, self.rows, self.lanes, self.lane_pages, HELD_ROWS if self.drafts else 0)
        self.program = self.bind(self.card)
        self.oracle = self.bind(ReferenceBackend(OpenOptions()))
        self.states = np.arange(self.lanes, dtype=np.int32)[::-1].copy()
        pages, rng = self.lanes * self.lane_pages, np.random.default_rng(7)
        order = np.stack([rng.permutation(pages) for _ in range(1 + len(self.bound.windows))])
        self.tables = order.astype(np.int32).reshape(-1, self.lanes, self.lane_pages)

    def bind(self, backend: Backend) -> Program:
        states = self.bound.state_layers
        return backend.bind(
            self.bound.ops,
            self.weights,
            self.bound.kv_pool(self.lanes * self.lane_pages * PAGE_LEN, QuantType[self.kv_type]),
            self.limits,
            lambda *_: None,
            StatePool(states, self.lanes + SPARE if states else 0),
        )

    def _packed(self, name: str, view: TensorView) -> TensorView:
        quant = QuantType[self.quant or "F32"]
        if not self.quant or view.rows == 1 or view.cols % quant.block_len or name.endswith("conv1d.weight"):
            return view
        floats = view.data.view(np.float32).reshape(view.rows, view.cols)
        data = gguf.quants.quantize(floats, gguf.GGMLQuantizationType[self.quant])
        return TensorView(name, quant, view.rows, view.cols, np.ascontiguousarray(data).reshape(-1).view(np.uint8))

    def batch(self, pieces: Sequence[Piece], wanted: Sequence[int] | None = None, **more: Any) -> Batch:
        """Of the rows of `pieces`; logits of rows `wanted`, all by default."""
        lanes = np.concatenate([np.full(len(tokens), lane, np.int32) for lane, _, tokens in pieces])
        positions = np.concatenate([np.arange(at, at + len(tokens), dtype=np.int32) for _, at, tokens in pieces])
        tokens = np.fromiter(itertools.chain.from_iterable(piece[2] for piece in pieces), np.int32)
        slots = self.tables[:, lanes, positions // PAGE_LEN] * PAGE_LEN + positions % PAGE_LEN
        rows = np.arange(len(tokens)) if wanted is None else np.asarray(wanted)
        tables = self.tables.copy()
        for group, window in enumerate(self.bound.windows, 1):
            for lane, first, _ in pieces:  # pages before the window are nobody's
                tables[group, lane, : max(0, first - window + 1) // PAGE_LEN] = -1
        given = (tokens, positions, slots.astype(np.int32), lanes, tables, rows.astype(np.int32), self.states)
        return Batch(*given, **more)

    def run(self, pieces: Sequence[Piece], wanted: Sequence[int] | None = None) -> tuple[Floats, Floats]:
        """Logits of the card and of the oracle."""
        batch = self.batch(pieces, wanted)
        return self.program.run(batch).copy(), self.oracle.run(batch).copy()

    def close(self) -> None:
        """Also holds the card to nothing being left of the program."""
        self.program.close()
        self.oracle.close()
        self.card.close()
        self.checkpoint.close()


def worst(sides: tuple[Floats, Floats]) -> float:
    """The largest difference between two sides."""
    got, wanted = sides
    assert got.shape == wanted.shape
    return float(np.abs(got - wanted).max()) if got.size else 0.0
