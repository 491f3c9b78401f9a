"""Calls with pooling in the scheduler and the engine: computed as prompts, whole where all states are needed, ended
with their embedding; beside others that decode, under preemption, losses, aborts, and every limit."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import replace
from typing import Any

import pytest
from test_engine_engine import FakeFleet
from test_engine_traces import END, VOCAB, Rank, Trace, answer, digest

from backends.base import PAGE_LEN
from homeserve.engine.draft import Draft, Emit
from homeserve.engine.engine import Engine
from homeserve.engine.policy import Demand
from homeserve.engine.request import EngineLimits, FinishReason, GenerateCall
from homeserve.engine.scheduler import Scheduler
from homeserve.engine.sizes import PLAN_EMBEDDINGS, result_bytes_limit
from homeserve.errors import ContextOverflow
from homeserve.fleet import Loss
from homeserve.wire import codec
from homeserve.wire.records import POOLINGS, LaneRows, NewLane, Result, Sample, Sampling, needs_all_rows

LIMITS = EngineLimits(
    context=256, kv_tokens=1024, running=4, waiting=64, chunk=40, prefill_delay=0, plans_in_flight=2, hidden=8
)


def pooled(prompt: tuple[int, ...], pooling: str = "mean", name: str = "r") -> GenerateCall:
    return GenerateCall(name, prompt, Sampling(), 0, frozenset(), pooling=pooling)


def drawn(prompt: tuple[int, ...], tokens: int = 5) -> GenerateCall:
    return GenerateCall("d", prompt, Sampling(), tokens, frozenset({END}))


class PoolingRank(Rank):
    """Its embedding of a prompt is (digest of all tokens, rows that this lane computed)."""

    def run(self, draft: Draft) -> list[Sample]:
        for lane in draft.drop:
            self.pooling.pop(lane, None)
        for new in draft.new:
            self.pooling[new.lane] = new
            self.seen[new.lane] = 0
        return super().run(draft)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pooling: dict[int, NewLane] = {}
        self.seen: dict[int, int] = {}

    def _read(self, rows: LaneRows) -> list[Sample]:
        samples = super()._read(rows)
        self.seen[rows.lane] += len(rows.tokens) // 4
        pooling = self.pooling[rows.lane].pooling
        if not pooling:
            return samples
        assert rows.tokens and not rows.drafts and rows.prompt_logprobs < 0, "rows of a prompt, and nothing else"
        assert self.seen[rows.lane] == rows.start + len(rows.tokens) // 4 or pooling == "last", "all its states"
        if not rows.sample:
            return []
        embedding = struct.pack("<2q", self.lanes[rows.lane].history[-1][1], self.seen[rows.lane])
        return [Sample(rows.lane, rows.request, samples[-1].position, -1, embedding=embedding)]


class PoolingTrace(Trace):
    """Every other call is for an embedding."""

    def __init__(self, seed: int, **limits: Any) -> None:
        self.embeddings: dict[int, bytes] = {}
        super().__init__(seed, **limits)

    def new_rank(self) -> Rank:
        return PoolingRank(self.limits.recurrent, tuple(window for _, window in self.limits.groups), 1)

    def submit(self) -> None:
        super().submit()
        if self.random.random() < 0.5:
            sequence = self.scheduler.open_sequences()[-1]
            if not sequence.issued and sequence.lane < 0:
                call = replace(sequence.call, pooling=self.random.choice(POOLINGS), max_tokens=0, drafts=False)
                sequence.call = call

    def note(self, emits: list[Emit]) -> None:
        super().note(emits)
        for emit in emits:
            if emit.embedding:
                assert emit.finish is FinishReason.STOP
                self.embeddings[emit.sequence.key] = emit.embedding

    def finish_all(self) -> None:
        super().finish_all()
        for key, sequence in self.calls.items():
            call = sequence.call
            if not call.pooling or self.finish[key] is not FinishReason.STOP:
                assert key not in self.embeddings
                continue
            told, rows = struct.unpack("<2q", self.embeddings[key])
            assert told == digest(call.prompt) and not self.shown[key]
            assert rows == len(call.prompt) or not needs_all_rows(call.pooling)


@pytest.mark.parametrize("seed", range(40))
def test_random_traces_with_embeddings_end_right(seed: int) -> None:
    embeddings = 0
    for part in range(4):
        windows = ((), (20,), (1, 33), ())[part]
        drafts = {"drafts": 3} if part == 3 else {}
        trace = PoolingTrace(7000 * (seed + 1) + part, recurrent=part % 2 == 1, windows=windows, **drafts)
        trace.run(60)
        embeddings += len(trace.embeddings)
    assert embeddings


def run_all(scheduler: Scheduler, rank: Rank) -> list[Emit]:
    """Plans one by one until nothing is left."""
    emits: list[Emit] = []
    seq = 0
    while (draft := scheduler.next_plan()) is not None:
        seq += 1
        scheduler.on_issued(draft, seq)
        emits += scheduler.apply(seq, rank.run(draft))
    return emits


@pytest.mark.parametrize(("pooling", "hit"), [("mean", 0), ("cls", 0), ("last", 2 * PAGE_LEN)])
def test_a_cached_prefix_serves_the_last_state_and_neither_mean_nor_first(pooling: str, hit: int) -> None:
    scheduler, rank = Scheduler(LIMITS), PoolingRank()
    prompt = tuple(range(40))
    scheduler.add(drawn(prompt[: 2 * PAGE_LEN + 1]))
    run_all(scheduler, rank)
    sequence = scheduler.add(pooled(prompt, pooling))
    (emit,) = run_all(scheduler, rank)
    assert sequence.hit_tokens == hit
    assert struct.unpack("<2q", emit.embedding) == (digest(prompt), len(prompt) - hit)


def test_pages_of_an_embedding_serve_others() -> None:
    scheduler, rank = Scheduler(LIMITS), PoolingRank()
    prompt = tuple(range(40))
    scheduler.add(pooled(prompt))
    run_all(scheduler, rank)
    sequence = scheduler.add(drawn(prompt))
    emits = run_all(scheduler, rank)
    assert sequence.hit_tokens == 2 * PAGE_LEN
    assert [token for emit in emits for token in emit.tokens] == answer(prompt, 5)


def test_a_plan_brings_so_many_embeddings_and_no_more() -> None:
    """What bounds a result; the rest comes with the next plan, and none starves."""
    limits = replace(LIMITS, running=PLAN_EMBEDDINGS + 9, chunk=4 * PLAN_EMBEDDINGS, kv_tokens=16 * 256)
    scheduler, rank = Scheduler(limits), PoolingRank()
    for number in range(PLAN_EMBEDDINGS + 9):
        scheduler.add(pooled((number % VOCAB,)))
    draft = scheduler.next_plan()
    assert draft is not None and sum(row.sample for row in draft.rows) == PLAN_EMBEDDINGS
    scheduler.on_issued(draft, 1)
    assert len(scheduler.apply(1, rank.run(draft))) == PLAN_EMBEDDINGS
    assert len(run_all(scheduler, rank)) == 9 and scheduler.idle


@pytest.mark.parametrize("hidden", [64, 8192])
def test_a_result_with_all_embeddings_that_may_be_fits_its_slot(hidden: int) -> None:
    limits = replace(LIMITS, running=200, hidden=hidden)
    full = [Sample(200, 2**40, 2**20, -1, embedding=bytes(4 * hidden)) for _ in range(PLAN_EMBEDDINGS)]
    rest = [Sample(200, 2**40, 2**20, 2**17) for _ in range(200 - PLAN_EMBEDDINGS)]
    assert len(codec.encode(Result(0, 2**40, 9, samples=(*full, *rest)))) < result_bytes_limit(limits)


def test_a_prompt_may_have_all_of_the_context() -> None:
    """Nothing is drawn behind it; also when it is computed a second time."""
    limits = replace(LIMITS, context=64, kv_tokens=64)
    scheduler, rank = Scheduler(limits), PoolingRank()
    prompt = tuple(at % VOCAB for at in range(64))
    scheduler.add(pooled(prompt))
    assert not scheduler.lose_fleet()
    (emit,) = run_all(scheduler, rank)
    assert emit.embedding and emit.finish is FinishReason.STOP


def test_a_lane_without_an_embedding_ends_alone() -> None:
    scheduler = Scheduler(LIMITS)
    bad, good = scheduler.add(pooled((1, 2))), scheduler.add(pooled((3, 4)))
    draft = scheduler.next_plan()
    assert draft is not None
    scheduler.on_issued(draft, 1)
    more = scheduler.next_plan()
    assert more is None or not any(row.request == bad.key for row in more.rows)
    if more is not None:
        scheduler.on_issued(more, 2)
    rows = {row.request: row for each in (draft, more) if each is not None for row in each.rows}
    failed = Sample(rows[bad.key].lane, bad.key, 2, -1, failed="no number")
    whole = Sample(rows[good.key].lane, good.key, 2, -1, embedding=b"12345678")
    emits = scheduler.apply(1, [failed, whole]) + scheduler.apply(2, [])
    told = {emit.sequence.key: (emit.finish, emit.error, emit.embedding) for emit in emits}
    assert told[bad.key] == (FinishReason.ERROR, "no number", b"")
    assert told[good.key] == (FinishReason.STOP, None, b"12345678")


def test_what_is_left_to_do_counts_no_token_of_an_embedding() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(pooled(tuple(range(30))))
    assert scheduler.demand() == Demand(30, 0, 0)
    draft = scheduler.next_plan()
    assert draft is not None and not draft.decode_rows
    scheduler.on_issued(draft, 1)
    assert scheduler.demand() == Demand(0, 0, 0)
    assert scheduler.next_plan() is None, "nothing is drawn behind it"


# -------------------------------------------------------------------------------------------------------------- engine


class PoolingFleet(FakeFleet):
    """Answers rows that end a prompt with four floats."""

    def answer(self) -> None:
        seq, _, rows = self.plans.pop(0)
        samples = tuple(Sample(row.lane, row.request, 9, -1, embedding=b"\0" * 16) for row in rows if row.sample)
        self.engine.on_results(seq, (Result(0, seq, 0, samples=samples),))


def test_a_stream_ends_with_the_embedding_and_an_engine_restarts_in_between() -> None:
    async def main() -> None:
        fleet = PoolingFleet()
        engine = fleet.engine = Engine(fleet, LIMITS, clock=lambda: 1.0)
        with pytest.raises(ContextOverflow) as caught:
            engine.submit(pooled(tuple(range(257))))
        assert "the limit is 256" in str(caught.value)
        stream = engine.submit(pooled(tuple(range(50)), "mean"))
        fleet.answer()
        fleet.plans.clear()
        engine.on_lost(Loss(0, "killed"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert engine.state == "ready" and fleet.plans[0][2][0].start == 0, "from its first token on"
        while fleet.plans:
            fleet.answer()
        events = [event async for event in stream]
        assert [(event.embedding, event.finish, event.tokens) for event in events] == [
            (b"\0" * 16, FinishReason.STOP, ())
        ]
        assert stream.usage.completion_tokens == 0 and stream.timings.restarts == 1
        await engine.stop()

    asyncio.run(asyncio.wait_for(main(), 10))
