"""A server-sent event stream on one response: events, pings, and a bound on how long a client may read nothing.

Tokens are written as they come; what is there at the same moment goes out in one write. Nothing waits for a timer. When
the client stops reading, the transport's buffer fills, the write waits, and after `stall_s` the stream ends with
`ClientStalled`; meanwhile unread tokens gather in the engine's stream, which is bounded too.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from aiohttp import web

from homeserve.server.bodies import encode
from homeserve.server.shape import Event

PING_S = 15.0
"""Silence after which a comment line keeps proxies and clients from giving up."""
BUFFER_BYTES = 1 << 16
"""Bytes that may wait for a client to read them, in the process and (twice as many) in the kernel, which would else
take megabytes for a client that reads nothing before anybody noticed."""
_DONE = b"data: [DONE]\n\n"
_PING = b": ping\n\n"


class ClientStalled(Exception):
    """The client read nothing for too long."""


class ClientLeft(Exception):
    """The client closed the connection between two events."""


class EventStream:
    """Begins the response at `start`; every method that writes may raise ConnectionError or ClientStalled."""

    def __init__(self, request: web.Request, stall_s: float) -> None:
        self._request = request
        self._stall_s = stall_s
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
            }
        )

    async def start(self, request_id: str) -> None:
        """Send the header now: the client sees that it was taken before there is a token."""
        self.response.headers["x-request-id"] = request_id
        await self.response.prepare(self._request)
        transport = self._request.transport
        if transport is not None:
            transport.set_write_buffer_limits(high=BUFFER_BYTES)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)

    async def send(self, events: Sequence[Event]) -> None:
        """All events in one write."""
        await self._write(b"".join(_frame(event) for event in events))

    async def ping(self, event: Event | None = None) -> None:
        """Something that says no more than that the stream is alive: the event, or a comment line."""
        await self._write(_PING if event is None else _frame(event))

    async def done(self) -> None:
        await self._write(_DONE)

    async def _write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self.response.write(data)
        except TimeoutError:
            self.abandon()
            raise ClientStalled(f"the client read nothing for {self._stall_s:g} s") from None
        except ConnectionResetError as error:
            raise ClientLeft(str(error)) from None

    def abandon(self) -> None:
        """Drop the connection with whatever is unsent."""
        transport = self._request.transport
        if transport is not None:
            transport.abort()


def _frame(event: Event) -> bytes:
    name = b"event: " + event.name.encode() + b"\n" if event.name else b""
    return name + b"data: " + encode(event.data) + b"\n\n"
