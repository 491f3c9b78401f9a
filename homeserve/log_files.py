"""The log that each server keeps for `homeserve logs`: JSON lines in a file of its own, of bounded size.

    LOG_DIR/20250131-123001-4711-8000.log       when it began, its pid, its port
    LOG_DIR/20250131-123001-4711-8000.log.1     what was before the last turn of the file

It has what goes to stderr, whoever reads that: a terminal, a container's runtime, systemd's journal. The file is the
user's alone (0600). Beyond `FILE_BYTES` it is turned over, so a server has twice that at most; of servers that have
ended the last `SERVERS_KEPT` keep theirs. A disk that is full costs the file, not the server.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homeserve.log import JsonLines, fact_word

FILE_BYTES = 4 << 20
SERVERS_KEPT = 8
_SUFFIX = ".log"
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
_READ_BYTES = 1 << 16

log = logging.getLogger("homeserve.log_files")


@dataclass(frozen=True)
class Name:
    """What the name of a log file says."""

    began: str
    pid: int
    port: int

    @classmethod
    def of(cls, path: Path) -> Name | None:
        """None: no log of a server."""
        words = path.name.removesuffix(_SUFFIX).split("-")
        if path.suffix != _SUFFIX or len(words) != 4 or not all(word.isascii() and word.isdigit() for word in words):
            return None
        return cls("-".join(words[:2]), int(words[2]), int(words[3]))

    @property
    def file(self) -> str:
        return f"{self.began}-{self.pid}-{self.port}{_SUFFIX}"


class LogFile(logging.Handler):
    """Writes each record as one line. Raises OSError where the file cannot be made."""

    def __init__(self, folder: Path, port: int, *, texts: bool = False, limit_bytes: int = FILE_BYTES) -> None:
        super().__init__()
        self.setFormatter(JsonLines(texts=texts))
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = folder / Name(time.strftime("%Y%m%d-%H%M%S"), os.getpid(), port).file
        self._limit = limit_bytes
        self._size = 0
        self._file: int | None = os.open(self.path, _CREATE, 0o600)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            data = f"{self.format(record)}\n".encode(errors="backslashreplace")
        except Exception:  # noqa: BLE001 - a log call with wrong arguments is told of, and its caller goes on
            self.handleError(record)
            return
        try:
            if self._size and self._size + len(data) > self._limit:
                self._turn()
            if self._file is not None:
                self._size += os.write(self._file, data)
        except OSError as error:
            self.close()
            log.warning("the log file is given up", extra={"path": str(self.path), "why": error.strerror})

    def close(self) -> None:
        """Idempotent."""
        logging.getLogger().removeHandler(self)
        if self._file is not None:
            os.close(self._file)
            self._file = None
        super().close()

    def _turn(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        os.replace(self.path, turned(self.path))
        self._file, self._size = os.open(self.path, _CREATE, 0o600), 0


def turned(path: Path) -> Path:
    """Where the older part of a log lies."""
    return path.with_name(path.name + ".1")


def files(folder: Path) -> list[Path]:
    """Logs of servers, the newest first."""
    found = [path for path in folder.glob(f"*{_SUFFIX}") if Name.of(path) is not None] if folder.is_dir() else []
    return sorted(found, key=lambda path: path.name, reverse=True)


def prune(own: Path, runs: Callable[[int], bool], kept: int = SERVERS_KEPT) -> None:
    """Remove logs of servers that have ended from the folder of `own`, the log of this process, but for the last ones.

    `runs` tells of a pid. Who had our pid before us has ended: in a container each server has the same. What cannot be
    removed, such as another user's log in a folder of several, stays.
    """
    for path in [path for path in files(own.parent) if path != own and _has_ended(path, runs)][kept:]:
        for part in (path, turned(path)):
            with suppress(OSError):
                part.unlink()


def _has_ended(path: Path, runs: Callable[[int], bool]) -> bool:
    name = Name.of(path)
    return name is not None and (name.pid == os.getpid() or not runs(name.pid))


# -------------------------------------------------------------------------------------------------------------- reading


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a log, the older part of it included. Raises OSError."""
    with closing(Follower(path)) as follower:
        return follower.before(count)


class Follower:
    """New lines of a log from its present end on, across turns of the file. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "rb")
        self._begin = self._file.seek(0, os.SEEK_END)
        self._rest = b""

    def before(self, count: int) -> list[str]:
        """The last lines before those that it follows, the older part of the log included. Only before these."""
        kept: deque[str] = deque(maxlen=count)
        with suppress(FileNotFoundError), open(turned(self._path), "rb") as older:
            # Turned since: the older part is then the file that is followed.
            if not os.path.samestat(os.fstat(older.fileno()), os.fstat(self._file.fileno())):
                kept.extend(_decoded(older.read()))
        self._file.seek(0)
        kept.extend(_decoded(self._file.read(self._begin)))
        return list(kept)

    def __iter__(self) -> Iterator[str]:
        """What is new now."""
        while True:
            yield from self._read()
            if not self._was_turned():
                return
            yield from self._read()  # what came before the turn
            self._file.close()
            self._file = open(self._path, "rb")

    def close(self) -> None:
        self._file.close()

    def _read(self) -> Iterator[str]:
        while data := self._file.read(_READ_BYTES):
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace")

    def _was_turned(self) -> bool:
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return False  # in the middle of it, or swept
        return not os.path.samestat(there, os.fstat(self._file.fileno()))


def _decoded(data: bytes) -> list[str]:
    return [line.decode(errors="replace") for line in data.removesuffix(b"\n").split(b"\n")] if data else []


def as_text(line: str) -> str:
    """A line as a person reads it; what is no JSON line stays what it is."""
    try:
        facts = json.loads(line)
    except ValueError:
        return line
    if not isinstance(facts, dict) or not {"at", "level", "from", "event"} <= facts.keys():
        return line
    rank = f"rank {facts.pop('rank')} " if "rank" in facts else ""
    head = f"{_local(str(facts.pop('at')))} {str(facts.pop('level')).upper()} {rank}{facts.pop('from')}: "
    event, trace = facts.pop("event"), facts.pop("trace", "")
    return head + "  ".join(part for part in (str(event), _facts(facts), str(trace)) if part)


def _facts(facts: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={fact_word(value)}" for name, value in facts.items())


def _local(at: str) -> str:
    """The moment `2025-01-31T12:30:01.250Z` in the time of this place."""
    from datetime import datetime

    try:
        moment = datetime.fromisoformat(at)
    except ValueError:
        return at
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S.") + f"{moment.microsecond // 1000:03d}"
