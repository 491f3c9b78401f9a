"""What a scrape tells: under our own names and under vLLM's, over models that come and go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import standing
from http_world import ANSWER, World, serving
from prometheus_client.parser import text_string_to_metric_families

from homeserve.engine.draft_counts import DraftCounts, DraftTotals
from homeserve.engine.request import Timings
from homeserve.server.context import ModelInfo
from homeserve.server.metrics import Histogram, Metrics, ModelMetrics
from homeserve.server.metrics_reading import Past, Reading, Totals
from homeserve.server.request_record import RequestRecord

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
TINY = (("model_name", "tiny"),)


def samples_of(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


async def scrape(world: World) -> Samples:
    async with world.client.get(world.url("/metrics")) as response:
        return samples_of(await response.text())


async def test_vllms_names_are_told_where_they_are_wanted() -> None:
    async with serving(metrics_compat="vllm", prefix_cache=True) as world:
        await world.chat(max_tokens=4)
        await world.chat()
        told = await scrape(world)
    prompt, answer = len("user: q\n"), len(ANSWER.encode())
    assert told["vllm:prompt_tokens_total", TINY] == 2 * prompt
    assert told["vllm:generation_tokens_total", TINY] == 4 + answer
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert told[f"vllm:{name}_seconds_count", TINY] == 2, name
    assert told["vllm:request_decode_time_seconds_count", TINY] == 2
    assert told["vllm:inter_token_latency_seconds_count", TINY] == 4 + answer - 2
    length, stop = (("finished_reason", "length"), *TINY), (("finished_reason", "stop"), *TINY)
    assert told["vllm:request_success_total", length] == told["vllm:request_success_total", stop] == 1
    assert told["vllm:num_requests_running", TINY] == told["vllm:num_requests_waiting", TINY] == 0
    assert told["vllm:kv_cache_usage_perc", TINY] == 0 and told["vllm:num_preemptions_total", TINY] == 0
    assert told["vllm:prefix_cache_queries_total", TINY] == 2 * prompt
    assert ("vllm:prefix_cache_hits_total", TINY) in told
    (config,) = (dict(labels) for name, labels in told if name == "vllm:cache_config_info")
    assert config["model_name"] == "tiny" and config["cache_dtype"] == "f16"
    assert int(config["block_size"]) * int(config["num_gpu_blocks"]) == 1024
    assert not any(name.startswith("vllm:spec_decode") for name, _ in told), "nothing is drafted here"


async def test_without_it_none_of_them_is_told() -> None:
    async with serving() as world:
        await world.chat()
        assert not any(":" in name for name, _ in await scrape(world))


async def test_vllms_names_of_drafting() -> None:
    drafts = DraftTotals()
    drafts.count(3, 2, carried=False, first=False)
    drafts.count(3, 0, carried=True, first=True)
    reading = Reading(totals={"tiny": Totals(drafts=drafts)})
    told = samples_of((await Metrics(compat=frozenset({"vllm"})).render(reading)).decode())
    assert told["vllm:spec_decode_num_drafts_total", TINY] == 2
    assert told["vllm:spec_decode_num_draft_tokens_total", TINY] == 6
    assert told["vllm:spec_decode_num_accepted_tokens_total", TINY] == 2
    places = [told["vllm:spec_decode_num_accepted_tokens_per_pos_total", (*TINY, ("position", str(i)))] for i in (0, 2)]
    assert places == [1, 0]


async def test_requests_are_timed_by_model_at_their_end() -> None:
    metrics = Metrics()
    whole, cut = Timings(1.0, 1.5, 2.0, 4.0), Timings(1.0, 1.5, 2.0, None)
    metrics.of("a").count_request(RequestRecord(timings=[whole, cut], finishes=["stop", None]))
    told = samples_of((await metrics.render(Reading())).decode())
    of = (("model", "a"),)
    for name, seconds in (("", 3.0), ("_queue", 0.5), ("_prefill", 0.5), ("_decode", 2.0)):
        assert told[f"homeserve_request{name}_seconds_count", of] == 1
        assert told[f"homeserve_request{name}_seconds_sum", of] == seconds
    assert told["homeserve_choices_total", (("finish", "stop"), *of)] == 1


def engine(**counts: int) -> Any:
    """An engine as a scrape sees it."""
    names = ("finished", "aborted", "failed", "prompt_tokens", "generated_tokens", "prefix_lookups", "prefix_hits")
    zero = dict.fromkeys((*names, "prefix_hit_tokens", "preemptions", "plans_acked"), 0)
    snapshot = SimpleNamespace(**(zero | counts))
    drafting = SimpleNamespace(most=3, carried=DraftCounts(), uncarried=DraftCounts(1, 2, 1))
    return SimpleNamespace(snapshot=lambda: snapshot, drafting=drafting, flip_totals=None)


def model(name: str, **counts: int) -> Any:
    fleet = SimpleNamespace(ranks=[SimpleNamespace(restarts=counts.pop("restarts", 0))])
    return standing.loaded(model=ModelInfo(name, "", "", "", 1), engine=engine(**counts), fleet=fleet)


def test_what_an_unloaded_model_has_counted_stays_counted() -> None:
    past = Past()
    first, second = model("a", finished=3, restarts=1), model("b", finished=5)
    past.see([first])
    first.engine.snapshot().finished = 4  # until the very end
    past.see([second])
    totals = past.totals([second])
    assert {name: each.counts["finished"] for name, each in totals.items()} == {"a": 4, "b": 5}
    again = model("a", finished=1)
    totals = past.totals([again, second])
    assert totals["a"].counts["finished"] == 5 and totals["a"].restarts == {0: 1}
    whole = Reading(totals=totals).sum
    assert whole is not None and whole.counts["finished"] == 10 and whole.drafts is not None
    assert whole.drafts.uncarried.rounds == 3, "of a, of a again and of b"
    assert past.totals([again, second])["a"].counts["finished"] == 5, "a scrape changes nothing"


async def test_what_is_not_known_is_left_out() -> None:
    told = samples_of((await Metrics().render(Reading())).decode())
    assert not any("tokens_total" in name or "running" in name or "draft" in name or "kv" in name for name, _ in told)


def test_a_histogram_of_all_models_has_every_observation() -> None:
    metrics = Metrics()
    metrics.of("a").ttft.observe(0.03)
    metrics.of("b").ttft.observe(500.0, 2)
    assert metrics.ttft.cumulative()[-1] == ("+Inf", 3.0) and metrics.ttft.sum == 1000.03
    assert sum(Histogram.sum_of((1.0,), []).counts) == 0
    assert ModelMetrics().ttft is not ModelMetrics().ttft
