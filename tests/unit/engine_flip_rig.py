"""An engine over a fleet that is played by hand, with flips: answers come when a test asks for them, and in a commit
everything that the order's maps do not name is forgotten.

The fleet remembers what it wrote where (the ranks of `test_engine_traces`, one memory for all). A flip keeps the slots
of live pages and live states and nothing else, and the token that a lane drew last is forgotten: what the engine left
out of its maps, or expects ranks to know, shows as wrong content at once. What ranks say to have packed is counted from
the maps here, not taken from the engine.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from test_engine_traces import END, VOCAB, Rank, answer

from backends.base import PAGE_LEN
from homeserve.engine.draft import Draft
from homeserve.engine.engine import Engine
from homeserve.engine.request import EngineLimits, FinishReason, FlipLimits, GenerateCall, LayoutLimits
from homeserve.engine.stream import TokenStream
from homeserve.fleet import Loss
from homeserve.wire.records import (
    PACK,
    FlipAnswer,
    FlipDigest,
    FlipLive,
    FlipOrder,
    LaneRows,
    NewLane,
    PlanKind,
    PoolCensus,
    Result,
    Sampling,
)

PIPELINE, TENSOR = "pipeline", "tensor"
RANKS = 3
PAGE_BYTES, STATE_BYTES = 64, 1000
OTHER = {PIPELINE: TENSOR, TENSOR: PIPELINE}
FLIP_KINDS = (PlanKind.FLIP_PREPARE, PlanKind.FLIP_COMMIT, PlanKind.FLIP_ABANDON)


def flip_limits(groups: int = 1, *, drafts: int = 0, **more: Any) -> FlipLimits:
    """`drafts`: the most of a round in the tensor layout; in the other one nothing is drafted."""
    layouts = {
        PIPELINE: LayoutLimits(PIPELINE, RANKS, RANKS + 1),
        TENSOR: LayoutLimits(TENSOR, 1, 2, (2, 1, 1), drafts),
    }
    sizes: dict[str, Any] = {"transit_bytes": 1 << 30, "cache_bytes": 1 << 20, "policy": "manual", "calibrate": False}
    return FlipLimits(layouts, PIPELINE, (PAGE_BYTES,) * groups, STATE_BYTES, **{**sizes, **more})


def limits(flip: FlipLimits | None = None, **more: Any) -> EngineLimits:
    sizes: dict[str, Any] = {
        "context": 256, "kv_tokens": 1024, "running": 4, "waiting": 64, "chunk": 16, "prefill_delay": 0,
        "plans_in_flight": RANKS + 1, "decode_groups": RANKS, "recurrent": True, "checkpoints": 4,
    }  # fmt: skip
    return EngineLimits(**{**sizes, **more}, flip=flip_limits() if flip is None else flip)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


class Timers:
    """The clock, and what was to be called later."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = 0
        self._due: list[tuple[float, int, Timer]] = []

    def later(self, seconds: float, what: Callable[[], None]) -> Timer:
        timer = Timer(what)
        self._order += 1
        heapq.heappush(self._due, (self.now + seconds, self._order, timer))
        return timer

    def pass_(self, seconds: float) -> None:
        until = self.now + seconds
        while self._due and self._due[0][0] <= until:
            self.now, _, timer = heapq.heappop(self._due)
            if not timer.cancelled:
                timer.what()
        self.now = until

    @property
    def waiting(self) -> int:
        return sum(not timer.cancelled for _, _, timer in self._due)


class Timer:
    def __init__(self, what: Callable[[], None]) -> None:
        self.what = what
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Sent:
    """A plan as the fleet has it."""

    seq: int
    kind: PlanKind
    epoch: int
    draft: Draft
    flip: FlipOrder | None = None


@dataclass
class Trouble:
    """What goes wrong with the next plan of a flip at which `at` is reached: pack, verify, commit, abandon, check or
    drain. `how`: refuse, lose, miscount, or lie (of bytes)."""

    at: str
    how: str


class SimFleet:
    """See the module. `now` of its timers moves by `step_s` with each answer."""

    def __init__(self, sizes: EngineLimits, step_s: float = 0.001) -> None:
        self.timers = Timers()
        self.sizes = sizes
        self.step_s = step_s
        self.plans: deque[Sent] = deque()
        self.kinds: list[PlanKind] = []
        self.seq = 0
        self.restarts = 0
        self.rank = self.new_rank()
        self.layout = PIPELINE
        self.epochs = [0]
        """Committed in this life,"""
        self.commits: list[tuple[int, str]] = []
        """and in any: (epoch, layout)."""
        self.times = True
        """Ranks tell how long they computed."""
        self.trouble: Trouble | None = None
        self.packed: FlipLive | None = None
        self.engine = Engine(self, sizes, lambda: self.timers.now, self.timers.later)

    def new_rank(self) -> Rank:
        return Rank(self.sizes.recurrent, tuple(window for _, window in self.sizes.groups))

    # -------------------------------------------------------------------------------------------- what an engine asks

    def credit(self) -> int:
        return RANKS + 1 - len(self.plans)

    def issue(
        self,
        kind: PlanKind,
        *,
        epoch: int,
        drop: tuple[int, ...] = (),
        new: tuple[NewLane, ...] = (),
        rows: tuple[LaneRows, ...] = (),
        flip: FlipOrder | None = None,
    ) -> int:
        assert self.credit() > 0
        assert not (self.packed and rows), "rows between a prepare and its end are in no payload"
        if flip is None:
            assert epoch == self.epochs[-1] or len(self.epochs) == 1, "an ordinary plan of another epoch"
        else:
            assert not self.plans, "a flip with plans in flight"
            assert flip.epoch > max(self.epochs), "an epoch twice"
            assert epoch == (flip.epoch if kind is PlanKind.FLIP_COMMIT else self.engine.snapshot().epoch)
            assert flip.to != self.layout
        self.seq += 1
        draft = Draft(self.seq, drop, list(new), list(rows))
        self.plans.append(Sent(self.seq, kind, epoch, draft, flip))
        self.kinds.append(kind)
        return self.seq

    async def restart(self, kv_slots: int, window_slots: tuple[tuple[int, int], ...]) -> None:
        await asyncio.sleep(0)
        self.plans.clear()
        self.restarts += 1
        self.seq = 0
        self.rank = self.new_rank()
        self.layout, self.epochs, self.packed = PIPELINE, [0], None

    def shared_memory_names(self) -> list[str]:
        return []

    # ------------------------------------------------------------------------------------------------- what a test does

    def answer(self) -> None:
        """All ranks answer the oldest plan."""
        sent = self.plans.popleft()
        self.timers.now += self.step_s
        trouble, self.trouble = self._meets(sent), self.trouble
        if trouble:
            self.trouble = None
        if trouble == "lose":
            self.lose(f"at {sent.kind.name}")
            return
        results = self._flip_results(sent, trouble) if sent.flip else self._results(sent, trouble)
        self.engine.on_results(sent.seq, results)

    def answer_all(self) -> None:
        while self.plans:
            self.answer()

    def lose(self, why: str = "killed by the test") -> None:
        self.plans.clear()
        self.rank = self.new_rank()
        self.engine.on_lost(Loss(1, why, outside=True))

    def _meets(self, sent: Sent) -> str:
        """What goes wrong with this plan."""
        trouble = self.trouble
        if trouble is None:
            return ""
        on = self.engine.flip_records() and not self.engine.flip_records()[-1].over
        at = {
            PlanKind.FLIP_PREPARE: sent.flip.stage if sent.flip else "",
            PlanKind.FLIP_COMMIT: "commit",
            PlanKind.FLIP_ABANDON: "abandon",
            PlanKind.CENSUS: "check" if on else "",
        }.get(sent.kind, "drain" if on else "")
        return trouble.how if at == trouble.at else ""

    def _results(self, sent: Sent, trouble: str) -> tuple[Result, ...]:
        samples = tuple(self.rank.run(sent.draft))
        census: tuple[PoolCensus, ...] = ()
        if sent.kind is PlanKind.CENSUS:
            lanes = [(index, lane.request, len(lane.tables[0])) for index, lane in self.rank.lanes.items()]
            if trouble == "miscount":
                lanes = [(index, request, pages + 1) for index, request, pages in lanes] or [(0, 99, 1)]
            census = (PoolCensus("kv", self.sizes.kv_tokens // PAGE_LEN, tuple(lanes)),)
        began, busy = round(1e6 * self.timers.now), 1000 if self.times else 0
        drawn = [(), (), samples]  # the last rank samples
        return tuple(
            Result(rank, sent.seq, sent.epoch, samples=drawn[rank], census=census, busy_us=busy, began_us=began)
            for rank in range(RANKS)
        )

    # ---------------------------------------------------------------------------------------------------------- flips

    def _flip_results(self, sent: Sent, trouble: str) -> tuple[Result, ...]:
        order = sent.flip
        assert order is not None
        if trouble == "refuse":
            return tuple(
                Result(rank, sent.seq, sent.epoch, ok=rank != 1, reason="no room" if rank == 1 else "")
                for rank in range(RANKS)
            )
        if sent.kind is PlanKind.FLIP_ABANDON:
            self.packed = None
            return tuple(Result(rank, sent.seq, sent.epoch) for rank in range(RANKS))
        if sent.kind is PlanKind.FLIP_PREPARE and order.stage == PACK:
            assert order.live is not None
            self.packed = order.live
        assert self.packed is not None, "nothing was packed"
        live = self.packed
        if sent.kind is PlanKind.FLIP_COMMIT:
            self._commit(order, live)
        return tuple(self._answer(sent, rank, live, trouble) for rank in range(RANKS))

    def _answer(self, sent: Sent, rank: int, live: FlipLive, trouble: str) -> Result:
        """Rank 0 keeps what divides, the others send a share of the rest to the next rank."""
        flip = self.sizes.flip
        assert flip is not None and sent.flip is not None
        pages = sum(ones(each) * size for each, size in zip(live.pages, flip.page_bytes, strict=True))
        total = 0 if flip.unified else pages + ones(live.states) * STATE_BYTES
        if trouble == "lie" and rank == 0:
            total += RANKS
        local = total // (2 * RANKS)
        mine = total // RANKS + (total % RANKS if rank == 0 else 0)
        digests = (FlipDigest(rank, rank, local, 7), FlipDigest(rank, (rank + 1) % RANKS, mine - local, 8))
        whole = FlipAnswer(
            sent_bytes=mine - local, received_bytes=mine - local, local_bytes=local,
            rows=sum(ones(each) for each in live.pages) * PAGE_LEN if rank == 0 else 0,
            states=ones(live.states) if rank == 0 else 0, refill_bytes=512, refill_tries=1, digest=0xABC + rank,
            us=(("write_kv", 10), ("refill", 2000 + rank)),
        )  # fmt: skip
        if trouble == "miscount":
            whole = FlipAnswer(received_bytes=0 if rank else 1, sent_bytes=whole.sent_bytes, local_bytes=local)
        told = whole
        if sent.kind is PlanKind.FLIP_PREPARE:
            pack = FlipAnswer(whole.sent_bytes, 0, local, digests=digests, us=(("pack", 100),))
            verify = FlipAnswer(received_bytes=whole.received_bytes, us=(("digest", 50),))
            told = pack if sent.flip.stage == PACK else verify
        return Result(rank, sent.seq, sent.epoch, flip=told)

    def _commit(self, order: FlipOrder, live: FlipLive) -> None:
        """Only what is live comes across."""
        forget(self.rank, live)
        self.layout, self.packed = order.to, None
        self.epochs.append(order.epoch)
        self.commits.append((order.epoch, order.to))


def forget(rank: Rank, live: FlipLive) -> None:
    """The rank keeps the pages and states of the maps, and no token that it drew."""
    slots = {
        (group, page * PAGE_LEN + at)
        for group, bits in enumerate(live.pages)
        for page in numbers(bits)
        for at in range(PAGE_LEN)
    }
    states = set(numbers(live.states))
    rank.slots = {slot: stored for slot, stored in rank.slots.items() if slot in slots}
    rank.checkpoints = {slot: state for slot, state in rank.checkpoints.items() if slot in states}
    for index, lane in rank.lanes.items():
        lane.last = -1
        if rank.recurrent and index not in states:
            lane.state = (-1, 0)


def numbers(bits: bytes) -> list[int]:
    return [at for at in range(8 * len(bits)) if bits[at // 8] >> at % 8 & 1]


def ones(bits: bytes) -> int:
    return len(numbers(bits))


def ask(prompt: tuple[int, ...] = (3, 1, 4, 1, 5), max_tokens: int = 12) -> GenerateCall:
    return GenerateCall("r", prompt, Sampling(), max_tokens, frozenset({END}))


@dataclass
class Asked:
    """A call that was made, and its stream."""

    call: GenerateCall
    stream: TokenStream
    aborted: bool = False
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None

    async def read(self) -> None:
        async for event in self.stream:
            self.tokens.extend(event.tokens)
            self.finish = event.finish

    def check(self) -> None:
        right = answer(self.call.prompt, self.call.max_tokens)
        if self.aborted and self.finish is FinishReason.ABORT:
            assert self.tokens == right[: len(self.tokens)], "an answer was altered"
        else:
            assert self.tokens == right, "an answer was lost or altered"


class FlipTrace:
    """One random history of calls, answers, aborts, stalls, lost workers and flips, with trouble in some of them."""

    def __init__(self, seed: int, *, trouble: bool = True, losses: bool = True, **sizes: Any) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        groups = sizes.pop("windows", 0)
        flip = sizes.pop("flip", None) or flip_limits(
            1 + groups, cache_bytes=pick([0, 600, 1 << 20]), unified=pick([False, False, True])
        )
        self.limits = limits(
            flip,
            **{
                "kv_tokens": pick([256, 512, 1024]),
                "running": pick([1, 2, 4, 8]),
                "chunk": pick([1, 7, 16, 40]),
                "prefill_delay": pick([0, 0, 2]),
                "prefix_cache": pick([True, True, False]),
                "recurrent": pick([True, False]),
                "checkpoints": pick([0, 2, 5]),
                "windows": ((20, 256),) * groups,
                **sizes,
            },
        )
        self.fleet = SimFleet(self.limits)
        self.engine = self.fleet.engine
        self.trouble, self.losses = trouble, losses
        self.asked: list[Asked] = []
        self.aborted_late = 0
        self.stems = [tuple(self.random.randrange(VOCAB) for _ in range(60)) for _ in range(3)]

    def submit(self) -> None:
        stem = self.random.choice(self.stems)[: self.random.randrange(1, 60)]
        tail = tuple(self.random.randrange(VOCAB) for _ in range(self.random.randrange(0, 20)))
        room = self.engine.token_limit
        prompt = (stem + tail)[: room - 2]
        call = ask(prompt, self.random.randrange(1, min(room - len(prompt), 60) + 1))
        self.asked.append(Asked(call, self.engine.submit(call)))

    def abort(self) -> None:
        open_now = [asked for asked in self.asked if not asked.stream.finished]
        if open_now:
            asked = self.random.choice(open_now)
            asked.aborted = True
            self.engine.abort(asked.stream)
            assert asked.stream.finished, "the reader is told at once"

    def flip(self) -> None:
        engine = self.engine
        records = engine.flip_records()
        if engine.state != "ready" or (records and not records[-1].over):
            return
        if self.trouble and self.random.random() < 0.4:
            at = self.random.choice(["drain", "pack", "verify", "commit", "abandon", "check"])
            hows = {"drain": ["lose"], "pack": ["refuse", "lie", "lose"], "verify": ["refuse", "lose"]}
            self.fleet.trouble = Trouble(at, self.random.choice(hows.get(at, ["lose", "miscount"])))
        before = engine.snapshot()
        record = engine.flip_ask(OTHER[before.layout])
        assert record.epoch > before.epoch and record.source == before.layout

    async def step(self) -> None:
        event = self.random.random()
        if event < 0.10:
            self.submit()
        elif event < 0.13:
            self.abort()
        elif event < 0.16:
            self.flip()
        elif event < 0.165 and self.losses:
            if self.engine.state == "ready":
                self.fleet.lose()
        elif self.fleet.plans:
            self.fleet.answer()
        if event > 0.95 or self.engine.state != "ready":
            await asyncio.sleep(0)
        self.check()

    def check(self) -> None:
        scheduler = self.engine._scheduler
        for census in scheduler.census():
            assert census.free + census.live + census.protected + census.cached == census.capacity
            assert min(census.free, census.live, census.protected, census.cached) >= 0
        states = scheduler.state_census()
        if states is not None:
            assert states.free + states.live + states.cached == states.capacity
        assert self.engine.state in ("ready", "recovering")

    async def finish(self) -> None:
        for _ in range(20000):
            if self.engine.state != "ready":
                await asyncio.sleep(0)
            elif self.fleet.plans:
                self.fleet.answer()
            else:
                break
            self.check()
        for asked in self.asked:
            await asyncio.wait_for(asked.read(), 5)
            asked.check()
        for census in self.engine._scheduler.census():
            assert (census.live, census.protected) == (0, 0), "pages are held by nobody"
        for record in self.engine.flip_records():
            assert record.over and (record.state == "committed") == (record.reason is None)
        epochs = [record.epoch for record in self.engine.flip_records()]
        assert epochs == sorted(set(epochs)), "epochs only grow"
        committed = [epoch for epoch, _ in self.fleet.commits]
        assert committed == sorted(set(committed))
        assert self.engine._flips is not None and not self.engine._flips.on
        assert self.engine.snapshot().flip["unarmed_work_count"] == 0

    async def run(self, steps: int = 200) -> None:
        for _ in range(steps):
            await self.step()
        await self.finish()
