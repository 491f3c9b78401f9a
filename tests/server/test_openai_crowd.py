"""Many streams at once: each says what it says alone."""

from __future__ import annotations

import asyncio
from typing import Any

import openai

STREAMS = 16
WORDS = "river mountain lantern harbour winter violin garden engine letter copper meadow signal".split()


def asked(i: int) -> dict[str, Any]:
    """A prompt and an answer of a length of their own, drawn with a seed of its own."""
    subject = " and ".join(WORDS[(i + k) % len(WORDS)] for k in range(1 + i % 5))
    return {
        "messages": [{"role": "user", "content": f"Write about {subject}. " * (1 + i % 4)}],
        "temperature": 0.0 if i % 4 == 0 else 0.9,
        "seed": 1000 + i,
        "max_tokens": 32 + 2 * i,
        "extra_body": {"ignore_eos": True},
    }


async def say(client: openai.AsyncOpenAI, model: str, i: int) -> str:
    stream = await client.chat.completions.create(model=model, stream=True, **asked(i))
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def most_running(server: Any, until: asyncio.Future[Any]) -> int:
    """The largest `requests.running` that status told while `until` was pending."""
    most = 0
    while not until.done():
        _, status = await asyncio.to_thread(server.get, "/v1/homeserve/status")
        most = max(most, status["requests"]["running"])
    return most


async def test_sixteen_streams_each_equal_their_solo_run(server: Any) -> None:
    url = f"{server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=110) as client:
        model = (await client.models.list()).data[0].id
        solo = [await say(client, model, i) for i in range(STREAMS)]
        assert len(set(solo)) == STREAMS
        crowd = asyncio.gather(*(say(client, model, i) for i in range(STREAMS)))
        running = await most_running(server, crowd)
        together = await crowd
    assert running >= STREAMS
    assert together == solo
    _, status = await asyncio.to_thread(server.get, "/v1/homeserve/status")
    assert status["ranks"][0]["restarts"] == 0


async def test_streams_that_are_cut_off_disturb_no_other(server: Any) -> None:
    """Half of a crowd leaves after a few tokens; the other half says what it says alone; no page is lost."""
    url = f"{server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=110) as client:
        model = (await client.models.list()).data[0].id
        solo = [await say(client, model, i) for i in range(0, STREAMS, 4)]

        async def leave(i: int) -> None:
            stream = await client.chat.completions.create(model=model, stream=True, **asked(i))
            async for _ in stream:
                if i > 8:
                    break
                i += 2
            await stream.close()

        staying = [say(client, model, i) for i in range(0, STREAMS, 4)]
        leaving = [leave(i) for i in range(STREAMS) if i % 4]
        texts, _ = await asyncio.gather(asyncio.gather(*staying), asyncio.gather(*leaving))
    assert texts == solo
    while not (await asyncio.to_thread(server.get, "/v1/homeserve/census"))[1]["idle"]:
        pass
    _, census = await asyncio.to_thread(server.get, "/v1/homeserve/census")
    assert census["ok"]
    assert all(pool["free"] + pool["cached"] == pool["capacity"] for pool in census["ranks"])
