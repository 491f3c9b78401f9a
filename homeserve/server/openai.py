"""The OpenAI routes of answers: `/v1/chat/completions`, `/v1/completions`."""

from __future__ import annotations

import itertools

from aiohttp import web

from homeserve.server.ask import make_ask, tighter
from homeserve.server.bodies import read_body
from homeserve.server.chat_ask import chat_ask
from homeserve.server.chat_call import ChatCall
from homeserve.server.chat_tools import asks_for_functions, chat_tools, with_tool_calls
from homeserve.server.constraints import constraint_of
from homeserve.server.edge import current_request_id
from homeserve.server.fields import ChatRequest, CompletionRequest, refuse_unsupported
from homeserve.server.guides import completion_guide
from homeserve.server.parts import PARTS
from homeserve.server.prompts import completion_prompts
from homeserve.server.reasoning import reasoning_of
from homeserve.server.respond import respond
from homeserve.server.shapes import ChatShape, CompletionShape, FunctionShape

_serial = itertools.count(1)
"""Makes the engine's ids of requests unique although clients may repeat theirs."""


async def post_chat_completions(request: web.Request) -> web.StreamResponse:
    parts = request.app[PARTS]
    parts.check_taking()
    body = await read_body(request, parts.context.settings.body_limit_bytes)
    fields = await parts.decoder.read(body, ChatRequest)
    async with parts.lease(fields.model) as served:
        request_id = current_request_id()
        ask = await chat_ask(served, chat_call(fields), f"{request_id}.{next(_serial)}")
        made_of = FunctionShape if asks_for_functions(fields) else ChatShape
        shape = made_of(ask, served.tokenizer, request_id=request_id, model=served.model.id)
        return await respond(request, parts, served, ask, shape, request_id)


def chat_call(fields: ChatRequest) -> ChatCall:
    """What the fields of `/v1/chat/completions` ask for. Raises InvalidField."""
    refuse_unsupported(fields)
    return ChatCall(
        fields=fields,
        messages=with_tool_calls(fields.messages),
        tools=chat_tools(fields),
        reasoning=reasoning_of(fields, fields.reasoning_effort, fields.chat_template_kwargs or {}),
        max_tokens=tighter(fields.max_completion_tokens, fields.max_tokens),
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else -1,
        template_arguments=dict(fields.chat_template_kwargs or {}),
        add_generation_prompt=fields.add_generation_prompt is not False,
    )


async def post_completions(request: web.Request) -> web.StreamResponse:
    parts = request.app[PARTS]
    parts.check_taking()
    body = await read_body(request, parts.context.settings.body_limit_bytes)
    fields = await parts.decoder.read(body, CompletionRequest)
    async with parts.lease(fields.model) as served:
        refuse_unsupported(fields)
        bounds = served.bounds
        prompts = await completion_prompts(served.tokenizer, fields.prompt, bounds)
        request_id = current_request_id()
        ask = make_ask(
            fields,
            prompts,
            served.tokenizer,
            bounds=bounds,
            request_id=f"{request_id}.{next(_serial)}",
            guide=await completion_guide(served, fields),
            guided_by=constraint.where if (constraint := constraint_of(fields)) else "",
        )
        shape = CompletionShape(ask, served.tokenizer, request_id=request_id, model=served.model.id)
        return await respond(request, parts, served, ask, shape, request_id)
