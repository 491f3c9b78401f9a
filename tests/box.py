"""A real `homeserve` process in a world of its own: home, cache, records and working folder are the test's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 60.0
"""For everything that a test waits for. Long, because a busy machine proves nothing."""
POLL_S = 0.005

_SHM = Path("/dev/shm")


def wait_until(what: str, condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """The first true value of `condition`. Fails the test when it stays false."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(POLL_S)
    pytest.fail(f"not within {deadline_s:g} s: {what}")


@dataclass
class Run:
    """One started command. `pids` collects every process seen below it."""

    process: subprocess.Popen[bytes]
    folder: Path
    pids: set[int] = field(default_factory=set)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def out(self) -> str:
        return (self.folder / "stdout").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")

    @property
    def ready_file(self) -> Path:
        return self.folder / "ready.json"

    def send(self, number: int) -> None:
        self.pids |= children(self.pid)
        self.process.send_signal(number)

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Exit code. Children are noted until the end."""

        def ended() -> bool:
            self.pids |= children(self.pid)
            return self.process.poll() is not None

        wait_until(f"exit of pid {self.pid}; stderr:\n{self.err}", ended, deadline_s)
        return int(self.process.returncode)

    def wait_ready(self, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """Content of the ready file. Fails with what was said when the process ends instead."""

        def ready() -> bool:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.err}"
            self.pids |= children(self.pid)
            return self.ready_file.exists()

        wait_until("ready", ready, deadline_s)
        facts: dict[str, Any] = json.loads(self.ready_file.read_text())
        return facts

    @property
    def url(self) -> str:
        return str(json.loads(self.ready_file.read_text())["url"])

    def get(self, path: str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=DEADLINE_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def left_behind(self) -> list[str]:
        """Processes, shared memory, records and ready file that outlived it."""
        left = [f"process {pid}" for pid in self.pids | {self.pid} if _lives(pid)]
        left += [path.name for path in _SHM.glob(f"homeserve-{self.pid}-*")]
        left += [str(path) for path in (self.folder / "home").glob("**/run/*.json")]
        return left + [str(path) for path in self.folder.glob("*ready.json*")]


class Box:
    """Starts commands. Everything still running at the end of the test is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: list[Run] = []
        self._hogs: list[subprocess.Popen[bytes]] = []
        self.environ = {
            name: value for name, value in os.environ.items() if not name.startswith(("HOMESERVE_", "XDG_"))
        }

    def start(
        self, *argv: str, ready: bool = True, inside: Callable[..., list[str]] | None = None, **environ: str
    ) -> Run:
        """`homeserve ARGV...`; for `up` with `--port 0` and a ready file unless `ready` is False. `inside` makes a
        command line of one (a limited group's)."""
        folder = self.folder / str(len(self._runs))
        (folder / "home").mkdir(parents=True)
        if argv[0] in ("up", "serve") and ready:
            argv = (argv[0], "--port", "0", "--ready-file", str(folder / "ready.json"), *argv[1:])
        (self.folder / "tmp").mkdir(exist_ok=True)  # for evidence of deaths
        own = {"HOME": str(self.folder / "0" / "home"), "TMPDIR": str(self.folder / "tmp")}
        variables = self.environ | own | environ
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            command = [sys.executable, "-P", "-m", "homeserve", *argv]
            process = subprocess.Popen(
                command if inside is None else inside(*command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=variables,
                cwd=folder,
                start_new_session=True,
            )
        run = Run(process, folder)
        self._runs.append(run)
        return run

    def hog(self, inside: Callable[..., list[str]], mib: int) -> subprocess.Popen[bytes]:
        """A process that holds so much memory until it is ended."""
        script = f"import sys; held = bytearray(b'x') * ({mib} << 20); sys.stdin.read()"
        process = subprocess.Popen(inside(sys.executable, "-c", script), stdin=subprocess.PIPE)
        self._hogs.append(process)
        return process

    def run(self, *argv: str, **environ: str) -> Run:
        """Start and wait for the end."""
        run = self.start(*argv, ready=False, **environ)
        run.wait()
        return run

    def up(self, *argv: str, **environ: str) -> Run:
        """A server that is ready."""
        run = self.start("up", *argv, **environ)
        run.wait_ready()
        return run

    def close(self) -> None:
        for hog in self._hogs:
            hog.kill()
            hog.communicate()
        for run in self._runs:
            if run.process.poll() is None:
                run.pids |= children(run.pid)
                run.process.kill()
                run.process.wait()
            for pid in run.pids:
                if _lives(pid):
                    os.kill(pid, signal.SIGKILL)
            for path in _SHM.glob(f"homeserve-{run.pid}-*"):
                path.unlink(missing_ok=True)


def children(pid: int) -> set[int]:
    """Every process below `pid` now."""
    found: set[int] = set()
    todo = [pid]
    while todo:
        parent = todo.pop()
        try:
            tasks = os.listdir(f"/proc/{parent}/task")
        except OSError:  # it ended meanwhile
            continue
        for task in tasks:
            try:
                below = {int(word) for word in Path(f"/proc/{parent}/task/{task}/children").read_text().split()}
            except OSError:
                continue
            todo += below - found
            found |= below
    return found


def _lives(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"
