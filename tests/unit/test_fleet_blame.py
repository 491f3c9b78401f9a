"""Whom all wait for, from what each rank says of its own wait."""

from __future__ import annotations

from typing import Any

import pytest

from homeserve.fleet.blame import Wait, culprit, standing


def wait(peer: int, seq: int = 7) -> Wait:
    return Wait(seq, peer, f"rank {peer} did not come")


def test_the_one_at_the_end_of_the_waiting_is_named() -> None:
    found = culprit(0, {0: wait(2), 2: wait(1)}, halted={1}, answered=[6, 6, 6])
    assert (found.rank, found.certain) == (1, True)
    assert [rank for rank, _ in found.waits] == [0, 2]


def test_one_that_may_be_waiting_itself_is_not_named_for_certain() -> None:
    found = culprit(0, {0: wait(2)}, halted=(), answered=[6, 6, 6])
    assert (found.rank, found.certain) == (2, False)


def test_a_stopped_rank_is_the_one_also_where_nobody_has_named_it_yet() -> None:
    """Rank 2 waits for it and has not said so."""
    found = culprit(0, {0: wait(2)}, halted={1}, answered=[6, 6, 6])
    assert (found.rank, found.certain) == (1, True)


def test_a_rank_that_came_after_all_came_too_late() -> None:
    found = culprit(0, {0: wait(2, seq=7)}, halted=(), answered=[6, 6, 7])
    assert (found.rank, found.certain) == (2, True)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_ranks_in_a_ring_are_told_by_the_one_furthest_behind(first: int) -> None:
    found = culprit(first, {0: wait(1), 1: wait(2), 2: wait(0)}, halted=(), answered=[6, 4, 6])
    assert (found.rank, found.certain) == (1, True)


def test_of_several_stopped_ranks_the_one_that_is_waited_for_is_named() -> None:
    found = culprit(0, {0: wait(2)}, halted={1, 2}, answered=[6, 5, 6])
    assert found.rank == 2
    assert culprit(0, {}, halted={1, 2}, answered=[6, 5, 6]).rank == 1


def test_who_waits_for_the_one_at_the_end_is_said_also_where_the_search_begins_there() -> None:
    found = culprit(1, {0: wait(2), 2: wait(1)}, halted={1}, answered=[6, 6, 6])
    assert (found.rank, found.certain) == (1, True)
    assert found.waits == ((2, wait(1)),)


def acts(posted: list[int], *channels: tuple[int, int, int, int, int]) -> dict[str, Any]:
    """Positions: what each rank has posted; (from, to, sent, taken, sleepers) of each channel."""
    last = {"seq": 7, "kind": "sum", "label": "dense 3"}
    return {
        "mailboxes": [
            {"rank": rank, "posted": count, "sleepers": 0, "last": last if count else None}
            for rank, count in enumerate(posted)
        ],
        "channels": [
            {"from": a, "to": b, "sent": sent, "taken": taken, "sleepers": sleepers, "last": None}
            for a, b, sent, taken, sleepers in channels
        ],
    }


def peers(positions: dict[str, Any], owed: dict[int, int] | None = None) -> dict[int, int]:
    waits = standing(positions, owed or {0: 7, 1: 7, 2: 7})
    return {rank: wait.peer for rank, wait in waits.items()}


@pytest.mark.parametrize("late", [0, 1, 2])
def test_of_a_sum_the_rank_that_has_posted_less_is_waited_for(late: int) -> None:
    posted = [40, 40, 40]
    posted[late] = 39
    assert peers(acts(posted)) == {rank: late for rank in range(3) if rank != late}


def test_ranks_that_have_posted_the_same_do_not_wait_for_one_another() -> None:
    assert peers(acts([40, 40, 40])) == {}


def test_of_several_that_are_behind_the_last_is_waited_for() -> None:
    """Rank 1 has posted and not taken yet; it is about to wait for rank 2 itself."""
    assert peers(acts([40, 39, 38])) == {0: 2, 1: 2}


@pytest.mark.parametrize("late", [0, 1])
def test_counts_go_round(late: int) -> None:
    posted = [1, 1]
    posted[late] = (1 << 32) - 1
    assert peers(acts(posted), {0: 7, 1: 7}) == {1 - late: late}


def test_a_reader_that_sleeps_waits_for_the_writer_of_an_empty_channel() -> None:
    empty, filled, awake = (0, 1, 5, 5, 1), (1, 2, 5, 4, 1), (2, 0, 5, 5, 0)
    assert peers(acts([0, 0, 0], empty, filled, awake)) == {1: 0}
    assert peers(acts([0, 0, 0], empty), {0: 7, 2: 7}) == {}, "a rank that owes nothing waits for nobody"
    assert standing(acts([0, 0, 0], empty), {1: 9})[1] == Wait(9, 0, "for its message 6")


def test_a_pipeline_whose_last_rank_stands_still() -> None:
    """Tokens of rank 2 for rank 0, activations of rank 1 for rank 2 that it does not take."""
    positions = acts([0, 0, 0], (0, 1, 5, 5, 1), (1, 2, 5, 4, 0), (2, 0, 4, 4, 1))
    waits = standing(positions, {0: 7, 1: 7, 2: 6})
    found = culprit(1, waits, halted=(), answered=[6, 6, 5])
    assert found.rank == 2 and [rank for rank, _ in found.waits] == [1, 0]
