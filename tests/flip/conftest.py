"""What tests of flips share: a loop for each, and proof that nothing is left."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest
import uvloop

from homeserve.wire.segments import names

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("corpse_rig", "corpses_wire", "corpses_bounds", "corpses_steps", "corpses_rows")

LIMIT_S = 100.0
"""A bound on a test's waiting. It is for hangs: nothing is measured with it."""


@pytest.fixture
def run() -> Callable[[Callable[[], Awaitable[None]]], None]:
    """Run a coroutine function to its end on the server's loop."""

    def run(main: Callable[[], Awaitable[None]]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(LIMIT_S):
                await main()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(bounded())

    return run


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After each test: no child, no zombie, no shared memory of ours."""
    yield
    left = [(child.pid, child.status()) for child in psutil.Process().children(recursive=True)]
    assert not left, f"processes left behind: {left}"
    assert names() == []
