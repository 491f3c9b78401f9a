"""One streamed completion over HTTP, with the clock read as each event arrives.

Prompts are token ids, so that neither server's tokenizer is measured and both compute exactly as many tokens.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Timing:
    """Seconds on the monotonic clock; `tokens` were generated, `prompt_tokens` read. `first_tokens` of them came with
    the first event: a server holds text back that is no whole character yet, or none at all."""

    sent: float
    first: float
    last: float
    tokens: int
    prompt_tokens: int
    first_tokens: int = 1
    arrived: tuple[tuple[float, int], ...] = ()
    """When each event came, and how many tokens were out with it; known where it was `counted`."""
    draft: Mapping[str, Any] = field(default_factory=dict)
    """What the server says of drafting in this answer (`homeserve.draft`)."""

    @property
    def ttft_s(self) -> float:
        return self.first - self.sent

    @property
    def decode_tok_s(self) -> float:
        """Tokens after the first event, over the time that they took. Raises HeldBack where those are too few."""
        after = self.tokens - self.first_tokens
        if after * 2 < self.tokens or self.last <= self.first:
            raise HeldBack(f"{self.first_tokens} of {self.tokens} tokens came with the first event")
        return after / (self.last - self.first)

    def tok_s_after(self, tokens: int) -> float:
        """Tokens per second behind the event with which `tokens` are out. Raises HeldBack where that is the last."""
        found = next(((at, out) for at, out in self.arrived if out >= tokens), (self.last, self.tokens))
        if found[0] >= self.last:
            raise HeldBack(f"{found[1]} of {self.tokens} tokens came at once")
        return (self.tokens - found[1]) / (self.last - found[0])


class HeldBack(RuntimeError):
    """An answer whose text came too late to time its tokens: ask something else."""


def complete(url: str, prompt: list[int] | str, max_tokens: int, counted: bool = False) -> Timing:
    """Stream one greedy completion of exactly `max_tokens` tokens. `counted`: the server tells how many came with each
    event. Raises RuntimeError where the answer is another."""
    place = urlsplit(url)
    assert place.hostname is not None
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if counted:
        body |= {"return_token_ids": True, "timings_per_token": True}
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=TIMEOUT_S)
    try:
        connection.connect()
        sent = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {response.read(2000)!r}")
        first = last = 0.0
        first_tokens = 1
        usage: dict[str, int] = {}
        arrived: list[tuple[float, int]] = []
        draft: Mapping[str, Any] = {}
        while line := response.readline():
            now = time.monotonic()
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("choices"):
                if not first:
                    first, first_tokens = now, _tokens_of(event)
                last = now
                arrived.append((now, (arrived[-1][1] if arrived else 0) + _tokens_of(event)))
            draft = (event.get("homeserve") or {}).get("draft") or draft
            usage = event.get("usage") or usage
    finally:
        connection.close()
    if usage.get("completion_tokens") != max_tokens or not first:
        raise RuntimeError(f"{url}: asked for {max_tokens} tokens and got {usage}")
    known = tuple(arrived) if counted else ()
    return Timing(sent, first, last, max_tokens, usage["prompt_tokens"], first_tokens, known, draft)


def _tokens_of(event: dict[str, Any]) -> int:
    """How many tokens are behind the first event, as either server says it; 1 where it says nothing."""
    named = event["choices"][0].get("token_ids")
    return len(named) if named else int(event.get("timings", {}).get("predicted_n", 1))


def complete_at_once(url: str, prompts: list[list[int]], max_tokens: int) -> float:
    """Tokens per second over all `prompts` streamed at the same time: all tokens over first sent to last arrived."""
    timings: list[Timing] = []
    errors: list[Exception] = []

    def one(prompt: list[int]) -> None:
        try:
            timings.append(complete(url, prompt, max_tokens))
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    wall = max(timing.last for timing in timings) - min(timing.sent for timing in timings)
    return sum(timing.tokens for timing in timings) / wall
