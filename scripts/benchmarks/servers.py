"""The two servers of a comparison: how each is started, asked whether it is ready, weighed and stopped."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from homeserve.bench.client import Target

START_LIMIT_S = 180.0
READY_POLL_S = 0.005
SLOTS = 8
"""Requests that each server is set to run at once, each with room for the longest prompt."""


@dataclass
class Server(Target):
    """A server program and, between `start` and `stop`, its process.

    `command` lacks the port, which is appended as `--port N`. `health` answers 200 once requests are served.
    """

    engine: str
    command: list[str]
    log: Path
    health: str = "/health"
    settings: str = ""
    realtime: bool = True
    """Before everything else on the machine, where the system allows it: for measurements of time."""
    environ: dict[str, str] = field(default_factory=dict)
    """Variables that it is started with besides."""
    process: subprocess.Popen[bytes] | None = None
    started: float = field(default=0.0)

    def start(self) -> float:
        """Start and wait until ready. Returns the seconds that it took. Raises RuntimeError with the log's end."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        with self.log.open("ab") as log:
            self.started = time.monotonic()
            self.process = subprocess.Popen(
                [*(realtime(1) if self.realtime else ()), *self.command, "--port", str(port)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=os.environ | self.environ,
            )
        while time.monotonic() - self.started < START_LIMIT_S:
            if self.process.poll() is not None:
                break
            if self._ready():
                return time.monotonic() - self.started
            time.sleep(READY_POLL_S)
        self.stop()
        raise RuntimeError(f"{self.engine} did not become ready; its log ends:\n{self.log_text()[-3000:]}")

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self.health, timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    @property
    def pid(self) -> int:
        assert self.process is not None, "it runs"
        return self.process.pid

    def stop(self) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process = None

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def homeserve(
    model: str, threads: int, slot_tokens: int, folder: Path, program: Sequence[str] = (), engine: str = "homeserve"
) -> Server:
    """A homeserve: that of the environment that runs this script where no `program` is named."""
    command = [*(program or (sys.executable, "-m", "homeserve")), "up", model, "--host", "127.0.0.1"]
    command += ["--threads", str(threads), "--context", str(slot_tokens), "--max-running", str(SLOTS)]
    command += ["--kv-tokens", str(SLOTS * slot_tokens), "--prefix-cache", "off"]
    return Server(engine, command, folder / f"{engine}.log")


def llama_server(
    program: str, model: str, threads: int, slot_tokens: int, folder: Path, settings: Sequence[str]
) -> Server:
    """The peer, with room for as many tokens; its host-memory prompt cache, which no measure can hit, is off."""
    command = [program, "-m", model, "--host", "127.0.0.1", "-t", str(threads), "-tb", str(threads)]
    command += ["-c", str(SLOTS * slot_tokens), "-np", str(SLOTS), "--no-webui", "-cram", "0", *settings]
    return Server("llama-server", command, folder / "llama-server.log", settings=" ".join(settings))


def is_homeserve(program: str) -> bool:
    """Whether the peer is a homeserve as well: another build, or this one to see what the machine's noise is."""
    return Path(program).name == "homeserve"


def peer_version(program: str) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
    match = re.search(r"version: *(.+)", done.stdout + done.stderr)
    return match[1].strip() if match else "unknown"


def peer_isa(program: str, model: str, folder: Path) -> str:
    """The instruction sets of the peer, such as `AVX2 F16C FMA`, as a start with a verbose log says them."""
    server = llama_server(program, model, 1, 256, folder, ["-lv", "4"])
    server.log = folder / "llama-server-isa.log"
    server.start()
    server.stop()
    match = re.search(r"system_info:.*?CPU :(.*)", server.log_text())
    found = re.findall(r"(\w+) = 1\b", match[1]) if match else []
    return " ".join(found) or "unknown"


def realtime(priority: int) -> list[str]:
    """Prefix that gives a program the first-in-first-out scheduler, where this user may: others disturb it less."""
    chrt = shutil.which("chrt")
    if not chrt:
        return []
    prefix = [chrt, "-f", str(priority)]
    allowed = subprocess.run([*prefix, "true"], capture_output=True, timeout=10, check=False).returncode == 0
    return prefix if allowed else []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
