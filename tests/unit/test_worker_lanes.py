"""Lane tables: rows become batches, and a plan that does not fit is refused whole."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import PAGE_LEN, Limits
from homeserve.wire.records import Dry, LaneRows, NewLane, Plan, PlanKind, Sampling, pack_ints
from homeserve.worker.drawn import Drawn
from homeserve.worker.lanes import AWAITED, UNKNOWN, Group, LaneRefused, Lanes
from homeserve.worker.past import no_vocabulary, past_of
from homeserve.worker.places import own_pages
from homeserve.worker.sampling import draw

GREEDY = Sampling(temperature=0)
COUNTED = Sampling(repetition_penalty=1.2, dry=Dry(4.0, allowed_len=1))


def lanes() -> Lanes:
    return Lanes(Limits(rows=32, logit_rows=8, lanes=3, lane_pages=4), vocab=100, pool_pages=(20,))


def plan(*rows: LaneRows, drop: tuple[int, ...] = (), new: tuple[NewLane, ...] = ()) -> Plan:
    return Plan(1, 0, PlanKind.MIXED, 1, drop, new, rows)


def run(table: Lanes, work: Plan, drawn: int = 7) -> list[Group]:
    """What the runner does with a plan, with `drawn` as every token drawn."""
    table.check(work)
    table.apply(work)
    _, groups = table.batch(work.rows)
    for group in groups:
        table.advance(group)
        if group.rows.sample:
            table[group.lane].last_token = drawn
    return groups


def start(
    lane: int, request: int, tokens: list[int], pages: list[int], sampling: Sampling = GREEDY, at: int = 0
) -> Plan:
    rows = LaneRows(lane, request, at, pack_ints(tokens), pack_ints(pages), sample=True)
    return plan(rows, new=(NewLane(lane, request, at + len(tokens), sampling),))


def test_rows_of_several_lanes_become_one_batch() -> None:
    table = lanes()
    run(table, start(0, 10, [1, 2, 3], [5]), drawn=42)
    tokens = list(range(20, 38))
    rows = (
        LaneRows(0, 10, 3, b"", sample=True),
        LaneRows(2, 12, 16, pack_ints(tokens), pack_ints([9, 4, 7]), sample=False),
    )
    new = (NewLane(2, 12, 60, GREEDY),)
    work = plan(*rows, new=new)
    table.check(work)
    table.apply(work)
    batch, groups = table.batch(work.rows)
    assert batch.tokens.tolist() == [42, *tokens]
    assert batch.positions.tolist() == [3, *range(16, 34)]
    assert batch.lanes.tolist() == [0, *[2] * 18]
    assert batch.slots.tolist() == [[5 * 16 + 3, *range(4 * 16, 5 * 16), 7 * 16, 7 * 16 + 1]]
    assert batch.logit_rows.tolist() == [0]
    assert all(a.dtype == np.int32 for a in (batch.tokens, batch.positions, batch.slots, batch.lanes, batch.logit_rows))
    assert batch.tables is table.tables and table.tables[0, 2].tolist() == [9, 4, 7, 0]
    assert [(g.first, g.logits_first, g.logit_count) for g in groups] == [(0, 0, 1), (1, 1, 0)]


@pytest.mark.parametrize(
    ("sample", "prompt_logprobs", "rows"),
    [(False, -1, []), (True, -1, [3]), (False, 0, [0, 1, 2, 3]), (True, 5, [0, 1, 2, 3])],
)
def test_logit_rows_are_those_that_somebody_reads(sample: bool, prompt_logprobs: int, rows: list[int]) -> None:
    table = lanes()
    entry = LaneRows(1, 9, 0, pack_ints([1, 2, 3, 4]), pack_ints([0]), sample, prompt_logprobs=prompt_logprobs)
    work = plan(entry, new=(NewLane(1, 9, 4, GREEDY),))
    table.check(work)
    table.apply(work)
    batch, groups = table.batch(work.rows)
    assert batch.logit_rows.tolist() == rows
    assert groups[0].logit_count == len(rows)


def test_a_lane_dropped_and_taken_in_one_plan_starts_afresh() -> None:
    table = lanes()
    run(table, start(0, 10, [1, 2, 3], [5]))
    work = start(0, 11, [4], [6])
    run(table, plan(*work.rows, drop=(0,), new=work.new))
    assert table.occupied() == ((0, 11, 1),)
    assert table[0].length == 1 and table.tables[0, 0, 0] == 6
    run(table, plan(drop=(0, 2)))  # a lane that is free already may be dropped
    assert table.occupied() == ()


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (plan(LaneRows(0, 99, 3, b"")), "lane 0 is request 10's, not request 99's"),
        (plan(LaneRows(1, 10, 3, b"")), "lane 1 is free, not request 10's"),
        (plan(LaneRows(7, 10, 3, b"")), "there are 3 lanes"),
        (plan(LaneRows(0, 10, 3, b""), drop=(0,)), "lane 0 is free"),
        (plan(drop=(3,)), "there are 3 lanes"),
        (plan(LaneRows(0, 10, 4, b"")), "rows from 4 do not go on at 3"),
        (plan(LaneRows(0, 10, 2, b"")), "rows from 2 do not go on at 3"),
        (plan(LaneRows(0, 10, 3, b"", save=2)), "state slot 2 is no checkpoint's"),
        (plan(new=(NewLane(1, 11, 3, GREEDY, restore=99),)), "state slot 99 is no checkpoint's"),
        (plan(LaneRows(0, 10, 3, b""), LaneRows(0, 10, 4, b"")), "named twice"),
        (plan(LaneRows(0, 10, 3, pack_ints([1] * 14))), "are not covered by 1 pages"),
        (plan(LaneRows(0, 10, -1, pack_ints([1]))), "do not go on at 3"),
        (plan(LaneRows(0, 10, 3, b"", pack_ints([1, 2, 3, 4]))), "5 pages are more than the 4 of a lane"),
        (plan(LaneRows(0, 10, 3, b"", pack_ints([20]))), "outside the pool of 20"),
        (plan(LaneRows(0, 10, 3, pack_ints([100]))), "outside the vocabulary of 100"),
        (plan(LaneRows(0, 10, 3, b"abc")), "no int32 numbers"),
        (plan(new=(NewLane(0, 11, 3, GREEDY),)), "lane 0 is request 10's, 11 cannot take it"),
        (plan(new=(NewLane(1, 11, 3, GREEDY), NewLane(1, 12, 3, GREEDY))), "taken twice"),
        (plan(new=(NewLane(1, 11, 3, Sampling(logit_bias=((100, 1.0),))),)), "token 100 is not in the vocabulary"),
        (plan(new=(NewLane(1, 11, 3, Sampling(forbidden=(-1,))),)), "token -1 is not in the vocabulary"),
        (start(1, 11, [1] * 33, [0, 1, 2]), "a plan of 33 rows is more than 32"),
        (start(1, 11, [1], [0], COUNTED, at=16), "0 tokens of history where 16 are needed"),
        (start(1, 11, [1], [0], Sampling(dry=Dry(1.0)), at=16), "0 tokens of history where 16 are needed"),
        (
            plan(LaneRows(1, 11, 0, pack_ints([1] * 10), pack_ints([1]), True, 0), new=(NewLane(1, 11, 10, GREEDY),)),
            "logits of 10 rows are more than 8",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(work: Plan, why: str) -> None:
    table = lanes()
    run(table, start(0, 10, [1, 2, 3], [5]))
    before, tables = copy.deepcopy(table.lanes), table.tables.copy()
    with pytest.raises(LaneRefused) as caught:
        table.check(work)
    assert why in str(caught.value)
    np.testing.assert_array_equal(table.tables, tables)
    assert [lane and (lane.request, lane.length, lane.page_count) for lane in table.lanes] == [
        lane and (lane.request, lane.length, lane.page_count) for lane in before
    ]


def test_a_drawn_token_needs_a_draw() -> None:
    table = lanes()
    entry = LaneRows(0, 10, 0, pack_ints([1, 2]), pack_ints([5]))
    run(table, plan(entry, new=(NewLane(0, 10, 4, GREEDY),)))
    with pytest.raises(LaneRefused, match="no token was drawn"):
        table.check(plan(LaneRows(0, 10, 2, b"")))


@settings(max_examples=25)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(0, 2))
def test_counts_do_not_depend_on_chunks_or_a_prefix_hit(cuts: list[int], hit_pages: int) -> None:
    """However a sequence was cut, and however much of it came from the cache: the same tokens are counted, each
    once, and known in their order, so the same tokens are drawn."""
    tokens = np.random.default_rng(5).integers(0, 30, 45).astype(np.int32).tolist()
    prompt_len = 40
    table = lanes()
    hit = hit_pages * PAGE_LEN
    new = (NewLane(0, 1, prompt_len, COUNTED, pack_ints(tokens[:hit])),)
    pages: list[int] | None = [1, 2, 3]
    at = hit
    for cut in (*cuts, 99):
        end = min(at + cut, len(tokens))
        while at < end:
            last = min(end, at + 30)
            entry = LaneRows(0, 1, at, pack_ints(tokens[at:last]), pack_ints(pages or []))
            run(table, plan(entry, new=new))
            new, pages, at = (), None, last
    past = table[0].past
    assert past is not None and (counts := past.counts) is not None and table[0].length == len(tokens)
    assert counts.seen().tolist() == sorted(set(tokens))
    ids, times = counts.generated()
    expected = np.bincount(tokens[prompt_len:], minlength=100)
    assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == {i: n for i, n in enumerate(expected.tolist()) if n}
    assert past.order is not None and past.order.tokens() == tokens
    logits = np.random.default_rng(1).standard_normal((8, 100)).astype(np.float32)
    afresh = past_of(COUNTED, 100, no_vocabulary)
    assert afresh is not None
    afresh.add(np.array(tokens, np.int32), np.arange(len(tokens)) >= prompt_len)
    for at, row in enumerate(logits):
        assert draw(row, COUNTED, past, at, 5) == draw(row, COUNTED, afresh, at, 5)


# ------------------------------------------------------------------------------------------------------- KV groups


def windowed() -> Lanes:
    """A group that keeps everything, and one of 10 pages whose layers see 20 tokens."""
    limits = Limits(rows=64, logit_rows=8, lanes=2, lane_pages=6)
    return Lanes(limits, vocab=100, pool_pages=(20, 10), windows=(0, 20))


def at(position: int, *pages: int, lane: int = 0, count: int = 1) -> Plan:
    """A newcomer whose first row is at `position`; `pages` of both groups, one group after the other."""
    rows = LaneRows(lane, 10, position, pack_ints([1] * count), pack_ints(list(pages)), sample=True)
    return plan(rows, new=(NewLane(lane, 10, position + count, GREEDY),))


def test_each_kv_group_has_its_own_pages() -> None:
    table = windowed()
    work = at(15, 5, 6, 9, 3, count=3)
    table.check(work)
    table.apply(work)
    batch, _ = table.batch(work.rows)
    assert batch.slots.tolist() == [[5 * 16 + 15, 6 * 16, 6 * 16 + 1], [9 * 16 + 15, 3 * 16, 3 * 16 + 1]]
    assert batch.tables[:, 0, :2].tolist() == [[5, 6], [9, 3]]


def test_a_page_before_the_window_may_be_nobodys() -> None:
    """A row at 35 sees positions 16 to 35: of the second group it needs pages 1 and 2."""
    table = windowed()
    table.check(at(35, 5, 6, 7, UNKNOWN, 9, 3))
    for start, pages in ((34, (UNKNOWN, 9, 3)), (35, (9, UNKNOWN, 3)), (35, (UNKNOWN, 9, UNKNOWN)), (35, (2, 9, 10))):
        with pytest.raises(LaneRefused, match="outside the pool of the layers that see 20 tokens of 10"):
            table.check(at(start, 5, 6, 7, *pages))
    with pytest.raises(LaneRefused, match="outside the pool of 20"):
        table.check(at(35, UNKNOWN, 6, 7, 1, 9, 3))
    with pytest.raises(LaneRefused, match="3 pages for 2 KV groups"):
        table.check(at(0, 5, 6, 7))


def test_a_page_that_came_as_nobodys_is_looked_at_again() -> None:
    """Rows must go on where the lane's last ended, so that a window never moves back over such a page; a lane that is
    told so all the same is refused."""
    table = windowed()
    run(table, at(35, 5, 6, 7, UNKNOWN, 9, 3))
    table[0].length = 20
    with pytest.raises(LaneRefused, match="outside the pool of the layers that see 20 tokens"):
        table.check(plan(LaneRows(0, 10, 20, b"", sample=True)))


def divided(rank: int, *, draws: bool = False, embeds: bool = True) -> Lanes:
    """Rank `rank` of three whose pages are dealt out 2,1,1."""
    limits = Limits(rows=64, logit_rows=8, lanes=2, lane_pages=8)
    places = own_pages([8 * PAGE_LEN], (2, 1, 1), rank)
    return Lanes(limits, vocab=100, pool_pages=(8,), places=places, draws=draws, embeds=embeds)


@pytest.mark.parametrize(("rank", "local", "padding"), [(0, [0, 1, -1, -1], 4), (1, [-1, -1, 0, -1], 2)])
def test_a_rank_sees_its_own_pages_and_writes_those_of_others_into_the_padding(
    rank: int, local: list[int], padding: int
) -> None:
    table = divided(rank)
    tokens = list(range(50))
    work = start(1, 10, tokens, [0, 1, 2, 3])
    table.check(work)
    table.apply(work)
    batch, _ = table.batch(work.rows, epoch=2, seq=9)
    assert (batch.epoch, batch.seq) == (2, 9)
    assert batch.tables[0, 1, :4].tolist() == local
    places = [padding if page == -1 else page for page in local]
    assert batch.slots[0].tolist() == [places[p // PAGE_LEN] * PAGE_LEN + p % PAGE_LEN for p in range(50)]
    assert table.tables[0, 1, :4].tolist() == [0, 1, 2, 3], "the engine's pages stay known"


def test_a_token_that_another_rank_draws_is_awaited_and_taken_by_its_own_request() -> None:
    table = divided(0)
    work = start(0, 10, [1, 2, 3], [5])
    table.check(work)
    table.apply(work)
    for group in table.batch(work.rows)[1]:
        table.advance(group)
    assert table[0].last_token == AWAITED
    following = plan(LaneRows(0, 10, 3, b"", sample=True))
    table.check(following)
    with pytest.raises(AssertionError, match="not taken"):
        table.batch(following.rows)
    table.take_token(Drawn(0, 11, 40))
    assert table[0].last_token == AWAITED, "of a request that had the lane before"
    table.take_token(Drawn(0, 10, 41))
    table.take_token(Drawn(1, 10, 42))
    assert table.batch(following.rows)[0].tokens.tolist() == [41]


def test_a_rank_that_looks_up_no_rows_need_not_know_tokens_and_keeps_no_counts() -> None:
    table = divided(1, embeds=False)
    run(table, start(0, 10, [1, 2, 3], [5], COUNTED), drawn=AWAITED)
    assert table[0].past is None
    assert len(table.batch((LaneRows(0, 10, 3, b"", sample=True),))[0].tokens) == 1


# ------------------------------------------------------------------------------------------------------- another layout


def test_when_the_layout_changes_pages_are_found_where_they_lie_now() -> None:
    places = own_pages((20 * PAGE_LEN,), (2, 1), 1)
    table = lanes()
    run(table, start(0, 10, [1] * 30, [5, 2]))
    run(table, start(2, 11, [1, 2], [8]))
    table.turn(places, embeds=False)
    assert table.tables[0, 0, :2].tolist() == [5, 2] and table.local[0, 0, :2].tolist() == [1, 0]
    rows = (LaneRows(0, 10, 30, pack_ints([7, 8, 9]), pack_ints([6])), LaneRows(2, 11, 2, pack_ints([4])))
    work = plan(*rows)
    table.check(work)
    table.apply(work)
    batch, _ = table.batch(work.rows)
    padding = 7 * PAGE_LEN  # of 20 pages in rounds of three, seven are rank 1's
    assert batch.slots.tolist() == [[14, 15, padding, 2 * PAGE_LEN + 2]]
    assert batch.tables[0, 0, :3].tolist() == [1, 0, -1]
    table.turn(None, embeds=True)
    batch, _ = table.batch(work.rows)
    assert batch.slots.tolist() == [[2 * 16 + 14, 2 * 16 + 15, 6 * 16, 8 * 16 + 2]]
    assert table.local is table.tables


def test_lanes_and_their_counts_stay_and_the_next_input_has_to_be_told() -> None:
    table = lanes()
    run(table, start(0, 10, [1, 2, 3], [5], COUNTED), drawn=42)
    table.turn(None, embeds=True)
    with pytest.raises(LaneRefused, match="no token was drawn that could be its next input"):
        table.check(plan(LaneRows(0, 10, 3, b"", sample=True)))
    (group,) = run(table, plan(LaneRows(0, 10, 3, pack_ints([42]), sample=True)))
    assert group.inputs.tolist() == [42] and table[0].length == 4
    past = table[0].past
    assert past is not None and (counts := past.counts) is not None and counts.generated()[0].tolist() == [42]
    assert past.order is not None and past.order.tokens() == [1, 2, 3, 42]


def test_a_token_that_was_awaited_under_the_old_layout_is_not_waited_for_under_the_new_one() -> None:
    table = Lanes(Limits(rows=32, logit_rows=8, lanes=1, lane_pages=4), vocab=100, pool_pages=(20,), draws=False)
    run(table, start(0, 10, [1, 2, 3], [5]))
    table[0].last_token = AWAITED
    table.turn(None, embeds=True)
    assert table[0].last_token == UNKNOWN
