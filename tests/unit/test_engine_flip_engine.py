"""The engine while a flip is on: what is issued, what waits, what is told, and what is compared."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from engine_flip_rig import (
    FLIP_KINDS,
    PIPELINE,
    RANKS,
    TENSOR,
    Asked,
    SimFleet,
    Trouble,
    ask,
    flip_limits,
    limits,
    numbers,
    ones,
    run,
)
from test_engine_traces import answer

from homeserve.engine.engine import Engine
from homeserve.engine.flip_record import FlipRefused
from homeserve.engine.pages import PageCensus, PagePool
from homeserve.engine.request import EngineLimits, FinishReason, NoFlip
from homeserve.wire.records import PlanKind, Sampling, unpack_ints

PREPARE, COMMIT, ABANDON = FLIP_KINDS


def make(**sizes: Any) -> tuple[Engine, SimFleet]:
    fleet = SimFleet(limits(**sizes))
    return fleet.engine, fleet


def flip(fleet: SimFleet, to: str = TENSOR) -> dict[str, Any]:
    """A flip, and the answers that it waits for, and no more; its record."""
    record = fleet.engine.flip_ask(to)
    while not record.over and fleet.engine.state == "ready":
        fleet.answer()
    return record.as_json()


def asked(engine: Engine, prompt: tuple[int, ...] = (3, 1, 4, 1, 5), max_tokens: int = 12) -> Asked:
    call = ask(prompt, max_tokens)
    return Asked(call, engine.submit(call))


async def ends_right(fleet: SimFleet, *calls: Asked) -> None:
    fleet.answer_all()
    for each in calls:
        await asyncio.wait_for(each.read(), 5)
        each.check()


# -------------------------------------------------------------------------------------------------------------- a flip


def test_a_flip_waits_for_every_answer_and_then_goes_step_by_step() -> None:
    async def body() -> None:
        engine, fleet = make()
        call = asked(engine)
        before = len(fleet.plans)
        assert before > 0
        record = engine.flip_ask(TENSOR)
        assert (record.state, record.epoch, record.source, record.cause) == ("draining", 1, PIPELINE, "request")
        for _ in range(before):
            assert len(fleet.kinds) == before, "no plan is issued while it drains"
            fleet.answer()
        states = [record.state]
        while not record.over:
            fleet.answer()
            states.append(record.state)
        assert fleet.kinds[before : before + 4] == [PREPARE, PREPARE, COMMIT, PlanKind.CENSUS]
        assert states == ["preparing", "preparing", "committing", "committing", "committed"]
        assert (fleet.layout, engine.snapshot().layout, engine.snapshot().epoch) == (TENSOR, TENSOR, 1)
        await ends_right(fleet, call)
        assert call.stream.timings.flips_crossed == 1

    run(body)


def test_the_record_has_every_field_of_the_interface() -> None:
    async def body() -> None:
        engine, fleet = make()
        call = asked(engine, tuple(range(8, 40)))
        fleet.answer()
        told = flip(fleet)
        assert list(told) == ["id", "epoch", "from", "to", "cause", "state", "reason", "ms", "live", "ranks"]
        assert set(told["ms"]) == {"drain", "prepare", "commit", "verify", "refill", "total"}
        assert told["ms"]["prepare"] == pytest.approx(2.0) and told["ms"]["commit"] == pytest.approx(1.0)
        assert told["ms"]["refill"] == pytest.approx(2.002), "the slowest rank's"
        assert told["ms"]["total"] == pytest.approx(
            sum(told["ms"][part] for part in ("drain", "prepare", "commit", "verify"))
        )
        assert told["live"] == {
            "requests": 1,
            "decoding": 1,
            "half_done": 0,
            "rows": 48,
            "states": 1,
            "checkpoints": 1,
            "draft_rows": 0,
        }
        for rank, part in enumerate(told["ranks"]):
            wanted = {
                "rank",
                "answer",
                "reason",
                "sent_bytes",
                "received_bytes",
                "local_bytes",
                "refill_bytes",
                "digest",
            }
            assert wanted <= set(part)
            assert (part["rank"], part["answer"], part["refill_bytes"]) == (rank, "yes", 512)
            assert part["digest"] == f"{0xABC + rank:016x}"
        assert engine.flip_record(told["id"]) is not None and engine.flip_record(99) is None
        await ends_right(fleet, call)

    run(body)


def test_a_flip_with_nothing_live_is_an_ordinary_one() -> None:
    async def body() -> None:
        engine, fleet = make()
        told = flip(fleet)
        assert told["state"] == "committed"
        assert told["live"] == {
            "requests": 0,
            "decoding": 0,
            "half_done": 0,
            "rows": 0,
            "states": 0,
            "checkpoints": 0,
            "draft_rows": 0,
        }
        call = asked(engine)
        await ends_right(fleet, call)
        assert call.stream.timings.flips_crossed == 0

    run(body)


def test_decoding_goes_on_with_the_token_that_another_rank_drew() -> None:
    """The first row of each decoding sequence behind a flip brings its token, and only that one."""

    async def body() -> None:
        engine, fleet = make()
        call = asked(engine, max_tokens=30)
        fleet.answer()
        flip(fleet)
        (row,) = fleet.plans[0].draft.rows
        assert fleet.plans[0].kind is PlanKind.DECODE, "it is a decode row all the same"
        assert list(unpack_ints(row.tokens)) == [engine._scheduler.open_sequences()[0].tokens[row.start]]
        assert not fleet.plans[1].draft.rows[0].tokens
        await ends_right(fleet, call)

    run(body)


def test_a_prompt_half_done_goes_on_where_it_was() -> None:
    """Between two chunks is a settled place: a flip does not wait for the rest of the prompt."""

    async def body() -> None:
        engine, fleet = make(chunk=16, checkpoints=0)
        prompt = tuple(n % 40 + 8 for n in range(200))
        call = asked(engine, prompt, 5)
        record = engine.flip_ask(TENSOR)
        while not record.over:
            fleet.answer()
        assert record.live is not None and record.live.rows == 64, "the four chunks that were in flight"
        assert fleet.plans[0].draft.rows[0].start == 64
        await ends_right(fleet, call)

    run(body)


def test_a_prefix_of_before_the_flip_is_found_behind_it() -> None:
    async def body() -> None:
        engine, fleet = make()
        prompt = tuple(n % 40 + 8 for n in range(60))
        first = asked(engine, prompt, 3)
        await ends_right(fleet, first)
        flip(fleet)
        second = asked(engine, prompt, 3)
        await ends_right(fleet, second)
        assert second.stream.usage.cached_tokens == 48 and fleet.rank.restored == 1

    run(body)


def test_there_and_back_with_one_stream() -> None:
    async def body() -> None:
        engine, fleet = make()
        call = asked(engine, max_tokens=40)
        for to in (TENSOR, PIPELINE, TENSOR):
            fleet.answer()
            assert flip(fleet, to)["state"] == "committed"
        await ends_right(fleet, call)
        assert call.stream.timings.flips_crossed == 3
        assert [record.epoch for record in engine.flip_records()] == [1, 2, 3]

    run(body)


def test_the_layouts_own_groups_and_plans_in_flight_hold_behind_a_flip() -> None:
    async def body() -> None:
        engine, fleet = make(running=6, kv_tokens=4096)
        long = [prompt for n in range(99) if len(answer(prompt := (9, 8, n), 60)) == 60]
        calls = [asked(engine, prompt, 60) for prompt in long[:6]]
        for _ in range(10):
            fleet.answer()
        assert {len(plan.draft.rows) for plan in fleet.plans} == {2}, "a third of them in each plan"
        assert len(fleet.plans) == RANKS + 1
        flip(fleet)
        assert len(fleet.plans) == 2 and [len(plan.draft.rows) for plan in fleet.plans] == [6, 6]
        flip(fleet, PIPELINE)
        for _ in range(6):
            fleet.answer()
        assert {len(plan.draft.rows) for plan in fleet.plans} == {2}
        await ends_right(fleet, *calls)

    run(body)


def test_pages_are_counted_by_owner_in_the_layout_that_shares_them_out() -> None:
    async def body() -> None:
        engine, fleet = make()
        assert engine._scheduler.census_by_rank() == []
        flip(fleet)
        assert [each[0].capacity for each in engine._scheduler.census_by_rank()] == [32, 16, 16]
        flip(fleet, PIPELINE)
        assert engine._scheduler.census_by_rank() == []

    run(body)


# ------------------------------------------------------------------------------------------------------ what is carried


def test_what_is_live_is_what_is_not_free() -> None:
    async def body() -> None:
        engine, fleet = make(running=2, checkpoints=4)
        done = asked(engine, tuple(n % 40 + 8 for n in range(40)), 3)
        await ends_right(fleet, done)
        call = asked(engine, (5, 6, 7), 30)
        fleet.answer()
        record = engine.flip_ask(TENSOR)
        while record.live is None:
            fleet.answer()
        scheduler = engine._scheduler
        (pages,) = scheduler.census()
        (bits,) = record.live.live.pages
        assert ones(bits) == pages.live + pages.protected + pages.cached == 64 - pages.free
        assert pages.cached == 2 and pages.live + pages.protected >= 1
        free = set(scheduler._pool._groups[0].free)
        assert not free & set(numbers(bits))
        lanes = {sequence.lane for sequence in scheduler.open_sequences()}
        states = set(numbers(record.live.live.states))
        assert lanes < states and states - lanes == {node.state for node in scheduler._states._kept.values()}
        await ends_right(fleet, call)

    run(body)


@pytest.mark.parametrize(("cache_bytes", "kept"), [(1 << 20, 6), (64 * 4, 4), (0, 0)])
def test_the_cache_is_dropped_beyond_its_bound_least_recently_used_first(cache_bytes: int, kept: int) -> None:
    async def body() -> None:
        engine, fleet = make(recurrent=False, checkpoints=0, flip=flip_limits(cache_bytes=cache_bytes))
        prompts = [(first,) * 33 for first in (11, 12, 13)]
        for prompt in prompts:
            await ends_right(fleet, asked(engine, prompt, 2))
        told = flip(fleet)
        assert told["live"]["rows"] == 16 * kept
        hits = []
        for prompt in reversed(prompts):
            call = asked(engine, prompt, 2)
            await ends_right(fleet, call)
            hits.append(call.stream.usage.cached_tokens)
        assert hits == [32 if n < kept // 2 else 0 for n in range(3)], "the newest stay"

    run(body)


def test_a_large_cache_is_dropped_a_part_in_each_turn_of_the_loop() -> None:
    """From the ask on; the flip goes on when all is dropped, and a turn is for others in between."""

    async def body() -> None:
        engine, fleet = make(
            recurrent=False, checkpoints=0, kv_tokens=16 * 700, chunk=160, flip=flip_limits(cache_bytes=64 * 10)
        )
        for first in range(8, 48):
            await ends_right(fleet, asked(engine, tuple((first + n) % 40 + 8 for n in range(16 * 15)), 2))
        cached = engine._scheduler._pool.cached
        before = cached()[0]
        assert before > 2 * 256
        record = engine.flip_ask(TENSOR)
        assert (before - cached()[0], record.state) == (256, "draining")
        fleet.answer_all()
        call = asked(engine)
        assert (before - cached()[0], record.state) == (256, "draining"), "others' turn"
        later, turns = fleet.timers.later, []
        engine._later = lambda seconds, what: later(seconds, lambda: (turns.append(cached()[0]), what())[1])
        fleet.timers.pass_(0.0)
        assert turns and cached()[0] == 10 and record.state == "preparing"
        assert all(high - low <= 256 for high, low in pairwise([before - 256, *turns, 10]))
        fleet.answer_all()
        assert record.state == "committed" and fleet.timers.waiting == 0
        await ends_right(fleet, call)

    run(body)


def test_no_census_is_taken_behind_each_page_that_is_dropped() -> None:
    """The drops run on the engine's loop, and a census is dearer than a drop."""

    async def body() -> None:
        engine, fleet = make(recurrent=False, checkpoints=0, flip=flip_limits(cache_bytes=64 * 2))
        for first in range(11, 31):
            await ends_right(fleet, asked(engine, (first,) * 33, 2))
        pool = engine._scheduler._pool
        assert pool.census()[0].cached == 40
        counts = 0

        class Counted(type(pool)):  # type: ignore[misc]
            def census(self) -> tuple[PageCensus, ...]:
                nonlocal counts
                counts += 1
                return super().census()

        pool.__class__ = Counted
        record = engine.flip_ask(TENSOR)
        fleet.answer_all()
        assert record.state == "committed" and record.live is not None and record.live.pages == (2,)
        assert counts < 10

    run(body)


def test_a_map_of_pages_has_a_bit_for_each_that_is_not_free() -> None:
    for capacity in (1, 7, 8, 9, 37):
        pool = PagePool([(capacity, 0)])
        assert pool.held(0) == bytes(-(-capacity // 8))
        taken = pool.take(capacity // 2)
        assert taken is not None and numbers(pool.held(0)) == sorted(taken[0])
        pool.take(capacity - capacity // 2)
        assert numbers(pool.held(0)) == list(range(capacity))


def test_checkpoints_count_and_go_with_their_nodes() -> None:
    async def body() -> None:
        engine, fleet = make(flip=flip_limits(cache_bytes=3 * 64 + 1000 - 1))
        await ends_right(fleet, asked(engine, (11,) * 60, 2))
        told = flip(fleet)
        assert (told["live"]["checkpoints"], told["live"]["rows"]) == (0, 32), "the last page went, and its state"

    run(body)


def test_what_does_not_fit_is_refused_with_both_numbers() -> None:
    async def body() -> None:
        engine, fleet = make(flip=flip_limits(transit_bytes=1000))
        call = asked(engine, max_tokens=4)
        fleet.answer()
        with pytest.raises(FlipRefused) as refused:
            engine.flip_ask(TENSOR)
        assert refused.value.code == "does_not_fit" and refused.value.device == "transit memory"
        assert refused.value.needed_mib == pytest.approx(1064 / 2**20, abs=1e-3)
        assert refused.value.available_mib == pytest.approx(1000 / 2**20, abs=1e-3)
        await ends_right(fleet, call)
        assert flip(fleet)["state"] == "committed", "what the cache keeps never stands in the way"

    run(body)


def test_in_unified_memory_nothing_is_carried_and_everything_fits() -> None:
    async def body() -> None:
        engine, fleet = make(flip=flip_limits(transit_bytes=0, cache_bytes=0, unified=True))
        await ends_right(fleet, asked(engine, (11,) * 33, 2))
        call = asked(engine)
        fleet.answer()
        told = flip(fleet)
        assert told["state"] == "committed" and {part["sent_bytes"] for part in told["ranks"]} == {0}
        assert told["live"]["rows"] > 32, "all of the cache stays"
        await ends_right(fleet, call)

    run(body)


# --------------------------------------------------------------------------------------------------------- what waits


def test_calls_queue_during_a_flip_and_go_on_after_it() -> None:
    async def body() -> None:
        engine, fleet = make()
        record = engine.flip_ask(TENSOR)
        call = asked(engine)
        assert [plan.kind for plan in fleet.plans] == [PREPARE]
        assert engine.snapshot().waiting == 1
        while not record.over:
            fleet.answer()
        await ends_right(fleet, call)
        assert call.stream.timings.flips_crossed == 1, "it was open when the flip was committed"

    run(body)


@pytest.mark.parametrize("answers", range(5))
def test_what_is_ended_during_a_flip_is_ended_behind_it_in_order(answers: int) -> None:
    """The reader is told at once; lane and pages are held until the flip that carries them is over (H70)."""

    async def body() -> None:
        engine, fleet = make()
        calls = [asked(engine, (n + 8,) * 20, 40) for n in range(3)]
        for _ in range(3):
            fleet.answer()
        ended: list[str] = []
        end = engine._scheduler.end
        engine._scheduler.end = lambda s, *why: (ended.append(s.call.prompt[0]), end(s, *why))[1]  # type: ignore[method-assign]
        record = engine.flip_ask(TENSOR)
        while fleet.plans and fleet.plans[0].kind not in FLIP_KINDS:
            fleet.answer()
        for _ in range(min(answers, 3)):
            fleet.answer()
        held = engine._scheduler.census()[0]
        for index in (2, 0):
            calls[index].aborted = True
            engine.abort(calls[index].stream, FinishReason.STOP if index else FinishReason.ABORT)
            engine.abort(calls[index].stream)
            assert calls[index].stream.finished
        if not record.over:
            assert ended == [] and engine._scheduler.census()[0] == held
        while not record.over:
            fleet.answer()
        assert record.state == "committed"
        assert ended == [10, 8]
        assert engine.snapshot().aborted == 1 and engine.snapshot().finished == 1
        fleet.answer_all()
        assert engine._scheduler.census()[0].live == 0
        for each in calls:
            await asyncio.wait_for(each.read(), 5)
        calls[1].check()
        assert engine._late_ends == []

    run(body)


def test_a_census_waits_for_the_end_of_a_flip() -> None:
    async def body() -> None:
        engine, fleet = make()
        record = engine.flip_ask(TENSOR)
        counting = asyncio.ensure_future(engine.census())
        await asyncio.sleep(0)
        while not record.over:
            assert not counting.done()
            fleet.answer()
        fleet.answer_all()
        assert (await counting)["ok"]

    run(body)


def test_a_census_on_its_way_is_waited_for() -> None:
    async def body() -> None:
        engine, fleet = make()
        counting = asyncio.ensure_future(engine.census())
        await asyncio.sleep(0)
        record = engine.flip_ask(TENSOR)
        assert record.state == "draining"
        fleet.answer()
        assert (await counting)["ok"] and record.state == "preparing"

    run(body)


def test_draining_a_server_ends_with_a_flip_on() -> None:
    async def body() -> None:
        engine, fleet = make()
        call = asked(engine, max_tokens=3)
        engine.flip_ask(TENSOR)
        draining = asyncio.ensure_future(engine.drain(5))
        await asyncio.sleep(0)
        fleet.answer_all()
        await draining
        await asyncio.wait_for(call.read(), 5)
        call.check()

    run(body)


# ------------------------------------------------------------------------------------------------------ what is refused


def refused(engine: Engine, to: str) -> str:
    with pytest.raises(FlipRefused) as error:
        engine.flip_ask(to)
    assert error.value.message
    return error.value.code


def test_a_flip_that_cannot_begin_says_why() -> None:
    async def body() -> None:
        engine, fleet = make()
        assert refused(engine, "sideways") == "bad_target"
        assert refused(engine, PIPELINE) == "already_there"
        engine.flip_ask(TENSOR)
        assert refused(engine, TENSOR) == refused(engine, PIPELINE) == "flip_running"
        fleet.lose()
        assert refused(engine, TENSOR) == "not_ready"
        assert len(engine.flip_records()) == 1

    run(body)


@pytest.mark.parametrize(
    ("why", "code"), [(None, "single_rank"), (NoFlip("does_not_fit", "too large", 9.0, 4.0, "cpu:1"), "does_not_fit")]
)
def test_a_fleet_of_one_layout_says_why_there_is_no_other(why: NoFlip | None, code: str) -> None:
    async def body() -> None:
        sizes: dict[str, Any] = {} if why is None else {"no_flip": why}
        engine = Engine(make()[1], EngineLimits(64, 256, 4, 3, 16, 0, 2, **sizes), clock=lambda: 1.0)
        with pytest.raises(FlipRefused) as error:
            engine.flip_ask(TENSOR)
        assert error.value.code == code
        if why is not None:
            assert (error.value.needed_mib, error.value.available_mib, error.value.device) == (9.0, 4.0, "cpu:1")
        assert engine.flip_records() == [] and engine.flip_record(1) is None and engine.snapshot().flip == {}

    run(body)


def test_the_last_64_records_are_kept() -> None:
    async def body() -> None:
        engine, fleet = make()
        for n in range(70):
            flip(fleet, (TENSOR, PIPELINE)[n % 2])
        assert [record.id for record in engine.flip_records()] == list(range(7, 71))
        assert engine.snapshot().flip["committed"] == 70

    run(body)


# ------------------------------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize(("at", "doing"), [("pack", "packing"), ("verify", "verifying")])
def test_one_no_ends_the_flip_for_all_and_costs_nobody_anything(at: str, doing: str) -> None:
    async def body() -> None:
        engine, fleet = make()
        call = asked(engine, max_tokens=20)
        fleet.answer()
        fleet.trouble = Trouble(at, "refuse")
        told = flip(fleet)
        assert (told["state"], told["reason"]) == ("abandoned", f"rank 1, {doing}: no room")
        assert [part["answer"] for part in told["ranks"]] == ["yes", "no", "yes"]
        assert ABANDON in fleet.kinds and COMMIT not in fleet.kinds
        snapshot = engine.snapshot()
        assert (snapshot.layout, snapshot.epoch, snapshot.flip["abandoned"]) == (PIPELINE, 0, {"refused": 1})
        await ends_right(fleet, call)
        assert (call.stream.timings.flips_crossed, fleet.restarts) == (0, 0)
        assert flip(fleet)["epoch"] == 2, "an epoch is not used twice"

    run(body)


def test_bytes_that_are_not_what_is_live_end_the_flip_before_its_commit() -> None:
    async def body() -> None:
        engine, fleet = make()
        call = asked(engine, max_tokens=20)
        fleet.answer()
        fleet.trouble = Trouble("pack", "lie")
        told = flip(fleet)
        assert told["state"] == "abandoned" and "bytes are packed of" in told["reason"]
        assert engine.snapshot().flip["abandoned"] == {"mismatch": 1}
        await ends_right(fleet, call)
        assert fleet.restarts == 0

    run(body)


@pytest.mark.parametrize("at", ["commit", "check"])
def test_a_miscount_behind_the_commit_costs_the_life_and_no_request(at: str, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        engine, fleet = make()
        call = asked(engine, max_tokens=20)
        fleet.answer()
        fleet.trouble = Trouble(at, "miscount")
        told = flip(fleet)
        assert told["state"] == "abandoned" and engine.state == "recovering"
        assert engine.snapshot().flip["abandoned"] == {"mismatch": 1}
        (lost,) = (event for event in engine.snapshot().events if event["kind"] == "worker_lost")
        assert lost["rank"] is None and caplog.messages[-1].startswith("the ranks are lost: flip 1: "), (
            "ended from here"
        )
        await recover(engine)
        assert (engine.snapshot().layout, fleet.restarts) == (PIPELINE, 1)
        await ends_right(fleet, call)
        assert call.stream.timings.restarts == 1

    run(body)


async def recover(engine: Engine) -> None:
    while engine.state == "recovering":
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("at", "state", "doing"),
    [
        ("drain", "abandoned", "draining"),
        ("pack", "abandoned", "packing"),
        ("verify", "abandoned", "verifying"),
        ("commit", "abandoned", "committing"),
        ("check", "committed", None),
    ],
)
@pytest.mark.parametrize("first", [PIPELINE, TENSOR])
def test_a_loss_at_any_step_ends_the_flip_and_loses_nothing(at: str, state: str, doing: str | None, first: str) -> None:
    """Behind the commit of all ranks the flip was committed, whatever comes after; the next life is in the resting
    layout in any case, under an epoch of its own."""

    async def body() -> None:
        engine, fleet = make()
        if first == TENSOR:
            flip(fleet)
        call = asked(engine, max_tokens=20)
        queued = asked(engine, (9, 9))
        fleet.answer()
        fleet.trouble = Trouble(at, "lose")
        record = engine.flip_ask(PIPELINE if first == TENSOR else TENSOR)
        while engine.state == "ready":
            fleet.answer()
        assert record.state == state
        assert record.reason is None if doing is None else f"rank 1 was lost, {doing}: at" in (record.reason or "")
        await recover(engine)
        assert engine.snapshot().layout == PIPELINE and engine.snapshot().epoch == record.epoch + 1
        assert call.stream.timings.flips_crossed == (state == "committed"), "of a life that is over too"
        await ends_right(fleet, call, queued)
        assert flip(fleet)["epoch"] == record.epoch + 2

    run(body)


def test_a_loss_while_a_refused_flip_is_undone() -> None:
    async def body() -> None:
        engine, fleet = make()
        call = asked(engine, max_tokens=20)
        fleet.answer()
        fleet.trouble = Trouble("verify", "refuse")
        record = engine.flip_ask(TENSOR)
        while fleet.kinds[-1] is not ABANDON:
            fleet.answer()
        fleet.lose()
        assert record.state == "abandoned" and "rank 1, verifying: no room" == record.reason
        await recover(engine)
        await ends_right(fleet, call)

    run(body)


def test_what_is_ended_in_a_flip_that_is_lost_stays_ended() -> None:
    async def body() -> None:
        engine, fleet = make()
        calls = [asked(engine, max_tokens=20) for _ in range(2)]
        fleet.answer()
        engine.flip_ask(TENSOR)
        engine.abort(calls[0].stream)
        fleet.lose()
        await recover(engine)
        assert len(engine._scheduler.open_sequences()) == 1
        await ends_right(fleet, calls[1])

    run(body)


# ------------------------------------------------------------------------------------------------------------ deadline


def test_a_drain_over_its_deadline_gives_the_flip_up_and_serving_goes_on() -> None:
    async def body() -> None:
        engine, fleet = make(flip=flip_limits(park_deadline_s=30.0))
        call = asked(engine)
        record = engine.flip_ask(TENSOR)
        fleet.timers.pass_(29.9)
        assert not record.over
        fleet.timers.pass_(0.2)
        assert (record.state, record.why) == ("abandoned", "park_deadline")
        assert "30 s" in (record.reason or "")
        assert engine.snapshot().flip["abandoned"] == {"park_deadline": 1}
        await ends_right(fleet, call)
        assert not set(fleet.kinds) & set(FLIP_KINDS), "no rank heard of it"
        assert fleet.timers.waiting == 0

    run(body)


def test_the_deadline_is_for_the_drain_alone() -> None:
    async def body() -> None:
        engine, fleet = make(flip=flip_limits(park_deadline_s=30.0))
        record = engine.flip_ask(TENSOR)
        fleet.timers.pass_(100.0)
        assert record.state == "preparing" and fleet.timers.waiting == 0
        while not record.over:
            fleet.answer()
        assert record.state == "committed"

    run(body)


def test_a_deadline_of_zero_is_none() -> None:
    async def body() -> None:
        engine, fleet = make(flip=flip_limits(park_deadline_s=0.0))
        asked(engine)
        record = engine.flip_ask(TENSOR)
        fleet.timers.pass_(1e6)
        assert record.state == "draining" and fleet.timers.waiting == 0

    run(body)


# ------------------------------------------------------------------------------------------------------- unarmed steps


@pytest.mark.parametrize("policy", ["manual", "auto"])
def test_steps_without_a_flip_do_no_flip_work(policy: str) -> None:
    """Ten thousand of them, with calls that come and go, and in `auto` a policy that looks ten times a second."""

    async def body() -> None:
        flips = flip_limits(policy=policy, estimates={PIPELINE: (100.0, 10.0), TENSOR: (90.0, 9.0)}, idle_s=1e9)
        engine, fleet = make(flip=flips, kv_tokens=4096, recurrent=False)
        steps = 0
        while steps < 10_000:
            if len(engine._streams) < 3:
                asked(engine, (9, steps % 40, steps // 40 % 40), 40)
            fleet.answer()
            fleet.timers.pass_(0.001)
            steps += 1
        snapshot = engine.snapshot()
        assert snapshot.flip["unarmed_work_count"] == 0
        assert snapshot.plans_acked == 10_000 and not set(fleet.kinds) & set(FLIP_KINDS)

    run(body)


@pytest.mark.parametrize("work", ["_look_now", "_hold", "advance"])
def test_flip_work_in_a_step_would_be_counted(work: str) -> None:
    """The counter can count: the policy looking from within a step, and a drain that is asked about without a flip."""

    async def body() -> None:
        engine, fleet = make(flip=flip_limits(policy="auto"))
        driver = engine._flips
        assert driver is not None
        apply = engine._scheduler.apply
        does: dict[str, Callable[[], object]] = {
            "_look_now": driver._look_now,
            "_hold": lambda: driver._hold() or driver._count_work(),
            "advance": lambda: engine.flip_ask(TENSOR),
        }
        engine._scheduler.apply = lambda *a: (does[work](), apply(*a))[1]  # type: ignore[method-assign]
        asked(engine)
        fleet.answer()
        assert engine.snapshot().flip["unarmed_work_count"] > 0

    run(body)


def test_penalties_and_seeds_travel_with_their_lane() -> None:
    """What a rank knows of a lane is not sent again behind a flip: the lane is the same."""

    async def body() -> None:
        engine, fleet = make()
        call = ask(max_tokens=20)
        settings = Sampling(seed=5, presence_penalty=1.0)
        stream = engine.submit(type(call)("r", call.prompt, settings, 20, call.end_tokens))
        fleet.answer()
        flip(fleet)
        assert all(not plan.draft.new and not plan.draft.drop for plan in fleet.plans)
        each = Asked(call, stream)
        await ends_right(fleet, each)

    run(body)
