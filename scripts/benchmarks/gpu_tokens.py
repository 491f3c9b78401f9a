"""Whole models on a card against the oracle, the CPU's kernels: the same questions to a server on each, greedily.

    the model that counts     the answers are equal to the token, and the right ones
    the default model         equal up to the first place where the oracle's best two tokens lie closer than what the
                              two sides differ by anyway, as measured on the tokens before

The speed of the second is told in tokens per second, of one stream, as a client sees it.
"""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_fleet import COUNTER, server_on
from gpu_rows import Teller
from servers import Server

from homeserve.bench.client import complete

COUNTS = {"1 2 3 4 5": " 6 7 8 9", "11 12 13 14": " 15 16 17"}
PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):",
    "Once upon a time, in a small village by the sea, there lived",
)
CARDS = ("cuda", "rocm")
ANSWER, COUNT_ANSWER = 32, 8
PROMPT_WORDS, DECODED = 400, 128
ASK_S = 180.0
TINY_ROOM, ROOM = "256", "2048"


@dataclass(frozen=True)
class Said:
    """An answer: its tokens, the logarithm of each one's probability, and how far the best two lie apart."""

    tokens: tuple[str, ...]
    values: tuple[float, ...]
    gaps: tuple[float, ...]
    text: str = ""


@dataclass(frozen=True)
class Agreement:
    """`equal`: tokens up to the first that differs, of `total`; `apart`: the most by which the values of equal ones
    differ; `gap`: of the oracle's best two where they part, None where they do not."""

    equal: int
    total: int
    apart: float
    gap: float | None

    @property
    def excused(self) -> bool:
        """They part where either token would have been right within what both sides differ by."""
        return self.gap is None or self.gap <= 2 * self.apart


def agreement(card: Said, oracle: Said) -> Agreement:
    total = len(oracle.tokens)
    equal = next((i for i in range(total) if card.tokens[i : i + 1] != oracle.tokens[i : i + 1]), total)
    pairs = zip(card.values[:equal], oracle.values[:equal], strict=True)
    apart = max((abs(mine - theirs) for mine, theirs in pairs), default=0.0)
    return Agreement(equal, total, apart, oracle.gaps[equal] if equal < total else None)


def run(tell: Teller, device: str, folder: Path, model: str, *, quick: bool, tiny: bool) -> None:
    if COUNTER.is_file():
        _counts(tell, device, folder, tiny=tiny)
    else:
        tell.row("the model that counts", ok=False, note=f"{COUNTER.name} is not in this checkout")
    if not tiny:
        tell.at("the default model")
        path = model or _default_model()
        _compared(tell, device, folder, path, PROMPTS[:2] if quick else PROMPTS)


def _default_model() -> str:
    from homeserve.checkpoint.names import default_model_path

    return str(default_model_path())


def _counts(tell: Teller, device: str, folder: Path, *, tiny: bool) -> None:
    asked = dict(list(COUNTS.items())[:1]) if tiny else COUNTS
    tell.at("the model that counts, on the CPU")
    with _serving("cpu", str(COUNTER), folder, TINY_ROOM if tiny else ROOM) as oracle:
        wanted = {prompt: _asked(oracle, prompt, COUNT_ANSWER) for prompt in asked}
    tell.at("the model that counts, on the card")
    with _serving(device, str(COUNTER), folder, TINY_ROOM if tiny else ROOM) as server:
        backend = _backend(server)
        got = {prompt: _asked(server, prompt, COUNT_ANSWER) for prompt in asked}
    wrong = [f"{prompt!r}: {got[prompt].text!r}" for prompt in asked if got[prompt].tokens != wanted[prompt].tokens]
    wrong += [
        f"{prompt!r}: {got[prompt].text!r} is not right" for prompt, said in asked.items() if not _is(got[prompt], said)
    ]
    total = sum(len(said.tokens) for said in wanted.values())
    equal = sum(agreement(got[prompt], wanted[prompt]).equal for prompt in asked)
    on_card = backend in CARDS
    note = "; ".join(wrong) or ("" if on_card else f"the server ran on {backend}")
    what = "counter.gguf: tokens equal to the CPU's, and right"
    tell.row(what, float(equal), "tokens", of=float(total), goal=1.0, ok=on_card and not wrong, note=note)


def _is(said: Said, right: str) -> bool:
    return said.text.startswith(right) or right.startswith(said.text) and bool(said.text)


def _compared(tell: Teller, device: str, folder: Path, path: str, prompts: tuple[str, ...]) -> None:
    name = Path(path).name
    with _serving("cpu", path, folder, ROOM) as oracle:
        wanted = [_asked(oracle, prompt, ANSWER) for prompt in prompts]
    tell.at(f"{name} on the card")
    with _serving(device, path, folder, ROOM) as server:
        found = [agreement(_asked(server, prompt, ANSWER), said) for prompt, said in zip(prompts, wanted, strict=True)]
        equal, total = sum(each.equal for each in found), sum(each.total for each in found)
        note = f"logarithms of probabilities differ by {max(each.apart for each in found):.2g} at most"
        parted = [each for each in found if each.gap is not None]
        if parted:
            note += "; parted where the best two lie " + ", ".join(f"{each.gap:.2g}" for each in parted) + " apart"
        backend = _backend(server)
        excused = all(each.excused for each in found) and backend in CARDS
        note += "" if backend in CARDS else f"; the server ran on {backend}"
        tell.row(f"{name}: tokens equal to the CPU's", float(equal), "tokens", of=float(total), ok=excused, note=note)
        _speeds(tell, server, name)


def _speeds(tell: Teller, server: Server, name: str) -> None:
    """Each once before, which does not count."""
    tell.at(f"{name}: speed")
    for counts in (False, True):
        long = complete(server, _words(1 + counts), 1)
        decoded = complete(server, "The", DECODED, counted=True)
        if counts:
            tell.row(f"{name}: prefill of {long.prompt_tokens} tokens", long.prompt_tokens / long.ttft_s, "tok/s")
            tell.row(f"{name}: decode of {DECODED} tokens", decoded.decode_tok_s, "tok/s")


def _words(seed: int) -> str:
    choice = random.Random(seed)
    return " ".join(
        choice.choice("house river seven green window paper cloud under".split()) for _ in range(PROMPT_WORDS)
    )


@contextmanager
def _serving(device: str, model: str, folder: Path, room: str) -> Iterator[Server]:
    flags = ("--context", room, "--kv-tokens", room, "--max-running", "1", "--draft", "off")
    server = server_on(device, model, folder, *flags)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _backend(server: Server) -> str:
    """What its only rank computes on: an equal answer of another CPU rank would say nothing."""
    (rank,) = server.get("/v1/homeserve/status")["ranks"]
    return str(rank["backend"])


def _asked(server: Server, prompt: str, tokens: int) -> Said:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ASK_S) as answer:
        (choice,) = json.load(answer)["choices"]
    told: dict[str, Any] = choice["logprobs"]
    best = [sorted(each.values(), reverse=True) for each in told["top_logprobs"]]
    gaps = tuple(each[0] - each[1] if len(each) > 1 else 0.0 for each in best)
    return Said(tuple(told["tokens"]), tuple(told["token_logprobs"]), gaps, str(choice["text"]))
