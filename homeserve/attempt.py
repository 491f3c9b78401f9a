"""Work that may be called off at any moment, and whose outcome is told exactly once, whatever becomes of it.

Cancelling a task strikes wherever it stands, also while it takes down what it made, and a task that is cancelled before
its first step never learns of it. So what may be called off runs in a task of its own (`run`), and who waits for that
task, and tells, is never cancelled with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class CalledOff(Exception):
    """Nobody wants the outcome any more."""


class Attempt:
    """One try. `call_off` is right at any moment, and more than once."""

    def __init__(self) -> None:
        self._called_off = False
        self._work: asyncio.Future[Any] | None = None

    def call_off(self) -> None:
        self._called_off = True
        if self._work is not None:
            self._work.cancel()

    @property
    def under_way(self) -> bool:
        return self._work is not None

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The outcome of `work`. Raises what it raises, and CalledOff, whether it had begun or not."""
        if self._called_off:
            work.close()
            raise CalledOff
        task: asyncio.Future[T] = asyncio.ensure_future(work)
        self._work = task
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
        finally:
            self._work = None  # it holds the outcome
        if task.cancelled():
            raise CalledOff
        return task.result()
