"""One streamed completion over HTTP, with the clock read as each event arrives.

Prompts are token ids, so that neither server's tokenizer is measured and both compute exactly as many tokens.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Timing:
    """Seconds on the monotonic clock; `tokens` were generated, `prompt_tokens` read."""

    sent: float
    first: float
    last: float
    tokens: int
    prompt_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first - self.sent

    @property
    def decode_tok_s(self) -> float:
        """Tokens after the first one, over the time that they took."""
        return (self.tokens - 1) / (self.last - self.first)


def complete(url: str, prompt: list[int], max_tokens: int) -> Timing:
    """Stream one greedy completion of exactly `max_tokens` tokens. Raises RuntimeError where the answer is another."""
    place = urlsplit(url)
    assert place.hostname is not None
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=TIMEOUT_S)
    try:
        connection.connect()
        sent = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {response.read(2000)!r}")
        first = last = 0.0
        usage: dict[str, int] = {}
        while line := response.readline():
            now = time.monotonic()
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("choices"):
                first = first or now
                last = now
            usage = event.get("usage") or usage
    finally:
        connection.close()
    if usage.get("completion_tokens") != max_tokens or not first:
        raise RuntimeError(f"{url}: asked for {max_tokens} tokens and got {usage}")
    return Timing(sent, first, last, max_tokens, usage["prompt_tokens"])


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
