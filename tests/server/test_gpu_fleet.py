"""`homeserve up` on a box whose cards are fakes: what it chooses and says, and a fleet of both vendors that flips.

Everything is real but the cards: the probe asks an NVML and reads a tree of sysfs, workers open drivers by
LD_LIBRARY_PATH, kernels are compiled for the emulation and run there (tests/fake_cards.py, tests/fake_box.py). It is
slow, so prompts are short.
"""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_box import environment_of
from fake_cards import ECC, LAUNCH_FAILED, fake_cards

COUNTER = Path(__file__).parents[1] / "data" / "counter.gguf"
SMALL = ("--max-running", "2", "--kv-tokens", "1024", "--context", "512", "--chunk", "32")
ASKED = {"prompt": "1 2 3 4 5", "max_tokens": 8, "temperature": 0}
SAID = " 6 7 8 9"
READY_S = 240.0
"""The first start compiles what no test before it has."""


def post(run: Any, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(
        run.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def said(run: Any) -> str:
    status, body = post(run, "/v1/completions", ASKED)
    assert status == 200, body
    return str(body["choices"][0]["text"])


def launched(run: Any, rank: int) -> dict[str, int]:
    """Of the census: launches by symbol of one rank."""
    status, body = run.get("/v1/homeserve/census")
    assert status == 200 and body["ok"], body
    return next(dict(entry["launches"]) for entry in body["ranks"] if entry["rank"] == rank)


@pytest.mark.timeout(300)
def test_a_card_of_each_vendor_serve_together_and_flip(
    box: Any, tmp_path: Path, wait_until: Callable[..., Any]
) -> None:
    """The model that counts, hybrid with a drafting block: the same answer in either layout, and the other way back."""
    environ = environment_of(fake_cards(tmp_path, cuda=1, rocm=1, mib=4096))
    run = box.start("up", str(COUNTER), "--devices", "cuda:0,rocm:0", "--flip", "manual", *SMALL, **environ)
    run.wait_ready(READY_S)
    status = run.get("/v1/homeserve/status")[1]
    assert [rank["backend"] for rank in status["ranks"]] == ["cuda", "rocm"] and status["layout"] == "pipeline"
    assert [rank["isa"] for rank in status["ranks"]] == ["sm_86", "gfx1103"]
    assert said(run) == SAID
    budget = run.get("/v1/homeserve/budget")[1]
    measured = {(row["device"], row["line"]): row for row in budget["measured"]}
    arena = measured[0, "weights arena"]
    assert arena["measured_mib"] is not None and 0.9 < arena["measured_mib"] / arena["predicted_mib"] < 1.1, arena
    assert measured[2, "weights copy"]["how"] and measured[2, "worker processes"]["measured_mib"], measured
    for device, name in ((0, "workspace"), (1, "workspace"), (0, "flip buffer"), (2, "staging"), (2, "exchange")):
        row = measured[device, name]
        assert 0.9 * row["predicted_mib"] - 0.1 <= row["measured_mib"] <= row["predicted_mib"] + 0.01, row
    held = [row for row in measured.values() if row["device"] != 2 and row["measured_mib"] is not None]
    assert len(held) > 10 and all(row["measured_mib"] <= row["predicted_mib"] + 0.01 for row in held), held
    assert [each["device"] for each in budget["measured_cards"]] == [0, 1], budget["measured_cards"]
    before = launched(run, 1)
    for number, target in enumerate(("tensor", "pipeline"), start=1):
        answer, body = post(run, "/v1/homeserve/flip", {"to": target})
        assert answer == 202, body
        ended = wait_until(f"flip {number}", lambda number=number: _ended(run, number))
        assert ended["state"] == "committed", ended
        assert said(run) == SAID
    assert launched(run, 1)["merge_attention"] > before.get("merge_attention", 0), "the tensor layout has run there"
    run.send(signal.SIGTERM)
    assert run.wait() == 0, run.err
    assert run.left_behind() == []


@pytest.mark.timeout(300)
def test_a_card_whose_kernels_are_known_is_taken_by_itself(box: Any, tmp_path: Path, tiny: str) -> None:
    """And the integrated one beside it is left out, with a line that says so and how to have it."""
    environ = environment_of(fake_cards(tmp_path, cuda=1, rocm=1, mib=4096))
    run = box.start("up", tiny, *SMALL, **environ)
    run.wait_ready(READY_S)
    (rank,) = run.get("/v1/homeserve/status")[1]["ranks"]
    assert rank["backend"] == "cuda" and rank["device"].startswith("NVIDIA GeForce RTX 3090")
    (line,) = [line for line in run.out.splitlines() if line.startswith("cards ")]
    assert "rocm:0, AMD Radeon 780M Graphics" in line and "integrated, beside NVIDIA GeForce RTX 3090" in line
    assert post(run, "/v1/completions", {**ASKED, "max_tokens": 2})[0] == 200
    run.send(signal.SIGTERM)
    assert run.wait() == 0, run.err


def test_cards_whose_driver_is_too_old_leave_the_cpu_and_a_line(box: Any, tmp_path: Path, tiny: str) -> None:
    """Nobody asked for them, so it is no error; and nobody is left to wonder why it is slow."""
    environ = environment_of(fake_cards(tmp_path, cuda=1, rocm=-1, cuda_driver=11_040, mib=4096))
    run = box.up(tiny, *SMALL, **environ)
    (rank,) = run.get("/v1/homeserve/status")[1]["ranks"]
    assert rank["backend"] == "cpu"
    (line,) = [line for line in run.out.splitlines() if line.startswith("cards ")]
    assert "cuda:0, NVIDIA GeForce RTX 3090" in line and "11.4 is older than 12.0" in line and "update NVIDIA" in line
    run.send(signal.SIGTERM)
    assert run.wait() == 0, run.err


@pytest.mark.timeout(300)
def test_requests_outlive_a_lost_card(box: Any, tmp_path: Path, tiny: str, wait_until: Callable[..., Any]) -> None:
    """The card is lost under an answer. Its worker ends, another one takes over, and the answer is the same; the event
    names the card."""
    cards = fake_cards(tmp_path, cuda=1, rocm=-1, mib=4096)
    run = box.start("up", tiny, "--devices", "cuda:0", *SMALL, **environment_of(cards))
    run.wait_ready(READY_S)
    asked = {**ASKED, "max_tokens": 48}
    known = post(run, "/v1/completions", asked)[1]["choices"][0]["text"]
    described = (cards.folder / "cuda.cards").read_text()
    with ThreadPoolExecutor(1) as aside:
        answer = aside.submit(post, run, "/v1/completions", asked)
        wait_until("the answer has begun", lambda: run.get("/v1/homeserve/status")[1]["requests"]["running"] == 1)
        cards.fail("nvidia", "cuLaunchKernel", LAUNCH_FAILED, card=0, count=0)
        cards.fail("nvidia", "cuGraphLaunch", LAUNCH_FAILED, card=0, count=0)
        wait_until("the worker is lost", lambda: run.get("/v1/homeserve/status")[1]["state"] == "recovering")
        (cards.folder / "cuda.cards").write_text(described)
        status, body = answer.result()
    assert status == 200 and body["choices"][0]["text"] == known
    assert body["homeserve"]["restarts"] >= 1
    told = run.get("/v1/homeserve/status")[1]
    assert told["ranks"][0]["restarts"] >= 1
    assert any("lost its card (cuda:0, NVIDIA GeForce RTX 3090" in event["text"] for event in told["events"]), told
    run.send(signal.SIGTERM)
    assert run.wait() == 0, run.err
    assert run.left_behind() == []


@pytest.mark.timeout(300)
def test_a_card_that_stays_away_ends_the_server_with_its_name(box: Any, tmp_path: Path, tiny: str) -> None:
    cards = fake_cards(tmp_path, cuda=1, rocm=-1, mib=4096)
    run = box.start("up", tiny, "--devices", "cuda:0", *SMALL, **environment_of(cards))
    run.wait_ready(READY_S)
    cards.fail("nvidia", "cuLaunchKernel", LAUNCH_FAILED, card=0, count=0)
    cards.fail("nvidia", "cuGraphLaunch", LAUNCH_FAILED, card=0, count=0)
    assert post(run, "/v1/completions", ASKED)[0] == 500
    assert run.wait(120) == 3
    assert "the workers do not come up again: rank 0 lost its card (cuda:0, NVIDIA GeForce RTX 3090" in run.err
    assert "dmesg" in run.err and run.left_behind() == []


def test_a_card_that_was_taken_by_itself_and_fails_says_how_to_do_without(box: Any, tmp_path: Path, tiny: str) -> None:
    cards = fake_cards(tmp_path, cuda=1, rocm=-1, mib=4096)
    environ = environment_of(cards)
    cards.fail("nvidia", "cuMemAlloc_v2", ECC, card=0, count=0)
    run = box.start("up", tiny, *SMALL, **environ)
    assert run.wait() in (2, 3), run.err
    assert "NVIDIA GeForce RTX 3090" in run.err and "or serve without cards: --devices cpu" in run.err
    assert run.left_behind() == []


@pytest.mark.parametrize(
    ("words", "environ", "driver", "texts"),
    [
        (
            ("--devices", "cuda:0"),
            {"CUDA_VISIBLE_DEVICES": "-1"},
            13_000,
            ("cuda:0, NVIDIA GeForce RTX 3090", "CUDA_VISIBLE_DEVICES is set to -1", "unset CUDA_VISIBLE_DEVICES"),
        ),
        (("--devices", "cuda:1"), {}, 13_000, ("there is no cuda:1 here", "cuda:0, NVIDIA GeForce RTX 3090")),
        (
            ("--backend", "cuda"),
            {},
            11_040,
            ("rank 0: NVIDIA GeForce RTX 3090", "11.4 is older than 12.0", "update NVIDIA"),
        ),
    ],
)
def test_a_card_that_was_asked_for_and_cannot_be_had_is_one_error(
    box: Any,
    tmp_path: Path,
    tiny: str,
    words: tuple[str, ...],
    environ: dict[str, str],
    driver: int,
    texts: tuple[str, ...],
) -> None:
    cards = environment_of(fake_cards(tmp_path, cuda=1, rocm=-1, cuda_driver=driver, mib=4096))
    run = box.start("up", tiny, *words, **cards, **environ)
    assert run.wait() == 2, run.err
    (error,) = [line for line in run.err.splitlines() if line.startswith("homeserve: ")]
    for text in texts:
        assert text in run.err, error
    assert run.left_behind() == []


def _ended(run: Any, number: int) -> dict[str, Any] | None:
    flip = dict(run.get(f"/v1/homeserve/flip/{number}")[1])
    return flip if flip["state"] in ("committed", "abandoned") else None
