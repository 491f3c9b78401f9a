"""Ctrl-C at any moment: 30 of them, spread over start, load, stream and drain.

The moments are drawn with a seed that is printed. Each run ends soon, with 130 before it was ready and 0 after, without
a traceback, and leaves nothing. Every other one is sent to the whole process group, as a terminal does it.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "1", 16)
_DRAW = random.Random(SEED)

START = [("start", round(_DRAW.uniform(0.0, 0.25), 3)) for _ in range(8)]
LOAD = [("load", round(_DRAW.uniform(0.0, 0.8), 3)) for _ in range(10)]
STREAM = [("stream", _DRAW.randrange(1, 60)) for _ in range(6)]
DRAIN = [("drain", _DRAW.randrange(1, 40)) for _ in range(6)]
MOMENTS = START + LOAD + STREAM + DRAIN
assert len(MOMENTS) == 30


@pytest.mark.parametrize("index", range(len(MOMENTS)), ids=lambda index: "-".join(map(str, MOMENTS[index])))
def test_ctrl_c(box: Any, smollm2: str, wait_until: Any, index: int) -> None:
    phase, when = MOMENTS[index]
    print(f"seed {SEED}, moment {phase} {when}")
    run = box.start("up", smollm2)
    wait_until("the command runs", lambda: _catches_sigterm(run.pid))
    if phase == "start":
        time.sleep(when)
        _interrupt(run, index)
    elif phase == "load":
        wait_until("a worker", lambda: _note_children(run) or run.process.poll() is not None)
        time.sleep(when)
        _interrupt(run, index)
    else:
        run.wait_ready()
        _interrupt_stream(run, phase, int(when), index)
    code = run.wait()
    ready = "\nready " in run.out
    assert code == (0 if ready else 130), run.err
    if phase in ("stream", "drain"):
        assert ready
    assert "Traceback" not in run.err and "KeyboardInterrupt" not in run.err, run.err
    assert run.left_behind() == []


def test_the_terminals_ctrl_c_just_after_ready(box: Any, smollm2: str) -> None:
    """The template helper is starting then; it has no time yet to ignore anything."""
    run = box.up(smollm2)
    _note_children(run)
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait() == 0
    assert "Traceback" not in run.err, run.err
    assert run.left_behind() == []


@pytest.mark.parametrize("moment", ["start", "answer"])
def test_ctrl_c_in_chat_takes_its_temporary_server_along(box: Any, smollm2: str, wait_until: Any, moment: str) -> None:
    run = box.start("chat", smollm2, "--prompt", "Count to one thousand.", "--temperature", "0")
    wait_until("a temporary server", lambda: _note_children(run))
    if moment == "answer":
        wait_until("a word of the answer", lambda: run.out)
    run.send(signal.SIGINT)
    assert run.wait() == 130, run.err
    assert "Traceback" not in run.err
    assert run.left_behind() == []


@pytest.mark.parametrize("command", ["up", "pull"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_model_is_fetched(box: Any, wait_until: Any, command: str, number: int) -> None:
    """The index takes the connection and says nothing, so the fetch is there to be interrupted."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        run = box.start(
            command,
            PIP_INDEX_URL=index,
            PIP_FIND_LINKS="",
            PIP_NO_INDEX="",
            PIP_CONFIG_FILE=os.devnull,
            PIP_RETRIES="0",
        )
        wait_until("the fetch asks the index", lambda: _asked(silent))
        _note_children(run)
        assert run.pids, "a process fetches"
        run.send(number)
        assert run.wait() == 130, run.err
    assert "Traceback" not in run.err
    assert run.left_behind() == []
    left = [path.name for path in (box.folder / "0" / "home").glob("**/models/*") if path.suffix != ".lock"]
    assert left == [], "nothing half-done stays in the cache"


def _asked(listener: socket.socket) -> bool:
    return bool(select.select([listener], [], [], 0)[0])


def _interrupt_stream(run: Any, phase: str, chunks: int, index: int) -> None:
    """After `chunks` lines of a long answer: one Ctrl-C, and where the drain is meant, another one in it."""
    model = json.loads(run.ready_file.read_text())["model"]
    body = {"model": model, "prompt": "Once", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"{run.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        _read(answer, chunks)
        _interrupt(run, index)
        if phase == "drain":
            _read(answer, 2 * chunks)
            assert run.process.poll() is None, "the stream goes on while the server drains"
            _interrupt(run, index + 1)
    # A client that leaves ends the drain: its request is aborted, and nothing else is open.


def _read(answer: Any, lines: int) -> None:
    for _ in range(lines):
        assert answer.readline()


def _interrupt(run: Any, index: int) -> None:
    _note_children(run)
    if index % 2:
        os.killpg(run.pid, signal.SIGINT)
    else:
        os.kill(run.pid, signal.SIGINT)


def _note_children(run: Any) -> bool:
    """Whether there are any; all that are seen are looked for at the end."""
    found = {
        int(word)
        for path in Path(f"/proc/{run.pid}/task").glob("*/children")
        if path.exists()
        for word in _text(path).split()
    }
    run.pids |= found
    return bool(found)


def _catches_sigterm(pid: int) -> bool:
    """The command's own handlers are in place: the interpreter itself catches SIGINT alone."""
    line = next((line for line in _text(Path(f"/proc/{pid}/status")).splitlines() if line.startswith("SigCgt:")), "")
    return bool(line) and bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
