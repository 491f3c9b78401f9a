"""One request from its client's side: let in or not, how the client stands, and at the end charged and logged."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from homeserve.server.keys import Key
from homeserve.server.parts import Parts
from homeserve.server.rate_limits import Standing, household
from homeserve.server.request_record import RequestRecord

_NOTHING = Standing(None, None)


@dataclass
class Visit:
    """`client` is whose buckets are used; empty: the request is not limited."""

    parts: Parts
    record: RequestRecord
    client: str = ""

    def admit(self, key: Key | None, *, limited: bool) -> None:
        """Raises RateLimited."""
        if key is not None:
            self.record.key = key.name
        if limited and self.parts.limits:
            self.client = key.digest.hex() if key is not None else household(self.record.address)
            self.parts.limits.admit(self.client)

    def standing(self) -> Standing:
        """How the client stands now."""
        return self.parts.limits.standing(self.client) if self.client else _NOTHING

    def close(self, seconds: float) -> None:
        """It is over."""
        self.record.total_s = seconds
        if self.client:
            self.parts.limits.charge(self.client, self.record.cost_tokens)
        self.parts.request_log.write(self.record)


VISIT = web.RequestKey("visit", Visit)
"""Where a request has its visit, for what runs in no task of its own."""
