"""Guides in the engine: one that fails ends its own request, and what a rank needs for it travels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from homeserve.engine.draft import Draft, Emit
from homeserve.engine.request import EngineLimits, FinishReason, GenerateCall
from homeserve.engine.scheduler import Scheduler
from homeserve.engine.sequence import Sequence, SequenceState
from homeserve.engine.sizes import GRAMMAR_BYTES_MAX, new_lane_bytes, new_lanes_bytes_limit, plan_bytes_limit
from homeserve.wire.codec import encode
from homeserve.wire.records import Dry, Guide, NewLane, Plan, PlanKind, Sample, Sampling, pack_ints

LIMITS = EngineLimits(
    context=96, kv_tokens=512, running=4, waiting=3, chunk=64, prefill_delay=0, plans_in_flight=2, drafts=3,
    drafts_adapt=False,
)  # fmt: skip
GUIDE = Guide("start: /a+/", pack_ints([7]))
WHY = "the grammar is beyond its bounds"


class Ranks:
    """Answers plans: token 5 for each row, or `why` for those of a request."""

    def __init__(self, limits: EngineLimits = LIMITS) -> None:
        self.scheduler = Scheduler(limits)
        self.flight: list[tuple[int, Draft]] = []
        self.emits: list[Emit] = []
        self.seq = 0

    def add(self, length: int = 20, **sampling: object) -> Sequence:
        call = GenerateCall("r", tuple(range(length)), Sampling(**sampling), 30, frozenset())  # type: ignore[arg-type]
        return self.scheduler.add(call)

    def issue(self) -> Draft:
        draft = self.scheduler.next_plan()
        assert draft is not None
        self.seq += 1
        self.flight.append((self.seq, draft))
        self.scheduler.on_issued(draft, self.seq)
        return draft

    def answer(self, fails: Sequence | None = None, behind: int = 0) -> None:
        """The oldest plan. What fails has drawn `behind` tokens in this plan before."""
        seq, draft = self.flight.pop(0)
        samples: list[Sample] = []
        for row in draft.rows:
            if not row.sample:
                continue
            end = row.start + max(1, len(row.tokens) // 4)
            if fails is not None and row.request == fails.key:
                samples += [Sample(row.lane, row.request, end + at, 5) for at in range(behind)]
                samples.append(Sample(row.lane, row.request, end + behind, -1, failed=WHY))
            else:
                samples.append(Sample(row.lane, row.request, end, 5))
        self.emits += self.scheduler.apply(seq, samples)

    def told(self, sequence: Sequence) -> list[Emit]:
        return [emit for emit in self.emits if emit.sequence is sequence]


def test_a_guide_that_fails_ends_its_own_request_alone() -> None:
    """With a row on its way already, whose answer is nobody's."""
    ranks = Ranks(replace(LIMITS, drafts=0))
    broken, other = ranks.add(guide=GUIDE), ranks.add(30, guide=GUIDE)
    ranks.issue()
    ranks.answer()
    ranks.issue()
    ranks.issue()
    ranks.answer(fails=broken)
    assert broken.finish is FinishReason.UNDRAWN and broken.state is SequenceState.ENDING
    ranks.answer(fails=broken)
    last = ranks.told(broken)[-1]
    assert (last.tokens, last.finish, last.error) == ((), FinishReason.UNDRAWN, WHY)
    assert sum(emit.finish is not None for emit in ranks.told(broken)) == 1
    assert broken.state is SequenceState.DONE and broken.pending == 0
    while other.finish is None:
        ranks.issue()
        ranks.answer()
    assert other.finish is FinishReason.LENGTH and len(other.tokens) == 60
    assert ranks.scheduler.idle


@pytest.mark.parametrize("behind", [0, 2])
def test_a_guide_that_fails_in_a_round_of_drafts_keeps_what_was_drawn_before(behind: int) -> None:
    ranks = Ranks()
    broken, other = ranks.add(guide=GUIDE), ranks.add(30)
    ranks.issue()
    ranks.answer()
    draft = ranks.issue()
    assert draft.rounds == {broken.key: 3, other.key: 3}
    ranks.answer(fails=broken, behind=behind)
    assert broken.state is SequenceState.DONE and broken.generated == 1 + behind
    assert [emit.error for emit in ranks.told(broken) if emit.finish] == [WHY]
    assert other.finish is None and other.generated == 2


def test_a_request_that_is_over_hears_of_no_failure() -> None:
    ranks = Ranks(replace(LIMITS, drafts=0))
    gone = ranks.add(guide=GUIDE)
    ranks.issue()
    ranks.emits += ranks.scheduler.end(gone, FinishReason.ABORT)
    ranks.answer(fails=gone)
    assert [emit.finish for emit in ranks.told(gone)] == [FinishReason.ABORT] and ranks.scheduler.idle


def test_what_a_prefix_hit_does_not_send_travels_as_history() -> None:
    ranks = Ranks(replace(LIMITS, drafts=0))
    first = ranks.add(40)
    ranks.issue()
    ranks.answer()
    ranks.emits += ranks.scheduler.end(first, FinishReason.ABORT)
    guided, plain = ranks.add(40, guide=GUIDE), ranks.add(40)
    draft = ranks.issue()
    news = {new.request: new for new in draft.new}
    assert news[guided.key].history == pack_ints(list(range(32))) and news[plain.key].history == b""


def test_the_log_holds_a_plan_with_the_largest_grammar() -> None:
    limits = EngineLimits(
        context=4096, kv_tokens=8192, running=4, waiting=3, chunk=64, prefill_delay=0, plans_in_flight=2
    )
    ids = pack_ints(list(range(20)))
    guide = Guide("é" * (GRAMMAR_BYTES_MAX // 2), ids, ids, ids, True, 2**30)
    biases, ends = tuple((10**6, 0.1) for _ in range(3900)), tuple(range(10**6, 10**6 + 20))
    sampling = Sampling(dry=Dry(1.0, breakers=("\n", "é")), guide=guide, forbidden=ends, logit_bias=biases)
    history = pack_ints([10**6] * 4096)
    new = NewLane(3, 2**40, 4096, sampling, history, 7)
    assert len(encode(new)) - len(history) <= new_lane_bytes(sampling)
    others = new_lanes_bytes_limit(limits)
    assert others + len(encode(Plan(2**40, 2**20, PlanKind.MIXED, 7, new=(new,)))) <= plan_bytes_limit(limits)
