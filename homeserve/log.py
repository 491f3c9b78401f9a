"""Log lines on stderr: one event a line, as text for people or as JSON for programs, and never a secret.

Modules log with the standard library (`logging.getLogger(__name__)`); facts go into `extra`, both formats show them:

    log.warning("worker lost", extra={"rank": 0, "seq": 17})
        text   12:30:01.250 WARNING fleet: worker lost  rank=0 seq=17
        json   {"at": "2025-01-31T12:30:01.250Z", "level": "warning", "from": "fleet", "event": "worker lost", …}

A line break inside an event is written as `\\n`, so that a line is always an event, and so is every other control
character (`\\x1b`): what a client sent cannot steer the terminal of who reads the log. Values whose name says that they
are secret, and words that look like a key, are masked at the last moment, whoever logged them.

What is logged where requests are handled must not tell what users wrote. An exception's own words may quote it, so a
traceback from there has the places and the kinds of errors only, unless texts of requests are to be logged.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from typing import IO, Any

_PACKAGE = "homeserve."
_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}
_SECRET_NAME = re.compile(r"api_?key|authorization|token$|password|secret", re.I)
_SECRET_WORD = re.compile(r"(?<![\w-])(?:Bearer\s+\S+|sk-[\w-]{8,}|hf_[A-Za-z0-9]{8,})")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_LATE_CONTROL = re.compile(r"[\x7f-\x9f]")
"""DEL and C1: control characters that JSON leaves as they are."""
_OF_REQUESTS = ("homeserve.server", "homeserve.text", "asyncio", "aiohttp")
"""Loggers of whoever handles what users wrote."""
_CHAIN_LEN = 8
"""Errors that led to one another, of which a traceback tells."""
MASK = "***"


def setup(
    form: str = "text",
    level: str = "info",
    *,
    rank: int | None = None,
    stream: IO[str] | None = None,
    texts: bool = False,
) -> None:
    """Send every log record to `stream` (stderr) as one line. `rank` marks the lines of a worker; `texts`: what users
    wrote may be logged."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(rank, texts=texts) if form == "json" else TextLines(rank, texts=texts))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    for chatty in ("asyncio", "aiohttp.access", "httpx", "huggingface_hub", "filelock", "urllib3"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))


class _Lines(logging.Formatter):
    def __init__(self, rank: int | None = None, *, texts: bool = False) -> None:
        super().__init__()
        self._rank = rank
        self._texts = texts

    def _trace(self, record: logging.LogRecord) -> str:
        """The traceback, masked; empty without one."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return ""
        if not self._texts and record.name.startswith(_OF_REQUESTS):
            return places_of(error)
        return mask("".join(traceback.format_exception(error)).rstrip())


class TextLines(_Lines):
    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        rank = "" if self._rank is None else f"rank {self._rank} "
        line = f"{clock}.{int(record.msecs):03d} {record.levelname} {rank}{_short(record.name)}: {_event(record)}"
        facts = " ".join(f"{name}={fact_word(value)}" for name, value in _facts(record).items())
        return _one_line("  ".join(part for part in (line, facts, self._trace(record)) if part))


class JsonLines(_Lines):
    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, Any] = {"at": at, "level": record.levelname.lower(), "from": _short(record.name)}
        line["event"] = _event(record)
        if self._rank is not None:
            line["rank"] = self._rank
        line.update((name, value) for name, value in _facts(record).items() if name not in line)
        if trace := self._trace(record):
            line["trace"] = trace
        text = json.dumps(line, default=str, ensure_ascii=False)
        return _LATE_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def places_of(error: BaseException) -> str:
    """A traceback without the words of errors: where each was raised, and of which kind it is."""
    told: list[str] = []
    at: BaseException | None = error
    while at is not None and len(told) < _CHAIN_LEN:
        frames = traceback.extract_tb(at.__traceback__)
        places = "".join(f'  File "{each.filename}", line {each.lineno}, in {each.name}\n' for each in frames)
        told.append(f"Traceback:\n{places}{type(at).__module__}.{type(at).__qualname__}")
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return "\nafter\n".join(told)


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


def fact_word(value: object) -> str:
    """A fact's value in a line of text: quoted where it is not one word."""
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or re.search(r"[\s\"=]", text) else text


def _short(name: str) -> str:
    return name.removeprefix(_PACKAGE)


def _one_line(text: str) -> str:
    """`text` without control characters: C0, DEL and C1 are written as Python writes them."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)
