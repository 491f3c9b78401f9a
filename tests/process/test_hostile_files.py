"""Hostile model files, opened in child processes of 1 GiB and 2 s each: refused by name, in bounded memory and time.

2 000 damaged files in the full tier, 100 000 in the slow one (`hostile_files.py` makes and opens them), and files made
to cost far more than they hold: sparse ones, whose length is a lie, and texts that take many times their length in
memory.
"""

from __future__ import annotations

import collections
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CHILD = Path(__file__).parent / "hostile_files.py"
SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
SEED = os.environ.get("HOMESERVE_TEST_SEED") or "1"
INPUTS = 100_000 if SLOW else 2_000
CHILDREN = 2
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def child(*words: str) -> subprocess.Popen[str]:
    environ = os.environ | ONE_THREAD
    command = [sys.executable, str(CHILD), *words]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.timeout(3 * 3600 if SLOW else 300)
def test_damaged_files_open_or_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    share = INPUTS // CHILDREN
    children = [child(SEED, str(first), str(share), str(tmp_path)) for first in range(0, INPUTS, share)]
    outcomes: collections.Counter[str] = collections.Counter()
    peak_kib = 0
    try:
        for number, process in enumerate(children):
            told, errors = process.communicate()
            at = tmp_path / f"at-{number * share}"
            where = f"seed {SEED}, input {at.read_text() if at.exists() else 'none'}"
            assert process.returncode == 0, f"{where}: exit {process.returncode}\n{told}\n{errors[-4000:]}"
            report = json.loads(told.splitlines()[-1])
            outcomes.update(report["outcomes"])
            peak_kib = max(peak_kib, report["peak_kib"])
    finally:
        for process in children:
            process.kill()
            process.communicate()
    with capsys.disabled():
        print(f"\n{sum(outcomes.values())} inputs of seed {SEED}: {dict(outcomes)}, peak {peak_kib >> 10} MiB")
    assert sum(outcomes.values()) == INPUTS
    assert outcomes["InvalidModelFile"] > INPUTS // 2 and outcomes["opened"] > INPUTS // 100, "neither all nor nothing"
    assert outcomes["UnknownArchitecture"] and outcomes["ModelNotFound"], "the damage reaches these too"


# --------------------------------------------------------------------------------------------------------------- bombs


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def gguf(*keys: bytes, tensors: int = 0, length: int) -> Callable[[Path], None]:
    """A file that is `length` bytes long and has, on disk, only its first ones."""

    def write(path: Path) -> None:
        with path.open("wb") as file:
            file.write(b"GGUF" + struct.pack("<IQQ", 3, tensors, len(keys)) + b"".join(keys))
            file.truncate(length)

    return write


def array(name: str, kind: int, count: int) -> bytes:
    return string(name) + struct.pack("<IIQ", 9, kind, count)


ARCH = string("general.architecture") + struct.pack("<I", 8) + string("llama")
MODEL = string("tokenizer.ggml.model") + struct.pack("<I", 8) + string("llama")
MIB = 1 << 20
BOMBS: dict[str, tuple[Callable[[Path], None], str]] = {
    "as many empty strings as may be": (gguf(ARCH, array("tokenizer.ggml.tokens", 8, 1 << 22), length=300 * MIB), ""),
    "more empty strings than may be": (gguf(ARCH, array("x", 8, (1 << 22) + 1), length=300 * MIB), "strings"),
    "many arrays of empty strings": (
        gguf(array("a", 8, 1 << 21), ARCH, length=600 * MIB),
        "key count|strings|name of|is missing",
    ),
    "numbers by the gigabyte": (gguf(ARCH, array("x", 4, 1 << 27), length=700 * MIB), "header is larger than"),
    "numbers that fill the header": (gguf(ARCH, MODEL, array("x", 10, 15 * MIB), length=400 * MIB), ""),
    "a file of a terabyte": (gguf(ARCH, array("x", 0, 1 << 39), length=1 << 40), "cannot be mapped|larger than"),
    "tensors by the million": (gguf(ARCH, tensors=1 << 20, length=400 * MIB), "name of 0 bytes"),
    "keys by the thousand": (gguf(*[string(f"k{i}") + bytes(5) for i in range(60_000)], length=400 * MIB), "missing"),
}


def opened(path: Path) -> tuple[str, int]:
    process = child("--open", str(path))
    told, errors = process.communicate(timeout=60)
    assert process.returncode == 0, f"exit {process.returncode}\n{told}\n{errors[-4000:]}"
    report = json.loads(told.splitlines()[-1])
    (outcome,) = report["outcomes"]
    return outcome, report["peak_kib"] << 10


@pytest.mark.parametrize("name", BOMBS)
def test_a_sparse_file_is_refused_in_bounds(tmp_path: Path, name: str) -> None:
    BOMBS[name][0](tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").stat().st_blocks * 512 < 2 * MIB, "the disk holds none of it"
    outcome, peak_bytes = opened(tmp_path / "m.gguf")
    assert outcome == "InvalidModelFile" and peak_bytes < 700 * MIB


def folder(header: bytes = b"{}", config: bytes = b"{}") -> Callable[[Path], None]:
    def write(path: Path) -> None:
        (path / "config.json").write_bytes(config)
        (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))

    return write


def folder_with_index(index: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        folder(config=json.dumps(CONFIG).encode())(path)
        (path / "model.safetensors.index.json").write_bytes(index)

    return write


LISTS = b'{"model_type": "llama", "x": [' + b"[]," * (4 * MIB // 3 - 20) + b"[]]}"
CONFIG = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4} | {
    "intermediate_size": 64, "vocab_size": 48, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
TENSORS = b"{" + b",".join(b'"%x":{}' % index for index in range(1_200_000)) + b"}"
TEXTS: dict[str, Callable[[Path], None]] = {
    "config of empty lists": folder(config=LISTS),
    "index of lists": folder_with_index(b'{"weight_map": [' + b"[]," * (7 * MIB) + b"[]]}"),
    "index of empty names": folder_with_index(b'{"weight_map": {' + b'"":"",' * (3 * MIB) + b'"":""}}'),
    "config nested without end": folder(config=b'{"x":' * 100_000),
    "config of 60 MiB": folder(config=b'{"x": [' + b"[]," * (20 * MIB) + b"[]]}"),
    "header of a million entries": folder(TENSORS[: 15 * MIB].rpartition(b",")[0] + b"}"),
    "header of 40 MiB": folder(b'{"x": "' + b"x" * (40 * MIB) + b'"}'),
    "header nested without end": folder(b'{"x":' * 100_000),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_unfolds_is_refused_in_bounds(tmp_path: Path, name: str) -> None:
    TEXTS[name](tmp_path)
    outcome, peak_bytes = opened(tmp_path)
    assert outcome in ("InvalidModelFile", "UnsupportedModel") and peak_bytes < 900 * MIB


def test_a_child_that_breaks_a_rule_is_told_of(tmp_path: Path) -> None:
    """The rig itself: a file that is slow to read, and one that needs more memory than there is."""
    (tmp_path / "m.gguf").mkdir()
    fifo = tmp_path / "fifo.gguf"
    os.mkfifo(fifo)
    assert opened(fifo)[0] in ("InvalidModelFile", "ModelNotFound"), "a pipe is refused before it is opened"
    script = "import hostile_files as h, pathlib\nh.use = lambda path: bytearray(2 << 30)\nh.main(['--open', 'x'])"
    environ = os.environ | ONE_THREAD | {"PYTHONPATH": str(CHILD.parent)}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=False)
    assert '"failed": "x"' in done.stdout and "MemoryError" in done.stdout
    script = script.replace("bytearray(2 << 30)", "[0 for _ in iter(int, 1)]").replace(
        "h.main", "h.SECONDS_EACH=.1;h.main"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode < 0, "ended by its clock"
