"""A server from its first line to its last: what it prints, its files, ps, down, chat, signals, a lost worker."""

from __future__ import annotations

import json
import os
import shlex
import signal
import stat
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest


def wait_state(run: Any, wanted: str, wait_until: Any) -> dict[str, Any]:
    return wait_until(wanted, lambda: (found := run.get("/v1/homeserve/status")[1])["state"] == wanted and found)


def stream(run: Any, tokens: int, model: str = "x") -> Any:
    """An open streamed completion that does not end by itself."""
    body = {"model": model, "prompt": "a", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"{run.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=60)


def model_of(run: Any) -> str:
    return str(json.loads(run.ready_file.read_text())["model"])


def test_up_tells_in_order_and_its_curl_answers_paris(box: Any, smollm2: str, wait_until: Any) -> None:
    run = box.up(smollm2)
    facts = json.loads(run.ready_file.read_text())
    assert set(facts) == {"schema", "url", "port", "pid", "model"}
    assert (facts["pid"], facts["url"]) == (run.pid, f"http://127.0.0.1:{facts['port']}")
    wait_until(
        "what it says when it is ready",
        lambda: any(line.strip().startswith("curl ") for line in run.out.splitlines()[:-1]),
    )
    heads = [line.split()[0] for line in run.out.splitlines() if line and not line.startswith(" ")]
    assert [heads.index(word) for word in ("box", "model", "plan", "load", "ready")] == sorted(
        heads.index(word) for word in ("box", "model", "plan", "load", "ready")
    )
    (command,) = [line.strip() for line in run.out.splitlines() if line.strip().startswith("curl ")]
    words = shlex.split(command)
    request = urllib.request.Request(
        words[1], words[words.index("-d") + 1].encode(), dict([words[words.index("-H") + 1].split(": ")])
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        told = json.load(answer)
    assert "Paris" in told["choices"][0]["message"]["content"]
    run.send(signal.SIGINT)
    assert run.wait() == 0
    assert run.left_behind() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_drains_open_streams(box: Any, tiny: str, number: int) -> None:
    run = box.up(tiny)
    with stream(run, 200, model_of(run)) as answer:
        answer.readline()
        run.send(number)
        lines = answer.read().splitlines()
    assert lines[-2] == b"data: [DONE]" or lines[-1] == b"data: [DONE]"
    assert run.wait() == 0
    assert run.left_behind() == []


def test_a_second_ctrl_c_hurries(box: Any, smollm2: str) -> None:
    run = box.up(smollm2, "--drain-timeout-s", "600")
    with stream(run, 4000, model_of(run)) as answer:
        for _ in range(4):
            answer.readline()
        run.send(signal.SIGINT)
        for _ in range(8):
            answer.readline()
        assert run.process.poll() is None
        run.send(signal.SIGINT)
        answer.read()
    assert run.wait() == 0
    assert run.left_behind() == []


def test_while_it_drains_new_requests_are_refused(box: Any, smollm2: str) -> None:
    run = box.up(smollm2)
    url, model = run.url, model_of(run)
    with stream(run, 4000, model) as answer:
        answer.readline()
        run.send(signal.SIGTERM)
        for _ in range(8):
            answer.readline()
        with pytest.raises(urllib.error.HTTPError) as caught:
            request = urllib.request.Request(
                f"{url}/v1/completions",
                json.dumps({"model": model, "prompt": "a"}).encode(),
                {"content-type": "application/json"},
            )
            urllib.request.urlopen(request, timeout=60)
        with caught.value as refusal:
            assert refusal.code == 503
        run.send(signal.SIGTERM)
    assert run.wait() == 0


def test_health_is_503_with_progress_until_ready(box: Any, tiny: str) -> None:
    environ = {"HOMESERVE_TESTING": "1", "HOMESERVE_FAULT": "rank=0,step=load,nth=1,action=delay:1500"}
    run = box.start("up", tiny, **environ)
    from_record = None
    seen: set[tuple[int, str]] = set()
    while not run.ready_file.exists():
        assert run.process.poll() is None, run.err
        records = list((box.folder / "0" / "home").glob("**/run/*.json"))
        if not records:
            continue
        from_record = json.loads(records[0].read_text())
        try:
            with urllib.request.urlopen(f"{from_record['url']}/health", timeout=60) as answer:
                seen.add((answer.status, json.load(answer)["status"]))
        except urllib.error.HTTPError as error:
            with error:
                told = json.load(error)
            assert {"status", "stage", "done_bytes", "total_bytes"} <= set(told)
            seen.add((error.code, told["status"]))
    assert (503, "loading") in seen
    assert run.get("/health")[0] == 200 and run.get("/ready")[0] == 200


def test_ps_and_down(box: Any, tiny: str) -> None:
    first, second = box.up(tiny), box.up(tiny, "--model-id", "other")
    listed = box.run("ps", "--json")
    found = {entry["pid"]: entry for entry in json.loads(listed.out)}
    assert set(found) == {first.pid, second.pid}
    assert found[second.pid]["model"] == "other" and found[first.pid]["state"] == "ready"
    assert set(found[first.pid]) == {"pid", "port", "url", "model", "state", "started"}
    ports = [json.loads(run.ready_file.read_text())["port"] for run in (first, second)]
    unclear = box.run("down")
    assert unclear.process.returncode == 2
    assert all(str(port) in unclear.err for port in ports)
    assert box.run("down", "--port", str(ports[0])).process.returncode == 0
    assert first.wait() == 0 and second.process.poll() is None
    assert box.run("down").process.returncode == 0
    assert second.wait() == 0
    assert first.left_behind() + second.left_behind() == []
    assert json.loads(box.run("ps", "--json").out) == []
    assert box.run("down").process.returncode == 2
    assert box.run("down", "--all").process.returncode == 0


def test_down_kills_one_that_does_not_end(box: Any, tiny: str) -> None:
    run = box.up(tiny)
    run.pids |= {child["pid"] for child in run.get("/v1/homeserve/status")[1]["ranks"]}
    os.kill(run.pid, signal.SIGSTOP)
    down = box.run("down", "--wait-s", "0.2")
    assert "did not end in 0.2 s: killed" in down.err
    assert run.wait() == -signal.SIGKILL
    after = box.up(tiny)
    after.send(signal.SIGTERM)
    assert after.wait() == 0
    assert [left for left in run.left_behind() if "ready.json" not in left] == [], "the next start sweeps what it left"


def test_chat_prompt_against_the_running_server_and_a_temporary_one(box: Any, smollm2: str) -> None:
    ask = ("chat", "--prompt", "What is the capital of France?", "--temperature", "0", "--max-tokens", "16")
    temporary = box.run(ask[0], smollm2, *ask[1:])
    assert temporary.process.returncode == 0, temporary.err
    assert len(temporary.out) > 10 and temporary.left_behind() == []
    run = box.up(smollm2)
    running = box.run(*ask)
    assert (running.process.returncode, running.out) == (0, temporary.out), running.err
    by_url = box.run(*ask, "--url", run.url)
    assert by_url.out == temporary.out


def test_chat_with_nobody_there(box: Any) -> None:
    run = box.run("chat", "--url", "http://127.0.0.1:9", "--prompt", "x")
    assert run.process.returncode == 2
    assert run.err.startswith("homeserve: error: http://127.0.0.1:9: ") and run.out == ""


def test_chat_tells_what_keeps_a_temporary_server_from_starting(box: Any, tmp_path: Path) -> None:
    run = box.run("chat", str(tmp_path / "none.gguf"), "--prompt", "x")
    assert run.process.returncode == 2
    assert "none.gguf" in run.err and run.left_behind() == []


def test_a_lost_worker_is_restarted_and_status_tells(box: Any, tiny: str, wait_until: Any) -> None:
    run = box.up(tiny)
    before = run.get("/v1/homeserve/status")[1]["ranks"][0]
    os.kill(before["pid"], signal.SIGKILL)
    after = wait_until(
        "restart", lambda: (rank := run.get("/v1/homeserve/status")[1]["ranks"][0])["restarts"] == 1 and rank
    )
    status = wait_state(run, "ready", wait_until)
    assert after["pid"] != before["pid"] and status["events"]
    run.send(signal.SIGTERM)
    assert run.wait() == 0
    assert run.left_behind() == []


def test_a_signal_while_the_worker_restarts(box: Any, tiny: str) -> None:
    run = box.up(tiny)
    run.pids |= {child["pid"] for child in run.get("/v1/homeserve/status")[1]["ranks"]}
    os.kill(run.get("/v1/homeserve/status")[1]["ranks"][0]["pid"], signal.SIGKILL)
    run.send(signal.SIGTERM)
    assert run.wait() == 0, run.err
    assert run.left_behind() == []


def test_workers_that_do_not_come_up_again_end_the_server_with_3(box: Any, tiny: str, tmp_path: Path) -> None:
    """The model file goes away under a running server, and then the worker does."""
    path = tmp_path / "model.gguf"
    path.write_bytes(Path(tiny).read_bytes())
    run = box.up(str(path))
    path.unlink()
    os.kill(run.get("/v1/homeserve/status")[1]["ranks"][0]["pid"], signal.SIGKILL)
    assert run.wait() == 3
    assert len([line for line in run.err.splitlines() if line.startswith("homeserve: error: ")]) == 1, run.err
    assert "Traceback" not in run.err
    assert run.left_behind() == []


def test_a_server_whose_parent_dies_without_a_word_leaves_no_worker(box: Any, tiny: str, wait_until: Any) -> None:
    run = box.up(tiny)
    run.pids |= {child["pid"] for child in run.get("/v1/homeserve/status")[1]["ranks"]}
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    wait_until("no worker", lambda: not [left for left in run.left_behind() if left.startswith("process")])
    told = json.loads(box.run("doctor", "--json").out)
    leftovers = next(check for check in told["checks"] if check["name"] == "leftovers")
    assert not leftovers["ok"]
    after = box.up(tiny)
    assert not list(Path("/dev/shm").glob(f"homeserve-{run.pid}-*"))
    assert json.loads(box.run("ps", "--json").out)[0]["pid"] == after.pid


def test_keys_and_a_wide_address(box: Any, tiny: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alpha-key\n")
    wide = box.up(tiny, "--host", "0.0.0.0")
    assert "warning: everybody who reaches 0.0.0.0" in wide.err
    guarded = box.up(tiny, "--host", "0.0.0.0", "--api-key-file", str(keys), "--log-format", "json")
    assert "everybody" not in guarded.err
    assert guarded.get("/v1/models")[0] == 401
    chat = box.run("chat", "--url", guarded.url, "--prompt", "x", "--max-tokens", "1", "--api-key-file", str(keys))
    assert chat.process.returncode == 0, chat.err
    assert "alpha-key" not in guarded.err + guarded.out
    assert all(json.loads(line)["event"] for line in guarded.err.splitlines())


def test_doctor(box: Any) -> None:
    run = box.run("doctor", "--json")
    told = json.loads(run.out)
    assert run.process.returncode == 0, told
    assert next(check for check in told["checks"] if check["name"] == "cpu kernels")["ok"]
    assert "homeserve up should work here" in box.run("doctor").out


def test_pull_finds_the_model_and_its_digest(box: Any, tiny: str) -> None:
    told = json.loads(box.run("pull", tiny, "--json").out)
    assert told["path"] == tiny and told["bytes"] == os.stat(tiny)[stat.ST_SIZE] and len(told["sha256"]) == 64
