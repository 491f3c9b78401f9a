"""A `homeserve up` as the child of somebody else's process: started, waited for, watched and stopped.

A process of its own and no `App` inside the other program's: the server then has the life cycle that is tested
everywhere else, a crash takes nothing with it, and no event loop, signal handler or import of the two meet. It listens
on a free port of 127.0.0.1 and ends with its parent (`tether`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from homeserve.errors import WorkerStartError
from homeserve.instances import CANCEL_LIMIT_S, TEARDOWN_LIMIT_S

POLL_S = 0.05
TOLD_LINES = 40
"""Lines of its stderr that an error quotes."""
STOP_MARGIN_S = 5.0


class ServerProcess:
    """`start` returns when requests are answered, or raises. `on_end(code)` is called in a thread of its own when it
    ends without having been asked to."""

    def __init__(self, arguments: Sequence[str], drain_s: float, on_end: Callable[[int], None]) -> None:
        self._arguments = list(arguments)
        self._patience_s = drain_s + CANCEL_LIMIT_S + TEARDOWN_LIMIT_S + STOP_MARGIN_S
        self._on_end = on_end
        self._folder = Path(tempfile.mkdtemp(prefix="homeserve-replica-"))
        self._told: deque[str] = deque(maxlen=TOLD_LINES)
        self._process: subprocess.Popen[str] | None = None
        self._ready = False
        self._stopping = threading.Event()
        self._relay: threading.Thread | None = None
        self.url = ""

    @property
    def pid(self) -> int:
        """Of the server; 0 before it was started."""
        return self._process.pid if self._process is not None else 0

    def start(self, environ: Mapping[str, str]) -> None:
        """Blocks for as long as the load takes. Raises WorkerStartError with the last lines of its stderr. `environ` is
        the server's; the thread that calls this has to live as long as the server shall."""
        ready_file = self._folder / "ready.json"
        argv = [sys.executable, "-P", "-m", "homeserve.integrations.tether", str(os.getpid()), "up", *self._arguments]
        argv += ["--host", "127.0.0.1", "--port", "0", "--ready-file", str(ready_file)]
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=dict(environ),
            cwd=self._folder,  # a homeserve.toml of wherever the parent stands is not meant
            start_new_session=True,  # Ray kills the process group of an actor that died; the server has to drain
        )
        self._relay = threading.Thread(target=self._watch, args=(self._process,), name="homeserve", daemon=True)
        self._relay.start()
        while not ready_file.exists():
            if self._process.poll() is not None:
                self._relay.join()
                raise self._failure(self._process.returncode)
            time.sleep(POLL_S)
        self.url = str(json.loads(ready_file.read_text())["url"])
        self._ready = True

    def stop(self) -> None:
        """SIGTERM; open requests end for as long as it drains; SIGKILL for one that hangs beyond that."""
        self._stopping.set()
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(self._patience_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._relay is not None:
            self._relay.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self, process: subprocess.Popen[str]) -> None:
        """Passes its stderr on until it ends; reads on when nobody takes it, since its end has to be noticed."""
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                self._told.append(line)
                with contextlib.suppress(OSError, ValueError):  # closed or full: an error still quotes the line
                    sys.stderr.write(line)
        code = process.wait()
        if self._ready and not self._stopping.is_set():
            shutil.rmtree(self._folder, ignore_errors=True)
            self._on_end(code)

    def _failure(self, code: int) -> WorkerStartError:
        shutil.rmtree(self._folder, ignore_errors=True)
        said = "".join(self._told).strip() or "it said nothing"
        return WorkerStartError(f"homeserve up ended with exit code {code}: {said}", fix="mend what it says")
