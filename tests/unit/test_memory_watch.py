"""What the memory of a server is told, and when: phases of the load, breaches before there is an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from budget.ceilings import ceilings
from budget.corridor import Breach, Sample
from budget.facts import MIB, Box
from budget.ledger import ALWAYS, Line
from budget.profile import box_from_json
from homeserve.memory import UNTOLD_MAX, MemoryWatch, card_lines, cards_free


def breach(number: int) -> Breach:
    return Breach(0, 256 * MIB, Sample(float(number), number * MIB, "weights"))


def watched() -> MemoryWatch:
    return MemoryWatch(256 * MIB, lambda: "weights")


def test_breaches_from_before_the_engine_become_its_events() -> None:
    watch = watched()
    for number in range(UNTOLD_MAX + 4):
        watch._on_breach(breach(number))
    events: list[tuple[str, str]] = []
    engine: Any = SimpleNamespace(note=lambda kind, text: events.append((kind, text)))
    watch.tell(engine)
    assert len(events) == UNTOLD_MAX, "the first ones of very many are forgotten"
    assert events[0] == (
        "corridor_breach",
        "free memory of device 0 is down to 4 MiB, below the floor of 256 MiB (weights)",
    )
    watch._on_breach(breach(200))
    assert len(events) == UNTOLD_MAX + 1 and "200 MiB" in events[-1][1]


def planned(floor_mib: int) -> Any:
    """A plan for the CPU alone with such a floor."""
    cpu = SimpleNamespace(index=0, floor_bytes=floor_mib * MIB)
    flip = SimpleNamespace(peaks={})
    return SimpleNamespace(ceilings=SimpleNamespace(devices=[cpu]), ranks=(0,), lines=(), flip=flip)


async def test_the_highest_floor_of_the_models_that_are_in_holds() -> None:
    watch = watched()
    low, high = planned(100), planned(300)
    watch.planned(low, {"/a"})
    assert watch.corridor.as_json()["floor_mib"] == 100
    watch.planned(high, {"/a", "/b"})
    assert watch.corridor.as_json()["floor_mib"] == 300
    watch.forget(high, {"/a", "/b"})
    assert watch.corridor.as_json()["floor_mib"] == 100
    assert set(+watch.model_files) == {"/a"}, "a file that two models have stays until both are out"
    await watch.stop()


async def test_a_breach_is_told_to_every_engine_that_is_in() -> None:
    watch, told = watched(), []
    engines: list[Any] = [SimpleNamespace(note=lambda kind, text, n=n: told.append(n)) for n in (1, 2)]
    for engine in engines:
        watch.tell(engine)
    watch._on_breach(breach(3))
    watch.tell_no_more(engines[0])
    watch._on_breach(breach(4))
    assert told == [1, 2, 2]


async def test_stop_is_right_at_any_time() -> None:
    watch = watched()
    await watch.stop()
    watch = watched()
    watch.start()
    await watch.stop()
    await watch.stop()
    assert watch.corridor.as_json()["taken"] >= 0


def test_what_ranks_on_cards_counted_are_lines_of_the_plan() -> None:
    """The arena is the plan's, rows are those of the layout that it begins with, what is pinned is the host's; what the
    plan lacks is left out, and so is the copy, which is found by its address."""
    plan: Any = SimpleNamespace(
        ranks=(0, 1),
        layouts=("pipeline", "tensor"),
        ceilings=SimpleNamespace(devices=[SimpleNamespace(index=index) for index in range(3)]),
        lines=(
            Line(0, "weights arena", 9, ALWAYS, "computed"),
            Line(0, "kv, pipeline", 8, ("boot", "pipeline"), "computed"),
            Line(0, "kv, tensor", 7, ("tensor",), "computed"),
            Line(0, "context", 6, ALWAYS, "reserve"),
            Line(0, "mailboxes", 6, ALWAYS, "reserve"),
            Line(1, "weights arena", 5, ALWAYS, "computed"),
            Line(2, "weights copy", 4, ALWAYS, "computed"),
            Line(2, "staging", 3, ALWAYS, "computed"),
        ),
    )
    counted = {"weights": 100, "kv": 50, "staging": 1, "weights copy": 4, "exchange": 5, "mailboxes": 7}
    own = ((0, "weights arena", 100), (0, "kv, pipeline", 50), (0, "mailboxes", 7), (2, "staging", 1))
    assert card_lines(plan, 0, counted) == own
    assert card_lines(plan, 1, counted) == ((1, "weights arena", 100), (2, "staging", 1))
    assert card_lines(plan, 1, {"library": 9}) == ((1, "library", 9),), "what no plan foresees is told all the same"


def test_free_memory_of_cards_is_that_of_their_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the card's id, whatever its number now; two ranks of one card are one, ranks on the CPU none."""

    def box(*free: tuple[str, float | None]) -> Box:
        sizes = {"vendor": "nvidia", "uma": False, "vram_total_mib": 24000, "name": "A card"}
        cards = [sizes | {"id": each, "vram_free_mib": mib} for each, mib in free]
        return box_from_json({"id": "b", "mem_total_mib": 32000, "mem_available_mib": 30000, "gpus": cards}, "b")

    before = ceilings(box(("GPU-a", 23000), ("GPU-b", 22000), ("GPU-c", 21000)), None)
    plan: Any = SimpleNamespace(ceilings=before, ranks=(1, 1, 2, 3))
    after = box(("GPU-b", 2000), ("GPU-a", 23000))
    monkeypatch.setattr("budget.probe.read_box", lambda sources: after)
    assert cards_free(plan, "") == {1: (22000 * MIB, 2000 * MIB), 2: None}
    monkeypatch.setattr("budget.probe.read_box", lambda sources: pytest.fail("nobody asks for cards"))
    assert cards_free(SimpleNamespace(ceilings=before, ranks=(3,)), "") == {}  # type: ignore[arg-type]
