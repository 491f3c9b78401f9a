"""Log lines on stderr: one event a line, as text for people or as JSON for programs, and never a secret.

Modules log with the standard library (`logging.getLogger(__name__)`); facts go into `extra`, both formats show them:

    log.warning("worker lost", extra={"rank": 0, "seq": 17})
        text   12:30:01.250 WARNING fleet: worker lost  rank=0 seq=17
        json   {"at": "2025-01-31T12:30:01.250Z", "level": "warning", "from": "fleet", "event": "worker lost", …}

A line break inside an event is written as `\\n`, so that a line is always an event. Values whose name says that they
are secret, and words that look like a key, are masked at the last moment, whoever logged them.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import IO, Any

_PACKAGE = "homeserve."
_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}
_SECRET_NAME = re.compile(r"api_?key|authorization|token$|password|secret", re.I)
_SECRET_WORD = re.compile(r"(?<![\w-])(?:Bearer\s+\S+|sk-[\w-]{8,}|hf_[A-Za-z0-9]{8,})")
MASK = "***"


def setup(form: str = "text", level: str = "info", *, rank: int | None = None, stream: IO[str] | None = None) -> None:
    """Send every log record to `stream` (stderr) as one line. `rank` marks the lines of a worker."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(rank) if form == "json" else TextLines(rank))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    for chatty in ("asyncio", "aiohttp.access", "httpx", "huggingface_hub", "filelock", "urllib3"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))


class TextLines(logging.Formatter):
    def __init__(self, rank: int | None = None) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        rank = "" if self._rank is None else f"rank {self._rank} "
        line = f"{clock}.{int(record.msecs):03d} {record.levelname} {rank}{_short(record.name)}: {_event(record)}"
        facts = " ".join(f"{name}={_word(value)}" for name, value in _facts(record).items())
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        return _one_line("  ".join(part for part in (line, facts, trace) if part))


class JsonLines(logging.Formatter):
    def __init__(self, rank: int | None = None) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, Any] = {"at": at, "level": record.levelname.lower(), "from": _short(record.name)}
        line["event"] = _event(record)
        if self._rank is not None:
            line["rank"] = self._rank
        line.update((name, value) for name, value in _facts(record).items() if name not in line)
        if record.exc_info:
            line["trace"] = mask(self.formatException(record.exc_info))
        return json.dumps(line, default=str, ensure_ascii=False)


def mask(text: str) -> str:
    """`text` with everything that looks like a key replaced."""
    return _SECRET_WORD.sub(MASK, text)


def _event(record: logging.LogRecord) -> str:
    return mask(record.getMessage())


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    given = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    return {name: MASK if _SECRET_NAME.search(name) else _masked(value) for name, value in given.items()}


def _masked(value: object) -> object:
    return mask(value) if isinstance(value, str) else value


def _word(value: object) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or re.search(r"[\s\"=]", text) else text


def _short(name: str) -> str:
    return name.removeprefix(_PACKAGE)


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")
