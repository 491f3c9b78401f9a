"""`--metrics-compat vllm`: what dashboards and load tests look for under vLLM's names, beside our own.

Each has the label `model_name`, and vLLM's unit and meaning: a request is one sequence, tokens of the prefix cache are
those that were looked up and found. What this server cannot tell truly is left out; docs/METRICS.md lists it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from backends.base import PAGE_LEN

if TYPE_CHECKING:
    from homeserve.server.metrics import Metrics, ModelMetrics
    from homeserve.server.metrics_reading import ModelReading, Reading, Totals

MODEL = "model_name"
_TIMES = (
    ("vllm:time_to_first_token_seconds", "Time to the first token", "ttft"),
    ("vllm:inter_token_latency_seconds", "Time between tokens", "inter_token"),
    ("vllm:e2e_request_latency_seconds", "Time from arrival to the last token", "total"),
    ("vllm:request_queue_time_seconds", "Time in the queue", "queue"),
    ("vllm:request_prefill_time_seconds", "Time from the first plan to the first token", "prefill"),
    ("vllm:request_decode_time_seconds", "Time from the first token to the last", "decode"),
)
_COUNTS = (
    ("vllm:prompt_tokens", "Prompt tokens", "prompt_tokens"),
    ("vllm:generation_tokens", "Generated tokens", "generated_tokens"),
    ("vllm:num_preemptions", "Preemptions", "preemptions"),
)
_REASONS = {"tool_calls": "stop"}
"""How a choice ended here -> what vLLM calls it, where that is another word."""


def vllm_families(metrics: Metrics, reading: Reading) -> Iterator[Metric]:
    yield from _times(metrics.models)
    yield _ended(metrics.models, reading.totals)
    for name, text, of in _COUNTS:
        yield _counter(name, text, {model: totals.counts[of] for model, totals in reading.totals.items()})
    yield from _drafts(reading.totals)
    yield from _now(reading.models)
    yield from _prefix(reading)


def _times(models: dict[str, ModelMetrics]) -> Iterator[Metric]:
    for name, text, of in _TIMES:
        yield per_model(name, text, of, models, MODEL)


def per_model(name: str, text: str, of: str, models: dict[str, ModelMetrics], label: str) -> Metric:
    """The histogram `of` of each model, with its id as `label`."""
    family = HistogramMetricFamily(name, text, labels=[label])
    for model, counted in sorted(models.items()):
        histogram = getattr(counted, of)
        family.add_metric([model], buckets=histogram.cumulative(), sum_value=histogram.sum)
    return family


def _ended(models: dict[str, ModelMetrics], totals: dict[str, Totals]) -> Metric:
    """Choices that came to their end, and sequences that were cut off."""
    family = CounterMetricFamily("vllm:request_success", "Requests that ended", labels=[MODEL, "finished_reason"])
    for model in sorted({*models, *totals}):
        ended: Counter[str] = Counter()
        for finish, count in models[model].finishes.items() if model in models else ():
            ended[_REASONS.get(finish, finish)] += count
        if model in totals:
            ended["abort"] += totals[model].counts["aborted"]
        for reason, count in sorted(ended.items()):
            family.add_metric([model, reason], count)
    return family


def _drafts(totals: dict[str, Totals]) -> Iterator[Metric]:
    counts = {model: each.drafts.totals for model, each in totals.items() if each.drafts is not None}
    if not counts:
        return
    for name, text, of in (
        ("vllm:spec_decode_num_drafts", "Rounds of drafting", "rounds"),
        ("vllm:spec_decode_num_draft_tokens", "Drafted tokens", "drafted"),
        ("vllm:spec_decode_num_accepted_tokens", "Accepted tokens", "accepted"),
    ):
        yield _counter(name, text, {model: getattr(each, of) for model, each in counts.items()})
    name, text = "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by their place in the round"
    places = CounterMetricFamily(name, text, labels=[MODEL, "position"])
    for model, each in sorted(counts.items()):
        for place, count in enumerate(each.accepted_at):
            places.add_metric([model, str(place)], count)
    yield places


def _now(models: tuple[ModelReading, ...]) -> Iterator[Metric]:
    for name, text, of in (
        ("vllm:num_requests_running", "Requests being computed", "running"),
        ("vllm:num_requests_waiting", "Requests that wait", "waiting"),
    ):
        yield _gauge(name, text, {each.id: getattr(each.snapshot, of) for each in models})
    used = {
        each.id: each.snapshot.used_tokens / each.snapshot.capacity_tokens
        for each in models
        if each.snapshot.capacity_tokens
    }
    yield _gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 1 is all of it", used)
    labels = [MODEL, "block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"]
    config = GaugeMetricFamily("vllm:cache_config_info", "Settings of the KV cache", labels=labels)
    for each in models:
        pages = each.snapshot.capacity_tokens // PAGE_LEN
        config.add_metric([each.id, str(PAGE_LEN), str(pages), each.kv_type, str(each.prefix_cache)], 1)
    yield config


def _prefix(reading: Reading) -> Iterator[Metric]:
    """Where there is a prefix cache every prompt is looked up."""
    without = {each.id for each in reading.models if not each.prefix_cache}
    counts = {model: totals.counts for model, totals in reading.totals.items() if model not in without}
    asked, found = "Prompt tokens looked up in the prefix cache", "Prompt tokens found in the prefix cache"
    yield _counter("vllm:prefix_cache_queries", asked, {m: c["prompt_tokens"] for m, c in counts.items()})
    yield _counter("vllm:prefix_cache_hits", found, {m: c["prefix_hit_tokens"] for m, c in counts.items()})


def _counter(name: str, text: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[MODEL])
    for model, value in sorted(values.items()):
        family.add_metric([model], value)
    return family


def _gauge(name: str, text: str, values: dict[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[MODEL])
    for model, value in sorted(values.items()):
        family.add_metric([model], value)
    return family
