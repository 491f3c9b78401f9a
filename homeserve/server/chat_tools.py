"""What the fields of `/v1/chat/completions` say of tools: `tools` and `tool_choice`, or the older `functions` and
`function_call`, which are the same with one call at most and an answer of another shape."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from homeserve.errors import InvalidField
from homeserve.server.bodies import depth_of
from homeserve.server.chat_call import ChoiceOfTool, Tool, Tools
from homeserve.server.fields import DEPTH_LIMIT, TOOLS_LIMIT, ChatRequest, Message, ToolCall

NAME = re.compile(r"[\w.:/-]{1,128}")
"""Of a tool."""
NAME_RULE = "is 1 to 128 letters, digits and _ . : / -"
_WORDS = {word.value: word for word in (ChoiceOfTool.AUTO, ChoiceOfTool.NONE, ChoiceOfTool.REQUIRED)}


def asks_for_functions(fields: ChatRequest) -> bool:
    """Whether the client speaks the older form, and expects `function_call` in the answer."""
    return bool(fields.functions) and not fields.tools


def chat_tools(fields: ChatRequest) -> Tools:
    """Raises InvalidField."""
    if fields.functions and fields.tools:
        raise InvalidField("functions", "is the older form of tools: send one of both")
    if asks_for_functions(fields):
        return _tools_of_functions(fields)
    if fields.function_call is not None and fields.function_call not in ("none", "auto"):
        raise InvalidField("function_call", "needs functions; with tools it is tool_choice")
    offered = _offered([_function_of(entry, f"tools[{i}]") for i, entry in enumerate(fields.tools or ())], "tools")
    return _chosen(offered, fields.tool_choice, parallel=fields.parallel_tool_calls is not False)


def with_tool_calls(messages: list[Message]) -> list[Message]:
    """Messages of the older form as those of the newer one: a call, and the result that follows it, get an id."""
    if not any(message.function_call is not None or message.role == "function" for message in messages):
        return messages
    made, id = [], None
    for i, message in enumerate(messages):
        if message.function_call is not None:
            id = f"call_{i}"
            calls = [*(message.tool_calls or ()), ToolCall(function=message.function_call, id=id, type="function")]
            message = msgspec.structs.replace(message, tool_calls=calls, function_call=None)
        elif message.role == "function":
            message = msgspec.structs.replace(message, role="tool", tool_call_id=message.tool_call_id or id)
        made.append(message)
    return made


def _tools_of_functions(fields: ChatRequest) -> Tools:
    entries = [(entry, f"functions[{i}]") for i, entry in enumerate(fields.functions or ())]
    offered = _offered(entries, "functions")
    said = fields.function_call
    if said is None or said == "auto":
        return Tools(offered, parallel=False)
    if said == "none":
        return Tools(offered, ChoiceOfTool.NONE, parallel=False)
    name = said.get("name") if isinstance(said, dict) else None
    if not isinstance(name, str):
        raise InvalidField("function_call", 'is none of "none", "auto" and {"name": …}')
    return _one(offered, name, "function_call.name", parallel=False)


def _function_of(entry: dict[str, Any], at: str) -> tuple[dict[str, Any], str]:
    kind = entry.get("type", "function")
    if kind != "function":
        raise InvalidField(f"{at}.type", f"{kind!r} is not supported: only functions are called here")
    function = entry.get("function")
    if not isinstance(function, dict):
        raise InvalidField(f"{at}.function", "is required, an object with name, description and parameters")
    return function, f"{at}.function"


def _offered(entries: Sequence[tuple[dict[str, Any], str]], where: str) -> tuple[Tool, ...]:
    offered: dict[str, Tool] = {}
    for function, at in entries:
        tool = _tool(function, at)
        if tool.name in offered:
            raise InvalidField(f"{at}.name", f"there are two {where} of the name {tool.name!r}")
        offered[tool.name] = tool
    return tuple(offered.values())


def _tool(function: dict[str, Any], at: str) -> Tool:
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidField(f"{at}.name", NAME_RULE)
    description, parameters = function.get("description"), function.get("parameters")
    if description is not None and not isinstance(description, str):
        raise InvalidField(f"{at}.description", "is a text")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidField(f"{at}.parameters", "is a JSON schema, an object")
    if not depth_of(parameters, DEPTH_LIMIT):
        raise InvalidField(f"{at}.parameters", f"is nested more than {DEPTH_LIMIT} levels deep, or too large")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidField(f"{at}.strict", "is true or false")
    return Tool(name, description, parameters, bool(strict))


def _chosen(offered: tuple[Tool, ...], choice: str | dict[str, Any] | None, *, parallel: bool) -> Tools:
    if choice is None:
        return Tools(offered, parallel=parallel)
    if isinstance(choice, str):
        word = _WORDS.get(choice)
        if word is None:
            raise InvalidField("tool_choice", f"{choice!r} is none of {', '.join(map(repr, _WORDS))}, nor an object")
        return _worded(offered, word, parallel=parallel)
    if choice.get("type") == "allowed_tools":
        return _allowed(offered, choice.get("allowed_tools"), parallel=parallel)
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else choice.get("name")
    if choice.get("type", "function") != "function" or not isinstance(name, str):
        raise InvalidField("tool_choice", 'as an object is {"type": "function", "function": {"name": …}}')
    return _one(offered, name, "tool_choice.function.name", parallel=parallel)


def _worded(offered: tuple[Tool, ...], word: ChoiceOfTool, *, parallel: bool) -> Tools:
    if word is ChoiceOfTool.REQUIRED and not offered:
        raise InvalidField("tool_choice", "is 'required', and there are no tools")
    return Tools(offered, word, parallel=parallel)


def _allowed(offered: tuple[Tool, ...], allowed: Any, *, parallel: bool) -> Tools:
    """A subset of the tools, by their names."""
    at = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict) or allowed.get("mode", "auto") not in ("auto", "required"):
        raise InvalidField(at, 'is {"mode": "auto" or "required", "tools": […]}')
    entries = allowed.get("tools")
    if not isinstance(entries, list) or len(entries) > TOOLS_LIMIT:
        raise InvalidField(f"{at}.tools", f"is a list of at most {TOOLS_LIMIT} tools")
    known, names = {tool.name for tool in offered}, set()
    for i, entry in enumerate(entries):
        function = entry.get("function") if isinstance(entry, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in known:
            raise InvalidField(f"{at}.tools[{i}]", f"{name!r} is the name of none of the tools")
        names.add(name)
    some = tuple(tool for tool in offered if tool.name in names)
    return _worded(some, _WORDS[allowed.get("mode", "auto")], parallel=parallel)


def _one(offered: tuple[Tool, ...], name: str, at: str, *, parallel: bool) -> Tools:
    if name not in {tool.name for tool in offered}:
        raise InvalidField(at, f"{name!r} is the name of none of the tools")
    return Tools(offered, ChoiceOfTool.ONE, name, parallel)
