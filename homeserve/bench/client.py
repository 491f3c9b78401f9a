"""One streamed completion over HTTP, with the clock read as each event arrives.

Prompts are token ids, so that no server's tokenizer is measured and all compute exactly as many tokens. What a server
says of the prefix cache is kept: a prompt that was not computed is no prefill.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 600.0
"""For every answer, also for the first token of a long prompt on a slow box."""
GET_TIMEOUT_S = 30.0
TOO_MANY = 429
SAID_LIMIT = 2000
"""Bytes of an error's body that are read where it is no JSON."""


@dataclass(kw_only=True)
class Target:
    """A server that is asked: `url` without a path; `key` and `model` (its id) where it wants them."""

    engine: str
    url: str = ""
    key: str | None = None
    model: str | None = None

    def get(self, path: str) -> Any:
        """The JSON that it answers. Raises Refused."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that it answers, whatever the status below 400. Raises Refused."""
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        connection = self.connect(TIMEOUT_S if body is not None else GET_TIMEOUT_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), self.headers())
            response = connection.getresponse()
            if response.status >= 400:
                raise refused(response)
            return read_json(response.read())
        finally:
            connection.close()

    def connect(self, timeout_s: float = TIMEOUT_S) -> http.client.HTTPConnection:
        """Not yet connected."""
        place = urlsplit(self.url)
        assert place.hostname is not None
        kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
        return kind(place.hostname, place.port, timeout=timeout_s)

    def headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return {"Content-Type": "application/json", **key}


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
    cached_tokens: int = 0
    """Tokens of the prompt that the server took from its cache, as it says."""

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


class Unmeasured(RuntimeError):
    """Something that was to be measured and could not be. The message says why, to a person."""


class HeldBack(Unmeasured):
    """An answer whose text came too late to time its tokens: ask something else."""


class WrongAnswer(Unmeasured):
    """An answer that is not what was asked for: another number of tokens, or an error in the middle of it."""


class Refused(Unmeasured):
    """An answer with an HTTP status of an error: `status`, the `code` of its body where it has one, and `said`."""

    def __init__(self, status: int, code: str, said: str) -> None:
        self.status, self.code, self.said = status, code, said
        queue = "the server's queue is full, " if status == TOO_MANY else ""
        super().__init__(f"{queue}the server answered {status}: {said}")


def read_json(text: bytes) -> Any:
    """Raises WrongAnswer."""
    try:
        return json.loads(text)
    except ValueError:
        raise WrongAnswer(f"the server answered what is no JSON: {text[:80]!r}") from None


def refused(response: http.client.HTTPResponse) -> Refused:
    """What an answer with the status of an error says, in the form that OpenAI's API has, or as it stands."""
    text = response.read(SAID_LIMIT)
    try:
        error = json.loads(text)["error"]
        return Refused(response.status, str(error.get("code") or ""), str(error.get("message") or ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        said = text.decode(errors="replace").strip()
        return Refused(response.status, "", said or response.reason)


def complete(target: Target, prompt: Sequence[int] | str, max_tokens: int, counted: bool = False) -> Timing:
    """Stream one greedy completion of exactly `max_tokens` tokens. `counted`: the server tells how many came with each
    event. Raises Refused, and WrongAnswer where the answer has another length."""
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.model is not None:
        body["model"] = target.model
    if counted:
        body |= {"return_token_ids": True, "timings_per_token": True}
    connection = target.connect()
    try:
        connection.connect()
        sent = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), target.headers())
        response = connection.getresponse()
        if response.status != 200:
            raise refused(response)
        heard = _Heard()
        while line := response.readline():
            heard.line(line, time.monotonic())
    finally:
        connection.close()
    return heard.timing(sent, max_tokens, counted=counted)


class _Heard:
    """What the events of one answer said, and when."""

    def __init__(self) -> None:
        self._arrived: list[tuple[float, int]] = []
        self._usage: dict[str, Any] = {}
        self._draft: Mapping[str, Any] = {}

    def line(self, line: bytes, now: float) -> None:
        """Raises WrongAnswer for an error that comes as an event."""
        if not line.startswith(b"data: {"):
            return
        event = read_json(line[6:])
        if error := event.get("error"):
            raise WrongAnswer(f"the answer broke off: {error.get('message', error)}")
        if event.get("choices"):
            self._arrived.append((now, (self._arrived[-1][1] if self._arrived else 0) + _tokens_of(event)))
        self._draft = (event.get("homeserve") or {}).get("draft") or self._draft
        self._usage = event.get("usage") or self._usage

    def timing(self, sent: float, max_tokens: int, *, counted: bool) -> Timing:
        """Raises WrongAnswer where there are not `max_tokens`."""
        if self._usage.get("completion_tokens") != max_tokens or not self._arrived:
            got = self._usage.get("completion_tokens", "an unknown number")
            raise WrongAnswer(f"asked for {max_tokens} tokens and got {got}")
        first, first_tokens = self._arrived[0]
        details = self._usage.get("prompt_tokens_details") or {}
        return Timing(
            sent,
            first,
            self._arrived[-1][0],
            max_tokens,
            int(self._usage.get("prompt_tokens") or 0),
            first_tokens,
            tuple(self._arrived) if counted else (),
            self._draft,
            int(details.get("cached_tokens") or 0),
        )


def _tokens_of(event: Mapping[str, Any]) -> int:
    """How many tokens are behind an event, as either server says it; 1 where it says nothing."""
    named = event["choices"][0].get("token_ids")
    return len(named) if named else int(event.get("timings", {}).get("predicted_n", 1))


def complete_at_once(target: Target, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Timing]:
    """All `prompts` streamed at the same time. Raises what the first of them that failed raised."""
    timings: list[Timing] = []
    errors: list[Exception] = []
    threads = [
        threading.Thread(target=_one, args=(target, prompt, max_tokens, timings, errors), daemon=True)
        for prompt in prompts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return timings


def _one(
    target: Target, prompt: Sequence[int], max_tokens: int, timings: list[Timing], errors: list[Exception]
) -> None:
    try:
        timings.append(complete(target, prompt, max_tokens))
    except (OSError, RuntimeError, http.client.HTTPException, ValueError) as error:
        errors.append(error)


def total_tok_s(timings: Sequence[Timing]) -> float:
    """Of answers at the same time: all tokens over first sent to last arrived."""
    wall = max(timing.last for timing in timings) - min(timing.sent for timing in timings)
    return sum(timing.tokens for timing in timings) / wall
