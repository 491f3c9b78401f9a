"""OpenAI's Responses route, without its memory: `/v1/responses`, `/v1/responses/input_tokens`.

    ResponsesRequest ──responses_call──▶ ChatCall ──chat_ask──▶ Ask ──respond──▶ ResponsesShape

Each request brings its whole conversation, and nothing is kept of it. So a response has `store: false`, and what refers
to an earlier one by its id is refused.
"""

from __future__ import annotations

import asyncio
import itertools

from aiohttp import web

from homeserve.server.bodies import BodyDecoder, json_response, read_body
from homeserve.server.chat_ask import chat_ask, prompt_of_chat
from homeserve.server.chat_call import ChatCall
from homeserve.server.edge import current_request_id
from homeserve.server.parts import PARTS
from homeserve.server.prompts import INLINE_PARTS
from homeserve.server.respond import respond
from homeserve.server.responses_call import responses_call, skipped
from homeserve.server.responses_echo import echo_of, summary_of
from homeserve.server.responses_fields import InputTokensRequest, ResponsesRequest
from homeserve.server.responses_shape import ResponsesShape

_serial = itertools.count(1)
"""Makes the engine's ids of requests unique although clients may repeat theirs."""


async def post_responses(request: web.Request) -> web.StreamResponse:
    parts = request.app[PARTS]
    parts.check_taking()
    body = await read_body(request, parts.context.settings.body_limit_bytes)
    fields = await parts.decoder.read(body, ResponsesRequest)
    async with parts.lease(fields.model) as served:
        request_id = current_request_id()
        call = await _call(fields, parts.decoder)
        ask = await chat_ask(served, call, f"{request_id}.r{next(_serial)}")
        shape = ResponsesShape(
            ask,
            served.tokenizer,
            request_id=request_id,
            model=served.model.id,
            echo=echo_of(fields, call, ask),
            summaries=summary_of(fields) is not None,
        )
        return await respond(request, parts, served, ask, shape, request_id)


async def post_input_tokens(request: web.Request) -> web.StreamResponse:
    """How many tokens the prompt of a response would have."""
    parts = request.app[PARTS]
    parts.check_loaded()
    body = await read_body(request, parts.context.settings.body_limit_bytes)
    fields = await parts.decoder.read(body, InputTokensRequest)
    async with parts.lease(fields.model) as served:
        prompt = await prompt_of_chat(served, await _call(fields, parts.decoder))
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


async def _call(fields: ResponsesRequest | InputTokensRequest, decoder: BodyDecoder) -> ChatCall:
    """Off the loop where the conversation is long. Raises InvalidField."""
    call = (
        responses_call(fields) if _pieces(fields) <= INLINE_PARTS else await asyncio.to_thread(responses_call, fields)
    )
    for kind, name in skipped(fields):
        decoder.tell_ignored(kind, name)
    return call


def _pieces(fields: ResponsesRequest | InputTokensRequest) -> int:
    """Items of the input, and their parts."""
    items = [] if fields.input is None or isinstance(fields.input, str) else fields.input
    lists = [part for item in items for part in (item.content, item.output, item.summary)]
    return len(items) + sum(len(part) for part in lists if isinstance(part, list))
