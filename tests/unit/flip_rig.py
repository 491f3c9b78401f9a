"""Ranks of a flip in one process: real `RankFlip`s over pools that are NumPy arrays, one transit memory, and the
engine's part played by hand.

`FakeLayouts` keeps the promises of the seam that matter here: pools that were given back cannot be read, those of two
layouts are never there at once, and the digest depends on the place of each byte.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np

from backends.base import MemoryRegion, PoolRuns, Program, Refilled
from homeserve.layouts.moves import FlipGeometry, KvHome, StateHome
from homeserve.layouts.owner import OwnerRule
from homeserve.layouts.partition import Run
from homeserve.layouts.share import PIPELINE, TENSOR
from homeserve.layouts.transition import StateForm
from homeserve.wire.faults import parse
from homeserve.wire.records import PACK, VERIFY, FlipAnswer, FlipDigest, FlipLive, FlipOrder
from homeserve.worker.faults import FaultPoint
from homeserve.worker.flip import RankFlip
from homeserve.worker.transit import Transit

OTHER = {PIPELINE: TENSOR, TENSOR: PIPELINE}
PAGES, SLOTS = 23, 4
TRANSIT_BYTES = 1 << 16


def bits(numbers: Iterable[int]) -> bytes:
    found = bytearray(8)
    for number in numbers:
        found[number // 8] |= 1 << number % 8
    return bytes(found)


def hybrid() -> FlipGeometry:
    """Three ranks, two KV groups, a recurrent layer whose tiled heads rank 0 has in two runs and rank 2 not at all."""
    heads = ((Run(0, 2), Run(3, 5)), (Run(2, 3), Run(5, 6)), ())
    channels = tuple((*(run.times(2) for run in own),) for own in heads)
    form = StateForm(channels, heads, 3, 8)
    kv = (KvHome(0, 0, 5), KvHome(0, 1, 7), KvHome(1, 0, 6), KvHome(2, 0, 4))
    return FlipGeometry(OwnerRule.of((2, 1, 1)), kv, (StateHome(0, form), StateHome(2, form)), (PAGES, 9), SLOTS)


@dataclass
class Pool:
    """Of one rank in one layout, uint8: `kv[layer]` `[pages, page bytes]`, `conv` and `heads` `[slots, things, bytes]`
    of each recurrent layer."""

    kv: list[np.ndarray]
    conv: list[np.ndarray]
    heads: list[np.ndarray]

    def pieces(self, runs: PoolRuns) -> Iterable[np.ndarray]:
        """Views in the order of a payload."""
        for layers, pages in runs.kv:
            for layer in layers:
                for page in pages.tolist():
                    yield self.kv[layer][page]
        for slot in runs.states.tolist():
            for layer, channels, heads in runs.parts:
                for first, end in channels:
                    yield self.conv[layer][slot, first:end].reshape(-1)
                for first, end in heads:
                    yield self.heads[layer][slot, first:end].reshape(-1)


class FakeLayouts:
    """`done` are the calls, in order. `short[layout]`: bytes by which it counts a payload otherwise than the others."""

    def __init__(self, geometry: FlipGeometry, rank: int, active: str = PIPELINE) -> None:
        self.geometry, self.rank, self.active = geometry, rank, active
        self.pools: dict[str, Pool] = {active: self._pool(active)}
        self.done: list[str] = []
        self.why_not = ""
        self.short: dict[str, int] = {}
        self.filled = 100
        """Bytes of its arena."""
        self.computes: Program | None = None
        self.wrong: str | None = None
        """A call that raises."""

    def _pool(self, layout: str) -> Pool:
        geometry, rank = self.geometry, self.rank
        kv, conv, heads = [], [], []
        for at in geometry.kv_layers(layout, rank):
            kv.append(np.zeros((PAGES, geometry.kv[at].page_bytes), np.uint8))
        for at in geometry.state_layers(layout, rank):
            form = geometry.states[at].form
            ranks = range(geometry.ranks) if layout == PIPELINE else [rank]
            sizes = [sum(run.size for each in ranks for run in runs[each]) for runs in (form.channels, form.heads)]
            conv.append(np.zeros((SLOTS, sizes[0], form.channel_bytes), np.uint8))
            heads.append(np.zeros((SLOTS, sizes[1], form.head_bytes), np.uint8))
        return Pool(kv, conv, heads)

    @property
    def program(self) -> Program:
        assert self.computes is not None, "nobody computes here"
        return self.computes

    def not_ready(self, name: str) -> str:
        return self.why_not

    def run_bytes(self, name: str, runs: PoolRuns) -> int:
        shaped = self.pools.get(name) or self._pool(name)
        return sum(piece.nbytes for piece in shaped.pieces(runs)) - self.short.get(name, 0)

    def pack(self, runs: PoolRuns, out: memoryview) -> int:
        self._note("pack")
        data = b"".join(piece.tobytes() for piece in self.pools[self.active].pieces(runs))
        out[:] = data
        return self.digest(memoryview(data))

    def digest(self, payload: memoryview) -> int:
        return int.from_bytes(hashlib.blake2b(payload, digest_size=8).digest(), "little")

    def release(self) -> None:
        self._note("release")
        del self.pools[self.active]

    def map(self, name: str, *, writes: bool = True) -> None:
        self._note("map")
        assert not self.pools, "both layouts hold memory"
        self.pools[name] = self._pool(name)

    def write(self, name: str, runs: PoolRuns, payload: memoryview) -> None:
        self._note("write")
        at = 0
        for piece in self.pools[name].pieces(runs):
            piece[:] = np.frombuffer(payload[at : at + piece.nbytes], np.uint8)
            at += piece.nbytes
        assert at == len(payload)

    def refill(self, name: str, *, spoilt: bool = False) -> Refilled:
        self._note("refill")
        return Refilled(self.filled, 2 if spoilt and self.filled else 1, 77)

    def activate(self, name: str) -> None:
        self._note("activate")
        self.active = name

    def memory_lines(self) -> dict[str, int]:
        return {}

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        return ()

    def close(self) -> None:
        self.pools.clear()

    def _note(self, call: str) -> None:
        if self.wrong == call:
            raise MemoryError(f"{call} failed")
        self.done.append(call)


@dataclass
class Rig:
    """All ranks, and the engine's part. `faults` by rank."""

    geometry: FlipGeometry = field(default_factory=hybrid)
    faults: dict[int, str] = field(default_factory=dict)
    transit_bytes: int = TRANSIT_BYTES
    epoch: int = 0
    flips: int = 0

    def __enter__(self) -> Rig:
        self.fd = os.memfd_create("transit")
        os.ftruncate(self.fd, self.transit_bytes)
        ranks = range(self.geometry.ranks)
        self.layouts = [FakeLayouts(self.geometry, rank) for rank in ranks]
        self.transits = [Transit(self.fd, self.transit_bytes) for _ in ranks]
        self.points = [FaultPoint(parse(self.faults.get(rank, ""))) for rank in ranks]
        self.ranks = [
            RankFlip(rank, self.geometry, self.layouts[rank], self.transits[rank], self.points[rank]) for rank in ranks
        ]
        self.rebound = [0] * len(self.ranks)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for rank in self.ranks:
            rank.close()
        os.close(self.fd)

    @property
    def layout(self) -> str:
        (layout,) = {each.active for each in self.layouts}
        return layout

    def order(self, pages: tuple[Iterable[int], ...] = ((), ()), slots: Iterable[int] = (), to: str = "") -> FlipOrder:
        """The next flip."""
        self.flips += 1
        live = FlipLive(tuple(map(bits, pages)), bits(slots))
        return FlipOrder(self.flips, self.epoch + self.flips, to or OTHER[self.layout], PACK, live)

    def pack(self, order: FlipOrder) -> list[FlipAnswer]:
        return [rank.prepare(order, self.epoch) for rank in self.ranks]

    def verify_order(self, order: FlipOrder, packed: Iterable[FlipAnswer]) -> FlipOrder:
        digests: tuple[FlipDigest, ...] = tuple(digest for answer in packed for digest in answer.digests)
        return FlipOrder(order.flip, order.epoch, order.to, VERIFY, None, digests)

    def commit(self, rank: int, order: FlipOrder) -> FlipAnswer:
        return self.ranks[rank].commit(FlipOrder(order.flip, order.epoch, order.to), lambda: self._rebind(rank))

    def flip(self, order: FlipOrder) -> list[FlipAnswer]:
        """All of it. What is raised on the way is raised here."""
        verify = self.verify_order(order, self.pack(order))
        for rank in self.ranks:
            rank.prepare(verify, self.epoch)
        answers = [self.commit(rank, order) for rank in range(len(self.ranks))]
        self.epoch = order.epoch
        return answers

    def _rebind(self, rank: int) -> None:
        self.rebound[rank] += 1

    # -------------------------------------------------------------------------------------------------------- rows

    def each(
        self, do: Callable[[np.ndarray, str], None], pages: tuple[Iterable[int], ...], slots: Iterable[int]
    ) -> None:
        """Call `do` with each live row of the layout in force and its name, which is the same in both."""
        for rank, layouts in enumerate(self.layouts):
            pool = layouts.pools[self.layout]
            for at, layer in enumerate(self.geometry.kv_layers(self.layout, rank)):
                for page in pages[self.geometry.kv[layer].group]:
                    place = self._place(page, rank)
                    if place is not None:
                        do(pool.kv[at][place], f"kv {layer} page {page}")
            for at, layer in enumerate(self.geometry.state_layers(self.layout, rank)):
                for slot in slots:
                    for kind, own, runs in self._parts(layer, rank, pool, at):
                        for packed, whole in enumerate(runs):
                            do(own[slot, packed], f"{kind} {layer} slot {slot} number {whole}")

    def _place(self, page: int, rank: int) -> int | None:
        if self.layout == PIPELINE:
            return page
        owner, row = self.geometry.rule.place(page * self.geometry.rule.grain)
        return row // self.geometry.rule.grain if owner == rank else None

    def _parts(self, layer: int, rank: int, pool: Pool, at: int) -> Iterable[tuple[str, np.ndarray, list[int]]]:
        form = self.geometry.states[layer].form
        for kind, own, runs in (("conv", pool.conv[at], form.channels), ("heads", pool.heads[at], form.heads)):
            numbers = [n for run in runs[rank] for n in range(run.first, run.end)]
            yield kind, own, list(range(own.shape[1])) if self.layout == PIPELINE else numbers

    def fill(self, pages: tuple[Iterable[int], ...], slots: Iterable[int]) -> None:
        """Each live row gets what is made of its name."""
        self.each(lambda row, name: np.copyto(row, content(name, row.size)), pages, slots)

    def wrong(self, pages: tuple[Iterable[int], ...], slots: Iterable[int]) -> list[str]:
        """Names of live rows that have not what is made of them."""
        found: list[str] = []

        def check(row: np.ndarray, name: str) -> None:
            if row.tobytes() != content(name, row.size).tobytes():
                found.append(name)

        self.each(check, pages, slots)
        return found

    def bytes_now(self) -> list[bytes]:
        return [
            b"".join(each.tobytes() for each in (*pool.kv, *pool.conv, *pool.heads))
            for layouts in self.layouts
            for pool in layouts.pools.values()
        ]


def content(name: str, size: int) -> np.ndarray:
    return np.frombuffer(hashlib.shake_128(name.encode()).digest(size), np.uint8)
