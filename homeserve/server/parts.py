"""What every handler needs, in one place: the context, the decoder, the metrics, and the way to a model.

parts.check_taking()                                    # 503 while loading or draining, before a body is read
async with parts.lease(fields.model) as served: ...     # the model stays in until the answer is out
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from homeserve.errors import Draining, Loading, ModelNotLoaded, ModelUnloaded, UnknownModel
from homeserve.server.bodies import BodyDecoder
from homeserve.server.context import Loaded, ServerContext, State
from homeserve.server.held import Held
from homeserve.server.metrics import Metrics
from homeserve.server.rate_limits import RateLimiter
from homeserve.server.request_log import RequestLog
from homeserve.server.request_record import current_record

Served = Loaded
"""A loaded model, as handlers have it: through a lease."""


@dataclass
class Parts:
    """Shared by the handlers of one application."""

    context: ServerContext
    decoder: BodyDecoder = field(default_factory=BodyDecoder)
    embeddings: Held = field(default_factory=Held)
    metrics: Metrics = field(init=False)
    request_log: RequestLog = field(init=False)
    limits: RateLimiter = field(init=False)

    def __post_init__(self) -> None:
        settings = self.context.settings
        self.metrics = Metrics(compat=frozenset({settings.metrics_compat}))
        self.context.on_models.append(lambda: self.metrics.past.see(self.context.loaded))
        self.request_log = RequestLog(settings.log_requests)
        self.limits = RateLimiter(settings.rate_limit_requests, settings.rate_limit_tokens, time.monotonic)

    def check_loaded(self) -> None:
        """Raises Loading until the server has been ready once."""
        if self.context.state() == State.LOADING.value:
            raise Loading()

    @property
    def draining(self) -> bool:
        """Whether the server is on its way down; it may still take requests (`--drain-delay-s`)."""
        return self.context.state() == State.DRAINING.value

    def check_taking(self) -> None:
        """Raises Loading, Draining: no new work is taken."""
        if self.draining and not self.context.still_takes():
            raise Draining("the server is shutting down and takes no new requests")
        self.check_loaded()

    @asynccontextmanager
    async def lease(self, asked: str | None) -> AsyncIterator[Loaded]:
        """The model that a request names, or the one used last, loaded if need be; it stays in until the answer is out.
        Raises UnknownModel, and what loading it fails of; ModelUnloaded where it is taken away and the server stays."""
        async with self.context.models.lease(asked) as served:
            self.metrics.past.see(self.context.loaded)
            current_record().model = served.model.id
            try:
                yield served
            except Draining:
                if self.draining:
                    raise
                raise ModelUnloaded(served.model.id) from None

    def served(self, asked: str | None = None) -> Loaded:
        """A model that is in, for whoever only looks: the one used last, or the one called `asked`. Raises Loading,
        UnknownModel, ModelNotLoaded."""
        self.check_loaded()
        found = next((each for each in self.context.loaded if asked in (None, each.model.id)), None)
        if found is not None:
            return found
        every = self.context.models.tell()
        state = next((each.state for each in every if each.id == asked), None)
        if asked is not None and state is None:
            raise UnknownModel(asked, tuple(each.id for each in every))
        raise ModelNotLoaded(asked, state or "")


PARTS = web.AppKey("parts", Parts)
