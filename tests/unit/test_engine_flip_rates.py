"""How fast each layout is: from plan times to tokens per second."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from homeserve.engine.rates import HALF_LIFE_S, WINDOW, Rates
from homeserve.engine.timeline import Pace, PlanTimes, Timeline
from homeserve.wire.records import LaneRows, PlanKind, Result, Sample, pack_ints

GROUPS = {"pipeline": 2, "tensor": 1}


def rates(**more: object) -> Rates:
    return Rates(GROUPS, 128, **more)  # type: ignore[arg-type]


def paced(plans: Sequence[PlanTimes], follows: bool = False) -> list[PlanTimes]:
    """With their shares of the time."""
    pace = Pace()
    return [replace(plan, seconds=pace.seconds(plan.life, plan.ranks, follows)) for plan in plans]


def chunk(seq: int, began: int, took: int, rows: int = 128, ranks: int = 1, life: int = 0) -> PlanTimes:
    """Each rank begins when the one before it is done."""
    times = tuple((rank, began + rank * took, took, 0) for rank in range(ranks))
    return PlanTimes(life, seq, PlanKind.PREFILL, rows, rows, times)


def decode(seq: int, began: int, took: int, rows: int = 1) -> PlanTimes:
    return PlanTimes(0, seq, PlanKind.DECODE, rows, 0, ((0, began, took, 0),))


def test_chunks_one_behind_the_other_count_at_the_pace_at_which_they_come_out() -> None:
    """Two ranks of 100 ms each: the first chunk takes 200 ms, each further one 100."""
    one = rates()
    one.add("pipeline", paced([chunk(n, 100_000 * n, 100_000, ranks=2) for n in range(5)]))
    assert one.speeds()["pipeline"].prefill_tok_s == pytest.approx(5 * 128 / 0.6)


def test_what_nothing_was_done_in_is_nobodys_time() -> None:
    one = rates()
    one.add("tensor", paced([chunk(0, 0, 100_000), chunk(1, 50_000_000, 100_000)]))
    assert one.speeds()["tensor"].prefill_tok_s == pytest.approx(1280)


def test_plans_that_came_in_two_portions_still_follow_each_other() -> None:
    one, two = rates(), rates()
    plans = paced([chunk(n, 100_000 * n, 100_000, ranks=2) for n in range(4)])
    one.add("pipeline", plans)
    two.add("pipeline", plans[:2])
    two.add("pipeline", plans[2:])
    assert one.speeds() == two.speeds()


def test_a_life_that_ended_is_no_predecessor() -> None:
    one = rates()
    one.add("tensor", paced([chunk(9, 900_000, 100_000), chunk(1, 100_000, 100_000, life=1)]))
    assert one.speeds()["tensor"].prefill_tok_s == pytest.approx(1280)


def test_small_pieces_and_single_plans_say_nothing() -> None:
    one = rates()
    one.add("tensor", paced([chunk(n, n * 1000, 1000, rows=63) for n in range(9)]))
    assert one.speeds()["tensor"].prefill_tok_s is None
    one.add("tensor", paced([chunk(10, 10**6, 1000)]))
    assert one.speeds()["tensor"].prefill_tok_s is None and not one.measured("tensor")
    assert one.as_json()["tensor"] == {"prefill_tok_s": None, "decode_tok_s": None, "n": 10}


def test_decode_is_compared_at_equal_numbers_of_sequences() -> None:
    """Eight in one plan of one layout, and in two plans of four in the other, are the same eight."""
    one = rates()
    one.add("tensor", paced([decode(n, 100_000 * n, 100_000, rows=1) for n in range(4)]))
    one.add("tensor", paced([decode(9 + n, 10**6 + 100_000 * n, 100_000, rows=8) for n in range(4)]))
    one.add("pipeline", paced([decode(20 + n, 10**7 + 100_000 * n, 100_000, rows=4) for n in range(4)]))
    assert one.speeds(1)["tensor"].decode_tok_s == pytest.approx(10)
    assert one.speeds(9)["tensor"].decode_tok_s == pytest.approx(80)
    assert one.speeds(8)["pipeline"].decode_tok_s == pytest.approx(40)
    assert one.speeds(1)["pipeline"].decode_tok_s == pytest.approx(40), "the next number that was measured"


def test_what_was_measured_long_ago_is_forgotten() -> None:
    one = rates()
    one.add("tensor", paced([chunk(n, 100_000 * n, 100_000) for n in range(WINDOW)]))
    one.add("tensor", paced([chunk(WINDOW + n, 10**8 + 10_000 * n, 10_000) for n in range(WINDOW)]))
    assert one.speeds()["tensor"].prefill_tok_s == pytest.approx(12_800)


def test_estimates_are_believed_until_it_is_measured() -> None:
    one = rates(estimates={"tensor": (500.0, 5.0)}, cost_s=4.0)
    assert one.speeds()["tensor"].prefill_tok_s == 500.0 and one.speeds()["tensor"].decode_tok_s == 5.0
    assert one.speeds()["pipeline"].prefill_tok_s is None
    one.add("tensor", paced([chunk(n, 100_000 * n, 100_000) for n in range(3)]))
    assert one.speeds()["tensor"].prefill_tok_s == pytest.approx(1280)
    assert one.as_json()["tensor"]["decode_tok_s"] is None, "an estimate is not what was measured"


def test_a_bad_moment_long_ago_is_believed_less_and_less() -> None:
    """So the layout that it was measured in is tried again; a good one is not forgotten."""
    one = rates(estimates={"tensor": (1000.0, 50.0), "pipeline": (1000.0, 5.0)})
    for layout in GROUPS:
        one.add(layout, paced([chunk(n, 128_000 * n, 128_000) for n in range(3)]))
        one.add(layout, paced([decode(9 + n, 10**6 + 100_000 * n, 100_000) for n in range(3)]))
    (end,) = {one.speeds()[layout].decode_tok_s for layout in GROUPS}
    assert end == pytest.approx(10)
    for age, bad in ((0, 10), (HALF_LIFE_S, 2 / (1 / 10 + 1 / 50)), (20 * HALF_LIFE_S, 50)):
        speeds = one.speeds(1, now=1.3 + age)
        assert speeds["tensor"].decode_tok_s == pytest.approx(bad, rel=1e-3)
        assert speeds["pipeline"].decode_tok_s == pytest.approx(10), "above the estimate"
        assert speeds["tensor"].prefill_tok_s == pytest.approx(1000)
    assert one.as_json()["tensor"]["decode_tok_s"] == 10, "what was measured"


def test_what_is_measured_again_is_not_mixed_with_what_is_old() -> None:
    one = rates(estimates={"tensor": (1000.0, 50.0)})
    one.add("tensor", paced([decode(n, 100_000 * n, 100_000) for n in range(9)]))
    later = round(1e6 * HALF_LIFE_S) + 10**6
    one.add("tensor", paced([decode(20, later, 20_000)]))
    assert one.speeds()["tensor"].decode_tok_s == 50.0, "one plan is not enough"
    one.add("tensor", paced([decode(21, later + 20_000, 20_000)]))
    assert one.speeds()["tensor"].decode_tok_s == pytest.approx(50)


def test_rounds_count_with_what_they_drew() -> None:
    one = rates()
    plans = [PlanTimes(0, n, PlanKind.DECODE, 2, 0, ((0, 100_000 * n, 100_000, 0),), 6, 5) for n in range(4)]
    one.add("tensor", paced(plans))
    assert one.speeds(2)["tensor"].decode_tok_s == pytest.approx(50)


def test_the_pause_in_front_of_a_round_is_time_of_its_layout() -> None:
    """Plans of 100 ms with 50 ms between: issued when the one before was back, not when a request came."""
    timeline, one = Timeline(), rates()
    row = LaneRows(0, 1, 9, pack_ints([1]), sample=True, drafts=3)
    drawn = tuple(Sample(0, 1, 10 + n, 5) for n in range(3))
    shares = []
    for seq, began in enumerate((10**6, 10**6 + 150_000, 10**6 + 300_000)):
        timeline.issued(seq, PlanKind.DECODE, (row,), prompt_rows=0)
        shares.append(timeline.answered(seq, (Result(0, seq, 0, samples=drawn, busy_us=100_000, began_us=began),)))
    timeline.settled()
    timeline.issued(3, PlanKind.DECODE, (row,), prompt_rows=0)
    shares.append(timeline.answered(3, (Result(0, 3, 0, samples=drawn, busy_us=100_000, began_us=9 * 10**6),)))
    assert shares == pytest.approx([0.1, 0.15, 0.15, 0.1])
    assert [plan.seconds for plan in timeline.recent()] == shares, "one time for both that ask"
    one.add("tensor", timeline.recent())
    assert one.speeds(1)["tensor"].decode_tok_s == pytest.approx(12 / 0.5)


def test_a_flip_costs_what_it_took_there_and_back() -> None:
    one = rates(cost_s=4.0)
    assert one.cost_s == 4.0
    one.add_flip("tensor", 1.0)
    assert one.cost_s == 2.0, "the way back is not known yet"
    one.add_flip("pipeline", 2.0)
    one.add_flip("pipeline", 4.0)
    assert one.cost_s == 4.0


def test_a_timeline_tells_what_is_new_of_it() -> None:
    timeline = Timeline()
    row = LaneRows(0, 1, 0, pack_ints([1, 2, 3]))
    seen, plans = timeline.since(0)
    assert (seen, plans) == (0, ())
    for seq in range(1, 301):
        timeline.issued(seq, PlanKind.PREFILL, (row,))
        timeline.answered(seq, (Result(0, seq, 0),))
    seen, plans = timeline.since(seen)
    assert seen == 300 and [plan.seq for plan in plans] == list(range(45, 301)), "as far as they are kept"
    assert timeline.since(seen) == (300, ())
    timeline.issued(301, PlanKind.DECODE, (row,), prompt_rows=0)
    timeline.answered(301, (Result(0, 301, 0),))
    _, (plan,) = timeline.since(seen)
    assert (plan.rows, plan.prompt_rows) == (3, 0), "rows that bring their tokens behind a flip are no prompt"
