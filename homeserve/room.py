"""Who fits beside whom: the models of a server, by their plans.

What comes in may have what is free, plus what our processes hold now (they are counted by their plans instead), less
what the plans of those that stay promise (`budget.beside`). That is tried with everybody staying, and with nobody,
which tells whether it fits at all; then with as few leaving as possible.

Every method reads the box and plans, which takes its time: in a thread. A plan that is None is of a model that is
nearly gone, and of which nothing is promised any more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from budget.beside import HOST, beside, promised
from budget.facts import Box
from budget.host_lines import engine_base_bytes
from budget.plan import Plan
from homeserve.errors import BudgetError
from homeserve.holding import held_bytes
from homeserve.resident import Resident, chosen_plan

Plans = Sequence[Plan | None]


class Room:
    """Of one box. `pids` are always our processes."""

    def __init__(self, environ: Mapping[str, str], read_box: Callable[[], Box]) -> None:
        self._environ = environ
        self._read_box = read_box

    def beside(self, inside: Plans, pids: Sequence[int]) -> Box:
        """What a model may have of the box beside all that are inside."""
        return room_of(self._read_box(), inside, inside, pids)

    def in_the_way(self, resident: Resident, inside: Plans, pids: Sequence[int]) -> list[int]:
        """Which of those inside, by their places, are in the way of this model: as few of the first as possible, and of
        these none that the others make unnecessary. Raises the BudgetError of one that does not fit even alone."""
        box = self._read_box()

        def lacks(leaving: Collection[int]) -> BudgetError | None:
            stay = [plan for place, plan in enumerate(inside) if place not in leaving]
            try:
                self._planned(resident, room_of(box, inside, stay, pids))
            except BudgetError as error:
                return error
            return None

        every = range(len(inside))
        if lacks(()) is None:
            return []
        if (error := lacks(every)) is not None:
            raise error
        found = list(next((every[:count] for count in every if count and lacks(every[:count]) is None), every))
        for place in found[-2::-1]:  # the last one is needed; of the others rather those used longest ago leave
            if lacks([each for each in found if each != place]) is None:
                found.remove(place)
        return found

    def both_fit(
        self, resident: Resident, waits: Resident | None, inside: Plans, keep: Sequence[bool], pids: Sequence[int]
    ) -> bool:
        """Whether this model fits beside all who are inside, and `waits` beside it and those that it will `keep`."""
        box = self._read_box()
        stay = [plan for plan, stays in zip(inside, keep, strict=True) if stays]
        try:
            own = self._planned(resident, room_of(box, inside, inside, pids))
            if waits is not None:
                self._planned(waits, room_of(box, inside, [*stay, own], pids))
        except BudgetError:
            return False
        return True

    def _planned(self, resident: Resident, room: Box) -> Plan:
        """The plan of a model that was opened, in so much of the box. Raises BudgetError."""
        assert resident.facts is not None, "opened"
        return chosen_plan(resident.settings, resident.facts, room, self._environ, [])[1]


def room_of(box: Box, inside: Plans, stay: Plans, pids: Sequence[int]) -> Box:
    """What a model may have of `box` beside the plans that `stay`, of those that are `inside`."""
    (gives, takes), held = (_sum(inside), _sum(stay)), held_bytes(pids)
    if held is not None:
        gives[HOST] = held
    return beside(box, gives, takes)


def _sum(plans: Plans) -> dict[str, int]:
    """What plans promise together, by device. Each has the engine's process whole, and the one that comes in has it
    too: of the others only what it is more with them counts."""
    total: dict[str, int] = {}
    for plan in plans:
        for device, size in (promised(plan) if plan is not None else {}).items():
            once = engine_base_bytes() if device == HOST else 0
            total[device] = total.get(device, 0) + size - once
    return total
