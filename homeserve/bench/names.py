"""Tests by name: `pp512`, `tg128@2048`, `conc8`, `ttft512`, `start`, `rss`, `flip`, `step`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from homeserve.errors import SettingError
from homeserve.settings import near

USUAL = "pp512,pp2048,tg128@0,tg128@2048,conc8,ttft512,start,rss,flip,step"
FORMS = "ppN, tgN@D, concN, ttftN, start, rss, flip, step"
TOKENS_MOST = 1 << 20
STREAMS_MOST = 256
"""More than any server runs at once (`--max-running`)."""
ANSWER_LEAST = 2
"""A speed needs two tokens."""
TESTS_MOST = 64
_NAME = re.compile(r"(pp|ttft|conc)(\d{1,9})|tg(\d{1,9})(?:@(\d{1,9}))?|(start|rss|flip|step)")


@dataclass(frozen=True)
class Test:
    """One name. `kind`: pp | ttft | tg | conc | start | rss | flip | step. `count`: tokens of the prompt (pp, ttft) or
    of the answer (tg), or streams (conc). `depth`: prompt tokens that an answer is behind."""

    kind: str
    count: int = 0
    depth: int = 0

    @property
    def name(self) -> str:
        if self.kind == "tg":
            return f"tg{self.count}@{self.depth}"
        return f"{self.kind}{self.count or ''}"

    @property
    def asks(self) -> bool:
        """Whether it is measured by requests: once for each layout."""
        return self.kind in ("pp", "ttft", "tg", "conc")


def parse(text: str) -> tuple[Test, ...]:
    """Names with commas between, in order, each once. Raises SettingError."""
    words = [word.strip().lower() for word in text.split(",")]
    if len(words) > TESTS_MOST:
        raise SettingError(f"--tests: {len(words)} names", field="tests", fix=f"name at most {TESTS_MOST}")
    return tuple(dict.fromkeys(map(_parse, words)))


def _parse(word: str) -> Test:
    found = _NAME.fullmatch(word)
    if found is None:
        what = f"--tests: {word[:40]!r} is no test{near(word, USUAL.split(','))}"
        raise SettingError(what, field="tests", fix=f"use {FORMS}, with commas between")
    kind, count, answer, depth, alone = found.groups()
    if alone:
        return Test(alone)
    if kind:
        most = STREAMS_MOST if kind == "conc" else TOKENS_MOST
        return Test(kind, _within(word, int(count), 1, most))
    tokens = _within(word, int(answer), ANSWER_LEAST, TOKENS_MOST)
    return Test("tg", tokens, _within(word, int(depth or 0), 0, TOKENS_MOST))


def _within(word: str, number: int, low: int, high: int) -> int:
    if low <= number <= high:
        return number
    what = f"--tests: {word[:40]}: {number} is outside {low} to {high}"
    raise SettingError(what, field="tests", fix=f"use {low} to {high}")
