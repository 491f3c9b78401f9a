"""Random histories of an engine with flips, over a fleet that forgets in a flip whatever the engine does not name:
every answer is the one without flips, every page and slot is given back, every flip ends."""

from __future__ import annotations

import pytest
from engine_flip_rig import FlipTrace, run


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_nothing_is_lost(seed: int) -> None:
    """Refusals, lies, losses at every step of a flip, among calls, aborts and lost workers."""

    async def body() -> None:
        for part in range(4):
            await FlipTrace(100 * seed + part, windows=part % 2).run()

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
