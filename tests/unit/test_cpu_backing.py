"""The thread that has the memory of a pool held again beside the work."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from backends.cpu import backing
from backends.cpu.backing import STEP_BYTES, Backing
from backends.host.memory import HUGE_PAGE


class Steps:
    """What the thread does, in order: ("hold", address, bytes), which takes `work` seconds, and ("sleep", seconds)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, end_after: int = 1000, error_at: int = -1) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.worked = 0.0
        self._end_after, self._error_at = end_after, error_at
        monkeypatch.setattr(backing, "populate", self.hold)
        monkeypatch.setattr(backing.time, "thread_time", lambda: self.worked)

    def hold(self, address: int, nbytes: int) -> int:
        self.done.append(("hold", address, nbytes))
        self.worked += 0.25 * len(self.done)
        return errno.ENOMEM if len(self.done) == self._error_at else 0

    def wait(self, seconds: float) -> bool:
        self.done.append(("sleep", seconds))
        return len(self.done) >= self._end_after

    def run(self, *sizes: int) -> Backing:
        """On this thread. Pools lie at 1, 2, ... GiB."""
        pools: Any = [
            SimpleNamespace(address=(at + 1) << 30, size=size, purpose="kv", arithmetic="rows")
            for at, size in enumerate(sizes)
        ]
        made = Backing(pools)
        made._ended = self  # type: ignore[assignment]
        made.run()
        return made


def test_a_pool_is_had_a_huge_page_at_a_time_and_the_thread_sleeps_as_long_as_that_worked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch)
    made = steps.run(2 * HUGE_PAGE + 4096, HUGE_PAGE)
    assert STEP_BYTES == HUGE_PAGE and made.failure is None
    held = [(1 << 30, HUGE_PAGE), ((1 << 30) + HUGE_PAGE, HUGE_PAGE), ((1 << 30) + 2 * HUGE_PAGE, 4096)]
    held.append((2 << 30, HUGE_PAGE))
    assert [step[1:] for step in steps.done[::2]] == held
    assert steps.done[1::2] == [("sleep", 0.25 * (2 * at + 1)) for at in range(4)]


def test_a_pool_that_is_given_back_waits_for_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, end_after=4)
    assert steps.run(64 * HUGE_PAGE, HUGE_PAGE).failure is None
    assert [step[0] for step in steps.done] == ["hold", "sleep"] * 2


def test_memory_that_there_is_not_is_told_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, error_at=3)
    failure = steps.run(8 * HUGE_PAGE).failure
    assert isinstance(failure, MemoryError) and "kv needs 16777216 bytes (16.0 MiB) = rows" in str(failure)
    assert [step[0] for step in steps.done] == ["hold", "sleep", "hold"]
