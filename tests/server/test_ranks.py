"""Several CPU ranks behind `homeserve up`: what status tells of them, how they overlap, and a fault of one of them."""

from __future__ import annotations

import json
import random
import sys
import threading
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "benchmarks"))

from timeline import longest_prompt, overlap_of, spans_of

Start = Callable[..., AbstractContextManager[Any]]
OVERLAP_LEAST = 0.7
"""docs/PERFORMANCE.md has what a quiet machine gives; with one plan in flight it is half."""
BOUND_S = 120.0


def complete(url: str, **body: Any) -> dict[str, Any]:
    data = json.dumps({"temperature": 0, **body}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=BOUND_S) as answer:
        return dict(json.load(answer))


def test_chunks_of_one_prompt_keep_both_ranks_of_a_pipeline_busy(start_server: Start) -> None:
    flags = ("--devices", "cpu:2", "--layout", "pipeline", "--threads", "1", "--context", "2048", "--chunk", "64")
    with start_server(*flags) as run:
        complete(run.url, prompt=[5 + 7 * n % 900 for n in range(1280)], max_tokens=2)
        _, census = run.get("/v1/homeserve/census")
        assert census["ok"]
        _, status = run.get("/v1/homeserve/status")
        assert (status["layout"], status["memory_domain"]) == ("pipeline", "discrete")
        (first, second) = status["pipeline"]["ranges"]
        assert first[0] == 0 and first[1] == second[0] and second[1] == 30
        assert [rank["layers"] for rank in status["ranks"]] == [first, second]
        assert status["vectors"] == {"weight": None, "token": None}
        for rank in status["ranks"]:
            assert rank["busy_ms"] > 0 and rank["idle_ms"] > 0 and rank["collectives"]["count"] >= 20
        row = longest_prompt(spans_of(status["plans"]))
        found = overlap_of(row)
        assert found is not None and (found.ranks, found.plans, found.prompt_rows) == (2, 20, 1280)
        assert found.overlap > OVERLAP_LEAST, [span for span in row if span.seq < row[0].seq + 6]


def test_status_of_the_tensor_layout_shows_its_vectors(start_server: Start) -> None:
    flags = ("--devices", "cpu:2", "--layout", "tensor", "--threads", "1", "--context", "512")
    with start_server(*flags, "--weight-vector", "2,1", "--token-vector", "1,3") as run:
        complete(run.url, prompt=[5] * 40, max_tokens=3)
        _, status = run.get("/v1/homeserve/status")
        assert status["layout"] == "tensor" and status["vectors"] == {"weight": [2, 1], "token": [1, 3]}
        assert status["pipeline"] == {"ranges": None}
        assert [rank["layers"] for rank in status["ranks"]] == [None, None]
        assert all(len(plan["ranks"]) == 2 for plan in status["plans"])
        _, census = run.get("/v1/homeserve/census")
        kept = [rank["capacity"] for rank in census["ranks"]]
        assert census["ok"] and kept[1] == pytest.approx(3 * kept[0], abs=3)


@pytest.mark.parametrize(("layout", "action"), [("pipeline", "stop"), ("tensor", "kill")])
def test_a_fault_of_one_of_three_ranks_costs_a_pause(start_server: Start, layout: str, action: str) -> None:
    """At a drawn rank and decode step, with two streams open; their texts are those of the server after the fault."""
    chance = random.Random(f"{layout} {action}")
    rank, nth = chance.randrange(3), chance.randrange(2, 12)
    flags = ("--devices", "cpu:3", "--layout", layout, "--threads", "1", "--context", "512", "--plan-timeout-s", "20")
    fault = f"rank={rank},step=decode,nth={nth},action={action}"
    prompts = ["The moon is", "A short story about bread. Once upon a time"]
    with start_server(*flags, HOMESERVE_TESTING="1", HOMESERVE_FAULT=fault) as run:
        texts: dict[str, str] = {}

        def ask(prompt: str) -> None:
            texts[prompt] = complete(run.url, prompt=prompt, max_tokens=24)["choices"][0]["text"]

        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _, status = run.get("/v1/homeserve/status")
        (lost,) = (event for event in status["events"] if event["kind"] == "worker_lost")
        assert lost["rank"] == rank and f"plan {lost['seq']} (decode)" in lost["text"], lost
        folder = Path(lost["folder"])
        assert {f"rank{each}.stack" for each in range(3)} <= {path.name for path in folder.iterdir()}
        assert [each["restarts"] for each in status["ranks"]] == [1, 1, 1]
        for prompt in prompts:
            assert complete(run.url, prompt=prompt, max_tokens=24)["choices"][0]["text"] == texts[prompt]
        _, census = run.get("/v1/homeserve/census")
        assert census["ok"] and census["idle"]
