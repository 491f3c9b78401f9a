"""What is said of a worker that ended, by its exit status."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest

from homeserve.errors import WorkerOutOfMemory, WorkerStartError
from homeserve.fleet.death import CRASH_FIX, DEVICE_LOST_FIX, Death, death_of
from homeserve.fleet.life import Life
from homeserve.fleet.spec import Loss
from homeserve.layouts.ranks import RankDevice
from homeserve.wire.exit_status import EXIT_DEVICE_LOST

CARD = RankDevice("cuda", 1, "GPU-1", "NVIDIA GeForce RTX 3090")
CPU = RankDevice("cpu")


@pytest.mark.parametrize(
    ("status", "device", "kills", "death"),
    [
        (-signal.SIGSEGV, CARD, False, Death(f"was killed by SIGSEGV on {CARD.told}", crash=True)),
        (-signal.SIGBUS, CARD, False, Death(f"was killed by SIGBUS on {CARD.told}", crash=True)),
        (-signal.SIGSEGV, CPU, False, Death("was killed by SIGSEGV")),
        (-signal.SIGKILL, CARD, False, Death("was killed by SIGKILL")),
        (-signal.SIGKILL, CARD, True, Death("was killed by SIGKILL for want of memory", oom=True)),
        (-signal.SIGTERM, CARD, True, Death("was killed by SIGTERM", outside=True)),
        (-60, CPU, False, Death("was killed by signal 60")),
        (EXIT_DEVICE_LOST, CARD, False, Death(f"lost its card ({CARD.told})", device=True)),
        (1, CARD, True, Death("ended with status 1")),
    ],
)
def test_a_status_is_a_death(status: int, device: RankDevice, kills: bool, death: Death) -> None:
    assert death_of(status, device, oom_kills_more=kills) == death


@pytest.mark.parametrize(
    ("loss", "kind", "fix"),
    [
        (Loss(0, "crashed", crash=True), WorkerStartError, CRASH_FIX),
        (Loss(0, "lost its card", device=True), WorkerStartError, DEVICE_LOST_FIX),
        (Loss(0, "was killed", oom=True), WorkerOutOfMemory, None),
        (Loss(0, "ended"), WorkerStartError, None),
    ],
)
async def test_a_start_that_ends_so_says_what_to_do(loss: Loss, kind: type[Exception], fix: str | None) -> None:
    relay = SimpleNamespace(last_words=lambda: "Fatal Python error: Segmentation fault")
    life = cast(Any, SimpleNamespace(_log_ends={}, ranks=[SimpleNamespace(relay=relay)]))
    error = await Life._start_error(life, loss)
    assert type(error) is kind and error.fix == fix
    assert error.message == f"rank 0 {loss.why}; it said: Fatal Python error: Segmentation fault"
