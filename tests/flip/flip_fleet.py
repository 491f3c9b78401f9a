"""Real rank processes driven plan by plan: requests prefill, decode, are saved and restored, with a flip between any
two of these.

The same script runs on one rank, where a flip does nothing: what the tokens must be.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from homeserve.fleet import ActSizes, Fleet, FleetSpec, Loss
from homeserve.wire.records import (
    PACK,
    VERIFY,
    FlipAnswer,
    FlipDigest,
    FlipLive,
    FlipOrder,
    LaneRows,
    LoadSpec,
    NewLane,
    PlanKind,
    RankFacts,
    Result,
    Sampling,
    pack_ints,
)

TINY = Path(__file__).parents[1] / "data" / "tiny"
OTHER = {"pipeline": "tensor", "tensor": "pipeline"}
PAGE, LANES, LANE_PAGES, ROWS, PAGES, CHECKPOINTS = 16, 4, 8, 64, 64, 2
HIDDEN = 192
PATIENCE_S = 60.0
TRANSIT_BYTES = 8 << 20


def bits(numbers: Iterable[int]) -> bytes:
    found = bytearray(PAGES // 8)
    for number in numbers:
        found[number // 8] |= 1 << number % 8
    return bytes(found)


@dataclass
class Request:
    """A request in its lane: `tokens` are prompt and answer, of which `computed` have been inputs."""

    number: int
    lane: int
    tokens: list[int]
    prompt_len: int
    sampling: Sampling
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    paged: int = 0
    """Pages that the ranks have been told."""
    begun: bool = False
    told: bool = False
    """Whether the ranks know its last token: they do not behind a flip."""


class Play:
    """A fleet and its requests. `ranks` 1: no flips. `flip` False of several ranks: likewise."""

    def __init__(
        self,
        model: str,
        ranks: int = 3,
        *,
        layout: str = "pipeline",
        ranges: tuple[tuple[int, int], ...] = (),
        weight_vector: tuple[int, ...] = (2, 1, 1),
        token_vector: tuple[int, ...] = (3, 2, 1),
        unified: bool = False,
        image_dir: str = "",
        kv_type: str = "f16",
        windows: tuple[int, ...] = (),
        fault: str = "",
        captures: str | None = None,
        transit_bytes: int = TRANSIT_BYTES,
    ) -> None:
        self.ranks, self.layout, self.windows = ranks, layout, windows
        self.recurrent = model.startswith("qwen3_5")
        several = ranks > 1
        flight = ranks + 1
        self.spec = FleetSpec(
            ranks=ranks,
            backend="cpu",
            device_index=0,
            threads=1,
            isa="",
            plans_in_flight=flight,
            plan_timeout_s=20.0,
            slot_bytes=16384,
            report_slot_bytes=16384,
            fault=fault,
            capture_dir=captures,
            acts=ActSizes(8192, ROWS * 2 * HIDDEN, 4 * LANES, flight + 1) if several else None,
            unified=unified and several,
            weights_copy=several and not unified and not image_dir,
            transit_bytes=0 if unified or not several else transit_bytes,
        )
        shares: dict[str, Any] = {}
        if several:
            shares = {
                "flip": True,
                "layout": layout,
                "ranges": ranges,
                "weight_vector": weight_vector,
                "token_vector": token_vector,
                "transit_bytes": 0 if unified else transit_bytes,
                "image_dir": image_dir,
            }
        self.load_spec = LoadSpec(
            str(TINY / f"{model}.f32.gguf"),
            PAGES * PAGE,
            kv_type,
            ROWS,
            ROWS,
            LANES,
            LANE_PAGES,
            state_slots=LANES + CHECKPOINTS,
            window_slots=tuple((window, PAGES * PAGE) for window in windows),
            **shares,
        )
        self.fleet = Fleet(self.spec, self)
        self.facts: tuple[RankFacts, ...] = ()
        self.results: dict[int, tuple[Result, ...]] = {}
        self.losses: list[Loss] = []
        self.epoch = self.flips = 0
        self.requests: dict[int, Request] = {}
        self.saved: dict[int, tuple[list[int], list[int]]] = {}
        """Of each checkpoint its tokens and pages."""
        self._changed = asyncio.Event()
        self._free = list(range(PAGES))
        random.Random(5).shuffle(self._free)

    async def __aenter__(self) -> Play:
        await self.fleet.start()
        try:
            self.facts = await self.fleet.load(self.load_spec)
        except BaseException:
            await self.fleet.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.fleet.stop()

    def on_results(self, seq: int, results: tuple[Result, ...]) -> None:
        self.results[seq] = results
        self._changed.set()

    def on_lost(self, loss: Loss) -> None:
        self.losses.append(loss)
        self._changed.set()

    async def answered(self, seq: int) -> tuple[Result, ...]:
        async with asyncio.timeout(PATIENCE_S):
            while seq not in self.results and not self.losses:
                self._changed.clear()
                await self._changed.wait()
        assert not self.losses, self.losses
        return self.results.pop(seq)

    async def again(self) -> None:
        """Another life, behind a loss: nothing of the requests is left, and epochs go on."""
        await self.fleet.restart()
        self.losses.clear()
        self.results.clear()
        self.requests.clear()
        self.saved.clear()
        self.layout = self.load_spec.layout
        self.flips += 1
        self.epoch = self.flips

    def lies_in_transit(self) -> int:
        """Bytes of memory that the transit memory takes now."""
        life = self.fleet._life
        assert life is not None and life._acts is not None
        fd = life._acts.transit_fd
        return os.fstat(fd).st_blocks * 512 if fd >= 0 else 0

    # ---------------------------------------------------------------------------------------------------- requests

    def begin(self, number: int, lane: int, prompt: list[int], **sampling: Any) -> None:
        """A request takes a lane; nothing is computed."""
        drawn = Sampling(**({"temperature": 0.0} | sampling))
        self.requests[number] = Request(number, lane, list(prompt), len(prompt), drawn)

    def begin_from(self, number: int, lane: int, slot: int, more: list[int]) -> None:
        """A request that goes on from a checkpoint: the prefix hit of a recurrent model."""
        tokens, pages = self.saved[slot]
        self.begin(number, lane, [*tokens, *more])
        self.requests[number].computed, self.requests[number].pages = len(tokens), list(pages)

    async def run(self, rows: int = 1, save: dict[int, int] | None = None, only: Iterable[int] = ()) -> None:
        """One plan: the next `rows` tokens of a prompt that is not computed, one of an answer. `save`: checkpoint slot
        of a request."""
        chosen = [each for each in self.requests.values() if not list(only) or each.number in set(only)]
        new = tuple(self._new(each) for each in chosen if not each.begun)
        plan = tuple(self._rows(each, rows, (save or {}).get(each.number, -1)) for each in chosen)
        for number, slot in (save or {}).items():
            each = self.requests[number]
            self.saved[slot] = each.tokens[: each.computed], list(each.pages)
        seq = self.fleet.issue(PlanKind.MIXED, epoch=self.epoch, new=new, rows=plan)
        by_number = {each.number: each for each in chosen}
        for sample in (await self.answered(seq))[-1].samples:
            if sample.token >= 0:
                by_number[sample.request].tokens.append(sample.token)
                by_number[sample.request].told = True

    def _new(self, each: Request) -> NewLane:
        each.begun = True
        slot = next((slot for slot, (tokens, _) in self.saved.items() if each.computed == len(tokens)), -1)
        restore = slot if each.computed else -1
        history = pack_ints(each.tokens[: each.computed])
        return NewLane(each.lane, each.number, each.prompt_len, each.sampling, history, restore)

    def _rows(self, each: Request, rows: int, save: int) -> LaneRows:
        start = each.computed
        end = min(len(each.tokens), start + rows) if start < each.prompt_len else start + 1
        each.pages += [self._free.pop() for _ in range(-(-end // PAGE) - len(each.pages))]
        fresh, each.paged = each.pages[each.paged :], len(each.pages)
        known = each.told and end > each.prompt_len
        tokens = b"" if known else pack_ints(each.tokens[start:end])
        each.computed, each.told = end, False
        groups = 1 + len(self.windows)
        pages = pack_ints(fresh * groups)
        return LaneRows(each.lane, each.number, start, tokens, pages, end == len(each.tokens), save=save)

    def answer(self, number: int) -> list[int]:
        each = self.requests[number]
        return each.tokens[each.prompt_len :]

    # ------------------------------------------------------------------------------------------------------- flips

    def order(self) -> FlipOrder:
        """The next flip, of all that is live."""
        self.flips += 1
        pages = {page for each in self.requests.values() for page in each.pages}
        pages |= {page for _, held in self.saved.values() for page in held}
        slots = {each.lane for each in self.requests.values()} | set(self.saved) if self.recurrent else ()
        live = FlipLive((bits(pages),) * (1 + len(self.windows)), bits(slots))
        return FlipOrder(self.flips, self.flips, OTHER[self.layout], PACK, live)

    async def plan(self, kind: PlanKind, order: FlipOrder) -> tuple[Result, ...]:
        epoch = order.epoch if kind is PlanKind.FLIP_COMMIT else self.epoch
        return await self.answered(self.fleet.issue(kind, epoch=epoch, flip=order))

    async def pack(self, order: FlipOrder) -> tuple[Result, ...]:
        return await self.plan(PlanKind.FLIP_PREPARE, order)

    async def verify(self, order: FlipOrder, packed: tuple[Result, ...]) -> tuple[Result, ...]:
        digests: tuple[FlipDigest, ...] = tuple(each for r in packed if r.flip for each in r.flip.digests)
        to_compare = FlipOrder(order.flip, order.epoch, order.to, VERIFY, None, digests)
        return await self.plan(PlanKind.FLIP_PREPARE, to_compare)

    async def commit(self, order: FlipOrder) -> list[FlipAnswer]:
        results = await self.plan(PlanKind.FLIP_COMMIT, FlipOrder(order.flip, order.epoch, order.to))
        self.layout, self.epoch = order.to, order.epoch
        for each in self.requests.values():
            each.told = False
        return [result.flip for result in results if result.flip is not None]

    async def abandon(self, order: FlipOrder) -> None:
        await self.plan(PlanKind.FLIP_ABANDON, FlipOrder(order.flip, order.epoch, order.to))

    async def flip(self) -> list[FlipAnswer]:
        """All of it; on one rank nothing, but that inputs are told again."""
        if self.ranks == 1:
            for each in self.requests.values():
                each.told = False
            return []
        order = self.order()
        packed = await self.pack(order)
        assert all(result.ok for result in packed), [result.reason for result in packed]
        verified = await self.verify(order, packed)
        assert all(result.ok for result in verified), [result.reason for result in verified]
        return await self.commit(order)
