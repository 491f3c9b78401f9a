"""Answers that have to fit a schema, under flips: a server of three ranks that changes its layout over and over says
what one says that never does. The last rank draws in both layouts, and keeps what its guides know."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from box import Box, Run
from load import SIZES, STAYS, Client, stopped
from random_schemas import body_of, check_answer, told_of

COUNTER = Path(__file__).parents[1] / "data" / "counter.gguf"
SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "0", 16)
FLIPS, SCHEMAS = (40, 200) if SLOW else (6, 24)
AT_ONCE = 6
LIMIT_S = 1800.0 if SLOW else 300.0
Answer = dict[str, Any]


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    made.close()


def seeds() -> range:
    first = SEED % 100_000 * 1000
    return range(first, first + SCHEMAS)


async def ask(client: Client, seed: int) -> Answer:
    async with client._session.post(f"{client.url}/v1/completions", json=body_of(seed)) as answer:
        told: Answer = await answer.json()
        assert answer.status == 200, told
    return told


async def flip(client: Client, to: str) -> None:
    """By request; until it is committed."""
    async with client._session.post(f"{client.url}/v1/homeserve/flip", json={"to": to}) as answer:
        told = await answer.json()
        assert answer.status == 202, told
    while (record := await client.get(told["url"]))["state"] != "committed":
        assert record["state"] != "abandoned", record
        await asyncio.sleep(0.005)


async def all_of(run: Run) -> dict[int, Answer]:
    """Every answer once."""
    found: dict[int, Answer] = {}
    left = iter(seeds())

    async def one() -> None:
        for seed in left:
            found[seed] = await ask(client, seed)

    async with Client(run) as client, asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(one())
    return found


async def under_flips(run: Run, known: dict[int, Answer]) -> tuple[int, int]:
    """Answers compared, and how often they crossed a flip. Every one once, and on until there were flips enough."""
    compared, crossed, over = 0, 0, False

    async def one(first: int) -> None:
        nonlocal compared, crossed
        turn = first
        while not over or compared < len(known):
            seed = seeds()[turn % SCHEMAS]
            turn += AT_ONCE
            answer = await ask(client, seed)
            assert answer["choices"][0]["text"] == known[seed]["choices"][0]["text"], seed
            compared += 1
            crossed += answer["homeserve"]["flips_crossed"]

    async with Client(run) as client, asyncio.timeout(LIMIT_S):
        async with asyncio.TaskGroup() as group:
            for first in range(AT_ONCE):
                group.create_task(one(first))
            for _ in range(FLIPS // 2):
                for to in ("tensor", "pipeline"):
                    await asyncio.sleep(0.05)
                    await flip(client, to)
            over = True
        census = await client.idle()
        status = await client.get("/v1/homeserve/status")
    assert census["ok"], census
    assert status["flip"]["committed"] == FLIPS and [rank["restarts"] for rank in status["ranks"]] == [0] * 3
    return compared, crossed


@pytest.mark.timeout(LIMIT_S + 120)
@pytest.mark.parametrize("draft", ["off", "3"])
def test_answers_under_flips_fit_and_are_those_of_a_server_that_never_flips(box: Box, draft: str) -> None:
    print(f"HOMESERVE_TEST_SEED={SEED:x}")
    sizes = (*SIZES, *STAYS, "--context", "1024", "--kv-tokens", "8192")
    still = box.up(str(COUNTER), *sizes, "--draft", "off")
    known = asyncio.run(all_of(still))
    stopped(still)
    ended = []
    for seed, answer in known.items():
        (choice,) = answer["choices"]
        ended.append(check_answer(seed, choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]))
    print(told_of(ended))
    assert sum(ended) > len(ended) // 2
    flipping = box.up(str(COUNTER), *sizes, "--draft", draft)
    compared, crossed = asyncio.run(under_flips(flipping, known))
    stopped(flipping)
    print(f"{compared} answers under {FLIPS} flips, which were crossed {crossed} times")
    assert crossed > FLIPS // 2
