"""`/v1/embeddings` of real servers: the official client, many inputs beside a stream, a worker that is killed in the
middle, several ranks."""

from __future__ import annotations

import base64
import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest

WITHIN_S = 200
FLIP = "/v1/homeserve/flip"
NEAR = 1e-4
"""Between ranks in other layouts."""
CATS = ["A cat sits on the mat.", "The cat is sitting on a mat.", "Interest rates rose by half a percent in March."]


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=WITHIN_S) as made:
        yield made


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def post(run: Any, path: str, body: Any) -> tuple[int, Any]:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    asked = urllib.request.Request(run.url + path, data, headers)
    with urllib.request.urlopen(asked, timeout=WITHIN_S) as answer:
        return answer.status, json.load(answer)


def vectors(client: openai.OpenAI, given: Any, pooling: str = "mean", **more: Any) -> np.ndarray:
    """float32 `[inputs, dimensions]`"""
    asked = client.embeddings.create(model="", input=given, extra_body={"pooling": pooling}, **more)
    assert [each.index for each in asked.data] == list(range(len(asked.data)))
    return np.array([each.embedding for each in asked.data], np.float32)


def committed(run: Any, flip: str, wait_until: Callable[..., Any]) -> None:
    wait_until("the flip", lambda: run.get(flip)[1]["state"] == "committed")


def sentences(count: int) -> list[str]:
    subjects = ("the sea", "a small town", "bread", "the moon", "old maps")
    return [f"Sentence {at} is about {subjects[at % 5]}." * (1 + at % 4) for at in range(count)]


def test_the_official_client_reads_what_it_asks_for(client: openai.OpenAI, model: str, server: Any) -> None:
    """It asks for base64 of its own accord, and turns it into numbers."""
    body = client.embeddings.create(model=model, input=CATS, extra_body={"pooling": "mean"})
    own = np.array([each.embedding for each in body.data], np.float32)
    assert own.shape == (3, 576) and np.allclose(np.linalg.norm(own.astype(np.float64), axis=1), 1, atol=1e-6)
    assert own[0] @ own[1] > own[0] @ own[2] + 0.05, "what means the same lies nearer"
    assert body.usage.prompt_tokens == body.usage.total_tokens > 20 and body.model == model
    np.testing.assert_array_equal(vectors(client, CATS, encoding_format="float"), own)
    status, raw = post(server, "/v1/embeddings", {"input": CATS[0], "encoding_format": "base64", "pooling": "mean"})
    assert status == 200
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4"), own[0])


def test_ids_and_fewer_dimensions(client: openai.OpenAI, server: Any) -> None:
    status, tokens = post(server, "/tokenize", {"prompt": CATS[0]})
    assert status == 200
    of_text, of_ids = vectors(client, CATS[0], "last"), vectors(client, [tokens["tokens"]], "last")
    np.testing.assert_array_equal(of_text, of_ids)
    cut = vectors(client, CATS[0], "last", dimensions=64)[0]
    np.testing.assert_allclose(cut, of_text[0, :64] / np.linalg.norm(of_text[0, :64]), atol=1e-6)
    with pytest.raises(openai.BadRequestError) as caught:
        vectors(client, CATS[0], dimensions=577)
    assert caught.value.param == "dimensions"
    with pytest.raises(openai.BadRequestError) as caught:
        vectors(client, ["short", "long " * 2000])
    assert (caught.value.code, caught.value.param) == ("context_overflow", "input[1]")


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_a_batch_of_mixed_lengths_is_bit_for_bit_what_each_is_alone(client: openai.OpenAI, pooling: str) -> None:
    given = [*sentences(6), "word " * 400]
    together = vectors(client, given, pooling)
    for at in (0, 3, 6):
        np.testing.assert_array_equal(vectors(client, given[at], pooling)[0], together[at])


def test_two_hundred_inputs_beside_a_stream_change_no_word_of_it(client: openai.OpenAI, model: str) -> None:
    story: dict[str, Any] = {"model": model, "prompt": "A long story about the sea. Once upon a time", "temperature": 0}
    alone = client.completions.create(**story, max_tokens=60).choices[0].text
    given = sentences(200)
    seen: list[str] = []
    began = threading.Event()

    def read() -> None:
        for chunk in client.completions.create(**story, max_tokens=60, stream=True):
            seen.append(chunk.choices[0].text)
            began.set()

    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(read)
        assert began.wait(WITHIN_S)
        before = len(seen)
        found = vectors(client, given)
        during = len(seen)
        reading.result(WITHIN_S)
    assert "".join(seen) == alone and during > before, "the stream went on meanwhile"
    for at in (0, 77, 199):
        np.testing.assert_array_equal(vectors(client, given[at])[0], found[at])


def test_a_worker_killed_in_the_middle_costs_time_and_no_bit(
    start_server: Callable[..., Any], wait_until: Callable[..., Any]
) -> None:
    with start_server("--deterministic", "--chunk", "32", "--context", "1024", "--kv-tokens", "4096") as run:

        def engine() -> Any:
            return run.get("/v1/homeserve/status")[1]

        with openai.OpenAI(base_url=f"{run.url}/v1", api_key="x", max_retries=0, timeout=WITHIN_S) as client:
            given = [*sentences(40), "word " * 300]
            wanted = vectors(client, given)
            with ThreadPoolExecutor(1) as pool:
                acked = engine()["engine"]["plans_acked"]
                asked = pool.submit(vectors, client, given)
                wait_until("some plans", lambda: engine()["engine"]["plans_acked"] > acked + 4)
                os.kill(engine()["ranks"][0]["pid"], signal.SIGKILL)
                np.testing.assert_array_equal(asked.result(WITHIN_S), wanted)
            assert engine()["ranks"][0]["restarts"] == 1


@pytest.mark.parametrize("layout", ["pipeline", "tensor"])
def test_ranks_say_what_one_does_and_a_flip_changes_no_answer(
    box: Any, tiny: str, layout: str, wait_until: Callable[..., Any]
) -> None:
    given = sentences(9)
    found = []
    for flags in ((), ("--devices", "cpu:2", "--flip", "manual", "--layout", layout, "--weight-vector", "1,1")):
        run = box.up(tiny, *flags)
        with openai.OpenAI(base_url=f"{run.url}/v1", api_key="x", max_retries=0, timeout=WITHIN_S) as client:
            found.append(vectors(client, given))
            if flags:
                to = {"pipeline": "tensor", "tensor": "pipeline"}[layout]
                told = post(run, FLIP, {"to": to})[1]["url"]
                committed(run, told, wait_until)
                found.append(vectors(client, given))
        run.send(signal.SIGTERM)
        assert run.wait() == 0, run.err
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=NEAR)
