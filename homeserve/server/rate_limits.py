"""How much one client may ask for: requests and tokens a minute, each by a token bucket of its own.

A bucket holds what a client may use at once, a minute's worth, and fills evenly. A request takes one from the first
bucket when it comes. What it costs in tokens is known only at its end: a client is let in while its second bucket is
not empty, and what the answer took, prompt and completion, is taken out of it then, below zero if need be. So an answer
may be longer than what was left, and the client waits longer after it: in the long run it has its tokens a minute.

A client is whoever sends a key; without keys whoever has an address. Of those that are known, so many are remembered,
the ones seen last: a bucket that is forgotten is full again.

Pure: the clock is handed in.
"""

from __future__ import annotations

import ipaddress
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from homeserve.errors import RateLimited

CLIENTS_LIMIT = 4096
"""Clients that are remembered."""
_PERIOD_S = 60.0
_IPV6_PREFIX = 64
"""Bits of an IPv6 address that tell one household from the next."""


class Bucket:
    """Holds `limit` at most and gains `limit` a minute; full at first."""

    __slots__ = ("_at", "_level", "_limit")

    def __init__(self, limit: int, now: float) -> None:
        self._limit = limit
        self._level = float(limit)
        self._at = now

    def level(self, now: float) -> float:
        """What is in it. Negative: owed."""
        self._level = min(float(self._limit), self._level + (now - self._at) * self._limit / _PERIOD_S)
        self._at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount

    def wait_s(self, now: float, level: float) -> float:
        """Until it holds `level`."""
        return max(0.0, (level - self.level(now)) * _PERIOD_S / self._limit)


@dataclass(frozen=True)
class Allowance:
    """How one client stands with one limit."""

    limit: int
    remaining: int
    reset_s: float
    """Until nothing of it is used."""


@dataclass(frozen=True)
class Standing:
    """How a client stands; None where there is no such limit."""

    requests: Allowance | None
    tokens: Allowance | None

    def headers(self) -> dict[str, str]:
        """As OpenAI's API tells it."""
        told: dict[str, str] = {}
        for name, allowance in (("requests", self.requests), ("tokens", self.tokens)):
            if allowance is not None:
                told[f"x-ratelimit-limit-{name}"] = str(allowance.limit)
                told[f"x-ratelimit-remaining-{name}"] = str(allowance.remaining)
                told[f"x-ratelimit-reset-{name}"] = duration(allowance.reset_s)
        return told


class RateLimiter:
    """The buckets of all clients. A limit of 0 is none."""

    def __init__(self, requests: int, tokens: int, clock: Callable[[], float], clients: int = CLIENTS_LIMIT) -> None:
        self._limits = (requests, tokens)
        self._clock = clock
        self._most = clients
        self._clients: OrderedDict[str, tuple[Bucket | None, Bucket | None]] = OrderedDict()
        self.refused = {"requests": 0, "tokens": 0}
        """Requests that were refused, by the limit."""

    def __bool__(self) -> bool:
        return any(self._limits)

    def __len__(self) -> int:
        """Clients that are remembered."""
        return len(self._clients)

    def admit(self, client: str) -> None:
        """Count a request of `client`. Raises RateLimited, which counts nothing."""
        now = self._clock()
        requests, tokens = self._of(client, now)
        for name, bucket, least in (("requests", requests, 1.0), ("tokens", tokens, 1e-9)):
            if bucket is not None and bucket.level(now) < least:
                self.refused[name] += 1
                limit = self._limits[name == "tokens"]
                raise RateLimited(name, limit, retry_after_s=max(1, math.ceil(bucket.wait_s(now, 1.0))))
        if requests is not None:
            requests.take(1, now)

    def charge(self, client: str, tokens: int) -> None:
        """What a request has cost."""
        now = self._clock()
        bucket = self._of(client, now)[1]
        if bucket is not None:
            bucket.take(tokens, now)

    def standing(self, client: str) -> Standing:
        now = self._clock()
        requests, tokens = self._of(client, now)
        return Standing(_allowance(requests, self._limits[0], now), _allowance(tokens, self._limits[1], now))

    def _of(self, client: str, now: float) -> tuple[Bucket | None, Bucket | None]:
        found = self._clients.get(client)
        if found is None:
            requests, tokens = self._limits
            found = (Bucket(requests, now) if requests else None, Bucket(tokens, now) if tokens else None)
            self._clients[client] = found
            while len(self._clients) > self._most:
                self._clients.popitem(last=False)
        else:
            self._clients.move_to_end(client)
        return found


def is_limited(method: str, path: str) -> bool:
    """Whether a request counts: what computes does, what looks at the server or operates it does not."""
    return method == "POST" and not path.startswith("/v1/homeserve/")


def household(address: str) -> str:
    """Who an address is of: of IPv6 the network, because a household has all addresses of one."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address) or parsed.ipv4_mapped is not None:
        return address
    return str(ipaddress.ip_network((parsed, _IPV6_PREFIX), strict=False))


def duration(seconds: float) -> str:
    """`6m0s`, `1.5s`, `20ms`: how OpenAI's API writes it."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    hours, minutes = divmod(int(minutes), 60)
    told = f"{rest:g}s"
    if hours or minutes:
        told = f"{minutes}m{told}"
    return f"{hours}h{told}" if hours else told


def _allowance(bucket: Bucket | None, limit: int, now: float) -> Allowance | None:
    if bucket is None:
        return None
    return Allowance(limit, max(0, int(bucket.level(now))), bucket.wait_s(now, float(limit)))
