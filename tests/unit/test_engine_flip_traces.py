"""Random histories of an engine with flips, over a fleet that forgets in a flip whatever the engine does not name:
every answer is the one without flips, every page and slot is given back, every flip ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from engine_flip_rig import OTHER, PAGE_BYTES, PIPELINE, STATE_BYTES, FlipTrace, flip_limits, forget, ones, run
from test_engine_traces import Trace


@pytest.mark.parametrize("seed", range(200))
def test_whatever_happens_nothing_is_lost(seed: int) -> None:
    """Refusals, lies, losses at every step of a flip, among calls, aborts and lost workers."""

    async def body() -> None:
        await FlipTrace(seed, windows=seed % 2).run()

    run(body)


@pytest.mark.parametrize("seed", range(30))
def test_flips_without_trouble_are_all_committed(seed: int) -> None:
    async def body() -> None:
        trace = FlipTrace(seed, trouble=False, losses=False, windows=seed % 2)
        await trace.run(600)
        records = trace.engine.flip_records()
        assert records and {record.state for record in records} == {"committed"}
        assert trace.fleet.restarts == 0
        assert trace.engine.snapshot().flip["committed"] == len(trace.fleet.commits)

    run(body)


class ScheduleTrace(Trace):
    """The scheduler alone, and a rank that forgets in each flip what is not said to be live. `flip_drafts`: those of a
    round in the tensor layout."""

    def __init__(self, seed: int, *, flip_drafts: int = 0, **sizes: Any) -> None:
        super().__init__(seed, decode_groups=3, plans_in_flight=4, **sizes)
        self.transit_bytes = self.random.choice([0, 40_000, 1 << 30])
        groups = len(self.limits.groups)
        cache_bytes = self.random.choice([0, 700, 1 << 30])
        flips = flip_limits(groups, drafts=flip_drafts, cache_bytes=cache_bytes, transit_bytes=self.transit_bytes)
        self.limits = replace(self.limits, flip=replace(flips, state_bytes=STATE_BYTES * self.limits.recurrent))
        self.scheduler = type(self.scheduler)(self.limits)
        self.layout, self.flips = PIPELINE, 0

    def acknowledge(self) -> None:
        super().acknowledge()
        if self.random.random() < 0.05:
            self.flip()

    def lose(self) -> None:
        super().lose()
        self.layout = PIPELINE

    def flip(self) -> None:
        while self.flight:
            super().acknowledge()
        assert self.scheduler.drained
        before = self.scheduler.resident_bytes()
        live = self.scheduler.live()
        assert live.nbytes >= self.scheduler.resident_bytes() == before
        assert live.nbytes == sum(map(ones, live.live.pages)) * PAGE_BYTES + ones(live.live.states) * STATE_BYTES
        assert live.nbytes <= max(before, self.transit_bytes)
        forget(self.rank, live.live)
        self.layout, self.flips = OTHER[self.layout], self.flips + 1
        self.scheduler.turn(self.layout)


@pytest.mark.parametrize("seed", range(200))
def test_random_schedules_with_flips_end_right(seed: int) -> None:
    """Every answer is the one by definition, every row finds what it reads, every page comes back."""
    for part in range(5):
        ScheduleTrace(
            7000 + 10 * seed + part, recurrent=part % 2 == 1, windows=((), (), (20,), (1, 33), (64,))[part]
        ).run(80)
