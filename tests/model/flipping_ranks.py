"""Ranks that are bound to both layouts and flip between them, driven by a test: engine, plan log and workers left out.

    ranks = Flipping(form, ratio, group, backend, home)
    ranks.run(pieces)      one batch in the active layout          ranks.flip(live lanes)      to the other one

What moves is planned by `homeserve.layouts.moves`, as ranks do; payloads go through one transit buffer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fleet_rig import LANES, Drafted, Fleet, Piece, _states, limits
from ranks import Group
from wide_models import wide

from backends.base import PAGE_LEN, Backend, Binding, Layouts, Program, WeightHome
from backends.quant import QuantType
from homeserve.layouts.moves import FlipGeometry, Live, moves
from homeserve.layouts.owner import OwnerRule
from homeserve.layouts.share import PIPELINE, TENSOR
from homeserve.layouts.transition import Toward
from homeserve.models.config import settle
from homeserve.models.dividing import divided
from homeserve.worker.flip import runs_of
from homeserve.worker.flipping import checked_geometry

OTHER = {PIPELINE: TENSOR, TENSOR: PIPELINE}
TOWARD = {PIPELINE: Toward.PIPELINE, TENSOR: Toward.TENSOR}


class _Seen(Fleet):
    """Where rows of a layout lie; its programs come from elsewhere."""

    def _program(self, rank: int) -> Program:
        return None  # type: ignore[return-value]


class Flipping:
    """`home` makes each rank's WeightHome of (rank, ranks, whole, weights_fd). The first layout is `first`."""

    def __init__(
        self,
        form: str,
        ratio: Sequence[int],
        group: Group,
        backend: Callable[[], Backend],
        home: Callable[..., WeightHome],
        first: str = PIPELINE,
        kv_type: QuantType = QuantType.F32,
        *,
        drafts: bool = False,
    ) -> None:
        model = wide(form, drafts=drafts)
        self.acts, self._kv_type, self._drafts = group, kv_type, drafts
        given = (model.family, model.config, model.tensors)
        vector = tuple(ratio)[::-1]
        self.fleets = {
            name: _Seen(*given, name, ratio, vector, backend=backend, group=group, drafts=drafts)
            for name in (PIPELINE, TENSOR)
        }
        for device in self.fleets[TENSOR].devices:
            device.close()
        self.devices = self.fleets[PIPELINE].devices
        self.ranks, self.order = len(ratio), (first, OTHER[first])
        self.weights_fd = os.memfd_create("weights")
        self._home = home
        self.seq = 0
        self.layouts: list[Layouts] = group.together(self._bind)
        config = settle(model.config, model.tensors.keys())
        forms = divided(model.family, config, model.tensors, tuple(ratio), drafts=drafts).states
        slots = [LANES * 8 * PAGE_LEN] * len(self.fleets[PIPELINE].tables)
        self.geometry: list[FlipGeometry] = [
            checked_geometry(
                self.fleets[PIPELINE].bounds,
                forms,
                vector,
                slots,
                LANES,
                layouts,
                rank,
                {name: self.binding(name, rank).kv for name in self.fleets},
                unified=False,
            )
            for rank, layouts in enumerate(self.layouts)
        ]
        self.rule = OwnerRule.of(vector, PAGE_LEN)

    def binding(self, name: str, rank: int) -> Binding:
        fleet = self.fleets[name]
        bound = fleet.bounds[rank]
        own = [rows + PAGE_LEN for rows in fleet._rows(rank)]
        pool = bound.kv_pool(own[0], self._kv_type, own[1:])
        every = [(each.ops, each.weights) for each in fleet.bounds]
        return Binding(name, bound.ops, bound.weights, pool, _states(bound), every)

    def _bind(self, rank: int) -> Layouts:
        whole = self.fleets[PIPELINE].whole
        bindings = [self.binding(name, rank) for name in self.order]
        home = self._home(rank, self.ranks, whole, self.weights_fd)
        return self.devices[rank].bind_layouts(
            bindings, limits(self._drafts), lambda *_: None, self.acts.acts[rank], home
        )

    @property
    def active(self) -> str:
        (name,) = {layouts.active for layouts in self.layouts}
        return name

    def run(self, pieces: Sequence[Piece], hold: Sequence[int] = ()) -> np.ndarray:
        return self._now().run(pieces, hold=hold)

    def draft(self, rows: Sequence[Drafted]) -> np.ndarray:
        return self._now().draft(rows)

    def accept(self, kept: Sequence[tuple[int, int]]) -> None:
        self._now().accept(kept)

    def _now(self) -> Fleet:
        """The fleet in the active layout."""
        fleet = self.fleets[self.active]
        fleet.programs = [layouts.program for layouts in self.layouts]
        fleet.seq = self.seq = self.seq + 1
        return fleet

    def live(self, lanes: dict[int, int]) -> Live:
        """`lanes[lane]` tokens are live of each lane."""
        fleet = self.fleets[PIPELINE]
        groups = [
            sorted({int(page) for lane, tokens in lanes.items() for page in table[lane][: -(-tokens // PAGE_LEN)]})
            for table in fleet.tables
        ]
        slots = sorted(int(fleet.states[lane]) for lane in lanes) if self.geometry[0].states else []
        return Live(tuple(np.array(pages, np.int32) for pages in groups), np.array(slots, np.int32))

    def flip(self, lanes: dict[int, int]) -> int:
        """To the other layout. Returns the bytes that moved."""
        to, source = OTHER[self.active], self.active
        plans = [moves(geometry, self.live(lanes), TOWARD[to]) for geometry in self.geometry]
        transit = memoryview(bytearray(plans[0].nbytes))
        for rank, layouts in enumerate(self.layouts):
            for payload in plans[rank].of_source(rank):
                view = transit[payload.offset : payload.offset + payload.nbytes]
                digest = layouts.pack(runs_of(self.geometry[rank], payload, source, rank), view)
                assert digest == self.layouts[payload.target].digest(view)
        for rank, layouts in enumerate(self.layouts):
            layouts.release()
            layouts.map(to)
            for payload in plans[rank].of_target(rank):
                view = transit[payload.offset : payload.offset + payload.nbytes]
                layouts.write(to, runs_of(self.geometry[rank], payload, to, rank), view)
            wait_for(layouts, to)
            layouts.refill(to)
            layouts.activate(to)
        return plans[0].nbytes

    def close(self) -> None:
        for held in (*self.layouts, *self.devices):
            held.close()
        os.close(self.weights_fd)


def wait_for(layouts: Layouts, name: str) -> None:
    """Until an image is back in memory."""
    shelf = getattr(getattr(layouts, "_source", None), "shelf", None)
    if layouts.not_ready(name) and shelf is not None:
        shelf.settled()
    assert not layouts.not_ready(name)


def copy_home(rank: int, ranks: int, whole: Any, fd: int) -> WeightHome:
    return WeightHome("copy", rank, ranks, whole.ops, whole.weights, fd)
