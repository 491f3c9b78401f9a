"""Answers that are known beforehand: what the drill of a flip asks, and how far an answer is right.

A model that counts has one right answer, whoever computes it and in whatever layout: each number is one more than the
one before. Of a model that does not count by itself the same greedy request without a flip is the measure; it may part
from itself for no fault, where two tokens are as likely up to the last digits that a layout changes.

Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

FIXTURE_START, CHAT_START = 17, 11
COUNTS_LEAST = 8
"""Right numbers by which a model is believed to count."""
_NUMBER = re.compile(r"\d+")


class Judge(Protocol):
    """How far a text is right."""

    words: str
    """What is compared, for a person."""

    def right(self, text: str) -> int:
        """Characters from the beginning that are right."""
        ...

    def wrong(self, text: str) -> str:
        """What stands where it is not right any more; empty where all of it is."""
        ...


@dataclass(frozen=True)
class Question:
    """A request: its route and body without length, and the number that the answer begins behind."""

    route: str
    body: dict[str, Any]
    start: int


QUESTIONS = (
    Question("/v1/completions", {"prompt": f"count {FIXTURE_START}:"}, FIXTURE_START),
    Question(
        "/v1/chat/completions",
        {
            "messages": [
                {
                    "role": "user",
                    "content": f"Count upward from {CHAT_START} to 400 in digits, with one space between numbers."
                    " Write the numbers and nothing else.",
                }
            ]
        },
        CHAT_START - 1,
    ),
)
"""In the form of the fixture model, and in words."""
ANY = Question("/v1/completions", {"prompt": "Once upon a time", "ignore_eos": True}, 0)
"""For a model that does not count."""


class Count:
    """Numbers that go up by one, with anything but digits between them."""

    words = "counting upward"

    def __init__(self, start: int) -> None:
        self._start = start

    def right(self, text: str) -> int:
        return self._walk(text)[1]

    def numbers(self, text: str) -> int:
        """How many are right."""
        return self._walk(text)[0]

    def wrong(self, text: str) -> str:
        count, end = self._walk(text)
        found = _NUMBER.search(text, end)
        if found is None or found.end() == len(text):
            return ""
        return f"{found[0][:12]} where {self._start + count + 1} was due"

    def _walk(self, text: str) -> tuple[int, int]:
        """(right numbers, where the last of them ends). A number at the very end may still grow: it does not count."""
        count = end = 0
        for found in _NUMBER.finditer(text):
            if found.end() == len(text) or found[0] != str(self._start + count + 1):
                break
            count, end = count + 1, found.end()
        return count, end


class Same:
    """The same text as that of another answer."""

    words = "the same greedy request without a flip"

    def __init__(self, known: str) -> None:
        self._known = known

    def right(self, text: str) -> int:
        known = self._known
        return next(
            (at for at, (a, b) in enumerate(zip(text, known, strict=False)) if a != b), min(len(text), len(known))
        )

    def wrong(self, text: str) -> str:
        at = self.right(text)
        if at == len(text) or at == len(self._known):
            return ""
        return f"{text[at : at + 24]!r} where {self._known[at : at + 24]!r} was due"


@dataclass(frozen=True)
class Leg:
    """One flip under an open answer. `watermark`: characters of the answer that had come by the time its commit was
    known, so what is behind them was made afterwards."""

    to: str
    id: int | None
    state: str
    reason: str | None
    watermark: int
    total_ms: float | None = None
    requests: int | None = None
    """That were open when it moved, by the record."""


def faults(judge: Judge, text: str, legs: list[Leg], margin: int, ended: str) -> list[str]:
    """Why this is no proof that the answer survived its flips; empty where it is one. `ended` says how the stream
    ended, empty while it had not."""
    found = []
    for leg in legs:
        if leg.state != "committed":
            found.append(
                f"the flip to {leg.to} is {leg.state}, not committed: {leg.reason or 'no reason is on record'}"
            )
        elif not leg.requests:
            found.append(f"the flip to {leg.to} carried no request")
    wrong = judge.wrong(text)
    if wrong:
        found.append(f"the answer is wrong after {judge.right(text)} characters: {wrong}")
    last = max((leg.watermark for leg in legs), default=0)
    if not wrong and judge.right(text) < last + margin:
        how = f": {ended}" if ended else ""
        found.append(f"{judge.right(text)} characters are right, and {last + margin} would have to be{how}")
    return found
