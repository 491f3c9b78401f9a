"""Several models in one server: loaded when they are wanted, unloaded when their memory or their time is up.

A budget for one: a control group in which one of the models fits, and two do not. Without such groups what needs one is
skipped; what is left runs in the box as it is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from box import Box, Run, children, wait_until

MIB = 1 << 20
COUNTER = Path(__file__).parents[1] / "data" / "counter.gguf"
GROUP_MIB = 640
"""Holds one model with the large pool (some 420 MiB) and a small one, and not two large ones."""
LARGE = 'kv_tokens = 163840\ncontext = 4096\nkv_type = "f16"\ndraft = "off"'
SMALL = "kv_tokens = 2048\ncontext = 1024"
COUNTING = " 6 7 8 9"


class Models(Box):
    """Servers with a homeserve.toml."""

    def serve(self, toml: str, *argv: str, inside: Any = None, ready: bool = True, **environ: str) -> Run:
        """`homeserve up` beside this file. `FILE` in it is a real model's path."""
        model = self.folder / "counter.gguf"
        if not model.exists():
            shutil.copy(COUNTER, model)
        config = self.folder / "config" / "homeserve"
        config.mkdir(parents=True, exist_ok=True)
        (config / "homeserve.toml").write_text(toml.replace("FILE", str(model)))
        run = self.start("up", *argv, inside=inside, XDG_CONFIG_HOME=str(config.parent), **environ)
        if ready:
            run.wait_ready()
        return run


def entries(**models: str) -> str:
    """`[[models]]`, by id: further lines of each."""
    return "\n".join(f'[[models]]\nid = "{name}"\npath = "FILE"\n{more}' for name, more in models.items())


def slow(path: str) -> str:
    """The entry of a model that takes milliseconds for each token."""
    return f'[[models]]\nid = "odd"\npath = "{path}"\nkv_tokens = 4096\ncontext = 4096\n'


@pytest.fixture
def models(tmp_path: Path) -> Iterator[Models]:
    made = Models(tmp_path)
    yield made
    made.close()


@contextmanager
def client_of(run: Run, retries: int = 0) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{run.url}/v1", api_key="none", max_retries=retries, timeout=100) as made:
        yield made


def ask(run: Run, model: str | None, **more: Any) -> tuple[int, Any]:
    """A short answer of this model: status and body."""
    body = {"prompt": "1 2 3 4 5", "max_tokens": 8, "temperature": 0, **more} | ({"model": model} if model else {})
    return post(run, "/v1/completions", body)


def post(run: Run, path: str, body: Any = None) -> tuple[int, Any]:
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(run.url + path, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=100) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            told = json.load(error)
            told["headers"] = dict(error.headers)
            return error.code, told


def states(run: Run) -> dict[str, str]:
    return {each["id"]: each["homeserve"]["state"] for each in run.get("/v1/models")[1]["data"]}


def of_status(run: Run, model: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in run.get("/v1/homeserve/status")[1]["models"] if each["id"] == model)
    return found


def loads(run: Run) -> int:
    """How many models were loaded since the start."""
    return run.err.count(": loading a model")


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / MIB


def end(run: Run) -> None:
    """It drains and leaves nothing."""
    run.send(signal.SIGTERM)
    assert run.wait() == 0, run.err
    assert run.left_behind() == []


class Long:
    """A stream of many tokens of the default model, read in a thread: it takes some ten seconds."""

    def __init__(self, run: Run, model: str) -> None:
        self.began, self.error, self.events = threading.Event(), "", 0
        self._thread = threading.Thread(target=self._read, args=(run, model), daemon=True)
        self._thread.start()
        assert self.began.wait(60), "a first token"

    def _read(self, run: Run, model: str) -> None:
        asked = {"model": model, "prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        body = json.dumps(asked).encode()
        request = urllib.request.Request(f"{run.url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=100) as answer:
            for line in answer:
                self.events += line.startswith(b"data: {")
                self.began.set()
                if b'"error"' in line:
                    self.error = line.decode()

    def wait(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


# -------------------------------------------------------------------------------------------------- a budget for one


def test_fifty_requests_in_turn_are_answered_within_the_budget_of_one(models: Models, limited_group: Any) -> None:
    """Every other request is for the other model, so each is loaded 25 times; the memory is the plan's all the while,
    and afterwards nothing is left of a model that is out."""
    group = limited_group(GROUP_MIB * MIB)
    run = models.serve(entries(odd=LARGE, even=LARGE), "--floor-mib", "16", inside=group.inside)
    sizes: list[float] = []
    with client_of(run) as client:
        for turn in range(50):
            model = ("odd", "even")[turn % 2]
            answer = client.completions.create(model=model, prompt="1 2 3 4 5", max_tokens=8, temperature=0)
            assert answer.choices[0].text == COUNTING and answer.model == model
            assert states(run) == {model: "loaded", ("even", "odd")[turn % 2]: "unloaded"}
            sizes.append(rss_mib(run.pid))
            if turn % 10 == 3:
                total = run.get("/v1/homeserve/budget")[1]["measured_total"]
                assert total["smaps_mib"] <= total["predicted_mib"] + total["later_mib"], total
                assert total["cgroup_mib"] is None or total["cgroup_mib"] <= GROUP_MIB - 16, total
    assert loads(run) == run.err.count(": unloading a model") == 49
    (device,) = run.get("/v1/homeserve/corridor")[1]["devices"]
    assert device["breaches"] == 0 and device["min_free_mib"] >= 16, device
    assert max(sizes[30:]) <= max(sizes[10:20]) + 4, f"20 swaps later the engine holds no more: {sizes}"
    assert run.get("/v1/homeserve/census")[1]["ok"]
    mine = [path.name for path in Path("/dev/shm").glob(f"homeserve-{run.pid}-*")]
    assert len(mine) == len(run.get("/v1/homeserve/census")[1]["shared_memory"]), mine
    stat = subprocess.run(["ps", "-o", "stat=", "--ppid", str(run.pid)], capture_output=True, text=True, check=False)
    assert "Z" not in stat.stdout, stat.stdout
    end(run)


def test_a_crowd_for_both_is_answered_and_nobody_starves(models: Models, limited_group: Any) -> None:
    group = limited_group(GROUP_MIB * MIB)
    run = models.serve(entries(odd=LARGE, even=LARGE), "--floor-mib", "16", inside=group.inside)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda turn: ask(run, ("odd", "even")[turn % 2]), range(48)))
    assert [status for status, _ in answers] == [200] * 48
    assert all(body["choices"][0]["text"] == COUNTING for _, body in answers)
    assert 1 <= loads(run) <= 47, "those that wait share a load"
    end(run)


def test_under_load_an_unload_waits_or_refuses(models: Models, limited_group: Any, smollm2: str) -> None:
    group = limited_group(GROUP_MIB * MIB)
    limits = ("--floor-mib", "16", "--model-wait-s", "4", "--drain-timeout-s", "1")
    run = models.serve(slow(smollm2) + entries(even=LARGE, small=SMALL), *limits, inside=group.inside)
    long = Long(run, "odd")
    status, told = post(run, "/v1/homeserve/models/odd/unload")
    assert status == 409 and told["error"]["code"] == "model_in_use" and told["error"]["running"] == 1, told
    began = time.monotonic()
    status, told = ask(run, "even")
    assert status == 503 and told["error"]["code"] == "model_waits", told
    assert "'odd'" in told["error"]["message"] and told["headers"]["Retry-After"] == "5"
    assert 3.9 < time.monotonic() - began < 30
    assert states(run)["odd"] == "loaded" and not long.error, "who is busy was not hurt"
    assert ask(run, "odd")[0] == 200, "and takes requests again once nobody waits"
    waiting = ThreadPoolExecutor(1).submit(ask, run, "even")
    wait_until("a request that waits", lambda: of_status(run, "even")["waiting"] == 1)
    assert ask(run, "small")[0] == 200, "who fits beside both overtakes"
    assert not waiting.done() and states(run)["odd"] == "loaded"
    status, told = post(run, "/v1/homeserve/models/odd/unload", {"force": True})
    assert (status, told["state"]) == (202, "unloading"), told
    assert waiting.result(60)[0] == 200
    long.wait()
    assert "model_unloaded" in long.error, "a stream that is cut off hears why"
    assert states(run) == {"odd": "unloaded", "even": "loaded", "small": "loaded"}
    end(run)


def test_what_does_not_fit_is_refused_and_the_others_stay(models: Models, limited_group: Any) -> None:
    group = limited_group(GROUP_MIB * MIB)
    toml = entries(first=SMALL, large=LARGE, second=SMALL, huge=LARGE.replace("163840", "655360"))
    run = models.serve(toml, "--floor-mib", "16", inside=group.inside)
    status, told = ask(run, "huge")
    assert status == 507 and told["error"]["code"] == "does_not_fit", told
    assert re.search(r"would hold \d+ MiB on .* MiB are missing: .* \+ kv \d+ \+ ", told["error"]["message"]), told
    assert told["headers"]["x-should-retry"] == "false"
    assert states(run) == {"first": "loaded", "large": "unloaded", "second": "unloaded", "huge": "failed"}
    assert "does not fit" in of_status(run, "huge")["reason"]
    pid = run.get("/v1/homeserve/status?model=first")[1]["ranks"][0]["pid"]
    assert ask(run, "large")[0] == 200
    assert states(run)["first"] == "loaded", "they fit beside one another"
    assert ask(run, "first")[0] == 200
    assert run.get("/v1/homeserve/status?model=first")[1]["ranks"][0]["pid"] == pid, "it was never out"
    assert ask(run, "second")[0] == 200
    inside = {name for name, state in states(run).items() if state == "loaded"}
    assert inside == {"first", "second"}, "the one used longest ago made room, and that was enough"
    body = run.get("/v1/homeserve/budget")[1]
    assert body["measured_all"]["smaps_mib"] <= body["measured_all"]["predicted_mib"], body["measured_all"]
    end(run)


# ------------------------------------------------------------------------------------------------- in the box as it is


def test_two_that_fit_stay_and_the_one_used_last_is_meant(models: Models) -> None:
    run = models.serve(entries(odd=SMALL, even=SMALL, third=SMALL))
    assert states(run) == {"odd": "loaded", "even": "unloaded", "third": "unloaded"}
    assert ask(run, None)[1]["model"] == "odd"
    with ThreadPoolExecutor(8) as pool:
        assert {status for status, _ in pool.map(lambda _: ask(run, "even"), range(8))} == {200}
    assert loads(run) == 1, "all who wait share a load"
    assert ask(run, None)[1]["model"] == "even"
    assert states(run) == {"odd": "loaded", "even": "loaded", "third": "unloaded"}
    assert run.get("/v1/homeserve/status")[1]["model"]["id"] == "even"
    assert run.get("/v1/homeserve/status?model=odd")[1]["model"]["id"] == "odd"
    for path in ("status", "census", "budget", "flip"):
        assert run.get(f"/v1/homeserve/{path}?model=nobody")[0] == 404, path
        status, told = run.get(f"/v1/homeserve/{path}?model=third")
        assert (status, told["error"]["code"]) == (409, "model_not_loaded"), path
    every = run.get("/v1/homeserve/budget")[1]["measured_all"]
    assert every["models"] == 2 and every["smaps_mib"] <= every["predicted_mib"], every
    with urllib.request.urlopen(f"{run.url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    assert 'homeserve_model_state{model="even",state="loaded"} 1.0' in text
    assert 'homeserve_model_state{model="third",state="unloaded"} 1.0' in text
    (listed,) = json.loads(models.run("ps", "--json").out)
    assert listed["model"] == "even, odd", "the one used last first"
    end(run)


def test_unknown_names_and_files_that_are_none(models: Models) -> None:
    broken = models.folder / "broken.gguf"
    broken.write_bytes(COUNTER.read_bytes()[:5000])
    toml = entries(good=SMALL) + '\n[[models]]\nid = "gone"\npath = "nowhere.gguf"\n'
    run = models.serve(toml + f'[[models]]\nid = "broken"\npath = "{broken}"')
    status, told = ask(run, "nobody")
    assert (status, told["error"]["code"]) == (404, "model_not_found")
    assert told["error"]["message"].endswith("there is: good, gone, broken")
    for name, why in (("gone", "there is no model"), ("broken", "broken.gguf")):
        for _ in range(2):  # the next request tries again
            status, told = ask(run, name)
            assert (status, told["error"]["code"]) == (500, "model_load_failed"), told
            assert why in told["error"]["message"] and told["headers"]["x-should-retry"] == "false"
        assert states(run)[name] == "failed" and why in of_status(run, name)["reason"]
    broken.write_bytes(COUNTER.read_bytes())
    assert ask(run, "broken")[0] == 200, "it is a model now"
    assert ask(run, "good")[0] == 200
    end(run)


def test_an_idle_model_is_unloaded_and_comes_back(models: Models) -> None:
    run = models.serve(entries(stays=SMALL, goes=f"{SMALL}\nttl_s = 1"))
    for _ in range(2):
        assert ask(run, "goes")[0] == 200
        worker = run.get("/v1/homeserve/status?model=goes")[1]["ranks"][0]["pid"]
        wait_until("an unload", lambda: states(run)["goes"] == "unloaded")
        assert worker not in children(run.pid)
    assert states(run)["stays"] == "loaded"
    end(run)


def test_by_hand(models: Models) -> None:
    run = models.serve(entries(odd=SMALL, even=SMALL))
    status, told = post(run, "/v1/homeserve/models/even/load")
    assert (status, told["state"]) == (202, "loading"), told
    wait_until("a load", lambda: states(run)["even"] == "loaded")
    assert post(run, "/v1/homeserve/models/even/load")[0] == 200
    status, told = post(run, "/v1/homeserve/models/odd/unload")
    assert (status, told["state"]) == (202, "unloading"), told
    wait_until("an unload", lambda: states(run)["odd"] == "unloaded")
    status, told = post(run, "/v1/homeserve/models/odd/unload")
    assert (status, told["state"]) == (200, "unloaded"), told
    post(run, "/v1/homeserve/models/even/unload")
    wait_until("nothing is in", lambda: set(states(run).values()) == {"unloaded"})
    assert run.get("/ready")[0] == 200 and run.get("/v1/homeserve/status")[1]["model"]["id"] is None
    assert run.get("/v1/homeserve/budget")[1]["error"]["code"] == "model_not_loaded"
    assert ask(run, None)[1]["model"] == "even", "the one used last comes back"
    for path in ("load", "unload"):
        status, told = post(run, f"/v1/homeserve/models/nobody/{path}")
        assert (status, told["error"]["code"]) == (404, "model_not_found")
    end(run)


def test_one_model_loses_its_worker_and_the_other_answers(models: Models, smollm2: str) -> None:
    run = models.serve(slow(smollm2) + entries(even=SMALL), "--drain-timeout-s", "1")
    assert ask(run, "even")[0] == 200
    long = Long(run, "odd")
    os.kill(run.get("/v1/homeserve/status?model=odd")[1]["ranks"][0]["pid"], signal.SIGKILL)
    for _ in range(5):
        assert ask(run, "even")[1]["choices"][0]["text"] == COUNTING
    before = long.events
    wait_until("the stream goes on", lambda: long.events > before + 10)
    assert run.get("/v1/homeserve/status?model=odd")[1]["ranks"][0]["restarts"] == 1
    assert post(run, "/v1/homeserve/models/odd/unload", {"force": True})[0] == 202
    assert run.process.poll() is None
    end(run)


def test_a_model_that_gives_up_has_failed_and_the_server_lives(models: Models) -> None:
    """The file of one goes away, and then its worker does, which does not come up again."""
    lost = models.folder / "lost.gguf"
    shutil.copy(COUNTER, lost)
    run = models.serve(entries(stays=SMALL) + f'\n[[models]]\nid = "lost"\npath = "{lost}"\n{SMALL}')
    assert ask(run, "lost")[0] == 200
    lost.unlink()
    os.kill(run.get("/v1/homeserve/status?model=lost")[1]["ranks"][0]["pid"], signal.SIGKILL)
    wait_until("it gives up", lambda: states(run)["lost"] == "failed")
    assert "lost.gguf" in of_status(run, "lost")["reason"]
    assert ask(run, "stays")[0] == 200
    assert ask(run, "lost")[1]["error"]["code"] == "model_load_failed"
    shutil.copy(COUNTER, lost)
    assert ask(run, "lost")[0] == 200
    end(run)


def test_a_load_under_way_is_ended_by_ctrl_c_and_leaves_nothing(models: Models) -> None:
    slow = {"HOMESERVE_TESTING": "1", "HOMESERVE_FAULT": "rank=0,step=load,nth=1,action=delay:3000"}
    run = models.serve(entries(odd=SMALL, even=SMALL), **slow)
    waiting = ThreadPoolExecutor(1).submit(ask, run, "even")
    wait_until("a load", lambda: of_status(run, "even")["state"] == "loading" and len(children(run.pid)) >= 3)
    assert ask(run, "odd")[0] == 200, "who waits is in nobody's way"
    run.send(signal.SIGINT)
    status, told = waiting.result(60)
    assert (status, told["error"]["code"]) == (503, "draining"), told
    assert run.wait() == 0, run.err
    assert run.left_behind() == []
