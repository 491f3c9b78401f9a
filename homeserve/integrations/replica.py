"""One replica of a Ray cluster: an actor, and the server that it started on its box.

It passes requests on byte for byte, over a connection of 127.0.0.1. Ray makes it where there is room, asks after its
health, lets its requests end before it deletes it. A replica whose server died ends itself: Ray's router learns of the
death of an actor at once, and of anything else with the next health check. An actor that is killed takes its server
along (`tether`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from homeserve.integrations.server_process import ServerProcess

if TYPE_CHECKING:
    import aiohttp

REPLICA_HEADER = "x-homeserve-replica"
"""Of every answer: which replica gave it."""
CONNECT_S = 10.0

HOP = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade host"
    " content-length date server accept-encoding expect".split()
)
"""Headers of one connection, not of the request."""


@dataclass(frozen=True)
class Ask:
    """One request on its way to a replica. `prompt` is what Ray's router compares; it reads the field by this name."""

    prompt: str
    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


@dataclass(frozen=True)
class Head:
    """What comes first of an answer; bytes of its body follow."""

    status: int
    headers: tuple[tuple[str, str], ...]

    @property
    def is_stream(self) -> bool:
        return any(name == "content-type" and value.startswith("text/event-stream") for name, value in self.headers)


class ServerGone(ConnectionError):
    """The server of a replica does not answer (any more)."""


class ServerNotConnected(ServerGone):
    """It took no connection, so it has not seen the request."""


# -------------------------------------------------------------------------------------------------------------- replica


class Replica:
    """One server on one box. Ray Serve calls `answer` and `check_health`, and deletes it when it has drained."""

    def __init__(self, arguments: list[str], drain_s: float) -> None:
        self._id: str = import_module("ray.serve").get_replica_context().replica_id.unique_id
        self._session: aiohttp.ClientSession | None = None
        self._server = ServerProcess(arguments, drain_s, on_end=_end_with_server)
        self._server.start(os.environ)
        print(f"replica {self._id}: {self._server.url} (pid {self._server.pid})", file=sys.stderr, flush=True)

    async def answer(self, ask: Ask) -> AsyncIterator[Head | bytes]:
        """The head, then the body as it comes: a stream in whole events. Raises ServerGone."""
        import aiohttp

        session = self._client()
        try:
            async with session.request(
                ask.method, self._server.url + ask.target, data=ask.body or None, headers=list(ask.headers)
            ) as answer:
                headers = [(name.lower(), value) for name, value in answer.headers.items() if name.lower() not in HOP]
                head = Head(answer.status, (*headers, (REPLICA_HEADER, self._id)))
                yield head
                body = answer.content.iter_any()
                async for piece in whole_events(body) if head.is_stream else body:
                    yield piece
        except aiohttp.ClientConnectorError as error:
            raise ServerNotConnected(f"replica {self._id}: {error!r}") from None
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerGone(f"replica {self._id}: {error!r}") from None

    async def check_health(self) -> None:
        """Called by Ray each few seconds; raises where the server does not serve."""
        async with self._client().get(f"{self._server.url}/health") as answer:
            if answer.status != 200:
                raise ServerGone(f"replica {self._id}: /health answers {answer.status}")

    def __del__(self) -> None:
        """Called by Ray when the last request has ended. Where `__init__` failed there may be no server."""
        server: ServerProcess | None = getattr(self, "_server", None)
        if server is not None:
            server.stop()

    def _client(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                connector=aiohttp.TCPConnector(limit=0),
                auto_decompress=False,
            )
        return self._session


def _end_with_server(code: int) -> None:
    """A replica without its server is no replica: its death is what Ray's router sees soonest."""
    print(f"homeserve up ended with exit code {code}: this replica ends too", file=sys.stderr, flush=True)
    os._exit(1)


async def whole_events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes, cut behind events only: an error event may follow each piece."""
    rest = b""
    async for piece in pieces:
        whole, end, rest = (rest + piece).rpartition(b"\n\n")
        if end:
            yield whole + end
    if rest:
        yield rest
