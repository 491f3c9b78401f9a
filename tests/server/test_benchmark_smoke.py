"""scripts/bench from end to end, real servers on both sides: the columns of its CSV and its JSON, and a resumed run.

The peer is a homeserve too, which the benchmark can compare with; no figure is judged.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "benchmarks" / "bench.py"
COUNTER = Path(__file__).parents[1] / "data" / "counter.gguf"
TESTS = ("pp512", "ttft512", "tg@0", "conc8")
LIMITS = ("read_gb_s", "int16_gop_s", "int8_gop_s")
COLUMNS = "date,commit,device,command,engine,version,isa,settings,model,quant,threads,test,unit,run,value"
ROW = {"engine", "version", "isa", "settings", "model", "quant", "test", "unit", "layout", "draft", "runs", "median"}
RATIO = {"test", "model", "quant", "pairs", "median", "low", "high", "goal", "met"}


def bench(folder: Path, *arguments: str, code: int = 0, has_peer: bool = True, program: Path = BENCH) -> str:
    """What it printed."""
    peer = folder / "homeserve"
    peer.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m homeserve "$@"\n')
    peer.chmod(0o755)
    # A script finds the modules beside it, as from a shell; the tiers keep a started program's folder off its path.
    given = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment = given | {"XDG_CACHE_HOME": str(folder / "cache")}
    with_peer = ("--peer", str(peer)) if has_peer else ()
    command = [sys.executable, str(program), *with_peer, "--no-realtime", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == code, done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.mark.timeout(400)
def test_columns_of_csv_and_json_and_a_resumed_run(smollm2: str, tmp_path: Path) -> None:
    wanted = ("--model", smollm2, "--tests", "pp512,tg@0,conc8", "--repeat", "1", "--answer", "4")
    printed = bench(tmp_path, *wanted, "--resume", "runs.csv", "--json", "found.json")
    assert "| prefill, 512 tokens | tok/s |" in printed
    lines = (tmp_path / "runs.csv").read_text().splitlines()
    assert lines[0] == COLUMNS
    rows = list(csv.DictReader(lines))
    assert {row["test"] for row in rows if row["engine"] == "homeserve"} == set(TESTS)
    assert {row["test"] for row in rows if row["engine"] == "homeserve-peer"} == set(TESTS)
    assert {row["test"] for row in rows if row["engine"] == "machine"} == {*LIMITS, "bytes_per_token", "ops_per_token"}
    assert all(row["commit"] and row["device"] and float(row["value"]) > 0 for row in rows)
    check(json.loads((tmp_path / "found.json").read_text()))
    bench(tmp_path, *wanted, "--resume", "runs.csv")
    assert (tmp_path / "runs.csv").read_text().splitlines() == lines


def check(found: dict[str, Any]) -> None:
    assert set(found) == {"schema", "commit", "date", "command", "device", "models"} and found["schema"] == 2
    assert set(found["device"]) == {"cpu", "threads", *LIMITS}
    (model,) = found["models"]
    assert set(model) == {"model", "quant", "peer", "limits", "rows", "ratios", "searched", "noise"}
    assert [ratio["test"] for ratio in model["ratios"]] == ["pp512", "tg@0", "conc8", "ttft512"]
    assert all(set(ratio) == RATIO and ratio["median"] > 0 for ratio in model["ratios"])
    assert all(ROW <= set(row) and row["runs"] == 1 for row in model["rows"])
    decode = next(row for row in model["rows"] if (row["engine"], row["test"]) == ("homeserve", "tg@0"))
    assert decode["of_limit"]["read_gb_s"] > 0 and decode["isa"]


@pytest.mark.timeout(400)
def test_ranks_are_measured_without_a_peer(smollm2: str, tmp_path: Path) -> None:
    """Columns and JSON of `sum8k` and `tp2_vs_1x2`; beside gloo where this environment has a torch."""
    wanted = ("--model", smollm2, "--tests", "sum8k,tp2_vs_1x2", "--repeat", "1", "--answer", "4")
    printed = bench(tmp_path, *wanted, "--csv", "runs.csv", "--json", "found.json", has_peer=False)
    assert "| sum of 8 KiB between 2 ranks | us |" in printed and "| decode, 2 ranks against 1" in printed
    lines = (tmp_path / "runs.csv").read_text().splitlines()
    assert lines[0] == COLUMNS
    rows = list(csv.DictReader(lines))
    assert all(row["commit"] and row["device"] and row["command"] for row in rows)
    gloo = {"gloo"} if find_spec("torch") else set()
    assert {row["engine"] for row in rows if row["test"] == "sum8k"} == {"homeserve", *gloo}
    sides = {row["engine"]: row for row in rows if row["test"] == "tp2_vs_1x2"}
    assert sides["homeserve"]["settings"] == "--devices cpu:2 --layout tensor --threads 1"
    assert sides["homeserve-1x2"]["settings"] == "--threads 2" and sides["homeserve"]["isa"]
    assert all(float(row["value"]) > 0 for row in rows if row["test"] != "load")
    sums, pair = json.loads((tmp_path / "found.json").read_text())["models"]
    assert [row["test"] for row in sums["rows"] if row["engine"] == "homeserve"] == ["sum8k"]
    assert sums["rows"][0]["most"] == 15 and bool(sums["ratios"]) is bool(gloo)
    (ratio,) = pair["ratios"]
    assert set(ratio) == RATIO and (ratio["test"], ratio["goal"]) == ("tp2_vs_1x2", 0.9)
    assert pair["noise"]["tp2_vs_1x2"]["pairs"] == 1


@pytest.mark.timeout(400)
def test_drafting_is_measured_without_a_peer(tmp_path: Path) -> None:
    """A forced length, adaptation behind the first tokens and a kind of content, on the model that counts. Rounds
    that counted other drafts than they were to would have ended it."""
    counter = Path(__file__).parents[1] / "data" / "counter.gguf"
    tests = "draft_3,draft_new,draft_counting"
    wanted = ("--model", str(counter), "--tests", tests, "--repeat", "1")
    printed = bench(tmp_path, *wanted, "--csv", "runs.csv", "--json", "found.json", has_peer=False)
    assert "| 3 drafts, 2 count | tok/s |" in printed
    rows = list(csv.DictReader((tmp_path / "runs.csv").read_text().splitlines()))
    named = {*tests.split(","), "draft_3_ms", "draft_counting_len"}
    assert {row["test"] for row in rows if row["engine"] == "homeserve"} == named
    plain = {row["test"] for row in rows if row["engine"] == "homeserve-plain"}
    assert plain == named - {"draft_counting_len"} | {"noise:draft_new"}
    assert all(float(row["value"]) > 0 and row["commit"] for row in rows if row["test"] != "load")
    (model,) = json.loads((tmp_path / "found.json").read_text())["models"]
    assert model["model"] == "counter, drafting" and all(ROW <= set(row) for row in model["rows"])
    drafts = {(row["engine"], row["test"]): row["draft"] for row in model["rows"]}
    assert drafts["homeserve", "draft_3"] == "3" and drafts["homeserve-plain", "draft_3"] == "off"
    assert drafts["homeserve", "draft_counting"] == "auto" and drafts["homeserve", "draft_counting_len"] == "3"
    assert [ratio["test"] for ratio in model["ratios"]] == ["draft_3", "draft_3_ms", "draft_new", "draft_counting"]
    (lengths,) = (row["median"] for row in model["rows"] if row["test"] == "draft_counting_len")
    assert 2.5 < lengths <= 4


@pytest.mark.timeout(250)
def test_the_load_of_the_simulation_is_played_on_real_ranks(tmp_path: Path) -> None:
    shorter = ("--requests", "3", "--prompt-by", "128", "--answer-by", "16", "--pause-by", "0.05", "--dwell-s", "0.3")
    wanted = (str(COUNTER), "--vocab", "256", *shorter, "--csv", "runs.csv")
    printed = bench(tmp_path, *wanted, has_peer=False, program=BENCH.with_name("flip_trace.py"))
    assert "| mode | makespan s | mean TTFT s |" in printed
    rows = list(csv.DictReader((tmp_path / "runs.csv").read_text().splitlines()))
    assert [row["mode"] for row in rows] == ["pipeline", "tensor", "auto"]
    assert all(float(row[name]) > 0 for row in rows for name in ("makespan_s", "ttft_s", "per_token_ms", "whole_s"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tests", "pp513"), "no such test: pp513; there is pp512"),
        (("--models", "falcon"), "no such model: falcon; there is SmolLM2"),
        (("--model", "none.gguf"), "none.gguf"),
    ],
)
def test_what_is_not_there_is_said(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    printed = bench(tmp_path, *arguments, code=1)
    assert words in printed and "Traceback" not in printed
