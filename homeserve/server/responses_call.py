"""From the fields of `/v1/responses` to a `ChatCall`.

A tool of a type that is not known here must not fail a request: agents offer those of their maker's service beside
their functions, and can do without. So they are skipped; a choice that names one cannot be kept, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from homeserve.errors import InvalidField
from homeserve.server.bodies import depth_of
from homeserve.server.chat_call import (
    ChatCall,
    ChoiceOfTool,
    Constraint,
    ConstraintKind,
    Tool,
    Tools,
    Where,
)
from homeserve.server.chat_tools import NAME, NAME_RULE
from homeserve.server.constraints import schema_constraint
from homeserve.server.fields import DEPTH_LIMIT
from homeserve.server.reasoning import reasoning_of
from homeserve.server.responses_fields import (
    LOGPROBS,
    AllowedTool,
    InputTokensRequest,
    ResponsesRequest,
    TextFormat,
    ToolChoice,
    refuse_unkept,
)
from homeserve.server.responses_items import hollow_types, messages_of

Fields = ResponsesRequest | InputTokensRequest
_WHERE = Where(messages="input", max_tokens="max_output_tokens", parameters="parameters")
_WORDS = {
    "auto": ChoiceOfTool.AUTO,
    "none": ChoiceOfTool.NONE,
    "required": ChoiceOfTool.REQUIRED,
}


def responses_call(fields: Fields) -> ChatCall:
    """What the fields ask for. Raises InvalidField."""
    refuse_unkept(fields)
    if fields.input is None:
        raise InvalidField("input", "is required: a text, or a list of items")
    effort = fields.reasoning.effort if fields.reasoning else None
    arguments = dict(fields.chat_template_kwargs or {})
    return ChatCall(
        fields=fields,
        messages=messages_of(fields.input, fields.instructions),
        tools=tools_of(fields),
        constraint=_constraint(fields.text.format if fields.text else None),
        reasoning=reasoning_of(fields, effort, arguments),
        max_tokens=fields.max_output_tokens if isinstance(fields, ResponsesRequest) else None,
        logprobs=_logprobs(fields) if isinstance(fields, ResponsesRequest) else -1,
        template_arguments=arguments,
        where=_WHERE,
    )


def skipped(fields: Fields) -> list[tuple[str, str]]:
    """What the call leaves out, as (kind, name), for the log."""
    tools = {tool.type for tool in fields.tools or [] if tool.type != "function"}
    include = fields.include or [] if isinstance(fields, ResponsesRequest) else []
    return [
        *(("tool of type", name) for name in sorted(tools)),
        *(("item of type", name) for name in sorted(hollow_types(fields.input or ""))),
        *(("include", name) for name in include if name != LOGPROBS),
    ]


def tools_of(fields: Fields) -> Tools:
    """Raises InvalidField."""
    offered: dict[str, Tool] = {}
    for i, spec in enumerate(fields.tools or []):
        if spec.type != "function":
            continue
        if not spec.name:
            raise InvalidField(f"tools[{i}].name", "is required, beside type")
        if not NAME.fullmatch(spec.name):
            raise InvalidField(f"tools[{i}].name", NAME_RULE)
        if spec.name in offered:
            raise InvalidField(f"tools[{i}].name", f"there are two functions of the name {spec.name!r}")
        if not depth_of(spec.parameters, DEPTH_LIMIT):
            what = f"is nested more than {DEPTH_LIMIT} levels deep, or too large"
            raise InvalidField(f"tools[{i}].parameters", what)
        offered[spec.name] = Tool(spec.name, spec.description, spec.parameters, bool(spec.strict))
    parallel = fields.parallel_tool_calls is not False
    choice = fields.tool_choice
    if isinstance(choice, ToolChoice):
        return _by_object(choice, tuple(offered.values()), parallel)
    word = _WORDS.get("auto" if choice is None else choice)
    if word is None:
        raise InvalidField("tool_choice", f"{choice!r} is none of {', '.join(_WORDS)}, nor an object")
    if word is ChoiceOfTool.REQUIRED and not offered:
        raise InvalidField("tool_choice", "required, but tools has no function")
    return Tools(tuple(offered.values()), word, parallel=parallel)


def _by_object(choice: ToolChoice, offered: tuple[Tool, ...], parallel: bool) -> Tools:
    if choice.type == "function":
        if not choice.name:
            raise InvalidField("tool_choice.name", "is required")
        _check_offered(choice.name, offered, "tool_choice.name")
        return Tools(offered, ChoiceOfTool.ONE, choice.name, parallel)
    if choice.type != "allowed_tools":
        what = f"tools of type {choice.type!r} are skipped here, so none can be chosen; only functions are called"
        raise InvalidField("tool_choice.type", what)
    allowed = _allowed(choice.tools, offered)
    if choice.mode == "required" and not allowed:
        raise InvalidField("tool_choice.tools", "one is required, but there is no function among them")
    word = ChoiceOfTool.REQUIRED if choice.mode == "required" else ChoiceOfTool.AUTO
    return Tools(allowed, word, parallel=parallel)


def _allowed(tools: Sequence[AllowedTool] | None, offered: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """Those of `offered` that are named."""
    if tools is None:
        raise InvalidField("tool_choice.tools", "is required")
    names = set()
    for i, tool in enumerate(tools):
        if tool.type == "function":
            _check_offered(tool.name or "", offered, f"tool_choice.tools[{i}].name")
            names.add(tool.name)
    return tuple(tool for tool in offered if tool.name in names)


def _check_offered(name: str, offered: tuple[Tool, ...], where: str) -> None:
    if name not in {tool.name for tool in offered}:
        raise InvalidField(where, f"{name!r} is no function of tools")


def _constraint(wanted: TextFormat | None) -> Constraint | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Constraint(ConstraintKind.JSON_OBJECT, where="text.format")
    if wanted.type != "json_schema":
        raise InvalidField("text.format.type", f"{wanted.type!r} is none of text, json_object, json_schema")
    if wanted.schema is None:
        raise InvalidField("text.format.schema", "is required")
    return schema_constraint(wanted.schema, "text.format.schema", strict=bool(wanted.strict))


def _logprobs(fields: ResponsesRequest) -> int:
    """-1: none. A number of alternatives asks for them too."""
    wanted = LOGPROBS in (fields.include or ()) or bool(fields.top_logprobs)
    return (fields.top_logprobs or 0) if wanted else -1
