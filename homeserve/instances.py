"""Records of running servers, for `ps` and `down`: one JSON file per process in a folder of the user.

A record names its process by pid *and* start time, because a pid alone is soon somebody else's. A record whose process
is gone is swept by whoever reads the folder. The writer replaces its file in one step: no reader sees half of one.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from homeserve.errors import SettingError

CANCEL_LIMIT_S = 10.0
"""How long a start that was interrupted may take to let go."""
TEARDOWN_LIMIT_S = 30.0
"""How long the teardown may take after the drain, before the process leaves anyway."""

_MARGIN_S = 5.0
_RECORD_LIMIT_BYTES = 1 << 16


@dataclass(frozen=True)
class Instance:
    """One running server. `started` is Unix time; `birth` the start time of the process as the system counts it;
    `drain_timeout_s` how long it lets open requests end."""

    pid: int
    port: int
    url: str
    model: str
    state: str
    started: float
    birth: float
    drain_timeout_s: float
    log: str = ""
    """Path of the log that it keeps; empty: none."""

    @property
    def patience_s(self) -> float:
        """When it has ended by itself for certain: only one that hangs is still there."""
        return self.drain_timeout_s + CANCEL_LIMIT_S + TEARDOWN_LIMIT_S + _MARGIN_S

    def as_json(self) -> dict[str, object]:
        """What `ps` prints."""
        return {name: value for name, value in asdict(self).items() if name not in ("birth", "drain_timeout_s", "log")}


class Record:
    """The own record of this process: written at each change of state, removed at the end."""

    def __init__(self, folder: Path, port: int, url: str, model: str, drain_timeout_s: float) -> None:
        pid = os.getpid()
        self._path = folder / f"{pid}.json"
        self._facts = {"pid": pid, "port": port, "url": url, "model": model, "drain_timeout_s": drain_timeout_s}
        self._facts["log"] = ""
        self._facts |= {"started": round(time.time(), 3), "birth": process_birth(pid) or 0.0}

    def keeps_log(self, path: Path) -> None:
        """From the next `write` on."""
        self._facts["log"] = str(path)

    def write(self, state: str, model: str | None = None) -> None:
        """Raises OSError where the folder cannot be written."""
        if model is not None:
            self._facts["model"] = model
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(self._path, json.dumps(self._facts | {"state": state}))

    def remove(self) -> None:
        """A folder that could never be written, as `write` has said, holds no record."""
        with suppress(FileNotFoundError, NotADirectoryError):
            self._path.unlink()


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, never a part. Links are followed: what they name is replaced, they stay.
    Raises OSError, also for what is there and no regular file (see `target_of`)."""
    real = target_of(path)
    part = real.with_name(f".{real.name}.{os.getpid()}")
    try:
        part.unlink(missing_ok=True)
        # Never through a link that somebody laid there.
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(part, real)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def target_of(path: Path) -> Path:
    """The file behind `path`, which need not exist yet.

    Raises OSError that says why nothing may be written there: a device, a FIFO, a socket or a folder would be replaced
    by a file, and what this process prints into would lose what was printed.
    """
    real = Path(os.path.realpath(path))
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return real
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, f"it is {kind_of(found.st_mode)}, not a regular file")
    for descriptor in (1, 2):
        try:
            own = os.fstat(descriptor)
        except OSError:
            continue  # closed
        if os.path.samestat(own, found):
            raise OSError(errno.EINVAL, "this command's own output goes there")
    if not os.path.samestat(os.stat(real), found):
        raise OSError(errno.EINVAL, "it has no name that could be replaced")
    return real


def kind_of(mode: int) -> str:
    """What `st_mode` says that something is, where it is no regular file."""
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def check_ready_file(path: Path) -> None:
    """Raises SettingError where a ready file may not be written: no regular file, or one that is not empty and no
    ready file, such as a model that was named by mistake."""
    try:
        target_of(path)
        what = "" if _is_ready_file(path) else "there is a file that is no ready file, and it is not replaced"
    except OSError as error:
        what = error.strerror or str(error)
    if what:
        raise SettingError(f"--ready-file: {path}: {what}", field="ready_file", fix="name a file that is not there yet")


def remove_ready_file(path: Path) -> None:
    """What lies there and is no ready file stays."""
    try:
        if _is_ready_file(path):
            target_of(path).unlink(missing_ok=True)
    except OSError:
        return  # nothing that a server has written


def _is_ready_file(path: Path) -> bool:
    """Whether there is nothing, nothing in it, or what a server wrote when it was ready. Raises OSError."""
    try:
        with open(target_of(path), "rb") as file:
            content = file.read(_RECORD_LIMIT_BYTES + 1)
    except FileNotFoundError:
        return True
    try:
        facts = json.loads(content) if content.strip() else {"url": "", "pid": 0}
    except ValueError:
        return False
    return isinstance(facts, dict) and {"url", "pid"} <= facts.keys()


def running(folder: Path) -> list[Instance]:
    """The servers that run, oldest first. Records of dead processes are removed on the way."""
    found = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        instance = _read(path)
        if instance is None or not is_alive(instance):
            path.unlink(missing_ok=True)
        else:
            found.append(instance)
    return sorted(found, key=lambda instance: instance.started)


def is_alive(instance: Instance) -> bool:
    birth = process_birth(instance.pid)
    return birth is not None and abs(birth - instance.birth) < 0.02


def stop(
    instance: Instance,
    *,
    patience_s: float,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> bool:
    """SIGTERM, wait, and SIGKILL for one that does not end in `patience_s`. True when it ended by itself."""
    if not _signal(instance, signal.SIGTERM):
        return True
    deadline = clock() + patience_s
    while clock() < deadline:
        if not is_alive(instance):
            return True
        pause(0.02)
    _signal(instance, signal.SIGKILL)
    deadline = clock() + 5.0
    while is_alive(instance) and clock() < deadline:
        pause(0.02)
    return False


def process_birth(pid: int) -> float | None:
    """When the process began, in seconds since boot; None when there is no such process, or only its zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return None if Path("/proc/self").exists() else _birth_by_psutil(pid)
    except (ProcessLookupError, PermissionError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _birth_by_psutil(pid: int) -> float | None:
    psutil: Any = importlib.import_module("psutil")
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None


def _read(path: Path) -> Instance | None:
    try:
        with open(path, encoding="utf-8") as file:
            facts = json.loads(file.read(_RECORD_LIMIT_BYTES))
        return Instance(
            pid=int(facts["pid"]),
            port=int(facts["port"]),
            url=str(facts["url"]),
            model=str(facts["model"]),
            state=str(facts["state"]),
            started=float(facts["started"]),
            birth=float(facts["birth"]),
            drain_timeout_s=float(facts["drain_timeout_s"]),
            log=str(facts.get("log", "")),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _signal(instance: Instance, number: signal.Signals) -> bool:
    """False when the process is gone."""
    if not is_alive(instance):
        return False
    try:
        os.kill(instance.pid, number)
    except ProcessLookupError:
        return False
    return True
