"""A server of this command's own: started on a free port, stopped with the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from homeserve.errors import SettingError, WorkerStartError
from homeserve.wire.children import environment

_POLL_S = 0.02
_STOP_S = 45.0
_TAIL_BYTES = 4096


@contextmanager
def _signals_held() -> Iterator[None]:
    """A signal that ends this command waits until the block is through: one that struck between the fork and the line
    behind it would leave a process that nobody knows."""
    caught: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {
        number: signal.signal(number, lambda caught_number, _: caught.append(caught_number)) for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if caught:
            os.kill(os.getpid(), caught[0])


class TemporaryServer:
    """`start` returns the URL once requests are answered. Both methods may be interrupted; `stop` then cleans up."""

    def __init__(self, model: str | None, flags: Sequence[str] = ()) -> None:
        up = [
            sys.executable,
            "-P",
            "-m",
            "homeserve",
            "up",
            "--port",
            "0",
            "--log-level",
            "warning",
            "--log-dir",
            "off",
        ]
        self._command = [*up, *flags]
        self._model = [model] if model else []
        self._process: subprocess.Popen[bytes] | None = None
        self.spawned = 0.0
        """When its process was started, on the monotonic clock."""
        self._folder = tempfile.TemporaryDirectory(prefix="homeserve-temporary-")

    def start(self) -> str:
        """Raises an error with what the server said when it does not come up; a download may take its time."""
        folder = Path(self._folder.name)
        ready, said = folder / "ready.json", folder / "stderr"
        with said.open("wb") as err, _signals_held():
            self.spawned = time.monotonic()
            # In a session of its own: the terminal's Ctrl-C is for this command, which then stops the server.
            self._process = subprocess.Popen(
                [*self._command, "--ready-file", str(ready), *self._model],
                env=environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
                start_new_session=True,
            )
        while not ready.exists():
            if self._process.poll() is not None:
                text = said.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
                kind = SettingError if self._process.returncode == SettingError.exit_code else WorkerStartError
                raise kind(f"the temporary server did not start:\n{text}")
            time.sleep(_POLL_S)
        return str(json.loads(ready.read_text())["url"])

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was started"
        return self._process.pid

    def stop(self) -> None:
        """Idempotent. Interrupted while it waits, it does not wait any longer: the server is killed."""
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_S)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        self._process = None
        self._folder.cleanup()
