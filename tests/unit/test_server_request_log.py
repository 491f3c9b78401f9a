"""The request log: a line for each request, with what happened and without what was said."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_world import ANSWER, serving

from homeserve.engine.request import Timings
from homeserve.log import JsonLines, TextLines
from homeserve.server.request_log import TEXT_CHARS, text_of
from homeserve.server.request_record import RequestRecord

CANARY = "xyzzy-canary"
CHAT = {"messages": [{"role": "user", "content": CANARY}]}


class Lines(logging.StreamHandler[io.StringIO]):
    """What would be written, in both formats."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.setFormatter(JsonLines())
        self.text = io.StringIO()

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        self.text.write(TextLines().format(record) + "\n")

    @property
    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [line for line in self.all if line["from"] == "server.requests"]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, root = Lines(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


async def test_a_request_is_one_line_at_its_end(lines: Lines) -> None:
    async with serving() as world:
        await world.post("/v1/chat/completions", CHAT | {"max_tokens": 4}, headers={"x-request-id": "r-1"})
    (line,) = lines.requests
    times = [line.pop(name) for name in ("queue_ms", "ttft_ms", "total_ms")]
    assert times == sorted(times) and times[0] >= 0
    assert line | {"at": ""} == {
        "at": "",
        "level": "info",
        "from": "server.requests",
        "event": "request",
        "id": "r-1",
        "method": "POST",
        "route": "/v1/chat/completions",
        "status": 200,
        "model": "tiny",
        "stream": False,
        "prompt_tokens": len(f"user: {CANARY}\n"),
        "completion_tokens": 4,
        "cached_tokens": 0,
        "finish": "length",
        "client": "127.0.0.1",
    }


async def test_a_stream_and_its_end_are_told(lines: Lines) -> None:
    async with serving() as world:
        await world.stream("/v1/completions", prompt=CANARY)
    (line,) = lines.requests
    assert (line["stream"], line["status"], line["finish"]) == (True, 200, "stop")
    assert line["completion_tokens"] == len(ANSWER.encode())


async def test_who_left_is_told(lines: Lines) -> None:
    async with serving() as world:
        world.fleet.held = True
        asked = asyncio.create_task(world.chat())
        await world.wait_for(lambda: world.running == 1)
        asked.cancel()
        await world.wait_for(lambda: len(lines.requests) == 1)
        world.fleet.held = False
        world.fleet.release()
    (line,) = lines.requests
    assert (line["status"], line["code"]) == (499, "client_left") and "finish" not in line


async def test_whoever_asks_all_the_time_is_not_told_but_who_is_refused_is(lines: Lines, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("anna key-one\n")
    async with serving(api_key_file=str(tmp_path / "keys")) as world:
        anna = {"Authorization": "Bearer key-one"}
        for path in ("/health", "/ready", "/v1/models", "/v1/homeserve/status"):
            assert (await world.get(path, headers=anna))[0] == 200
        world.state = "draining"
        await world.get("/ready")
        assert lines.requests == []
        world.state = "ready"
        await world.get("/v1/models", headers={"Authorization": "Bearer key-two"})
        await world.get(f"/{'long' * 100}", headers=anna)
        await world.post("/v1/completions", {"prompt": 3}, headers=anna)
    told = [(line["status"], line["code"], line.get("key")) for line in lines.requests]
    assert told == [(401, "unauthorized", None), (404, "not_found", "anna"), (400, "invalid_field", "anna")]
    assert len(lines.requests[1]["route"]) < 200
    assert "key-one" not in lines.stream.getvalue() and "key-two" not in lines.stream.getvalue()


async def test_texts_are_logged_on_request_alone_and_are_bounded(lines: Lines) -> None:
    async with serving(log_requests="full", context=8192) as world:
        await world.post("/v1/chat/completions", CHAT)
        await world.stream("/v1/completions", prompt="y" * (TEXT_CHARS + 1), max_tokens=2)
    first, second = lines.requests
    assert (first["prompt"], first["answer"]) == (f"user: {CANARY}\n", ANSWER)
    assert second["prompt"].startswith("y" * 100) and len(second["prompt"]) <= TEXT_CHARS + 1
    assert second["answer"] == ANSWER[:2]


async def test_nothing_is_told_where_nothing_is_wanted(lines: Lines) -> None:
    async with serving(log_requests="off") as world:
        await world.chat()
        await world.post("/v1/completions", {"prompt": 3})
    assert lines.requests == []


HOSTILE: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": CANARY}),
    ("/v1/completions", {"prompt": CANARY, "temperature": CANARY}),
    ("/v1/completions", {"prompt": CANARY, "model": CANARY}),
    ("/v1/completions", {"prompt": CANARY * 100}),
    ("/v1/completions", b'{"prompt": "xyzzy-canary'),
    ("/v1/completions", b"\xff xyzzy-canary"),
    ("/v1/chat/completions", CHAT | {"stop": CANARY, "user": CANARY, "metadata": {"a": CANARY}}),
    ("/v1/chat/completions", {"messages": [{"role": CANARY, "content": "q"}]}),
    ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"a": CANARY}}),
    ("/v1/chat/completions", CHAT | {"tools": [{"type": "function", "function": {"name": CANARY}}]}),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "grammar", "grammar": CANARY}}),
    ("/v1/responses", {"input": CANARY, "tools": [{"type": "web_search"}]}),
    ("/v1/responses", {"input": CANARY, "previous_response_id": CANARY}),
    ("/v1/messages", CHAT | {"max_tokens": 3}),
    ("/v1/messages", CHAT | {"max_tokens": 3, "system": CANARY, "tools": [{"name": CANARY, "input_schema": {}}]}),
    ("/v1/embeddings", {"input": CANARY}),
    ("/tokenize", {"prompt": CANARY}),
]


@pytest.mark.parametrize(("path", "body"), HOSTILE)
@pytest.mark.parametrize("stream", [False, True])
async def test_no_line_tells_what_was_said(lines: Lines, path: str, body: Any, stream: bool) -> None:
    async with serving() as world:
        if stream and isinstance(body, dict):
            body = body | {"stream": True}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with world.client.post(world.url(path), data=data) as response:
            await response.read()
    assert lines.requests
    assert "xyzzy" not in lines.stream.getvalue() + lines.text.getvalue()


@pytest.mark.parametrize("form", [TextLines, JsonLines])
def test_a_failures_words_are_not_told_but_its_place_is(form: type[TextLines]) -> None:
    def fail() -> None:
        try:
            raise KeyError(CANARY)
        except KeyError as error:
            raise RuntimeError(f"about {CANARY}") from error

    def line(logger: str, **more: bool) -> str:
        try:
            fail()
        except RuntimeError:
            record = logging.LogRecord(logger, logging.ERROR, "f.py", 1, "request failed", (), sys.exc_info())
        return form(**more).format(record)

    private = line("homeserve.server")
    assert "xyzzy" not in private and "RuntimeError" in private and "KeyError" in private and "in fail" in private
    assert "xyzzy" in line("homeserve.server", texts=True)
    assert "xyzzy" in line("homeserve.fleet"), "what is no request's keeps its words"


async def test_a_bug_of_ours_does_not_tell_the_prompt(lines: Lines) -> None:
    async with serving() as world:

        def broken(text: str, **more: Any) -> list[int]:
            raise RuntimeError(f"cannot encode {text}")

        world.model.tokenizer.encode = broken  # type: ignore[method-assign]
        status, _ = await world.post("/v1/completions", {"prompt": CANARY})
    assert status == 500 and lines.requests[0]["code"] == "server_error"
    assert any("builtins.RuntimeError" in line.get("trace", "") for line in lines.all)
    assert "xyzzy" not in lines.stream.getvalue() + lines.text.getvalue()


def test_times_are_those_of_all_its_sequences() -> None:
    early, late = Timings(1.0, 1.5, 3.0, 9.0), Timings(1.2, 1.3, 2.5, None)
    record = RequestRecord(timings=[early, late])
    assert record.queue_s == pytest.approx(0.3) and record.ttft_s == pytest.approx(1.5)
    assert RequestRecord(timings=[Timings(1.0)]).facts().keys() >= {"id", "total_ms"}
    assert RequestRecord(timings=[Timings(1.0)]).ttft_s is None


def test_a_text_is_bounded_before_it_is_made() -> None:
    class Counting:
        asked = 0

        def decode(self, ids: list[int]) -> str:
            self.asked += len(ids)
            return "x" * len(ids)

    tokenizer: Any = Counting()
    assert len(text_of(tokenizer, [[1] * 10**6, [2] * 10])) <= TEXT_CHARS + 1
    assert tokenizer.asked <= 4096
