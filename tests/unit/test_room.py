"""Who fits beside whom, over made-up plans: sizes in MiB on a host of 1000."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from budget.beside import HOST
from budget.facts import MIB, Box, MemoryFacts
from budget.host_lines import engine_base_bytes
from homeserve import room
from homeserve.errors import BudgetError
from homeserve.holding import held_bytes

TOTAL = 1000


def plan(size: int) -> Any:
    """Of a model that is promised so much beside what all models share."""
    return SimpleNamespace(size=size * MIB + engine_base_bytes())


class Sizes(room.Room):
    """A room whose planner compares sizes. All that is promised is held, and nothing else is."""

    def __init__(self, inside: list[int]) -> None:
        free = (TOTAL - sum(inside)) * MIB
        memory = MemoryFacts(TOTAL * MIB, TOTAL * MIB, "MemTotal", free)
        super().__init__({}, lambda: Box("b", memory, None))
        self.tried: list[int] = []

    def _planned(self, resident: Any, room: Box) -> Any:
        assert room.memory is not None and room.memory.available_bytes is not None
        self.tried.append(room.memory.available_bytes // MIB)
        if resident.size * MIB > room.memory.available_bytes:
            raise BudgetError(f"{resident.size} of {self.tried[-1]} MiB")
        return plan(resident.size)


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "promised", lambda plan: {HOST: plan.size})
    monkeypatch.setattr(room, "held_bytes", lambda pids: sum(pids) * MIB)


def in_the_way(wanted: int, *inside: int) -> list[int]:
    """`inside` in the order in which they would have to leave."""
    model: Any = SimpleNamespace(size=wanted)
    return Sizes(list(inside)).in_the_way(model, [plan(size) for size in inside], inside)


def test_who_fits_beside_all_sends_nobody_away() -> None:
    assert in_the_way(400, 300, 300) == []
    assert in_the_way(1000) == []


def test_as_few_of_the_first_as_possible_leave() -> None:
    assert in_the_way(500, 300, 300, 300) == [0, 1]
    assert in_the_way(400, 300, 300, 300) == [0]
    assert in_the_way(1000, 300, 300, 300) == [0, 1, 2]


def test_none_leaves_whose_memory_is_not_needed() -> None:
    assert in_the_way(700, 100, 600, 200) == [1], "the small one need not"
    assert in_the_way(800, 100, 200, 600) == [0, 2], "rather the one used longest ago leaves"


def test_what_does_not_fit_alone_is_told_with_all_gone() -> None:
    with pytest.raises(BudgetError, match="1001 of 1000 MiB"):
        in_the_way(1001, 300, 300)


def test_two_that_come_in_fit_beside_those_that_stay_by_then() -> None:
    inside = [300, 300]
    for wanted, waits, fits in ((200, 500, True), (200, 501, False), (401, 100, False)):
        model, other = (SimpleNamespace(size=size) for size in (wanted, waits))
        plans = [plan(size) for size in inside]
        assert Sizes(inside).both_fit(model, other, plans, [False, True], inside) is fits  # type: ignore[arg-type]


def test_one_that_is_nearly_gone_is_promised_nothing() -> None:
    model: Any = SimpleNamespace(size=700)
    assert Sizes([300, 300]).in_the_way(model, [None, plan(300)], [300, 300]) == []


def test_where_nobody_tells_what_is_held_what_is_promised_is_taken_for_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "held_bytes", lambda pids: None)
    assert in_the_way(400, 300, 300) == [] and in_the_way(500, 300, 300) == [0]


def test_what_processes_hold_is_what_is_anonymous_or_shared(tmp_path: Path) -> None:
    for pid, anonymous in ((7, 100), (8, 20)):
        folder = tmp_path / "proc" / str(pid)
        folder.mkdir(parents=True)
        lines = ["1000-2000 ---p 00000000 00:00 0 [rollup]", "Rss: 999 kB", f"Pss_Anon: {anonymous} kB"]
        lines += ["Pss_File: 500 kB", "Pss_Shmem: 3 kB"]
        (folder / "smaps_rollup").write_text("\n".join(lines))
    assert held_bytes((7, 8, 9), tmp_path) == 126 * 1024, "one has gone meanwhile"
    assert held_bytes((9,), tmp_path) is None
