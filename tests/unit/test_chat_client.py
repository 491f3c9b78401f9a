"""The chat's client against a server that answers from a script, over a real socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from homeserve.chat.client import Client, Facts, Piece, Text, Thought, Waits
from homeserve.errors import SettingError


@asynccontextmanager
async def served(chat: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    async def health(request: web.Request) -> web.Response:
        return web.json_response(
            {"status": "loading", "stage": "weights", "done_bytes": 1, "total_bytes": 4}, status=503
        )

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "one", "homeserve": {"state": "loaded"}}, {"id": "two"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


def stream(*lines: bytes) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for line in lines:
            await response.write(line)
        return response

    return answer


def refusal(status: int, code: str, message: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": message, "code": code}}, status=status)

    return answer


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def delta(**fields: Any) -> bytes:
    return event(choices=[{"delta": fields, "finish_reason": None}])


DONE = b"data: [DONE]\n\n"


async def asked(url: str, key: str | None = None) -> list[Piece]:
    async def at_once(seconds: float) -> None:
        return None

    return [piece async for piece in Client(url, key, sleep=at_once).ask([], {})]


async def test_pieces_of_an_answer() -> None:
    usage = {"completion_tokens": 2, "prompt_tokens_details": None}
    last = event(choices=[], usage=usage, homeserve={"ttft_ms": 5.0, "decode_tok_s": None})
    ends = event(choices=[{"delta": {}, "finish_reason": "stop"}])
    async with served(
        stream(b": ping\n\n", delta(reasoning_content="hm"), delta(content="A"), ends, last, DONE)
    ) as url:
        assert await asked(url) == [
            Thought("hm"),
            Text("A"),
            Facts(completion_tokens=2, ttft_ms=5.0, finish="stop"),
        ]


async def test_a_server_that_loads_is_waited_for() -> None:
    answers = [refusal(503, "loading", "loading"), stream(delta(content="A"), DONE)]

    async def in_turn(request: web.Request) -> web.StreamResponse:
        return await answers.pop(0)(request)

    async with served(in_turn) as url:
        assert await asked(url) == [Waits("weights 25 %"), Text("A")]


@pytest.mark.parametrize(
    ("status", "code", "fix"),
    [
        (401, "unauthorized", "--api-key-file"),
        (404, "model_not_found", "/model"),
        (400, "context_overflow", "/undo"),
        (503, "draining", ""),
    ],
)
async def test_what_a_server_refuses_is_told_with_what_to_do(status: int, code: str, fix: str) -> None:
    async with served(refusal(status, code, "why \x1b[2J")) as url:
        with pytest.raises(SettingError) as caught:
            await asked(url)
    assert "why ^[[2J" in caught.value.message and fix in (caught.value.fix or "")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([delta(content="half")], "ended before the answer did"),
        ([event(error={"message": "a rank was lost"})], "a rank was lost"),
        ([b"data: no json\n\n"], "is not understood"),
        ([b"data: [1]\n\n", DONE], "is not understood"),
        ([b"data: " + b"x" * (3 << 20) + b"\n\n"], "is not understood"),
    ],
    ids=["cut", "error", "no-json", "list", "endless-line"],
)
async def test_an_answer_that_is_none_or_ends_too_soon(lines: list[bytes], words: str) -> None:
    async with served(stream(*lines)) as url:
        with pytest.raises(SettingError, match=words):
            await asked(url)


async def test_models_and_nobody_there() -> None:
    async with served(refusal(500, "x", "x")) as url:
        assert [(each.id, each.state) for each in await Client(url, None).models()] == [("one", "loaded"), ("two", "")]
    for gone in (Client(url, "key").models(), asked(url, "key")):
        with pytest.raises(SettingError, match="http://127"):
            await gone


async def test_the_key_is_sent() -> None:
    seen: list[str | None] = []

    async def look(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("Authorization"))
        return await stream(DONE)(request)

    async with served(look) as url:
        await asked(url, "k1")
        await asked(url)
    assert seen == ["Bearer k1", None]
