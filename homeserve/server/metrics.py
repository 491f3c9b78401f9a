"""What the server counts for Prometheus: cheap to count, made into text only when somebody scrapes (`metrics_text`).

On the hot path a metric is an integer in a list. What belongs to a model is counted by the model's id: a model that is
loaded again goes on where it was. What the engine counts already is read from it at the scrape (`metrics_reading`).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from homeserve.server.metrics_reading import Past, Reading

if TYPE_CHECKING:
    from homeserve.server.request_record import RequestRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 5.0)
REQUEST_BOUNDS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class Histogram:
    """Counts of observations by upper bound (seconds); the last count is of what is above every bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        total, buckets = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
        return buckets

    @classmethod
    def sum_of(cls, bounds: Sequence[float], histograms: Iterable[Histogram]) -> Histogram:
        """All observations of `histograms`, which have these bounds."""
        made = cls(bounds)
        for histogram in histograms:
            made.counts = [mine + theirs for mine, theirs in zip(made.counts, histogram.counts, strict=True)]
            made.sum += histogram.sum
        return made


def _histogram(bounds: Sequence[float]) -> Histogram:
    return field(default_factory=lambda: Histogram(bounds))


@dataclass
class ModelMetrics:
    """What is counted of one model's requests. Times of sequences, in seconds; the last four are observed when a
    sequence has ended."""

    ttft: Histogram = _histogram(TTFT_BOUNDS_S)
    inter_token: Histogram = _histogram(TOKEN_BOUNDS_S)
    total: Histogram = _histogram(REQUEST_BOUNDS_S)
    """From its submission to its last token,"""
    queue: Histogram = _histogram(REQUEST_BOUNDS_S)
    """of that until it had a place,"""
    prefill: Histogram = _histogram(REQUEST_BOUNDS_S)
    """until its first token,"""
    decode: Histogram = _histogram(REQUEST_BOUNDS_S)
    """and from there on."""
    finishes: dict[str, int] = field(default_factory=dict)
    """How choices ended -> how many."""

    def count_request(self, record: RequestRecord) -> None:
        """Its sequences, those that have ended."""
        for finish in record.finishes:
            if finish is not None:
                self.finishes[finish] = self.finishes.get(finish, 0) + 1
        for timings in record.timings:
            if timings.finished is None or timings.scheduled is None or timings.first_token is None:
                continue
            self.total.observe(max(0.0, timings.finished - timings.submitted))
            self.queue.observe(max(0.0, timings.scheduled - timings.submitted))
            self.prefill.observe(max(0.0, timings.first_token - timings.scheduled))
            self.decode.observe(max(0.0, timings.finished - timings.first_token))


@dataclass
class Metrics:
    """What the server counts itself."""

    compat: frozenset[str] = frozenset()
    """Other servers whose names are told beside our own (`--metrics-compat`)."""
    models: dict[str, ModelMetrics] = field(default_factory=dict)
    """By model id: only of models that were served, so no client makes this grow."""
    responses: dict[int, int] = field(default_factory=dict)
    """HTTP status -> answers."""
    past: Past = field(default_factory=Past)

    def of(self, model: str) -> ModelMetrics:
        """Of the model with this id."""
        found = self.models.get(model)
        if found is None:
            found = self.models[model] = ModelMetrics()
        return found

    @property
    def ttft(self) -> Histogram:
        """Over all models."""
        return Histogram.sum_of(TTFT_BOUNDS_S, (each.ttft for each in self.models.values()))

    @property
    def inter_token(self) -> Histogram:
        """Over all models."""
        return Histogram.sum_of(TOKEN_BOUNDS_S, (each.inter_token for each in self.models.values()))

    def count_response(self, status: int) -> None:
        self.responses[status] = self.responses.get(status, 0) + 1

    async def render(self, reading: Reading) -> bytes:
        """The text of a scrape; the library that writes it is imported by the first one."""
        from homeserve.server.metrics_text import text

        return await asyncio.to_thread(text, self, reading)
