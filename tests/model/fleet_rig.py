"""A fleet of ranks in one process, driven batch by batch as their workers would be: in either layout, on any vectors.

Every rank binds its own share on a backend of its own and exchanges over a paper wire, so a list in which two ranks
miss each other ends at once; or over shared memory, as between processes. KV pages lie where the owner rule of the
token vector says; rows of others go into the padding page. `unified`: ranks hold weights, KV rows and states together,
each once, and a page's place is the page. A fleet may be made `over` another one in another layout: the same devices,
exchanges, weights and pools, as when a layout changes and nothing moves. A fleet that `drafts` has the model's drafting
block, holds states and accepts rows.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from ranks import Group, on_paper

from backends.base import (
    PAGE_LEN,
    Backend,
    Batch,
    Limits,
    Op,
    OpenOptions,
    PoolParts,
    Pools,
    Program,
    Shared,
    SharedPools,
    StatePool,
    TensorView,
)
from backends.quant import QuantType
from backends.reference.backend import ReferenceBackend
from homeserve.layouts.cut import cut_of_ranges, legal_ends
from homeserve.layouts.owner import OwnerRule, group_rows
from homeserve.layouts.share import Share
from homeserve.models.bind import Bound, bind
from homeserve.models.config import ModelConfig, settle
from homeserve.models.family import Family
from homeserve.models.stages import Attention

LANES, LANE_PAGES, ROWS = 4, 8, 64
HELD_ROWS = 5
"""Of a lane, at most."""
Piece = tuple[int, int, Sequence[int]]
"""Lane, first position, tokens."""
Drafted = tuple[int, int, int, int]
"""Lane, position, token, and the row of the step before that it goes on from (-1: none)."""


def kv_sources(family: Family, config: ModelConfig) -> dict[int, int]:
    """Layers that read the K and V of another one."""
    stages = ((layer, stage) for layer in range(config.layers) for stage in family.stage_facts(config, layer))
    return {at: s.kv_source for at, s in stages if isinstance(s, Attention) and s.kv_source is not None}


def shares_of(
    layout: str, ratio: Sequence[int], family: Family, config: ModelConfig, tensors: Mapping[str, TensorView]
) -> list[Share | None]:
    """One for each number of `ratio`: layers in proportion to it, or parts of every layer."""
    if len(ratio) == 1:
        return [None]
    if layout == "tensor":
        return [Share.tensor(rank, ratio) for rank in range(len(ratio))]
    known = settle(config, tensors.keys())
    ranges = cut_near(ratio, known.layers, kv_sources(family, known))
    return [Share.pipeline(rank, ranges) for rank in range(len(ratio))]


def cut_near(ratio: Sequence[int], layers: int, sources: Mapping[int, int]) -> list[tuple[int, int]]:
    """Layers of each rank about in proportion, cut where a cut may fall. Raises SettingError where there are too few
    such places."""
    legal, ends = list(legal_ends(layers, sources)), []
    for rank in range(1, len(ratio)):
        wanted = layers * sum(ratio[:rank]) / sum(ratio)
        left = legal[len(ends) :][: len(legal) - len(ends) - (len(ratio) - 1 - rank)]
        ends.append(min((end for end in left if end > max(ends, default=0)), key=lambda end: abs(end - wanted)))
    edges = [0, *ends, layers]
    cut = cut_of_ranges(list(pairwise(edges)), layers, sources)
    return [(run.first, run.end) for run in cut.ranges]


@dataclass
class Fleet:
    """`ratio` is the pipeline ratio or the weight vector. `change` may replace a rank's ops before they run. `backend`
    opens a rank's device, `group` is how they exchange (None: on paper). `later`: layout and ratio of a fleet that will
    be made over this one, which must be able to view the weights, too."""

    family: Family
    config: ModelConfig
    tensors: Mapping[str, TensorView]
    layout: str = "pipeline"
    ratio: Sequence[int] = (1,)
    token_vector: Sequence[int] = ()
    change: Callable[[int, tuple[Op, ...]], Sequence[Op]] = lambda rank, ops: ops
    backend: Callable[[], Backend] = lambda: ReferenceBackend(OpenOptions())
    group: Group | None = None
    unified: bool = False
    later: tuple[str, Sequence[int]] | None = None
    over: Fleet | None = None
    drafts: bool = False
    bounds: list[Bound] = field(default_factory=list)
    seq: int = 0

    def __post_init__(self) -> None:
        self.bounds, before = self._bounds(self.layout, self.ratio), self.over
        ranks = range(len(self.bounds))
        self.acts = before.acts if before else self.group or on_paper(len(ranks))
        self.devices = before.devices if before else [self.backend() for _ in ranks]
        vector = self.token_vector if self.layout == "tensor" and len(ranks) > 1 else (1,)
        self.rule = OwnerRule.of(vector)
        groups = 1 + len(self.bounds[0].windows)
        pages = LANES * LANE_PAGES
        self.rows = group_rows([pages * PAGE_LEN] * groups, self.rule)
        self.whole = bind(self.family, self.config, self.tensors, drafts=self.drafts)
        self.viewers = before.viewers if before else self.bounds + self._bounds(*(self.later or (self.layout, ())))
        names = ("weights", "kv", "state") if self.unified else ()
        self.memory = before.memory if before else [os.memfd_create(name) for name in names]
        self.pools: list[Pools] = before.pools if before else [self._pools(rank) for rank in ranks if self.unified]
        self.programs = self.acts.together(self._program) if self.unified else [self._program(rank) for rank in ranks]
        self.states = np.arange(LANES, dtype=np.int32)[::-1].copy()
        rng = np.random.default_rng(11)
        self.tables = np.stack([rng.permutation(pages).reshape(LANES, LANE_PAGES) for _ in range(groups)])

    def _bounds(self, layout: str, ratio: Sequence[int]) -> list[Bound]:
        if not ratio:
            return []
        shares = shares_of(layout, ratio, self.family, self.config, self.tensors)
        return [bind(self.family, self.config, self.tensors, share, drafts=self.drafts) for share in shares]

    def _pools(self, rank: int) -> Pools:
        own = [rows + PAGE_LEN for rows in self._rows(rank)]
        kv = self.whole.kv_pool(own[0], QuantType.F32, own[1:])
        shared = SharedPools(rank, len(self.bounds), *self.memory[1:])
        return self.devices[rank].pools(kv, _states(self.whole), lambda *_: None, shared)

    def _program(self, rank: int) -> Program:
        bound = self.bounds[rank]
        own = [rows + PAGE_LEN for rows in self._rows(rank)]
        return self.devices[rank].bind(
            tuple(self.change(rank, bound.ops)),
            bound.weights,
            bound.kv_pool(own[0], QuantType.F32, own[1:]),
            limits(self.drafts),
            lambda *_: None,
            _states(bound),
            self.acts.acts[rank] if len(self.bounds) > 1 else None,
            **(self._together(rank) if self.unified else {}),
        )

    def _together(self, rank: int) -> dict[str, Any]:
        """What ranks of one memory are given besides."""
        bound, fleet = self.bounds[rank], [(each.ops, each.weights) for each in self.viewers]
        whole = self.whole.ops, self.whole.weights
        shared = Shared(rank, len(self.bounds), *whole, self.memory[0], fleet, packed=self.over is not None)
        return {"shared": shared, "parts": PoolParts(self.pools[rank], bound.kv_places, bound.state_parts)}

    def _rows(self, rank: int) -> list[int]:
        """Of each KV group: rows of the rank's pool, without the padding."""
        if self.unified:
            return [group.slots for group in self.rows]
        return [group.tensor_padding[self._place(rank)] for group in self.rows]

    def close(self) -> None:
        """Of what another fleet has made the programs alone."""
        for program in self.programs:
            program.close()
        if self.over is not None:
            return
        for held in (*self.pools, *self.devices):
            held.close()
        for fd in self.memory:
            os.close(fd)

    def _place(self, rank: int) -> int:
        return rank if self.rule.ranks > 1 else 0

    def run(self, pieces: Sequence[Piece], wanted: Sequence[int] | None = None, hold: Sequence[int] = ()) -> np.ndarray:
        """Logits of rows `wanted` (all by default) of one batch, as the last rank has them. The states of the lanes
        `hold` are held."""
        lanes = np.concatenate([np.full(len(tokens), lane, np.int32) for lane, _, tokens in pieces])
        positions = np.concatenate([np.arange(at, at + len(tokens), dtype=np.int32) for _, at, tokens in pieces])
        tokens = np.fromiter(itertools.chain.from_iterable(piece[2] for piece in pieces), np.int32)
        whole = self._batch(tokens, positions, lanes, np.arange(len(tokens)) if wanted is None else wanted)
        if hold:
            whole.hold = np.array([lane * HELD_ROWS if lane in hold else -1 for lane in range(LANES)], np.int32)
        batches = [self._local(whole, rank) for rank in range(len(self.bounds))]
        return self.acts.run(self.programs, batches)[-1]

    def draft(self, rows: Sequence[Drafted]) -> np.ndarray:
        """Logits of one step of drafting, as the last rank has them."""
        lanes, positions, tokens, chain = (np.array(column, np.int32) for column in zip(*rows, strict=True))
        whole = replace(self._batch(tokens, positions, lanes, np.arange(len(rows))), chain=chain)
        batches = [self._local(whole, rank) for rank in range(len(self.bounds))]
        gave = self.acts.together(lambda rank: self.programs[rank].draft(batches[rank]).copy())
        return np.asarray(gave[-1])

    def accept(self, kept: Sequence[tuple[int, int]]) -> None:
        for program in self.programs:
            program.accept(kept)

    def _batch(
        self, tokens: np.ndarray, positions: np.ndarray, lanes: np.ndarray, wanted: Sequence[int] | np.ndarray
    ) -> Batch:
        """Of all ranks, without slots and tables."""
        self.seq += 1
        empty = np.zeros((0, 0), np.int32)
        rows = np.asarray(wanted).astype(np.int32)
        return Batch(tokens, positions, empty, lanes, empty, rows, self.states, 1, self.seq)

    def _local(self, batch: Batch, rank: int) -> Batch:
        """The batch as `rank` sees it: its own pages, and the padding page for rows of others."""
        slots = np.empty((len(self.tables), len(batch.tokens)), np.int32)
        tables = np.full(self.tables.shape, -1, np.int32)
        for group, known in enumerate(self.tables):
            places = [[self.rule.place(int(page) * PAGE_LEN) for page in lane] for lane in known]
            for lane, row_places in enumerate(places):
                for at, (owner, row) in enumerate(row_places):
                    if owner == self._place(rank):
                        tables[group, lane, at] = known[lane, at] if self.unified else row // PAGE_LEN
            padding = self._rows(rank)[group]
            pages = tables[group][batch.lanes, batch.positions // PAGE_LEN]
            slots[group] = np.where(pages < 0, padding, pages * PAGE_LEN) + batch.positions % PAGE_LEN
        return replace(batch, slots=slots, tables=tables)

    def logits(self, ids: Sequence[int], chunk: int = ROWS, lane: int = 0) -> np.ndarray:
        """Logits after every token, `[len(ids), vocab]`, the prompt cut into chunks of at most `chunk`."""
        starts = range(0, len(ids), chunk)
        return np.concatenate([self.run([(lane, at, ids[at : at + chunk])]) for at in starts])

    def owners(self, lane: int, tokens: int) -> set[int]:
        """Ranks that keep rows of a request of so many tokens, in the group that keeps all."""
        pages = self.tables[0][lane][: -(-tokens // PAGE_LEN)]
        return {self.rule.place(int(page) * PAGE_LEN)[0] for page in pages}


def limits(drafts: bool) -> Limits:
    held = LANES * HELD_ROWS if drafts else 0
    return Limits(rows=ROWS, logit_rows=ROWS, lanes=LANES, lane_pages=LANE_PAGES, held_rows=held)


def _states(bound: Bound) -> StatePool:
    return StatePool(bound.state_layers, LANES if bound.state_layers else 0)
