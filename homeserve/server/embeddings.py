"""`/v1/embeddings`: texts or token ids in, one vector of length 1 for each out.

    input ──tokens──▶ GenerateCall(pooling) x n ──a window at a time──▶ engine ──▶ float32 ──cut──▶ JSON, piece by piece

All inputs are made tokens and checked before the first is computed, so what is wrong with one of them is a 400 that
names it. Then they are fed: no more than WINDOWS times as many as run together are with the engine at a time, the next
one as soon as one is done. So a request of many inputs takes a few places of the queue and no more, and those of others
stand between. A full queue refuses the first input (429); a later one waits until one of its own is done.

What is done is kept until all of a request is, so what requests may keep together is bounded (`held`): 429 beyond it.
An answer of many numbers is written input by input, each encoded when its turn comes: as text it would be tens of
megabytes, and nothing else would run while it is made.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import logging
import math
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from homeserve.engine.request import FinishReason, GenerateCall
from homeserve.errors import ContextOverflow, Draining, InvalidField, QueueFull, RequestError, RequestFailed
from homeserve.server.bodies import encode, read_body
from homeserve.server.bounds import Bounds
from homeserve.server.context import Loaded
from homeserve.server.edge import current_request_id
from homeserve.server.embeddings_fields import INPUTS_LIMIT, EmbeddingsRequest
from homeserve.server.parts import PARTS, Parts
from homeserve.server.prompts import INLINE_CHARS, INLINE_TOKENS, check_ids, check_length
from homeserve.server.request_record import current_record
from homeserve.wire.records import Sampling

if TYPE_CHECKING:
    from homeserve.engine.engine import Engine
    from homeserve.text.tokenizer import Tokenizer

WINDOWS = 2
"""One window computes while the next one waits, so that the ranks never stand still for us."""
WHOLE_FLOATS = 1 << 14
"""Numbers of an answer that is sent in one piece."""
_MIXED = "mixes texts and token ids"
_serial = itertools.count(1)
_log = logging.getLogger("homeserve.server")
Ids = tuple[int, ...]


async def post_embeddings(request: web.Request) -> web.StreamResponse:
    parts = request.app[PARTS]
    parts.check_taking()
    body = await read_body(request, parts.context.settings.body_limit_bytes)
    fields = await parts.decoder.read(body, EmbeddingsRequest)
    async with parts.lease(fields.model) as served:
        return await _embedded(request, parts, served, fields)


async def _embedded(
    request: web.Request, parts: Parts, served: Loaded, fields: EmbeddingsRequest
) -> web.StreamResponse:
    """Raises InvalidField, ContextOverflow, QueueFull, RequestFailed."""
    hidden = served.engine.limits.hidden
    dimensions = fields.dimensions or hidden
    if dimensions > hidden:
        raise InvalidField("dimensions", f"is {dimensions}; embeddings of this model have {hidden}")
    special = fields.add_special_tokens is not False
    inputs = await embedding_inputs(served.tokenizer, fields.input, served.bounds, special=special)
    pooling = fields.pooling or pooling_said(served.settings.pooling, served.model.pooling)
    request_id = f"{current_request_id()}.{next(_serial)}"
    calls = [_call(f"{request_id}.{index}", ids, pooling) for index, ids in enumerate(inputs)]
    current_record().prompt_tokens = sum(map(len, inputs))
    with parts.embeddings.holding(4 * hidden * len(inputs)):
        vectors = await _fed(parts, served.engine, calls, current_request_id())
        pieces = answer_pieces(vectors, served.model.id, sum(map(len, inputs)), dimensions, fields.encoding_format)
        if len(vectors) * dimensions <= WHOLE_FLOATS:
            return web.Response(body=b"".join(pieces), content_type="application/json")
        return await _written(request, pieces, parts.context.settings.stream_stall_s)


def pooling_said(setting: str, of_model: str) -> str:
    """What `--pooling` says; `auto`: what the model's files do, and a language model's without a word is its last
    state, the only one that has seen all of the text."""
    return (of_model or "last") if setting == "auto" else setting


def _call(request_id: str, ids: Ids, pooling: str) -> GenerateCall:
    return GenerateCall(request_id, ids, Sampling(), 0, frozenset(), drafts=False, pooling=pooling)


# ----------------------------------------------------------------------------------------------------------- inputs


async def embedding_inputs(
    tokenizer: Tokenizer, given: str | list[str | int | list[int]], bounds: Bounds, *, special: bool
) -> list[Ids]:
    """Token ids of each input. Raises InvalidField, ContextOverflow, with the input's place."""
    if isinstance(given, str):
        return await _of_texts(tokenizer, [given], ["input"], bounds, special=special)
    if not given:
        raise InvalidField("input", "is empty")
    kinds = {type(item) for item in given}
    if kinds == {int}:
        return [await _of_ids([item for item in given if isinstance(item, int)], "input", tokenizer, bounds)]
    if len(kinds) > 1:
        raise InvalidField("input", _MIXED)
    if len(given) > INPUTS_LIMIT:
        raise InvalidField("input", f"has {len(given)} entries, the limit is {INPUTS_LIMIT}")
    where = [f"input[{index}]" for index in range(len(given))]
    texts = [item for item in given if isinstance(item, str)]
    if texts:
        return await _of_texts(tokenizer, texts, where, bounds, special=special)
    lists = zip([item for item in given if isinstance(item, list)], where, strict=True)
    return [await _of_ids(ids, place, tokenizer, bounds) for ids, place in lists]


async def _of_texts(
    tokenizer: Tokenizer, texts: Sequence[str], where: Sequence[str], bounds: Bounds, *, special: bool
) -> list[Ids]:
    for text, place in zip(texts, where, strict=True):
        if not text:
            raise InvalidField(place, "is empty")
        await check_length(len(text), tokenizer, bounds, place)

    def encoded() -> list[list[int]]:
        return [tokenizer.encode(text, add_special=special, parse_special=True) for text in texts]

    long = sum(map(len, texts)) > INLINE_CHARS
    every = await asyncio.to_thread(encoded) if long else encoded()
    return [_checked(ids, place, tokenizer, bounds) for ids, place in zip(every, where, strict=True)]


async def _of_ids(ids: list[int], where: str, tokenizer: Tokenizer, bounds: Bounds) -> Ids:
    if len(ids) > bounds.context:
        raise ContextOverflow(len(ids), bounds.context, where)
    await check_ids(ids, bounds.vocab, where)
    if len(ids) > INLINE_TOKENS:
        await asyncio.sleep(0)
    return _checked(ids, where, tokenizer, bounds)


def _checked(ids: list[int], where: str, tokenizer: Tokenizer, bounds: Bounds) -> Ids:
    """No token is drawn behind an input, so it may have all of the context."""
    if not ids:
        raise InvalidField(where, "has no tokens")
    if len(ids) > bounds.context:
        raise ContextOverflow(len(ids), bounds.context, where)
    if bounds.vocab < tokenizer.vocab_size and max(ids) >= bounds.vocab:
        raise InvalidField(where, f"has the token {max(ids)}, for which the model has no weights")
    return tuple(ids)


# ---------------------------------------------------------------------------------------------------------- feeding


async def _fed(parts: Parts, engine: Engine, calls: Sequence[GenerateCall], request_id: str) -> list[bytes]:
    try:
        return await Feed(engine, calls).run()
    except EmbeddingFailed as failure:
        if failure.finish is FinishReason.ABORT and (parts.draining or engine.state in ("draining", "stopped")):
            raise Draining("the server is shutting down and ended this request") from None
        _log.error("request %s failed: %s", request_id, failure)
        raise RequestFailed(request_id) from None


class EmbeddingFailed(Exception):
    """An input that the engine ended without an embedding."""

    def __init__(self, finish: FinishReason, why: str | None) -> None:
        self.finish = finish
        super().__init__(why or finish.value)


class Feed:
    """The inputs of one request on their way through the engine, so many at a time. However `run` is left, what is open
    is aborted."""

    def __init__(self, engine: Engine, calls: Sequence[GenerateCall]) -> None:
        self._engine = engine
        self._calls = calls
        self._next = iter(range(len(calls)))
        self._vectors: list[bytes] = [b""] * len(calls)
        self._open = 0
        self._ended = asyncio.Event()

    async def run(self) -> list[bytes]:
        """Float32 little-endian `[hidden]` of each call. Raises QueueFull, Draining, ContextOverflow,
        EmbeddingFailed."""
        at_once = min(len(self._calls), WINDOWS * self._engine.limits.running)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(self._feed())
        except BaseExceptionGroup as failures:
            known = [each for each in failures.exceptions if isinstance(each, RequestError | EmbeddingFailed)]
            raise (known or failures.exceptions)[0] from None
        return self._vectors

    async def _feed(self) -> None:
        for index in self._next:
            self._vectors[index] = await self._embedding(self._calls[index])

    async def _embedding(self, call: GenerateCall) -> bytes:
        while True:
            try:
                stream = self._engine.submit(call)
                break
            except QueueFull:
                if not self._open:
                    raise
                self._ended.clear()
                await self._ended.wait()
        self._open += 1
        try:
            async for event in stream:
                if event.finish is not None and not event.embedding:
                    raise EmbeddingFailed(event.finish, event.error)
            return event.embedding
        finally:
            self._open -= 1
            self._ended.set()
            self._engine.abort(stream)


# ----------------------------------------------------------------------------------------------------------- answer


def answer_pieces(
    vectors: Sequence[bytes], model: str, tokens: int, dimensions: int, encoding_format: str | None
) -> Iterator[bytes]:
    """The answer's JSON, an input at a time."""
    yield b'{"object":"list","data":['
    for index, vector in enumerate(vectors):
        cut = shortened(vector, dimensions)
        told = base64.b64encode(cut).decode("ascii") if encoding_format == "base64" else floats_of(cut)
        item = {"object": "embedding", "index": index, "embedding": told}
        yield (b"," if index else b"") + encode(item)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    yield b'],"model":' + encode(model) + b',"usage":' + encode(usage) + b"}"


def floats_of(vector: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(vector) // 4}f", vector)


def shortened(vector: bytes, dimensions: int) -> bytes:
    """The first `dimensions` numbers, of length 1 again (all zeros stay what they are)."""
    if 4 * dimensions == len(vector):
        return vector
    kept = floats_of(vector[: 4 * dimensions])
    length = math.sqrt(math.fsum(value * value for value in kept)) or 1.0
    return struct.pack(f"<{dimensions}f", *(value / length for value in kept))


async def _written(request: web.Request, pieces: Iterator[bytes], stall_s: float) -> web.StreamResponse:
    """A client that reads nothing for `stall_s` is let go."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    try:
        for piece in pieces:
            async with asyncio.timeout(stall_s):
                await response.write(piece)
            await asyncio.sleep(0)  # a client that reads quickly leaves no other moment to the rest
        await response.write_eof()
    except TimeoutError:
        _log.warning("a client read nothing of its embeddings for %.0f s and was let go", stall_s)
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        _log.debug("a client left while its embeddings were sent")
    return response
