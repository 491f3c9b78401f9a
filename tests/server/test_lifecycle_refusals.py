"""What cannot work is said in one error, with the right code, and leaves no process, memory, record or file."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest

BASE = "up", "--ready-file", "ready.json"


def refused(run: Any, code: int = 2) -> str:
    """The one error line of a run that ended as it should."""
    assert run.wait() == code, run.err
    lines = [line for line in run.err.splitlines() if line.startswith("homeserve: error: ")]
    assert len(lines) == 1, run.err
    assert "Traceback" not in run.err
    assert run.left_behind() == []
    return lines[0]


# -------------------------------------------------------------------------------------------------------------- models


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def small_gguf(arch: str = "llama", tensor_type: int = 0, tensors: int = 1, entries: int = 1) -> bytes:
    """A GGUF with one key and one tensor of 32 values; counts and type may lie."""
    header = b"GGUF" + struct.pack("<IQQ", 3, tensors, entries)
    key = text("general.architecture") + struct.pack("<I", 8) + text(arch)
    tensor = text("token_embd.weight") + struct.pack("<IQIQ", 1, 32, tensor_type, 0)
    start = header + key + tensor
    return start + bytes(-len(start) % 32) + bytes(128)


def bad_models(tiny: bytes) -> dict[str, tuple[bytes, str]]:
    return {
        "truncated": (tiny[: len(tiny) // 2], ""),
        "header cut": (tiny[:100], ""),
        "empty": (b"", ""),
        "renamed PNG": (b"\x89PNG\r\n\x1a\n" + bytes(1000), ""),
        "a billion billion tensors": (small_gguf(tensors=1 << 60), ""),
        "a billion billion keys": (small_gguf(entries=1 << 60), ""),
        "a string without end": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + bytes(64), ""),
        "unknown architecture": (small_gguf("frobnicator"), "frobnicator"),
        "unknown quant type": (small_gguf(tensor_type=250), "250"),
        "version of the future": (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "99"),
        "nothing of a llama": (small_gguf(), "llama."),
    }


@pytest.mark.parametrize("name", list(bad_models(b"")))
def test_a_bad_model_file(box: Any, tiny: str, tmp_path: Path, name: str) -> None:
    content, word = bad_models(Path(tiny).read_bytes())[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    line = refused(box.start("up", str(path)))
    assert word in line


@pytest.mark.parametrize("name", ["none.gguf", "folder", "not/a/model"])
def test_a_model_that_is_not_there(box: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    refused(box.start("up", str(tmp_path / name)))


def test_a_quant_type_that_the_backend_lacks(box: Any, tiny: str, tmp_path: Path) -> None:
    """Known to GGUF, whole in the file, but no kernel computes it: refused by name."""
    reader = gguf.GGUFReader(tiny)
    kind = gguf.GGMLQuantizationType.IQ1_S
    data = bytearray(Path(tiny).read_bytes())
    name = reader.tensors[0].name.encode()
    # The type's number stands behind the name, the count of dimensions and the dimensions; nothing else is touched, so
    # the bytes that follow do not fit it: either of the two is a good reason.
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    (dimensions,) = struct.unpack_from("<I", data, at)
    struct.pack_into("<I", data, at + 4 + 8 * dimensions, int(kind))
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    refused(box.start("up", str(path)))


# ---------------------------------------------------------------------------------------------------- port and settings


def test_a_port_in_use_is_said_before_the_model_is_touched(box: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        line = refused(box.start("up", "no-such-model", "--port", str(port), ready=False))
    assert line == f"homeserve: error: port {port} is in use"


def test_a_port_held_by_homeserve_names_it(box: Any, tiny: str) -> None:
    first = box.up(tiny)
    port = json.loads(first.ready_file.read_text())["port"]
    second = box.start("up", tiny, "--port", str(port), ready=False)
    assert f"port {port} is in use by homeserve (pid {first.pid})" in refused(second)
    assert f"homeserve down --port {port}" in second.err
    assert first.get("/health")[0] == 200


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--host", "no.such.host.invalid"), "--host no.such.host.invalid"),
        (("--host", "192.0.2.1"), "cannot listen on 192.0.2.1"),
        (("--context", "513"), "--context 513 is more than the 512 tokens"),
        (("--context", "512", "--kv-tokens", "256"), "does not fit the 256 tokens of --kv-tokens"),
        (("--api-key-file", "none"), "--api-key-file: none: No such file"),
        (("--ready-file", "none/ready.json"), "--ready-file"),
        (("--layout", "tensor"), "--layout tensor: needs several ranks, and there is one"),
        (("--devices", "cpu:17"), "cpu:17 is more ranks than the CPU of one box may have: 16"),
        (("--devices", "cpu:2", "--token-vector", "2,0"), "rank 1 must have a part"),
        (("--kv-type", "q4_0"), "--kv-type: 'q4_0' is not one of them"),
    ],
)
def test_a_setting_that_cannot_work(box: Any, tiny: str, flags: tuple[str, ...], words: str) -> None:
    assert words in refused(box.start("up", tiny, "--port", "0", *flags, ready=False))


def test_a_ready_file_that_is_the_model_is_refused_and_stays(box: Any, tiny: str, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    shutil.copy(tiny, model)
    run = box.start("up", str(model), "--port", "0", "--ready-file", str(model), ready=False)
    assert "no ready file, and it is not replaced" in refused(run)
    assert model.read_bytes() == Path(tiny).read_bytes()


@pytest.mark.parametrize(("where", "said"), [(">/dev/full", 1), (">&-", 0)])
def test_a_server_that_nobody_hears_serves(box: Any, tiny: str, where: str, said: int) -> None:
    run = box.start("up", tiny, inside=lambda *words: ["sh", "-c", f'exec "$@" {where}', "sh", *words])
    run.wait_ready()
    assert run.get("/health")[0] == 200
    run.send(signal.SIGTERM)
    assert run.wait() == 0
    assert run.err.count("warning: standard output cannot be written") == said and "Traceback" not in run.err


def test_a_pool_that_does_not_fit_shows_the_arithmetic_and_what_fits(box: Any, tiny: str) -> None:
    run = box.start("up", tiny, "--kv-tokens", str(1 << 28))
    line = refused(run)
    assert "weights 1 + kv " in line and "MiB may be used" in line
    assert "the nearest that fits is " in run.err
    most = int(run.err.rpartition("--kv-tokens ")[2].split()[0])
    assert 512 < most < 1 << 28 and most % 16 == 0


def test_a_fault_needs_testing(box: Any, tiny: str) -> None:
    run = box.start("up", tiny, HOMESERVE_FAULT="rank=0,step=load,nth=1,action=kill")
    assert "needs HOMESERVE_TESTING=1" in refused(run)


def test_errors_as_json_with_print_config(box: Any) -> None:
    run = box.run("up", "--port", "x", "--print-config")
    assert run.process.returncode == 2 and run.err == ""
    assert json.loads(run.out)["error"]["field"] == "port"


# ------------------------------------------------------------------------------------------------------------- failures


def test_a_worker_that_dies_while_it_loads_is_code_3(box: Any, tiny: str) -> None:
    environ = {"HOMESERVE_TESTING": "1", "HOMESERVE_FAULT": "rank=0,step=load,nth=1,action=kill"}
    refused(box.start("up", tiny, **environ), code=3)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 1 MiB."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("mounting a small tmpfs needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], timeout=60, check=True)


def test_no_disk_space_for_the_model(box: Any, small_disk: Path) -> None:
    run = box.start("up", HOMESERVE_CACHE=str(small_disk))
    assert "space" in refused(run)
    assert not [path for path in small_disk.glob("**/*") if path.is_file() and path.stat().st_size > 4096]


def test_a_cache_folder_that_cannot_be_written(box: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    refused(box.start("up", "--cache-dir", str(tmp_path / "file" / "cache")))
