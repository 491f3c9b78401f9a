"""Rounds of drafting in the schedule: random traces against a rank that drafts, and what each bound of a round is for.

The rank of `test_engine_traces` stores a row of every draft, right or wrong, keeps of a round what was drawn, and
asserts that the next row goes on exactly there, from the state of that place. So a round that is counted wrongly, a
page that is not there or a state saved at another place shows at once, and a wrong answer is known without a model.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from engine_flip_rig import TENSOR, Asked, FlipTrace, SimFleet, ask, flip_limits, limits, run
from test_engine_flip_traces import ScheduleTrace
from test_engine_traces import END, Trace, answer
from test_engine_traces import ask as add

from backends.base import PAGE_LEN
from homeserve.engine.calibration import Calibration
from homeserve.engine.decoding import BadRound
from homeserve.engine.request import FinishReason, GenerateCall
from homeserve.engine.sequence import Sequence
from homeserve.engine.sizes import plan_bytes_limit, result_bytes_limit
from homeserve.engine.speculation import SOUND_ROUNDS, Drafting
from homeserve.engine.states import SPACING
from homeserve.wire import codec
from homeserve.wire.records import LaneRows, Logprobs, Plan, PlanKind, Result, Sample, Sampling, pack_ints


class DraftTrace(Trace):
    """A trace whose rank drafts, well or badly for a while."""

    def __init__(self, seed: int, **sizes: Any) -> None:
        sizes.setdefault("drafts", 1 + seed % 8)
        sizes.setdefault("drafts_adapt", seed % 3 == 0)
        super().__init__(seed, **sizes)
        self.rounds = self.accepted = 0

    def acknowledge(self) -> None:
        self.rank.luck = self.random.choice([self.rank.luck] * 8 + [0.0, 0.7, 1.0])
        before = self.rank.rounds, self.rank.accepted
        super().acknowledge()
        self.rounds += self.rank.rounds - before[0]
        self.accepted += self.rank.accepted - before[1]

    def issue(self) -> bool:
        issued = super().issue()
        if issued:
            plans = [draft for _, draft in self.flight]
            assert len(plans) == 1 or not any(draft.rounds for draft in plans), "something beside a plan with rounds"
            assert all(row.drafts <= self.limits.drafts for draft in plans for row in draft.rows)
        return issued


@pytest.mark.parametrize("seed", range(150))
def test_random_traces_with_drafts_end_right(seed: int) -> None:
    """Aborts, stalls, preemption, losses, windows, groups, prefix hits: every answer is that of plain decoding."""
    rounds = accepted = 0
    for part in range(4):
        windows = ((), (20,), (), (1, 33))[part]
        trace = DraftTrace(
            500 * seed + 7 * part, recurrent=part % 2 == 0, windows=windows, decode_groups=1 + (seed + part) % 5 // 4
        )
        trace.run()
        counts = trace.scheduler.drafting.totals
        assert counts.rounds <= trace.rounds and counts.accepted <= trace.accepted
        rounds, accepted = rounds + counts.rounds, accepted + counts.accepted
    assert rounds > 0 and accepted > 0


@pytest.mark.parametrize("seed", range(60))
def test_random_schedules_with_flips_and_drafts_end_right(seed: int) -> None:
    """The same with flips: the tensor layout drafts, the other one does not."""
    for part in range(3):
        trace = ScheduleTrace(
            90_000 + 10 * seed + part, flip_drafts=1 + seed % 4, recurrent=part != 1,
            windows=((), (20,), (64,))[part], drafts_adapt=part == 2,
        )  # fmt: skip
        trace.run(120)
        drafting = trace.scheduler.drafting
        assert not drafting.totals.rounds or trace.flips, "drafts before the first flip"
        assert drafting.first.rounds <= drafting.carried.rounds <= drafting.totals.rounds


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_to_drafts_nothing_is_lost(seed: int) -> None:
    """An engine whose tensor layout drafts: refusals, lies and losses at every step of a flip."""

    async def body() -> None:
        await FlipTrace(seed, flip=flip_limits(drafts=3), drafts_adapt=seed % 2 == 0).run()

    run(body)


# ---------------------------------------------------------------------------------------------------------- a round


def drafting(drafts: int = 3, **sizes: Any) -> Trace:
    """One or two at a time, every draft right, always as many as may be."""
    more = {"context": 1024, "kv_tokens": 2048, "running": 2, "chunk": 64, **sizes}
    trace = Trace(1, losses=False, plans_in_flight=2, prefill_delay=0, drafts=drafts, drafts_adapt=False, **more)
    trace.rank.luck = 1.0
    return trace


def endless(trace: Trace, length: int, max_tokens: int = 500, **more: Any) -> Sequence:
    """A call that no end token ends."""
    prompt = tuple(8 + n % 40 for n in range(length))
    sequence = trace.scheduler.add(GenerateCall("r", prompt, Sampling(), max_tokens, frozenset(), **more))
    trace.calls[sequence.key], trace.shown[sequence.key] = sequence, []
    return sequence


def step(trace: Trace) -> tuple[LaneRows, ...]:
    assert trace.issue()
    rows = tuple(trace.flight[-1][1].rows)
    trace.acknowledge()
    return rows


def test_a_round_begins_with_the_known_token_and_goes_on_behind_what_was_drawn() -> None:
    trace = drafting()
    sequence = endless(trace, 20)
    step(trace)
    (row,) = step(trace)
    assert (row.start, row.drafts, list(memoryview(row.tokens).cast("i"))) == (20, 3, [sequence.tokens[20]])
    assert (sequence.issued, sequence.pending, sequence.generated) == (24, 0, 5)
    trace.rank.luck = 0.0
    step(trace)
    assert (sequence.issued, sequence.generated) == (25, 6)
    (row,) = step(trace)
    assert row.start == 25
    counts = sequence.drafted.counts
    assert (counts.rounds, counts.drafted, counts.accepted, counts.accept_len) == (3, 9, 3, 2.0)
    assert counts.by_position == pytest.approx([1 / 3] * 3)


def test_nothing_runs_ahead_of_a_round_and_plain_rows_do() -> None:
    trace = drafting()
    endless(trace, 20)
    step(trace)
    assert trace.issue() and not trace.issue()
    trace.acknowledge()
    plain = drafting(drafts=0)
    endless(plain, 20)
    assert plain.issue() and plain.issue()


def test_prompts_that_go_alone_do_not_wait_for_a_plan_that_drafts() -> None:
    """With a prefill delay, plans without decode rows run ahead of each other while somebody would draft."""
    trace = Trace(
        1, losses=False, plans_in_flight=2, prefill_delay=3, drafts=3, drafts_adapt=False, context=1024, kv_tokens=2048,
        running=2, chunk=64, decode_groups=1, recurrent=False, windows=(),
    )  # fmt: skip
    trace.rank.luck = 1.0
    endless(trace, 20)
    step(trace), step(trace)
    endless(trace, 400)
    assert trace.issue() and trace.issue(), "the second chunk waits for the first"
    assert [[len(row.tokens) // 4 for row in draft.rows] for _, draft in trace.flight] == [[64], [64]]
    trace.acknowledge()
    assert trace.issue() and not trace.issue(), "three went without: the next one has rounds"
    trace.acknowledge()
    assert not trace.issue(), "which wait for all of them"
    trace.acknowledge()
    assert trace.issue() and trace.flight[-1][1].rounds and not trace.issue()


def test_a_call_without_drafts_has_none() -> None:
    trace = drafting()
    endless(trace, 20, drafts=False)
    for _ in range(5):
        assert all(row.drafts == 0 for row in step(trace))


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_a_round_draws_no_more_than_is_asked_for(max_tokens: int) -> None:
    trace = drafting(drafts=4)
    sequence = endless(trace, 20, max_tokens)
    most = 0
    while not trace.scheduler.idle:
        most = max(most, *(row.start + 1 + row.drafts for row in step(trace)))
    assert len(trace.shown[sequence.key]) == max_tokens and trace.finish[sequence.key] is FinishReason.LENGTH
    assert most <= 20 + max_tokens


def test_a_round_stays_within_the_context() -> None:
    trace = drafting(drafts=4, context=40)
    sequence = endless(trace, 30)
    rows = []
    while not trace.scheduler.idle:
        rows += step(trace)
    assert len(sequence.tokens) == 40 and trace.finish[sequence.key] is FinishReason.LENGTH
    assert max(row.start + row.drafts for row in rows) < 40


def test_an_end_token_within_a_round_is_the_end_and_the_rest_is_nobodys() -> None:
    prompt = next(p for n in range(99) if len(answer(p := (n, 3, 1, 4), 40)) % 5 == 2)
    right = answer(prompt, 40)
    trace = drafting(drafts=4)
    sequence = add(trace, prompt, 40)
    trace.finish_all()
    assert trace.shown[sequence.key] == right and trace.finish[sequence.key] is FinishReason.STOP
    counts = sequence.drafted.counts
    assert counts.rounds + counts.accepted == len(right), "the first token is the prompt's; the end token counts"
    assert trace.rank.accepted > counts.accepted


def test_an_abort_gives_pages_back_when_its_round_is_back() -> None:
    trace = drafting()
    sequence = endless(trace, 14)
    step(trace)
    trace.rank.luck = 0.0  # nothing is ever written to the second page
    assert trace.issue() and len(trace.flight[0][1].rounds) == 1
    trace.note(trace.scheduler.end(sequence, FinishReason.ABORT))
    assert trace.scheduler.census()[0].live == 2
    trace.acknowledge()
    (census,) = trace.scheduler.census()
    assert census.live == census.protected == 0 and trace.scheduler.idle
    assert sequence.drafted.counts.rounds == 0, "a round that nobody was given"


# ---------------------------------------------------------------------------------------------------------- reserve


@pytest.mark.parametrize(("pages", "drafts"), [(3, [1, 1]), (4, [8, 1]), (5, [8, 8]), (6, [8, 8])])
def test_a_round_displaces_nobody(pages: int, drafts: list[int]) -> None:
    """Two that have a page each, of which one position is left beside the known token's: the others' next page is never
    taken for drafts."""
    trace = drafting(drafts=8, kv_tokens=pages * PAGE_LEN, context=256, prefix_cache=False)
    endless(trace, 14, 60), endless(trace, 14, 60)
    step(trace)
    assert [row.drafts for row in step(trace)] == drafts
    assert trace.scheduler.preemptions == 0


def test_reserved_pages_are_the_next_rows_pages() -> None:
    """Rounds of which nothing is drawn: the tables grow with the text, not with the drafts."""
    trace = drafting(drafts=8)
    trace.rank.luck = 0.0
    sequence = endless(trace, 20)
    for _ in range(60):
        step(trace)
        assert len(sequence.tables[0]) * PAGE_LEN < sequence.issued + 9 + PAGE_LEN
        (census,) = trace.scheduler.census()
        assert census.live + census.protected == len(sequence.tables[0])


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("drafts", [1, 3, 8])
def test_rounds_stop_before_a_checkpoint_and_a_plain_row_saves_it(drafts: int) -> None:
    trace = drafting(drafts=drafts, recurrent=True, checkpoints=4, prefix_cache=True)
    sequence = endless(trace, 50, 300)
    saved = []
    while not trace.scheduler.idle:
        for row in step(trace):
            assert row.start // SPACING == (row.start + row.drafts) // SPACING or not row.drafts
            if row.save >= 0 and row.start >= 50:
                saved.append(row.start + 1)
    assert saved == [128, 256]
    del trace.calls[sequence.key]  # its answer goes on behind the end token
    follower = trace.scheduler.add(GenerateCall("r", tuple(sequence.tokens[:270]), Sampling(), 3, frozenset({END})))
    trace.calls[follower.key], trace.shown[follower.key] = follower, []
    trace.finish_all()
    assert follower.hit_tokens == 256 and trace.rank.restored == 1


def test_without_checkpoints_nothing_stops_a_round() -> None:
    trace = drafting(recurrent=True, checkpoints=0)
    endless(trace, 50, 300)
    rows = [row for _ in range(60) for row in step(trace)]
    assert all(row.drafts == 3 for row in rows[1:])


# ------------------------------------------------------------------------------------------------------------- losses


def test_a_suspect_is_tried_without_drafts_until_it_is_past_the_whole_round() -> None:
    trace = drafting()
    sequence = endless(trace, 20)
    step(trace), step(trace)
    assert trace.issue() and sequence.round == 3
    reach = sequence.issued + 3
    trace.rank, trace.flight = trace.new_rank(), type(trace.flight)()
    trace.rank.luck = 1.0
    trace.note(trace.scheduler.lose_fleet())
    assert sequence.suspect and sequence.died_at == reach and sequence.round == 0
    while sequence.suspect:
        assert all(row.drafts == 0 for row in step(trace))
    assert sequence.issued >= reach
    assert not any(row.drafts for row in step(trace) + step(trace)), "it never drafts again"
    other = endless(trace, 20)
    rows = [row for _ in range(3) for row in step(trace)]
    assert {row.request for row in rows if row.drafts} == {other.key}


def kills_by_drafts(trace: Trace, outside: bool = False) -> int:
    """Losses until all is done, of a rank that no round comes back from."""
    losses = 0
    for _ in range(400):
        if not trace.issue():
            assert trace.scheduler.idle
            return losses
        if trace.flight[-1][1].rounds:
            losses += 1
            trace.rank, trace.flight = trace.new_rank(), type(trace.flight)()
            trace.note(trace.scheduler.lose_fleet(why="rank 0 was killed", outside=outside))
        else:
            trace.acknowledge()
    raise AssertionError(f"{losses} lives, and no end")


def test_what_kills_workers_by_its_drafts_alone_is_answered_without_them() -> None:
    trace = drafting()
    sequence = endless(trace, 20, 30)
    assert kills_by_drafts(trace) == 1
    assert trace.finish[sequence.key] is FinishReason.LENGTH and len(trace.shown[sequence.key]) == 30
    assert not trace.scheduler.drafting.off_because, "it may have been that request"


@pytest.mark.parametrize("adapts", [True, False])
def test_with_the_second_life_lost_in_a_round_drafting_is_off(adapts: bool) -> None:
    trace = drafting(running=1)
    trace.scheduler.drafting.adapts = adapts
    calls = [endless(trace, 20 + n, 30) for n in range(5)]
    assert kills_by_drafts(trace) == 2
    assert all(trace.finish[call.key] is FinishReason.LENGTH for call in calls)
    because = "2 times a worker was lost while it drafted; the last time: rank 0 was killed"
    assert trace.scheduler.drafting.off_because == because


@pytest.mark.parametrize(("rounds", "off"), [(SOUND_ROUNDS - 1, True), (SOUND_ROUNDS, False)])
def test_losses_with_many_sound_rounds_between_them_are_no_reason_to_stop_drafting(rounds: int, off: bool) -> None:
    drafting = Drafting(3)
    sequence = drafting.begin()
    for _ in range(3):
        drafting.lost("rank 0 was killed")
        if drafting.off_because:
            break
        for _ in range(rounds):
            drafting.count(sequence, 3, 2)
    assert bool(drafting.off_because) == off


def test_a_loss_from_outside_bars_no_drafts() -> None:
    trace = drafting()
    sequence = endless(trace, 20, 300)
    for _ in range(3):
        while not (trace.issue() and trace.flight[-1][1].rounds):
            trace.acknowledge()
        trace.rank, trace.flight = trace.new_rank(), type(trace.flight)()
        trace.note(trace.scheduler.lose_fleet(outside=True))
    assert not sequence.barred and not trace.scheduler.drafting.off_because


def test_a_rank_that_draws_what_cannot_be_is_not_believed() -> None:
    for bad in (
        lambda at: [],
        lambda at: [at + 1],
        lambda at: [at, at + 1, at + 2, at + 3, at + 4],
        lambda at: [at, at],
    ):
        trace = drafting()
        sequence = endless(trace, 20)
        step(trace)
        trace.issue()
        seq, draft = trace.flight.popleft()
        samples = [Sample(sequence.lane, sequence.key, place, 9) for place in bad(sequence.issued)]
        with pytest.raises(BadRound, match="drew tokens at .* in a round of 3 drafts at position 20"):
            trace.scheduler.apply(seq, samples)
        assert trace.scheduler.in_rounds() == [sequence], "it is still owed"


# ----------------------------------------------------------------------------------------------------------- an engine


def engine_of(drafts: int = 3, **sizes: Any) -> SimFleet:
    """Its tensor layout drafts, always as many as may be, and every draft is right."""
    fleet = SimFleet(limits(flip=flip_limits(drafts=drafts), drafts_adapt=False, **sizes))
    fleet.rank.luck = 1.0
    return fleet


def flip(fleet: SimFleet, to: str) -> dict[str, Any]:
    record = fleet.engine.flip_ask(to)
    while not record.over:
        fleet.answer()
    return record.as_json()


def test_a_request_is_drafted_where_the_layout_drafts_and_told_what_came_of_it() -> None:
    async def body() -> None:
        fleet = engine_of()
        engine = fleet.engine
        call = Asked(ask((3, 1, 4, 1, 5), 60), engine.submit(ask((3, 1, 4, 1, 5), 60)))
        for _ in range(4):
            fleet.answer()
        assert call.stream.drafts.rounds == 0 and engine.drafting.totals.rounds == 0
        told = flip(fleet, TENSOR)
        assert told["live"]["draft_rows"] == told["live"]["rows"] > 0
        fleet.answer()
        assert (call.stream.drafts.rounds, call.stream.drafts.accepted, call.stream.drafts.carried) == (1, 3, 1)
        new = Asked(ask((2, 7, 1), 40), engine.submit(ask((2, 7, 1), 40)))
        fleet.answer_all()
        for each in (call, new):
            await each.read()
            each.check()
        assert new.stream.drafts.carried == 0 < new.stream.drafts.rounds
        drafting = engine.drafting
        assert (drafting.most, drafting.adapts) == (3, False)
        assert drafting.carried.rounds == call.stream.drafts.rounds and drafting.first.rounds == 1
        assert drafting.uncarried.rounds == new.stream.drafts.rounds
        assert drafting.first.accept_len == 4.0, "full acceptance on its first step"

    run(body)


def test_rows_of_a_block_that_is_not_there_are_not_counted() -> None:
    async def body() -> None:
        fleet = engine_of(drafts=0)
        engine = fleet.engine
        call = Asked(ask(), engine.submit(ask()))
        fleet.answer()
        assert flip(fleet, TENSOR)["live"]["draft_rows"] == 0
        fleet.answer_all()
        await call.read()
        assert call.stream.drafts.rounds == engine.drafting.totals.rounds == engine.drafting.most == 0

    run(body)


def test_a_loss_in_a_round_loses_nothing_and_nothing_is_carried_any_more() -> None:
    async def body() -> None:
        fleet = engine_of()
        engine = fleet.engine
        call = Asked(ask((3, 1, 4, 1, 5), 60), engine.submit(ask((3, 1, 4, 1, 5), 60)))
        fleet.answer()
        flip(fleet, TENSOR)
        fleet.answer()
        assert fleet.plans[-1].draft.rows[0].drafts == 3
        carried = engine.drafting.carried.rounds
        fleet.lose()
        while engine.state == "recovering":
            await asyncio.sleep(0)
        fleet.rank.luck = 1.0
        fleet.answer()
        flip(fleet, TENSOR)
        fleet.answer_all()
        await call.read()
        call.check()
        assert engine.drafting.carried.rounds > carried and engine.drafting.first.rounds == 2

    run(body)


def test_a_rank_that_answers_a_round_with_what_cannot_be_is_lost_and_not_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        fleet = engine_of()
        engine = fleet.engine
        call = Asked(ask((3, 1, 4, 1, 5), 60), engine.submit(ask((3, 1, 4, 1, 5), 60)))
        fleet.answer()
        flip(fleet, TENSOR)
        honest = fleet._results

        def twice(*asked: Any) -> tuple[Result, ...]:
            *others, last = honest(*asked)
            return (*others, msgspec.structs.replace(last, samples=last.samples + last.samples))

        monkeypatch.setattr(fleet, "_results", twice)
        assert fleet.plans[-1].draft.rows[0].drafts == 3
        fleet.answer()
        monkeypatch.setattr(fleet, "_results", honest)
        assert engine.state == "recovering" and engine.failure is None
        while engine.state == "recovering":
            await asyncio.sleep(0)
        fleet.answer()
        flip(fleet, TENSOR)
        fleet.answer_all()
        await call.read()
        call.check()
        assert fleet.restarts == 1 and call.stream.drafts.rounds == 0
        events = {event["kind"]: event for event in engine.snapshot().events}
        assert events["worker_lost"]["rank"] == 2 and "in a round of 3 drafts" in events["worker_lost"]["text"]
        assert "drafts_barred" in events and "drafting_off" not in events

    run(body)


def test_the_calibration_request_does_not_draft() -> None:
    call = Calibration(limits())._call(200)
    assert not call.drafts and ask().drafts


def test_plan_times_count_what_was_drawn() -> None:
    async def body() -> None:
        fleet = engine_of()
        engine = fleet.engine
        call = Asked(ask((3, 1, 4, 1, 5), 40), engine.submit(ask((3, 1, 4, 1, 5), 40)))
        fleet.answer()
        flip(fleet, TENSOR)
        fleet.answer_all()
        await call.read()
        times = [plan for plan in engine.snapshot().plans if plan.drafts]
        assert times and all((plan.rows, plan.prompt_rows) == (1, 0) for plan in times)
        counts = engine.drafting.totals
        assert sum(plan.drafts for plan in times) == counts.drafted
        assert sum(plan.drawn for plan in times) == fleet.rank.rounds + fleet.rank.accepted

    run(body)


@pytest.mark.parametrize("drafts", [0, 3, 8])
def test_rings_hold_the_largest_round(drafts: int) -> None:
    """Every lane with as many samples as it may draw, each with all the log-probabilities there are."""
    sizes = limits(flip=flip_limits(drafts=drafts), running=64)
    assert sizes.drafts == 0 and sizes.most_drafts == drafts
    top = tuple((150_000 + n, -12.345678) for n in range(20))
    entry = Logprobs(150_000, -1.2345678, top)
    samples = tuple(Sample(lane, 2**40, 100_000 + n, 150_000, entry) for lane in range(64) for n in range(1 + drafts))
    assert len(codec.encode(Result(0, 2**40, 9, samples=samples))) < result_bytes_limit(sizes)
    pages = pack_ints([2**30] * (1 + 256 // PAGE_LEN))
    rows = tuple(LaneRows(lane, 2**40, 255, pack_ints([1]), pages, True, drafts=drafts) for lane in range(64))
    plan = Plan(2**40, 9, PlanKind.DECODE, 1, rows=rows)
    assert len(codec.encode(plan)) < plan_bytes_limit(sizes)
    assert plan_bytes_limit(sizes) == plan_bytes_limit(limits(flip=flip_limits(), running=64)), "no page beyond the end"


def test_a_plan_takes_from_the_end_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause in front of it counts: a plan with drafts cannot be issued ahead. A first one has none."""

    async def body() -> None:
        fleet = engine_of()
        took: list[float] = []
        apply, results = fleet.engine._scheduler.apply, fleet._results

        def waited(*asked: Any) -> tuple[Result, ...]:
            found = zip(results(*asked), (900, 600, 700), strict=True)
            times = 10**6 + 1300 * fleet.seq
            return tuple(msgspec.structs.replace(each, began_us=times, busy_us=busy) for each, busy in found)

        def noted(seq: int, samples: Any, seconds: float = 0.0) -> Any:
            took.append(seconds)
            return apply(seq, samples, seconds)

        monkeypatch.setattr(fleet, "_results", waited)
        monkeypatch.setattr(fleet.engine._scheduler, "apply", noted)
        flip(fleet, TENSOR)
        call = Asked(ask((3, 1, 4), 12), fleet.engine.submit(ask((3, 1, 4), 12)))
        fleet.answer_all()
        await call.read()
        assert len(took) > 2 and took == pytest.approx([0.0009, *[0.0013] * (len(took) - 1)])

    run(body)
