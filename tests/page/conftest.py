"""A real browser for the page: the system's Chromium, driven by Playwright, against real servers."""

from __future__ import annotations

import hashlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from box import Box, Run, wait_until
from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # what the tests of the page share lies beside them
ROOT = HERE.parents[1]
NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The system's Chromium. Nothing is fetched for it; where there is none, a skip that CI does not allow."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("chromium is not installed")
    with sync_playwright() as playwright:
        # A container has neither its sandbox nor much shared memory.
        made = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield made
        made.close()


@pytest.fixture(name="wait_until")
def wait_until_fixture() -> Callable[..., Any]:
    """`wait_until(what, condition)`: the first true value of `condition`."""
    return wait_until


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2: str) -> Iterator[Run]:
    """The default model, for all tests that only ask it things; it must drain and leave nothing."""
    made = Box(tmp_path_factory.mktemp("page"))
    run = made.up(smollm2, "--context", "2048", "--kv-tokens", "8192", "--max-running", "4")
    try:
        yield run
        run.send(signal.SIGTERM)
        assert run.wait() == 0, run.err
        assert run.left_behind() == []
    finally:
        made.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The script of axe-core, of the version in package-lock.json."""
    if shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    lock = (HERE / "package-lock.json").read_bytes()
    folder = ROOT / "build" / "page" / f"npm-{hashlib.sha256(lock).hexdigest()[:12]}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy2(HERE / name, folder)
        command = ["npm", "ci", "--no-audit", "--no-fund", "--loglevel=error"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        (folder / "complete").touch()
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text()
