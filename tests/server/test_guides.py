"""Answers that have to fit a schema, from real servers: they fit, however hot they are drawn, whatever is drafted, and
whichever worker dies meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import jsonschema
import pytest
from box import Box, Run, wait_until
from random_schemas import body_of, check_answer, told_of

pytestmark = pytest.mark.timeout(900)

COUNTER = Path(__file__).parents[1] / "data" / "counter.gguf"
SIZES = ("--context", "1024", "--kv-tokens", "8192", "--max-running", "8", "--chunk", "64", "--threads", "1")
SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "0", 16)
SCHEMAS = 200 if SLOW else 60
AT_ONCE = 4
Answer = dict[str, Any]


def asked(run: Run, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
    """All of them, some at once."""
    with httpx.Client(base_url=run.url, timeout=300) as client, ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda body: client.post("/v1/completions", json=body), bodies))
    assert [answer.status_code for answer in answers] == [200] * len(answers), [answer.text for answer in answers]
    return [answer.json() for answer in answers]


def text_of(answer: Answer) -> str:
    return str(answer["choices"][0]["text"])


def stopped(run: Run) -> None:
    census = run.get("/v1/homeserve/census")[1]
    assert census["ok"], census
    run.send(signal.SIGTERM)
    assert run.wait() == 0, run.err


def seeds() -> range:
    print(f"HOMESERVE_TEST_SEED={SEED:x}")
    first = SEED % 100_000 * 1000
    return range(first, first + SCHEMAS)


def checked(answers: Sequence[Answer]) -> list[bool]:
    ended = []
    for seed, answer in zip(seeds(), answers, strict=True):
        (choice,) = answer["choices"]
        ended.append(check_answer(seed, choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]))
    print(told_of(ended))
    return ended


def test_hot_answers_fit_their_schemas_and_drafts_change_nothing(box: Box) -> None:
    bodies = [body_of(seed) for seed in seeds()]
    plain = box.up(str(COUNTER), *SIZES, "--draft", "off")
    known = asked(plain, bodies)
    stopped(plain)
    ended = checked(known)
    assert sum(ended) > len(ended) // 2
    drafting = box.up(str(COUNTER), *SIZES, "--draft", "3")
    found = asked(drafting, bodies)
    assert [text_of(answer) for answer in found] == [text_of(answer) for answer in known]
    again = asked(drafting, bodies[:8])  # compiled already, and with prompts from the cache
    assert [text_of(answer) for answer in again] == [text_of(answer) for answer in known[:8]]
    draft = drafting.get("/v1/homeserve/status")[1]["draft"]
    rounds = sum(answer["homeserve"]["draft"]["rounds"] for answer in found)
    accepted = sum(answer["homeserve"]["draft"]["accepted"] for answer in found)
    print(f"{rounds} rounds, {accepted} drafts accepted; since the start {draft}")
    assert rounds > len(bodies) and accepted > 20
    stopped(drafting)


NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "minItems": 60, "maxItems": 60}
FORM = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": NUMBERS, "strict": True}}
LONG = [body_of(seed, max_tokens=600, response_format=FORM) for seed in range(3)]


async def stream(url: str, body: dict[str, Any], chunks: list[int]) -> tuple[str, str, int]:
    """Text, finish and restarts of a streamed answer; `chunks` counts."""
    text, finish, restarts = "", "", 0
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/completions", json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                restarts = (chunk.get("homeserve") or {}).get("restarts", restarts)
                for choice in chunk["choices"]:
                    text += choice["text"]
                    finish = choice["finish_reason"] or finish
                    chunks[0] += bool(choice["text"])
    return text, finish, restarts


async def killed_between(run: Run, places: Sequence[int]) -> list[tuple[str, str, int]]:
    """Streams of LONG together; the worker dies when the first one has so many chunks."""
    counts = [[0] for _ in LONG]
    tasks = [asyncio.create_task(stream(run.url, body, count)) for body, count in zip(LONG, counts, strict=True)]
    for kills, place in enumerate(places):
        while counts[0][0] < place:
            await asyncio.sleep(0.002)
        assert not tasks[0].done(), "killed too late"
        os.kill(await asyncio.to_thread(worker_of, run, kills), signal.SIGKILL)
    return list(await asyncio.gather(*tasks))


def worker_of(run: Run, restarts: int) -> int:
    """The worker's process, once it has been started again so often."""

    def alive() -> int:
        status = run.get("/v1/homeserve/status")[1]
        rank = status["ranks"][0]
        return int(rank["pid"]) if rank["restarts"] == restarts and status["state"] == "ready" else 0

    return int(wait_until("the worker to be up", alive))


@pytest.mark.parametrize("draft", ["off", "3"])
def test_a_worker_that_dies_in_the_middle_of_an_answer_changes_nothing(box: Box, draft: str) -> None:
    run = box.up(str(COUNTER), *SIZES, "--draft", draft)
    known = asyncio.run(killed_between(run, ()))
    for text, finish, restarts in known:
        assert finish == "stop" and not restarts
        jsonschema.validate(json.loads(text), NUMBERS)
    found = asyncio.run(killed_between(run, (5, 40, 90)))
    assert [text for text, _, _ in found] == [text for text, _, _ in known]
    assert [restarts for _, _, restarts in found][0] == 3
    stopped(run)


def test_answers_that_are_preempted_and_begun_again_are_the_same(box: Box) -> None:
    """A pool in which they have no room together; and again, from what the cache has of them."""
    sizes = ("--context", "1024", "--kv-tokens", "1024", "--max-running", "8", "--chunk", "64", "--threads", "1")
    run = box.up(str(COUNTER), *sizes)
    bodies = [body | {"seed": seed} for seed, body in enumerate(LONG * 2)]
    known = [asked(run, [body])[0] for body in bodies]
    before = run.get("/v1/homeserve/status")[1]["engine"]["preemptions"]
    found = asked(run, bodies)
    assert [text_of(answer) for answer in found] == [text_of(answer) for answer in known]
    assert run.get("/v1/homeserve/status")[1]["engine"]["preemptions"] > before
    for answer in known:
        jsonschema.validate(json.loads(text_of(answer)), NUMBERS)
    stopped(run)


def test_a_default_model_fits_too(server: Run) -> None:
    """SmolLM2: another tokenizer, a vocabulary of 49152."""
    few = range(SEED % 1000 * 10, SEED % 1000 * 10 + (40 if SLOW else 6))
    bodies = [body_of(seed, prompt="An example of the record in JSON:\n") for seed in few]
    for seed, answer in zip(few, asked(server, bodies), strict=True):
        (choice,) = answer["choices"]
        check_answer(seed, choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"])
