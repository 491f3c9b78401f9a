"""The edge of the server: what surrounds every handler. Request id, API key, and one shape for every error.

An error of the tree becomes its status and the body that clients of the route expect: Anthropic's for its routes,
OpenAI's for all others. Anything else that escapes a handler is our bug: it becomes a 500 that tells the request id and
nothing more, and its traceback goes to the log under that id.

What is known of a request at its end (`visit`) is what its client is charged and what the request log says.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from homeserve.errors import BodyTooLarge, RequestError, RequestFailed, UnknownRoute, WrongMethod
from homeserve.server.bodies import json_response
from homeserve.server.door import Door
from homeserve.server.keys import KeyRing
from homeserve.server.messages_errors import is_messages, messages_error
from homeserve.server.parts import PARTS
from homeserve.server.rate_limits import is_limited
from homeserve.server.request_record import CLIENT_LEFT, LEFT_STATUS, RequestRecord, open_record
from homeserve.server.visit import VISIT, Visit

log = logging.getLogger("homeserve.server")

_request_id: ContextVar[str] = ContextVar("request_id")
"""Of the request whose handler runs: each has a task, and so a context, of its own."""
_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,128}")
_PATH_LOG_LEN = 128


def current_request_id() -> str:
    return _request_id.get()


def error_response(error: RequestError, path: str, request_id: str) -> web.Response:
    """`error` as clients of the route at `path` know errors."""
    headers = {}
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        headers["Retry-After"] = str(retry_after_s)
    if error.retry is not None:
        headers["x-should-retry"] = str(error.retry).lower()
    if isinstance(error, WrongMethod):
        headers["Allow"] = ", ".join(error.allowed)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = messages_error(error, request_id) if is_messages(path) else error.as_body()
    response = json_response(body, status=error.status, headers=headers)
    if isinstance(error, BodyTooLarge):
        response.force_close()
    return response


def edge(keys: KeyRing, door: Door | None) -> Middleware:
    """The middleware of one application. `door` guards a server without keys."""

    @web.middleware
    async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
        request_id = _id_for(request.headers.get("x-request-id"))
        _request_id.set(request_id)
        parts, began = request.app[PARTS], time.monotonic()
        visit = Visit(parts, RequestRecord(request_id, request.method, _route(request), request.remote or ""))
        request[VISIT] = visit
        open_record(visit.record)
        try:
            response = await _answer(request, handler, keys, door, visit)
            visit.record.status = response.status
        except asyncio.CancelledError:
            visit.record.code = visit.record.code or CLIENT_LEFT
            raise
        finally:
            visit.record.status = visit.record.status or LEFT_STATUS
            visit.close(time.monotonic() - began)
        if not response.prepared:
            response.headers["x-request-id"] = request_id
        elif parts.draining:
            response.force_close()  # a stream's connection, whose header was sent before
        parts.metrics.count_response(response.status)
        return response

    return around


async def _answer(
    request: web.Request, handler: Handler, keys: KeyRing, door: Door | None, visit: Visit
) -> web.StreamResponse:
    failure: RequestError
    request_id = visit.record.request_id
    try:
        if door is not None:
            door.check(request.method, request.headers)
        visit.admit(keys.check(request.path, request.headers), limited=is_limited(request.method, request.path))
        return await handler(request)
    except RequestError as error:
        failure = error
    except web.HTTPNotFound:
        failure = UnknownRoute(request.path)
    except web.HTTPMethodNotAllowed as error:
        failure = WrongMethod(request.method, tuple(sorted(error.allowed_methods)))
    except (web.HTTPException, ConnectionError):
        raise
    except Exception:
        log.exception("request %s: %s %s failed", request_id, request.method, visit.record.path)
        failure = RequestFailed(request_id)
    visit.record.code = failure.code
    if request.writer.output_size:
        # A second head would be taken for a part of the answer; that it is not whole is all that can be told.
        visit.record.status = failure.status
        request.app[PARTS].metrics.count_response(failure.status)
        raise ConnectionError("the answer had begun")
    return error_response(failure, request.path, request_id)


def _route(request: web.Request) -> str:
    """The route as the table has it, else the path as far as a log needs it."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else request.path[:_PATH_LOG_LEN]


def _id_for(given: str | None) -> str:
    """The client's own id where it is a plain word, else a new one."""
    if given is not None and _CLIENT_ID.fullmatch(given):
        return given
    return secrets.token_hex(12)


def name_the_server(response: web.StreamResponse) -> None:
    """Without any version, as every answer does."""
    response.headers["Server"] = "homeserve"
    response.headers["X-Content-Type-Options"] = "nosniff"


def headers_of_every_answer() -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Signal handler: names the server without its versions, and the request as Anthropic's clients look for it."""

    async def on_prepare(request: web.Request, response: web.StreamResponse) -> None:
        name_the_server(response)
        visit = request.get(VISIT)
        if visit is not None:
            response.headers.update(visit.standing().headers())
            if visit.parts.draining:
                response.headers["Connection"] = "close"
                response.force_close()
        if is_messages(request.path) and "x-request-id" in response.headers:
            response.headers["request-id"] = response.headers["x-request-id"]

    return on_prepare
