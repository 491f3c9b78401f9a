"""Plans with drafts: the same answers as without, and nothing left of what did not count."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from draft_rig import DRAFTS, GREEDY, LANE_PAGES, LANES, PAGES, VOCAB, Desk, Ranks, Toy, mixed, plainly
from msgspec.structs import replace
from ranks import on_paper, shape_of

from backends.acts import ExchangeError, StampMismatch
from backends.base import Limits
from homeserve.wire.records import Dry, LaneRows, NewLane, Plan, PlanKind, Sample, Sampling, pack_ints
from homeserve.worker.drawn import LABEL, NO_TOKEN, Drawn, TokenSender
from homeserve.worker.faults import FaultRefused
from homeserve.worker.sampling import NotANumber

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
COUNT = 18
SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": Sampling(temperature=0.9, seed=7),
    "filtered": Sampling(temperature=1.3, top_k=9, top_p=0.8, min_p=0.02, seed=2**63),
    "penalties": Sampling(temperature=0.6, seed=3, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.9),
    "logprobs": Sampling(temperature=0.7, seed=5, top_logprobs=3, frequency_penalty=1.5),
    "dry": Sampling(temperature=0.0, dry=Dry(9.0, allowed_len=1, last_n=12)),
    "breakers": Sampling(temperature=0.7, seed=8, dry=Dry(3.0, 1.2, 0, breakers=("1",)), presence_penalty=0.5),
    "xtc": Sampling(temperature=0.9, seed=6, xtc_probability=0.6, xtc_threshold=0.05, top_n_sigma=2.5, typical_p=0.9),
    "bias": Sampling(temperature=0.0, logit_bias=((4, 1.5), (9, -2.0)), forbidden=(11, 12, 13), min_tokens=9),
}


def tokens(samples: Sequence[Sample]) -> list[int]:
    return [sample.token for sample in samples]


def kept(desk: Desk, lane: int = 1) -> tuple[Any, ...]:
    """All that a lane is."""
    known = desk.lanes[lane]
    counts = None
    if known.past is not None and (seen := known.past.counts) is not None:
        counts = seen._count.tolist(), seen._generated.tolist()
    order = known.past.order.tokens() if known.past is not None and known.past.order is not None else None
    return known.length, known.last_token, counts, order, desk.program.states[lane]


# -------------------------------------------------------------------------------------------------- the same answers


@pytest.mark.parametrize("drafts", [(1,), (2,), (3,), (4,), (3, 0, 1, 4, 2)], ids=str)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_answers_are_those_without_drafts(name: str, drafts: tuple[int, ...]) -> None:
    """Tokens, positions and log-probabilities, with drafts that are right but for every fifth position."""
    desk = Desk(Toy(wrong=lambda position: position % 5 == 0))
    request = desk.begin(1, PROMPT, SAMPLINGS[name])
    assert desk.answer(request, COUNT, drafts) == plainly(PROMPT, COUNT, SAMPLINGS[name])
    accepted = sum(counted - 1 for _, counted in desk.rounds)
    print(f"{name} {drafts}: {len(desk.rounds)} rounds, {accepted} drafts counted")
    assert accepted > 0 and len(desk.rounds) + accepted <= COUNT


def test_what_is_asked_for_here_changes_answers() -> None:
    """Else the tests above and below would show nothing."""
    for name, without in (
        ("dry", GREEDY),
        ("breakers", replace(SAMPLINGS["breakers"], dry=None)),
        ("breakers", replace(SAMPLINGS["breakers"], dry=Dry(3.0, 1.2, 0))),
        ("xtc", replace(SAMPLINGS["xtc"], xtc_probability=0.0)),
    ):
        assert tokens(plainly(PROMPT, COUNT, SAMPLINGS[name])) != tokens(plainly(PROMPT, COUNT, without)), name


@pytest.mark.parametrize("name", SAMPLINGS)
def test_forced_wrong_drafts_cost_rows_and_change_nothing(name: str) -> None:
    desk = Desk(Toy(), forced="wrong")
    assert desk.answer(desk.begin(1, PROMPT, SAMPLINGS[name]), COUNT, (3,)) == plainly(PROMPT, COUNT, SAMPLINGS[name])
    assert {counted for _, counted in desk.rounds} == {1} and len(desk.rounds) >= COUNT - 3


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_request_that_begins_again_goes_on_as_it_would_have(name: str) -> None:
    """After a preemption or on a worker that was started again: prompt and answer so far come as one prompt."""
    right = plainly(PROMPT, COUNT, SAMPLINGS[name])
    desk = Desk(Toy())
    request = desk.begin(1, [*PROMPT, *tokens(right[:7])], SAMPLINGS[name])
    request.prompt_len = len(PROMPT)
    desk.run(desk.rows(request, 12))
    assert desk.answer(request, COUNT - 7, (0, 3)) == right[7:]


@pytest.mark.parametrize("count", range(DRAFTS + 1))
def test_for_every_count_of_accepted_drafts_lane_and_state_are_those_of_plain_decoding(count: int) -> None:
    """The draft behind the first `count` is the wrong one."""
    sampling = Sampling(temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.2, dry=Dry(5.0, allowed_len=1))
    plain = Desk(Toy(), drafts=0)
    ask = plain.begin(1, PROMPT, sampling)
    known = plain.answer(ask, 1 + count + 1)
    desk = Desk(Toy(wrong=lambda position: position == len(PROMPT) + 1 + count))
    # Penalties make the likeliest token another one; this drafting block is told which.
    desk.program.draft = told(desk, [*tokens(known), 0, 0, 0, 0], len(PROMPT), wrong_at=1 + count)
    request = desk.begin(1, PROMPT, sampling)
    desk.answer(request, 1)
    desk.run(desk.rows(request, 1, DRAFTS))
    assert desk.rounds == [(DRAFTS, count + 1)] and desk.program.accepted == [(1, count + 1)]
    assert request.samples == known
    assert kept(desk) == kept(plain)


def told(desk: Desk, answers: list[int], first: int, wrong_at: int) -> Any:
    """A step of drafting that gives `answers` of positions from `first` on; that of entry `wrong_at` is another one."""

    def draft(batch: Any) -> np.ndarray:
        logits = np.zeros((len(batch.tokens), VOCAB), np.float32)
        for row, position in enumerate(batch.positions.tolist()):
            at = position + 1 - first
            logits[row, (answers[at] + (at == wrong_at)) % VOCAB] = 1.0
        return logits

    return draft


@pytest.mark.parametrize("accept", range(DRAFTS + 1))
def test_a_forced_number_of_drafts_counts_whatever_is_drawn(accept: int) -> None:
    desk = Desk(Toy(wrong=lambda position: position % 2 == 0), forced=f"accept:{accept}")
    request = desk.begin(1, PROMPT, Sampling(temperature=1.0, seed=4, top_logprobs=1))
    desk.answer(request, 1)
    for drafts in (DRAFTS, 3, 1, DRAFTS):
        desk.run(desk.rows(request, 1, drafts))
    assert desk.rounds == [(drafts, min(accept, drafts) + 1) for drafts in (DRAFTS, 3, 1, DRAFTS)]
    state = 0
    for token in request.tokens[:-1]:
        state = mixed(state, token)
    assert desk.program.states[1] == state, "the state is that of what was answered"
    assert all(each.logprobs is not None and each.logprobs.token == each.token for each in request.samples)
    if not accept:
        assert request.samples == plainly(PROMPT, len(request.samples), request.sampling)


def test_a_prompt_in_chunks_plain_requests_and_drafts_share_a_plan() -> None:
    prompts = [[(lane * 5 + at * at) % 11 for at in range(9 + 7 * lane)] for lane in range(LANES)]
    samplings = [GREEDY, SAMPLINGS["penalties"], SAMPLINGS["seeded"], SAMPLINGS["logprobs"]]
    right = [plainly(prompts[lane], 18, samplings[lane], lane) for lane in range(LANES)]
    chance = random.Random(3)
    desk = Desk(Toy(wrong=lambda position: position % 4 == 1))
    requests = [desk.begin(lane, prompts[lane], samplings[lane]) for lane in range(LANES)]
    while any(len(each.samples) < 18 for each in requests):
        plan: list[LaneRows] = []
        for request in chance.sample(requests, chance.randint(1, LANES)):
            known, left = len(request.tokens) - request.computed, 18 - len(request.samples)
            if known > 1:
                plan.append(desk.rows(request, chance.randint(1, known)))
            elif left:
                told = chance.random() < 0.5
                drafts = min(chance.randint(0, DRAFTS), left - 1)
                plan.append(desk.rows(request, 1, drafts, told=told or drafts > 0 or not request.samples))
        if plan:
            desk.run(*plan)
    assert [each.samples for each in requests] == right
    both = [batch for batch in desk.program.batches if len(batch.hold) and set(batch.hold.tolist()) > {-1}]
    assert len({len(set(batch.lanes.tolist())) for batch in both}) > 1, "some plans were of several requests"
    assert sum(counted - 1 for _, counted in desk.rounds) > 5 < sum(counted == 1 for _, counted in desk.rounds)


def test_lanes_with_fewer_drafts_leave_the_chain_and_the_others_go_on_from_their_own_rows() -> None:
    desk = Desk(Toy())
    requests = [desk.begin(lane, PROMPT[lane:], GREEDY) for lane in range(3)]
    for request in requests:
        desk.answer(request, 1)
    desk.run(*(desk.rows(request, 1, drafts) for request, drafts in zip(requests, (1, 3, 2), strict=True)))
    assert [chain for _, _, chain in desk.program.drafts] == [[-1, -1, -1], [1, 2], [0]]
    starts = [len(PROMPT) - lane for lane in range(3)]
    assert [positions for _, positions, _ in desk.program.drafts] == [
        starts,
        [starts[1] + 1, starts[2] + 1],
        [starts[1] + 2],
    ]
    assert desk.rounds == [(1, 2), (3, 4), (2, 3)], "each draft was right, so each chain was its own"
    held = desk.program.batches[-1].hold.tolist()
    assert held == [0, 2, 6, -1]


def test_a_plain_row_behind_a_round_goes_on_with_the_last_token_that_counts() -> None:
    desk = Desk(Toy(wrong=lambda position: position == len(PROMPT) + 2))
    request = desk.begin(1, PROMPT)
    desk.answer(request, 1)
    desk.run(desk.rows(request, 1, 3))
    assert desk.rounds == [(3, 2)]
    desk.run(desk.rows(request, 1, told=False))
    assert request.samples == plainly(PROMPT, 4)


def test_a_checkpoint_is_restored_before_the_first_draft_and_plain_rows_save_theirs() -> None:
    desk = Desk(Toy())
    first = desk.begin(0, PROMPT)
    desk.run(desk.rows(first, len(PROMPT) - 1, save=LANES))
    second = desk.begin(2, PROMPT)
    second.computed = len(PROMPT) - 1
    rows = desk.rows(second, 1, 2)
    pages = desk.lanes.tables[0, 0].tolist()
    rows = LaneRows(2, 12, rows.start, rows.tokens, pack_ints(pages), True, drafts=2)
    plan = desk.plan(rows, desk.rows(first, 1, save=LANES + 1))
    new = NewLane(2, 12, len(PROMPT), GREEDY, restore=LANES)
    answer = desk.runner.run(Plan(plan.seq, 0, PlanKind.MIXED, 7, (), (new,), plan.rows))
    assert [each.token for each in answer.samples if each.lane == 2] == tokens(plainly(PROMPT, 3))
    assert desk.program.states[LANES + 1] == desk.program.states[0] != desk.program.states[LANES]


# ------------------------------------------------------------------------------------------------- what goes wrong


def begun(desk: Desk, sampling: Sampling = SAMPLINGS["penalties"]) -> Any:
    request = desk.begin(1, PROMPT, sampling)
    desk.answer(request, 3)
    return request


@pytest.mark.parametrize(
    "breaks",
    ["draft", "run", "accept", "nan", "step=draft", "step=draft,nth=3", "step=verify", "step=verify,nth=2"],
)
def test_whatever_is_raised_the_lane_and_its_state_are_those_of_before_and_the_plan_can_run_again(breaks: str) -> None:
    fault = f"rank=0,{breaks},action=refuse" if "step" in breaks else ""
    desk = Desk(Toy(), fault=fault)
    request = begun(desk)
    other = desk.begin(2, PROMPT[2:], SAMPLINGS["penalties"])
    desk.answer(other, 1)
    before, before_other = kept(desk), kept(desk, 2)
    rows = (desk.rows(other, 1, 2), desk.rows(request, 1, 3))
    toy = desk.program
    if not fault:
        toy.fails = breaks
    if breaks == "nan":
        toy.spoilt = lambda position: position == len(request.tokens)
    with pytest.raises((RuntimeError, FaultRefused, NotANumber)):
        desk.runner.run(desk.plan(*rows))
    assert (kept(desk), kept(desk, 2)) == (before, before_other) and toy.accepted == []
    toy.fails, toy.spoilt = "", lambda position: False
    desk.run(*rows)
    assert request.samples == plainly(PROMPT, len(request.samples), request.sampling)
    assert other.samples == plainly(PROMPT[2:], len(other.samples), other.sampling, 2)


def test_counts_of_inputs_that_did_not_count_do_not_stick() -> None:
    desk = Desk(Toy(), forced="wrong")
    request = begun(desk)
    seen = kept(desk)[2]
    assert seen is not None
    known = copy.deepcopy(seen)
    known[0][request.tokens[-1]] += 1
    known[1][request.tokens[-1]] += 1
    desk.run(desk.rows(request, 1, 4))
    assert desk.rounds[-1] == (4, 1) and kept(desk)[2] == known


def test_a_draft_of_nan_is_a_bad_draft() -> None:
    desk = Desk(Toy(draft_spoilt=lambda position: True))
    assert desk.answer(desk.begin(1, PROMPT), COUNT, (3,)) == plainly(PROMPT, COUNT)
    assert all(0 <= token < VOCAB for batch in desk.program.batches for token in batch.tokens.tolist())


def test_nan_behind_the_last_row_that_counts_is_not_looked_at() -> None:
    wrong_at = len(PROMPT) + 2
    desk = Desk(Toy(wrong=lambda position: position == wrong_at, spoilt=lambda position: position > wrong_at))
    request = desk.begin(1, PROMPT)
    desk.answer(request, 1)
    desk.run(desk.rows(request, 1, 4))
    assert desk.rounds == [(4, 2)] and request.samples == plainly(PROMPT, 3)


def test_nan_in_a_row_that_counts_is_an_error_as_without_drafts() -> None:
    desk = Desk(Toy(spoilt=lambda position: position == len(PROMPT) + 2))
    request = desk.begin(1, PROMPT)
    desk.answer(request, 1)
    with pytest.raises(NotANumber, match=f"position {len(PROMPT) + 1}: NaN"):
        desk.run(desk.rows(request, 1, 4))


def test_steps_of_drafting_are_timed_and_the_blocks_own_rows_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(Toy())
    request = desk.begin(1, PROMPT)
    desk.answer(request, 1)
    ticks = iter(range(0, 10**9, 5_000_000))
    monkeypatch.setattr("homeserve.worker.drafting.time.monotonic_ns", lambda: next(ticks))
    answer = desk.run(desk.rows(request, 1, 2))
    assert answer.draft_us == 5000
    census = desk.runner.run(Plan(99, 0, PlanKind.CENSUS, 7)).census
    assert [(pool.pool, pool.capacity, pool.lanes) for pool in census] == [
        (name, 16 * PAGES, ((1, 11, LANE_PAGES),)) for name in ("kv", "draft")
    ]


# ------------------------------------------------------------------------------------------------------ several ranks


def ranks_of(seed: int = 0, **toy: Any) -> Ranks:
    group = on_paper(3, seed=seed)
    return Ranks(group, [Toy(collective=acts, **toy) for acts in group.acts])


@pytest.mark.parametrize("seed", range(6))
def test_ranks_compute_the_same_rows_and_know_what_was_drawn(seed: int) -> None:
    """Plans without drafts owe their tokens, and some of them are under way when the first step begins."""
    ranks = ranks_of(seed, wrong=lambda position: position % 4 == 1)
    samplings = [GREEDY, SAMPLINGS["penalties"], SAMPLINGS["logprobs"]]
    requests = [ranks.begin(lane, PROMPT[lane:], sampling) for lane, sampling in enumerate(samplings)]
    ranks.run(*(ranks.last.rows(request, len(request.tokens)) for request in requests))
    chance = random.Random(seed)
    for _ in range(5):
        drafting, *others = chance.sample(requests, 3)
        plain = ranks.last.rows(others[0], told=False)
        row = ranks.last.rows(drafting, 1, chance.randint(1, DRAFTS))
        beside = [ranks.last.rows(others[1], told=False)] if chance.random() < 0.5 else []
        ranks.run_all([[plain], [row, *beside]])
    for lane, request in enumerate(requests):
        right = plainly(PROMPT[lane:], len(request.samples), samplings[lane], lane)
        assert request.samples == right
        known = {(desk.lanes[lane].length, desk.lanes[lane].last_token) for desk in ranks.desks}
        assert known == {(len(request.tokens) - 1, request.tokens[-1])}
        assert len({desk.program.states[lane] for desk in ranks.desks}) == 1
    assert sum(counted - 1 for _, counted in ranks.last.rounds) > 0


def test_nothing_is_owed_behind_a_plan_with_drafts_and_no_channel_holds_two_of_its_messages() -> None:
    ranks = ranks_of()
    request = ranks.begin(1, PROMPT, SAMPLINGS["seeded"])
    ranks.run(ranks.last.rows(request, len(PROMPT)))
    ranks.run(ranks.last.rows(request, 1, 4))
    for desk in ranks.desks[:-1]:
        receiver = desk.runner._receiver
        assert receiver is not None and not receiver._owed
    for target in (0, 1):
        assert ranks.last.runner._sender is not None
        assert ranks.group.acts[-1].credit(target) == 4, "each was taken in its plan"
    ranks.run(ranks.last.rows(request, told=False))
    assert request.samples == plainly(PROMPT, len(request.samples), request.sampling)


def test_one_place_in_a_channel_is_enough_for_any_number_of_drafts() -> None:
    group = on_paper(3, shape_of(3, depth=1))
    ranks = Ranks(group, [Toy(collective=acts) for acts in group.acts])
    request = ranks.begin(1, PROMPT)
    ranks.run(ranks.last.rows(request, len(PROMPT)))
    for _ in range(4):
        ranks.run(ranks.last.rows(request, 1, 4))
    assert request.samples == plainly(PROMPT, 21)


# --------------------------------------------------------------------------------------- what another process tells


Lie = Callable[[str, list[Drawn]], tuple[str, list[Drawn]]]


def told_by(monkeypatch: pytest.MonkeyPatch, lie: Lie) -> None:
    """A round of two drafts in which the last rank says what `lie` makes of each message."""
    send = TokenSender.send

    def lying(self: TokenSender, epoch: int, seq: int, drawn: Sequence[Drawn], label: str = LABEL) -> None:
        said, rows = lie(label, list(drawn))
        send(self, epoch, seq, rows, said)

    ranks = ranks_of()
    request = ranks.begin(1, PROMPT)
    ranks.run(ranks.last.rows(request, len(PROMPT)))
    before = [(desk.lanes[1].length, desk.program.states[1]) for desk in ranks.desks[:-1]]
    monkeypatch.setattr(TokenSender, "send", lying)
    try:
        ranks.run(ranks.last.rows(request, 1, 2))
    finally:
        after = [(desk.lanes[1].length, desk.program.states[1]) for desk in ranks.desks[:-1]]
        assert after == before, "nothing of the round counts where it was told"


@pytest.mark.parametrize("step", [0, 1])
def test_a_rank_at_another_step_is_told_apart(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    with pytest.raises(StampMismatch, match=f"exchanges .*draft {1 - step}.* where this rank is at") as told:
        told_by(monkeypatch, lambda label, rows: (f"draft {1 - step}" if label == f"draft {step}" else label, rows))
    assert f"draft {step}" in told.value.wanted and told.value.peer == 2


@pytest.mark.parametrize(("label", "change", "what"), [
    ("draft 1", {"lane": 0}, "has lanes and requests"),
    ("draft 0", {"request": 12}, "has lanes and requests"),
    ("draft 0", {"token": VOCAB}, "has tokens .* of a vocabulary of 24"),
    ("draft 1", {"token": NO_TOKEN}, "has tokens .* of a vocabulary of 24"),
    ("outcome", {"lane": 0}, "has lanes and requests"),
    ("outcome", {"token": VOCAB}, "has tokens .* of a vocabulary of 24"),
    ("outcome", {"token": NO_TOKEN}, "has .* for rows .* of lane 1"),
    ("outcome", {"token": -2}, "has tokens .* of a vocabulary of 24"),
])  # fmt: skip
def test_a_message_that_cannot_be_meant_is_an_error_of_the_exchange(
    monkeypatch: pytest.MonkeyPatch, label: str, change: dict[str, int], what: str
) -> None:
    """Whatever it says of the first row: nothing of it is used."""

    def lie(of: str, rows: list[Drawn]) -> tuple[str, list[Drawn]]:
        return of, [rows[0]._replace(**change), *rows[1:]] if of == label else rows

    with pytest.raises(ExchangeError, match=f"message '{label}' of rank 2 {what}") as told:
        told_by(monkeypatch, lie)
    assert (told.value.label, told.value.peer) == (label, 2)


def test_a_token_that_was_not_the_next_rows_input_cannot_have_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExchangeError, match="message 'outcome' of rank 2 has .* for rows .* of lane 1"):
        told_by(
            monkeypatch,
            lambda of, rows: (of, [each._replace(token=1) for each in rows] if of == "outcome" else rows),
        )


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"drafts": 5}, "5 drafts are more than the 4 that it was loaded for"),
        ({"drafts": -1}, "-1 drafts"),
        ({"tokens": b""}, "drafts follow one known token, and 0 are told"),
        ({"tokens": pack_ints([1, 2])}, "drafts follow one known token, and 2 are told"),
        ({"sample": False}, "for drawing tokens and for nothing else"),
        ({"save": LANES}, "for drawing tokens and for nothing else"),
        ({"prompt_logprobs": 0}, "for drawing tokens and for nothing else"),
        ({"start": 14}, "are not covered by 1 pages"),
    ],
)
def test_rows_with_drafts_that_do_not_fit_are_refused(changes: dict[str, Any], why: str) -> None:
    desk = Desk(Toy())
    desk.begin(0, PROMPT)
    start = changes.pop("start", 10)
    prompt = list(range(start))
    first = LaneRows(0, 10, 0, pack_ints(prompt), pack_ints([3]), True)
    desk.requests[0].tokens, desk.requests[0].prompt_len = prompt, start
    desk.runner.run(desk.plan(first))
    known: dict[str, Any] = {"tokens": pack_ints([7]), "sample": True, "drafts": 4} | changes
    desk.lanes.check(desk.plan(LaneRows(0, 10, start, pack_ints([7]), b"", True, drafts=1)))
    with pytest.raises(Exception, match=why) as caught:
        desk.runner.run(desk.plan(LaneRows(0, 10, start, **known)))
    assert type(caught.value).__name__ == "LaneRefused"
    assert desk.lanes[0].length == start and desk.program.drafts == []


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (Limits(7, 40, LANES, LANE_PAGES, 20), "a plan of 8 rows is more than 7"),
        (Limits(64, 7, LANES, LANE_PAGES, 20), "logits of 8 rows are more than 7"),
        (Limits(64, 40, LANES, LANE_PAGES, 7), "8 rows whose states are held are more than 7"),
    ],
)
def test_rows_of_drafts_count_for_every_limit(limits: Limits, why: str) -> None:
    desk = Desk(Toy(), limits=limits)
    requests = [desk.begin(lane, PROMPT[:3]) for lane in range(2)]
    for request in requests:
        desk.answer(request, 1)
    with pytest.raises(Exception, match=why):
        desk.run(*(desk.rows(request, 1, 3) for request in requests))
    assert desk.program.drafts == [], "nothing was computed"


def test_a_layout_in_which_nothing_is_drafted_says_so() -> None:
    desk = Desk(Toy(), drafts=0)
    request = desk.begin(1, PROMPT)
    desk.answer(request, 1)
    with pytest.raises(Exception, match="2 drafts, and nothing is drafted here in this layout"):
        desk.run(desk.rows(request, 1, 2))
    desk.lanes.turn(None, embeds=True, drafts=2)
    desk.run(desk.rows(request, 1, 2))
    desk.lanes.turn(None, embeds=True)
    with pytest.raises(Exception, match="nothing is drafted here"):
        desk.run(desk.rows(request, 1, 2))
