"""Numbers for Prometheus: cheap to count, made into text only when somebody scrapes.

On the hot path a metric is an integer in a list. The text is written by prometheus_client from a registry that is made
for the one scrape (so two servers in a process share nothing), in a thread, and the library is imported by the first
scrape. What the engine counts already is read from its snapshot; what is not known yet is left out, not 0.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from homeserve.engine.engine import EngineSnapshot
    from homeserve.engine.flip_totals import FlipTotals
    from homeserve.engine.speculation import Drafting

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 5.0)


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


@dataclass(frozen=True)
class Reading:
    """What a scrape reads from the engine and the fleet, taken on the loop."""

    engine: EngineSnapshot | None = None
    restarts: tuple[tuple[int, int], ...] = ()
    """(rank, restarts)"""
    free: tuple[tuple[int, int], ...] = ()
    """(device, least free bytes since the start)"""
    flips: FlipTotals | None = None
    """None: the layout stays."""
    drafting: Drafting | None = None
    """None: nothing is drafted."""


@dataclass
class Metrics:
    """What the server counts itself."""

    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BOUNDS_S))
    inter_token: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS_S))
    responses: dict[int, int] = field(default_factory=dict)
    """HTTP status -> answers."""

    def count_response(self, status: int) -> None:
        self.responses[status] = self.responses.get(status, 0) + 1

    async def render(self, reading: Reading) -> bytes:
        return await asyncio.to_thread(_text, self, reading)


def _text(metrics: Metrics, reading: Reading) -> bytes:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(metrics, reading))
    return generate_latest(registry)


class _Collector:
    """The one collector of a scrape's registry."""

    def __init__(self, metrics: Metrics, reading: Reading) -> None:
        self._metrics = metrics
        self._reading = reading

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        metrics = self._metrics
        for name, text, histogram in (
            ("homeserve_ttft_seconds", "From a request's arrival in the engine to its first token", metrics.ttft),
            ("homeserve_inter_token_seconds", "Between tokens of one sequence", metrics.inter_token),
        ):
            yield HistogramMetricFamily(name, text, buckets=histogram.cumulative(), sum_value=histogram.sum)
        responses = CounterMetricFamily("homeserve_http_responses", "HTTP answers by status", labels=["status"])
        for status, count in sorted(metrics.responses.items()):
            responses.add_metric([str(status)], count)
        yield responses
        restarts = CounterMetricFamily("homeserve_worker_restarts", "Restarts of a rank's worker", labels=["rank"])
        for rank, count in self._reading.restarts:
            restarts.add_metric([str(rank)], count)
        yield restarts
        name, text = "homeserve_corridor_min_free_bytes", "Least free memory of a device since the start"
        least = GaugeMetricFamily(name, text, labels=["device"])
        for device, size in self._reading.free:
            least.add_metric([str(device)], size)
        yield least
        if self._reading.flips is not None:
            yield from _flip_metrics(self._reading.flips)
        if self._reading.drafting is not None:
            yield from _draft_metrics(self._reading.drafting)
        if self._reading.engine is not None:
            yield from _engine_metrics(self._reading.engine)


def _flip_metrics(totals: FlipTotals) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, SummaryMetricFamily

    name, text = "homeserve_flips", "Flips that ended, by how"
    flips = CounterMetricFamily(name, text, labels=["to", "cause", "result", "reason"])
    for how, count in sorted(totals.ended.items()):
        flips.add_metric([*how], count)
    yield flips
    name, text = "homeserve_flip_seconds", "Time of flips, by part and by the rank that measured it"
    seconds = SummaryMetricFamily(name, text, labels=["part", "rank"])
    for (part, who), (count, took) in sorted(totals.took.items()):
        seconds.add_metric([part, who], count, took)
    yield seconds
    moved = CounterMetricFamily("homeserve_flip_bytes", "Bytes of flips, by kind and rank", labels=["kind", "rank"])
    for (kind, rank), size in sorted(totals.bytes.items()):
        moved.add_metric([kind, str(rank)], size)
    yield moved


def _draft_metrics(drafting: Drafting) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily

    name, text = "homeserve_draft_rounds", "Rounds of drafting; carried: of requests that a flip had carried over"
    rounds = CounterMetricFamily(name, text, labels=["carried"])
    for carried, counts in (("true", drafting.carried), ("false", drafting.uncarried)):
        rounds.add_metric([carried], counts.rounds)
    yield rounds
    for name, text, value in (
        ("homeserve_draft_drafted", "Tokens that were drafted", drafting.totals.drafted),
        ("homeserve_draft_accepted", "Drafted tokens that were drawn as well", drafting.totals.accepted),
    ):
        yield CounterMetricFamily(name, text, value=value)


def _engine_metrics(engine: EngineSnapshot) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    yield GaugeMetricFamily("homeserve_requests_running", "Sequences being computed", value=engine.running)
    yield GaugeMetricFamily("homeserve_requests_waiting", "Sequences that wait for a place", value=engine.waiting)
    yield GaugeMetricFamily("homeserve_epoch", "Number of the layout in force", value=engine.epoch)
    if engine.capacity_tokens:
        ratio = engine.used_tokens / engine.capacity_tokens
        yield GaugeMetricFamily("homeserve_kv_used_ratio", "Share of the KV pool held by open sequences", value=ratio)
    for name, text, value in (
        ("homeserve_prompt_tokens", "Prompt tokens taken in", engine.prompt_tokens),
        ("homeserve_generation_tokens", "Tokens generated", engine.generated_tokens),
        ("homeserve_prefix_hit_tokens", "Prompt tokens found in the prefix cache", engine.prefix_hit_tokens),
        ("homeserve_preemptions", "Sequences that lost their place for lack of pages", engine.preemptions),
    ):
        yield CounterMetricFamily(name, text, value=value)
    requests = CounterMetricFamily("homeserve_requests", "Sequences that ended, by how", labels=["result"])
    for result, value in (("finished", engine.finished), ("aborted", engine.aborted), ("failed", engine.failed)):
        requests.add_metric([result], value)
    yield requests
