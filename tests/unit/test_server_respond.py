"""Between the engine's events and the client: choices that end at different times, and what fails in a stream."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request
from http_world import serving

from homeserve.engine.request import FinishReason
from homeserve.server import sse
from homeserve.server.choice import Choice, ChoiceFailed, Piece
from homeserve.server.shape import Event


async def test_a_choice_that_ended_keeps_its_end_while_others_go_on() -> None:
    async with serving() as world:
        world.fleet.held = True
        asking = asyncio.create_task(world.chat(n=2, stop="ö", max_tokens=40))
        await world.wait_for(lambda: world.running == 2 and bool(world.fleet.said))
        (first,) = world.fleet.said
        world.fleet.said[first] = 5  # behind its first token it comes to the stop string at once
        while not asking.done():
            world.fleet.release(1)
            for _ in range(50):
                await asyncio.sleep(0)
        _, body = await asking
        assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "stop"]
        assert sorted(choice["message"]["content"] for choice in body["choices"]) == ["Hi", "Hi, w"]


async def test_a_bug_in_a_stream_is_an_event_and_no_second_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = Choice.push

    def push(choice: Choice, event: Any) -> Piece:
        if choice.completion_tokens:
            raise RuntimeError("secret detail")
        return original(choice, event)

    monkeypatch.setattr(Choice, "push", push)
    async with serving() as world:
        world.fleet.held = True
        body = {"prompt": "q", "stream": True}
        async with world.client.post(world.url("/v1/completions"), json=body) as response:
            await world.wait_for(lambda: bool(world.fleet.kept))
            world.fleet.release(1)
            await response.content.readuntil(b"\n\n")
            world.fleet.held = False
            with caplog.at_level(logging.CRITICAL):
                world.fleet.release()
                text = (await response.content.read()).decode()
        assert "HTTP/1.1" not in text and "secret" not in text
        assert json.loads(text.removeprefix("data: "))["error"]["code"] == "server_error"
        await world.wait_for(lambda: world.running == 0)


async def test_a_client_that_reads_nothing_hears_of_no_failure_and_nobody_else_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Telling it stalls like everything before; that is no error of ours."""

    def push(choice: Choice, event: Any) -> Piece:
        raise ChoiceFailed(FinishReason.ABORT, "why")

    async def send(stream: sse.EventStream, events: list[Event]) -> None:
        stream.abandon()
        raise sse.ClientStalled("the client read nothing")

    monkeypatch.setattr(Choice, "push", push)
    monkeypatch.setattr(sse.EventStream, "send", send)
    async with serving() as world:
        with pytest.raises(aiohttp.ClientError):
            await world.stream("/v1/completions", prompt="q")
        await world.wait_for(lambda: world.running == 0)
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_stream_whose_write_waits_is_looked_at_no_more_often_than_a_silent_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = sse.EventStream(make_mocked_request("POST", "/v1/completions"), 60.0, lambda: None)
    looks: list[float] = []

    class Loop:
        def time(self) -> float:
            return 20.0

        def call_later(self, delay: float, _: Any) -> None:
            looks.append(delay)

    monkeypatch.setattr(stream, "_loop", Loop())
    monkeypatch.setattr(stream, "_writing", True)
    stream._look()
    assert looks == [sse.PING_S]
