"""`python -m homeserve` in a source tree: its helpers run the same code, whatever is installed beside it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import backends
import budget
import homeserve


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The Python part of a source tree, not built."""
    root = tmp_path / "tree"
    for package in (homeserve, backends, budget):
        source = Path(package.__file__ or "").parent
        shutil.copytree(source, root / source.name, ignore=shutil.ignore_patterns("__pycache__", "native", "lib"))
    (root / "CMakeLists.txt").touch()
    return root


def start(tree: Path, *argv: str, **environ: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOMESERVE_", "XDG_", "PYTHON"))}
    return subprocess.Popen(
        [sys.executable, "-m", "homeserve", *argv],
        cwd=tree,
        env=kept | {"HOME": str(tree.parent)} | environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_workers_and_helpers_come_from_the_tree(tree: Path, tiny: str, wait_until: Callable[..., Any]) -> None:
    ready = tree.parent / "ready.json"
    with start(tree, "up", tiny, "--port", "0", "--backend", "reference", "--ready-file", str(ready)) as process:
        try:
            wait_until("ready", lambda: ready.exists() or process.poll() is not None)
            assert process.poll() is None, process.communicate()
            below = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            pids = wait_until("a worker", lambda: below.read_text().split())
            seen = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pids]
            assert all(f"PYTHONPATH={tree}".encode() in variables for variables in seen)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_tree_that_was_not_built_says_how(tree: Path, tiny: str) -> None:
    with start(tree, "up", tiny, "--port", "0") as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"no native CPU library in {tree}/backends/cpu/lib" in err
    assert f"cmake --install {tree}/build/native --prefix {tree}" in err and "Traceback" not in err
