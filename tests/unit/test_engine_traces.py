"""The scheduler under random traces, against a simulated rank that remembers what it wrote where.

The rank keeps, for every slot, which token of which history was stored there last. A row at position p may only be
computed when the slots of positions 0..p of its sequence hold exactly that sequence's tokens: a page given to two
owners, freed too early, shared wrongly or left out of a table shows as wrong content at once. Its "model" draws the
next token as a function of all tokens before, so a right answer is known without the scheduler.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest

from backends.base import PAGE_LEN
from budget.wish import window_slots
from homeserve.engine.request import EngineLimits, FinishReason, GenerateCall
from homeserve.engine.scheduler import Draft, Emit, Scheduler
from homeserve.engine.sequence import Sequence
from homeserve.engine.states import StateCensus
from homeserve.wire.records import LaneRows, Sample, Sampling, unpack_ints

END = 7
PLACES = ("capacity", "free", "live", "protected", "cached")
VOCAB = 50


def digest(tokens: Iterable[int], before: int = 0) -> int:
    """Stands for a whole history of tokens; the simulated model draws `digest % VOCAB` next."""
    return zlib.crc32(array("i", tokens).tobytes(), before)


def answer(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """What a sequence must yield, by definition."""
    history = digest(prompt)
    shown: list[int] = []
    while len(shown) < max_tokens and (token := history % VOCAB) != END:
        history = digest([token], history)
        shown.append(token)
    return shown


def longest_skip(limits: EngineLimits) -> int:
    """Plans in a row that may leave a decode row out: all but one of a round of its group."""
    return (limits.prefill_delay + 1) * limits.decode_groups - 1


@dataclass
class Lane:
    request: int
    tables: list[list[int]]
    history: list[tuple[int, int]] = field(default_factory=list)
    """(token, digest of everything up to it) by position."""
    last: int = -1
    state: tuple[int, int] = (0, 0)
    """The recurrent state: (positions computed, digest of their tokens)."""

    def slot(self, group: int, position: int) -> tuple[int, int]:
        page = self.tables[group][position // PAGE_LEN]
        assert page >= 0, "a row reads or writes a page that is nobody's"
        return group, page * PAGE_LEN + position % PAGE_LEN


class Rank:
    """Runs drafts in order, as a worker does. Of what it drafts in a round, `luck` is the share that is right."""

    def __init__(self, recurrent: bool = False, windows: tuple[int, ...] = (0,), seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.luck = 0.7
        self.rounds = self.accepted = 0
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}
        self.windows = windows
        self.lanes: dict[int, Lane] = {}
        self.checkpoints: dict[int, tuple[int, int]] = {}
        self.recurrent = recurrent
        self.restored = 0

    def run(self, draft: Draft) -> list[Sample]:
        for lane in draft.drop:
            del self.lanes[lane]
        for new in draft.new:
            assert new.lane not in self.lanes, "a lane was given out twice"
            self.lanes[new.lane] = Lane(new.request, [[] for _ in self.windows])
            if new.restore >= 0:
                self.lanes[new.lane].state = self.checkpoints[new.restore]
                self.restored += 1
        # As backends do: every row of a plan is stored before any is read.
        for rows in draft.rows:
            self._append_pages(rows)
        for rows in draft.rows:
            self._store(rows)
        samples = [sample for rows in draft.rows for sample in self._read(rows)]
        for rows in draft.rows:
            if rows.save >= 0:
                self.checkpoints[rows.save] = self.lanes[rows.lane].state
        return samples

    def _append_pages(self, rows: LaneRows) -> None:
        lane = self.lanes[rows.lane]
        assert lane.request == rows.request
        pages = unpack_ints(rows.pages)
        count = len(pages) // len(self.windows)
        for group, table in enumerate(lane.tables):
            table.extend(pages[group * count : (group + 1) * count])

    def _store(self, rows: LaneRows) -> None:
        lane = self.lanes[rows.lane]
        inputs = list(unpack_ints(rows.tokens)) if rows.tokens else [lane.last]
        assert not lane.history or rows.start == len(lane.history), "rows do not go on where the last ones ended"
        while len(lane.history) < rows.start:  # a prefix hit: the history is what the pages say
            lane.history.append(self.slots[lane.slot(0, len(lane.history))])
        for token in inputs:
            before = lane.history[-1][1] if lane.history else 0
            for group in range(len(self.windows)):
                self.slots[lane.slot(group, len(lane.history))] = (token, digest([token], before))
            lane.history.append((token, digest([token], before)))
        if rows.drafts:
            assert len(inputs) == 1 and rows.sample and rows.save < 0 and rows.prompt_logprobs < 0
            self._store_drafts(lane, rows.drafts)

    def _store_drafts(self, lane: Lane, drafts: int) -> None:
        """A chain of guesses; a row of each is stored, right or wrong."""
        for _ in range(drafts):
            before = lane.history[-1][1]
            token = (before + (self.random.random() >= self.luck)) % VOCAB
            for group in range(len(self.windows)):
                self.slots[lane.slot(group, len(lane.history))] = (token, digest([token], before))
            lane.history.append((token, digest([token], before)))

    def _read(self, rows: LaneRows) -> list[Sample]:
        lane = self.lanes[rows.lane]
        for group, window in enumerate(self.windows):
            first = max(0, rows.start - window + 1) if window else 0
            stored = [self.slots[lane.slot(group, position)] for position in range(first, len(lane.history))]
            assert stored == lane.history[first:], "a row reads foreign KV"
        if self.recurrent:
            before = lane.history[rows.start - 1][1] if rows.start else 0
            assert lane.state == (rows.start, before) or not rows.start, "rows go on from a state of another place"
        count = 1
        if rows.drafts:
            while count <= rows.drafts and lane.history[rows.start + count][0] == self._next(lane, rows.start + count):
                count += 1
            del lane.history[rows.start + count :]
            self.rounds, self.accepted = self.rounds + 1, self.accepted + count - 1
        lane.state = (len(lane.history), lane.history[-1][1])
        if not rows.sample:
            return []
        end = len(lane.history)
        lane.last = self._next(lane, end)
        places = range(end - count + 1, end + 1)
        return [Sample(rows.lane, rows.request, place, self._next(lane, place)) for place in places]

    @staticmethod
    def _next(lane: Lane, position: int) -> int:
        """What is drawn for a position."""
        return lane.history[position - 1][1] % VOCAB


class Trace:
    """One random history of calls, results, aborts, stalls and lost workers."""

    def __init__(self, seed: int, *, losses: bool = True, **limits) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        self.limits = EngineLimits(
            context=limits.get("context", 256),
            kv_tokens=limits.get("kv_tokens", pick([128, 256, 512, 1024])),
            running=limits.get("running", pick([1, 2, 4, 8])),
            waiting=64,
            chunk=limits.get("chunk", pick([1, 7, 16, 40])),
            prefill_delay=limits.get("prefill_delay", pick([0, 0, 1, 3])),
            plans_in_flight=limits.get("plans_in_flight", pick([1, 2, 3])),
            prefix_cache=limits.get("prefix_cache", pick([True, True, False])),
            recurrent=limits.get("recurrent", False),
            checkpoints=limits.get("checkpoints", pick([0, 1, 2, 5])),
            decode_groups=limits.get("decode_groups", 1),
            token_vector=limits.get("token_vector", ()),
            drafts=limits.get("drafts", 0),
            drafts_adapt=limits.get("drafts_adapt", True),
        )
        if windows := limits.get("windows", ()):
            sizes = self.limits.kv_tokens, self.limits.running, self.limits.chunk
            self.limits = replace(self.limits, windows=tuple((each, window_slots(each, *sizes)) for each in windows))
        self.losses = losses
        self.scheduler = Scheduler(self.limits)
        self.rank = self.new_rank()
        self.flight: deque[tuple[int, Draft]] = deque()
        self.draft_census = self.scheduler.census()
        """As it was when the last plan was drafted: its rows and what they see are held."""
        self.seq = 0
        self.shown: dict[int, list[int]] = {}
        self.finish: dict[int, FinishReason] = {}
        self.calls: dict[int, Sequence] = {}
        self.stems = [tuple(self.random.randrange(VOCAB) for _ in range(60)) for _ in range(3)]

    def new_rank(self) -> Rank:
        seed = self.random.randrange(1 << 30) if self.limits.most_drafts else 0
        return Rank(self.limits.recurrent, tuple(window for _, window in self.limits.groups), seed)

    def submit(self) -> None:
        stem = self.random.choice(self.stems)[: self.random.randrange(1, 60)]
        tail = tuple(self.random.randrange(VOCAB) for _ in range(self.random.randrange(0, 20)))
        prompt = (stem + tail)[: self.scheduler.token_limit - 2]
        room = self.scheduler.token_limit - len(prompt)
        call = GenerateCall(
            request_id=f"r{len(self.calls)}",
            prompt=prompt,
            sampling=Sampling(),
            max_tokens=self.random.randrange(1, min(room, 60) + 1),
            end_tokens=frozenset({END}),
        )
        sequence = self.scheduler.add(call)
        self.calls[sequence.key] = sequence
        self.shown[sequence.key] = []

    def note(self, emits: list[Emit]) -> None:
        for emit in emits:
            key = emit.sequence.key
            assert key not in self.finish, "something came after the finish"
            self.shown[key].extend(emit.tokens)
            if emit.finish is not None:
                self.finish[key] = emit.finish

    def issue(self) -> bool:
        if len(self.flight) >= self.scheduler.limits.plans_in_flight:
            return False
        draft = self.scheduler.next_plan()
        if draft is None:
            return False
        assert draft.prompt_rows <= self.limits.chunk
        assert len(draft.rows) == len({r.request for r in draft.rows}) <= self.limits.running
        self.seq += 1
        self.draft_census = self.scheduler.census()
        self.scheduler.on_issued(draft, self.seq)
        self.flight.append((self.seq, draft))
        return True

    def acknowledge(self) -> None:
        if self.flight:
            seq, draft = self.flight.popleft()
            drafts = sum(row.drafts for row in draft.rows)
            self.note(self.scheduler.apply(seq, self.rank.run(draft), 1.0 + 0.1 * drafts))

    def lose(self, why: str = "", *, outside: bool = False) -> list[Emit]:
        self.flight.clear()
        self.rank = self.new_rank()
        emits = self.scheduler.lose_fleet(None, why, outside=outside)
        self.note(emits)
        return emits

    def abort(self) -> None:
        open_now = self.scheduler.open_sequences()
        if open_now:
            self.note(self.scheduler.end(self.random.choice(open_now), FinishReason.ABORT))

    def hold(self) -> None:
        for sequence in self.scheduler.open_sequences():
            sequence.held = self.random.random() < 0.3

    def check(self) -> None:
        for census in self.scheduler.census():
            assert census.free + census.live + census.protected + census.cached == census.capacity
            assert min(census.free, census.live, census.protected, census.cached) >= 0
        if self.seq % 16 == 0 and (by_rank := self.scheduler.census_by_rank()):
            for group, census in enumerate(self.scheduler.census()):
                sums = [sum(getattr(each[group], name) for each in by_rank) for name in PLACES]
                assert sums == [getattr(census, name) for name in PLACES], "ranks keep each page once"
                assert min(getattr(each[group], name) for each in by_rank for name in PLACES) >= 0
        states = self.scheduler.state_census()
        if states is not None:
            assert states.free + states.live + states.cached == states.capacity
            assert min(states.free, states.live, states.cached) >= 0

    def run(self, steps: int = 120) -> None:
        for _ in range(steps):
            event = self.random.random()
            if event < 0.12:
                self.submit()
            elif event < 0.15:
                self.abort()
            elif event < 0.18:
                self.hold()
            elif event < 0.19 and self.losses:
                self.lose()
            elif event < 0.6:
                self.issue()
            else:
                self.acknowledge()
            self.check()
        self.finish_all()

    def finish_all(self) -> None:
        for sequence in self.scheduler.open_sequences():
            sequence.held = False
        bound = 400 + sum(s.call.max_tokens + len(s.call.prompt) for s in self.scheduler.open_sequences()) * 4
        while not self.scheduler.idle:
            while self.issue():
                pass
            assert self.flight, "nothing is in flight and nothing can be issued: the scheduler is stuck"
            self.acknowledge()
            self.check()
            bound -= 1
            assert bound > 0, "a sequence starves"
        for key, sequence in self.calls.items():
            expected = answer(sequence.call.prompt, sequence.call.max_tokens)
            if self.finish[key] in (FinishReason.ABORT, FinishReason.ERROR):
                assert self.shown[key] == expected[: len(self.shown[key])]
            else:
                assert self.shown[key] == expected
        for census in self.scheduler.census():
            assert (census.live, census.protected) == (0, 0), "pages are held by nobody"
        assert self.scheduler.longest_skip <= longest_skip(self.limits) or self.scheduler.preemptions


@pytest.mark.parametrize("seed", range(250))
def test_random_traces_end_right(seed: int) -> None:
    for part in range(10):
        windows = ((), (), (20,), (1, 33), (64,))[part % 5]
        groups = 1 + (seed + part) % 4
        deep = {"decode_groups": groups, "plans_in_flight": groups + 1} if groups > 1 else {"token_vector": (2, 1, 1)}
        Trace(1000 * seed + part, recurrent=part % 2 == 1, windows=windows, **deep).run()


@pytest.mark.parametrize("seed", range(20))
def test_no_decode_row_waits_longer_than_the_prefill_delay(seed: int) -> None:
    for delay in (0, 1, 2, 4):
        trace = Trace(seed, losses=False, kv_tokens=8192, running=8, prefill_delay=delay, chunk=16)
        trace.run()
        assert trace.scheduler.longest_skip <= delay
        assert not trace.scheduler.preemptions


@pytest.mark.parametrize("seed", range(20))
def test_with_groups_no_decode_row_waits_longer_than_a_round(seed: int) -> None:
    """Whatever ends, joins or stalls meanwhile."""
    for groups, delay in ((2, 0), (3, 0), (4, 0), (2, 1), (3, 2), (4, 4)):
        trace = Trace(
            seed, losses=False, kv_tokens=8192, running=8, prefill_delay=delay, chunk=16, decode_groups=groups,
            plans_in_flight=groups + 1,
        )  # fmt: skip
        trace.run()
        assert trace.scheduler.longest_skip <= longest_skip(trace.limits)
        assert not trace.scheduler.preemptions


@pytest.mark.parametrize(("running", "groups"), [(1, 2), (2, 2), (3, 2), (4, 3), (7, 3), (8, 4), (2, 4)])
def test_plans_in_a_row_carry_different_sequences(running: int, groups: int) -> None:
    """Once all decode: each plan has a share of them, no two of a round the same one, and a round has all."""
    trace = Trace(
        1, losses=False, kv_tokens=4096, running=running, prefill_delay=0, chunk=256, decode_groups=groups,
        plans_in_flight=groups + 1,
    )  # fmt: skip
    calls = [GenerateCall("r", (9, 8, 7 + n), Sampling(), 200, frozenset()) for n in range(running)]
    keys = {trace.scheduler.add(call).key for call in calls}
    share = -(-running // groups)
    rounds = -(-running // share)
    drawn = []
    trace.issue()
    seq, draft = trace.flight.popleft()
    trace.scheduler.apply(seq, trace.rank.run(draft))
    for _ in range(20):
        while trace.issue():
            drawn.append([row.request for row in trace.flight[-1][1].rows])
        assert len(trace.flight) == groups + 1, "every rank has a plan, and one lies ready"
        seq, draft = trace.flight.popleft()
        trace.scheduler.apply(seq, trace.rank.run(draft))
    drawn = drawn[: len(drawn) // rounds * rounds]
    assert all(len(plan) <= share for plan in drawn)
    for first in range(0, len(drawn), rounds):
        of_round = sum(drawn[first : first + rounds], [])
        assert sorted(of_round) == sorted(keys), "somebody twice, somebody not at all"


def test_chunks_of_one_prompt_go_out_one_behind_the_other() -> None:
    trace = Trace(1, losses=False, kv_tokens=4096, running=2, chunk=16, decode_groups=3, plans_in_flight=4)
    sequence = ask(trace, tuple(range(10, 110)), 3)
    while trace.issue():
        pass
    rows = [row for _, draft in trace.flight for row in draft.rows]
    assert [(row.request, row.start, len(row.tokens) // 4) for row in rows] == [
        (sequence.key, 16 * n, 16) for n in range(4)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_a_pool_for_one_sequence_serves_many(seed: int) -> None:
    trace = Trace(seed, kv_tokens=256, running=8, losses=False)
    for _ in range(8):
        trace.submit()
    trace.finish_all()
    assert set(trace.finish.values()) <= {FinishReason.STOP, FinishReason.LENGTH}


def test_prefix_hits_skip_whole_pages_only_and_never_the_last_token() -> None:
    trace = Trace(1, kv_tokens=1024, running=2, prefix_cache=True, plans_in_flight=2, chunk=64, prefill_delay=0)
    prompt = tuple(range(10, 42))
    for _ in range(2):
        call = GenerateCall("r", prompt, Sampling(), 3, frozenset({END}))
        sequence = trace.scheduler.add(call)
        trace.calls[sequence.key] = sequence
        trace.shown[sequence.key] = []
        trace.finish_all()
    assert [s.hit_tokens for s in trace.calls.values()] == [0, 16]
    assert (trace.scheduler.prefix.lookups, trace.scheduler.prefix.hits) == (2, 1)


def turns(checkpoints: int) -> Trace:
    """Three requests of a recurrent model, each beginning with the 300 tokens of the one before, and a stranger."""
    trace = Trace(
        1, kv_tokens=4096, context=1024, running=2, plans_in_flight=2, chunk=200, prefill_delay=0,
        prefix_cache=True, recurrent=True, checkpoints=checkpoints,
    )  # fmt: skip
    stem = tuple(n % 40 + 10 for n in range(300))
    for tail in ((8,) * 3, (9,) * 40, (8,) * 3 + (9,) * 60):
        sequence = trace.scheduler.add(GenerateCall("r", stem + tail, Sampling(), 3, frozenset({END})))
        trace.calls[sequence.key] = sequence
        trace.shown[sequence.key] = []
        trace.finish_all()
    return trace


def test_a_hit_of_a_recurrent_model_is_as_deep_as_the_last_checkpoint() -> None:
    trace = turns(checkpoints=8)
    # 303 tokens are kept at 128, 256 and the last page boundary, 288; the next two prompts share them that far.
    assert [sequence.hit_tokens for sequence in trace.calls.values()] == [0, 288, 288]
    assert trace.rank.restored == 2


def test_without_checkpoints_a_recurrent_model_has_no_hits() -> None:
    trace = turns(checkpoints=0)
    assert [sequence.hit_tokens for sequence in trace.calls.values()] == [0, 0, 0]
    assert trace.scheduler.state_census() == StateCensus(2, 2, 0, 0)


def test_one_checkpoint_slot_is_given_on() -> None:
    trace = turns(checkpoints=1)
    assert trace.scheduler.state_census() == StateCensus(3, 2, 0, 1)


def test_a_request_alone_in_flight_at_two_deaths_in_a_row_is_failed() -> None:
    trace = Trace(2, kv_tokens=1024, running=2, plans_in_flight=2, chunk=16)
    trace.submit()
    trace.issue()
    trace.lose()
    assert not trace.finish
    trace.issue()
    emits = trace.lose("rank 1 was killed by SIGKILL while it owed plan 2 (prefill)")
    assert list(trace.finish.values()) == [FinishReason.ERROR]
    assert [emit.error for emit in emits] == [
        "the worker died each time it was computed, 2 times alone; the last time: rank 1 was killed by SIGKILL while it"
        " owed plan 2 (prefill)"
    ]


def test_deaths_that_no_request_can_bring_about_are_no_strikes() -> None:
    trace = Trace(2, kv_tokens=1024, running=2, plans_in_flight=2, chunk=16)
    trace.submit()
    for outside in (True, True, False, True):  # one strike, and one alone fails nobody
        trace.issue()
        trace.lose(outside=outside)
    trace.finish_all()
    assert FinishReason.ERROR not in trace.finish.values()


def test_a_death_with_many_in_flight_blames_nobody() -> None:
    """The second death finds one of them alone, which is its first strike."""
    trace = Trace(6, losses=False, kv_tokens=4096, running=8, plans_in_flight=2, chunk=400, prefill_delay=0)
    for _ in range(6):
        trace.submit()
    for _ in range(2):
        while trace.issue():
            pass
        trace.lose()
    trace.finish_all()
    assert FinishReason.ERROR not in trace.finish.values()


def test_progress_between_two_deaths_clears_the_suspicion() -> None:
    trace = Trace(3, kv_tokens=1024, running=2, plans_in_flight=2, chunk=64, prefill_delay=0)
    trace.submit()
    for _ in range(5):
        trace.issue()
        trace.acknowledge()
        trace.issue()
        trace.lose()
    trace.finish_all()
    assert FinishReason.ERROR not in trace.finish.values()


def run_with_poison(trace: Trace, poison: int, position: int) -> int:
    """Run to the end on a rank that dies whenever `poison` computes `position`; returns how often it died."""
    deaths = 0
    for _ in range(600):
        while trace.issue():
            pass
        if not trace.flight:
            break
        rows = [row for row in trace.flight[0][1].rows if row.request == poison]
        if any(row.start <= position < row.start + max(1, len(row.tokens) // 4) for row in rows):
            trace.lose()
            deaths += 1
        else:
            trace.acknowledge()
    trace.finish_all()
    return deaths


@pytest.mark.parametrize("position", [0, 20, 45, 62])
@pytest.mark.parametrize("chunk", [16, 64])
def test_only_the_poison_among_many_is_failed(position: int, chunk: int) -> None:
    """A row that kills the worker, in the first chunk of a prompt, a later one, or while decoding: only its request is
    failed, after the two deaths at which it was alone, and everything else in the batch ends right."""
    trace = Trace(4, losses=False, kv_tokens=4096, running=8, plans_in_flight=2, chunk=chunk, prefill_delay=0)
    for _ in range(5):
        trace.submit()
    sequence = trace.scheduler.add(GenerateCall("r", tuple(range(8, 56)), Sampling(), 30, frozenset()))
    trace.calls[sequence.key], trace.shown[sequence.key] = sequence, []
    deaths = run_with_poison(trace, sequence.key, position)
    assert [k for k, reason in trace.finish.items() if reason is FinishReason.ERROR] == [sequence.key]
    assert deaths <= 3


def test_the_eviction_order_does_not_grow_with_use() -> None:
    """The same prompt for ever, in a pool that never fills."""
    trace = Trace(1, kv_tokens=4096, running=2, prefix_cache=True, plans_in_flight=1, chunk=64, prefill_delay=0)
    for _ in range(50):
        sequence = trace.scheduler.add(GenerateCall("r", tuple(range(10, 60)), Sampling(), 2, frozenset()))
        trace.calls[sequence.key], trace.shown[sequence.key] = sequence, []
        trace.finish_all()
    pool = trace.scheduler._pool
    assert len(pool._groups[0].order) <= pool.census()[0].cached


def test_a_held_sequence_at_the_head_of_the_queue_holds_up_nobody() -> None:
    trace = Trace(5, losses=False, kv_tokens=1024, running=2, plans_in_flight=1, chunk=64)
    first, second = (trace.scheduler.add(GenerateCall("r", (1, 2, 3), Sampling(), 3, frozenset())) for _ in range(2))
    first.held = True
    draft = trace.scheduler.next_plan()
    assert draft is not None
    assert [row.request for row in draft.rows] == [second.key]


def test_a_smaller_pool_after_a_loss_fails_what_cannot_fit_and_cuts_what_outgrows_it() -> None:
    trace = Trace(6, losses=False, kv_tokens=256, running=4, plans_in_flight=1, chunk=64, prefill_delay=0)
    long, short = (
        trace.scheduler.add(GenerateCall("r", tuple(range(8, 8 + length)), Sampling(), 100, frozenset()))
        for length in (100, 20)
    )
    for sequence in (long, short):
        trace.calls[sequence.key], trace.shown[sequence.key] = sequence, []
    trace.rank = Rank()
    emits = trace.scheduler.lose_fleet(replace(trace.limits, kv_tokens=64))
    trace.note(emits)
    assert [emit.error for emit in emits] == ["its 100 tokens do not fit the KV pool that is left, of 64 tokens"]
    assert trace.finish == {long.key: FinishReason.ERROR}
    while not trace.scheduler.idle:
        trace.issue()
        trace.acknowledge()
    assert trace.finish[short.key] is FinishReason.LENGTH
    assert len(trace.shown[short.key]) == 64 - 20


def test_a_held_sequence_gets_no_rows_until_it_is_let_go() -> None:
    trace = Trace(5, losses=False, kv_tokens=1024, running=2, plans_in_flight=1, chunk=64)
    call = GenerateCall("r", (1, 2, 3), Sampling(), 50, frozenset())
    sequence = trace.scheduler.add(call)
    trace.calls[sequence.key], trace.shown[sequence.key] = sequence, []
    trace.issue()
    trace.acknowledge()
    sequence.held = True
    assert not trace.issue()
    sequence.held = False
    assert trace.issue()


# ---------------------------------------------------------------------------------------------------------- windows


def windowed(**more: int) -> Trace:
    """Layers that see 32 tokens beside layers that see all; one request at a time has room for its window and a
    chunk."""
    sizes = {"context": 1024, "kv_tokens": 1024, "running": 1, "chunk": 64, **more}
    return Trace(1, losses=False, plans_in_flight=2, prefill_delay=0, prefix_cache=True, windows=(32,), **sizes)


def ask(trace: Trace, prompt: tuple[int, ...], max_tokens: int = 3) -> Sequence:
    sequence = trace.scheduler.add(GenerateCall("r", prompt, Sampling(), max_tokens, frozenset({END})))
    trace.calls[sequence.key], trace.shown[sequence.key] = sequence, []
    return sequence


def most_in_window(trace: Trace) -> int:
    """Run to the end; the most slots that requests held at once in the group with a window."""
    most = 0
    for _ in range(1000):
        while trace.issue():
            window = trace.draft_census[1]
            most = max(most, (window.live + window.protected) * PAGE_LEN)
        if not trace.flight:
            break
        trace.acknowledge()
    trace.finish_all()
    return most


def test_a_window_holds_its_tokens_and_a_chunk() -> None:
    """A prompt of eight times the window, and an answer: what layers with the window hold at any moment."""
    trace = windowed()
    ask(trace, tuple(n % 40 + 8 for n in range(256)), 100)
    assert trace.scheduler.census()[1].capacity * PAGE_LEN == (1 + 4) * (32 + 16) + 64
    assert most_in_window(trace) == 32 + 64
    assert trace.scheduler.census()[0].cached * PAGE_LEN >= 256


def test_prompts_one_behind_the_other_hold_their_windows_and_one_chunk() -> None:
    """What a prompt's last chunk saw is free for the next plan, though its answer is not back yet."""
    trace = windowed(kv_tokens=4096, running=4)
    for part in range(4):
        ask(trace, tuple((n + part) % 40 + 8 for n in range(256)), 40)
    assert most_in_window(trace) <= 4 * (32 + 16) + 64
    assert trace.scheduler.preemptions == 0


STEM = tuple(n % 40 + 8 for n in range(400))
STRANGER = (STEM[9:], 3)
"""A long prompt and a short answer, of somebody else."""


def hits(trace: Trace, *asked: tuple[tuple[int, ...], int]) -> list[int]:
    """Cached tokens of requests one after the other, each of a prompt and so many tokens of answer."""
    found = []
    for prompt, max_tokens in asked:
        sequence = ask(trace, prompt, max_tokens)
        trace.finish_all()
        found.append(sequence.hit_tokens)
    return found


def test_a_hit_is_as_deep_as_the_window_that_is_left() -> None:
    """The window before the end of a prompt is kept, and the one before the end of an answer; in the middle of a prompt
    nothing is, and who parts from it there begins from its start."""
    asked = (STEM[:208], 3), STRANGER, (STEM[:208] + (9,) * 30, 3), (STEM[:96] + (9,) * 40, 3)
    assert hits(windowed(kv_tokens=2048), *asked) == [0, 0, 208, 0]


def test_a_prompt_is_found_again_behind_a_long_answer() -> None:
    """As where a template leaves out what a model thought."""
    assert hits(windowed(kv_tokens=2048), (STEM[:208], 70), STRANGER, (STEM[:208] + (9,) * 30, 3)) == [0, 0, 208]


def test_what_two_prompts_share_is_found_by_the_third() -> None:
    """The first one does not know where others will part from it; the second one does."""
    first, second, third = ((STEM[:112] + (tail,) * 150, 3) for tail in (9, 10, 11))
    assert hits(windowed(kv_tokens=4096), first, STRANGER, second, STRANGER, third) == [0, 0, 0, 384, 112]


def test_a_long_prompt_does_not_cost_others_their_windows() -> None:
    talks = [((tail,) * 96, 3) for tail in (8, 9)]
    turns = [((tail,) * 96 + (20,) * 32, 3) for tail in (8, 9)]
    assert hits(windowed(kv_tokens=4096), *talks, (STEM, 3), *turns) == [0, 0, 0, 96, 96]


def test_the_last_place_is_for_a_long_request_too() -> None:
    """All others decode with their windows full; one more is admitted by the next plan."""
    trace = windowed(running=16, kv_tokens=16384)
    for first in range(15):
        prompt = tuple((n + first) % 40 + 8 for n in range(120))
        trace.scheduler.add(GenerateCall("endless", prompt, Sampling(), 800, frozenset()))
    for _ in range(60):
        trace.issue()
        trace.scheduler.apply(trace.flight[0][0], trace.rank.run(trace.flight.popleft()[1]))
    assert all(sequence.generated > 8 for sequence in trace.scheduler.open_sequences())
    last = ask(trace, STEM[7:307])
    trace.issue()
    assert last.lane >= 0


def test_a_double_that_is_left_fills_the_gaps_of_the_tree() -> None:
    """Two equal prompts at once: the second cannot share its pages while it runs. What the first one's node lacks when
    it goes, the second one's page takes its place in."""
    trace = windowed(kv_tokens=2048, running=2, chunk=256)
    prompt = tuple(n % 40 + 8 for n in range(100))
    ask(trace, prompt), ask(trace, prompt)
    trace.finish_all()
    third = ask(trace, prompt)
    trace.finish_all()
    assert third.hit_tokens == 96
