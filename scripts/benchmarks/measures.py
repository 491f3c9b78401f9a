"""What is measured: each measure is a function from a running server to one number or two.

A request that answers two questions is asked once: 512 prompt tokens give prefill speed and time to first token, an
answer behind 2048 tokens gives prefill and decode at depth. Throughputs are tokens per second (more is better); times
and memory are better when small. A ratio is always turned so that above 1 means that homeserve did better.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from servers import Server

from homeserve.bench.client import complete
from homeserve.bench.measures import SHORT_PROMPT, at_once, decode, decoded, prefill_tok_s
from homeserve.bench.memory import memory_mib
from homeserve.bench.prompts import Prompts

LONG_PROMPT = 2048


Run = Callable[[Server, Prompts], Mapping[str, float]]


@dataclass(frozen=True)
class Measure:
    """`run` gives a value for each result of `gives`. `restarts`: it starts the server itself. `size`: 0 with --quick,
    1 with --full, 2 only by name. `warm`: taken once more before the first time, which does not count."""

    gives: tuple[str, ...]
    run: Run
    restarts: bool = False
    size: int = 1
    warm: bool = False


@dataclass(frozen=True)
class Result:
    """A row of the table. `chosen_by`: the result whose best setting of the peer is also this one's."""

    title: str
    unit: str
    more_is_better: bool
    chosen_by: str

    def ratio(self, ours: float, theirs: float) -> float:
        return ours / theirs if self.more_is_better else theirs / ours


def _prefill(server: Server, prompts: Prompts) -> Mapping[str, float]:
    timing = complete(server, prompts.draw(512), 1)
    return {"pp512": prefill_tok_s(timing), "ttft512": timing.ttft_s * 1000}


def _deep(server: Server, prompts: Prompts) -> Mapping[str, float]:
    timing, speed = decoded(server, prompts, LONG_PROMPT)
    return {"pp2048": prefill_tok_s(timing), "tg@2048": speed}


def _decode(server: Server, prompts: Prompts) -> Mapping[str, float]:
    return {"tg@0": decode(server, prompts)}


def _at_once(streams: int) -> Run:
    return lambda server, prompts: {f"conc{streams}": at_once(server, prompts, streams)}


def _start(server: Server, prompts: Prompts) -> Mapping[str, float]:
    """Seconds until ready, and to the first token of the first answer."""
    server.stop()
    ready = server.start()
    complete(server, prompts.draw(SHORT_PROMPT), 1)
    return {"start": ready, "start_token": time.monotonic() - server.started}


def _memory(server: Server, prompts: Prompts) -> Mapping[str, float]:
    return {"rss": memory_mib(server.pid)}


MEASURES = (
    Measure(("start", "start_token"), _start, restarts=True),
    Measure(("pp512", "ttft512"), _prefill, size=0, warm=True),
    Measure(("pp2048", "tg@2048"), _deep),
    Measure(("tg@0",), _decode, size=0, warm=True),
    Measure(("conc1",), _at_once(1), size=2),
    Measure(("conc4",), _at_once(4), size=2),
    Measure(("conc8",), _at_once(8), size=0, warm=True),
    Measure(("rss",), _memory),
)

RESULTS = {
    "pp512": Result("prefill, 512 tokens", "tok/s", True, "pp512"),
    "pp2048": Result("prefill, 2048 tokens", "tok/s", True, "pp512"),
    "tg@0": Result("decode", "tok/s", True, "tg@0"),
    "tg@2048": Result("decode after 2048 tokens", "tok/s", True, "tg@2048"),
    "conc1": Result("1 stream, prompt and answer", "tok/s", True, "tg@0"),
    "conc4": Result("4 streams, total", "tok/s", True, "conc8"),
    "conc8": Result("8 streams, total", "tok/s", True, "conc8"),
    "ttft512": Result("time to first token, 512 prompt tokens", "ms", False, "pp512"),
    "start": Result("start to ready", "s", False, "start_token"),
    "start_token": Result("start to first token", "s", False, "start_token"),
    "rss": Result("resident memory after the other rows", "MiB", False, "rss"),
    "sum8k": Result("sum of 8 KiB between 2 ranks", "us", False, "sum8k"),
    "tp2_vs_1x2": Result("decode, 2 ranks against 1 with 2 threads", "tok/s", True, "tp2_vs_1x2"),
    "flip": Result("flip with nothing live, beside the refill", "ms", False, "flip"),
    "flip_total": Result("flip with nothing live, in all", "ms", False, "flip"),
    "flip_refill": Result("refill of the arenas at a flip", "GB/s", True, "flip"),
    "flip_move": Result("rows and states at a flip", "GB/s", True, "flip"),
    "flip_mib": Result("flip, for each MiB that is live", "ms/MiB", False, "flip"),
    "step": Result("engine, for each step of 1 stream", "ms CPU", False, "step"),
    "step_gap": Result("worker without work, for each step of 1 stream", "ms", False, "step"),
    "step64": Result("engine, for each step of 64 streams", "ms CPU", False, "step"),
    "step_gap64": Result("worker without work, for each step of 64 streams", "ms", False, "step"),
    "draft_2": Result("2 drafts a round, both count", "tok/s", True, "draft_3"),
    "draft_3": Result("3 drafts, 2 count", "tok/s", True, "draft_3"),
    "draft_3of0": Result("3 drafts, none counts", "tok/s", True, "draft_3"),
    "draft_3of1": Result("3 drafts, 1 counts", "tok/s", True, "draft_3"),
    "draft_3of3": Result("3 drafts, all count", "tok/s", True, "draft_3"),
    "draft_2_ms": Result("a round of 2 drafts that count; a plain token", "ms", False, "draft_3"),
    "draft_3of0_ms": Result("a round of 3, none counts; a plain token", "ms", False, "draft_3"),
    "draft_3of1_ms": Result("a round of 3, 1 counts; a plain token", "ms", False, "draft_3"),
    "draft_3_ms": Result("a round of 3, 2 count; a plain token", "ms", False, "draft_3"),
    "draft_3of3_ms": Result("a round of 3, all count; a plain token", "ms", False, "draft_3"),
    "draft_new": Result("text that nobody foresees, behind 64 tokens", "tok/s", True, "draft_3"),
    **{
        f"draft_{kind}{suffix}": Result(f"{kind}{title}", unit, True, "draft_3")
        for kind in ("counting", "series", "copying", "prose", "code")
        for suffix, title, unit in (("", "", "tok/s"), ("_len", ", tokens for each round", "tokens"))
    },
}
"""In the order of the tables. Those from `sum8k` on are of several ranks (rank_tests.py, flip_tests.py), of the engine
alone (step_tests.py) and of drafting (draft_tests.py), the others of MEASURES."""

DRAFTING = frozenset(name for name in RESULTS if name.startswith("draft_"))
