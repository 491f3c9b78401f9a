"""Fields of the machine's routes that the page lives by: clocks, counts, and a status that is small where asked."""

from __future__ import annotations

import time
from typing import Any

import pytest

from budget.corridor import Breach
from homeserve.corridor import CorridorSampler
from homeserve.engine.flip_record import FlipRecord
from homeserve.errors import InvalidField
from homeserve.server.flip import _told
from homeserve.server.status import _plans_asked


@pytest.mark.parametrize(("text", "wanted"), [(None, None), ("0", 0), ("25", 25)])
def test_as_many_plans_as_are_asked_for(text: str | None, wanted: int | None) -> None:
    assert _plans_asked(text) == wanted


@pytest.mark.parametrize("text", ["", "-1", "many", "1.5", "9" * 6, "٣"])
def test_a_number_of_plans_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidField, match="plans"):
        _plans_asked(text)


def test_a_flip_tells_when_it_was_asked_for_by_the_clock_of_the_wall() -> None:
    record = FlipRecord(1, 1, "pipeline", "tensor", "request", asked=time.monotonic() - 50)
    told = _told(record)
    assert told["at"] == pytest.approx(time.time() - 50, abs=5)
    assert {name: value for name, value in told.items() if name != "at"} == record.as_json()


def test_the_corridor_tells_what_its_seconds_count_from() -> None:
    now = [100.0]

    def on_breach(breach: Breach) -> None:
        raise AssertionError(breach)

    sampler = CorridorSampler(0, lambda: "ready", on_breach, clock=lambda: now[0])
    now[0] += 40
    told: dict[str, Any] = sampler.as_json()
    assert told["began"] == pytest.approx(time.time() - 40, abs=5)
