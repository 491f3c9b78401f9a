"""A crowd of streams at once: every one of them ends whole, and the event loop keeps its time.

50 streams here, 200 for a minute in `slow`. The lag of the loop is what the server itself measures and tells
(`engine.loop_lag_ms`), so that a person can see the same. What others on this machine do to it is not the server's: of
three crowds the calmest counts.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
STREAMS = 200 if SLOW else 50
TOKENS = 16
LAG_MS = 50.0
CROWDS = 3
CROWD_S = 60.0
pytestmark = pytest.mark.timeout(900)
ROUTES: tuple[tuple[str, Callable[[int], dict[str, Any]], str], ...] = (
    ("/v1/chat/completions", lambda n: {"messages": turn(n), "max_tokens": TOKENS, "ignore_eos": True}, "[DONE]"),
    ("/v1/completions", lambda n: {"prompt": f"Number {n} is", "max_tokens": TOKENS, "ignore_eos": True}, "[DONE]"),
    ("/v1/messages", lambda n: {"messages": turn(n), "max_tokens": TOKENS}, '"message_stop"'),
    ("/v1/responses", lambda n: {"input": f"Number {n}?", "max_output_tokens": TOKENS}, '"response.'),
)


def turn(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell me about the number {number}."}]


async def stream(session: aiohttp.ClientSession, url: str, number: int) -> int:
    """One whole stream. Returns how many events it had."""
    path, body, end = ROUTES[number % len(ROUTES)]
    asked = body(number) | {"stream": True, "temperature": 0.8, "seed": number}
    async with session.post(url + path, json=asked) as response:
        assert response.status == 200, await response.text()
        lines = [line.decode() async for line in response.content]
    datas = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    assert end in datas[-1], datas[-1]
    assert all(data == "[DONE]" or "error" not in json.loads(data).get("type", "") for data in datas)
    return len(datas)


async def crowd(server: Any) -> list[int]:
    """`STREAMS` clients at once; in `slow` each comes again for a minute. Returns the events of each stream."""
    loop, found = asyncio.get_running_loop(), []
    ends = loop.time() + (CROWD_S if SLOW else 0)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as session:

        async def client(number: int) -> None:
            found.append(await stream(session, server.url, number))
            while loop.time() < ends:
                found.append(await stream(session, server.url, number))

        await asyncio.gather(*(client(number) for number in range(STREAMS)))
    return found


async def status_of(server: Any) -> Any:
    return (await asyncio.to_thread(server.get, "/v1/homeserve/status"))[1]


async def test_a_crowd_of_streams(box: Any, smollm2: str) -> None:
    flags = ("--max-running", "64", "--max-waiting", str(STREAMS), "--context", "256", "--kv-tokens", "16384")
    server = await asyncio.to_thread(box.up, smollm2, *flags)
    lags = []
    for _ in range(CROWDS):
        before = await status_of(server)
        events = await crowd(server)
        after = await status_of(server)
        assert len(events) >= STREAMS and min(events) >= 2
        assert after["requests"]["finished"] - before["requests"]["finished"] == len(events)
        lags.append(after["engine"]["loop_lag_ms"]["p99"])
        print(f"{len(events)} streams of {STREAMS} clients; loop lag p99 {lags[-1]} ms")
        if lags[-1] is None or lags[-1] < LAG_MS:
            break
    assert None not in lags, "nobody measured the loop's lag"
    assert min(lags) < LAG_MS, lags
    assert after["requests"]["failed"] == 0 and after["ranks"][0]["restarts"] == 0
    _, census = await asyncio.to_thread(server.get, "/v1/homeserve/census")
    assert census["ok"] and census["idle"]


def test_the_lag_is_told_without_any_request(server: Any, wait_until: Callable[..., Any]) -> None:
    def lag() -> Any:
        return server.get("/v1/homeserve/status")[1]["engine"]["loop_lag_ms"]

    wait_until("a first sample", lambda: lag()["p50"] is not None)
    assert 0 <= lag()["p50"] <= lag()["p99"]
