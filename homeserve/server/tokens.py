"""`/tokenize` and `/detokenize`: how the served model cuts text, with or without its chat template."""

from __future__ import annotations

from aiohttp import web

from homeserve.errors import InvalidField
from homeserve.server.bodies import depth_of, json_response, read_body
from homeserve.server.context import Loaded
from homeserve.server.fields import DEPTH_LIMIT, DetokenizeRequest, TokenizeRequest
from homeserve.server.parts import PARTS
from homeserve.server.prompts import chat_prompt, check_ids, decode, encode
from homeserve.server.tool_messages import tool_messages


async def post_tokenize(request: web.Request) -> web.StreamResponse:
    """`{prompt | messages, add_special}` -> `{tokens, count}`. `add_special` is for `prompt`; a template sees to it."""
    parts = request.app[PARTS]
    parts.check_loaded()
    body = await read_body(request, parts.context.settings.body_limit_bytes)
    fields = await parts.decoder.read(body, TokenizeRequest)
    async with parts.lease(fields.model) as served:
        ids = await _tokens(served, fields)
    return json_response({"schema": 1, "tokens": ids, "count": len(ids)})


async def _tokens(served: Loaded, fields: TokenizeRequest) -> list[int]:
    """Raises InvalidField."""
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidField("prompt", "give either prompt or messages")
    if fields.prompt is not None:
        return await encode(served.tokenizer, fields.prompt, add_special=fields.add_special is not False)
    for name in ("tools", "chat_template_kwargs"):
        if not depth_of(getattr(fields, name), DEPTH_LIMIT):
            raise InvalidField(name, f"is nested more than {DEPTH_LIMIT} levels deep, or too large")
    form, offered = served.dialect.call, fields.tools or []
    prompt = await chat_prompt(
        served.templates,
        served.tokenizer,
        await tool_messages(served.templates, form, fields.messages or [], offered),
        bounds=served.bounds,
        tools=offered if form is not None else None,
        add_generation_prompt=fields.add_generation_prompt is not False,
        template_arguments=fields.chat_template_kwargs or {},
    )
    return list(prompt.ids)


async def post_detokenize(request: web.Request) -> web.StreamResponse:
    """`{tokens}` -> `{prompt}`"""
    parts = request.app[PARTS]
    parts.check_loaded()
    body = await read_body(request, parts.context.settings.body_limit_bytes)
    fields = await parts.decoder.read(body, DetokenizeRequest)
    async with parts.lease(fields.model) as served:
        most = served.bounds.context
        if len(fields.tokens) > most:
            raise InvalidField("tokens", f"has {len(fields.tokens)} entries; the context holds {most}")
        await check_ids(fields.tokens, served.tokenizer.vocab_size, "tokens")
        return json_response({"schema": 1, "prompt": await decode(served.tokenizer, fields.tokens)})
