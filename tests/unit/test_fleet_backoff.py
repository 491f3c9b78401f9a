"""Waits between restarts."""

from __future__ import annotations

from homeserve.fleet.backoff import DELAY_MAX_S, FRUITFUL_DELAY_MAX_S, LIFE_RESETS_S, Backoff


def delays(count: int, *, lived_s: float, served: bool) -> list[float]:
    found = []
    state = Backoff()
    for _ in range(count):
        state = state.after_death(lived_s, served=served)
        found.append(state.delay_s)
    return found


def test_lives_that_did_nothing_wait_ever_longer() -> None:
    assert delays(8, lived_s=0, served=False) == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, DELAY_MAX_S]


def test_lives_that_worked_wait_little() -> None:
    assert delays(5, lived_s=3, served=True) == [0.0, 0.25, 0.5, 0.5, 0.5]
    assert max(delays(40, lived_s=3, served=True)) == FRUITFUL_DELAY_MAX_S


def test_a_minute_of_life_ends_the_row() -> None:
    assert delays(3, lived_s=LIFE_RESETS_S, served=True) == [0.0, 0.0, 0.0]


def test_one_that_worked_ends_the_row_of_those_that_did_nothing() -> None:
    state = Backoff()
    for served in (False, False, False, True, False):
        state = state.after_death(1, served=served)
    assert (state.deaths_in_a_row, state.fruitless_deaths, state.delay_s) == (5, 1, 0.25)
