"""The items of a Responses conversation as messages of a chat.

Responses lists what was said, thought, called and answered one by one; a chat template wants turns. So the items of the
assistant that nobody else's item parts are one message: the thought, the text and the calls of one turn. Two messages
of the assistant in a row stay two. An output of a tool is a message of the tool.

    reasoning, message, function_call, function_call   ->   assistant {reasoning_content, content, tool_calls[2]}
    function_call_output                               ->   tool {tool_call_id, content}

`instructions` and the system's messages at the beginning are one message of the system: agents send several, and many
templates take one and refuse a second.
"""

from __future__ import annotations

from homeserve.errors import InvalidField
from homeserve.server.fields import FunctionCall, Message, Part, ToolCall
from homeserve.server.responses_fields import ContentPart, InputItem

ROLES = ("user", "assistant", "system", "developer")
_SYSTEM = ("system", "developer")
HOLLOW = frozenset(
    {
        *("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call"),
        *("mcp_list_tools", "tool_search_call", "tool_search_output"),
    }
)
"""Calls of tools that ran elsewhere. What they found is in the messages behind them, so they are left out."""
READ = ("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning")
_TEXTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})


def messages_of(items: str | list[InputItem], instructions: str | None) -> list[Message]:
    """Raises InvalidField. No items at all, as probes send it, are a user who says nothing."""
    turns = _Turns(instructions)
    if isinstance(items, str):
        turns.say("user", items)
    else:
        for i, item in enumerate(items):
            _read(turns, item, f"input[{i}]")
    return turns.messages()


def hollow_types(items: str | list[InputItem]) -> set[str]:
    """The types of the items that are left out."""
    return set() if isinstance(items, str) else {item.type for item in items if item.type in HOLLOW if item.type}


class _Turns:
    """Messages so far. `_turn` is the assistant's message that the next item may join."""

    def __init__(self, instructions: str | None) -> None:
        self._messages: list[Message] = []
        self._leading = [instructions] if instructions else []
        self._leads = True
        self._turn: _Turn | None = None
        self._empty = True

    def say(self, role: str, content: str | list[Part], *, call_id: str | None = None, name: str | None = None) -> None:
        """What anybody but the assistant says."""
        self._close()
        self._empty = False
        if self._leads and role in _SYSTEM:
            self._leading.append(
                content if isinstance(content, str) else "\n".join(part.text or "" for part in content)
            )
            return
        self._leads = False
        self._messages.append(Message(role=role, content=content, tool_call_id=call_id, name=name))

    @property
    def turn(self) -> _Turn:
        """The assistant's, which is begun where there is none."""
        if self._turn is None:
            self._empty = self._leads = False
            self._turn = _Turn()
        return self._turn

    def answer(self, content: str | list[Part]) -> None:
        if self._turn is not None and self._turn.said_last:
            self._close()
        self.turn.said.append(content)
        self.turn.said_last = True

    def messages(self) -> list[Message]:
        self._close()
        if self._empty:
            self.say("user", "")
        if self._leading:
            return [Message(role="system", content="\n\n".join(self._leading)), *self._messages]
        return self._messages

    def _close(self) -> None:
        if self._turn is not None:
            self._messages.append(self._turn.message())
        self._turn = None


class _Turn:
    """What the assistant thought, said and called. `said_last`: a message was the last of it."""

    def __init__(self) -> None:
        self.thoughts: list[str] = []
        self.said: list[str | list[Part]] = []
        self.calls: list[ToolCall] = []
        self.said_last = False

    def think(self, text: str) -> None:
        self.thoughts.append(text)
        self.said_last = False

    def call(self, call: ToolCall) -> None:
        self.calls.append(call)
        self.said_last = False

    def message(self) -> Message:
        content: str | list[Part] | None = self.said[0] if self.said else None
        if len(self.said) > 1:
            content = [part for said in self.said for part in ([_part(said)] if isinstance(said, str) else said)]
        return Message(
            role="assistant",
            content=content,
            reasoning_content="\n".join(self.thoughts) if self.thoughts else None,
            tool_calls=self.calls or None,
        )


def _read(turns: _Turns, item: InputItem, where: str) -> None:
    kind = item.type or ("message" if item.role is not None else "")
    if kind == "message":
        _read_message(turns, item, where)
    elif kind == "reasoning":
        thought = "\n".join(_texts(item.content or item.summary or [], where, "content" if item.content else "summary"))
        if thought:
            turns.turn.think(thought)
    elif kind in ("function_call", "custom_tool_call"):
        turns.turn.call(_call(item, kind, where))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        call_id = _required(item.call_id, where, "call_id")
        turns.say("tool", _output(item, where), call_id=call_id, name=item.name)
    elif kind == "item_reference":
        raise InvalidField(f"{where}.type", "items are not kept here, so none can be referred to; send the item itself")
    elif not kind:
        raise InvalidField(f"{where}.type", f"is required; there are {', '.join(READ)}")
    elif kind not in HOLLOW:
        raise InvalidField(f"{where}.type", f"{kind!r} is not supported; there are {', '.join(READ)}")


def _read_message(turns: _Turns, item: InputItem, where: str) -> None:
    role = _required(item.role, where, "role")
    if role not in ROLES:
        raise InvalidField(f"{where}.role", f"{role!r} is none of {', '.join(ROLES)}")
    content = item.content
    if content is None and role != "assistant":
        raise InvalidField(f"{where}.content", "is required")
    said = content if isinstance(content, str) else [_part(text) for text in _texts(content or [], where, "content")]
    if role == "assistant":
        turns.answer(said)
    else:
        turns.say(role, said)


def _call(item: InputItem, kind: str, where: str) -> ToolCall:
    call_id, name = _required(item.call_id, where, "call_id"), _required(item.name, where, "name")
    if kind == "function_call":
        if item.arguments is None:
            raise InvalidField(f"{where}.arguments", "is required")
        return ToolCall(id=call_id, type="function", function=FunctionCall(name=name, arguments=item.arguments))
    if not isinstance(item.input, str):
        raise InvalidField(f"{where}.input", "is required, as text")
    return ToolCall(id=call_id, type="function", function=FunctionCall(name=name, arguments={"input": item.input}))


def _output(item: InputItem, where: str) -> str | list[Part]:
    if item.output is None or isinstance(item.output, dict):
        raise InvalidField(f"{where}.output", "is required, as text or a list of parts of type input_text")
    return item.output if isinstance(item.output, str) else [_part(t) for t in _texts(item.output, where, "output")]


def _texts(parts: str | list[ContentPart], where: str, field: str) -> list[str]:
    if isinstance(parts, str):
        return [parts]
    texts = []
    for i, part in enumerate(parts):
        at = f"{where}.{field}[{i}]"
        kind = _required(part.type, at, "type")
        if kind == "refusal":
            texts.append(_required(part.refusal, at, "refusal"))
        elif kind in _TEXTS:
            texts.append(_required(part.text, at, "text"))
        else:
            raise InvalidField(f"{at}.type", f"{kind!r} is not supported: only text is read here")
    return texts


def _required(value: str | None, where: str, field: str) -> str:
    if value is None:
        raise InvalidField(f"{where}.{field}", "is required")
    return value


def _part(text: str) -> Part:
    return Part(type="text", text=text)
