"""How many connections there may be. Each costs a file descriptor, and a process without descriptors cannot restart its
worker; so the number is bounded, and whoever comes beyond it is told at once instead of hanging.

Every request that may run or wait has a place, and `SPARE` connections more, for idle keep-alive and for `/health`; but
never so many that fewer than `RESERVE` of the process's descriptors are left.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable, Iterable
from typing import cast

from homeserve.server.bodies import encode

SPARE = 256
RESERVE = 128
"""File descriptors kept for all else: pipes and shared memory of workers, the model's files, the template helper."""
_LEAST = 16
_FILES_WANTED = 65536
"""More descriptors than any limit of connections needs; some systems take no infinite one."""
_log = logging.getLogger("homeserve.server")


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one, as far as that is of use. Returns the limit that holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _FILES_WANTED
    wanted = _FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, _FILES_WANTED)
    if soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError) as error:
        _log.warning("the limit of open files stays at %d: %s", soft, error)
        return soft
    return wanted


def connections_limit(wanted: int, files: int) -> int:
    """How many connections a process of `files` descriptors takes where `wanted` are wished for."""
    limit = max(_LEAST, min(wanted, files - RESERVE))
    if limit < wanted:
        _log.warning("%d files may be open (ulimit -n): at most %d connections are taken, not %d", files, limit, wanted)
    return limit


class Gate:
    """A protocol factory: `make` while fewer than `limit` connections are open, else a polite refusal.

    `known` are the protocols of open connections. One is known only once the loop has run its `connection_made`, and
    the loop accepts many in one turn; those of this turn and the next are remembered here.
    """

    def __init__(
        self, limit: int, known: Callable[[], Iterable[asyncio.Protocol]], make: Callable[[], asyncio.Protocol]
    ) -> None:
        self._limit = limit
        self._known = known
        self._make = make
        self._fresh: set[asyncio.Protocol] = set()
        self._told = False

    def __call__(self) -> asyncio.Protocol:
        if len(self._fresh.union(self._known())) < self._limit:
            self._told = False
            protocol = self._make()
            self._fresh.add(protocol)
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._fresh.discard, protocol)
            return protocol
        if not self._told:
            self._told = True
            _log.warning("%d connections are open, which is the limit: new ones are refused", self._limit)
        return _Refusal(self._limit)


class _Refusal(asyncio.Protocol):
    """Says 503 and hangs up, whatever comes."""

    def __init__(self, limit: int) -> None:
        message = f"{limit} connections are open already; try again"
        error = {"message": message, "type": "server_error", "param": None, "code": "too_many_connections"}
        self._body = encode({"error": error})

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        sink = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(self._body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
        )
        sink.write(head.encode() + self._body)
        sink.close()
