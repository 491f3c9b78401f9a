"""`homeserve bench` with real servers: its own and those that run, of one rank and of two, ours and another's.

No figure is judged: only that each is there, that what cannot be measured says why, and that nothing is left behind.
"""

from __future__ import annotations

import json
import signal
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from homeserve.bench.document import from_csv

COUNTER = str(Path(__file__).parents[1] / "data" / "counter.gguf")
SMALL = ("--context", "512", "--kv-tokens", "4096", "--threads", "1")
PATIENCE_S = 200.0


def bench(box: Any, *argv: str, code: int = 0) -> Any:
    """The ended run."""
    run = box.start("bench", *argv)
    assert run.wait(PATIENCE_S) == code, run.err
    return run


def rows_of(found: dict[str, Any]) -> dict[tuple[str, str | None, str], dict[str, Any]]:
    return {(row["test"], row["layout"], row["unit"]): row for row in found["rows"]}


@pytest.mark.timeout(300)
def test_a_temporary_server_of_two_ranks_is_measured_in_both_layouts_and_ended(box: Any, tmp_path: Path) -> None:
    files = {name: tmp_path / f"found.{name}" for name in ("json", "csv", "svg")}
    written = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    tests = "pp64,tg8@0,tg8@64,conc2,ttft64,start,rss,flip"
    run = bench(box, COUNTER, "--tests", tests, "--repeat", "2", "--devices", "cpu:2", *SMALL, *written)
    assert run.left_behind() == []
    found = json.loads(files["json"].read_text())
    assert found["schema"] == 1 and found["complete"] and found["ratios"] == [] and found["date"]
    assert found["command"] == f"homeserve bench counter.gguf --tests {tests} --repeat 2 " + (
        "--context 512 --threads 1 --kv-tokens 4096 --devices cpu:2"
    )
    assert set(found["device"]) == {"cpu", "isa", "cores", "read_gb_s"} and found["device"]["cores"] >= 1
    assert found["load"]["cores"] >= 1 and found["model"]["params"] > 1e6 and found["model"]["size_bytes"] > 1e6
    rows = rows_of(found)
    asked = [
        (name, layout, "tok/s") for layout in ("pipeline", "tensor") for name in ("pp64", "tg8@0", "tg8@64", "conc2")
    ]
    asked += [("ttft64", layout, "ms") for layout in ("pipeline", "tensor")]
    asked += [("flip", layout, unit) for layout in ("pipeline", "tensor") for unit in ("ms", "MiB/s")]
    assert set(rows) == {*asked, ("start", None, "s"), ("rss", None, "MiB")}
    for row in rows.values():
        assert row["why"] is None and row["runs"] == 2 and 0 < row["p10"] <= row["median"] <= row["p90"], row
        assert (row["engine"], row["model"], row["quant"]) == ("homeserve", "counter", "F16")
    read = from_csv(files["csv"].read_text())
    assert [(row.test, row.layout, row.median) for row in read] == [
        (row["test"], row["layout"], row["median"]) for row in found["rows"]
    ]
    assert ElementTree.parse(files["svg"]).getroot().tag.endswith("svg")
    assert "tg8@64 tensor" in run.out and "\x1b" not in run.out + run.err


@pytest.mark.timeout(300)
def test_a_running_server_is_asked_and_stays_as_it_was(box: Any, tiny: str) -> None:
    keys = box.folder / "keys"
    keys.write_text("secret\n")
    server = box.up(tiny, "--max-running", "2", "--max-waiting", "0", "--api-key-file", str(keys), *SMALL)
    key = ("--api-key-file", str(keys))
    tests = "pp64,pp4096,conc2,conc32,start,rss,flip,tg8@16"
    run = bench(box, "--url", f"{server.url}/v1", "--tests", tests, "--repeat", "1", "--json", "-", *key)
    rows = rows_of(json.loads(run.out))
    for name, unit in (("pp64", "tok/s"), ("conc2", "tok/s"), ("rss", "MiB"), ("tg8@16", "tok/s")):
        assert rows[name, None, unit]["median"] > 0, run.err
    why = {test: row["why"] for (test, _, _), row in rows.items() if row["runs"] == 0}
    assert set(why) == {"pp4096", "conc32", "start", "flip"}
    assert "context" in why["pp4096"] and "queue is full" in why["conc32"]
    assert "runs already" in why["start"] and "at least 2 ranks" in why["flip"]
    assert "pp4096" in run.err and "not measured" in run.err, "the table leaves stdout to the JSON"
    refused = bench(box, "--url", server.url, "--tests", "pp16", code=2)
    assert "wants an API key" in refused.err and "--api-key-file" in refused.err
    assert server.process.poll() is None


@pytest.mark.timeout(300)
def test_steps_are_measured_with_1_and_64_streams(box: Any) -> None:
    own = (COUNTER, "--tests", "step", "--repeat", "1", "--json", "-", "--threads", "1", "--draft", "off")
    run = bench(box, *own, "--context", "4096", "--kv-tokens", "16384")
    rows = rows_of(json.loads(run.out))
    assert set(rows) == {(f"step{part}", None, "ms") for part in ("", "_gap", "64", "_gap64")}
    assert all(row["median"] is not None or "streams were open" in row["why"] for row in rows.values()), run.out
    assert "--max-running 64" in run.err and run.left_behind() == []


@pytest.mark.timeout(300)
def test_ctrl_c_keeps_what_is_known_and_ends_the_temporary_server(box: Any, wait_until: Any) -> None:
    run = box.start("bench", COUNTER, "--tests", "pp16,tg64@0", "--repeat", "1000", "--json", "-", *SMALL)
    wait_until("a row", lambda: "backend" in run.err)
    run.send(signal.SIGINT)
    assert run.wait(PATIENCE_S) == 130, run.err
    found = json.loads(run.out)
    assert found["complete"] is False
    assert [row["test"] for row in found["rows"]] in ([], ["pp16"], ["pp16", "tg64@0"])
    assert "interrupted" in run.err and "Traceback" not in run.err and run.left_behind() == []


@pytest.mark.timeout(300)
def test_ctrl_c_while_the_temporary_server_starts_leaves_nothing(box: Any, wait_until: Any) -> None:
    run = box.start("bench", COUNTER, "--tests", "pp16")
    wait_until("start", lambda: "starting a temporary server" in run.err)
    run.send(signal.SIGTERM)
    assert run.wait(PATIENCE_S) == 130, run.err
    assert run.out == "" and "Traceback" not in run.err and run.left_behind() == []


@pytest.mark.timeout(300)
def test_a_server_that_dies_ends_the_run_with_what_is_known(box: Any, tiny: str, wait_until: Any) -> None:
    server = box.up(tiny, *SMALL)
    run = box.start("bench", "--url", server.url, "--tests", "pp16,tg64@0", "--repeat", "1000", "--json", "-")
    wait_until("the table", lambda: "backend" in run.err)
    server.process.kill()
    assert run.wait(PATIENCE_S) == 3, run.err
    assert "the server went away" in run.err and "Traceback" not in run.err
    found = json.loads(run.out)
    assert found["complete"] is False and "went away" in found["rows"][-1]["why"]


# ------------------------------------------------------------------------------------------------- servers of others


class Other(BaseHTTPRequestHandler):
    """As little as another server may have: models, /tokenize, completions of the tokens that are asked for."""

    tokenizes = True
    answers = 1.0
    """Share of the tokens that are asked for which come."""

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            return self._json(200, {"data": [{"id": "other", "owned_by": "llamacpp", "meta": {"n_params": 9000}}]})
        self._json(404, {"error": {"message": "File Not Found", "code": 404}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize" and self.tokenizes:
            return self._json(200, {"tokens": [5 + ord(letter) for letter in body["content"]]})
        if self.path != "/v1/completions":
            return self._json(404, {"error": {"message": "File Not Found", "code": 404}})
        self.send_response(200)
        self.end_headers()
        count = int(body["max_tokens"] * self.answers)
        events: list[dict[str, Any]] = [{"choices": [{"text": "x"}]} for _ in range(count)]
        events.append({"choices": [], "usage": {"completion_tokens": count, "prompt_tokens": len(body["prompt"])}})
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()

    def _json(self, status: int, told: Any) -> None:
        text = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def other(**has: Any) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Playing", (Other,), has)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def measured(box: Any, url: str) -> dict[str, dict[str, Any]]:
    tests = ("--tests", "pp64,tg8@0,conc2,rss,flip,step", "--repeat", "1", "--json", "-")
    return {row["test"]: row for row in json.loads(bench(box, "--url", url, *tests).out)["rows"]}


def test_another_server_is_measured_in_what_can_be_measured(box: Any) -> None:
    with other() as url:
        rows = measured(box, url)
    assert all(rows[name]["median"] > 0 and rows[name]["engine"] == "llama-server" for name in ("pp64", "conc2"))
    assert "homeserve ps" in rows["rss"]["why"]
    assert all("it is no homeserve" in rows[name]["why"] for name in ("flip", "step", "step64"))


def test_what_another_server_lacks_is_said(box: Any) -> None:
    with other(tokenizes=False) as url:
        assert "has no /tokenize" in measured(box, url)["pp64"]["why"]
    with other(answers=0.5) as url:
        assert measured(box, url)["tg8@0"]["why"] == "asked for 8 tokens and got 4"


def test_a_server_that_is_away_is_said(box: Any) -> None:
    run = bench(box, "--url", "http://127.0.0.1:9", "--json", "-", code=2)
    error = json.loads(run.out)["error"]
    assert error["field"] == "url" and "no server answers" in error["message"] and error["fix"]
