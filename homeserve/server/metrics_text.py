"""The text of a scrape under homeserve's own names, which docs/METRICS.md lists.

It is written by prometheus_client from a registry that is made for the one scrape, so two servers in a process share
nothing. What is not known yet is left out, not 0. Names keep what they mean: metrics without the label `model` are of
the whole server, and one that is of a model has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from homeserve import __version__
from homeserve.server.context import MODEL_STATES, State
from homeserve.server.metrics_vllm import per_model, vllm_families

if TYPE_CHECKING:
    from homeserve.engine.draft_counts import DraftTotals
    from homeserve.engine.flip_totals import FlipTotals
    from homeserve.server.metrics import Metrics
    from homeserve.server.metrics_reading import Device, ModelReading, Reading, Totals

_MIB = 1 << 20


def text(metrics: Metrics, reading: Reading) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(metrics, reading))
    return generate_latest(registry)


class _Families:
    """The one collector of a scrape's registry."""

    def __init__(self, metrics: Metrics, reading: Reading) -> None:
        self._metrics = metrics
        self._reading = reading

    def collect(self) -> Iterator[Metric]:
        yield from _server(self._metrics, self._reading)
        yield from _requests(self._metrics)
        yield from _devices(self._reading.devices)
        total = self._reading.sum
        yield _restarts(total)
        if total is not None:
            yield from _engines(total)
            if total.flips is not None:
                yield from _flips(total.flips)
            if total.drafts is not None:
                yield from _drafts(total.drafts)
        if self._reading.models:
            yield from _now(self._reading.models)
            yield from _ranks(self._reading.models)
        if "vllm" in self._metrics.compat:
            yield from vllm_families(self._metrics, self._reading)


def _server(metrics: Metrics, reading: Reading) -> Iterator[Metric]:
    yield _labelled(GaugeMetricFamily, "homeserve_info", "1, with the version", "version", [(__version__, 1)])
    if reading.state:
        states = [(state.value, float(state.value == reading.state)) for state in State]
        yield _labelled(GaugeMetricFamily, "homeserve_state", "1 for the state that it is in", "state", states)
    if reading.states:
        yield _model_states(reading.states)
    answers = [(str(status), count) for status, count in sorted(metrics.responses.items())]
    yield _labelled(CounterMetricFamily, "homeserve_http_responses", "HTTP answers by status", "status", answers)
    if reading.refused:
        text = "Requests over their client's limit, by the limit"
        refused = sorted(reading.refused.items())
        yield _labelled(CounterMetricFamily, "homeserve_rate_limited", text, "limit", refused)


def _model_states(told: Iterable[tuple[str, str]]) -> Metric:
    family = GaugeMetricFamily(
        "homeserve_model_state", "1 for the state that each model is in", labels=["model", "state"]
    )
    for model, now in told:
        for state in MODEL_STATES:
            family.add_metric([model, state], float(state == now))
    return family


def _requests(metrics: Metrics) -> Iterator[Metric]:
    for name, text, histogram in (
        ("homeserve_ttft_seconds", "From a request's arrival in the engine to its first token", metrics.ttft),
        ("homeserve_inter_token_seconds", "Between tokens of one sequence", metrics.inter_token),
    ):
        yield HistogramMetricFamily(name, text, buckets=histogram.cumulative(), sum_value=histogram.sum)
    for name, text, of in (
        ("homeserve_request_seconds", "From a sequence's arrival in the engine to its last token", "total"),
        ("homeserve_request_queue_seconds", "From a sequence's arrival to its place in a plan", "queue"),
        ("homeserve_request_prefill_seconds", "From a sequence's first plan to its first token", "prefill"),
        ("homeserve_request_decode_seconds", "From a sequence's first token to its last", "decode"),
    ):
        yield per_model(name, text, of, metrics.models, "model")
    choices = CounterMetricFamily(
        "homeserve_choices", "Choices of answers that ended, by how", labels=["model", "finish"]
    )
    for model, of_model in sorted(metrics.models.items()):
        for finish, count in sorted(of_model.finishes.items()):
            choices.add_metric([model, finish], count)
    yield choices


def _restarts(total: Totals | None) -> Metric:
    restarts = CounterMetricFamily("homeserve_worker_restarts", "Restarts of a rank's worker", labels=["rank"])
    for rank, count in sorted(total.restarts.items()) if total is not None else ():
        restarts.add_metric([str(rank)], count)
    return restarts


def _devices(devices: Iterable[Device]) -> Iterator[Metric]:
    for name, text, of in (
        ("homeserve_corridor_min_free_bytes", "Least free memory of a device since the start", "least"),
        ("homeserve_corridor_free_bytes", "Free memory of a device", "free"),
        ("homeserve_corridor_floor_bytes", "Memory of a device that has to stay free", "floor"),
    ):
        known = [(str(device.number), value) for device in devices if (value := getattr(device, of)) is not None]
        yield _labelled(GaugeMetricFamily, name, text, "device", known)


def _engines(total: Totals) -> Iterator[Metric]:
    counts = total.counts
    for name, text, of in (
        ("homeserve_prompt_tokens", "Prompt tokens taken in", "prompt_tokens"),
        ("homeserve_generation_tokens", "Tokens generated", "generated_tokens"),
        ("homeserve_prefix_lookups", "Prompts that were looked up in the prefix cache", "prefix_lookups"),
        ("homeserve_prefix_hit_tokens", "Prompt tokens found in the prefix cache", "prefix_hit_tokens"),
        ("homeserve_preemptions", "Sequences that lost their place for lack of pages", "preemptions"),
        ("homeserve_plans", "Plans that every rank has computed", "plans_acked"),
    ):
        yield CounterMetricFamily(name, text, value=counts[of])
    ended = [(how, counts[how]) for how in ("finished", "aborted", "failed")]
    yield _labelled(CounterMetricFamily, "homeserve_requests", "Sequences that ended, by how", "result", ended)


def _flips(totals: FlipTotals) -> Iterator[Metric]:
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


def _drafts(drafts: DraftTotals) -> Iterator[Metric]:
    name, text = "homeserve_draft_rounds", "Rounds of drafting; carried: of requests that a flip had carried over"
    rounds = [("true", drafts.carried.rounds), ("false", drafts.uncarried.rounds)]
    yield _labelled(CounterMetricFamily, name, text, "carried", rounds)
    for name, text, value in (
        ("homeserve_draft_drafted", "Tokens that were drafted", drafts.totals.drafted),
        ("homeserve_draft_accepted", "Drafted tokens that were drawn as well", drafts.totals.accepted),
    ):
        yield CounterMetricFamily(name, text, value=value)


def _now(models: tuple[ModelReading, ...]) -> Iterator[Metric]:
    """What the models that are in do now."""
    engines = [each.snapshot for each in models]
    capacity, used = sum(each.capacity_tokens for each in engines), sum(each.used_tokens for each in engines)
    for name, text, value in (
        ("homeserve_requests_running", "Sequences being computed", sum(each.running for each in engines)),
        ("homeserve_requests_waiting", "Sequences that wait for a place", sum(each.waiting for each in engines)),
        ("homeserve_epoch", "Number of the layout in force, of the model used last", engines[0].epoch),
        ("homeserve_kv_capacity_tokens", "Tokens that the KV pools hold", capacity),
        ("homeserve_kv_cached_tokens", "Of them kept for later prompts alone", sum(e.cached_tokens for e in engines)),
    ):
        yield GaugeMetricFamily(name, text, value=value)
    if capacity:
        text = "Share of the KV pools held by open sequences"
        yield GaugeMetricFamily("homeserve_kv_used_ratio", text, value=used / capacity)
    name, text = "homeserve_layout", "1 for the layout in force"
    layouts = GaugeMetricFamily(name, text, labels=["model", "layout"])
    for each in models:
        if each.snapshot.layout:
            layouts.add_metric([each.id, each.snapshot.layout], 1)
    yield layouts


def _ranks(models: tuple[ModelReading, ...]) -> Iterator[Metric]:
    name, text = "homeserve_rank_seconds", "A rank's time: busy computing, waited for other ranks, idle without a plan"
    spent = CounterMetricFamily(name, text, labels=["model", "rank", "state"])
    resident = GaugeMetricFamily(
        "homeserve_rank_resident_bytes", "Resident memory of a rank's process", labels=["model", "rank"]
    )
    for model in models:
        for number, rank in enumerate(model.ranks):
            for state, ms in (("busy", rank.busy_ms), ("waited", rank.waited_ms), ("idle", rank.idle_ms)):
                spent.add_metric([model.id, str(number), state], ms / 1e3)
            if rank.rss_mib is not None:
                resident.add_metric([model.id, str(number)], rank.rss_mib * _MIB)
    yield spent
    yield resident


def _labelled(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Iterable[tuple[str, float]],
) -> Metric:
    """A family of one label."""
    family = kind(name, text, labels=[label])
    for of, value in values:
        family.add_metric([of], value)
    return family
