"""`homeserve up` on a fake card of each vendor: answers that run while the fleet flips there and back, with drafts.

The model counts, so what the answers must be is known. They are long enough that each is still running when the last of
four flips is over, and one of them begins in the middle.
"""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_box import environment_of
from fake_cards import fake_cards

COUNTER = Path(__file__).parents[1] / "data" / "counter.gguf"
SIZES = ("--max-running", "3", "--kv-tokens", "4096", "--context", "1024", "--chunk", "32")
READY_S = 240.0
"""The first start compiles what no test before it has."""
STARTS = (100, 2000, 7300)
FLIPS = ("tensor", "pipeline", "tensor", "pipeline")
TOKENS = 120


def post(run: Any, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(run.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=240) as answer:
        return json.load(answer)


def count_from(run: Any, start: int) -> Any:
    return post(run, "/v1/completions", {"prompt": f"count {start}:", "max_tokens": TOKENS, "temperature": 0})


def status(run: Any) -> Any:
    return run.get("/v1/homeserve/status")[1]


def flipped(run: Any, number: int, target: str, wait_until: Callable[..., Any]) -> None:
    post(run, "/v1/homeserve/flip", {"to": target})
    record = wait_until(f"flip {number}", lambda: _ended(run, number))
    assert record["state"] == "committed", record


def _ended(run: Any, number: int) -> dict[str, Any] | None:
    flip = dict(run.get(f"/v1/homeserve/flip/{number}")[1])
    return flip if flip["state"] in ("committed", "abandoned") else None


@pytest.mark.timeout(420)
def test_answers_that_run_over_flips_of_both_vendors_are_right(
    box: Any, tmp_path: Path, wait_until: Callable[..., Any]
) -> None:
    environ = environment_of(fake_cards(tmp_path, cuda=1, rocm=1, mib=4096))
    chosen = ("--devices", "cuda:0,rocm:0", "--flip", "manual", "--draft", "3")
    run = box.start("up", str(COUNTER), *chosen, *SIZES, **environ)
    run.wait_ready(READY_S)
    with ThreadPoolExecutor(len(STARTS)) as aside:
        answers = [aside.submit(count_from, run, start) for start in STARTS[:2]]
        wait_until("both run", lambda: status(run)["requests"]["running"] == 2)
        for number, target in enumerate(FLIPS, start=1):
            if number == 2:
                answers.append(aside.submit(count_from, run, STARTS[2]))
                wait_until("the third runs", lambda: status(run)["requests"]["running"] == 3)
            flipped(run, number, target, wait_until)
        assert not any(each.done() for each in answers), "an answer was over before the last flip"
        bodies = [each.result() for each in answers]
    for start, body in zip(STARTS, bodies, strict=True):
        text = body["choices"][0]["text"]
        assert text and "".join(f" {start + at}" for at in range(1, TOKENS)).startswith(text)
        assert len(text) > TOKENS - 10, "a token is a byte"
        print(start, body["homeserve"])
    crossed = [body["homeserve"]["flips_crossed"] for body in bodies]
    assert crossed == [4, 4, 3]
    told = status(run)
    assert [rank["backend"] for rank in told["ranks"]] == ["cuda", "rocm"]
    assert [rank["restarts"] for rank in told["ranks"]] == [0, 0] and told["draft"]["accept_len"] > 1, told["draft"]
    run.send(signal.SIGTERM)
    assert run.wait() == 0, run.err
    assert run.left_behind() == []
