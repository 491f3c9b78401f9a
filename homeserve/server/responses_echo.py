"""What a response repeats of its request: the settings in force, in the names of Responses."""

from __future__ import annotations

from typing import Any

from homeserve.server.ask import Ask
from homeserve.server.chat_call import ChatCall, Tool
from homeserve.server.responses_fields import ResponsesRequest, TextFormat, TextOptions, ToolChoice


def echo_of(fields: ResponsesRequest, call: ChatCall, ask: Ask) -> dict[str, Any]:
    """Tools that were skipped are left out; what has one way here (store, truncation, tier) says which."""
    sampling = ask.calls[0].sampling
    return {
        "background": False,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": call.tools.parallel,
        "previous_response_id": None,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {"effort": fields.reasoning.effort if fields.reasoning else None, "summary": summary_of(fields)},
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": sampling.temperature if fields.temperature is None else fields.temperature,
        "text": _text(fields.text or TextOptions()),
        "tool_choice": _choice(fields.tool_choice),
        "tools": [_tool(tool) for tool in call.tools.offered],
        "top_logprobs": max(0, call.logprobs),
        "top_p": sampling.top_p if fields.top_p is None else fields.top_p,
        "truncation": "disabled",
        "user": fields.user,
    }


def summary_of(fields: ResponsesRequest) -> str | None:
    """Which summary of thoughts was asked for, under either of its names."""
    options = fields.reasoning
    return None if options is None else options.summary or options.generate_summary


def _text(options: TextOptions) -> dict[str, Any]:
    made: dict[str, Any] = {"format": _format(options.format)}
    if options.verbosity is not None:
        made["verbosity"] = options.verbosity
    return made


def _format(wanted: TextFormat | None) -> dict[str, Any]:
    if wanted is None or wanted.type != "json_schema":
        return {"type": "text" if wanted is None else wanted.type}
    named = {"type": "json_schema", "name": wanted.name or "response"}
    made = {**named, "schema": wanted.schema, "strict": bool(wanted.strict)}
    return made if wanted.description is None else {**made, "description": wanted.description}


def _choice(choice: str | ToolChoice | None) -> str | dict[str, Any]:
    if not isinstance(choice, ToolChoice):
        return choice or "auto"
    if choice.type == "function":
        return {"type": "function", "name": choice.name}
    tools = [{"type": tool.type, "name": tool.name} for tool in choice.tools or []]
    return {"type": choice.type, "mode": choice.mode or "auto", "tools": tools}


def _tool(tool: Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
