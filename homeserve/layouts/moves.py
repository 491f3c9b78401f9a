"""What each rank hands to each at a flip, and where in the transit memory: payloads.

`transition` says row by row what moves; here the same is said in arrays, one payload for each pair of ranks, so that
a long context is planned in milliseconds. The rules are those of `transition` and `owner`, and tests hold both to each
other. Every rank makes the same plan from the model's geometry and what is live: no plan travels.

    toward the tensor layout                                  back: source and target exchanged
      stage s ──▶ rank r    layers of s, live pages that r owns; states of its linear layers, channels and heads of r

    transit   │ 0→0 │ 0→1 │ 0→2 │ 1→0 │ …          pairs ascending, each payload from a cache line on
    payload   │ KV: groups, layers, pages, all ascending; of a page K, then V │ states: slots, layers ascending; each
              │ the channels of its window, then its heads                    │

What a rank gives to itself is a payload too: it moves between two pools of one memory, and all is read before anything
is written. Both ends of a payload have its rows in the same order, the source where they lie now, the target where they
will lie. In unified memory row = slot in both layouts and a rank's heads are a range of the one state: the payloads are
the same ones, of 0 bytes.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from homeserve.layouts.owner import OwnerRule
from homeserve.layouts.partition import Run
from homeserve.layouts.share import PIPELINE, TENSOR
from homeserve.layouts.transition import StateForm, Toward

Ints = npt.NDArray[np.int32]
Runs = tuple[Run, ...]

ALIGN = 64
"""Of a payload in the transit memory."""


@dataclass(frozen=True)
class KvHome:
    """One attention layer with K and V of its own: the pipeline rank that has it, its KV group, and what a page of it
    takes (K and V of all heads) in either layout."""

    stage: int
    group: int
    page_bytes: int


@dataclass(frozen=True)
class StateHome:
    """One recurrent layer, or what a drafting block keeps of the last row: the pipeline rank that has it, and who has
    which part of its state in the tensor layout."""

    stage: int
    form: StateForm


@dataclass(frozen=True)
class FlipGeometry:
    """A model on its ranks, in both layouts. Layers are named by their ordinal: `kv[i]` is the i-th attention layer of
    the model with K and V of its own, `states[i]` the i-th recurrent one. `rule` counts in pages; `group_pages` are the
    pages of each KV group."""

    rule: OwnerRule
    kv: tuple[KvHome, ...]
    states: tuple[StateHome, ...]
    group_pages: tuple[int, ...]
    state_slots: int = 0
    unified: bool = False

    @property
    def ranks(self) -> int:
        return self.rule.ranks

    def kv_layers(self, layout: str, rank: int) -> tuple[int, ...]:
        """Ordinals of the attention layers in the pools of `rank`, ascending: as they lie there, if it has pools of its
        own."""
        return tuple(at for at, home in enumerate(self.kv) if layout == TENSOR or home.stage == rank)

    def state_layers(self, layout: str, rank: int) -> tuple[int, ...]:
        """Likewise of the recurrent layers. In the tensor layout a rank without channels of a layer has nothing of it;
        a layer may have channels alone."""
        if layout == PIPELINE:
            return tuple(at for at, home in enumerate(self.states) if home.stage == rank)
        return tuple(at for at, home in enumerate(self.states) if _size(home.form.channels[rank]))


@dataclass(frozen=True)
class Live:
    """What is live: pages of each KV group, and state slots. All ascending, none twice."""

    pages: tuple[Ints, ...]
    states: Ints


def live_of(geometry: FlipGeometry, pages: Sequence[bytes], states: bytes) -> Live:
    """From bit maps (bit i of byte i // 8, lowest first). Raises ValueError for a page or a slot that there is not."""
    if len(pages) != len(geometry.group_pages):
        raise ValueError(f"{len(pages)} maps of pages for {len(geometry.group_pages)} KV groups")
    found = tuple(_numbers(bits) for bits in pages)
    for group, (own, there) in enumerate(zip(found, geometry.group_pages, strict=True)):
        if len(own) and own[-1] >= there:
            raise ValueError(f"page {own[-1]} of KV group {group} is live, there are {there}")
    slots = _numbers(states)
    if len(slots) and slots[-1] >= geometry.state_slots:
        raise ValueError(f"state slot {slots[-1]} is live, there are {geometry.state_slots}")
    return Live(found, slots)


@dataclass(frozen=True)
class KvRows:
    """Pages of some layers of one group: `own` are their places in the pools of the pipeline rank, `dealt` in those of
    the tensor rank."""

    layers: tuple[int, ...]
    own: Ints
    dealt: Ints


@dataclass(frozen=True)
class StateRows:
    """A part of one layer's state: runs of channels and of heads as they lie at full width, and (`dealt`) one behind
    the other on the tensor rank."""

    layer: int
    channels: Runs
    heads: Runs
    dealt_channels: Runs
    dealt_heads: Runs


@dataclass(frozen=True)
class Payload:
    """What `source` hands to `target`: `nbytes` at `offset` of the transit memory, the first `kv_bytes` of them KV."""

    source: int
    target: int
    offset: int
    nbytes: int
    kv_bytes: int
    kv: tuple[KvRows, ...]
    slots: Ints
    states: tuple[StateRows, ...]

    @property
    def local(self) -> bool:
        return self.source == self.target

    @property
    def rows(self) -> int:
        """Pages, counted once for each of their layers."""
        return sum(len(each.layers) * len(each.own) for each in self.kv)

    @property
    def state_count(self) -> int:
        return len(self.slots) * len(self.states)


@dataclass(frozen=True)
class Moves:
    """All payloads of a flip, in their order. `nbytes`: what of the transit memory they take."""

    toward: Toward
    payloads: tuple[Payload, ...]
    nbytes: int

    def of_source(self, rank: int) -> tuple[Payload, ...]:
        return tuple(each for each in self.payloads if each.source == rank)

    def of_target(self, rank: int) -> tuple[Payload, ...]:
        return tuple(each for each in self.payloads if each.target == rank)

    def sent(self, rank: int) -> int:
        return sum(each.nbytes for each in self.of_source(rank) if not each.local)

    def received(self, rank: int) -> int:
        return sum(each.nbytes for each in self.of_target(rank) if not each.local)

    def local(self, rank: int) -> int:
        return sum(each.nbytes for each in self.of_source(rank) if each.local)


def moves(geometry: FlipGeometry, live: Live, toward: Toward) -> Moves:
    """The payloads of every pair that hands over anything."""
    shards = [_shard(geometry, live, rank) for rank in range(geometry.ranks)]
    stages = [_Stage(geometry, stage) for stage in range(geometry.ranks)]
    there = toward is Toward.TENSOR
    found: list[Payload] = []
    at = 0
    for source in range(geometry.ranks):
        for target in range(geometry.ranks):
            stage, rank = (source, target) if there else (target, source)
            payload = stages[stage].payload(source, target, at, shards[rank], live.states)
            if payload is not None:
                found.append(payload)
                at = -(-(at + payload.nbytes) // ALIGN) * ALIGN
    end = found[-1].offset + found[-1].nbytes if found else 0
    return Moves(toward, tuple(found), end)


@dataclass(frozen=True)
class _Shard:
    """What tensor rank `rank` has of what is live: (pages, their places here) of each KV group."""

    rank: int
    pages: tuple[tuple[Ints, Ints], ...]


def _shard(geometry: FlipGeometry, live: Live, rank: int) -> _Shard:
    return _Shard(rank, tuple(_owned(geometry, pages, rank) for pages in live.pages))


def _owned(geometry: FlipGeometry, pages: Ints, rank: int) -> tuple[Ints, Ints]:
    """Those of `pages` that `rank` keeps, and their places (`budget.vectors`, in pages)."""
    vector = geometry.rule.vector
    before, share = sum(vector[:rank]), vector[rank]
    turn, position = np.divmod(pages, np.int32(sum(vector)))
    here = (before <= position) & (position < before + share)
    own = pages[here]
    places = own if geometry.unified else (turn[here] * share + position[here] - before).astype(np.int32)
    return own, places


class _Stage:
    """What pipeline rank `stage` has: its attention layers by group, and its recurrent ones."""

    def __init__(self, geometry: FlipGeometry, stage: int) -> None:
        self._geometry = geometry
        own = geometry.kv_layers(PIPELINE, stage)
        groups = range(len(geometry.group_pages))
        self._kv = [tuple(at for at in own if geometry.kv[at].group == group) for group in groups]
        self._page_bytes = [sum(geometry.kv[at].page_bytes for at in layers) for layers in self._kv]
        self._states = geometry.state_layers(PIPELINE, stage)

    def payload(self, source: int, target: int, at: int, shard: _Shard, slots: Ints) -> Payload | None:
        kv = []
        kv_bytes = state_bytes = 0
        for layers, each, (own, places) in zip(self._kv, self._page_bytes, shard.pages, strict=True):
            if layers and len(own):
                kv.append(KvRows(layers, own, places))
                kv_bytes += each * len(own)
        states = self._parts(shard.rank) if len(slots) else ()
        if not kv and not states:
            return None
        for part in states:
            form = self._geometry.states[part.layer].form
            state_bytes += _size(part.channels) * form.channel_bytes + _size(part.heads) * form.head_bytes
        if self._geometry.unified:
            kv_bytes = state_bytes = 0
        nbytes = kv_bytes + state_bytes * len(slots)
        return Payload(source, target, at, nbytes, kv_bytes, tuple(kv), slots if states else slots[:0], states)

    def _parts(self, rank: int) -> tuple[StateRows, ...]:
        found = []
        for at in self._states:
            form = self._geometry.states[at].form
            channels, heads = _filled(form.channels[rank]), _filled(form.heads[rank])
            if channels or heads:
                packed = (channels, heads) if self._geometry.unified else (_packed(channels), _packed(heads))
                found.append(StateRows(at, channels, heads, *packed))
        return tuple(found)


def _numbers(bits: bytes) -> Ints:
    """Which bits are set."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")).astype(np.int32)


def _size(runs: Iterable[Run]) -> int:
    return sum(run.size for run in runs)


def _filled(runs: Iterable[Run]) -> Runs:
    return tuple(run for run in runs if run.size)


def _packed(runs: Runs) -> Runs:
    """Where they lie when they lie one behind the other."""
    ends = np.cumsum([run.size for run in runs], dtype=np.int64).tolist()
    return tuple(Run(end - run.size, end) for run, end in zip(runs, ends, strict=True))
