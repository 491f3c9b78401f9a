"""Deaths of real workers: each step, each way, and nothing left afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from homeserve.errors import HomeserveError, SettingError, WorkerLost, WorkerStartError
from homeserve.wire.segments import names, sweep

Run = Callable[[Callable[[], Awaitable[None]]], None]
TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama.f32.gguf"
LENGTH = 6


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """Tokens of the plain run, once for all tests here. Filled by the first that asks."""
    return []


async def plain(driver: Any, expected: list[int]) -> list[int]:
    if not expected:
        async with driver() as d:
            await d.up()
            expected += await d.generate(LENGTH)
        assert len(expected) == LENGTH
    return expected


@pytest.mark.parametrize(("step", "nth"), [("prefill", 1), ("decode", 1), ("decode", 4)])
def test_kill_at_each_step_is_told_once_and_a_restart_says_the_same(
    run: Run, driver: Any, expected: list[int], step: str, nth: int
) -> None:
    async def main() -> None:
        tokens = await plain(driver, expected)
        async with driver(ranks=2, fault=f"rank=1,step={step},nth={nth},action=kill") as d:
            await d.up()
            first = [rank.pid for rank in d.fleet.ranks]
            before = await d.generate(LENGTH)
            assert [(rank, oom) for rank, _, oom in d.lost] == [(1, False)]
            (loss,) = d.losses
            assert loss.why == f"was killed by SIGKILL while it owed plan {loss.seq} ({step})"
            assert loss.told == f"{loss.why}; evidence: {loss.folder}" and Path(loss.folder).is_dir()
            assert loss.seq == 1 + nth + (step == "decode")
            assert before == tokens[: len(before)] and len(before) == nth - 1 + (step == "decode")
            assert d.fleet.credit() == 0
            await d.restart()
            assert d.fleet.deaths_in_a_row == 1
            assert not set(first) & {rank.pid for rank in d.fleet.ranks}
            assert all(not psutil.pid_exists(pid) for pid in first)
            assert [rank.restarts for rank in d.fleet.ranks] == [1, 1]
            assert await d.generate(LENGTH) == tokens
            assert d.results[-1][0] == LENGTH + 1, "seq starts again with the new log"
            assert len(names()) == 3 and not d.lost

    run(main)


def test_kill_from_outside_in_the_middle_of_decode(run_once: Run, driver: Any, expected: list[int]) -> None:
    async def main() -> None:
        tokens = await plain(driver, expected)
        async with driver() as d:
            await d.up()
            d.prefill()
            for step in range(3):
                await d.credit()
                d.decode(step)
            os.kill(d.fleet.ranks[0].pid, signal.SIGKILL)
            await d.until(lambda: d.lost)
            told = len(d.results)
            await asyncio.sleep(0)
            assert len(d.results) == told and len(d.lost) == 1
            await d.restart()
            assert await d.generate(LENGTH) == tokens

    run_once(main)


def test_kill_at_load_is_an_error_and_a_restart_loads(run_once: Run, driver: Any, expected: list[int]) -> None:
    async def main() -> None:
        tokens = await plain(driver, expected)
        async with driver(fault="rank=0,step=load,action=kill") as d:
            await d.fleet.start()
            with pytest.raises(WorkerStartError, match="rank 0 was killed by SIGKILL"):
                await d.load()
            assert not d.lost, "a load that fails is told by its own error"
            await d.restart()
            assert await d.generate(LENGTH) == tokens

    run_once(main)


def test_a_restart_whose_workers_die_again_tries_again_and_then_gives_up(
    run_once: Run, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        waits: list[float] = []

        async def sleep(seconds: float) -> None:
            waits.append(seconds)

        async with driver() as d:
            d.fleet._sleep = sleep
            await d.up()
            monkeypatch.setenv("PYTHONHOME", "/nonexistent")  # no Python starts from here on
            os.kill(d.fleet.ranks[0].pid, signal.SIGKILL)
            await d.until(lambda: d.lost)
            with pytest.raises(WorkerLost, match="do not come up again: rank 0 ended with status"):
                await d.restart()
            assert waits == [0.0, 0.25, 0.5, 1.0, 2.0]
            assert d.fleet.deaths_in_a_row == 5
            assert names() == []
            monkeypatch.delenv("PYTHONHOME")
            await d.restart()
            assert waits[-1] == 4.0
            assert len(await d.generate(2)) == 2

    run_once(main)


def test_a_stopped_worker_is_captured_before_it_is_called_lost(
    run: Run, driver: Any, expected: list[int], tmp_path: Path
) -> None:
    """SIGSTOP: no death, no EOF; only the plan timeout tells. The evidence of all ranks is there before on_lost."""

    async def main() -> None:
        tokens = await plain(driver, expected)
        fault = "rank=1,step=decode,nth=2,action=stop"
        async with driver(ranks=2, fault=fault, plan_timeout_s=3.0, capture_dir=str(tmp_path)) as d:
            await d.up()
            await d.generate(LENGTH)
            ((rank, why, oom),) = d.lost
            assert (rank, oom) == (1, False)
            assert "was stopped and gave no sign" in why and "it owed plan 4 (decode)" in why
            (folder,) = tmp_path.iterdir()
            assert d.losses[0].folder == str(folder) and str(folder) in d.losses[0].told and d.losses[0].seq == 4
            assert folder.stat().st_mode & 0o077 == 0
            assert "run_plans" in (folder / "rank0.stack").read_text()
            stopped = (folder / "rank1.stack").read_text()
            assert "was continued to write this" in stopped and "in before" in stopped, "where it stopped"
            assert "T (stopped)" in stopped, "as the kernel saw it before"
            plans = json.loads((folder / "plans.json").read_text())
            assert [p["seq"] for p in plans] == [2, 3, 4] and plans[-1]["rows"][0]["lane"] == 0
            assert [p["owed_by"] for p in plans] == [[], [], [1]]
            rings = json.loads((folder / "rings.json").read_text())
            assert rings["plan_log"] == {"slots": 3, "issued": 4}
            assert [(r["answered"], r["state"]) for r in rings["ranks"]] == [(4, "S"), (3, "T")]
            event = json.loads((folder / "event.json").read_text())
            assert (event["rank"], event["seq"]) == (1, 4)
            await d.restart()
            assert await d.generate(LENGTH) == tokens

    run(main)


def test_progress_keeps_a_long_load_alive_and_silence_ends_it(run_once: Run, driver: Any, tmp_path: Path) -> None:
    async def main() -> None:
        changes = {"plan_timeout_s": 0.3, "load_silence_s": 0.6, "capture_dir": str(tmp_path)}
        async with driver(fault="rank=0,step=load,action=delay:60000", **changes) as d:
            await d.fleet.start()
            with pytest.raises(WorkerStartError, match=r"gave no sign .* plan 1 \(load\)"):
                await d.load()
            assert len(list(tmp_path.iterdir())) == 1

    run_once(main)


@pytest.mark.parametrize(
    ("action", "reason"), [("refuse", "refused by a fault"), ("enospc", "No space left on device")]
)
def test_a_plan_that_a_rank_does_not_run_ends_the_life_at_once(
    run_once: Run, driver: Any, action: str, reason: str
) -> None:
    """Rank 1 has not answered yet when it is told, and would not for a minute."""

    async def main() -> None:
        async with driver(ranks=2, fault=f"rank=0,step=decode,nth=2,action={action}") as d:
            await d.up()
            d.prefill()
            await d.until(lambda: len(d.results) == 1)
            d.decode(0)
            await d.until(lambda: len(d.results) == 2)
            os.kill(d.fleet.ranks[1].pid, signal.SIGSTOP)
            d.decode(1)
            await d.until(lambda: d.lost)
            (loss,) = d.losses
            assert (loss.rank, loss.seq) == (0, 4) and loss.why.startswith("refused plan 4 (decode): ")
            assert reason in loss.why and Path(loss.folder).is_dir()
            assert len(d.results) == 2 and d.fleet.credit() == 0
            await d.restart()
            assert len(await d.generate(2)) == 2

    run_once(main)


def test_a_damaged_answer_ends_the_life(run_once: Run, driver: Any) -> None:
    async def main() -> None:
        async with driver(ranks=2, fault="rank=0,step=prefill,action=corrupt") as d:
            await d.up()
            d.prefill()
            await d.until(lambda: d.lost)
            assert d.lost[0][0] == 0 and "cannot be trusted: frame checksum" in d.lost[0][1]
            await d.restart()
            assert len(await d.generate(2)) == 2

    run_once(main)


def test_a_damaged_plan_ends_the_worker_that_reads_it(run_once: Run, driver: Any) -> None:
    async def main() -> None:
        async with driver() as d:
            await d.up()
            life = d.fleet._life
            put = life._slots.put
            life._slots.put = lambda number, frame: put(number, frame[:-1] + bytes([frame[-1] ^ 1]))
            d.prefill()
            await d.until(lambda: d.lost)
            assert d.lost[0][1].startswith("ended with status 3 while it owed plan 2 (prefill)")
            await d.restart()
            assert len(await d.generate(2)) == 2

    run_once(main)


def test_a_fault_for_a_rank_that_is_not_there_is_a_setting_error(driver: Any) -> None:
    with pytest.raises(SettingError, match="no rank 1"):
        asyncio.run(_make(driver))


async def _make(driver: Any) -> None:
    driver(fault="rank=1,step=load,action=kill")


# ----------------------------------------------------------------------------------------------- stopped half-way


@pytest.mark.parametrize("moment", ["spawn", "hello", "load", "decode", "restart"])
def test_cancelled_at_any_moment_nothing_is_left(run: Run, driver: Any, moment: str) -> None:
    async def main() -> None:
        fault = {"load": "rank=1,step=load,action=delay:60000", "decode": "rank=1,step=decode,action=delay:60000"}
        async with driver(ranks=2, fault=fault.get(moment, "")) as d:

            async def work() -> None:
                await d.up()
                if moment == "restart":
                    os.kill(d.fleet.ranks[0].pid, signal.SIGKILL)
                    await d.until(lambda: d.lost)
                    await d.restart()
                d.prefill()
                d.decode(0)
                await asyncio.Event().wait()

            async def reached() -> None:
                while not task.done():
                    ranks = d.fleet._life.ranks if d.fleet._life is not None else []
                    if {
                        "spawn": len(ranks) > 0,
                        "hello": any(rank.pid for rank in ranks),
                        "load": bool(d.progress) or any(rank.greeted for rank in ranks) and d.fleet._load is not None,
                        "decode": len(d.results) > 0,
                        "restart": d.fleet.restarts > 0,
                    }[moment]:
                        return
                    await asyncio.sleep(0)
                task.result()

            task = asyncio.create_task(work())
            await reached()
            task.cancel()
            with pytest.raises((asyncio.CancelledError, HomeserveError)):
                await task
            await d.fleet.stop()
            assert names() == []
            assert not psutil.Process().children(recursive=True)

    run(main)


def test_stop_from_another_task_ends_a_start_a_load_and_a_restart(run_once: Run, driver: Any) -> None:
    async def main() -> None:
        async with driver(ranks=2, fault="rank=0,step=load,action=delay:60000") as d:
            starting = asyncio.create_task(d.up())
            while d.fleet._load is None:
                await asyncio.sleep(0)
            await d.fleet.stop()
            with pytest.raises(WorkerStartError, match="the fleet was ended"):
                await starting
            with pytest.raises(WorkerLost):
                await d.restart()
            assert names() == []

    run_once(main)


def test_stop_before_start_and_twice(run_once: Run, driver: Any) -> None:
    async def main() -> None:
        d = driver()
        await d.fleet.stop()
        await d.fleet.stop()
        with pytest.raises(WorkerStartError, match="stopped"):
            await d.fleet.start()

    run_once(main)


def test_stop_lets_the_running_plan_end_and_kills_one_that_does_not(run_once: Run, driver: Any) -> None:
    async def main() -> None:
        async with driver(ranks=2, fault="rank=1,step=decode,action=stop") as d:
            await d.up()
            d.prefill()
            await d.credit()
            d.decode(0)
            await d.until(lambda: d.results)
            pids = [rank.pid for rank in d.fleet.ranks]
            await d.fleet.stop()
            assert not any(psutil.pid_exists(pid) for pid in pids)

    run_once(main)


# ------------------------------------------------------------------------------------------------- the parent dies

PARENT = """
import asyncio, os, signal, sys
from homeserve.fleet import Fleet, FleetSpec
from homeserve.wire.records import LoadSpec

class Quiet:
    def on_results(self, seq, results): pass
    def on_lost(self, loss): pass

async def main():
    spec = FleetSpec(3, "reference", 0, 1, "", 4, 60.0, 4096, 4096, fault=sys.argv[2])
    fleet = Fleet(spec, Quiet())
    await fleet.start()
    load = asyncio.create_task(fleet.load(LoadSpec(sys.argv[1], 1024, "f32", 64, 64, 4, 40)))
    if not sys.argv[2]:
        await load
        os.kill(fleet.ranks[2].pid, signal.SIGSTOP)
    else:
        await asyncio.sleep(0.2)
    print(*[rank.pid for rank in fleet.ranks], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("fault", ["", "rank=1,step=load,action=delay:60000"], ids=["ready", "loading"])
def test_when_the_parent_is_killed_its_workers_go_and_a_boot_sweeps(
    fault: str, gone: Callable[[list[int]], list[int]]
) -> None:
    """SIGKILL of the engine process: an idle worker, a busy one and a stopped one all end; the names of its shared
    memory stay, and the next boot removes them."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(TINY), fault], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 3
        left = names(parent.pid)
        assert len(left) == 4
    finally:
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()
    assert gone(pids) == []
    assert names(parent.pid) == left
    assert set(left) <= set(sweep())
    assert names(parent.pid) == []


def test_a_worker_started_by_hand_says_what_to_do() -> None:
    done = subprocess.run([sys.executable, "-P", "-m", "homeserve.worker"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "homeserve up" in done.stderr


@pytest.fixture
def gone() -> Iterator[Callable[[list[int]], list[int]]]:
    def wait(pids: list[int]) -> list[int]:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and any(map(_alive, pids)):
            time.sleep(0.02)
        return [pid for pid in pids if _alive(pid)]

    yield wait


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("number", "timeout_s", "rank", "why"),
    [(signal.SIGKILL, 60.0, 0, "was killed by SIGKILL"), (signal.SIGSTOP, 3.0, -1, "nobody knows why: no evidence")],
)
def test_a_loss_is_told_also_where_looking_for_evidence_fails(
    run_once: Run, driver: Any, monkeypatch: pytest.MonkeyPatch, number: int, timeout_s: float, rank: int, why: str
) -> None:
    async def look(*_: object) -> None:
        raise RuntimeError("no evidence")

    monkeypatch.setattr("homeserve.fleet.capture.Captures.look", look)

    async def main() -> None:
        async with driver(plan_timeout_s=timeout_s) as d:
            await d.up()
            d.prefill()
            await d.until(lambda: len(d.results) == 1)
            os.kill(d.fleet.ranks[0].pid, number)
            d.decode(0)
            await d.until(lambda: d.lost)
            (loss,) = d.losses
            assert loss.rank == rank and why in loss.why
            await d.restart()
            assert len(await d.generate(2)) == 2

    run_once(main)
