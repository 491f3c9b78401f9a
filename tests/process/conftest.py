"""Real fleets for tests: the `reference` backend on a tiny llama, and proof after each test that nothing is left."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from homeserve.fleet import Fleet, FleetSpec, Loss
from homeserve.wire.records import LaneRows, LoadSpec, NewLane, PlanKind, RankFacts, Result, Sampling, pack_ints
from homeserve.wire.segments import names

TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama.f32.gguf"
GREEDY = Sampling(temperature=0.0)
PROMPT = [1, 17, 42, 99, 7, 3, 250, 11]
PATIENCE_S = 60.0
"""A bound on every wait. It is for hangs: nothing is measured with it."""


class Driver:
    """A fleet with a listener that remembers, and the few plans that the tests need."""

    def __init__(self, ranks: int = 1, **changes: Any) -> None:
        settings: dict[str, Any] = {
            "backend": "reference",
            "device_index": 0,
            "threads": 1,
            "isa": "",
            "plans_in_flight": ranks + 1,
            "plan_timeout_s": PATIENCE_S,
            "slot_bytes": 4096,
            "report_slot_bytes": 4096,
        }
        self.spec = FleetSpec(ranks=ranks, **(settings | changes))
        self.fleet = Fleet(self.spec, self)
        self.results: list[tuple[int, tuple[Result, ...]]] = []
        self.lost: list[tuple[int, str, bool]] = []
        self.losses: list[Loss] = []
        """All there have been."""
        self.progress: list[tuple[str, int, int]] = []
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Driver:
        return self

    async def __aexit__(self, *_: object) -> None:
        # Also when the test failed: a loop of libuv never closes while it has a process.
        await self.fleet.stop()

    def on_results(self, seq: int, results: tuple[Result, ...]) -> None:
        self.results.append((seq, results))
        self._changed.set()

    def on_lost(self, loss: Loss) -> None:
        self.lost.append((loss.rank, loss.why, loss.oom))
        self.losses.append(loss)
        self._changed.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait for results or a loss until the condition holds."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def up(self, path: Path = TINY) -> tuple[RankFacts, ...]:
        await self.fleet.start()
        return await self.load(path)

    async def load(self, path: Path = TINY) -> tuple[RankFacts, ...]:
        exact = not self.spec.devices  # cards never are
        spec = LoadSpec(
            str(path), kv_slots=1024, kv_type="f32", rows=64, logit_rows=64, lanes=4, lane_pages=40, deterministic=exact
        )
        return await self.fleet.load(spec, lambda *progress: self.progress.append(progress))

    async def restart(self) -> None:
        """Restart the fleet as the engine does when it was told of a loss."""
        self.lost.clear()
        await self.fleet.restart()

    async def credit(self) -> None:
        """Wait until one more plan may be issued."""
        await self.until(lambda: self.lost or self.fleet.credit() > 0)
        assert not self.lost, self.lost

    def prefill(self, lane: int = 0, request: int = 1, prompt: list[int] = PROMPT, **row: Any) -> int:
        """One prompt in one plan, on pages of its own."""
        pages = pack_ints(list(range(lane * 10, lane * 10 + 10)))
        rows = LaneRows(lane, request, 0, pack_ints(prompt), pages, sample=True, **row)
        new = NewLane(lane, request, len(prompt), GREEDY)
        return self.fleet.issue(PlanKind.PREFILL, epoch=0, new=(new,), rows=(rows,))

    def decode(self, step: int, lanes: dict[int, int] | None = None, prompt_len: int = len(PROMPT)) -> int:
        """The `step`-th token after the first, for lane -> request."""
        rows = tuple(
            LaneRows(lane, request, prompt_len + step, b"", sample=True)
            for lane, request in (lanes if lanes is not None else {0: 1}).items()
        )
        return self.fleet.issue(PlanKind.DECODE, epoch=0, rows=rows)

    async def generate(self, count: int) -> list[int]:
        """Greedy tokens of PROMPT by one plan at a time, on a fleet without lanes."""
        first = len(self.results)
        self.prefill()
        for step in range(count - 1):
            await self.until(lambda: self.lost or self.fleet.credit() == self.spec.plans_in_flight)
            if self.lost:
                break
            self.decode(step)
        await self.until(lambda: self.lost or len(self.results) == first + count)
        return [sample.token for _, results in self.results[first:] for sample in results[-1].samples]


@pytest.fixture
def driver(tmp_path: Path) -> Callable[..., Driver]:
    """`driver(ranks, **changes of the spec)`; evidence goes to the test's own folder."""
    return functools.partial(Driver, capture_dir=str(tmp_path / "captures"))


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Awaitable[None]]], None]:
    """Run a coroutine function to its end on a loop of its own: the standard one, and the one that the server uses."""
    return _runner(uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop)


@pytest.fixture
def run_once() -> Callable[[Callable[[], Awaitable[None]]], None]:
    """Like `run`, on the server's loop only."""
    return _runner(uvloop.new_event_loop)


def _runner(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> Callable[[Callable[[], Awaitable[None]]], None]:
    def run(main: Callable[[], Awaitable[None]]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(2 * PATIENCE_S):
                await main()

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(bounded())

    return run


@pytest.fixture(scope="session")
def loops_used_once() -> None:
    """libuv keeps a pipe for itself from its first process on; it is no leak of ours."""

    async def main() -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
        await process.wait()

    for factory in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main())


@pytest.fixture(autouse=True)
def nothing_left(loops_used_once: None) -> Iterator[None]:
    """After each test: no child, no zombie, no shared memory of ours, no descriptor more than before."""
    me = psutil.Process()
    fds = me.num_fds()
    yield
    left = [(child.pid, child.status()) for child in me.children(recursive=True)]
    assert not left, f"processes left behind: {left}"
    assert names() == []
    assert me.num_fds() <= fds
