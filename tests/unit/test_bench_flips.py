"""The flip test of scripts/bench: what is asked, and which numbers are made of the server's records."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from test_bench_ranks import Kept

from homeserve.bench import flips
from homeserve.bench.client import Refused
from homeserve.bench.prompts import Prompts

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "benchmarks"))

import bench  # noqa: E402
import flip_tests  # noqa: E402
import rank_tests  # noqa: E402
import report  # noqa: E402
from measures import RESULTS  # noqa: E402

MIB = 1 << 20


def record(live_mib: int) -> dict[str, Any]:
    """Of two ranks: 10 MB filled in 2 and 4 ms, each MiB packed in 1 and written in 1 ms by the slower one."""
    return {
        "state": "committed",
        "reason": None,
        "live": {"rows": live_mib},
        "ms": {"total": 12.0 + 3.0 * live_mib},
        "ranks": [
            {
                "sent_bytes": live_mib * MIB // 4,
                "local_bytes": live_mib * MIB // 4,
                "refill_bytes": 5_000_000,
                "parts_ms": {
                    "pack": live_mib / slower,
                    "write_kv": 0.75 * live_mib / slower,
                    "write_state": 0.25 * live_mib / slower,
                    "refill": 4.0 / slower,
                },
            }
            for slower in (1, 2)
        ],
    }


class Asked:
    """Stands for a server: flips that move `live` MiB once prompts have come."""

    engine, settings, url = "homeserve", "--flip manual", "http://127.0.0.1:1"

    def __init__(self, live: int) -> None:
        self.live, self.prompts = live, 0
        self.flips: list[str] = []

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/completions":
            assert len(body["prompt"]) == flip_tests.PROMPT and body["max_tokens"] == 1
            self.prompts += 1
            return {}
        self.flips.append(body["to"])
        return {"url": f"/v1/homeserve/flip/{len(self.flips)}"}

    def get(self, path: str) -> dict[str, Any]:
        return record(self.live if self.prompts else 0)


def measured(monkeypatch: pytest.MonkeyPatch, live: int, runs: int = 2) -> tuple[Asked, Kept]:
    asked, kept = Asked(live), Kept("a model, 2 ranks, flips")
    monkeypatch.setattr(flip_tests, "copied_gb_s", lambda threads, size: 8.0)
    prompts = Prompts(random.Random(1), range(1000))
    flip_tests.measure_flips(asked, runs, prompts, 2, kept)  # type: ignore[arg-type]
    return asked, kept


def test_numbers_are_those_of_the_slower_rank_and_of_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, kept = measured(monkeypatch, live=6)
    assert asked.flips == ["tensor", "pipeline"] * 6 and asked.prompts == flip_tests.LANES
    found = {(each.test, each.run): (each.value, each.unit) for each in kept.samples if each.engine == "homeserve"}
    for run in range(2):
        assert found["flip", run] == (8.0, "ms"), "4 of 12 ms are the refill of the slower one"
        assert found["flip_total", run] == (12.0, "ms")
        assert found["flip_refill", run] == (2.5, "GB/s"), "both ranks' bytes"
        assert found["flip_move", run] == (pytest.approx(2 * 6 * MIB / 12e6), "GB/s"), "each byte twice"
        assert found["flip_mib", run] == (pytest.approx(3.0), "ms/MiB")
    copies = [each for each in kept.samples if each.engine == "machine"]
    assert [(each.test, each.run) for each in copies] == [("copy_gb_s", run) for run in range(4)]
    model = report.report(kept.samples)["models"][0]
    assert [row["test"] for row in model["rows"]] == list(flip_tests.TESTS) and model["limits"] == {"copy_gb_s": 8.0}
    rates = {row["test"]: row["of_limit"] for row in model["rows"]}
    assert rates["flip_refill"] == {"copy_gb_s": 31.2} and rates["flip"] is None
    page = report.table(model)
    assert "31 % of copying, at least 70: missed" in page and "at most 20 ms: met" in page


def test_rows_that_do_not_move_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(flips.FlipFailed, match="moved nothing"):
        measured(monkeypatch, live=0)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (Refused(409, "flip_off", "there is one layout"), "refused \\(409\\): there is one layout \\[flip_off\\]"),
        ({"url": "u"}, "is abandoned: a rank said no"),
    ],
)
def test_a_flip_that_is_refused_or_given_up_ends_it(monkeypatch: pytest.MonkeyPatch, told: Any, words: str) -> None:
    server = Asked(1)

    def post(path: str, body: dict[str, Any]) -> Any:
        if isinstance(told, Refused):
            raise told
        return told

    monkeypatch.setattr(server, "post", post)
    monkeypatch.setattr(server, "get", lambda _: {"state": "abandoned", "reason": "a rank said no"})
    with pytest.raises(flips.FlipFailed, match=words):
        flips.flip(server, "tensor")  # type: ignore[arg-type]


def test_the_server_flips_when_it_is_asked_and_keeps_what_prompts_left(tmp_path: Path) -> None:
    server = flip_tests.server_of(tmp_path / "m.gguf", 2, tmp_path, ("homeserve",), "avx2")
    words = " ".join(server.command)
    for part in ("--devices cpu:2", "--threads 1 ", "--flip manual", "--prefix-cache on", "--layout pipeline"):
        assert part in words
    assert "--kv-tokens 8192" in words and flip_tests.LANES * flip_tests.PROMPT < 8192


def test_it_is_a_test_of_ranks_that_needs_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_tests.wanted("flip", full=False) == {"flip"} and rank_tests.no_peer_needed("flip")
    assert set(flip_tests.TESTS) <= RESULTS.keys()
    monkeypatch.setattr(sys, "argv", ["scripts/bench", "--tests", "flip", "--repeat", "1"])
    options = bench.arguments()
    kept = Kept("m.Q8_0, 2 ranks, flips")
    kept("homeserve", "flip_mib", "ms/MiB", 0, 1.0)
    run = bench.Run(options, bench.wanted(options), kept.samples)
    monkeypatch.setattr(flip_tests, "server_of", lambda *_: pytest.fail("measured again"))
    run.flips("m.Q8_0", Path("m.gguf"))


def test_copying_is_measured_with_real_memory() -> None:
    assert 0.01 < flip_tests.copied_gb_s(2, 1 << 20) < 10_000
