"""Servers of several ranks that are compared with one rank, through the official client."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

NewBox = Callable[[Path], Any]
STEPS, TOP = 12, 5


@dataclass(frozen=True)
class Shape:
    layout: str
    memory: str
    ratio: str
    """The pipeline ratio or the weight vector."""
    tokens: str = ""

    @property
    def exact(self) -> bool:
        return self.layout == "pipeline"

    @property
    def flags(self) -> tuple[str, ...]:
        ranks = self.ratio.count(",") + 1
        told = ("--devices", f"cpu:{ranks}", "--layout", self.layout, "--memory", self.memory)
        if self.exact:
            return (*told, "--pipeline-ratio", self.ratio)
        return (*told, "--weight-vector", self.ratio, "--token-vector", self.tokens)

    def __str__(self) -> str:
        return "-".join(word for word in (self.layout, self.memory, self.ratio, self.tokens) if word)


@dataclass(frozen=True)
class Said:
    """One answer: its text, tokens, their log-probabilities and the best at each place."""

    text: str
    tokens: list[str]
    values: list[float | None]
    tops: list[dict[str, float]]

    def agrees(self, one: Said, error_max: float, *, drawn: bool = False) -> bool:
        """Whether this is the answer of one rank, in log-probabilities within `error_max`. False: they part where its
        best token leads by less than such an error (a `drawn` one may lie at the edge of another anywhere). Raises
        AssertionError for anything else that differs."""
        for at, (token, known) in enumerate(zip(self.tokens, one.tokens, strict=True)):
            for word in self.tops[at].keys() & one.tops[at].keys():
                assert abs(self.tops[at][word] - one.tops[at][word]) < error_max, (at, word)
            if token != known:
                best = sorted(one.tops[at].values())[-2:]
                assert drawn or best[1] - best[0] < 2 * error_max, f"{token!r} for {known!r} at {at}"
                return False
        return self.text == one.text


@dataclass
class Served:
    run: Any
    shape: Shape | None = None
    known: dict[str, Said] = field(default_factory=dict)
    """Of the rank that is asked alone: what it said."""

    @property
    def model(self) -> str:
        """As it is named in requests."""
        return str(self.run.get("/v1/models")[1]["data"][0]["id"])

    def ask_all(self, *asked: dict[str, Any]) -> list[Said]:
        """All of them as streams, at the same time."""
        return asyncio.run(self.crowd(*asked))

    async def crowd(self, *asked: dict[str, Any]) -> list[Said]:
        async with self.client() as client:
            model = self.model
            return list(await asyncio.gather(*(said(client, model, each) for each in asked)))

    def alone(self, asked: dict[str, Any]) -> Said:
        """The answer to a request that has the server for itself; asked once."""
        key = repr(sorted(asked.items()))
        if key not in self.known:
            (self.known[key],) = self.ask_all(asked)
        return self.known[key]

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.run.url}/v1", api_key="none", max_retries=0, timeout=250)

    def whole(self, **asked: Any) -> Any:
        """A completion that is no stream."""
        with openai.OpenAI(base_url=f"{self.run.url}/v1", api_key="none", max_retries=0, timeout=250) as client:
            return client.completions.create(model=self.model, **{"temperature": 0} | asked)

    async def leave(self, prompt: str | list[int], after: int) -> int:
        """Read `after` pieces of a long answer and go."""
        async with self.client() as client:
            asked = greedy(prompt, max_tokens=48, extra_body={"ignore_eos": True})
            stream = await client.completions.create(model=self.model, stream=True, **asked)
            read = 0
            async for _ in stream:
                read += 1
                if read == after:
                    break
            await stream.close()
        return read

    def engine(self) -> dict[str, Any]:
        status: dict[str, Any] = self.run.get("/v1/homeserve/status")[1]["engine"]
        return status

    def check_idle(self, wait_until: Callable[..., Any], restarts: int = 0) -> None:
        """Nothing runs, every page and state is free or cached, and so many times all ranks were started again."""
        wait_until("an idle census", lambda: self.run.get("/v1/homeserve/census")[1]["idle"])
        census = self.run.get("/v1/homeserve/census")[1]
        assert census["ok"], census
        for pool in census["ranks"]:
            assert pool["free"] + pool["cached"] == pool["capacity"] and pool["leaks"] == [], pool
        status = self.run.get("/v1/homeserve/status")[1]
        assert status["requests"]["running"] == status["requests"]["waiting"] == 0
        assert [rank["restarts"] for rank in status["ranks"]] == [restarts] * len(status["ranks"]), status["events"]


def greedy(prompt: str | list[int], **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": STEPS, "temperature": 0, "logprobs": TOP} | more


async def said(client: openai.AsyncOpenAI, model: str, asked: dict[str, Any]) -> Said:
    answer = Said("", [], [], [])
    text = ""
    async for chunk in await client.completions.create(model=model, stream=True, **asked):
        for choice in chunk.choices:
            text += choice.text
            if choice.logprobs is not None:
                answer.tokens.extend(choice.logprobs.tokens or [])
                answer.values.extend(choice.logprobs.token_logprobs or [])
                answer.tops.extend(choice.logprobs.top_logprobs or [])
    return Said(text, answer.tokens, answer.values, answer.tops)


def started(box: Any, model: str, flags: Sequence[str], shape: Shape | None = None) -> Iterator[Served]:
    """A server, of one rank without a shape; at the end it must drain and leave no process and no shared memory."""
    try:
        run = box.up(model, *flags, *(shape.flags if shape else ()))
        yield Served(run, shape)
        run.send(signal.SIGTERM)
        assert run.wait() == 0, run.err
        assert run.left_behind() == []
    finally:
        box.close()
