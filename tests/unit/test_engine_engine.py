"""The engine on a fake fleet that answers when it is told to: streams, recovery, limits, census."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from homeserve.engine.engine import DEATHS_IN_A_ROW, Engine, percentiles
from homeserve.engine.request import EngineLimits, FinishReason, GenerateCall, TokenEvent
from homeserve.engine.stream import TokenStream
from homeserve.errors import ContextOverflow, Draining, QueueFull, WorkerStartError
from homeserve.fleet import Loss
from homeserve.wire.records import LaneRows, NewLane, PlanKind, PoolCensus, Result, Sample, Sampling

LIMITS = EngineLimits(
    context=64, kv_tokens=256, running=4, waiting=3, chunk=16, prefill_delay=0, plans_in_flight=2, stream_tokens=4
)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 10))


class FakeFleet:
    """Keeps plans until `answer`; draws token 100 + position for every row that asks for one."""

    def __init__(self) -> None:
        self.engine: Engine
        self.plans: list[tuple[int, PlanKind, tuple[LaneRows, ...]]] = []
        self.lanes: dict[int, tuple[int, int]] = {}
        self.seq = 0
        self.restarts = 0
        self.kv_slots: int | None = None
        self.fail_restart = False

    def credit(self) -> int:
        return LIMITS.plans_in_flight - len(self.plans)

    def issue(
        self,
        kind: PlanKind,
        *,
        epoch: int,
        drop: tuple[int, ...] = (),
        new: tuple[NewLane, ...] = (),
        rows: tuple[LaneRows, ...] = (),
    ) -> int:
        assert self.credit() > 0
        self.seq += 1
        for lane in drop:
            self.lanes.pop(lane, None)
        for lane in new:
            self.lanes[lane.lane] = (lane.request, 0)
        for row in rows:
            request, pages = self.lanes[row.lane]
            self.lanes[row.lane] = (request, pages + len(row.pages) // 4)
        self.plans.append((self.seq, kind, rows))
        return self.seq

    def answer(self) -> None:
        seq, kind, rows = self.plans.pop(0)
        ends = [row.start + max(1, len(row.tokens) // 4) for row in rows]
        samples = tuple(
            Sample(row.lane, row.request, end, 100 + end) for row, end in zip(rows, ends, strict=True) if row.sample
        )
        lanes = tuple((lane, request, pages) for lane, (request, pages) in self.lanes.items())
        census = (PoolCensus("kv", 16, lanes),) if kind is PlanKind.CENSUS else ()
        self.engine.on_results(seq, (Result(0, seq, 0, samples=samples, census=census),))

    def answer_all(self) -> None:
        while self.plans:
            self.answer()

    def lose(self, oom: bool = False) -> None:
        self.plans.clear()
        self.lanes.clear()
        self.engine.on_lost(Loss(0, "killed by the test", oom))

    async def restart(self, kv_slots: int, window_slots: tuple[tuple[int, int], ...]) -> None:
        self.kv_slots = kv_slots
        await asyncio.sleep(0)
        if self.fail_restart:
            raise WorkerStartError("no more workers")
        self.restarts += 1
        self.plans.clear()
        self.seq = 0

    def shared_memory_names(self) -> list[str]:
        return ["segment"]


def make() -> tuple[Engine, FakeFleet]:
    fleet = FakeFleet()
    fleet.engine = Engine(fleet, LIMITS, clock=lambda: 1.0)
    return fleet.engine, fleet


def call(length: int = 3, max_tokens: int = 4, **more: Any) -> GenerateCall:
    return GenerateCall("r", tuple(range(length)), Sampling(), max_tokens, frozenset(), **more)


async def read_all(stream: TokenStream) -> tuple[list[int], TokenEvent]:
    tokens: list[int] = []
    async for event in stream:
        tokens.extend(event.tokens)
    return tokens, event


def test_a_call_streams_its_tokens_and_ends() -> None:
    async def body() -> None:
        engine, fleet = make()
        stream = engine.submit(call())
        fleet.answer_all()
        tokens, last = await read_all(stream)
        assert tokens == [103, 104, 105, 106]
        assert last.finish is FinishReason.LENGTH
        assert (stream.usage.prompt_tokens, stream.usage.completion_tokens) == (3, 4)
        assert engine.snapshot().finished == 1

    run(body)


def test_the_next_decode_plan_is_issued_before_the_last_is_back() -> None:
    async def body() -> None:
        engine, fleet = make()
        engine.submit(call(max_tokens=10))
        assert [kind for _, kind, _ in fleet.plans] == [PlanKind.PREFILL, PlanKind.DECODE]

    run(body)


def test_limits_are_refused_with_their_own_errors() -> None:
    async def body() -> None:
        engine, _ = make()
        with pytest.raises(ContextOverflow) as overflow:
            engine.submit(call(length=64))
        assert (overflow.value.prompt_tokens, overflow.value.limit_tokens) == (64, 63)
        for _ in range(LIMITS.running + LIMITS.waiting):
            engine.submit(call())
        with pytest.raises(QueueFull):
            for _ in range(LIMITS.running + LIMITS.waiting):
                engine.submit(call())

    run(body)


def test_abort_frees_the_slots_when_nothing_in_flight_names_them() -> None:
    async def body() -> None:
        engine, fleet = make()
        stream = engine.submit(call(max_tokens=30))
        engine.abort(stream)
        engine.abort(stream)
        assert engine.snapshot().used_tokens == 16
        fleet.answer_all()
        assert engine.snapshot().used_tokens == 0
        _, last = await read_all(stream)
        assert last.finish is FinishReason.ABORT
        assert engine.snapshot().aborted == 1

    run(body)


def test_a_lost_worker_is_restarted_and_the_stream_goes_on() -> None:
    async def body() -> None:
        engine, fleet = make()
        stream = engine.submit(call(max_tokens=6))
        fleet.answer()
        fleet.answer()
        fleet.lose()
        assert engine.state == "recovering"
        while engine.state != "ready":
            await asyncio.sleep(0)
        fleet.answer_all()
        tokens, _ = await read_all(stream)
        assert tokens == [103, 104, 105, 106, 107, 108]
        assert (fleet.restarts, stream.timings.restarts, engine.snapshot().restarts) == (1, 1, 1)

    run(body)


def test_an_out_of_memory_kill_lowers_the_pool() -> None:
    async def body() -> None:
        engine, fleet = make()
        engine.submit(call(max_tokens=30))
        engine.limits = replace(engine.limits, kv_tokens=4096)
        fleet.lose(oom=True)
        while engine.state != "ready":
            await asyncio.sleep(0)
        assert fleet.kv_slots == engine.limits.kv_tokens == 2048
        assert engine.snapshot().capacity_tokens == 2048
        assert [event["kind"] for event in engine.snapshot().events] == ["worker_lost", "budget_lowered", "recovered"]

    run(body)


def test_a_call_during_recovery_waits_for_it() -> None:
    async def body() -> None:
        engine, fleet = make()
        fleet.lose()
        stream = engine.submit(call(max_tokens=1))
        assert not fleet.plans
        while engine.state != "ready":
            await asyncio.sleep(0)
        fleet.answer_all()
        assert (await read_all(stream))[0] == [103]

    run(body)


def test_a_fleet_that_cannot_start_ends_everything_and_says_so() -> None:
    async def body() -> None:
        engine, fleet = make()
        stream = engine.submit(call())
        fleet.fail_restart = True
        fleet.lose()
        await engine.gave_up.wait()
        _, last = await read_all(stream)
        assert last.finish is FinishReason.ERROR
        assert last.error == "no more workers"
        assert engine.failure is not None
        assert "no more workers" in engine.failure.message
        with pytest.raises(Draining):
            engine.submit(call())

    run(body)


def test_deaths_without_progress_are_bounded() -> None:
    async def body() -> None:
        engine, fleet = make()
        for _ in range(DEATHS_IN_A_ROW):
            fleet.lose()
            while engine.state == "recovering":
                await asyncio.sleep(0)
        assert engine.gave_up.is_set()
        assert fleet.restarts == DEATHS_IN_A_ROW - 1

    run(body)


def test_drain_finishes_what_is_open_and_takes_nothing_new() -> None:
    async def body() -> None:
        engine, fleet = make()
        stream = engine.submit(call(max_tokens=2))
        draining = asyncio.create_task(engine.drain(5))
        await asyncio.sleep(0)
        assert engine.state == "draining"
        with pytest.raises(Draining):
            engine.submit(call())
        fleet.answer_all()
        await draining
        assert (await read_all(stream))[1].finish is FinishReason.LENGTH

    run(body)


def test_drain_cuts_off_what_does_not_end() -> None:
    async def body() -> None:
        engine, _ = make()
        stream = engine.submit(call(max_tokens=2))
        await engine.drain(0)
        assert (await read_all(stream))[1].finish is FinishReason.ABORT

    run(body)


def test_census_counts_both_sides() -> None:
    async def body() -> None:
        engine, fleet = make()
        engine.submit(call(length=20, max_tokens=1))
        fleet.answer_all()
        census = asyncio.create_task(engine.census())
        await asyncio.sleep(0)
        fleet.answer_all()
        answer = await census
        assert answer["ok"] and answer["idle"]
        rank = answer["ranks"][0]
        assert rank["free"] + rank["cached"] == rank["capacity"] == 16
        assert answer["shared_memory"] == ["segment"]

    run(body)


def test_census_names_a_lane_that_a_rank_did_not_drop() -> None:
    async def body() -> None:
        engine, fleet = make()
        fleet.lanes[2] = (99, 3)
        census = asyncio.create_task(engine.census())
        await asyncio.sleep(0)
        fleet.answer_all()
        answer = await census
        assert not answer["ok"]
        assert answer["ranks"][0]["leaks"] == [{"page": None, "request": "99", "pages": 3}]

    run(body)


def test_a_census_under_load_takes_the_next_credit() -> None:
    async def body() -> None:
        engine, fleet = make()
        engine.submit(call(max_tokens=30))
        census = asyncio.create_task(engine.census())
        await asyncio.sleep(0)
        for _ in range(4):
            fleet.answer()
        assert (await census)["ok"]

    run(body)


def test_a_slow_reader_is_held_and_let_go() -> None:
    async def body() -> None:
        engine, fleet = make()
        stream = engine.submit(call(max_tokens=40))
        for _ in range(60):
            if fleet.plans:
                fleet.answer()
        assert not fleet.plans
        first = await anext(stream)
        assert LIMITS.stream_tokens < len(first.tokens) <= LIMITS.stream_tokens + 3
        assert fleet.plans
        while not stream.finished:
            while fleet.plans:
                fleet.answer()
            await anext(stream)
        assert stream.usage.completion_tokens == 40

    run(body)


def test_a_stream_gathers_what_is_unread_into_one_event() -> None:
    async def body() -> None:
        stream = TokenStream("r", 1, 0.0, 10, lambda held: None)
        stream.push(TokenEvent((1,)))
        stream.push(TokenEvent((2, 3), finish=FinishReason.STOP))
        stream.push(TokenEvent((4,)))
        assert [event async for event in stream] == [TokenEvent((1, 2, 3), finish=FinishReason.STOP)]

    run(body)


def test_percentiles_of_nothing_are_unknown() -> None:
    from collections import deque

    assert percentiles(deque()) == {"p50": None, "p99": None}
    assert percentiles(deque([2.0, 1.0, 3.0])) == {"p50": 2.0, "p99": 2.0}


def test_the_next_plan_goes_out_before_a_listener_hears() -> None:
    async def scenario() -> None:
        engine, fleet = make()
        stream = engine.submit(call(max_tokens=3))
        heard: list[tuple[tuple[int, ...], int]] = []
        stream.listen(lambda event: heard.append((event.tokens, fleet.seq)))
        fleet.answer()
        before = fleet.seq
        assert not heard and before > 1, "the plan behind the answered one"
        await asyncio.sleep(0)
        assert heard == [((103,), before)]

    run(scenario)


def test_a_listener_hears_all_that_is_unread_and_nothing_twice() -> None:
    async def scenario() -> None:
        engine, fleet = make()
        stream = engine.submit(call(max_tokens=6))
        fleet.answer()
        heard: list[int] = []
        stream.listen(lambda event: heard.extend(event.tokens))
        fleet.answer()
        await asyncio.sleep(0)
        stream.listen(None)
        fleet.answer()
        await asyncio.sleep(0)
        assert heard == [103, 104]
        while engine.snapshot().running or engine.snapshot().waiting:
            fleet.answer()
        rest, last = await read_all(stream)
        assert heard + rest == [103 + i for i in range(6)] and last.finish is FinishReason.LENGTH

    run(scenario)


def test_a_listener_that_does_not_listen_any_more_holds_its_sequence() -> None:
    """The backlog of a stream is bounded, whoever reads it."""

    async def scenario() -> None:
        engine, fleet = make()
        stream = engine.submit(call(max_tokens=50))
        stream.listen(lambda event: stream.listen(None))
        for _ in range(20):
            if fleet.plans:
                fleet.answer()
                await asyncio.sleep(0)
        assert stream.usage.completion_tokens < 12 and not fleet.plans
        tokens, last = await _read_on(stream, fleet)
        assert last.finish is FinishReason.LENGTH and tokens[-1] == 103 + 49

    run(scenario)


async def _read_on(stream: TokenStream, fleet: FakeFleet) -> tuple[list[int], TokenEvent]:
    reading = asyncio.create_task(read_all(stream))
    while not reading.done():
        if fleet.plans:
            fleet.answer()
        await asyncio.sleep(0)
    return await reading
