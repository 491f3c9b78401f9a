"""The sampler's thread: it reads at once and again, survives what cannot be read, and tells the loop of a breach."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from budget.corridor import Breach
from budget.facts import MIB
from homeserve.corridor import CorridorSampler, words

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
