"""One generation request from the engine to the client, as a body or as a stream.

    Ask ──▶ Generation (submit) ──events──▶ Choice (parts) ──pieces──▶ Shape (JSON) ──▶ body | EventStream

A stream of one choice goes a shorter way as long as its client reads what is written (`_Direct`): the engine's step
ends in one call that turns each stream's tokens into bytes and gives them to its socket, and the handler sleeps until
there is something to wait for.

What the engine refuses (queue full, draining, context) is raised before the response begins and becomes an HTTP status.
What fails later in a stream becomes an error event in the stream, our own bugs too: a status cannot be told any more. A
client that leaves cancels the handler, or makes a write fail; either way `Generation` aborts what is open.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from aiohttp import web

from homeserve.engine.request import FinishReason, TokenEvent
from homeserve.errors import Draining, InvalidField, ModelUnloaded, RequestError, RequestFailed
from homeserve.server.ask import Ask
from homeserve.server.bodies import json_response
from homeserve.server.choice import Choice, ChoiceFailed, Piece, join
from homeserve.server.generation import Generation
from homeserve.server.metrics import ModelMetrics
from homeserve.server.parts import Parts, Served
from homeserve.server.request_log import text_of
from homeserve.server.request_record import CLIENT_LEFT, CLIENT_STALLED, RequestRecord, current_record
from homeserve.server.shape import Counts, Event, Shape, Told, frame
from homeserve.server.sse import ClientLeft, ClientStalled, EventStream
from homeserve.server.timing import timing_block

if TYPE_CHECKING:
    from homeserve.engine.stream import TokenStream

log = logging.getLogger("homeserve.server")


class Answer:
    """The choices of one answer and what is told about them."""

    def __init__(
        self,
        ask: Ask,
        served: Served,
        generation: Generation,
        metrics: ModelMetrics,
        request_id: str,
        *,
        keeps_tokens: bool = False,
    ) -> None:
        self._ask = ask
        self.model = served.model.id
        self._tokenizer = served.tokenizer
        self._kept: list[list[int]] | None = [[] for _ in ask.calls] if keeps_tokens else None
        self._engine = served.engine
        self._generation = generation
        self._metrics = metrics
        self._request_id = request_id
        self._drafts = served.engine.drafting.most > 0
        self._choices = [
            Choice(served.tokenizer, ask.stops, silent=ask.silent, reader=ask.make_reader()) for _ in ask.calls
        ]
        self._last_token: list[float | None] = [None] * len(ask.calls)
        self._open = len(ask.calls)
        self.told = Told(self._counts, self._timing)
        """What can be told now."""

    @property
    def guided_by(self) -> str:
        """The field that says what the answer has to be."""
        return self._ask.guided_by

    @property
    def unloaded(self) -> bool:
        """Whether its model goes out: what is left of it is cut off."""
        return self._engine.state in ("draining", "stopped")

    @property
    def complete(self) -> bool:
        return self._open == 0

    def push(self, events: list[tuple[int, TokenEvent]]) -> list[tuple[int, Piece]]:
        """Pieces made by events of the engine, none by those of a choice that has ended: a sequence that was told to
        end says so once more. Raises ChoiceFailed."""
        made = []
        for index, event in events:
            choice = self._choices[index]
            if choice.finish is not None:
                continue
            piece = choice.push(event)
            if event.tokens:
                self._observe(index, len(event.tokens))
            if piece.stop_matched:
                self._generation.end(index)
            if piece.finish is not None:
                self._open -= 1
            made.append((index, piece))
        if self._kept is not None:
            for index, piece in made:
                self._kept[index].extend(piece.tokens)
        return made

    def plain_text(self, event: TokenEvent) -> str | None:
        """What `push` makes of an event of the only choice, where that is text and nothing else; else None, and nothing
        has been pushed."""
        choice = self._choices[0]
        more = event.finish is not None or event.logprobs or event.prompt_logprobs or self._kept is not None
        if more or choice.finish is not None or not choice.plain:
            return None
        self._observe(0, len(event.tokens))
        return choice.push_plain(event.tokens)

    def note(self, record: RequestRecord) -> None:
        """Tell the request's record what came of it."""
        counts, ask = self._counts(), self._ask
        record.model, record.stream = self.model, ask.stream
        record.prompt_tokens, record.completion_tokens = counts.prompt, counts.completion
        record.cached_tokens = counts.cached
        record.timings = [stream.timings for stream in self._generation.streams]
        record.finishes = [choice.finish for choice in self._choices]
        if self._kept is not None:
            record.prompt = text_of(self._tokenizer, [prompt.ids for prompt in ask.prompts])
            record.answer = text_of(self._tokenizer, self._kept)

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

    def _timing(self) -> dict[str, Any]:
        return timing_block(
            self._request_id,
            [stream.timings for stream in self._generation.streams],
            counts=self._counts(),
            drafts=[stream.drafts for stream in self._generation.streams] if self._drafts else None,
        )

    def _counts(self) -> Counts:
        first_choices = self._generation.streams[:: self._ask.n]
        return Counts(
            prompt=sum(len(prompt.ids) for prompt in self._ask.prompts),
            completion=sum(choice.completion_tokens for choice in self._choices),
            cached=sum(stream.usage.cached_tokens for stream in first_choices),
            thought=sum(choice.thought_tokens for choice in self._choices),
        )


async def respond(
    request: web.Request, parts: Parts, served: Served, ask: Ask, shape: Shape, request_id: str
) -> web.StreamResponse:
    """Generate and answer. Raises RequestError while nothing was sent."""
    async with Generation(served.engine, ask.calls) as generation:
        metrics = parts.metrics.of(served.model.id)
        answer = Answer(ask, served, generation, metrics, request_id, keeps_tokens=parts.request_log.full)
        try:
            if ask.stream:
                return await _stream(request, parts, answer, generation, shape, request_id)
            return await _body(parts, answer, generation, shape, len(ask.calls), request_id)
        finally:
            answer.note(current_record())
            metrics.count_request(current_record())


async def _body(
    parts: Parts, answer: Answer, generation: Generation, shape: Shape, choice_count: int, request_id: str
) -> web.Response:
    pieces: list[list[Piece]] = [[] for _ in range(choice_count)]
    try:
        while not answer.complete:
            for index, piece in answer.push(await generation.next_events()):
                pieces[index].append(piece)
    except ChoiceFailed as failure:
        raise _told(failure, parts, answer, request_id) from None
    return json_response(shape.body([join(of_choice) for of_choice in pieces], answer.told))


async def _stream(
    request: web.Request,
    parts: Parts,
    answer: Answer,
    generation: Generation,
    shape: Shape,
    request_id: str,
) -> web.StreamResponse:
    out = EventStream(request, parts.context.settings.stream_stall_s, shape.ping)
    try:
        await out.start(request_id)
        events = shape.begin(answer.told)
        if events:
            await out.send(events)
        stream = generation.only_stream()
        while not answer.complete:
            if stream is not None:
                if unwritten := await _Direct(stream, answer, shape, out).run():
                    await out.write(unwritten)
                continue
            events = _events(answer.push(await generation.next_events()), answer, shape)
            if events:
                await out.send(events)
        if shape.ends_with_done:
            await out.done()
    except ChoiceFailed as failure:
        await _send_error(out, shape, _told(failure, parts, answer, request_id))
    except ClientStalled as stalled:
        current_record().code = CLIENT_STALLED
        log.warning("request %s: %s; it was aborted", request_id, stalled)
    except ClientLeft:
        # Usually the handler is cancelled first; here the write was.
        current_record().code = CLIENT_LEFT
    except Exception:
        log.exception("request %s failed in its stream", request_id)
        await _send_error(out, shape, RequestFailed(request_id))
    finally:
        out.close()
    return out.response


class _Direct:
    """Writes the answer of one sequence as it comes, in the engine's own call."""

    def __init__(self, stream: TokenStream, answer: Answer, shape: Shape, out: EventStream) -> None:
        self._stream = stream
        self._answer = answer
        self._shape = shape
        self._out = out
        self._text_frames: Callable[[str], bytes] | None = None
        """Known once a piece has been written the long way."""
        self._over: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def run(self) -> bytes:
        """Until the answer is complete, or its client does not keep up: then returns what could not be written. Raises
        ChoiceFailed, ClientLeft, and whatever goes wrong here."""
        self._stream.listen(self._take)
        try:
            return await self._over
        finally:
            self._stream.listen(None)

    def _take(self, event: TokenEvent) -> None:
        """Whatever happens is told to the handler; other streams have their turn behind this one."""
        try:
            data = self._bytes(event)
            if data and not self._out.write_nowait(data):
                self._end(data)
            elif self._answer.complete:
                self._end(b"")
        except Exception as error:  # noqa: BLE001  the handler raises it
            self._stream.listen(None)
            if not self._over.done():
                self._over.set_exception(error)

    def _end(self, unwritten: bytes) -> None:
        self._stream.listen(None)
        if not self._over.done():
            self._over.set_result(unwritten)

    def _bytes(self, event: TokenEvent) -> bytes:
        if self._text_frames is not None and (text := self._answer.plain_text(event)) is not None:
            return self._text_frames(text) if text else b""
        events = _events(self._answer.push([(0, event)]), self._answer, self._shape)
        if events and self._text_frames is None:
            self._text_frames = self._shape.text_frames()
        return b"".join([frame(each) for each in events])


async def _send_error(out: EventStream, shape: Shape, error: RequestError) -> None:
    """The last event of a stream, for whoever still reads it."""
    current_record().code = error.code
    with suppress(ClientLeft, ClientStalled):
        await out.send([shape.error(error)])


def _events(pieces: list[tuple[int, Piece]], answer: Answer, shape: Shape) -> list[Event]:
    """What these pieces make, and the end where they are the last ones."""
    events: list[Event] = []
    for index, piece in pieces:
        events += shape.piece(index, piece, answer.told)
    return events + shape.end(answer.told) if answer.complete else events


def _told(failure: ChoiceFailed, parts: Parts, answer: Answer, request_id: str) -> RequestError:
    """What the client hears of a sequence that ended without an answer. The reason goes to the log, but for what the
    client's own grammar is the reason of."""
    if failure.finish is FinishReason.UNDRAWN and answer.guided_by:
        return InvalidField(answer.guided_by, f"no token could be drawn: {failure.reason}")
    if failure.finish is FinishReason.ABORT and parts.context.state() == "draining":
        return Draining("the server is shutting down and ended this request")
    if failure.finish is FinishReason.ABORT and answer.unloaded:
        return ModelUnloaded(answer.model)
    log.error("request %s failed: %s", request_id, failure.reason)
    return RequestFailed(request_id)
