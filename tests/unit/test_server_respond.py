"""Between the engine's events and the client: choices that end at different times, and what fails in a stream."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request
from http_world import serving

from homeserve.engine.request import FinishReason
from homeserve.server import sse
from homeserve.server.choice import Choice, ChoiceFailed, Piece
from homeserve.server.shape import Event, frame
from homeserve.server.shapes import _Frame
from homeserve.text.answer import Part, PartKind


async def token_by_token(world: Any, *asking: Coroutine[Any, Any, list[Any]]) -> list[list[Any]]:
    """What requests get from a fleet that brings one plan at a time."""
    world.fleet.held = True
    tasks = [asyncio.create_task(each) for each in asking]
    while not all(task.done() for task in tasks):
        world.fleet.release(1)
        for _ in range(50):
            await asyncio.sleep(0)
    return [await task for task in tasks]


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


@pytest.mark.parametrize("where, more", [("push", {"logprobs": 1}), ("push_plain", {})])
async def test_a_bug_in_a_stream_is_an_event_and_no_second_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str, more: dict[str, Any]
) -> None:
    """On the long way, and on the short one behind the first token."""
    original = getattr(Choice, where)

    def broken(choice: Choice, what: Any) -> Any:
        if choice.completion_tokens:
            raise RuntimeError("secret detail")
        return original(choice, what)

    monkeypatch.setattr(Choice, where, broken)
    async with serving() as world:
        world.fleet.held = True
        body = {"prompt": "q", "stream": True, **more}
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


async def test_a_bug_of_one_stream_is_no_other_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Streams are written in one call of the engine, one behind the other."""
    original, broken = Choice.push_plain, []

    def push_plain(choice: Choice, tokens: Any) -> str:
        if not broken:
            broken.append(choice)
        if choice is broken[0]:
            raise RuntimeError("a bug")
        return original(choice, tokens)

    monkeypatch.setattr(Choice, "push_plain", push_plain)
    async with serving() as world:
        with caplog.at_level(logging.CRITICAL):
            both = await token_by_token(world, *(world.chat_stream(max_tokens=8) for _ in range(2)))
        errors = [sum("error" in event for event in events) for events in both]
        assert sorted(errors) == [0, 1]
        await world.wait_for(lambda: world.running == 0)


@pytest.mark.parametrize("route", ["chat", "completions"])
@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}])
async def test_a_frame_made_ahead_is_what_a_piece_makes(
    monkeypatch: pytest.MonkeyPatch, route: str, more: dict[str, Any]
) -> None:
    made = []
    original = _Frame.text_frames

    def text_frames(shape: Any) -> Any:
        quick = original(shape)
        assert quick is not None
        for text in ("a", 'quotes " and \\ and \n', "\x00", "ü 中 😀", "data: x"):
            (chunk,) = shape.piece(0, Piece(parts=(Part(PartKind.TEXT, text),)), None)
            assert quick(text) == frame(chunk)
            made.append(text)
        return quick

    monkeypatch.setattr(_Frame, "text_frames", text_frames)
    async with serving() as world:
        body = {"stream": True, "max_tokens": 6, **more}
        asked = {"messages": [{"role": "user", "content": "q"}]} if route == "chat" else {"prompt": "q"}
        path = "/v1/chat/completions" if route == "chat" else "/v1/completions"
        async with world.client.post(world.url(path), json=body | asked) as response:
            text = (await response.content.read()).decode()
    assert made and text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": 1},
        {"return_token_ids": True},
        {"stream_options": {"continuous_usage_stats": True, "include_usage": True}},
    ],
)
async def test_a_piece_that_tells_more_than_its_text_is_not_made_ahead(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    found = []
    original = _Frame.text_frames
    monkeypatch.setattr(_Frame, "text_frames", lambda shape: found.append(original(shape)))
    async with serving() as world:
        body = {"prompt": "q", "stream": True, "max_tokens": 4, **more}
        async with world.client.post(world.url("/v1/completions"), json=body) as response:
            await response.content.read()
    assert found and set(found) == {None}


async def test_a_client_that_has_left_when_its_text_is_written_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_nowait(out: sse.EventStream, data: bytes) -> bool:
        raise sse.ClientLeft("gone")

    monkeypatch.setattr(sse.EventStream, "write_nowait", write_nowait)
    async with serving() as world:
        world.fleet.held = True
        body = {"prompt": "q", "stream": True, "max_tokens": 40}
        async with world.client.post(world.url("/v1/completions"), json=body):
            await world.wait_for(lambda: world.running == 1)
            world.fleet.release(1)
            await world.wait_for(lambda: world.running == 0)


async def test_a_reader_who_does_not_keep_up_is_waited_for_and_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other write finds a full buffer."""
    tries = []
    original = sse.EventStream.write_nowait

    def write_nowait(out: sse.EventStream, data: bytes) -> bool:
        tries.append(data)
        return len(tries) % 2 == 0 and original(out, data)

    monkeypatch.setattr(sse.EventStream, "write_nowait", write_nowait)
    async with serving() as world:
        (slow,) = await token_by_token(world, world.chat_stream(max_tokens=12))
        assert len(tries) > 8
        monkeypatch.undo()
        (quick,) = await token_by_token(world, world.chat_stream(max_tokens=12))
    assert content_of(slow) == content_of(quick) != ""


def content_of(events: list[Any]) -> str:
    choices = [choice for event in events if isinstance(event, dict) for choice in event["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


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
