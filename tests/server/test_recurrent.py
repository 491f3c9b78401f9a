"""A served model with recurrent layers: a prefix hit is as deep as the last checkpoint and changes nothing, a killed
worker neither."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

HYBRID = Path(__file__).parents[1] / "data" / "tiny" / "qwen3_5_text.f32.gguf"
PROMPT = [(7 * n) % 400 + 20 for n in range(300)]
OTHER = PROMPT[:200] + [(11 * n) % 400 + 20 for n in range(100)]


def complete(run: Any, prompt: list[int], **fields: Any) -> dict[str, Any]:
    """One answer of 12 greedy tokens with the five best log-probabilities at each place."""
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 5, "model": run.model} | fields
    request = urllib.request.Request(
        f"{run.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def said(answer: dict[str, Any]) -> tuple[str, Any]:
    choice = answer["choices"][0]
    return choice["text"], choice["logprobs"]["top_logprobs"]


@pytest.fixture
def served(box: Any) -> Any:
    def start(*flags: str) -> Any:
        run = box.start("up", str(HYBRID), "--threads", "1", *flags)
        run.model = run.wait_ready()["model"]
        return run

    return start


def test_a_hit_reaches_the_last_checkpoint_and_gives_the_same_logits(served: Any) -> None:
    cold = served("--prefix-cache", "off")
    expected = [complete(cold, prompt) for prompt in (PROMPT, OTHER)]
    assert [answer["homeserve"]["cached_tokens"] for answer in expected] == [0, 0]
    warm = served()
    first, second, again = (complete(warm, prompt) for prompt in (PROMPT, OTHER, PROMPT))
    # 300 tokens are kept at 128, 256 and the last page boundary, 288; the second prompt shares 200 of them.
    assert [a["homeserve"]["cached_tokens"] for a in (first, second, again)] == [0, 128, 288]
    assert said(first) == said(expected[0]) == said(again) and said(second) == said(expected[1])
    status, census = warm.get("/v1/homeserve/census")
    states = next(rank for rank in census["ranks"] if rank["pool"] == "state")
    assert status == 200 and census["ok"] and states["cached"] >= 3 and states["live"] == 0


def test_the_prompts_own_log_probabilities_do_not_depend_on_chunks(served: Any) -> None:
    """No row of a recurrent layer can be computed twice, and the first token of each chunk needs the one before."""
    run = served()
    answer = complete(run, PROMPT[:80], echo=True, max_tokens=1, logprobs=0)
    values = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert values[0] is None and len(values) == 81 and all(value <= 0 for value in values[1:])
    other = served("--chunk", "16")
    assert (
        complete(other, PROMPT[:80], echo=True, max_tokens=1, logprobs=0)["choices"][0]["logprobs"]
        == (answer["choices"][0]["logprobs"])
    )


def test_a_killed_worker_loses_no_state(served: Any) -> None:
    run = served()
    before = complete(run, PROMPT)
    os.kill(run.get("/v1/homeserve/status")[1]["ranks"][0]["pid"], signal.SIGKILL)
    assert said(complete(run, PROMPT)) == said(before)
