"""`hf:` names against a hub on loopback: choice of file, resume, wrong digest, 401, 404, offline, a full disk.

The hub's library reads its settings when it is imported, so each case runs in a process of its own.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
BIG = os.urandom(3_000_000)
OTHER = os.urandom(1000)


@dataclass
class Hub:
    """One repository, `me/tiny`. `cut_after`: break the connection after so many bytes of a file, `cuts` times."""

    files: dict[str, bytes] = field(default_factory=lambda: {"m.Q4_K_M.gguf": BIG, "m.Q8_0.gguf": OTHER, "a.md": b"x"})
    digests: dict[str, str] = field(default_factory=dict)
    status: int = 200
    token: str | None = None
    cut_after: int = 0
    cuts: int = 0
    stall_at: int | None = None
    reached: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    ranges: list[str | None] = field(default_factory=list)
    url: str = ""

    def digest(self, name: str) -> str:
        return self.digests.get(name) or hashlib.sha256(self.files[name]).hexdigest()

    def listing(self) -> dict[str, Any]:
        siblings = []
        for name, data in self.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": "b" * 40}
            if name.endswith((".gguf", ".safetensors")):
                entry["lfs"] = {"sha256": self.digest(name), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        return {"id": "me/tiny", "modelId": "me/tiny", "sha": COMMIT, "private": False, "siblings": siblings}


@pytest.fixture
def hub() -> Iterator[Hub]:
    state = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            path = self.path.partition("?")[0]
            allowed = state.token is None or self.headers.get("Authorization") == f"Bearer {state.token}"
            name = path.removeprefix("/me/tiny/resolve/main/")
            if state.status != 200 or not allowed:
                self.refuse(state.status if state.status != 200 else 401)
            elif path in ("/api/models/me/tiny", "/api/models/me/tiny/revision/main"):
                self.send(200, json.dumps(state.listing()).encode(), body, {"Content-Type": "application/json"})
            elif name in state.files:
                self.file(name, body)
            else:
                self.refuse(404)

        def refuse(self, status: int) -> None:
            codes = {401: "RepoNotFound", 403: "GatedRepo", 404: "EntryNotFound"}
            self.send(status, b"", True, {"X-Error-Code": codes.get(status, "")})

        def file(self, name: str, body: bool) -> None:
            data = state.files[name]
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{state.digest(name)}"', "Accept-Ranges": "bytes"}
            wanted = self.headers.get("Range")
            if not body:
                return self.send(200, data, False, headers)
            state.ranges.append(wanted)
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
            if wanted:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self.send(206 if wanted else 200, data[start:], True, headers)

        def send(self, status: int, data: bytes, body: bool, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if not body:
                return
            try:
                self.write(data)
            except ConnectionError:
                self.close_connection = True

        def write(self, data: bytes) -> None:
            if state.stall_at is not None and len(data) > state.stall_at:
                self.wfile.write(data[: state.stall_at])
                self.wfile.flush()
                state.reached.set()
                state.go_on.wait(30)
                self.close_connection = True
            elif state.cuts and len(data) > state.cut_after > 0:
                state.cuts -= 1
                self.wfile.write(data[: state.cut_after])
                self.close_connection = True
            else:
                self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    yield state
    state.go_on.set()
    server.shutdown()
    server.server_close()
    thread.join()


_CHILD = """
import json, sys, logging
logging.disable(logging.CRITICAL)
from homeserve.checkpoint import names
from homeserve.errors import HomeserveError
try:
    print(json.dumps({"path": names.resolve(sys.argv[1], cache_dir="/none")}))
except HomeserveError as error:
    print(json.dumps({"kind": type(error).__name__, "message": str(error), "fix": error.fix, "field": error.field}))
"""


def start(hub: Hub, home: Path, name: str, **changes: str) -> subprocess.Popen[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"} | changes
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _CHILD, name],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def resolve(hub: Hub, home: Path, name: str, **changes: str) -> dict[str, Any]:
    child = start(hub, home, name, **changes)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err[-3000:]
    answer: dict[str, Any] = json.loads(out)
    return answer


def parts(home: Path) -> list[Path]:
    return sorted(path for path in home.rglob("*") if path.name.endswith((".part", ".incomplete")))


def test_a_file_is_chosen_fetched_and_found_again(hub: Hub, tmp_path: Path) -> None:
    path = Path(resolve(hub, tmp_path, "hf:me/tiny")["path"])
    assert path.name == "m.Q4_K_M.gguf" and path.read_bytes() == BIG and tmp_path in path.parents
    assert Path(resolve(hub, tmp_path, "hf:me/tiny:q8_0")["path"]).read_bytes() == OTHER
    asked = len(hub.ranges)
    assert resolve(hub, tmp_path, "hf:me/tiny")["path"] == str(path)
    assert len(hub.ranges) == asked and parts(tmp_path) == []
    offline = resolve(hub, tmp_path, "hf:me/tiny", HF_HUB_OFFLINE="1")
    assert offline["path"] == str(path)
    assert resolve(hub, tmp_path, "hf:me/tiny", HF_ENDPOINT="http://127.0.0.1:9")["path"] == str(path)


def test_a_broken_connection_is_taken_up_where_it_broke(hub: Hub, tmp_path: Path) -> None:
    hub.cut_after, hub.cuts = 1_300_000, 1
    assert Path(resolve(hub, tmp_path, "hf:me/tiny")["path"]).read_bytes() == BIG
    assert hub.ranges[0] is None and hub.ranges[1] is not None and len(hub.ranges) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_fetch_that_was_ended_goes_on_the_next_time(hub: Hub, tmp_path: Path, number: int) -> None:
    hub.stall_at = 2_500_000
    child = start(hub, tmp_path, "hf:me/tiny")
    deadline = time.monotonic() + 60
    while not (hub.reached.is_set() and parts(tmp_path) and parts(tmp_path)[0].stat().st_size > 1_000_000):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.send_signal(number)
    child.communicate(timeout=30)
    assert child.returncode != 0 and len(parts(tmp_path)) == 1
    hub.stall_at = None
    hub.go_on.set()
    assert Path(resolve(hub, tmp_path, "hf:me/tiny")["path"]).read_bytes() == BIG
    assert (hub.ranges[-1] or "").startswith("bytes=") and parts(tmp_path) == []


def test_a_wrong_digest_leaves_nothing(hub: Hub, tmp_path: Path) -> None:
    hub.digests["m.Q4_K_M.gguf"] = "1" * 64
    answer = resolve(hub, tmp_path, "hf:me/tiny")
    assert answer["kind"] == "FetchError" and "SHA-256" in answer["message"]
    blobs = [path for path in tmp_path.rglob("blobs/*") if path.is_file()]
    assert parts(tmp_path) == [] and blobs == []


def test_a_token_is_asked_for_and_used(hub: Hub, tmp_path: Path) -> None:
    hub.token = "secret"
    answer = resolve(hub, tmp_path, "hf:me/tiny")
    assert answer["kind"] == "FetchError" and "401" in answer["message"] and "HF_TOKEN" in answer["fix"]
    assert "path" in resolve(hub, tmp_path, "hf:me/tiny", HF_TOKEN="secret")


@pytest.mark.parametrize(("status", "words"), [(404, "404"), (403, "gated"), (500, "500")])
def test_refusals_are_said_as_such(hub: Hub, tmp_path: Path, status: int, words: str) -> None:
    hub.status = status
    answer = resolve(hub, tmp_path, "hf:me/tiny")
    assert answer["kind"] == "FetchError" and words in answer["message"] and answer["fix"]


def test_no_network_and_offline(hub: Hub, tmp_path: Path) -> None:
    answer = resolve(hub, tmp_path, "hf:me/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert answer["kind"] == "FetchError" and "reached" in answer["message"]
    answer = resolve(hub, tmp_path, "hf:me/tiny", HF_HUB_OFFLINE="1")
    assert answer["kind"] == "FetchError" and "HF_HUB_OFFLINE" in answer["message"]


def test_a_quantisation_that_is_not_there(hub: Hub, tmp_path: Path) -> None:
    answer = resolve(hub, tmp_path, "hf:me/tiny:Q2_K")
    assert answer["kind"] == "FetchError" and "m.Q8_0.gguf" in answer["message"]


def test_a_safetensors_folder(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"model.safetensors": OTHER, "config.json": b"{}", "tokenizer.json": b"{}", "pytorch_model.bin": BIG}
    folder = Path(resolve(hub, tmp_path, "hf:me/tiny")["path"])
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == OTHER


def test_a_full_disk(hub: Hub, tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a tmpfs needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=18m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this container may not mount a tmpfs")
    try:
        answer = resolve(hub, tmp_path, "hf:me/tiny")
        assert answer["kind"] == "FetchError" and "MiB" in answer["message"] and answer["field"] == "HF_HOME"
        assert hub.ranges == [] and parts(tmp_path) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
