"""What ranks hold while the layout changes, sampled every few milliseconds beside the plan's figure for that moment.

Two samplers that know nothing of each other: the server's own (`/v1/homeserve/corridor`) and one in here. What files
and shared memory back is no rank's own. Pools that take turns, and that the released one keeps nothing, are read by
address in tests/model/test_layout_memory.py.
"""

from __future__ import annotations

import asyncio
import mmap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from box import Box
from load import Ask, Client, counted, stopped
from wide import widened

COUNTER = Path(__file__).parents[1] / "data" / "counter.gguf"
PERIOD_S = 0.004
FLIPS = 12
OTHER = {"pipeline": "tensor", "tensor": "pipeline"}
FLAGS = ("--devices", "cpu:3", "--threads", "1", "--layout", "pipeline", "--flip", "manual", "--kv-type", "f32")
SIZES = ("--context", "1536", "--kv-tokens", "65536", "--max-running", "8", "--chunk", "64")
MIB = 2**20


class Sampler(threading.Thread):
    """The most that each process holds by itself, between `on` and `off`."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__(daemon=True)
        self.most = dict.fromkeys(pids, 0)
        self.taken = 0
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(PERIOD_S):
            for pid in self.most:
                words = Path(f"/proc/{pid}/statm").read_text().split()
                held = (int(words[1]) - int(words[2])) * mmap.PAGESIZE
                self.most[pid] = max(self.most[pid], held)
            self.taken += 1

    def stop(self) -> None:
        self._ended.set()
        self.join()


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    made.close()


async def flips(client: Client, count: int) -> None:
    """So many flips there and back, each committed, while answers stream."""
    while not (status := await client.get("/v1/homeserve/status"))["kv"]["used_tokens"]:
        await asyncio.sleep(0.005)
    here = status["layout"]
    for _ in range(count):
        here = OTHER[here]
        async with client._session.post(client.url + "/v1/homeserve/flip", json={"to": here}) as answer:
            told = await answer.json()
            assert answer.status == 202, told
        while (record := await client.get(told["url"]))["state"] not in ("committed", "abandoned"):
            await asyncio.sleep(0.005)
        assert record["state"] == "committed" and record["live"]["rows"] > 0, record
        await asyncio.sleep(0.05)


async def loaded(client: Client) -> None:
    """Flips under long prompts and answers that stream."""
    bodies = [{"prompt": f"count {at}000:{counted(at * 1000, 900)}", "max_tokens": 150} for at in range(1, 7)]
    async with asyncio.TaskGroup() as group:
        open_asks = [group.create_task(client.ask(Ask("long", body | {"temperature": 0}))) for body in bodies]
        await flips(client, FLIPS)
        for task in open_asks:
            await task


def test_no_rank_holds_more_during_a_flip_than_the_ledger_has_for_that_moment(box: Box, tmp_path: Path) -> None:
    model = tmp_path / COUNTER.name
    widened(COUNTER, model, 65_536)
    run = box.up(str(model), *FLAGS, *SIZES)
    ranks: list[dict[str, Any]] = run.get("/v1/homeserve/status")[1]["ranks"]
    sampler = Sampler([rank["pid"] for rank in ranks])
    sampler.start()
    began = time.monotonic()

    async def play() -> None:
        async with Client(run) as client:
            await loaded(client)

    try:
        asyncio.run(play())
    finally:
        sampler.stop()
    corridor = run.get("/v1/homeserve/corridor")[1]
    found = corridor["flips"]
    print(f"{FLIPS} flips, {found['taken']} samples each {found['period_ms']:g} ms at most by the server")
    print(f"{sampler.taken} by the test in {time.monotonic() - began:.1f} s")
    assert found["period_ms"] <= 5 and found["taken"] >= 4 * FLIPS
    assert [each["rank"] for each in found["ranks"]] == [0, 1, 2]
    for each, rank in zip(found["ranks"], ranks, strict=True):
        moments = {part["moment"]: part for part in each["moments"]}
        assert len(moments) == 4, "before and behind the change, both ways"
        for name, part in sorted(moments.items()):
            print(f"rank {each['rank']}, {name}: {part['peak_mib']} MiB of {part['ledger_mib']} MiB ({part['phase']})")
            assert part["ledger_mib"] is not None and 0 < part["peak_mib"] <= part["ledger_mib"], part
        most = sampler.most[rank["pid"]] / MIB
        allowed = max(part["ledger_mib"] for part in moments.values())
        print(f"rank {each['rank']}, at any time: {most:.2f} MiB of {allowed} MiB")
        assert 0 < most <= allowed
    for device in corridor["devices"]:
        assert device["min_free_mib"] > corridor["floor_mib"], device
    stopped(run)
