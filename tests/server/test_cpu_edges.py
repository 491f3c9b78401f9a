"""Odd machines: one core, half a core, more threads than cores, no AVX, no huge pages, a model larger than the memory,
a worker that is stopped. Each is a real server that was started in that box; it answers what the usual one does.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

PROMPTS = ("The capital of France is", "Once upon a time, in a small village by the sea,", "1, 2, 3, 4,")
TOKENS = 16
CPU_GROUPS = ((Path("/sys/fs/cgroup/cpu"), "cpu.cfs_quota_us"), (Path("/sys/fs/cgroup"), "cpu.max"))
ENTER = 'echo $$ > "$0" && exec "$@"'
BECOME = "os.execvp(sys.argv[1], sys.argv[1:])"


def answers(run: Any) -> list[list[int]]:
    """Greedy token ids of each prompt, one after the other."""
    _, models = run.get("/v1/models")
    found = []
    for prompt in PROMPTS:
        body = {"model": models["data"][0]["id"], "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        body |= {"return_token_ids": True, "ignore_eos": True}
        request = urllib.request.Request(
            run.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=100) as answer:
            found.append(json.load(answer)["choices"][0]["token_ids"])
    return found


@pytest.fixture(scope="module")
def usual(server: Any) -> list[list[int]]:
    """What the server of the other tests says: two threads or as many as there are cores."""
    found = answers(server)
    assert all(len(each) == TOKENS for each in found)
    return found


def python(script: str) -> Callable[..., list[str]]:
    """A command line that runs a line of Python and then becomes the command behind it."""
    return lambda *command: [sys.executable, "-c", f"import ctypes, os, sys; {script}; {BECOME}", *command]


def runs_on_one_core(run: Any) -> bool:
    """As `up` told; a worker's team has as many threads as cores were told."""
    return re.search(r"· 1 (of \d+ cores|core)\b", run.out) is not None


def test_one_core(box: Any, smollm2: str, usual: list[list[int]]) -> None:
    core = min(os.sched_getaffinity(0))
    run = box.start("up", smollm2, inside=python(f"os.sched_setaffinity(0, {{{core}}})"))
    run.wait_ready()
    assert runs_on_one_core(run)
    assert answers(run) == usual


@pytest.fixture
def half_a_core() -> Iterator[Callable[..., list[str]]]:
    """A control group that may use 50 ms of every 100."""
    for point, name in CPU_GROUPS:
        folder = point / f"homeserve-test-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / name).write_text("50000 100000" if name == "cpu.max" else "50000")
        except OSError:
            folder.rmdir()
            continue
        yield lambda *command, group=folder: ["sh", "-c", ENTER, str(group / "cgroup.procs"), *command]
        (folder.parent / "cgroup.procs").write_text(str(os.getpid()))
        folder.rmdir()
        return
    pytest.skip("making a control group with a CPU quota needs root")


def test_a_quota_of_half_a_core(
    half_a_core: Callable[..., list[str]], box: Any, smollm2: str, usual: list[list[int]]
) -> None:
    run = box.start("up", smollm2, inside=half_a_core)
    run.wait_ready()
    assert runs_on_one_core(run)
    assert answers(run) == usual
    run.send(signal.SIGTERM)
    assert run.wait() == 0


def test_more_threads_than_cores(box: Any, smollm2: str, usual: list[list[int]]) -> None:
    count = len(os.sched_getaffinity(0)) * 2 + 1
    run = box.up(smollm2, "--threads", str(count))
    worker = run.get("/v1/homeserve/status")[1]["ranks"][0]["pid"]
    assert len(os.listdir(f"/proc/{worker}/task")) >= count
    assert answers(run) == usual


def test_no_avx(box: Any, smollm2: str, usual: list[list[int]]) -> None:
    """The baseline rounds otherwise (it has no fused multiplication and addition); the first words are the same."""
    run = box.up(smollm2, "--isa", "baseline")
    assert run.get("/v1/homeserve/status")[1]["ranks"][0]["isa"] == "baseline"
    assert [each[:4] for each in answers(run)] == [each[:4] for each in usual]


def test_no_huge_pages(box: Any, smollm2: str, usual: list[list[int]]) -> None:
    """PR_SET_THP_DISABLE, which the worker inherits: the same memory in small pages."""
    run = box.start("up", smollm2, inside=python("assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0"))
    run.wait_ready()
    worker = run.get("/v1/homeserve/status")[1]["ranks"][0]["pid"]
    rollup = Path(f"/proc/{worker}/smaps_rollup").read_text()
    assert int(re.search(r"AnonHugePages: +(\d+)", rollup)[1]) == 0
    assert answers(run) == usual


def test_a_model_larger_than_the_memory_is_refused_and_not_paged_in_and_out(
    limited_group: Callable[[int], Any], box: Any, tmp_path: Path
) -> None:
    """A file of 3 GiB in a group of 1 GiB: the arithmetic is told before a byte of the weights is read."""
    group = limited_group(1 << 30)
    path = tmp_path / "large.gguf"
    write_large(path)
    run = box.start("up", str(path), ready=False, inside=group.inside)
    assert run.wait() == 2
    assert "weights" in run.err and "MiB" in run.err and "Traceback" not in run.err
    peak = next(each for each in ("memory.max_usage_in_bytes", "memory.peak") if (group.folder / each).exists())
    assert int((group.folder / peak).read_text()) < 512 << 20


def write_large(path: Path) -> None:
    """A llama whose matrices are a hole in the file."""
    width, layers, vocab = 4096, 8, 512
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, value in (("block_count", layers), ("context_length", 2048), ("embedding_length", width)):
        writer.add_uint32(f"llama.{name}", value)
    for name, value in (("feed_forward_length", 4 * width), ("attention.head_count", 32), ("vocab_size", vocab)):
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    square, wide = (width, width), (4 * width, width)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocab, width), "output_norm": (width,)}
    for layer in range(layers):
        block = f"blk.{layer}."
        shapes |= {block + "attn_norm": (width,), block + "ffn_norm": (width,)}
        shapes |= {block + f"attn_{part}": square for part in ("q", "k", "v", "output")}
        shapes |= {block + "ffn_gate": wide, block + "ffn_up": wide, block + "ffn_down": (width, 4 * width)}
    end = 0
    for name, shape in shapes.items():
        kind = np.dtype(np.float32 if len(shape) == 1 else np.float16)
        size = int(np.prod(shape)) * kind.itemsize
        writer.add_tensor_info(f"{name}.weight", shape, kind, size)
        end += -(-size // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, -(-path.stat().st_size // 32) * 32 + end)
    assert path.stat().st_size > 3 << 30


def test_a_stopped_worker_costs_a_pause(box: Any, smollm2: str, usual: list[list[int]]) -> None:
    """SIGSTOP stops every thread of it: no end of file, no death. The plan's timeout tells, the next one answers."""
    run = box.up(smollm2, "--plan-timeout-s", "2")
    worker = run.get("/v1/homeserve/status")[1]["ranks"][0]["pid"]
    os.kill(worker, signal.SIGSTOP)
    assert answers(run) == usual
    rank = run.get("/v1/homeserve/status")[1]["ranks"][0]
    assert (rank["restarts"], rank["pid"] != worker) == (1, True)
