"""A killed worker costs its streams a pause, never a word.

Every server here is a real one with a real worker process, killed with SIGKILL by the pid that `status` tells. The
texts are compared with those of the same requests on the same server before any kill.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

STREAMS = 8
TOKENS = 80
KILLS_AFTER = (1, 10, 50)
EPISODES = 5
BOUND_S = 60.0


class Served:
    """A server under test and one client session."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def status(self) -> dict[str, Any]:
        async with self.session.get(f"{self.url}/v1/homeserve/status") as response:
            return await response.json()

    async def kill_worker(self) -> None:
        """SIGKILL of rank 0, once there is one alive; returns when the restart is counted."""
        before = await self.wait(lambda s: s["state"] == "ready")
        rank = before["ranks"][0]
        os.kill(rank["pid"], signal.SIGKILL)
        await self.wait(lambda s: s["ranks"][0]["restarts"] == rank["restarts"] + 1 and s["state"] == "ready")

    async def wait(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + BOUND_S
        while not holds(status := await self.status()):
            assert time.monotonic() < deadline, f"not within {BOUND_S} s: {json.dumps(status)[:2000]}"
            await asyncio.sleep(0.02)
        return status

    async def stream(self, body: dict[str, Any], seen: asyncio.Queue[int] | None = None) -> tuple[str, dict[str, Any]]:
        """Text and last homeserve block of one streamed completion, over one connection. `seen` hears of each chunk
        how many came before."""
        text, last, count = "", {}, 0
        async with self.session.post(f"{self.url}/v1/completions", json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                last = chunk.get("homeserve") or last
                for choice in chunk["choices"]:
                    text += choice["text"]
                    if choice["text"] and seen is not None:
                        count += 1
                        seen.put_nowait(count)
        return text, last


@asynccontextmanager
async def served(start_server: Callable[..., Any], *flags: str) -> AsyncIterator[Served]:
    with start_server(*flags) as server:
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            yield Served(server.url, session)


def bodies() -> list[dict[str, Any]]:
    subjects = ["the sea", "a small town", "bread", "the moon", "old maps", "a river", "winter", "the night train"]
    return [
        {"prompt": f"A long story about {subject}. Once upon a time", "max_tokens": TOKENS, "temperature": 0, "seed": i}
        for i, subject in enumerate(subjects)
    ]


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("homeserve-*")}


def test_twenty_kills_lose_nothing(start_server: Callable[..., Any]) -> None:
    async def body() -> None:
        async with served(start_server, "--deterministic", "--max-running", "10") as server:
            expected = [(await server.stream(b))[0] for b in bodies()]
            names_before = len(shared_memory())
            kills = 0
            for _ in range(EPISODES):
                kills += await episode(server, expected)
            status = await server.wait(lambda s: s["requests"]["running"] == 0)
            assert kills == status["ranks"][0]["restarts"] == 20
            assert status["requests"]["aborted"] == 0
            assert len(shared_memory()) == names_before
            async with server.session.get(f"{server.url}/v1/homeserve/census") as response:
                census = await response.json()
            assert census["ok"] and census["idle"], census

    asyncio.run(body())


async def episode(server: Served, expected: list[str]) -> int:
    """Eight streams; a kill while they prefill, and one after 1, 10 and 50 chunks of the first."""
    seen: asyncio.Queue[int] = asyncio.Queue()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(server.stream(b, seen if i == 0 else None)) for i, b in enumerate(bodies())]
        await server.wait(lambda s: s["requests"]["running"] + s["requests"]["waiting"] > 0)
        await server.kill_worker()
        for count in KILLS_AFTER:
            while await asyncio.wait_for(seen.get(), BOUND_S) < count:
                pass
            await server.kill_worker()
    assert [task.result()[0] for task in tasks] == expected
    assert any(task.result()[1]["restarts"] for task in tasks)
    return 1 + len(KILLS_AFTER)


def test_a_request_in_flight_at_two_deaths_in_a_row_is_failed_and_the_server_goes_on(
    start_server: Callable[..., Any],
) -> None:
    """Killed before it comes past the place of the first death: a prompt of many chunks, then an early one."""

    async def body() -> None:
        async with served(start_server, "--deterministic", "--chunk", "256") as server:
            prompt = [3 + i % 1000 for i in range(7000)]
            asked = asyncio.create_task(
                server.session.post(f"{server.url}/v1/completions", json={"prompt": prompt, "max_tokens": 4})
            )
            # Late in the prompt, then as soon as it is begun again: it cannot be past 12 chunks by then.
            await server.wait(lambda s: s["engine"]["plans_acked"] >= 12)
            await server.kill_worker()
            await server.wait(lambda s: s["state"] == "ready" and s["requests"]["running"] == 1)
            await server.kill_worker()
            response = await asked
            assert response.status == 500
            error = (await response.json())["error"]
            assert error["code"] == "server_error"
            text, _ = await server.stream(bodies()[0])
            assert text
            assert (await server.status())["ranks"][0]["restarts"] == 2

    asyncio.run(body())


def test_a_long_prompt_delays_no_open_stream(start_server: Callable[..., Any]) -> None:
    """Counted by the scheduler: plans in a row that could have carried a decode row and did not. The limit of 2 is
    reached and kept, and the open stream gets tokens while the prompt of 4000 is computed."""

    async def body() -> None:
        async with served(start_server, "--deterministic", "--max-prefill-delay", "2", "--chunk", "128") as server:
            seen: asyncio.Queue[int] = asyncio.Queue()
            stream = asyncio.create_task(server.stream({**bodies()[0], "max_tokens": 400, "ignore_eos": True}, seen))
            await asyncio.wait_for(seen.get(), BOUND_S)
            before = (await server.status())["engine"]["plans_acked"]
            await server.stream({"prompt": [3 + i % 1000 for i in range(4000)], "max_tokens": 1})
            status = await server.status()
            chunks = 4000 // 128
            assert status["engine"]["plans_acked"] - before >= chunks
            assert seen.qsize() >= chunks // 3 - 1, "the stream stood still while the prompt was computed"
            await stream
            status = await server.status()
            assert status["engine"]["decode_skips_max"] == 2
            assert status["engine"]["preemptions"] == 0

    asyncio.run(body())
