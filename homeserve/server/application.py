"""The HTTP server: its application, made of the table of routes (`routes.py`), and the life of its listening."""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from homeserve.server.context import ServerContext
from homeserve.server.door import Door
from homeserve.server.edge import edge, headers_of_every_answer, name_the_server
from homeserve.server.gate import SPARE, Gate, connections_limit, raise_file_limit
from homeserve.server.keys import KeyRing
from homeserve.server.openapi import DOCUMENT, Document
from homeserve.server.page import PAGE, Page
from homeserve.server.parts import PARTS, Parts
from homeserve.server.routes import ROUTES
from homeserve.settings import requests_most

KEEPALIVE_S = 75.0
"""How long a connection may idle, or take to send its first header."""
LINGER_S = 5.0
"""How long the unread rest of a refused body is read and thrown away, so that the client sees the answer."""
HEADERS_LIMIT = 128
BACKLOG = 512
SHUTDOWN_S = 5.0
"""How long handlers may take to end once the server stops; the engine has drained by then."""


def build_application(context: ServerContext) -> web.Application:
    """Every route. Raises SettingError for an API key file that cannot be used."""
    settings = context.settings
    keys = KeyRing(settings.api_key_file)
    application = web.Application(
        middlewares=[edge(keys, None if keys else Door(settings.host))], client_max_size=settings.body_limit_bytes
    )
    application[PARTS] = Parts(context)
    application.on_response_prepare.append(headers_of_every_answer())
    application[PAGE] = Page()
    application[DOCUMENT] = Document(ROUTES)
    for route in ROUTES:
        if route.method == "GET":
            application.router.add_get(route.path, route.handler)  # and HEAD
        else:
            application.router.add_route(route.method, route.path, route.handler)
    return application


class Connection(web.RequestHandler):
    """One client's connection. What is no HTTP reaches no route, so none of the application's signals: its error is
    answered here, and does not name the library either."""

    __slots__ = ()

    def handle_error(self, *args: Any, **more: Any) -> web.StreamResponse:
        response = super().handle_error(*args, **more)
        name_the_server(response)
        return response


class HttpServer:
    """Serves `context` on a listening socket. `start`, then `stop`; the socket stays its owner's to close."""

    def __init__(self, context: ServerContext) -> None:
        header_bytes = context.settings.header_limit_bytes
        self._connections_limit = requests_most(context.settings) + SPARE
        self._listening: asyncio.Server | None = None
        self._wire: dict[str, Any] = {
            "access_log": None,
            "logger": _wire_log(),
            "keepalive_timeout": KEEPALIVE_S,
            "lingering_time": LINGER_S,
            "max_line_size": header_bytes,
            "max_field_size": header_bytes,
            "max_headers": HEADERS_LIMIT,
        }
        self._runner = web.AppRunner(build_application(context), handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)

    async def start(self, listener: socket.socket) -> int:
        """Answer requests on `listener` (bound, listening). Returns its port."""
        await self._runner.setup()
        server = self._runner.server
        assert server is not None, "setup makes it"
        limit = connections_limit(self._connections_limit, raise_file_limit())
        loop = asyncio.get_running_loop()
        gate = Gate(limit, lambda: server.connections, partial(Connection, server, loop=loop, **self._wire))
        self._listening = await loop.create_server(gate, sock=listener, backlog=BACKLOG)
        port: int = listener.getsockname()[1]
        return port

    async def stop(self) -> None:
        """Take no new connections, let handlers end, cancel those that do not. Right after any state of `start`."""
        if self._listening is not None:
            self._listening.close()
        await self._runner.cleanup()


def _wire_log() -> logging.Logger:
    """Where the HTTP library tells of broken requests: one line each, no traceback, for the fault is the client's."""
    log = logging.Logger("homeserve.server.http", logging.DEBUG)
    log.parent = logging.getLogger("homeserve.server")
    log.addFilter(_brief)
    return log


def _brief(record: logging.LogRecord) -> bool:
    if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError):
        record.msg = f"{record.getMessage()}: {type(record.exc_info[1]).__name__}"
        record.args = ()
        record.exc_info = None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
    return record.levelno >= logging.WARNING
