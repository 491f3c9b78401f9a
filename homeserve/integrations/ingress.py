"""What stands before the replicas of a Ray cluster: one request in, one response out, whichever replica gives it.

It keeps a promise: as long as nothing of an answer was sent to the client, the loss of a replica is not the client's
business, and the request is asked again elsewhere: once after a death behind it, since it may be what kills, and for a
while where no server was reached. So the head of a stream is held until its first event is there, and
an answer that is no stream until it is whole. A stream that is cut after its beginning ends with an error event in the
shape of its route. A client that leaves cancels the call, which closes the replica's connection to its server, which
aborts the request within a step.

Routes that tell of one box (status, budget, flips, metrics, the page) are not passed on: which box would it be?
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from homeserve.errors import BodyTooLarge, ReplicaLost, RequestError, UnknownRoute
from homeserve.integrations.prefix import prefix_text
from homeserve.integrations.replica import HOP, Ask, Head, ServerGone, ServerNotConnected

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger("homeserve.ray")

PASSED_ON = frozenset(
    {
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/responses/input_tokens"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/health"),
        ("GET", "/ready"),
        ("GET", "/version"),
        ("GET", "/openapi.json"),
    }
)
"""Method and path of what every replica answers alike."""
REQUEST_ID = "x-request-id"
RETRY_S = 60.0
"""How long a request that reaches no server is asked again, before the client is told."""
DEATHS_MOST = 2
"""Replicas that may die behind one request: it may be what kills them."""
RETRY_PAUSE_S = 0.1


class Ingress:
    """What Ray's proxy calls: one request in, one response out. `replicas` is the handle of the deployment."""

    def __init__(self, replicas: Any, body_limit_bytes: int) -> None:
        exceptions = import_module("ray.exceptions")
        self._replicas = replicas.options(method_name="answer", stream=True)
        self._body_limit_bytes = body_limit_bytes
        self._lost: tuple[type[BaseException], ...] = (exceptions.RayActorError, ServerGone)

    async def __call__(self, request: Request) -> Response:
        path = request.url.path
        try:
            return await self._answer(await self._read(request))
        except RequestError as error:
            return _refusal(error, path)

    async def _read(self, request: Request) -> Ask:
        """Raises RequestError for what no replica is asked."""
        path, method = request.url.path, request.method
        known = "GET" if method == "HEAD" else method
        if (known, path) not in PASSED_ON and not (known == "GET" and path.startswith("/v1/models/")):
            raise UnknownRoute(path)
        body = await self._body(request)
        headers = tuple((name, value) for name, value in request.headers.items() if name not in HOP)
        target = path + (f"?{request.url.query}" if request.url.query else "")
        return Ask(prefix_text(path, body), method, target, headers, body)

    async def _body(self, request: Request) -> bytes:
        """Holds no more than the limit and one piece. Raises BodyTooLarge, before it reads where the length is told."""
        limit, told = self._body_limit_bytes, request.headers.get("content-length", "")
        if told.isdecimal() and int(told) > limit:
            raise BodyTooLarge(f"a body of {told} bytes; the limit is {limit}")
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                raise BodyTooLarge(f"a body of more than {limit} bytes, which is the limit")
        return bytes(body)

    async def _answer(self, ask: Ask) -> Response:
        """Asks again while nothing was sent. Raises ReplicaLost after DEATHS_MOST deaths or RETRY_S."""
        until, deaths = time.monotonic() + RETRY_S, 0
        while True:
            try:
                return await self._ask(ask)
            except self._lost as error:
                deaths += not isinstance(error, ServerNotConnected)
                log.warning("a replica was lost before it answered: %s", error)
                if deaths >= DEATHS_MOST or time.monotonic() > until:
                    raise ReplicaLost() from None
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _ask(self, ask: Ask) -> Response:
        from starlette.responses import StreamingResponse

        stream = self._replicas.remote(ask)
        try:
            head: Head = await anext(stream)
            if not head.is_stream:
                return _response(head, b"".join([piece async for piece in stream]))
            first = await anext(stream, b"")
        except BaseException:
            stream.cancel()  # nobody waits for the rest
            raise
        response = StreamingResponse(self._rest(ask.target, first, stream), status_code=head.status)
        _put_headers(response, head)
        return response

    async def _rest(self, target: str, first: bytes, stream: Any) -> AsyncIterator[bytes]:
        """What is left of a stream. It can no longer be asked for again: a loss becomes its last event."""
        try:
            yield first
            async for piece in stream:
                yield piece
        except self._lost as error:
            log.warning("a replica was lost in the middle of a stream: %s", error)
            yield lost_event(target)
        finally:
            stream.cancel()


def lost_event(target: str) -> bytes:
    """The last event of a stream that was cut, in the shape of its route."""
    from homeserve.server.messages_errors import is_messages, messages_error

    error, path = ReplicaLost(), target.partition("?")[0]
    if is_messages(path):
        return b"event: error\ndata: " + msgspec.json.encode(messages_error(error, "")) + b"\n\n"
    if path.startswith("/v1/responses"):
        told = {"type": "error", "code": "server_error", "message": error.message, "param": None, "sequence_number": 0}
        return b"event: error\ndata: " + msgspec.json.encode(told) + b"\n\n"
    return b"data: " + msgspec.json.encode(error.as_body()) + b"\n\n"


def _refusal(error: RequestError, path: str) -> Response:
    from homeserve.server.messages_errors import is_messages, messages_error

    body = messages_error(error, "") if is_messages(path) else error.as_body()
    headers = (("content-type", "application/json"),) + ((("retry-after", "1"),) if error.status == 503 else ())
    return _response(Head(error.status, headers), msgspec.json.encode(body))


def _response(head: Head, body: bytes) -> Response:
    from starlette.responses import Response

    response = Response(body, status_code=head.status)
    _put_headers(response, head)
    return response


def _put_headers(response: Response, head: Head) -> None:
    """As the server said them, repeated ones too. The id is told by Ray's proxy, which gave it to the request."""
    told = ((name.encode("latin-1"), value.encode("latin-1")) for name, value in head.headers if name != REQUEST_ID)
    response.raw_headers.extend(told)
