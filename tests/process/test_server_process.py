"""A server as the child of another program: it starts, is watched, drains, and outlives nobody."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from box import wait_until

from homeserve.errors import WorkerStartError
from homeserve.integrations.server_process import ServerProcess

MODEL = str(Path(__file__).parents[1] / "data" / "counter.gguf")
FLAGS = [MODEL, "--kv-tokens", "4096", "--context", "512", "--drain-timeout-s", "2"]
PARENT = """
import os, sys
from homeserve.integrations.server_process import ServerProcess
server = ServerProcess(sys.argv[1:], 2.0, on_end=lambda code: None)
server.start(os.environ)
print("pid", server.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOMESERVE_", "XDG_"))}
    return kept | {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}


@pytest.fixture
def ended() -> list[int]:
    """Exit codes that `on_end` was called with."""
    return []


@pytest.fixture
def server(ended: list[int]) -> Iterator[ServerProcess]:
    made = ServerProcess(FLAGS, 2.0, on_end=ended.append)
    yield made
    made.stop()


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_it_serves_until_it_is_stopped(server: ServerProcess, ended: list[int], environ: dict[str, str]) -> None:
    server.start(environ)
    with urllib.request.urlopen(f"{server.url}/health", timeout=30) as answer:
        assert json.load(answer)["status"] == "ok"
    pid = server.pid
    server.stop()
    assert not lives(pid) and ended == [], "it was asked to"
    assert not [thread for thread in threading.enumerate() if thread.name == "homeserve"]


def test_its_end_is_told(server: ServerProcess, ended: list[int], environ: dict[str, str]) -> None:
    server.start(environ)
    os.kill(server.pid, signal.SIGKILL)
    wait_until("the word of its end", lambda: ended == [-signal.SIGKILL])


def test_why_it_does_not_start_is_told(
    ended: list[int], environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    server = ServerProcess([*FLAGS, "--context", "5000"], 2.0, on_end=ended.append)
    with pytest.raises(WorkerStartError, match="exit code 2: .*--context 5000 is more than the 4096 tokens"):
        server.start(environ)
    assert ended == [] and not lives(server.pid)
    assert "--context 5000" in capsys.readouterr().err, "passed on as it comes"
    server.stop()


def test_it_drains_and_ends_when_its_parent_is_killed(environ: dict[str, str], tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *FLAGS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environ,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pid = next(int(line.split()[1]) for line in parent.stdout if line.startswith("pid "))
        (record,) = tmp_path.rglob(f"run/{pid}.json")
        parent.kill()
        try:
            wait_until("its end", lambda: not lives(pid))
        finally:
            if lives(pid):
                os.kill(pid, signal.SIGTERM)
    assert not record.exists(), "it took down what it had made"
