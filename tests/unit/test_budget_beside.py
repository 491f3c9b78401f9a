"""A box as a model sees it that comes in beside others: what they hold is given back, what is promised is taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from budget.beside import HOST, beside, promised
from budget.ceilings import ceilings
from budget.facts import MIB, Box, Card, MemoryFacts
from budget.ledger import ALWAYS, BOOT, Line


def box(available: int | None, *cards: Card, limit: int = 1000) -> Box:
    left = None if available is None else available * MIB
    return Box("b", MemoryFacts(2000 * MIB, limit * MIB, "MemTotal", left), None, cards)


def host_mib(of: Box) -> int:
    ceiling = ceilings(of, 0).devices[-1].ceiling_bytes
    assert ceiling is not None
    return ceiling // MIB


def test_what_was_touched_is_not_counted_twice() -> None:
    """A model is promised 300 MiB and holds 250 of them: of 1000 another may have 700, whatever is touched."""
    for held in (0, 250, 300):
        seen = beside(box(1000 - held), {HOST: held * MIB}, {HOST: 300 * MIB})
        assert host_mib(seen) == 700


def test_who_leaves_gives_back_what_it_holds() -> None:
    both = beside(box(400), {HOST: 600 * MIB}, {HOST: 600 * MIB})
    one = beside(box(400), {HOST: 600 * MIB}, {HOST: 300 * MIB})
    none = beside(box(400), {HOST: 600 * MIB}, {})
    assert [host_mib(each) for each in (both, one, none)] == [400, 700, 1000]


@pytest.mark.parametrize(("gives", "takes", "left"), [(5000, 0, 1000), (0, 5000, 0)])
def test_no_more_than_the_limit_and_no_less_than_nothing(gives: int, takes: int, left: int) -> None:
    assert host_mib(beside(box(900), {HOST: gives * MIB}, {HOST: takes * MIB})) == left


def test_where_nobody_tells_what_is_available_what_is_promised_is_taken_all_the_same() -> None:
    before, after = host_mib(box(None)), host_mib(beside(box(None), {}, {HOST: 100 * MIB}))
    assert after <= max(0, before - 100)


@pytest.mark.parametrize(
    "facts",
    [
        {"free_bytes": 9000 * MIB},
        {"used_bytes": 1000 * MIB, "reserved_bytes": 0},
        {"used_bytes": 1000 * MIB, "reserved_bytes": 0, "free_bytes": 9000 * MIB},
    ],
    ids=("free", "used", "both"),
)
def test_a_card_has_back_what_those_that_leave_were_promised(facts: dict[str, Any]) -> None:
    card = Card("nvidia", "GPU-a", "A card", arch="sm_86", total_bytes=10000 * MIB, **facts)
    before = ceilings(box(900, card), 0).devices[0].ceiling_bytes
    seen = beside(box(900, card), {"GPU-a": 500 * MIB}, {"GPU-a": 200 * MIB})
    after = ceilings(seen, 0).devices[0].ceiling_bytes
    assert before is not None and after == before + 300 * MIB
    assert host_mib(seen) == 900, "the host has nothing of it"


def test_a_unified_device_gives_back_of_the_host_what_its_carve_out_does_not_hold() -> None:
    apu = Card(
        "amd", "apu", "An APU", arch="gfx1103", unified=True, total_bytes=512 * MIB, used_bytes=500 * MIB,
        gtt_total_bytes=800 * MIB, gtt_used_bytes=300 * MIB,
    )  # fmt: skip
    seen = beside(box(600, apu), {"apu": 700 * MIB}, {})
    assert host_mib(seen) == 800
    assert (seen.cards[0].used_bytes, seen.cards[0].gtt_used_bytes) == (0, 100 * MIB)


def test_nothing_given_and_nothing_taken_is_the_same_box() -> None:
    card = Card("nvidia", "GPU-a", "A card", total_bytes=10000 * MIB)
    assert beside(box(900, card), {}, {}) == box(900, card)


def test_a_plan_promises_its_peak_on_each_device() -> None:
    devices = [
        SimpleNamespace(id="GPU-a", index=0),
        SimpleNamespace(id="GPU-b", index=1),
        SimpleNamespace(id="cpu", index=2),
    ]
    lines = (
        Line(0, "weights", 5, ALWAYS, "computed"),
        Line(0, "staging", 3, (BOOT,), "reserve"),
        Line(2, "engine process", 7, ALWAYS, "measured"),
    )
    plan: Any = SimpleNamespace(ceilings=SimpleNamespace(devices=devices), lines=lines)
    assert promised(plan) == {"GPU-a": 8, "cpu": 7}
