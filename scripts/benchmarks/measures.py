"""What is measured: one entry per row of the table, each a function from a running server to one number.

Throughputs are tokens per second (more is better); `*_s`, `ttft512` and `rss` are better when small. A ratio is always
turned so that above 1 means that homeserve did better.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from client import complete, complete_at_once
from servers import Server

DECODE_TOKENS = 128
SHORT_PROMPT = 8
SHARED_PROMPT = 32


@dataclass(frozen=True)
class Prompts:
    """Random prompts: no two measures share one, so no cache of either server helps."""

    source: random.Random
    vocab: int

    def draw(self, length: int) -> list[int]:
        # The lowest ids are control tokens in every vocabulary that is measured here.
        return [self.source.randrange(min(300, self.vocab // 2), self.vocab) for _ in range(length)]


@dataclass(frozen=True)
class Measure:
    """`restarts` measures start the server themselves; the others find it running."""

    name: str
    unit: str
    more_is_better: bool
    run: Callable[[Server, Prompts], float]
    restarts: bool = False
    full_only: bool = False
    goal: float | None = None

    def ratio(self, ours: float, theirs: float) -> float:
        return ours / theirs if self.more_is_better else theirs / ours


def _prefill(length: int) -> Callable[[Server, Prompts], float]:
    def run(server: Server, prompts: Prompts) -> float:
        timing = complete(server.url, prompts.draw(length), 1)
        return timing.prompt_tokens / timing.ttft_s

    return run


def _decode(depth: int) -> Callable[[Server, Prompts], float]:
    def run(server: Server, prompts: Prompts) -> float:
        return complete(server.url, prompts.draw(max(depth, SHORT_PROMPT)), DECODE_TOKENS).decode_tok_s

    return run


def _at_once(streams: int) -> Callable[[Server, Prompts], float]:
    def run(server: Server, prompts: Prompts) -> float:
        return complete_at_once(server.url, [prompts.draw(SHARED_PROMPT) for _ in range(streams)], DECODE_TOKENS)

    return run


def _ttft(server: Server, prompts: Prompts) -> float:
    return complete(server.url, prompts.draw(512), 1).ttft_s * 1000


def _start(server: Server, prompts: Prompts) -> float:
    """Seconds until ready."""
    server.stop()
    return server.start()


def _start_to_token(server: Server, prompts: Prompts) -> float:
    """Seconds from the start of the program to the first token of its first answer."""
    server.stop()
    server.start()
    complete(server.url, prompts.draw(SHORT_PROMPT), 1)
    return time.monotonic() - server.started


def _memory(server: Server, prompts: Prompts) -> float:
    return server.memory_mib()


MEASURES = (
    Measure("start", "s", False, _start, restarts=True),
    Measure("start_token", "s", False, _start_to_token, restarts=True),
    Measure("pp512", "tok/s", True, _prefill(512)),
    Measure("pp2048", "tok/s", True, _prefill(2048), full_only=True),
    Measure("tg128@0", "tok/s", True, _decode(0), goal=0.5),
    Measure("tg128@2048", "tok/s", True, _decode(2048), full_only=True),
    Measure("conc1", "tok/s", True, _at_once(1)),
    Measure("conc4", "tok/s", True, _at_once(4)),
    Measure("conc8", "tok/s", True, _at_once(8)),
    Measure("ttft512", "ms", False, _ttft),
    Measure("rss", "MiB", False, _memory),
)

TITLES = {
    "start": "start to ready",
    "start_token": "start to first token",
    "pp512": "prefill, 512 tokens",
    "pp2048": "prefill, 2048 tokens",
    "tg128@0": "decode, 128 tokens",
    "tg128@2048": "decode, 128 tokens after 2048",
    "conc1": "1 stream, prompt and answer",
    "conc4": "4 streams, total",
    "conc8": "8 streams, total",
    "ttft512": "time to first token, 512 prompt tokens",
    "rss": "resident memory after the other rows",
}
