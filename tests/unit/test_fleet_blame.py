"""Whom all wait for, from what each rank says of its own wait."""

from __future__ import annotations

import pytest

from homeserve.fleet.blame import Wait, culprit


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
