"""A real Prometheus scrapes a real server of two ranks that drafts, flips and loses a worker; what it then knows is
what the server says. The configuration and the dashboard are those that the documentation gives away.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from box import wait_until
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
COUNTER = ROOT / "tests" / "data" / "counter.gguf"
DEPLOY = ROOT / "docs" / "deploy"
FLAGS: tuple[str, ...] = (
    "--devices",
    "cpu:2",
    "--layout",
    "pipeline",
    "--flip",
    "manual",
    "--threads",
    "1",
    "--draft",
    "3",
)
FLAGS += ("--context", "1024", "--kv-tokens", "8192", "--max-running", "8", "--rate-limit-requests", "100000")
KEY = "scrape-me"
WITHIN_S = 120.0
INTERVAL_S = 0.5
QUIET = {"homeserve_corridor_free_bytes", "homeserve_corridor_min_free_bytes", "homeserve_rank_seconds_total"}
QUIET |= {"homeserve_rank_resident_bytes", "homeserve_http_responses_total", "homeserve_plans_total"}
"""What changes with time, or with each scrape."""
PROMISED = {
    "requests_running": (), "requests_waiting": (), "prompt_tokens_total": (), "generation_tokens_total": (),
    "ttft_seconds": (), "inter_token_seconds": (), "kv_used_ratio": (), "epoch": (), "worker_restarts_total": ("rank",),
    "flips_total": ("to", "cause", "result", "reason"), "flip_seconds": ("part", "rank"),
    "flip_bytes_total": ("kind", "rank"), "draft_accepted_total": (), "draft_rounds_total": ("carried",),
    "corridor_min_free_bytes": ("device",),
}  # fmt: skip
"""What scripts outside rely on -> its labels; a flip that was committed has no reason."""
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
pytestmark = [needs_prometheus, pytest.mark.timeout(600)]


@dataclass
class Prometheus:
    """A running one, and the server that it asks."""

    url: str
    run: Any

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The instant value of every series of a query."""
        url = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(url, timeout=WITHIN_S) as answer:
                told = json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 503:
                raise  # it is starting
            with error:
                raise AssertionError(f"{query}: {error.read().decode()}") from None
        assert told["status"] == "success", told
        return list(told["data"]["result"])

    def values(self, query: str) -> dict[tuple[tuple[str, str], ...], float]:
        """By labels, without those that Prometheus adds."""
        return {labels_of(each["metric"]): float(each["value"][1]) for each in self.ask(query)}

    def get(self, path: str) -> bytes:
        request = urllib.request.Request(self.run.url + path, headers={"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(request, timeout=WITHIN_S) as answer:
            return bytes(answer.read())

    def post(self, path: str, **body: Any) -> Any:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.run.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=WITHIN_S) as answer:
            return json.load(answer)

    @property
    def status(self) -> Any:
        return json.loads(self.get("/v1/homeserve/status"))

    def samples(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        """What `/metrics` tells: name -> labels -> value."""
        found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for family in text_string_to_metric_families(self.get("/metrics").decode()):
            for sample in family.samples:
                found.setdefault(sample.name, {})[labels_of(sample.labels)] = sample.value
        return found


def labels_of(labels: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Those of the server; to Prometheus an empty one is none."""
    return tuple(sorted((k, v) for k, v in labels.items() if v and k not in ("__name__", "instance", "job")))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def configuration(folder: Path, target: str) -> Path:
    """The documented one, for this server."""
    text = (DEPLOY / "prometheus.yml").read_text()
    key = folder / "key"
    key.write_text(KEY)
    for given, wanted in (
        ("127.0.0.1:8000", target),
        ("/etc/prometheus/homeserve.key", str(key)),
        ("scrape_interval: 5s", f"scrape_interval: {INTERVAL_S * 1e3:.0f}ms"),
    ):
        assert text.count(given) == 1, given
        text = text.replace(given, wanted)
    made = folder / "prometheus.yml"
    made.write_text(text)
    return made


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory, new_box: Callable[[Path], Any]) -> Iterator[Any]:
    """Scraped under load with everything that may happen, and idle again."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "keys").write_text(f"prometheus {KEY}\n")
    box = new_box(folder / "box")
    run = box.up(str(COUNTER), *FLAGS, "--metrics-compat", "vllm", "--api-key-file", str(folder / "keys"))
    port, config = free_port(), configuration(folder, run.url.removeprefix("http://"))
    subprocess.run(["promtool", "check", "config", str(config)], check=True, capture_output=True, timeout=60)
    log = (folder / "log").open("wb")
    process = subprocess.Popen(
        ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
         f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"],
        stdout=log, stderr=log, cwd=folder,
    )  # fmt: skip
    made = Prometheus(f"http://127.0.0.1:{port}", run)
    try:
        wait_until("a first scrape", lambda: _is_up(made))
        load(made)
        run.pids |= {rank["pid"] for rank in made.status["ranks"]}
        counted = made.samples()["homeserve_generation_tokens_total"][()]
        wait_until("the last scrape", lambda: made.values("homeserve_generation_tokens_total") == {(): counted})
        scrapes = made.values("scrape_samples_scraped")
        assert scrapes, "it counts its scrapes"
        time.sleep(2 * INTERVAL_S)  # gauges of the end: two scrapes of a server at rest
        yield made
        assert process.poll() is None, (folder / "log").read_text()
        run.send(signal.SIGTERM)
        assert run.wait() == 0, run.err
    finally:
        process.terminate()
        process.wait(60)
        log.close()
        box.close()


def _is_up(made: Prometheus) -> bool:
    try:
        return list(made.values("up").values()) == [1.0]
    except OSError:
        return False


def load(made: Prometheus) -> None:
    """Streams that flips carry over, drafts, and the end of a worker."""

    def count(start: int) -> None:
        made.post("/v1/completions", prompt=f"count {start}:", max_tokens=500, temperature=0)

    def settled() -> bool:
        return bool(made.status["state"] == "ready")

    def flip(to: str) -> None:
        url = made.post("/v1/homeserve/flip", to=to)["url"]
        wait_until("a flip", lambda: json.loads(made.get(url))["state"] == "committed")

    with ThreadPoolExecutor(4) as pool:
        open_ones = [pool.submit(count, start) for start in range(0, 400, 100)]
        wait_until("tokens", lambda: made.status["tokens"]["generated"] > 50)
        flip("tensor")
        count(500)
        flip("pipeline")
        for each in open_ones:
            each.result(WITHIN_S)
        late = pool.submit(count, 700)
        wait_until("a request", lambda: made.status["requests"]["running"] > 0)
        os.kill(made.status["ranks"][1]["pid"], signal.SIGKILL)
        late.result(WITHIN_S)
    wait_until("the new worker", lambda: settled() and made.status["ranks"][1]["restarts"] >= 1)
    wait_until("rest", lambda: made.status["requests"]["running"] == 0)


def test_it_knows_every_metric_that_is_promised(scraped: Any) -> None:
    told = scraped.samples()
    for short, labels in PROMISED.items():
        name = f"homeserve_{short}"
        name += "_count" if f"{name}_count" in told else ""
        known = scraped.values(name)
        assert known, name
        for each in known:
            assert {label for label, _ in each} | {"reason"} == {*labels, "reason"}, (name, each)


def test_it_knows_what_the_server_says(scraped: Any) -> None:
    compared = 0
    for name, values in scraped.samples().items():
        known = scraped.values(name)
        assert known.keys() == values.keys(), name
        if name not in QUIET:
            assert known == pytest.approx(values), name
            compared += len(values)
    assert compared > 200


def test_it_agrees_with_the_status(scraped: Any) -> None:
    status = scraped.status

    def value(query: str) -> float:
        (only,) = scraped.values(query).values()
        return float(only)

    assert value("homeserve_prompt_tokens_total") == status["tokens"]["prompt"] > 0
    assert value("homeserve_generation_tokens_total") == status["tokens"]["generated"] >= 3000
    assert value('homeserve_requests_total{result="finished"}') == status["requests"]["finished"] == 6
    assert value("homeserve_requests_running") == value("homeserve_requests_waiting") == 0
    assert value("homeserve_epoch") == status["epoch"] >= 2
    assert value('sum(homeserve_flips_total{result="committed",cause="request"})') == status["flip"]["committed"] == 2
    assert value('homeserve_worker_restarts_total{rank="1"}') == status["ranks"][1]["restarts"] >= 1
    rounds = status["draft"]["carried"]["rounds"], status["draft"]["uncarried"]["rounds"]
    assert value('homeserve_draft_rounds_total{carried="true"}') == rounds[0] > 0
    assert value('homeserve_draft_rounds_total{carried="false"}') == rounds[1] > 0
    rate = value("homeserve_draft_accepted_total / homeserve_draft_drafted_total")
    assert rate == pytest.approx(status["draft"]["accept_rate"], abs=1e-3)
    assert value("homeserve_kv_capacity_tokens") == status["kv"]["capacity_tokens"]
    assert value('homeserve_state{state="ready"}') == 1
    corridor = json.loads(scraped.get("/v1/homeserve/corridor"))
    (device,) = corridor["devices"]
    least = value(f'homeserve_corridor_min_free_bytes{{device="{device["index"]}"}}')
    assert least == pytest.approx(device["min_free_mib"] * 2**20, rel=0.05)
    assert value("homeserve_corridor_floor_bytes") == corridor["floor_mib"] * 2**20


def test_times_are_seconds_and_parts_make_the_whole(scraped: Any) -> None:
    def mean(name: str) -> float:
        (only,) = scraped.values(f"{name}_sum / {name}_count").values()
        return float(only)

    parts = [mean(f"homeserve_request_{part}_seconds") for part in ("queue", "prefill", "decode")]
    assert sum(parts) == pytest.approx(mean("homeserve_request_seconds"), rel=1e-6)
    assert 1e-5 < mean("homeserve_inter_token_seconds") < mean("homeserve_ttft_seconds") < WITHIN_S
    total = scraped.values('sum(homeserve_flip_seconds_sum{part="total",rank="engine"})')[()]
    told = sum(each["ms"]["total"] for each in json.loads(scraped.get("/v1/homeserve/flip"))["last"])
    assert total == pytest.approx(told / 1e3, abs=1e-3)


def test_vllms_names_say_the_same(scraped: Any) -> None:
    for theirs, ours in (
        ("vllm:prompt_tokens_total", "homeserve_prompt_tokens_total"),
        ("vllm:generation_tokens_total", "homeserve_generation_tokens_total"),
        ("vllm:time_to_first_token_seconds_count", "homeserve_ttft_seconds_count"),
        ("vllm:inter_token_latency_seconds_sum", "homeserve_inter_token_seconds_sum"),
        ("vllm:spec_decode_num_accepted_tokens_total", "homeserve_draft_accepted_total"),
        ("sum(vllm:spec_decode_num_accepted_tokens_per_pos_total)", "homeserve_draft_accepted_total"),
        ("vllm:spec_decode_num_drafts_total", "sum(homeserve_draft_rounds_total)"),
        ("sum(vllm:request_success_total)", 'homeserve_requests_total{result="finished"}'),
    ):
        assert list(scraped.values(theirs).values()) == pytest.approx(list(scraped.values(ours).values())), theirs
    assert {dict(labels)["model_name"] for labels in scraped.values('{__name__=~"vllm:.+"}')} == {"counter"}


def test_the_documentation_lists_what_there_is(scraped: Any) -> None:
    """Names with their labels and types, ours and vLLM's."""
    page = (ROOT / "docs" / "METRICS.md").read_text()
    kinds, labels = {}, {}
    for name, kind, told in re.findall(r"^\| `(homeserve_\w+)` \| (\w+) \| ([^|]*)\|", page, re.MULTILINE):
        kinds[name], labels[name] = kind, set(re.findall(r"`(\w+)`", told))
    there = list(text_string_to_metric_families(scraped.get("/metrics").decode()))
    families = {each.name + "_total" * (each.type == "counter"): each for each in there}
    ours = {name: each for name, each in families.items() if name.startswith("homeserve_")}
    assert {name: each.type for name, each in ours.items()} == kinds
    for name, each in ours.items():
        found = {label for sample in each.samples for label in sample.labels} - {"le"}
        assert found == labels[name], name
    table = page.partition("## vLLM's names")[2].partition("Bounds of")[0]
    assert set(re.findall(r"`(vllm:\w+)`", table)) == families.keys() - ours.keys()


def test_the_text_is_without_fault(scraped: Any) -> None:
    """By Prometheus's own linter; it does not like vLLM's colons."""
    lines = scraped.get("/metrics").decode().splitlines(keepends=True)
    own = "".join(line for line in lines if "vllm:" not in line)
    done = subprocess.run(["promtool", "check", "metrics"], input=own, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    whole = "".join(lines)
    done = subprocess.run(["promtool", "check", "metrics"], input=whole, capture_output=True, text=True, timeout=60)
    left = [line for line in done.stderr.splitlines() if "should not contain ':'" not in line]
    assert left == [] and "vllm:" in done.stderr


def queries() -> list[tuple[str, str]]:
    """(panel, query) of the dashboard, with its variables filled in."""
    found = []
    for panel in json.loads((DEPLOY / "grafana.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in (("$__rate_interval", "1m"), ("$job", ".*"), ("$instance", ".*")):
                query = query.replace(name, value)
            found.append((panel["title"], query))
    return found


@pytest.mark.parametrize(("panel", "query"), [pytest.param(*each, id=str(n)) for n, each in enumerate(queries())])
def test_every_panel_of_the_dashboard_shows_something(scraped: Any, panel: str, query: str) -> None:
    told = scraped.samples()
    names = re.findall(r"homeserve_\w+", query)
    assert names and "$" not in query
    for name in names:
        assert name in told, (panel, name)
    assert scraped.ask(query), f"{panel}: {query} has no series"


def test_the_dashboard_can_be_imported() -> None:
    """What Grafana asks of one: a uid, a data source that is chosen, panels with ids of their own on a grid."""
    board = json.loads((DEPLOY / "grafana.json").read_text())
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert board["uid"] == "homeserve" and board["schemaVersion"] >= 36 and "id" not in board
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids) >= 20
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] and place["x"] + place["w"] <= 24
        for target in panel.get("targets", ()):
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    shown = " ".join(query for _, query in queries())
    for part in (
        "requests_running", "generation_tokens", "ttft", "inter_token", "kv_used", "flips_total", "corridor_free",
        "corridor_floor", "restarts", "draft_accepted", "rank_seconds",
    ):  # fmt: skip
        assert part in shown, part
