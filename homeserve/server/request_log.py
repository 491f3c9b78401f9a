"""The request log: one line for each request, at its end. Who, what, how long and how it ended; not what was said.

`--log-requests` off | on | full. With `full`, and with nothing else, prompts and answers are logged too, `TEXT_CHARS`
of each. Elsewhere in the log errors of requests come without their words, which may be a user's (`homeserve.log`).

Supervisors and pages that ask every few seconds (GET, answered well) are not logged; what is refused is.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from homeserve.server.request_record import RequestRecord

if TYPE_CHECKING:
    from homeserve.text.tokenizer import Tokenizer

log = logging.getLogger("homeserve.server.requests")

OFF, ON, FULL = "off", "on", "full"
TEXT_CHARS = 4096
"""Of a prompt, and of all answers to it together."""
_TEXT_TOKENS = 4096
_PROBES = frozenset({"/health", "/ready"})


class RequestLog:
    """`how`: off | on | full."""

    def __init__(self, how: str) -> None:
        self._how = how

    @property
    def full(self) -> bool:
        """Whether texts are logged."""
        return self._how == FULL

    def write(self, record: RequestRecord) -> None:
        if self._how != OFF and _is_told(record):
            log.info("request", extra=record.facts())


def text_of(tokenizer: Tokenizer, sequences: Sequence[Sequence[int]]) -> str:
    """The texts of token ids, one below the other, as much of them as is logged."""
    told: list[str] = []
    room = _TEXT_TOKENS
    for ids in sequences:
        told.append(tokenizer.decode(list(ids[:room])))
        room = max(0, room - len(ids))
    text = "\n".join(told)
    return text if len(text) <= TEXT_CHARS else f"{text[:TEXT_CHARS]}…"


def _is_told(record: RequestRecord) -> bool:
    if record.path in _PROBES:
        return False
    return record.status >= 400 or record.method not in ("GET", "HEAD")
