"""Real workers on the plan log: handshake, order, credit, refusals."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from homeserve.errors import (
    InvalidModelFile,
    ModelNotFound,
    RecordTooLarge,
    SettingError,
    WorkerStartError,
)
from homeserve.wire.records import LaneRows, PlanKind
from homeserve.wire.segments import names

Run = Callable[[Callable[[], Awaitable[None]]], None]


def test_start_load_answer_stop(run: Run, driver: Any) -> None:
    async def main() -> None:
        async with driver(ranks=2) as d:
            assert d.fleet.credit() == 0
            await d.fleet.start()
            pids = [rank.pid for rank in d.fleet.ranks]
            assert len(set(pids)) == 2
            assert all(os.getsid(pid) == pid for pid in pids), "a Ctrl-C in the terminal would reach the workers"
            assert sorted(d.fleet.shared_memory_names()) == names() != []
            facts = await d.load()
            assert [f.backend for f in facts] == ["reference"] * 2
            assert facts[0].layers is not None and facts[0].layers[0] == 0
            assert d.progress and d.progress[0][0] == "reading the model of 2 ranks"
            assert d.fleet.credit() == d.spec.plans_in_flight
            tokens = await d.generate(3)
            assert len(tokens) == 3
            status = d.fleet.ranks[1]
            assert (status.rank, status.pid, status.backend, status.last_seq) == (1, pids[1], "reference", 4)
            assert (status.restarts, status.layers) == (0, list(facts[1].layers or ()))
            assert status.busy_ms > 0 and status.idle_ms > 0 and (status.rss_mib or 0) > 1
            assert set(status.lines_mib) == {name for name, _ in facts[1].lines}
            await d.fleet.stop()
            assert d.fleet.shared_memory_names() == names() == []
            assert d.fleet.ranks[1].pid is None
            assert not d.lost
            await d.fleet.stop()

    run(main)


def test_three_ranks_acknowledge_every_plan_in_order(run_once: Run, driver: Any) -> None:
    """The log, ring and handshake with three real workers: a few hundred plans, as many in flight as the log has
    slots; every rank answers every seq, in order, and all three say the same."""
    plans, lanes = 300, {0: 11, 1: 12, 2: 13}

    async def main() -> None:
        async with driver(ranks=3) as d:
            facts = await d.up()
            assert len(facts) == len(d.fleet.ranks) == 3
            for lane, request in lanes.items():
                await d.credit()
                d.prefill(lane, request, [1, 5 + lane, 77, 120 + lane, 9, 8, 30, 2])
            deepest = seq = 0
            for step in range(plans):
                await d.credit()
                seq = (
                    d.decode(step % 140, lanes)
                    if step < 140
                    else d.fleet.issue(PlanKind.CENSUS, epoch=0, ranks=[step % 3])
                )
                deepest = max(deepest, d.spec.plans_in_flight - d.fleet.credit())
            await d.until(lambda: d.lost or d.fleet.credit() == d.spec.plans_in_flight)
            assert not d.lost, d.lost
            assert deepest == d.spec.plans_in_flight, "the log was never full"
            assert [s for s, _ in d.results] == list(range(2, seq + 1)), "1 is the load"
            assert [rank.last_seq for rank in d.fleet.ranks] == [seq] * 3
            for s, results in d.results:
                assert all(r.ok and r.seq == s for r in results), results
                if s <= 4 + 140:
                    assert [r.rank for r in results] == [0, 1, 2]
                    assert results[0].samples == results[1].samples == results[2].samples
                    assert len(results[0].samples) == (1 if s <= 4 else 3)
                else:
                    assert len(results) == 1 and results[0].rank == (s - 5) % 3

    run_once(main)


def test_a_full_ring_gives_no_credit_and_loses_nothing(run_once: Run, driver: Any) -> None:
    async def main() -> None:
        async with driver(ranks=2, plans_in_flight=5, fault="rank=1,step=decode,nth=1,action=delay:300") as d:
            await d.up()
            d.prefill()
            for step in range(4):
                assert d.fleet.credit() == 4 - step
                d.decode(step)
            assert d.fleet.credit() == 0
            with pytest.raises(AssertionError, match="without credit"):
                d.decode(4)
            # Rank 0 has answered all of them long before rank 1 wakes up; its answers alone free nothing.
            await d.until(lambda: d.fleet.credit() > 0)
            seq = d.decode(4)
            await d.until(lambda: len(d.results) == 6)
            assert [s for s, _ in d.results] == list(range(2, seq + 1))
            assert d.fleet.credit() == 5
            assert all(a.samples == b.samples and a.ok for _, (a, b) in d.results)

    run_once(main)


def test_a_plan_larger_than_a_slot_is_refused_here_and_the_next_one_runs(run_once: Run, driver: Any) -> None:
    async def main() -> None:
        async with driver(slot_bytes=512) as d:
            await d.up()
            with pytest.raises(RecordTooLarge, match="512|larger than a slot"):
                d.prefill(prompt=[1] * 500)
            assert d.fleet.credit() == d.spec.plans_in_flight
            assert len(await d.generate(2)) == 2

    run_once(main)


def test_an_answer_larger_than_a_slot_becomes_a_reason(run_once: Run, driver: Any) -> None:
    async def main() -> None:
        async with driver(report_slot_bytes=512) as d:
            await d.up()
            d.prefill(prompt_logprobs=20)
            await d.until(lambda: d.lost)
            assert not d.results and "refused plan 2 (prefill)" in d.lost[0][1]
            assert "larger than a slot" in d.lost[0][1]

    run_once(main)


def test_a_plan_that_does_not_fit_the_lanes_is_answered_with_the_reason(run_once: Run, driver: Any) -> None:
    async def main() -> None:
        async with driver(ranks=2) as d:
            await d.up()
            d.prefill()
            wrong = LaneRows(0, 99, 8, b"", sample=True)
            await d.credit()
            await d.until(lambda: [seq for seq, _ in d.results] == [2])  # a loss ends what is still on its way
            d.fleet.issue(PlanKind.DECODE, epoch=0, rows=(wrong,))
            await d.until(lambda: d.lost)
            assert [s for s, _ in d.results] == [2]
            assert "refused plan 3 (decode): " in d.lost[0][1] and "request 1's, not request 99's" in d.lost[0][1]

    run_once(main)


def test_an_interrupt_does_not_reach_a_worker(run_once: Run, driver: Any) -> None:
    async def main() -> None:
        async with driver() as d:
            await d.up()
            os.kill(d.fleet.ranks[0].pid, signal.SIGINT)
            assert len(await d.generate(3)) == 3
            assert not d.lost

    run_once(main)


def test_census_and_flush(run_once: Run, driver: Any) -> None:
    async def main() -> None:
        async with driver() as d:
            await d.up()
            await d.generate(1)
            for kind in (PlanKind.CENSUS, PlanKind.FLUSH, PlanKind.CENSUS):
                await d.credit()
                d.fleet.issue(kind, epoch=0)
            await d.until(lambda: len(d.results) == 4)
            before, _, after = (results[0] for _, results in d.results[1:])
            assert before.census[0].lanes == ((0, 1, 10),) and before.census[0].capacity == 1024
            assert after.census[0].lanes == ()

    run_once(main)


# --------------------------------------------------------------------------------------------------- cannot start


def test_a_load_that_is_refused_raises_the_ranks_own_error(run_once: Run, driver: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with driver(ranks=2) as d:
            await d.fleet.start()
            with pytest.raises(ModelNotFound):
                await d.load(tmp_path / "nothing.gguf")
            broken = tmp_path / "broken.gguf"
            broken.write_bytes(b"GGUF" + b"\xff" * 100)
            with pytest.raises(InvalidModelFile, match="broken.gguf") as caught:
                await d.load(broken)
            assert caught.value.path == str(broken)
            await d.load()  # the workers live on
            assert len(await d.generate(2)) == 2

    run_once(main)


def test_what_a_rank_refuses_to_load_for_is_told_at_once(run_once: Run, driver: Any, tmp_path: Path) -> None:
    """The others may be waiting for it inside the load, and would then say that it did not come."""

    async def main() -> None:
        async with driver(ranks=2, plan_timeout_s=20.0) as d:
            await d.fleet.start()
            os.kill(d.fleet.ranks[0].pid, signal.SIGSTOP)
            with pytest.raises(ModelNotFound):
                await d.load(tmp_path / "nothing.gguf")
            await d.fleet.stop()
            assert names() == []

    run_once(main)


def test_an_unknown_backend_is_a_setting_error(run_once: Run, driver: Any) -> None:
    async def main() -> None:
        async with driver(backend="abacus") as d:
            await d.fleet.start()
            with pytest.raises(SettingError, match="abacus"):
                await d.load()

    run_once(main)


def test_a_worker_that_does_not_come_up_in_time_leaves_nothing(run: Run, driver: Any) -> None:
    async def main() -> None:
        async with driver(ranks=2, start_timeout_s=0.001) as d:
            with pytest.raises(WorkerStartError, match="did not say hello"):
                await d.fleet.start()
            assert names() == []
            await d.fleet.stop()

    run(main)


def test_a_worker_that_dies_at_once_is_quoted(run: Run, driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")

    async def main() -> None:
        async with driver() as d:
            with pytest.raises(WorkerStartError, match="rank 0 ended with status 1; it said: .+"):
                await d.fleet.start()

    run(main)


def test_tokens_outside_the_vocabulary_are_refused(run_once: Run, driver: Any) -> None:
    async def main() -> None:
        async with driver() as d:
            await d.up()
            d.prefill(prompt=[1, 2**30])
            await d.until(lambda: d.lost)
            assert not d.results and "outside the vocabulary" in d.lost[0][1]

    run_once(main)
