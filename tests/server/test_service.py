"""`homeserve service` with a real systemd: what it writes runs, is restarted, and goes without a trace."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from box import wait_until
from user_systemd import UserManager, user_manager

MODEL = Path(__file__).parents[1] / "data" / "counter.gguf"


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[UserManager]:
    with user_manager(tmp_path) as found:
        yield found


def status(manager: UserManager) -> dict[str, Any]:
    done = manager.homeserve("service", "status", "--json")
    facts: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if facts["active"] else 1), done.stderr
    return facts


def completion(url: str, model: str) -> str:
    body = json.dumps({"model": model, "prompt": "1 2 3", "max_tokens": 4, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def test_a_service_is_installed_serves_is_restarted_and_removed(manager: UserManager) -> None:
    """From a folder and a model file whose names are as hard for a unit as names get."""
    folder = manager.folder / 'a "b" %h $HOME ;\\'
    folder.mkdir()
    shutil.copy(MODEL, folder / "count er's.gguf")
    argv = ("service", "install", "./count er's.gguf", "--port", "0", "--kv-tokens", "4096")
    done = manager.homeserve(*argv, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "ready  http://127.0.0.1:" in done.stdout
    assert manager.verify(manager.unit) == ""
    first = status(manager)
    assert first["installed"] and first["ours"] and first["enabled"] and first["active"]
    assert first["model"] == "count er's" and first["restarts"] == 0 and first["last_exit"] is None
    assert first["status"] == f"{first['url']} serves count er's", "the server told systemd so itself"
    text = completion(first["url"], first["model"])

    os.kill(first["pid"], signal.SIGKILL)
    second = wait_until("a restart", lambda: (now := status(manager))["active"] and now["pid"] != first["pid"] and now)
    assert second["restarts"] == 1
    assert completion(second["url"], second["model"]) == text

    done = manager.homeserve(*argv[:-1], "8192", cwd=folder)
    assert done.returncode == 2 and "says something else" in done.stderr and "--force" in done.stderr
    assert "- ExecStart=" in done.stderr and "+ ExecStart=" in done.stderr
    assert status(manager)["pid"] == second["pid"], "a refusal changes nothing"
    done = manager.homeserve(*argv[:-1], "8192", "--force", cwd=folder)
    assert done.returncode == 0 and "replaced" in done.stdout, done.stderr
    assert "--kv-tokens 8192" in manager.unit.read_text()
    pid = status(manager)["pid"]
    assert pid != second["pid"]

    done = manager.homeserve("service", "remove")
    assert done.returncode == 0 and "removed" in done.stdout, done.stderr
    assert not manager.unit.exists() and not Path(f"/proc/{pid}").exists()
    assert manager.systemctl("show", "homeserve.service", "--property=LoadState", "--value") == "not-found"
    last = status(manager)
    assert not (last["installed"] or last["enabled"] or last["active"])
    assert not list(manager.folder.glob("runtime/homeserve/*.json"))


def test_what_cannot_work_is_not_tried_again(manager: UserManager) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = manager.homeserve("service", "install", str(MODEL), "--port", port)
    assert done.returncode == 3 and "exit code 2 (a setting, the model or the memory cannot work)" in done.stderr
    assert "journalctl" in done.stderr
    facts = status(manager)
    assert facts["state"] == "failed (failed)" and facts["restarts"] == 0
    assert facts["last_exit"] == {"how": "exited", "status": 2, "result": "exit-code"}
    done = manager.homeserve("service", "status")
    assert done.returncode == 1 and "ended    exit code 2" in done.stdout
    assert manager.homeserve("service", "remove").returncode == 0


def test_the_unit_of_somebody_else_stays(manager: UserManager) -> None:
    foreign = "[Service]\nExecStart=/bin/true\n"
    manager.unit.parent.mkdir(parents=True)
    manager.unit.write_text(foreign)
    for argv in (("install", str(MODEL)), ("install", str(MODEL), "--force"), ("remove",)):
        done = manager.homeserve("service", *argv)
        assert done.returncode == 2 and "did not write" in done.stderr, (argv, done.stdout, done.stderr)
    assert manager.unit.read_text() == foreign


def test_homeserve_toml_of_the_folder_is_read_at_each_start(manager: UserManager) -> None:
    """What a flag or a variable of that shell says is in the unit; what the file says stays in the file."""
    (manager.folder / "homeserve.toml").write_text(f'model = "{MODEL}"\nmodel-id = "from-the-file"\nport = 0\n')
    manager.environ["HOMESERVE_MAX_RUNNING"] = "3"
    done = manager.homeserve("service", "install")
    assert done.returncode == 0, done.stderr
    assert "up --max-running 3\n" in manager.unit.read_text()
    facts = status(manager)
    assert facts["model"] == "from-the-file"
    assert manager.homeserve("service", "remove").stdout.count("removed") == 1
