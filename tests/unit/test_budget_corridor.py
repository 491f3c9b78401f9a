"""The corridor: minima are exact whatever is thinned out, breaches are episodes, memory is bounded."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budget.corridor import CALM_SAMPLES, Corridor
from budget.facts import MIB

FLOOR = 100 * MIB
_free = st.lists(st.none() | st.integers(0, 300).map(lambda count: count * MIB), min_size=20, max_size=120)


def filled(values: list[int | None], capacity: int = 6) -> Corridor:
    corridor = Corridor((FLOOR,), 100, capacity)
    for index, value in enumerate(values):
        corridor.sample(index / 10, f"phase {index // 7}", (value,))
    return corridor


@settings(max_examples=20)
@given(_free)
def test_the_minimum_is_exact_however_much_is_thinned_out(values: list[int | None]) -> None:
    corridor = filled(values)
    known = [(value, index) for index, value in enumerate(values) if value is not None]
    least = corridor.least(0)
    if not known:
        assert least is None
        return
    value, index = min(known)
    assert least is not None and (least.free_bytes, least.at_s) == (value, index / 10)
    assert least.phase == f"phase {index // 7}"
    kept = [sample.free_bytes for sample in corridor.samples(0) if sample.free_bytes is not None]
    assert min(kept) == value


def test_one_dip_among_thousands_of_samples_is_kept_with_its_time() -> None:
    values: list[int | None] = [300 * MIB + index for index in range(5000)]
    values[1234] = 7 * MIB
    corridor = Corridor((FLOOR,), 100)
    for index, value in enumerate(values):
        corridor.sample(index / 10, "serving", (value,))
    assert (123.4, 7 * MIB) in {(sample.at_s, sample.free_bytes) for sample in corridor.samples(0)}
    assert len(corridor.samples(0)) <= 600 and corridor.breaches(0) == 1


@settings(max_examples=20)
@given(_free, st.integers(4, 40))
def test_samples_are_bounded_and_in_order_and_the_last_ones_complete(values: list[int | None], capacity: int) -> None:
    corridor = filled(values, capacity)
    samples = corridor.samples(0)
    assert len(samples) == len(values) if len(values) <= capacity else len(samples) <= capacity
    assert all(first.at_s < second.at_s for first, second in pairwise(samples))
    recent = capacity // 2 if len(values) > capacity else len(values)
    assert [sample.free_bytes for sample in samples][-recent:] == values[-recent:]
    assert corridor.taken == len(values)


@settings(max_examples=20)
@given(_free)
def test_a_breach_is_an_episode(values: list[int | None]) -> None:
    corridor = Corridor((FLOOR,), 100)
    begun = [breach for index, value in enumerate(values) for breach in corridor.sample(index, "p", (value,))]
    expected, calm = [], CALM_SAMPLES
    for index, value in enumerate(values):
        if value is None:
            continue
        if value < FLOOR and calm >= CALM_SAMPLES:
            expected.append(float(index))
        calm = 0 if value < FLOOR else calm + 1
    assert [breach.sample.at_s for breach in begun] == expected
    assert corridor.breaches(0) == len(expected)
    assert all(breach.floor_bytes == FLOOR and breach.device == 0 for breach in begun)


def test_a_value_that_hovers_around_the_floor_is_one_breach() -> None:
    hovering = [FLOOR - 1, FLOOR] * 50
    assert filled(hovering).breaches(0) == 1
    assert filled([*hovering, *[FLOOR] * CALM_SAMPLES, FLOOR - 1]).breaches(0) == 2
    assert filled([FLOOR] * 50).breaches(0) == 0, "the floor itself is enough"


def test_unknown_values_neither_begin_nor_end_a_breach() -> None:
    assert filled([None] * 40).breaches(0) == 0
    assert filled([FLOOR - 1, *[None] * 40, FLOOR - 1]).breaches(0) == 1


def test_the_json_says_what_is_known_and_that_somebody_looked() -> None:
    corridor = Corridor((FLOOR,), 100.0)
    assert corridor.as_json()["devices"][0]["min_free_mib"] is None
    corridor.sample(0.05, "starting", (300 * MIB,))
    corridor.set_floors((FLOOR, 50 * MIB))
    corridor.sample(0.15, "weights", (90 * MIB, 60 * MIB))
    corridor.sample(0.45, "ready", (200 * MIB,))
    told = corridor.as_json(indices=(1, 0))
    assert json.loads(json.dumps(told)) == told
    assert (told["schema"], told["floor_mib"], told["period_ms"]) == (1, 100.0, 100.0)
    assert (told["taken"], told["seconds"], told["longest_gap_ms"]) == (3, 0.4, 300.0)
    card, host = told["devices"]
    assert (card["index"], card["floor_mib"], card["min_free_mib"], card["breaches"]) == (0, 50.0, 60.0, 0)
    assert card["samples"] == [[0.15, 60.0, "weights"], [0.45, None, "ready"]]
    assert (host["index"], host["min_free_mib"], host["at"], host["phase"]) == (1, 90.0, 0.15, "weights")
    assert host["breaches"] == 1
    assert host["samples"] == [[0.05, 300.0, "starting"], [0.15, 90.0, "weights"], [0.45, 200.0, "ready"]]


def test_a_ring_too_small_to_thin_out_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 4"):
        Corridor((0,), 100, capacity=3)
