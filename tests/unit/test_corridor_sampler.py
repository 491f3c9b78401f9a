"""The sampler's thread: it reads at once and again, survives what cannot be read, and tells the loop of a breach."""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from budget.corridor import Breach
from budget.facts import MIB
from budget.flip import PHASES
from budget.ledger import ALWAYS, Line
from budget.outcome import FlipTerms
from homeserve.corridor import CorridorSampler, FlipStep, RankPeaks, words
from homeserve.engine.flip import FlipState
from homeserve.memory import MemoryWatch, ModelMemory, flip_bytes

PATIENCE_S = 30


def least(watch: CorridorSampler) -> dict[int, int]:
    """Device -> its least free bytes, where they are known."""
    return {device: size for device, _, _, size in watch.levels() if size is not None}


class Readings:
    """A reader that gives its values in turn, the last one for ever, and says when they are all taken."""

    def __init__(self, *values: Sequence[int | None] | OSError) -> None:
        self._values = list(values)
        self._taken = 0
        self.all_taken = threading.Event()
        self.closed = 0

    def close(self) -> None:
        self.closed += 1

    def __call__(self) -> Sequence[int | None]:
        value = self._values[min(self._taken, len(self._values) - 1)]
        self._taken += 1
        if self._taken > len(self._values):
            self.all_taken.set()
        if isinstance(value, OSError):
            raise value
        return value


def sampler(read: Readings, on_breach: Callable[[Breach], None] = lambda _: None) -> CorridorSampler:
    return CorridorSampler(100 * MIB, lambda: "weights", on_breach, read, period_s=0.0001)


async def test_a_breach_reaches_the_loop_and_samples_are_counted() -> None:
    told: asyncio.Future[Breach] = asyncio.get_running_loop().create_future()
    read = Readings((300 * MIB,), (90 * MIB,), (200 * MIB,))
    watch = sampler(read, told.set_result)
    watch.start()
    breach = await asyncio.wait_for(told, PATIENCE_S)
    assert read.all_taken.wait(PATIENCE_S)
    watch.stop()
    assert read.closed == 1
    assert words(breach) == "free memory of device 0 is down to 90 MiB, below the floor of 100 MiB (weights)"
    body = watch.as_json()
    assert body["taken"] >= 3 and body["seconds"] > 0
    assert (body["devices"][0]["breaches"], body["devices"][0]["min_free_mib"]) == (1, 90.0)
    assert least(watch) == {0: 90 * MIB}


async def test_what_cannot_be_read_is_unknown_and_the_next_reading_is_taken() -> None:
    read = Readings(OSError(2, "gone"), (None,), (150 * MIB,))
    watch = sampler(read)
    assert least(watch) == {}
    watch.start()
    assert await asyncio.to_thread(read.all_taken.wait, PATIENCE_S)
    watch.stop()
    watch.stop()
    values = [sample[1] for sample in watch.as_json()["devices"][0]["samples"]]
    assert values[:3] == [None, None, 150.0]


async def test_devices_join_when_they_are_known() -> None:
    first, later = Readings((300 * MIB,)), Readings((250 * MIB, 40 * MIB))
    watch = sampler(first)
    watch.start()
    assert await asyncio.to_thread(first.all_taken.wait, PATIENCE_S)
    watch.watch(later, (80 * MIB, 20 * MIB), (1, 0))
    assert await asyncio.to_thread(later.all_taken.wait, PATIENCE_S)
    assert (first.closed, later.closed) == (1, 0)
    watch.stop()
    card, host = watch.as_json()["devices"]
    assert (card["index"], card["floor_mib"], card["min_free_mib"]) == (0, 20.0, 40.0)
    assert (host["index"], host["floor_mib"], host["min_free_mib"]) == (1, 80.0, 250.0)
    assert least(watch) == {0: 40 * MIB, 1: 250 * MIB}


def test_a_sampler_that_was_never_started_stops() -> None:
    sampler(Readings((1,))).stop()


# ---------------------------------------------------------------------------------------------------- during a flip


def holds(root: Path, pid: int, mib: float, shared_mib: float = 3) -> None:
    pages, shared = (int(size * MIB / mmap.PAGESIZE) for size in (mib + shared_mib, shared_mib))
    folder = root / f"proc/{pid}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "statm").write_text(f"999999 {pages} {shared} 1 0 7 0\n")


def test_the_peak_of_each_moment_is_kept_and_stands_beside_the_ledger(tmp_path: Path) -> None:
    peaks = RankPeaks(tmp_path)
    pids = ((0, 11), (1, 12), (2, 13))
    holds(tmp_path, 11, 40)
    holds(tmp_path, 12, 30)
    peaks.take(1.1, FlipStep("flip packing", "prepare, pipeline", pids))
    holds(tmp_path, 11, 42)
    peaks.take(1.2, FlipStep("flip verifying", "prepare, pipeline", pids))
    holds(tmp_path, 11, 55)
    peaks.take(1.3, FlipStep("flip committing", "commit, tensor", pids))
    holds(tmp_path, 11, 20)
    peaks.take(1.4, FlipStep("flip checking", "commit, tensor", pids))
    told = peaks.as_json({(0, "prepare, pipeline"): 40 * MIB, (0, "commit, tensor"): 60 * MIB})
    assert told["taken"] == 4 and told["period_ms"] <= 5
    first, second = told["ranks"]
    assert first["rank"] == 0
    assert first["moments"] == [
        {"moment": "prepare, pipeline", "peak_mib": 42.0, "ledger_mib": 40.0, "at": 1.2, "phase": "flip verifying"},
        {"moment": "commit, tensor", "peak_mib": 55.0, "ledger_mib": 60.0, "at": 1.3, "phase": "flip committing"},
    ]
    assert (first["peak_mib"], first["ledger_mib"], first["moment"]) == (42.0, 40.0, "prepare, pipeline"), "a breach"
    assert (second["peak_mib"], second["ledger_mib"]) == (30.0, None)


def test_a_rank_that_was_started_again_keeps_the_peak_of_both_lives(tmp_path: Path) -> None:
    peaks = RankPeaks(tmp_path)
    for at_s, pid, mib in ((1.0, 11, 40), (2.0, 21, 35), (3.0, 21, 36)):
        holds(tmp_path, pid, mib)
        peaks.take(at_s, FlipStep("flip packing", "prepare, tensor", ((0, pid),)))
    (rank,) = peaks.as_json({})["ranks"]
    assert (rank["peak_mib"], rank["moments"][0]["at"]) == (40.0, 1.0)


async def test_each_step_of_a_flip_is_sampled_at_once_and_marked(tmp_path: Path) -> None:
    """The ordinary period is so long that only a step wakes the thread; until the next one it looks again by itself."""
    holds(tmp_path, 11, 40)
    looks: asyncio.Queue[None] = asyncio.Queue()
    waits: asyncio.Queue[float] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    class Counted:
        def __call__(self) -> Sequence[int | None]:
            loop.call_soon_threadsafe(looks.put_nowait, None)
            return (300 * MIB,)

        def close(self) -> None: ...

    class Watched(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            loop.call_soon_threadsafe(waits.put_nowait, timeout or 0.0)
            return super().wait(timeout)

    watch = CorridorSampler(
        100 * MIB, lambda: "ready", lambda _: None, Counted(), period_s=PATIENCE_S, peaks=RankPeaks(tmp_path)
    )
    watch._woken = Watched()
    watch.start()
    async with asyncio.timeout(PATIENCE_S / 2):
        await looks.get()
        assert await waits.get() > 1, "the thread waits for its period"
        for step in ("draining", "packing"):
            watch.flip(FlipStep(f"flip {step}", "prepare, pipeline", ((0, 11),)))
            for _ in range(3):
                await looks.get()
        watch.flip(None)
        while watch.as_json()["devices"][0]["samples"][-1][2] != "ready":
            await looks.get()
    watch.stop()
    body = watch.as_json()
    phases = [sample[2] for sample in body["devices"][0]["samples"]]
    assert phases.count("flip draining") >= 2 and phases.count("flip packing") >= 2
    assert body["flips"]["ranks"][0]["peak_mib"] == 40.0 and body["flips"]["taken"] >= 4


class Regions:
    def regions(self) -> list[tuple[int, int, tuple[()]]]:
        return [(0, 11, ()), (1, 12, ())]


class Steps:
    """An engine whose last flip is one to the tensor layout."""

    class Record:
        source, to = "pipeline", "tensor"

    def watch_flips(self, told: Callable[[str | None], None]) -> None:
        self.told = told

    def flip_records(self) -> list[Record]:
        return [self.Record()]


async def test_steps_of_a_flip_are_told_with_the_moment_of_the_ledger_that_they_are_of() -> None:
    steps = Steps()
    watch: Any = MemoryWatch(256 * MIB, lambda: "ready")
    found: list[FlipStep | None] = []
    watch.corridor.flip = found.append
    host = SimpleNamespace(ceilings=SimpleNamespace(devices=[SimpleNamespace(index=0)]))
    nobody: Any = None
    memory: Any = ModelMemory(watch, host, nobody, Regions(), steps, (nobody, nobody))  # type: ignore[arg-type]
    memory.watch_flips()
    for state in FlipState:
        if state is not FlipState.IDLE:
            steps.told(state.value)
    steps.told(None)
    pids = ((0, 11), (1, 12))
    assert found == [
        FlipStep("flip draining", "", pids),
        FlipStep("flip packing", "prepare, pipeline", pids),
        FlipStep("flip verifying", "prepare, pipeline", pids),
        FlipStep("flip committing", "commit, tensor", pids),
        FlipStep("flip checking", "commit, tensor", pids),
        FlipStep("flip abandoning", "prepare, pipeline", pids),
        None,
    ]
    assert {step.moment for step in found if step is not None} - {""} <= set(PHASES)


def test_a_plan_says_what_a_rank_may_hold_while_the_layout_changes() -> None:
    class Of:
        ranks = (0, 0)
        lines = (
            Line(0, "worker processes", 60, ALWAYS, "measured"),
            Line(0, "flip transit", 7, ALWAYS, "reserve"),
            Line(0, "kv, rank 1", 7, ("pipeline",), "computed"),
            Line(0, "kv, rank 1", 8, ("flip",), "computed"),
            Line(0, "kv, rank 11", 8, ("flip",), "computed"),
        )
        flip = FlipTerms(
            True, peaks={"prepare, pipeline": (150, 90), "commit, tensor": (112, 200), "at rest, tensor": (1, 2)}
        )

    huge = 2 * MIB
    assert flip_bytes(Of) == {  # type: ignore[arg-type]
        (0, "prepare, pipeline"): 180, (1, "prepare, pipeline"): 120 + huge,
        (0, "commit, tensor"): 180, (1, "commit, tensor"): 230 + huge,
        (0, "at rest, tensor"): 31, (1, "at rest, tensor"): 32 + huge,
    }  # fmt: skip
