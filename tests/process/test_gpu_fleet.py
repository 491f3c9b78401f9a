"""Real workers on cards of fake drivers: what they compute, count and say, and how one ends whose card is lost."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fake_cards import LAUNCH_FAILED, NOT_SUPPORTED, OUT_OF_MEMORY, FakeCards, fake_cards

from homeserve.errors import BudgetError, DeviceError, WorkerLost, WorkerStartError
from homeserve.fleet import life
from homeserve.layouts.ranks import RankDevice
from homeserve.wire.exit_status import EXIT_DEVICE_LOST
from homeserve.wire.records import PlanKind

Run = Callable[[Callable[[], Awaitable[None]]], None]
CUDA = RankDevice("cuda", 0, "GPU-5ee1c0de-0000-4000-8000-000000000000", "NVIDIA GeForce RTX 3090")
ROCM = RankDevice("rocm", 0, f"GPU-{0xA11D0000:016x}", "AMD Radeon 780M Graphics")
COUNT = 4
BY_CARD = "lost its card (cuda:0, NVIDIA GeForce RTX 3090 (GPU-5ee1c0de-0000-4000-8000-000000000000))"


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCards:
    made = fake_cards(tmp_path)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def on(driver: Callable[..., Any]) -> Callable[..., Any]:
    """`on(CUDA)`: a fleet of these cards."""

    def make(*devices: RankDevice, **changes: Any) -> Any:
        return driver(len(devices), backend=devices[0].backend, devices=devices, report_slot_bytes=32768, **changes)

    return make


def test_a_card_says_what_the_reference_says(
    cards: FakeCards, on: Callable[..., Any], driver: Callable[..., Any], run_once: Run
) -> None:
    """And what it launched: every kernel of the run is counted, none that it did not need."""
    told: dict[str, list[int]] = {}

    async def main() -> None:
        for name, fleet in (("cuda", on(CUDA)), ("rocm", on(ROCM)), ("reference", driver())):
            async with fleet:
                (facts,) = await fleet.up()
                assert facts.backend == name
                told[name] = await fleet.generate(COUNT)
                seq = fleet.fleet.issue(PlanKind.CENSUS, epoch=0)
                await fleet.until(lambda fleet=fleet, seq=seq: fleet.results and fleet.results[-1][0] == seq)
                launches = fleet.results[-1][1][0].launches
                if name == "reference":
                    assert launches is None
                    continue
                counts = dict(launches or ())
                assert facts.device.startswith({"cuda": CUDA, "rocm": ROCM}[name].name)
                assert all(count > 0 for count in counts.values())
                assert sum(count for symbol, count in counts.items() if symbol.startswith("norm")) >= COUNT, counts
                (status,) = fleet.fleet.ranks
                libraries = Path(f"/proc/{status.pid}/maps").read_text()
                assert "libhomeserve_cpu" not in libraries, "a card's worker is no worker of the CPU"
                assert {"cuda": "libcuda.so.1", "rocm": "libamdhip64.so"}[name] in libraries
                assert status.threads is None
                assert status.backend == name and status.lines_mib["weights"] > 0

    run_once(main)
    assert told["cuda"] == told["rocm"] == told["reference"] and len(told["cuda"]) == COUNT


def test_a_lost_card_ends_its_worker_and_the_next_one_takes_over(
    cards: FakeCards, on: Callable[..., Any], run_once: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """As a killed rank: no answer, one loss with the card's name, and a restart that serves the same tokens."""

    async def main() -> None:
        async with on(CUDA) as fleet:
            await fleet.up()
            before = await fleet.generate(COUNT)
            cards.fail("nvidia", "cuLaunchKernel", LAUNCH_FAILED, card=0)
            cards.fail("nvidia", "cuGraphLaunch", LAUNCH_FAILED, card=0)
            fleet.prefill(lane=1, request=2)
            await fleet.until(lambda: fleet.lost)
            (loss,) = fleet.losses
            assert loss.rank == 0 and loss.why.startswith(BY_CARD) and loss.device and not loss.oom and not loss.outside
            assert fleet.results[-1][0] < (loss.seq or 0), "no answer to that plan"
            _forget(cards)
            await fleet.restart()
            first = len(fleet.results)
            assert await fleet.generate(COUNT) == before and len(fleet.results) > first

    with caplog.at_level(logging.WARNING):
        run_once(main)
    assert any(record.levelno == logging.CRITICAL for record in caplog.records), "the worker's own last word"
    assert EXIT_DEVICE_LOST not in (0, 1, 2, 3, 4)


def test_a_card_that_does_not_come_back_is_named_at_the_end(
    cards: FakeCards, on: Callable[..., Any], run_once: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(_: float) -> None:
        return None

    async def main() -> None:
        async with on(CUDA) as fleet:
            await fleet.up()
            fleet.fleet._sleep = at_once
            cards.fail("nvidia", "cuDevicePrimaryCtxRetain", LAUNCH_FAILED, count=0)
            cards.fail("nvidia", "cuLaunchKernel", LAUNCH_FAILED, card=0, count=0)
            cards.fail("nvidia", "cuGraphLaunch", LAUNCH_FAILED, card=0, count=0)
            fleet.prefill()
            await fleet.until(lambda: fleet.lost)
            with pytest.raises(WorkerLost) as caught:
                await fleet.restart()
            assert "the workers do not come up again" in caught.value.message and CUDA.id in caught.value.message
            assert caught.value.fix

    run_once(main)
    assert life.DEVICE_LOST_FIX.startswith("look at what the kernel says")


def test_a_card_that_is_away_for_a_moment_is_waited_for(
    cards: FakeCards, on: Callable[..., Any], run_once: Run
) -> None:
    """Its driver needs a while to bring it back: a restart that finds none is tried again."""
    waits: list[float] = []

    async def main() -> None:
        async with on(CUDA) as fleet:
            await fleet.up()
            before = await fleet.generate(COUNT)

            async def sleep(seconds: float) -> None:
                waits.append(seconds)
                if len(waits) == 3:
                    _forget(cards)

            fleet.fleet._sleep = sleep
            cards.fail("nvidia", "cuDevicePrimaryCtxRetain", NOT_SUPPORTED, count=0)
            cards.fail("nvidia", "cuLaunchKernel", LAUNCH_FAILED, card=0, count=0)
            cards.fail("nvidia", "cuGraphLaunch", LAUNCH_FAILED, card=0, count=0)
            fleet.prefill(lane=1, request=2)
            await fleet.until(lambda: fleet.lost)
            await fleet.restart()
            assert await fleet.generate(COUNT) == before

    run_once(main)
    assert len(waits) == 3 and waits == sorted(waits)


def test_no_memory_in_a_step_is_a_fault_of_that_plan(cards: FakeCards, on: Callable[..., Any], run_once: Run) -> None:
    """The rank lives and says no; what follows is what follows on any fault of a plan: this life is over, the next one
    serves."""

    async def main() -> None:
        async with on(CUDA) as fleet:
            await fleet.up()
            before = await fleet.generate(COUNT)
            cards.fail("nvidia", "cuLaunchKernel", OUT_OF_MEMORY, card=0)
            cards.fail("nvidia", "cuGraphLaunch", OUT_OF_MEMORY, card=0)
            fleet.prefill(lane=1, request=2)
            await fleet.until(lambda: fleet.lost)
            (loss,) = fleet.losses
            assert loss.why.startswith("refused plan") and "OutOfDeviceMemory" in loss.why and not loss.device
            _forget(cards)
            await fleet.restart()
            assert await fleet.generate(COUNT) == before

    run_once(main)


@pytest.mark.parametrize(
    ("spoil", "words", "fix"),
    [
        ("hide", "CUDA_VISIBLE_DEVICES", "unset CUDA_VISIBLE_DEVICES"),
        ("old", "11.4", "update NVIDIA's driver"),
        ("none", "libcuda.so.1", "install NVIDIA's driver"),
        ("gone", "GPU-5ee1c0de-0000-4000-8000-000000000000", ""),
    ],
)
def test_what_keeps_a_card_from_a_load_is_one_error_with_its_fix(
    tmp_path: Path,
    on: Callable[..., Any],
    run_once: Run,
    monkeypatch: pytest.MonkeyPatch,
    spoil: str,
    words: str,
    fix: str,
) -> None:
    made = fake_cards(
        tmp_path,
        cuda=-1 if spoil == "none" else 1,
        cuda_driver=11_040 if spoil == "old" else 13_000,
        facts={"cuda0": {"uuid": "GPU-00000000-0000-4000-8000-00000000ffff"}} if spoil == "gone" else None,
    )
    for name, value in (made.environment | ({"CUDA_VISIBLE_DEVICES": ""} if spoil == "hide" else {})).items():
        monkeypatch.setenv(name, value)

    async def main() -> None:
        async with on(CUDA) as fleet:
            with pytest.raises(DeviceError) as caught:
                await fleet.up()
            assert caught.value.field == "devices" and caught.value.message.startswith("rank 0: ")
            assert words in caught.value.message and (caught.value.fix or "").startswith(fix) and caught.value.fix

    run_once(main)


def test_a_card_that_is_lost_while_it_loads_is_a_start_that_failed(
    cards: FakeCards, on: Callable[..., Any], run_once: Run
) -> None:
    cards.fail("nvidia", "cuLaunchKernel", LAUNCH_FAILED, card=0, count=0)

    async def main() -> None:
        async with on(CUDA) as fleet:
            with pytest.raises(WorkerStartError) as caught:
                await fleet.up()
            assert BY_CARD in caught.value.message and caught.value.fix == life.DEVICE_LOST_FIX

    run_once(main)


def test_a_card_with_less_memory_than_the_plan_believed_is_a_budget_error(
    tmp_path: Path, on: Callable[..., Any], run_once: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else took it meanwhile: the arithmetic, the setting and what helps; the worker lives on."""
    made = fake_cards(tmp_path, facts={"cuda0": {"mib": 64, "taken": 63}})
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)

    async def main() -> None:
        async with on(CUDA) as fleet:
            with pytest.raises(BudgetError) as caught:
                await fleet.up()
            assert caught.value.field == "kv_tokens" and caught.value.fix
            assert CUDA.id in caught.value.message and "MiB" in caught.value.message
            assert fleet.fleet.ranks[0].pid is not None

    run_once(main)


def _forget(cards: FakeCards) -> None:
    """No rules any more: the cards are well again."""
    for path in cards.folder.glob("*.cards"):
        kept = [line for line in path.read_text().splitlines() if line.split()[0] in ("driver", "card")]
        path.write_text("\n".join(kept) + "\n")
