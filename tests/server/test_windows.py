"""Served models whose layers with a window keep the pages of their window only: answers do not change by it, whatever
else is cached, shared, preempted or computed again."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

TINY = Path(__file__).parents[1] / "data" / "tiny"
PAGE = 16
WINDOW = 8
"""Of both fixtures; one page, or two where it lies across a boundary."""
STEM = [(7 * n) % 400 + 20 for n in range(200)]
PROMPTS = [STEM[:200] + [(k * n) % 400 + 20 for n in range(100)] for k in (11, 13, 17, 19)]


def ask(run: Any, prompt: list[int], **fields: Any) -> urllib.request.Request:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "logprobs": 5, "model": run.model} | fields
    header = {"Content-Type": "application/json"}
    return urllib.request.Request(f"{run.url}/v1/completions", json.dumps(body).encode(), header)


def complete(run: Any, prompt: list[int]) -> dict[str, Any]:
    with urllib.request.urlopen(ask(run, prompt), timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def said(answer: dict[str, Any]) -> tuple[str, Any]:
    choice = answer["choices"][0]
    return choice["text"], choice["logprobs"]["top_logprobs"]


def in_use(run: Any) -> dict[int, int]:
    """Slots that running requests hold, by window (0: layers that see everything)."""
    status, census = run.get("/v1/homeserve/census")
    assert status == 200 and census["ok"]
    return {pool["window"]: (pool["live"] + pool["protected"]) * PAGE for pool in census["ranks"]}


@pytest.fixture(params=["gemma3_text", "gpt_oss"])
def served(box: Any, request: Any) -> Any:
    def start(*flags: str) -> Any:
        run = box.start("up", str(TINY / f"{request.param}.f32.gguf"), "--threads", "1", *flags)
        run.model = run.wait_ready()["model"]
        return run

    return start


def test_answers_are_those_of_one_large_chunk(served: Any) -> None:
    """Alone in one chunk without any cache; then in small ones, together, from the cache, and after a lost worker."""
    alone = served("--prefix-cache", "off", "--chunk", "512")
    expected = [said(complete(alone, prompt)) for prompt in PROMPTS]
    small = served("--chunk", "32", "--max-running", "3")
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert [said(answer) for answer in pool.map(lambda prompt: complete(small, prompt), PROMPTS)] == expected
    again = complete(small, PROMPTS[0])
    assert said(again) == expected[0]
    worker = small.get("/v1/homeserve/status")[1]["ranks"][0]["pid"]
    os.kill(worker, signal.SIGKILL)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert [said(answer) for answer in pool.map(lambda prompt: complete(small, prompt), PROMPTS)] == expected
    assert set(in_use(small).values()) == {0}


def test_a_next_turn_is_a_hit_behind_the_window_that_is_left(served: Any) -> None:
    run = served("--max-running", "1", "--chunk", "64")
    first = complete(run, PROMPTS[0])
    longer = PROMPTS[0] + [33] * 40
    second = complete(run, longer)
    assert (first["homeserve"]["cached_tokens"], second["homeserve"]["cached_tokens"]) == (0, 288)
    cold = served("--prefix-cache", "off", "--chunk", "512")
    assert said(second) == said(complete(cold, longer))


def test_a_long_answer_holds_its_window(served: Any) -> None:
    """At many times the window: layers that see everything hold every token, the others two pages at most."""
    run = served("--max-running", "2", "--chunk", "32")
    most: dict[int, int] = {}
    with urllib.request.urlopen(ask(run, PROMPTS[0], max_tokens=180, stream=True, logprobs=None), timeout=60) as answer:
        while answer.readline():
            for window, slots in in_use(run).items():
                most[window] = max(most.get(window, 0), slots)
    assert most[0] >= len(PROMPTS[0]) + 100
    assert 0 < most[WINDOW] <= 2 * PAGE
