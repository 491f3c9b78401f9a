"""Clients of others against one real server of the default model; what each did becomes a row of a table.

`visit` runs one client as a process of its own, counts what it asked and what it was told (`/metrics`), and holds it to
exit code 0 and to no answer that is an error, but those that it provokes. The rows of a run are kept in
`build/clients/rows.json`, of which `tests/clients/page.py` makes docs/verification/clients.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from box import Box, Run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "clients"
MODEL = "smollm2"
CLIENT_S = 300.0
COMPAT = ("--metrics-compat", "vllm")
"""Load tests read the server's metrics under these names."""
_COUNT = re.compile(r'^homeserve_http_responses_total\{status="(\d+)"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """One client's visit. `errors` leaves out the `refused` that were provoked."""

    tool: str
    version: str
    command: str
    code: int
    requests: int
    errors: int
    refused: int
    tier: str
    commit: str
    """What was run; with `+` where files were changed since."""
    day: str


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2: str) -> Iterator[Run]:
    """The server that all clients visit; it must drain and leave nothing."""
    box = Box(tmp_path_factory.mktemp("clients"))
    run = box.up(
        smollm2, "--model-id", MODEL, "--context", "4096", "--kv-tokens", "16384", "--max-running", "8", *COMPAT
    )
    try:
        yield run
        status = run.get("/v1/homeserve/status")[1]
        assert all(rank["restarts"] == 0 for rank in status["ranks"])
        assert "Traceback" not in run.err, run.err
        run.send(signal.SIGTERM)
        assert run.wait() == 0, run.err
        assert run.left_behind() == []
    finally:
        box.close()


def answers(server: Run) -> Counter[int]:
    """Answers of the server so far, by status."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as told:
        text = told.read().decode()
    return Counter({int(status): int(float(count)) for status, count in _COUNT.findall(text)})


@pytest.fixture(scope="session")
def commit() -> str:
    """The commit of this checkout; "unknown" where it is none (an unpacked archive)."""
    asked = ("git", "describe", "--always", "--exclude=*", "--dirty=+")
    told = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    return told.stdout.strip() if told.returncode == 0 else "unknown"


@pytest.fixture
def visit(request: pytest.FixtureRequest, server: Run, commit: str) -> Callable[..., Row]:
    """`visit(tool, version, argv, ...)`: the row of a client that was run and did not fail. Its tier is `TIER` of the
    test's module."""

    def run(
        tool: str,
        version: str,
        argv: list[str],
        *,
        shown: str = "",
        cwd: Path | None = None,
        environ: dict[str, str] | None = None,
        least: int = 1,
        refused: int = 0,
        probes: bool = False,
        says: tuple[str, ...] = (),
        timeout_s: float = CLIENT_S,
    ) -> Row:
        """`refused`: errors that it provokes. `probes`: it asks for paths of other servers, to know which one this is;
        each is told 404. `says`: what it must have printed."""
        before = answers(server)
        try:
            done = subprocess.run(
                argv,
                cwd=cwd,
                env={**os.environ, **(environ or {})},
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            pytest.fail(f"{tool} did not end within {timeout_s:g} s: {late.stdout}\n{late.stderr}")
        print(done.stdout[-4000:], done.stderr[-4000:])
        told = answers(server) - before
        told[200] -= 1  # the question for `before`
        if probes:
            refused = told[404]
        wrong = sum(count for status, count in told.items() if status >= 400) - refused
        command = (shown or " ".join(argv)).replace(server.url, "URL").replace(str(HERE), "tests/clients")
        tier: str = request.module.TIER
        day = time.strftime("%Y-%m-%d", time.gmtime())
        row = Row(tool, version, command, done.returncode, told.total(), max(0, wrong), refused, tier, commit, day)
        _keep(row)
        assert done.returncode == 0, (row, done.stdout[-2000:], done.stderr[-4000:])
        assert all(each in done.stdout for each in says), (row, done.stdout)
        assert told.total() >= least, row
        assert wrong == 0, (row, told)
        return row

    return run


def _keep(row: Row) -> None:
    """Add it to the rows of this checkout; a newer visit of the same tool takes the older one's place."""
    BUILD.mkdir(parents=True, exist_ok=True)
    file = BUILD / "rows.json"
    rows = {each["tool"]: each for each in json.loads(file.read_text())} if file.exists() else {}
    rows[row.tool] = asdict(row)
    file.write_text(json.dumps(list(rows.values()), indent=1) + "\n")


# ------------------------------------------------------------------------------------------------------------------ npm


@pytest.fixture(scope="session")
def npm() -> Path:
    """A folder with the packages of package-lock.json and the scripts beside them. Made once for each lock."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    lock = (HERE / "package-lock.json").read_bytes()
    folder = BUILD / f"npm-{hashlib.sha256(lock).hexdigest()[:12]}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy2(HERE / name, folder)
        command = ["npm", "ci", "--no-audit", "--no-fund", "--loglevel=error"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        (folder / "complete").touch()
    for script in (HERE / "scripts").glob("*.mjs"):
        shutil.copy2(script, folder)
    return folder


@pytest.fixture(scope="session")
def npm_version(npm: Path) -> Callable[[str], str]:
    """`npm_version(package)`, as installed."""

    def version(package: str) -> str:
        told: dict[str, Any] = json.loads((npm / "node_modules" / package / "package.json").read_text())
        return str(told["version"])

    return version
