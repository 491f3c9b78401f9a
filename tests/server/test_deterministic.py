"""`--deterministic` of whole servers: 1, 3, 8 and 17 requests at once on 1, 2 and 3 threads say the same tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

BATCHES = (1, 3, 8, 17)
THREADS = (1, 2, 3)
WORDS = "river mountain lantern harbour winter violin garden engine".split()


def body(model: str, i: int) -> dict[str, Any]:
    """Greedy and drawn requests, each with a prompt and a length of its own."""
    return {
        "model": model,
        "prompt": f"A story about a {WORDS[i % len(WORDS)]} and {i} friends: " * (1 + i % 3),
        "max_tokens": 12 + i,
        "temperature": 0.0 if i % 2 else 0.8,
        "seed": 40 + i,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def ask(session: aiohttp.ClientSession, url: str, request: dict[str, Any]) -> list[int]:
    async with session.post(f"{url}/v1/completions", json=request) as response:
        assert response.status == 200, await response.text()
        tokens: list[int] = (await response.json())["choices"][0]["token_ids"]
        return tokens


@pytest.fixture(scope="module")
def said() -> dict[int, list[int]]:
    """What each request was answered with first, on whatever server that was."""
    return {}


@pytest.mark.parametrize("threads", THREADS)
async def test_tokens_depend_on_the_request_alone(start_server: Any, said: dict[int, list[int]], threads: int) -> None:
    flags = ("--deterministic", "--threads", str(threads), "--max-running", "20", "--prefix-cache", "off")
    with start_server(*flags, "--context", "512", "--kv-tokens", "8192") as run:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=100)) as session:
            model = run.get("/v1/models")[1]["data"][0]["id"]
            for batch in BATCHES:
                chosen = range(max(BATCHES) - batch, max(BATCHES))
                found = await asyncio.gather(*(ask(session, run.url, body(model, i)) for i in chosen))
                for i, tokens in zip(chosen, found, strict=True):
                    assert len(tokens) == 12 + i
                    assert said.setdefault(i, tokens) == tokens, f"request {i} of {batch} on {threads} threads"
    assert len(said) == max(BATCHES)
