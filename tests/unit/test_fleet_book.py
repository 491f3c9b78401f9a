"""The fleet's pure parts: plans in flight, who is late, the memory killer's counter."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeserve.errors import WireError
from homeserve.fleet.book import Debt, PlanBook
from homeserve.wire.records import Plan, PlanKind, Result


def plan(seq: int, ranks: int, epoch: int = 0) -> Plan:
    return Plan(seq, epoch, PlanKind.DECODE, ranks)


@settings(max_examples=40)
@given(st.integers(1, 3), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 7)), max_size=80))
def test_plans_complete_in_order_with_the_results_of_the_ranks_they_name(
    ranks: int, steps: list[tuple[int, int]]
) -> None:
    book = PlanBook(ranks)
    named: dict[int, int] = {}
    done: list[tuple[int, tuple[Result, ...]]] = []
    for who, mask in (*steps, *((rank, 0) for _ in steps for rank in range(ranks))):
        if who == 3:
            seq = book.issued + 1
            named[seq] = mask % (1 << ranks) or 1
            book.issue(plan(seq, named[seq]), 0.0)
        elif who < ranks and book.last_seq(who) < book.issued:
            done += book.answer(who, Result(who, book.last_seq(who) + 1, 0), 0.0)
        assert book.in_flight == book.issued - min(book.last_seq(rank) for rank in range(ranks))
        # Whoever hears of a plan has its credit: none comes back unannounced by a rank that the plan did not name.
        assert len(done) == min(book.last_seq(rank) for rank in range(ranks))
    assert [seq for seq, _ in done] == list(named)
    assert [[r.rank for r in results] for _, results in done] == [
        [rank for rank in range(ranks) if mask >> rank & 1] for mask in named.values()
    ]
    assert all(r.seq == seq for seq, results in done for r in results)
    assert book.in_flight == 0


def test_an_answer_out_of_turn_or_of_another_epoch_or_rank_is_refused() -> None:
    book = PlanBook(2)
    book.issue(plan(1, 3, epoch=4), 0.0)
    book.issue(plan(2, 3, epoch=4), 0.0)
    for rank, result in ((0, Result(0, 2, 4)), (0, Result(1, 1, 4)), (0, Result(0, 1, 3)), (1, Result(1, 0, 4))):
        with pytest.raises(WireError):
            PlanBook.answer(_copy(book), rank, result, 0.0)
    book.answer(0, Result(0, 1, 4), 0.0)
    book.answer(0, Result(0, 2, 4), 0.0)
    with pytest.raises(WireError, match="3 of 2 was due"):
        book.answer(0, Result(0, 3, 4), 0.0)


def _copy(book: PlanBook) -> PlanBook:
    import copy

    return copy.deepcopy(book)


def test_silence_counts_from_the_debt_and_ends_with_any_sign_of_life() -> None:
    book = PlanBook(2)
    assert book.late(1e9, 10) is None and book.next_check(10) is None
    book.issue(plan(1, 3), now=100.0)
    book.issue(plan(2, 1), now=105.0)  # more work is no sign of life
    assert book.next_check(10) == 110.0
    assert book.late(109.9, 10) is None
    late = book.late(111.0, 10)
    assert late is not None and late.silent_s == 11.0
    book.alive(111.0)
    book.answer(1, Result(1, 1, 0), 112.0)
    assert book.next_check(10) == 122.0
    late = book.late(122.5, 10)
    assert late is not None and late.rank == 0 and book.debt(0) == Debt(1, PlanKind.DECODE)
    book.answer(0, Result(0, 1, 0), 122.5)
    book.answer(0, Result(0, 2, 0), 122.6)
    late = book.late(132.6, 10)
    assert late is not None and late.rank == 1, "a rank that a plan does not name must pass it too"
    assert book.debt(1) == Debt(2, PlanKind.DECODE) and book.debt(0) is None
    book.answer(1, Result(1, 2, 0), 132.6)
    assert book.next_check(10) is None
    book.issue(plan(3, 3), now=500.0)  # idle time before a debt is not silence
    assert book.late(505.0, 10) is None


def test_a_rank_is_not_late_while_another_one_moves() -> None:
    """It may be waiting for that one."""
    book = PlanBook(2)
    book.issue(plan(1, 3), now=0.0)
    book.answer(0, Result(0, 1, 0), 9.0)
    assert book.next_check(10) == 19.0 and book.late(18.0, 10) is None
    book.alive(18.0)
    assert book.late(27.0, 10) is None
    late = book.late(28.0, 10)
    assert late is not None and (late.rank, late.text) == (1, "gave no sign for 10.0 s")


def test_one_answer_takes_no_longer_than_the_limit_whatever_moves() -> None:
    book = PlanBook(2)
    book.issue(plan(1, 3), now=0.0)
    for now in range(0, 40, 5):
        book.alive(float(now))
        late = book.late(float(now), 10, 30)
        assert (late is not None) is (now >= 30)
    assert late is not None and late.text == "has not answered for 35.0 s"
    assert book.next_check(10, 30) == 30.0
    book.pardon(40.0)  # whoever keeps this book was stopped himself
    assert book.late(49.0, 10, 30) is None and book.next_check(10, 30) == 50.0


def test_a_load_is_told_from_other_plans() -> None:
    book = PlanBook(2)
    assert not book.loading
    book.issue(Plan(1, 0, PlanKind.LOAD, 3), 0.0)
    book.answer(0, Result(0, 1, 0), 1.0)
    assert book.loading
    book.answer(1, Result(1, 1, 0), 1.0)
    book.issue(plan(2, 3), 2.0)
    assert not book.loading
