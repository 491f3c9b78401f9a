"""The ingress before replicas that are lost: what is asked again, what is told, what is let go. Ray is a fake."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from homeserve.integrations import ingress as rooms
from homeserve.integrations.ingress import Ingress
from homeserve.integrations.replica import Ask, Head, ServerGone, ServerNotConnected

JSON = Head(200, (("content-type", "application/json"), ("x-homeserve-replica", "a")))
EVENTS = Head(200, (("content-type", "text/event-stream"), ("x-homeserve-replica", "a")))


class ActorDied(Exception):
    """In the place of ray.exceptions.RayActorError."""


class Response:
    """As much of Starlette's as is used: a body, or pieces of one."""

    def __init__(self, body: Any, status_code: int) -> None:
        self.body, self.status = body, status_code
        self.raw_headers: list[tuple[bytes, bytes]] = []


class Stream:
    """A call of a replica: gives what it was given, raising what is an exception."""

    def __init__(self, *given: Any) -> None:
        self._given = iter(given)
        self.cancelled = 0

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        each = next(self._given, None)
        if each is None:
            raise StopAsyncIteration
        if isinstance(each, BaseException):
            raise each
        return each

    def cancel(self) -> None:
        self.cancelled += 1


class Replicas:
    """The handle: each call takes the next stream."""

    def __init__(self, *streams: Stream) -> None:
        self._streams = list(streams)
        self.asked: list[Ask] = []

    def options(self, *, method_name: str, stream: bool) -> Replicas:
        assert method_name == "answer" and stream
        return self

    def remote(self, ask: Ask) -> Stream:
        self.asked.append(ask)
        return self._streams[len(self.asked) - 1]


class Asked:
    """A request as Starlette has it."""

    def __init__(self, method: str, path: str, body: bytes = b"", query: str = "", **headers: str) -> None:
        self.method, self._body, self.read = method, body, 0
        self.url = SimpleNamespace(path=path, query=query)
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    async def stream(self) -> AsyncIterator[bytes]:
        for at in range(0, len(self._body), 100):
            self.read = at + 100
            yield self._body[at : at + 100]


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    responses = ModuleType("starlette.responses")
    responses.Response = responses.StreamingResponse = Response  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "starlette", ModuleType("starlette"))
    monkeypatch.setitem(sys.modules, "starlette.responses", responses)
    monkeypatch.setattr(rooms, "import_module", lambda name: SimpleNamespace(RayActorError=ActorDied))
    monkeypatch.setattr(rooms, "RETRY_PAUSE_S", 0)


def chat(**more: Any) -> Asked:
    return Asked("POST", "/v1/chat/completions", b'{"messages":[{"role":"user","content":"Hi"}]}', **more)


async def call(replicas: Replicas, asked: Asked | None = None, limit: int = 1000) -> Any:
    return await Ingress(replicas, limit)(asked or chat())  # type: ignore[arg-type]


@pytest.mark.parametrize("lost", [ActorDied(), ServerGone()])
@pytest.mark.parametrize("before", [(), (JSON,), (JSON, b'{"half')])
async def test_a_whole_answer_is_asked_for_again(lost: Exception, before: tuple[Any, ...]) -> None:
    """Also when a part of it was there: nothing was sent."""
    first, second = Stream(*before, lost), Stream(JSON, b'{"a"', b":1}")
    replicas = Replicas(first, second)
    response = await call(replicas)
    assert (response.status, response.body) == (200, b'{"a":1}')
    assert len(replicas.asked) == 2 and replicas.asked[0] == replicas.asked[1]
    assert first.cancelled


async def test_a_stream_is_asked_for_again_until_its_first_event() -> None:
    replicas = Replicas(Stream(EVENTS, ActorDied()), Stream(EVENTS, b"data: 1\n\n", b"data: 2\n\n"))
    response = await call(replicas)
    assert [piece async for piece in response.body] == [b"data: 1\n\n", b"data: 2\n\n"]


async def test_a_stream_that_has_begun_ends_with_the_loss() -> None:
    stream = Stream(EVENTS, b"data: 1\n\n", ActorDied())
    replicas = Replicas(stream)
    response = await call(replicas)
    told = [piece async for piece in response.body]
    assert told[0] == b"data: 1\n\n" and b"replica_lost" in told[1] and len(told) == 2
    assert stream.cancelled and len(replicas.asked) == 1


async def test_a_client_that_leaves_lets_the_replica_go() -> None:
    stream = Stream(EVENTS, b"data: 1\n\n", b"data: 2\n\n")
    response = await call(Replicas(stream))
    assert await anext(response.body) == b"data: 1\n\n"
    await response.body.aclose()
    assert stream.cancelled == 1


async def test_a_client_that_leaves_before_the_first_event_does_too() -> None:
    stream = Stream(asyncio.CancelledError())
    with pytest.raises(asyncio.CancelledError):
        await call(Replicas(stream))
    assert stream.cancelled == 1


async def test_after_a_while_the_client_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "RETRY_S", -1.0)
    response = await call(Replicas(Stream(ServerNotConnected())))
    assert response.status == 503 and b"replica_lost" in response.body
    assert (b"retry-after", b"1") in response.raw_headers


async def test_an_error_of_the_server_is_its_answer() -> None:
    refused = Head(404, (("x-should-retry", "false"), ("x-request-id", "r")))
    response = await call(Replicas(Stream(refused, b'{"error":{}}')))
    assert (response.status, response.body) == (404, b'{"error":{}}')
    assert response.raw_headers == [(b"x-should-retry", b"false")], "Ray's proxy says the id"


async def test_a_failure_of_ours_is_not_tried_again() -> None:
    replicas = Replicas(Stream(RuntimeError("a bug")))
    with pytest.raises(RuntimeError):
        await call(replicas)
    assert len(replicas.asked) == 1


async def test_what_is_passed_on_is_the_request() -> None:
    replicas = Replicas(Stream(JSON, b"{}"))
    await call(
        replicas, chat(query="beta=true", authorization="Bearer k", host="ray", content_length="9", origin="http://x")
    )
    (ask,) = replicas.asked
    assert ask.method == "POST" and ask.target == "/v1/chat/completions?beta=true"
    assert set(ask.headers) == {("authorization", "Bearer k"), ("origin", "http://x")}
    assert ask.prompt == "\nuser: Hi", "what Ray's router reads"


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (Asked("GET", "/v1/homeserve/status"), 404),
        (Asked("POST", "/v1/models/a/load"), 404),
        (Asked("GET", "/metrics"), 404),
        (Asked("DELETE", "/v1/models"), 404),
        (chat(), 413),
    ],
)
async def test_what_no_replica_is_asked(asked: Asked, status: int) -> None:
    replicas = Replicas()
    response = await call(replicas, asked, limit=10)
    assert response.status == status and replicas.asked == []


async def test_a_model_by_its_name_is_passed_on() -> None:
    replicas = Replicas(Stream(JSON, b"{}"))
    await call(replicas, Asked("GET", "/v1/models/a/b:c"))
    assert replicas.asked[0].target == "/v1/models/a/b:c" and replicas.asked[0].prompt


@pytest.mark.parametrize("lost", [ActorDied(), ServerGone()])
async def test_what_kills_two_replicas_is_asked_of_no_third(lost: Exception) -> None:
    replicas = Replicas(Stream(lost), Stream(lost), Stream(JSON, b"{}"))
    response = await call(replicas)
    assert response.status == 503 and b"replica_lost" in response.body
    assert len(replicas.asked) == 2


async def test_a_server_that_was_not_reached_has_not_died_of_it() -> None:
    replicas = Replicas(*(Stream(ServerNotConnected()) for _ in range(5)), Stream(ServerGone()), Stream(JSON, b"{}"))
    assert (await call(replicas)).status == 200


@pytest.mark.parametrize(("told", "read"), [({"content_length": "5000"}, 0), ({}, 1100)])
async def test_a_body_is_read_no_further_than_its_limit(told: dict[str, str], read: int) -> None:
    asked = Asked("POST", "/v1/chat/completions", b"x" * 5000, **told)
    assert (await call(Replicas(), asked)).status == 413
    assert asked.read == read
