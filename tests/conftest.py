"""What every tier shares: the default model, hypothesis without deadlines, no shared memory left, the tier's report."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# The test folders are no package (pytest's importlib mode); what several tiers share lies here.
sys.path.insert(0, str(Path(__file__).parent))

# A deadline would be a timing assert: on a busy machine it fails for no fault of the code.
settings.register_profile("homeserve", deadline=None, print_blob=True)
settings.load_profile("homeserve")

SHARED_MEMORY = Path("/dev/shm")
SEGMENTS_GONE_S = 10.0
CGROUP = Path("/sys/fs/cgroup")


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Path of the default model (SmolLM2-135M-Instruct Q4_1), fetched once into the cache.

    HOMESERVE_TEST_MODEL names a file to use instead.
    """
    named = os.environ.get("HOMESERVE_TEST_MODEL")
    if named:
        return named
    from homeserve.checkpoint.names import default_model_path

    return default_model_path()


@pytest.fixture(scope="session", autouse=True)
def no_shared_memory_left() -> Iterator[None]:
    """Fails the session if a segment made during it outlives its owner.

    Names carry the owner's pid: `homeserve-PID-RANDOM-...`. A segment of another live process is none of ours.
    """
    before = _segments()
    yield
    until = time.monotonic() + SEGMENTS_GONE_S
    while left := sorted(name for name in _segments() - before if not _lives_elsewhere(name)):
        if time.monotonic() > until:
            break
        time.sleep(0.1)  # a run that is spread has other tests beside this one, whose killed servers are being swept
    assert not left, f"shared memory left behind: {left}"


def _segments() -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob("homeserve-*")} if SHARED_MEMORY.is_dir() else set()


def _lives_elsewhere(name: str) -> bool:
    pid = name.split("-")[1]
    if not pid.isdigit() or int(pid) == os.getpid():
        return False
    return Path(f"/proc/{pid}").exists()


@dataclass
class LimitedGroup:
    """A control group with a memory limit, for commands that are to run in a small box."""

    folder: Path
    limit_bytes: int

    def inside(self, *argv: str) -> list[str]:
        """The command line that enters the group and becomes `argv`."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *argv]

    def run(self, *argv: str, timeout_s: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command in the group, to its end."""
        return subprocess.run(self.inside(*argv), capture_output=True, text=True, timeout=timeout_s, **options)

    def close(self) -> None:
        """Remove the group. Whoever is still in it is killed: a test that leaves processes has failed."""
        deadline = time.monotonic() + 10
        while self.folder.exists():
            for word in (self.folder / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(word), signal.SIGKILL)
            with suppress(OSError):  # busy until the last process is reaped
                self.folder.rmdir()
                break
            assert time.monotonic() < deadline, f"{self.folder} cannot be removed"
            time.sleep(0.01)


@pytest.fixture
def limited_group() -> Iterator[Callable[[int], LimitedGroup]]:
    """`limited_group(bytes)`: a control group of that size, version 1 or 2; where none can be made, a skip."""
    made: list[LimitedGroup] = []

    def make(limit_bytes: int) -> LimitedGroup:
        group = _limited_group(limit_bytes)
        if group is None:
            pytest.skip("making a control group with a memory limit needs root")
        made.append(group)
        return group

    yield make
    for group in made:
        group.close()


def _limited_group(limit_bytes: int) -> LimitedGroup | None:
    name = f"homeserve-test-{os.getpid()}-{secrets.token_hex(4)}"
    for point, limit_file in ((CGROUP / "memory", "memory.limit_in_bytes"), (CGROUP, "memory.max")):
        folder = point / name
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if limit_file == "memory.max" and not (folder / limit_file).exists():
                (point / "cgroup.subtree_control").write_text("+memory")
            (folder / limit_file).write_text(str(limit_bytes))
        except OSError:
            folder.rmdir()
            continue
        return LimitedGroup(folder, limit_bytes)
    return None


class Reporter:
    """Writes {"results": {id: outcome}, "skips": [[id, reason]]} for scripts/tiers.py.

    The outcome of a test is the worst of its setup, call and teardown. A module skipped as a whole is one skip.
    """

    RANK = {"passed": 0, "skipped": 1, "failed": 2}

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.results: dict[str, str] = {}
        self.skips: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        known = self.results.get(report.nodeid, "passed")
        self.results[report.nodeid] = max(known, report.outcome, key=self.RANK.__getitem__)
        if report.skipped:
            self.skips.append((report.nodeid, _reason(report.longrepr)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skips.append((report.nodeid, _reason(report.longrepr)))

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps({"results": self.results, "skips": self.skips}))


def _reason(longrepr: object) -> str:
    """pytest gives a skip as (file, line, reason)."""
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get("HOMESERVE_TEST_REPORT")
    if path and not hasattr(config, "workerinput"):  # one of several processes tells the first, which reports for all
        config.pluginmanager.register(Reporter(path), "homeserve-reporter")
