"""What is known of one HTTP request when it ends: for the request log, for metrics, and for the limits of its client.

The edge opens a record and closes it; handlers write into it what only they know. It is of the request's task (a
`ContextVar`, as the request's id), so nobody has to hand it on.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from homeserve.engine.request import Timings

CLIENT_LEFT = "client_left"
CLIENT_STALLED = "client_stalled"
LEFT_STATUS = 499
"""What the log calls the status of an answer that nobody waited for, as other servers' logs do."""


@dataclass
class RequestRecord:
    """None and empty: not known, or not of such a request."""

    request_id: str = ""
    method: str = ""
    path: str = ""
    address: str = ""
    """Of the client, as the socket has it."""
    key: str = ""
    """Name of the key that it sent."""
    status: int = 0
    code: str = ""
    """Of the error, also of one that ended a stream."""
    total_s: float = 0.0
    model: str = ""
    stream: bool | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    timings: Sequence[Timings] = field(default=())
    """Of its sequences."""
    finishes: Sequence[str | None] = field(default=())
    """How its choices ended; None: they did not."""
    prompt: str | None = None
    answer: str | None = None
    """Texts, where these are to be logged."""

    @property
    def cost_tokens(self) -> int:
        """What it took of its client's tokens a minute."""
        return (self.prompt_tokens or 0) + (self.completion_tokens or 0)

    @property
    def queue_s(self) -> float | None:
        """The first sequence's wait for a place."""
        return _between(self._submitted, _first([each.scheduled for each in self.timings]))

    @property
    def ttft_s(self) -> float | None:
        """To the first token of any sequence."""
        return _between(self._submitted, _first([each.first_token for each in self.timings]))

    @property
    def _submitted(self) -> float | None:
        return min((each.submitted for each in self.timings), default=None)

    def facts(self) -> dict[str, Any]:
        """What the log tells, without what is not known."""
        finishes = [finish for finish in self.finishes if finish is not None]
        told = {
            "id": self.request_id,
            "method": self.method,
            "route": self.path,
            "status": self.status,
            "code": self.code or None,
            "model": self.model or None,
            "stream": self.stream,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "queue_ms": _ms(self.queue_s),
            "ttft_ms": _ms(self.ttft_s),
            "total_ms": _ms(self.total_s),
            "finish": ",".join(sorted(set(finishes))) or None,
            "key": self.key or None,
            "client": self.address or None,
            "prompt": self.prompt,
            "answer": self.answer,
        }
        return {name: value for name, value in told.items() if value is not None}


_current: ContextVar[RequestRecord] = ContextVar("request_record")


def open_record(record: RequestRecord) -> None:
    """It is the record of the request whose handler runs here."""
    _current.set(record)


def current_record() -> RequestRecord:
    """Of the request whose handler runs; outside of one a record that nobody reads."""
    record = _current.get(None)
    return RequestRecord() if record is None else record


def _first(moments: Sequence[float | None]) -> float | None:
    return min((moment for moment in moments if moment is not None), default=None)


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else max(0.0, end - begin)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 1)
