"""Which refusals of a load a restart outlives, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from homeserve.errors import BudgetError, DeviceError, HomeserveError, UnsupportedModel, WorkerLost
from homeserve.fleet import Fleet, FleetSpec
from homeserve.fleet.fleet import START_ATTEMPTS
from homeserve.fleet.spec import LoadProgressCallback, Loss
from homeserve.wire.records import LoadSpec, RankFacts, Result

SPEC = FleetSpec(1, "cuda", 0, 0, "", plans_in_flight=2, plan_timeout_s=1.0, slot_bytes=64, report_slot_bytes=64)
LOAD = LoadSpec(path="model.gguf", kv_slots=16, kv_type="f16", rows=1, logit_rows=1, lanes=1, lane_pages=1)


class Nobody:
    def on_results(self, seq: int, results: tuple[Result, ...]) -> None:
        raise AssertionError("nothing was issued")

    def on_lost(self, loss: Loss) -> None:
        raise AssertionError("nothing was lost")


class Loads(Fleet):
    """A fleet without processes, whose loads after the first end with `refusals`, one by one, and then succeed."""

    def __init__(self, refusals: Sequence[HomeserveError]) -> None:
        self.slept: list[float] = []
        super().__init__(SPEC, Nobody(), clock=lambda: 0.0, sleep=self._note)
        self.refusals = list(refusals)
        self._load = LOAD

    async def _note(self, seconds: float) -> None:
        self.slept.append(seconds)

    async def _begin(self, faults: Sequence[str]) -> None:
        pass

    async def load(self, load: LoadSpec, on_progress: LoadProgressCallback | None = None) -> tuple[RankFacts, ...]:
        if self.refusals:
            raise self.refusals.pop(0)
        return ()


@pytest.mark.parametrize("kind", [BudgetError, DeviceError])
def test_a_card_that_is_not_free_yet_is_tried_again(kind: type[HomeserveError]) -> None:
    """The driver takes down the dead process's context while the next one loads already."""
    fleet = Loads([kind(f"attempt {n}") for n in range(START_ATTEMPTS - 1)])
    asyncio.run(fleet.restart())
    assert fleet.restarts == len(fleet.slept) == START_ATTEMPTS
    assert fleet.slept == sorted(fleet.slept) and fleet.slept[-1] > fleet.slept[0]


def test_memory_that_stays_away_ends_it_with_the_last_word() -> None:
    fleet = Loads([BudgetError(f"attempt {n}", fix="free it") for n in range(1, START_ATTEMPTS + 3)])
    with pytest.raises(WorkerLost, match=f"attempt {START_ATTEMPTS}$") as caught:
        asyncio.run(fleet.restart())
    assert fleet.restarts == START_ATTEMPTS and caught.value.fix == "free it"


def test_what_no_time_mends_ends_it_at_once() -> None:
    fleet = Loads([UnsupportedModel("no such op")])
    with pytest.raises(UnsupportedModel):
        asyncio.run(fleet.restart())
    assert fleet.restarts == 1
