"""One generation request from the engine to the client, as a body or as a stream.

    Ask ──▶ Generation (submit) ──events──▶ Choice (text) ──pieces──▶ Shape (JSON) ──▶ body | EventStream

What the engine refuses (queue full, draining, context) is raised before the response begins and becomes an HTTP status.
What fails later in a stream becomes an error event in the stream. A client that leaves cancels the handler, or makes a
write fail; either way `Generation` aborts what is open.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import Any

from aiohttp import web

from homeserve.engine.request import FinishReason, TokenEvent
from homeserve.errors import Draining, RequestError, RequestFailed
from homeserve.server.ask import Ask
from homeserve.server.bodies import encode, json_response
from homeserve.server.choice import Choice, ChoiceFailed, Piece, join
from homeserve.server.generation import Generation
from homeserve.server.metrics import Metrics
from homeserve.server.parts import Parts, Served
from homeserve.server.shapes import Shape
from homeserve.server.sse import PING_S, ClientLeft, ClientStalled, EventStream
from homeserve.server.timing import timing_block, usage_block

log = logging.getLogger("homeserve.server")


class Answer:
    """The choices of one answer and what is told about them."""

    def __init__(self, ask: Ask, served: Served, generation: Generation, metrics: Metrics, request_id: str) -> None:
        self._ask = ask
        self._generation = generation
        self._metrics = metrics
        self._request_id = request_id
        self._drafts = served.engine.drafting.most > 0
        self._choices = [Choice(served.tokenizer, ask.stops, silent=ask.silent) for _ in ask.calls]
        self._last_token: list[float | None] = [None] * len(ask.calls)
        self._open = len(ask.calls)

    @property
    def complete(self) -> bool:
        return self._open == 0

    def push(self, events: list[tuple[int, TokenEvent]]) -> list[tuple[int, Piece]]:
        """Pieces made by events of the engine. Raises ChoiceFailed."""
        made = []
        for index, event in events:
            choice = self._choices[index]
            was_open = choice.finish is None
            piece = choice.push(event)
            if event.tokens:
                self._observe(index, len(event.tokens))
            if piece.stop_matched:
                self._generation.end(index)
            if was_open and choice.finish is not None:
                self._open -= 1
            made.append((index, piece))
        return made

    def _observe(self, index: int, tokens: int) -> None:
        """Time to the first token, then time between tokens; tokens that come together share the time."""
        now = time.monotonic()
        since = self._last_token[index]
        self._last_token[index] = now
        timings = self._generation.streams[index].timings
        if since is None and timings.first_token is not None:
            self._metrics.ttft.observe(timings.first_token - timings.submitted)
            since, tokens = timings.first_token, tokens - 1
        if since is not None and tokens:
            self._metrics.inter_token.observe(max(0.0, now - since) / tokens, tokens)

    def usage(self) -> dict[str, Any]:
        return usage_block(*self._counts())

    def timing(self) -> dict[str, Any]:
        prompt, completion, cached = self._counts()
        return timing_block(
            self._request_id,
            [stream.timings for stream in self._generation.streams],
            prompt_tokens=prompt,
            completion_tokens=completion,
            cached_tokens=cached,
            drafts=[stream.drafts for stream in self._generation.streams] if self._drafts else None,
        )

    def _counts(self) -> tuple[int, int, int]:
        """Tokens of the prompts (each once), of the answers, and of the prompts that were cached."""
        first_choices = self._generation.streams[:: self._ask.n]
        return (
            sum(len(prompt.ids) for prompt in self._ask.prompts),
            sum(choice.completion_tokens for choice in self._choices),
            sum(stream.usage.cached_tokens for stream in first_choices),
        )


async def respond(
    request: web.Request, parts: Parts, served: Served, ask: Ask, shape: Shape, request_id: str
) -> web.StreamResponse:
    """Generate and answer. Raises RequestError while nothing was sent."""
    async with Generation(served.engine, ask.calls) as generation:
        answer = Answer(ask, served, generation, parts.metrics, request_id)
        if ask.stream:
            return await _stream(request, parts, ask, answer, generation, shape, request_id)
        return await _body(parts, answer, generation, shape, len(ask.calls), request_id)


async def _body(
    parts: Parts, answer: Answer, generation: Generation, shape: Shape, choice_count: int, request_id: str
) -> web.Response:
    pieces: list[list[Piece]] = [[] for _ in range(choice_count)]
    try:
        while not answer.complete:
            for index, piece in answer.push(await generation.next_events()):
                pieces[index].append(piece)
    except ChoiceFailed as failure:
        raise _told(failure, parts, request_id) from None
    body = shape.body([join(of_choice) for of_choice in pieces])
    body["usage"] = answer.usage()
    body["homeserve"] = answer.timing()
    return json_response(body)


async def _stream(
    request: web.Request,
    parts: Parts,
    ask: Ask,
    answer: Answer,
    generation: Generation,
    shape: Shape,
    request_id: str,
) -> web.StreamResponse:
    out = EventStream(request, parts.context.settings.stream_stall_s)
    try:
        await out.start(request_id)
        while not answer.complete:
            events = await generation.next_events(PING_S)
            if not events:
                await out.ping()
                continue
            chunks = _chunks(answer.push(events), ask, answer, shape)
            if chunks:
                await out.send([encode(chunk) for chunk in chunks])
        await out.done()
    except ChoiceFailed as failure:
        with suppress(ClientLeft):
            await out.send([encode(_told(failure, parts, request_id).as_body())])
    except ClientStalled as stalled:
        log.warning("request %s: %s; it was aborted", request_id, stalled)
    except ClientLeft:
        # Usually the handler is cancelled first; here the write was.
        log.info("request %s: the client left; it was aborted", request_id)
    return out.response


def _chunks(pieces: list[tuple[int, Piece]], ask: Ask, answer: Answer, shape: Shape) -> list[dict[str, Any]]:
    """Chunks of these pieces, with usage where it is due."""
    chunks = [chunk for index, piece in pieces for chunk in shape.chunks(index, piece)]
    if ask.continuous_usage:
        for chunk in chunks:
            chunk["usage"] = answer.usage()
    elif ask.include_usage:
        for chunk in chunks:
            chunk["usage"] = None
    if answer.complete:
        if ask.include_usage:
            chunks.append(shape.tail())
        chunks[-1]["usage"] = answer.usage()
        chunks[-1]["homeserve"] = answer.timing()
    return chunks


def _told(failure: ChoiceFailed, parts: Parts, request_id: str) -> RequestError:
    """What the client hears of a sequence that ended without an answer; the reason goes to the log."""
    if failure.finish is FinishReason.ABORT and parts.context.state() == "draining":
        return Draining("the server is shutting down and ended this request")
    log.error("request %s failed: %s", request_id, failure.reason)
    return RequestFailed(request_id)
