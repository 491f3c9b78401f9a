"""A server-sent event stream on one response: events, pings, and a bound on how long a client may read nothing.

Tokens are written as they come; what is there at the same moment goes out in one write. Nothing waits for a timer, and
no token costs one: a write into an empty buffer cannot wait, and the ping's timer is set again only when it is due.
When the client stops reading, the transport's buffer fills, the write waits, and after `stall_s` the stream ends with
`ClientStalled`; meanwhile unread tokens gather in the engine's stream, which is bounded too.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from aiohttp import web

from homeserve.server.shape import Event, frame

PING_S = 15.0
"""Silence after which a comment line keeps proxies and clients from giving up."""
BUFFER_BYTES = 1 << 16
"""Bytes that may wait for a client to read them, in the process and (twice as many) in the kernel, which would else
take megabytes for a client that reads nothing before anybody noticed."""
_FRAMING_BYTES = 1 << 10
"""More than the protocol adds to a write."""
_DONE = b"data: [DONE]\n\n"
_PING = b": ping\n\n"


class ClientStalled(Exception):
    """The client read nothing for too long."""


class ClientLeft(Exception):
    """The client closed the connection between two events."""


class EventStream:
    """Begins the response at `start`, which is followed by `close` in any case; every method that writes may raise
    ClientLeft or ClientStalled. `make_ping`: what keeps a silent stream open (None: a comment line)."""

    def __init__(self, request: web.Request, stall_s: float, make_ping: Callable[[], Event | None]) -> None:
        self._request = request
        self._stall_s = stall_s
        self._make_ping = make_ping
        self._loop = asyncio.get_running_loop()
        self._written = 0.0
        self._writing = False
        self._timer: asyncio.TimerHandle | None = None
        self._ping: asyncio.Task[None] | None = None
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
            }
        )

    async def start(self, request_id: str) -> None:
        """Send the header now: the client sees that it was taken before there is a token. Raises ClientLeft."""
        self.response.headers["x-request-id"] = request_id
        try:
            await self.response.prepare(self._request)
        except ConnectionResetError as error:
            raise ClientLeft(str(error)) from None
        transport = self._request.transport
        if transport is not None:
            transport.set_write_buffer_limits(high=BUFFER_BYTES)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)

        self._written = self._loop.time()
        self._timer = self._loop.call_later(PING_S, self._look)

    def close(self) -> None:
        """No more pings."""
        if self._timer is not None:
            self._timer.cancel()
        if self._ping is not None:
            self._ping.cancel()

    async def send(self, events: Sequence[Event]) -> None:
        """All events in one write."""
        await self.write(b"".join([frame(event) for event in events]))

    def write_nowait(self, data: bytes) -> bool:
        """Write if that need not wait, and say whether: the client has read, or the kernel taken, all of before."""
        transport = self._request.transport
        if self._writing or transport is None or transport.get_write_buffer_size():
            return False
        if len(data) >= BUFFER_BYTES - _FRAMING_BYTES:
            return False
        self._written = self._loop.time()
        try:
            self.response.write(data).send(None)
        except StopIteration:
            return True
        except ConnectionResetError as error:
            raise ClientLeft(str(error)) from None
        raise AssertionError("a write into an empty buffer does not wait")

    async def done(self) -> None:
        await self.write(_DONE)

    def _look(self) -> None:
        """Ping where nothing was written for long enough, unless a write waits for the client already; look again when
        that can next be so."""
        silent_s = self._loop.time() - self._written
        if silent_s >= PING_S:
            if not self._writing:
                self._ping = self._loop.create_task(self._say_alive())
            silent_s = 0.0
        self._timer = self._loop.call_later(max(0.001, PING_S - silent_s), self._look)

    async def _say_alive(self) -> None:
        event = self._make_ping()
        with suppress(ClientLeft, ClientStalled):  # the next event meets the same, and whoever sends it is told
            await self.write(_PING if event is None else frame(event))

    async def write(self, data: bytes) -> None:
        """Frames, however long the client takes to make room for them."""
        self._written = self._loop.time()
        transport = self._request.transport
        try:
            if transport is not None and len(data) < BUFFER_BYTES and not transport.get_write_buffer_size():
                await self.response.write(data)
                return
            self._writing = True
            async with asyncio.timeout(self._stall_s):
                await self.response.write(data)
        except TimeoutError:
            self.abandon()
            raise ClientStalled(f"the client read nothing for {self._stall_s:g} s") from None
        except ConnectionResetError as error:
            raise ClientLeft(str(error)) from None
        finally:
            self._writing = False

    def abandon(self) -> None:
        """Drop the connection with whatever is unsent."""
        transport = self._request.transport
        if transport is not None:
            transport.abort()
