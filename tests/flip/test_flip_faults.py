"""A rank of a real server fails at each step of a flip, in every way that the faults for tests know.

Whatever happens, the streams that are open read the right words, the flip's record says how it ended and why, all ranks
are in one layout, the next flip is committed, and nothing is left: no slot, no page, no process, no shared memory.

What a step may lead to (`Outcome`) is written down here, not read from the server: up to the commit a rank's no gives
the flip up and serving goes on; what fails behind that costs the life. The model counts, so the right answer is known.

The whole matrix runs in the slow tier; elsewhere SAMPLED cases are drawn, with the seed that HOMESERVE_TEST_SEED gives.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from box import Box, Run, wait_until

from homeserve.wire.faults import COMMIT_STEPS, PREPARE_STEPS

COUNTER = Path(__file__).parents[1] / "data" / "counter.gguf"
RANKS = 3
SAMPLED = 12
OTHER = {"pipeline": "tensor", "tensor": "pipeline"}
FLAGS = (
    *("--devices", "cpu:3", "--layout", "pipeline", "--flip", "manual", "--pipeline-ratio", "2,1,1"),
    *("--context", "1024", "--kv-tokens", "8192", "--max-running", "8", "--chunk", "32", "--threads", "1"),
    *("--kv-type", "f32", "--plan-timeout-s", "5"),
)
"""Rows of f32: in the other layout sums have other last digits, and a row that is rounded to f16 makes them larger."""
STREAMS = ((100, 160), (3, 200), (7000, 120))
"""Where each counts from, and how many tokens it reads. A token is a byte."""
SOON = 12
"""Tokens that each stream has when the flip is asked for."""
DELAY_MS = 300


class Outcome(Enum):
    COMMITTED = "committed"
    GIVEN_UP = "given up: ranks live on"
    LOST = "given up: the life is lost"


@dataclass(frozen=True)
class Case:
    rank: int
    step: str
    action: str

    @property
    def fault(self) -> str:
        told = f"{self.action}:{DELAY_MS}" if self.action == "delay" else self.action
        return f"rank={self.rank},step={self.step},action={told}"

    @property
    def outcome(self) -> Outcome:
        if self.action == "delay":
            return Outcome.COMMITTED
        if self.action in ("kill", "stop"):
            return Outcome.LOST
        if self.step in PREPARE_STEPS:
            damages_answer = self.action == "corrupt" and self.step == "prepare.check"
            return Outcome.LOST if damages_answer else Outcome.GIVEN_UP
        healed = self.action == "corrupt" and self.step == "commit.refill"
        return Outcome.COMMITTED if healed else Outcome.LOST

    def __str__(self) -> str:
        return f"{self.step}-{self.action}-{self.rank}"


ACTIONS = ("kill", "stop", "refuse", "enospc", "corrupt", "delay")
MATRIX = [
    Case(rank, step, action) for step in (*PREPARE_STEPS, *COMMIT_STEPS) for action in ACTIONS for rank in range(RANKS)
]
SEED = os.environ.get("HOMESERVE_TEST_SEED", "7")


def chosen() -> list[Case]:
    """All in the slow tier; else some, of each half and of each action at least one."""
    if os.environ.get("HOMESERVE_TEST_TIER") == "slow":
        return MATRIX
    draw = random.Random(f"flip faults {SEED}")
    shuffled = draw.sample(MATRIX, len(MATRIX))
    kinds = [(steps, action) for action in ACTIONS for steps in (PREPARE_STEPS, COMMIT_STEPS)]
    assert len(kinds) == SAMPLED
    return [next(c for c in shuffled if c.step in steps and c.action == action) for steps, action in kinds]


CASES = chosen()


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    made.close()


# ------------------------------------------------------------------------------------------------------------- a server


def counted(start: int, tokens: int) -> str:
    return "".join(f" {number}" for number in range(start + 1, start + 1 + tokens))[:tokens]


class Client:
    """What one test asks of one server, streams among it."""

    def __init__(self, run: Run) -> None:
        self.run, self.url = run, run.url
        self.texts: dict[int, str] = {}
        self.told: dict[int, dict[str, Any]] = {}
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120))

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as answer:
            return await answer.json()

    async def post(self, to: str) -> tuple[int, Any]:
        async with self.session.post(f"{self.url}/v1/homeserve/flip", json={"to": to}) as answer:
            return answer.status, await answer.json()

    async def status(self) -> dict[str, Any]:
        return dict(await self.get("/v1/homeserve/status"))

    async def count(self, start: int, tokens: int, leave_after: int = 0) -> None:
        body = {"prompt": f"count {start}:", "max_tokens": tokens, "temperature": 0, "stream": True}
        self.texts[start] = ""
        async with self.session.post(f"{self.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                self.told[start] = chunk.get("homeserve") or self.told.get(start, {})
                self.texts[start] += "".join(choice["text"] for choice in chunk["choices"])
                if leave_after and len(self.texts[start]) >= leave_after:
                    return

    async def until(self, what: str, holds: Callable[[], Any], limit_s: float = 60) -> Any:
        """The first true value of `holds`, awaited or not."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            found = holds()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.005)
        pytest.fail(f"not within {limit_s:g} s: {what}; {json.dumps(await self.status())[:3000]}")

    async def over(self, told: dict[str, Any]) -> dict[str, Any]:
        async def ended() -> Any:
            record = await self.get(told["url"])
            return record if record["state"] in ("committed", "abandoned") else None

        return dict(await self.until("the end of a flip", ended))

    async def flip(self, to: str) -> dict[str, Any]:
        status, told = await self.post(to)
        assert status == 202, told
        return await self.over(told)

    async def ready(self) -> dict[str, Any]:
        async def is_ready() -> Any:
            status = await self.status()
            return status if status["state"] == "ready" else None

        return dict(await self.until("a server that is ready", is_ready))

    async def check_idle(self) -> None:
        """The ranks' own census agrees with the engine's: every page and slot is free or cached, in one layout."""

        async def idle() -> Any:
            census = await self.get("/v1/homeserve/census")
            return census if census["idle"] else None

        census = await self.until("an idle census", idle)
        assert census["ok"], census
        assert {pool["rank"] for pool in census["ranks"]} == set(range(RANKS))
        for pool in census["ranks"]:
            assert pool["free"] + pool["cached"] == pool["capacity"] and pool["leaks"] == [], pool


def serve(run: Run, main: Callable[[Client], Any]) -> None:
    """Run a test's coroutine on a server, which must drain then and leave nothing."""

    async def bounded() -> None:
        async with asyncio.timeout(150):
            client = Client(run)
            async with AsyncExitStack() as stack:
                stack.push_async_callback(client.session.close)
                await main(client)

    asyncio.run(bounded())
    ended(run)


def ended(run: Run) -> None:
    run.send(signal.SIGTERM)
    assert run.wait() == 0, run.err
    assert run.left_behind() == []


def up(box: Box, *flags: str, fault: str = "", model: Path = COUNTER) -> Run:
    environ = {"HOMESERVE_TESTING": "1", "HOMESERVE_FAULT": fault} if fault else {}
    return box.up(str(model), *FLAGS, *flags, **environ)


# ----------------------------------------------------------------------------------------------------------- the matrix


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fault_at_a_step_of_a_flip_costs_nobody_a_word(box: Box, case: Case) -> None:
    print(f"drawn with HOMESERVE_TEST_SEED={SEED}")

    async def main(client: Client) -> None:
        streams = [asyncio.create_task(client.count(*each)) for each in STREAMS]
        await client.until("streams", lambda: all(len(client.texts.get(at, "")) >= SOON for at, _ in STREAMS))
        record = await client.flip("tensor")
        check_record(case, record)
        await asyncio.gather(*streams)
        for start, tokens in STREAMS:
            assert client.texts[start] == counted(start, tokens), case
        await check_phase(client, case, record)
        await check_next_flip(client, record)

    serve(up(box, fault=case.fault), main)


def check_record(case: Case, record: dict[str, Any]) -> None:
    """It says how the flip ended; of one that was given up, which rank is to blame, for what."""
    if case.outcome is Outcome.COMMITTED:
        assert record["state"] == "committed" and record["reason"] is None, record
        rank = record["ranks"][case.rank]
        healed = case.action == "corrupt"
        assert rank["refill_tries"] == (2 if healed else 1), rank
        return
    assert record["state"] == "abandoned", record
    reason = record["reason"]
    assert reason, record
    assert re.search(rf"\brank {case.rank}\b", reason), reason
    assert re.search(EXPECTED[case.action], reason), reason
    assert where_in_reason(case) in reason, reason


EXPECTED = {
    "kill": "SIGKILL",
    "stop": "stopped",
    "refuse": "refused by a fault",
    "enospc": "No space left",
    "corrupt": "digest|checksum",
}
PHASES = dict.fromkeys(PREPARE_STEPS[:2], "packing") | dict.fromkeys(PREPARE_STEPS[2:], "verifying")


def where_in_reason(case: Case) -> str:
    """The step that the reason names. Nobody but a rank knows its step: of one that cannot say it any more, or is not
    believed, there is what the engine was waiting for."""
    if case.action in ("refuse", "enospc"):
        return f"step {case.step}"
    if case.action == "corrupt" and case.step in ("prepare.pack", "prepare.exchange", "prepare.digest"):
        return "step prepare.digest"
    if case.action == "corrupt" and case.step in ("commit.write_kv", "commit.write_state"):
        return "step commit.verify"
    return PHASES.get(case.step, "committing")


async def check_phase(client: Client, case: Case, record: dict[str, Any]) -> None:
    """Engine and ranks are in one layout, which the record explains; the events and counters say what happened."""
    status = await client.ready()
    lost = case.outcome is Outcome.LOST
    assert status["layout"] == ("tensor" if case.outcome is Outcome.COMMITTED else "pipeline")
    assert [rank["restarts"] for rank in status["ranks"]] == [int(lost)] * RANKS
    kinds = [event["kind"] for event in status["events"]]
    assert kinds.count("worker_lost") == int(lost), status["events"]
    assert kinds.count("flip_abandoned") == int(record["state"] == "abandoned"), status["events"]
    if lost:
        event = next(event for event in status["events"] if event["kind"] == "worker_lost")
        assert event["rank"] == case.rank, event
        assert status["epoch"] > record["epoch"], "a life that begins again has an epoch of its own"
    elif record["state"] == "committed":
        assert status["epoch"] == record["epoch"]
    assert status["flip"]["committed"] == int(record["state"] == "committed")
    assert sum(status["flip"]["abandoned"].values()) == int(record["state"] == "abandoned")
    assert status["flip"]["unarmed_work_count"] == 0
    await client.check_idle()


async def check_next_flip(client: Client, before: dict[str, Any]) -> None:
    """Ranks follow the next one, to and fro, with an answer under way, and nothing is lost on the way."""
    layout = (await client.status())["layout"]
    stream = asyncio.create_task(client.count(500, 80))
    await client.until("a stream", lambda: len(client.texts.get(500, "")) >= 4)
    record = await client.flip(OTHER[layout])
    assert record["state"] == "committed" and record["epoch"] > before["epoch"], record
    await stream
    assert client.texts[500] == counted(500, 80)
    assert client.told[500]["flips_crossed"] == 1, client.told[500]
    status = await client.status()
    assert (status["layout"], status["epoch"]) == (OTHER[layout], record["epoch"])
    await client.check_idle()


# --------------------------------------------------------------------------------------------------------------- images


@dataclass(frozen=True)
class ImageCase:
    """A fault on the way of an image between memory and disk. At the load each rank writes the image of the pipeline
    layout (its first `spill`); behind the first flip that of the tensor layout (the second), and has the other one
    come back (its first `promote`). `no` is what a rank says to the flip back, if it says no; `later` to the next."""

    step: str
    nth: int
    action: str
    no: str = ""
    later: str = ""
    lost: bool = False

    def __str__(self) -> str:
        return f"{self.step}{self.nth}-{self.action.partition(':')[0]}"


IMAGES = [
    ImageCase("spill", 1, "enospc"),
    ImageCase("spill", 2, "enospc"),
    ImageCase("spill", 1, "corrupt", no="pipeline layout is not in memory: ImageFault: it came back with the digest"),
    ImageCase("spill", 2, "corrupt", later="tensor layout is not in memory: ImageFault: it came back with the digest"),
    ImageCase("promote", 1, "corrupt", no="pipeline layout is not in memory: ImageFault: it came back with the digest"),
    ImageCase("promote", 1, "enospc", no="pipeline layout is not in memory: OSError: .*No space left"),
    ImageCase("promote", 1, "refuse", no="pipeline layout is not in memory: FaultRefused: refused by a fault"),
    ImageCase("promote", 1, "delay:5000", no=r"promotion of the image of the pipeline layout: \d+ of \d+ bytes"),
    ImageCase("spill", 2, "kill", lost=True),
    ImageCase("promote", 1, "kill", lost=True),
    ImageCase("promote", 1, "stop", lost=True),
]


def chosen_images() -> list[ImageCase]:
    if os.environ.get("HOMESERVE_TEST_TIER") == "slow":
        return IMAGES
    return random.Random(f"images {SEED}").sample(IMAGES, 2)


@pytest.mark.parametrize("case", chosen_images(), ids=str)
def test_a_fault_of_an_image_costs_a_flip_at_most(box: Box, tmp_path: Path, case: ImageCase) -> None:
    print(f"drawn with HOMESERVE_TEST_SEED={SEED}")
    spill = tmp_path / "spill"
    spill.mkdir()
    fault = f"rank=1,step={case.step},nth={case.nth},action={case.action}"
    serve(up(box, "--image-spill", str(spill), fault=fault), lambda client: image_play(client, case))
    assert list(spill.iterdir()) == [], "a server's folder goes with it"


async def image_play(client: Client, case: ImageCase) -> None:
    stream = asyncio.create_task(client.count(100, 250))
    await client.until("a stream", lambda: len(client.texts.get(100, "")) >= SOON)
    first = await client.flip("tensor")
    if case.lost:  # what goes on in the background may end the life before its commit is answered
        assert first["state"] == "committed" or re.match("rank 1 was lost, committing: ", first["reason"]), first
        await client.until("a loss", lambda: lost_once(client))
    else:
        assert first["state"] == "committed", first
    if case.action.startswith("delay"):
        told = await client.flip("pipeline")
        assert re.search(rf"^rank \d, packing: {case.no}; step prepare.check$", told["reason"]), told
    elif case.no:
        reason = await told_once_images_have_settled(client, "pipeline")
        assert re.search(rf"^rank 1, packing: .*{case.no}.*; step prepare.check$", reason), reason
        assert (await client.status())["layout"] == "tensor"
        if case.step == "promote":  # what failed was the reading, and it is tried again
            await client.until("another try", lambda: committed(client, "pipeline"))
    if not case.no or case.action.startswith("delay"):
        here = (await client.ready())["layout"]
        await committed_once_images_are_there(client, OTHER[here])
        if case.later:
            reason = await told_once_images_have_settled(client, here)
            assert re.search(case.later, reason), reason
        else:
            await committed_once_images_are_there(client, here)
    await stream
    assert client.texts[100] == counted(100, 250)
    status = await client.ready()
    assert [rank["restarts"] for rank in status["ranks"]] == [int(case.lost)] * RANKS
    await client.check_idle()


async def lost_once(client: Client) -> bool:
    status = await client.status()
    return status["state"] == "ready" and [rank["restarts"] for rank in status["ranks"]] == [1] * RANKS


async def committed(client: Client, to: str) -> bool:
    return bool((await client.flip(to))["state"] == "committed")


async def committed_once_images_are_there(client: Client, to: str) -> None:
    assert await told_once_images_have_settled(client, to) == ""


async def told_once_images_have_settled(client: Client, to: str) -> str:
    """Why a flip was given up; not because an image is still under way: then it is asked for again."""

    async def told() -> Any:
        record = await client.flip(to)
        waits = re.search("promotion of the image|on its way out", record["reason"] or "")
        return None if waits else record

    record = await client.until("images", told)
    assert (record["state"] == "committed") is (record["reason"] is None), record
    return record["reason"] or ""


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for a part of an image; skipped where none can be mounted."""
    folder = tmp_path / "full"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "homeserve-test", folder], capture_output=True)
    if made.returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_full_leaves_images_in_memory(box: Box, full_disk: Path) -> None:
    case = ImageCase("spill", 1, "enospc")
    run = up(box, "--image-spill", str(full_disk))
    serve(run, lambda client: image_play(client, case))
    assert "stays in memory" in run.err and "No space left" in run.err
    assert list(full_disk.iterdir()) == []


# -------------------------------------------------------------------------------------------- around a flip: the server


SLOW_COMMIT = "rank=1,step=commit.refill,action=delay:3000"


def test_a_server_that_is_killed_in_a_commit_leaves_no_rank(box: Box, tmp_path: Path) -> None:
    """What lies in memory and on the disk under its name is swept by the next server."""
    spill = tmp_path / "spill"
    spill.mkdir()
    run = up(box, "--image-spill", str(spill), fault=SLOW_COMMIT)

    async def main(client: Client) -> None:
        stream = asyncio.create_task(client.count(100, 400))
        await client.until("a stream", lambda: len(client.texts.get(100, "")) >= SOON)
        status, told = await client.post("tensor")
        assert status == 202

        async def committing() -> bool:
            return bool((await client.get(told["url"]))["state"] == "committing")

        await client.until("the commit", committing)
        status, refused = await client.post("tensor")
        assert (status, refused["error"]["code"]) == (409, "flip_running"), refused
        run.send(signal.SIGKILL)
        with pytest.raises(aiohttp.ClientError):
            await stream
        await client.session.close()

    asyncio.run(with_client(run, main))
    assert run.wait() == -signal.SIGKILL
    wait_until("ranks that end", lambda: not [line for line in run.left_behind() if line.startswith("process")])
    (left,) = spill.iterdir()
    after = up(box, "--image-spill", str(spill))
    assert not left.exists() and len(list(spill.iterdir())) == 1
    assert not [line for line in run.left_behind() if line.startswith(("homeserve-", "process"))]
    ended(after)
    assert list(spill.iterdir()) == []


async def with_client(run: Run, main: Callable[[Client], Any]) -> None:
    async with asyncio.timeout(150):
        client = Client(run)
        async with client.session:
            await main(client)


def test_no_flip_begins_while_ranks_come_back_and_one_does_then(box: Box) -> None:
    async def main(client: Client) -> None:
        stream = asyncio.create_task(client.count(100, 300))
        await client.until("a stream", lambda: len(client.texts.get(100, "")) >= SOON)
        assert (await client.flip("tensor"))["state"] == "committed"
        os.kill((await client.status())["ranks"][2]["pid"], signal.SIGKILL)

        async def recovers() -> bool:
            return bool((await client.status())["state"] == "recovering")

        await client.until("recovery", recovers)
        status, refused = await client.post("tensor")
        assert (status, refused["error"]["code"]) == (409, "not_ready"), refused
        status = await client.ready()
        assert status["layout"] == "pipeline", "it begins again in the resting layout"
        record = await client.flip("tensor")
        assert record["state"] == "committed" and record["epoch"] >= 3, record
        await stream
        assert client.texts[100] == counted(100, 300)
        assert client.told[100]["flips_crossed"] == 2, client.told[100]
        await client.check_idle()

    serve(up(box), main)


def test_fifty_who_leave_at_once_during_flips(box: Box) -> None:
    async def main(client: Client) -> None:
        stays = [asyncio.create_task(client.count(start, 250)) for start in (100, 5000)]
        await client.until("streams", lambda: all(len(client.texts.get(at, "")) >= SOON for at in (100, 5000)))
        leave = [asyncio.create_task(client.count(200 + 7 * at, 400, leave_after=1 + at % 9)) for at in range(50)]
        to, records = "tensor", []
        while not all(task.done() for task in (*stays, *leave)) or len(records) < 2:
            records.append(await client.flip(to))
            assert records[-1]["state"] == "committed", records[-1]
            to = OTHER[to]
        await asyncio.gather(*stays, *leave)
        for start in (100, 5000):
            assert client.texts[start] == counted(start, 250)
        for at in range(50):
            text = client.texts[200 + 7 * at]
            assert text == counted(200 + 7 * at, len(text))
        assert max(record["live"]["requests"] for record in records) >= 3, records
        await client.check_idle()

    serve(up(box), main)


@pytest.mark.parametrize(("step", "times"), [("prepare.pack", 1), ("prepare.pack", 2), ("commit.refill", 2)])
def test_ctrl_c_in_a_flip_leaves_nothing(box: Box, step: str, times: int) -> None:
    """Once: what is open is answered first, past the flip. Twice: at once."""
    run = up(box, fault=f"rank=1,step={step},action=delay:3000")

    async def main(client: Client) -> None:
        stream = asyncio.create_task(client.count(100, 80))
        await client.until("a stream", lambda: len(client.texts.get(100, "")) >= SOON)
        status, told = await client.post("tensor")
        assert status == 202

        async def under_way() -> bool:
            return bool((await client.get(told["url"]))["state"] in ("preparing", "committing"))

        await client.until("the flip", under_way)
        run.send(signal.SIGINT)
        if times == 2:

            async def drains() -> bool:
                return bool((await client.status())["state"] == "draining")

            await client.until("a server that drains", drains)
            run.send(signal.SIGINT)
        (outcome,) = await asyncio.gather(stream, return_exceptions=True)
        if times == 1:
            assert outcome is None and client.texts[100] == counted(100, 80), outcome
            assert client.told[100]["flips_crossed"] == 1

    asyncio.run(with_client(run, main))
    assert run.wait() == 0, run.err
    assert run.left_behind() == []
