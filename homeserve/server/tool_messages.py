"""Calls of tools in the messages of a conversation, as the model's template takes them.

Most templates write calls and results themselves. What is left to do:

- A template that has no calls gets messages that have none. Earlier calls and results are written into their texts, in
  the generic form (`homeserve.text.dialects.GENERIC`), and the tools are described in the system message; or in the
  first message of the user's, where the template takes no system message. So tools work with every model; how well,
  is the model's matter.
- Some templates take ids of calls in one form only, and a client's may come from elsewhere; some want the name of
  what was called beside its result; some take one call in a message.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec

from homeserve.errors import InvalidField
from homeserve.server.fields import Message, Part, ToolCall
from homeserve.text.dialects import GENERIC, CallForm

if TYPE_CHECKING:
    from homeserve.text.templates import TemplateHost

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_HEADER_ID = re.compile(r"functions\..+:\d+")
_RESULT_ROLES = ("tool", "function")
_takes_system: WeakKeyDictionary[TemplateHost, bool] = WeakKeyDictionary()

_HOW = """You can call functions. These are their signatures, each a line of JSON between <tools> and </tools>:
<tools>
{signatures}
</tools>
To call one, write its name and its arguments as a JSON object between {opens} and {closes}, and then stop. You are told the result between <tool_response> and </tool_response>. Example:
{opens}
{{"name": "the function's name", "arguments": {{"the parameter's name": "its value"}}}}
{closes}"""  # noqa: E501  a line of the model's


async def tool_messages(
    templates: TemplateHost, form: CallForm | None, messages: list[Message], offered: Sequence[dict[str, Any]]
) -> list[Message]:
    """`form`: the template's own, None where it has no calls; `offered`: the tools that may be called, as templates
    have them."""
    if form is not None:
        named = _with_ids(_with_names(messages), form)
        return _one_at_a_time(named) if form.singly else named
    written = [_without_calls(message) for message in messages]
    if any(message.role in _RESULT_ROLES for message in messages):
        written = _joined_results(written, [message.role for message in messages])
    return await _with_tools(templates, written, offered) if offered else written


# --------------------------------------------------------------------------------------------------------- no calls


def _without_calls(message: Message) -> Message:
    if message.tool_calls:
        calls = [Part(type="text", text=_written_call(call)) for call in message.tool_calls]
        return msgspec.structs.replace(message, content=[*_content(message), *calls], tool_calls=None)
    if message.role in _RESULT_ROLES:
        opens, closes = (Part(type="text", text=text) for text in ("<tool_response>", "</tool_response>"))
        content = [opens, *_content(message), closes]
        return msgspec.structs.replace(message, role="user", content=content, tool_call_id=None, name=None)
    return message


def _content(message: Message) -> list[Part]:
    """The parts of a message, each of which is a line of its text at least."""
    if isinstance(message.content, list):
        return message.content
    return [Part(type="text", text=message.content)] if message.content else []


def _written_call(call: ToolCall) -> str:
    arguments = call.function.arguments
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    return f'{GENERIC.opens}\n{{"name": {json.dumps(call.function.name)}, "arguments": {arguments}}}\n{GENERIC.closes}'


def _joined_results(written: list[Message], roles: list[str]) -> list[Message]:
    """Results of one turn, and what the user says behind them, as one message: many templates want turns in turn."""
    joined: list[Message] = []
    results = False
    for message, role in zip(written, roles, strict=True):
        if results and message.role == "user":
            content = _content(joined[-1]) + _content(message)
            joined[-1] = msgspec.structs.replace(joined[-1], content=content)
        else:
            joined.append(message)
        results = role in _RESULT_ROLES or (results and message.role == "user")
    return joined


async def _with_tools(
    templates: TemplateHost, messages: list[Message], offered: Sequence[dict[str, Any]]
) -> list[Message]:
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in offered)
    how = _HOW.format(signatures=signatures, opens=GENERIC.opens, closes=GENERIC.closes)
    roles = [message.role for message in messages]
    if roles and roles[0] in ("system", "developer"):
        return [_extended(messages[0], how, before=False), *messages[1:]]
    if await _takes_system_messages(templates):
        return [Message(role="system", content=how), *messages]
    first = roles.index("user") if "user" in roles else -1
    if first < 0:
        return messages
    return [*messages[:first], _extended(messages[first], how, before=True), *messages[first + 1 :]]


def _extended(message: Message, text: str, *, before: bool) -> Message:
    content = _content(message)
    space = [Part(type="text", text="")] if content else []
    part = Part(type="text", text=text)
    return msgspec.structs.replace(message, content=[part, *space, *content] if before else [*content, *space, part])


async def _takes_system_messages(templates: TemplateHost) -> bool:
    """Whether the template refuses system messages is known by trying once."""
    if templates not in _takes_system:
        tried = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        try:
            _takes_system[templates] = bool(await templates.render(tried))
        except InvalidField:
            _takes_system[templates] = False
    return _takes_system[templates]


# -------------------------------------------------------------------------------------------- calls, names and ids


def _one_at_a_time(messages: list[Message]) -> list[Message]:
    """A message of several calls as one for each, with its result behind it."""
    made: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if len(message.tool_calls or ()) < 2:
            made.append(message)
            continue
        end = at
        while end < len(messages) and messages[end].role in _RESULT_ROLES:
            end += 1
        made += _with_results(message, messages[at:end])
        at = end
    return made


def _with_results(message: Message, results: list[Message]) -> Iterator[Message]:
    """The calls of a message, each with what came of it behind it; then results that are of none of them."""
    of_call: dict[str | None, list[Message]] = {}
    for result in results:
        of_call.setdefault(result.tool_call_id, []).append(result)
    for number, call in enumerate(message.tool_calls or ()):
        said = {} if number == 0 else {"content": None, "reasoning_content": None, "reasoning": None}
        yield msgspec.structs.replace(message, tool_calls=[call], **said)
        yield from of_call.pop(call.id, ())
    for left in of_call.values():
        yield from left


def _with_names(messages: list[Message]) -> list[Message]:
    """Results with the name of what was called, which some templates write and few clients send."""
    names: dict[str, str] = {}
    made = []
    for message in messages:
        names |= {call.id: call.function.name for call in message.tool_calls or () if call.id}
        if message.role in _RESULT_ROLES and message.name is None and message.tool_call_id in names:
            message = msgspec.structs.replace(message, name=names[message.tool_call_id])
        made.append(message)
    return made


def _with_ids(messages: list[Message], form: CallForm) -> list[Message]:
    """Ids as the template takes them; the same id becomes the same one in a call and in its result."""
    if not (form.short_ids or form.header_id):
        return messages
    known: dict[str, str] = {}
    made = []
    for message in messages:
        if message.tool_calls:
            calls = [_with_id(call, known, form) for call in message.tool_calls]
            message = msgspec.structs.replace(message, tool_calls=calls)
        elif message.tool_call_id is not None:
            fallback = short_id(message.tool_call_id) if form.short_ids else message.tool_call_id
            message = msgspec.structs.replace(message, tool_call_id=known.get(message.tool_call_id, fallback))
        made.append(message)
    return made


def _with_id(call: ToolCall, known: dict[str, str], form: CallForm) -> ToolCall:
    number = len(known)
    given = call.id or f"{call.function.name}:{number}"
    fits: Callable[[str], object] = _SHORT_ID.fullmatch if form.short_ids else _HEADER_ID.fullmatch
    if given not in known:
        made = short_id(given) if form.short_ids else f"functions.{call.function.name}:{number}"
        known[given] = given if fits(given) else made
    return msgspec.structs.replace(call, id=known[given])


def short_id(id: str) -> str:
    """Nine letters and digits, always the same for the same id."""
    if _SHORT_ID.fullmatch(id):
        return id
    number = int.from_bytes(hashlib.sha256(id.encode("utf-8", "replace")).digest()[:8], "little")
    letters = string.ascii_letters + string.digits
    made = ""
    for _ in range(9):
        number, at = divmod(number, len(letters))
        made += letters[at]
    return made
