"""Anthropic's routes: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import asyncio
import itertools
from typing import TypeVar

from aiohttp import web

from homeserve.server.bodies import INLINE_BYTES, json_response, read_body
from homeserve.server.chat_ask import chat_ask, prompt_of_chat
from homeserve.server.chat_call import ChatCall
from homeserve.server.edge import current_request_id
from homeserve.server.messages_call import message_call
from homeserve.server.messages_fields import CountTokensRequest, MessagesRequest
from homeserve.server.messages_shape import MessageShape
from homeserve.server.parts import PARTS, Parts
from homeserve.server.respond import respond

_serial = itertools.count(1)
"""Makes the engine's ids of requests unique although clients may repeat theirs."""
_Fields = TypeVar("_Fields", CountTokensRequest, MessagesRequest)


async def post_messages(request: web.Request) -> web.StreamResponse:
    parts = request.app[PARTS]
    parts.check_taking()
    fields, call = await _read(request, parts, MessagesRequest)
    async with parts.lease(fields.model) as served:
        request_id = current_request_id()
        ask = await chat_ask(served, call, f"{request_id}.m{next(_serial)}")
        shape = MessageShape(ask, max_tokens=fields.max_tokens, request_id=request_id, model=served.model.id)
        return await respond(request, parts, served, ask, shape, request_id)


async def post_count_tokens(request: web.Request) -> web.StreamResponse:
    """Renders the prompt and counts it; nothing is generated."""
    parts = request.app[PARTS]
    parts.check_loaded()
    fields, call = await _read(request, parts, CountTokensRequest)
    async with parts.lease(fields.model) as served:
        prompt = await prompt_of_chat(served, call)
    return json_response({"input_tokens": len(prompt.ids)})


async def _read(request: web.Request, parts: Parts, kind: type[_Fields]) -> tuple[_Fields, ChatCall]:
    """The fields and what they ask for; off the loop where the body is large."""
    body = await read_body(request, parts.context.settings.body_limit_bytes)
    fields = await parts.decoder.read(body, kind)
    if len(body) <= INLINE_BYTES:
        return fields, message_call(fields, parts.decoder.tell_ignored)
    return fields, await asyncio.to_thread(message_call, fields, parts.decoder.tell_ignored)
