"""A server that is told to stop, as clients and load balancers see it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from http_world import World, serving


async def post(world: World, **fields: Any) -> tuple[int, str]:
    """Status, and what became of the connection."""
    body = {"prompt": "abc", "max_tokens": 3, **fields}
    async with world.client.post(world.url("/v1/completions"), json=body) as response:
        await response.read()
        return response.status, response.headers.get("Connection", "keep-alive")


async def test_what_is_not_ready_still_takes_requests_until_it_was_noticed() -> None:
    async with serving() as world:
        assert await post(world) == (200, "keep-alive")
        world.state = "draining"
        world.context.still_takes = lambda: True
        assert (await world.get("/ready"))[0] == (await world.get("/health"))[0] == 503
        assert await post(world) == (200, "close")
        world.context.still_takes = lambda: False
        status, body = await world.post("/v1/completions", {"prompt": "abc"})
        assert status == 503 and body["error"]["code"] == "draining"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_under_way_comes_to_its_end_and_closes_its_connection(stream: bool) -> None:
    async with serving() as world:
        world.fleet.held = True
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        body = b'{"prompt": "abc", "max_tokens": 3, "stream": %s}' % str(stream).lower().encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await world.wait_for(lambda: world.running == 1)
        if stream:
            assert b"200 OK" in await reader.readline()
        world.state = "draining"
        world.fleet.held = False
        world.fleet.release()
        async with asyncio.timeout(5):
            answer = await reader.read()  # to the end of the connection
        assert (b"data: [DONE]" if stream else b'"finish_reason":"length"') in answer
        writer.close()
