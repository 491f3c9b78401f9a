"""The sampler's thread: it reads at once and again, survives what cannot be read, and tells the loop of a breach."""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from budget.corridor import Breach
from budget.facts import MIB
from budget.ledger import ALWAYS, Line
from homeserve.corridor import CorridorSampler, RankPeaks, words
from homeserve.memory import flip_bytes

PATIENCE_S = 30


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
    assert watch.least_bytes() == ((0, 90 * MIB),)


async def test_what_cannot_be_read_is_unknown_and_the_next_reading_is_taken() -> None:
    read = Readings(OSError(2, "gone"), (None,), (150 * MIB,))
    watch = sampler(read)
    assert watch.least_bytes() == ()
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
    assert dict(watch.least_bytes()) == {0: 40 * MIB, 1: 250 * MIB}


def test_a_sampler_that_was_never_started_stops() -> None:
    sampler(Readings((1,))).stop()


# ---------------------------------------------------------------------------------------------------- during a flip


def holds(root: Path, pid: int, mib: float, shared_mib: float = 3) -> None:
    pages, shared = (int(size * MIB / mmap.PAGESIZE) for size in (mib + shared_mib, shared_mib))
    folder = root / f"proc/{pid}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "statm").write_text(f"999999 {pages} {shared} 1 0 7 0\n")


def test_the_peak_of_each_rank_is_kept_with_its_step_and_stands_beside_the_ledger(tmp_path: Path) -> None:
    peaks = RankPeaks(tmp_path)
    holds(tmp_path, 11, 40)
    holds(tmp_path, 12, 30)
    peaks.take(1.0, "flip packing", ((0, 11), (1, 12)))
    holds(tmp_path, 11, 55)
    peaks.take(1.004, "flip committing", ((0, 11), (1, 12), (2, 13)))
    holds(tmp_path, 11, 20)
    peaks.take(1.008, "flip checking", ((0, 11), (1, 12)))
    told = peaks.as_json({0: 50 * MIB})
    assert told["taken"] == 3 and told["period_ms"] <= 5
    first, second = told["ranks"]
    assert first == {
        "rank": 0, "before_mib": 40.0, "peak_mib": 55.0, "ledger_mib": 50.0, "at": 1.004, "phase": "flip committing",
    }  # fmt: skip
    assert (second["peak_mib"], second["ledger_mib"], second["phase"]) == (30.0, None, "flip packing")


def test_a_rank_that_was_started_again_keeps_the_peak_of_both_lives(tmp_path: Path) -> None:
    peaks = RankPeaks(tmp_path)
    for pid, mib in ((11, 40), (21, 35), (21, 36)):
        holds(tmp_path, pid, mib)
        peaks.take(float(pid), "flip packing", ((0, pid),))
    (rank,) = peaks.as_json({})["ranks"]
    assert (rank["before_mib"], rank["peak_mib"]) == (35.0, 40.0)
    holds(tmp_path, 21, 60)
    peaks.take(30.0, "flip committing", ((0, 21),))
    (rank,) = peaks.as_json({})["ranks"]
    assert (rank["peak_mib"], rank["at"], rank["phase"]) == (60.0, 30.0, "flip committing")


async def test_each_step_of_a_flip_is_sampled_at_once_and_marked(tmp_path: Path) -> None:
    """The ordinary period is so long that only steps wake the thread; between steps it looks again by itself."""
    holds(tmp_path, 11, 40)
    looks: asyncio.Queue[None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    class Counted:
        def __call__(self) -> Sequence[int | None]:
            loop.call_soon_threadsafe(looks.put_nowait, None)
            return (300 * MIB,)

        def close(self) -> None: ...

    watch = CorridorSampler(
        100 * MIB, lambda: "ready", lambda _: None, Counted(), period_s=PATIENCE_S, peaks=RankPeaks(tmp_path)
    )
    watch.start()
    await asyncio.wait_for(looks.get(), PATIENCE_S)
    for step in ("draining", "packing"):
        watch.flip(step, ((0, 11),))
        for _ in range(3):
            await asyncio.wait_for(looks.get(), PATIENCE_S)
    watch.flip(None)
    while watch.as_json()["devices"][0]["samples"][-1][2] != "ready":
        await asyncio.wait_for(looks.get(), PATIENCE_S)
    watch.stop()
    body = watch.as_json()
    phases = [sample[2] for sample in body["devices"][0]["samples"]]
    assert phases.count("flip draining") >= 2 and phases.count("flip packing") >= 2
    assert body["flips"]["ranks"][0]["peak_mib"] == 40.0 and body["flips"]["taken"] >= 4


def test_a_plan_says_what_a_rank_may_hold_while_the_layout_changes() -> None:
    class Of:
        ranks = (0, 0)
        lines = (
            Line(0, "weights, rank 0", 100, ALWAYS, "computed"),
            Line(0, "weights, rank 1", 200, ALWAYS, "computed"),
            Line(0, "kv, rank 0", 10, ("pipeline",), "computed"),
            Line(0, "kv, rank 0", 12, ("flip",), "computed"),
            Line(0, "kv, rank 10", 5000, ALWAYS, "computed"),
            Line(0, "worker processes", 60, ALWAYS, "measured"),
            Line(0, "flip transit", 7, ALWAYS, "reserve"),
        )

    assert flip_bytes(Of) == {0: 142, 1: 230}  # type: ignore[arg-type]
