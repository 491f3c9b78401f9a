"""`homeserve up` with several ranks on the CPU: one text, what each rank holds, and what cannot be refused in time."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

PROMPT = "The quick brown fox"
RANKS = ("--devices", "cpu:2", "--threads", "1")


def greedy(run: Any) -> str:
    asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    request = urllib.request.Request(f"{run.url}/v1/completions", json.dumps(asked).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def stopped(run: Any) -> None:
    run.send(signal.SIGINT)
    assert run.wait() == 0, run.err
    assert run.left_behind() == []


@pytest.mark.parametrize(
    ("flags", "layout", "ranges", "weights", "tokens"),
    [
        (("--layout", "tensor", "--memory", "unified"), "tensor", None, [1, 1], [1, 1]),
        (("--layout", "pipeline", "--pipeline-ratio", "3,1"), "pipeline", [[0, 3], [3, 4]], None, None),
        (("--weight-vector", "3,1", "--token-vector", "1,2"), "tensor", None, [3, 1], [1, 2]),
    ],
    ids=("unified", "pipeline", "tensor"),
)
def test_two_ranks_say_what_one_says_and_what_they_hold(
    box: Any,
    tiny: str,
    wait_until: Callable[..., Any],
    flags: tuple[str, ...],
    layout: str,
    ranges: list[list[int]] | None,
    weights: list[int] | None,
    tokens: list[int] | None,
) -> None:
    one = box.up(tiny, "--kv-type", "f32", "--kv-tokens", "1024")
    text = greedy(one)
    stopped(one)
    run = box.up(tiny, "--kv-type", "f32", "--kv-tokens", "1024", *RANKS, *flags)
    assert greedy(run) == text
    status = run.get("/v1/homeserve/status")[1]
    domain = "unified" if "unified" in flags else "discrete"
    assert status["layout"] == layout and status["memory_domain"] == domain
    assert status["pipeline"]["ranges"] == ranges and status["vectors"] == {"weight": weights, "token": tokens}
    assert [rank["threads"] for rank in status["ranks"]] == [1, 1]
    budget = run.get("/v1/homeserve/budget")[1]
    assert budget["plan"]["layouts"].keys() == {layout} and budget["plan"]["ranks"] == [0, 0]
    rows = {row["line"]: row for row in budget["measured"]}
    apart = ("weights, rank 0", "weights, rank 1", "kv, rank 0", "kv, rank 1")
    for name in (*(("weights", "kv") if domain == "unified" else apart), "workspace, rank 1", "acts"):
        row = rows[name]
        assert row["measured_mib"] is not None, row
        assert -0.5 <= row["measured_mib"] - row["predicted_mib"] <= 2.5, f"whole huge pages: {row}"
    stopped(run)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--devices", "cpu:5", "--layout", "tensor"), "the tensor layout has 5 ranks and llama.f32 an attention of 4"),
        (("--devices", "cpu:5", "--layout", "pipeline"), "the pipeline layout has 5 ranks and llama.f32 4 layers"),
        ((*RANKS, "--pipeline-ratio", "3,2"), "--pipeline-ratio: 3+2 = 5, and the backbone has 4 layers"),
        ((*RANKS, "--floor-mib", "16000000"), "For rank 0 0 MiB are left: rank 0 needs "),
    ],
    ids=("heads", "layers", "ratio", "memory"),
)
def test_what_ranks_cannot_have_is_refused_before_a_worker_starts(
    box: Any, tiny: str, flags: tuple[str, ...], words: str
) -> None:
    run = box.run("up", tiny, "--port", "0", *flags)
    assert run.process.returncode == 2 and words in run.err
    assert "starting the worker" not in run.out and run.left_behind() == []


def test_more_threads_than_cores_are_said_and_serve(box: Any, tiny: str) -> None:
    run = box.up(tiny, "--kv-tokens", "512", "--devices", "cpu:2", "--threads", "64", "--layout", "tensor")
    assert "warning: 2 ranks of 64 threads share fewer cores than that" in run.err
    stopped(run)
