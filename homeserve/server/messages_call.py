"""From the fields of `/v1/messages` to a `ChatCall`: Anthropic's turns and blocks as messages that templates know.

    system                  one message `system`
    turns of one role       one message: turns that follow each other in one role are one turn
      tool_result           a message `tool` each, before what else the user says
      thinking              `reasoning_content`; of redacted ones nothing
      tool_use              `tool_calls`
    a last turn assistant   the answer goes on from its text (`prefill`)

Lines that agents put in front for the billing of Anthropic's servers (`x-anthropic-billing-header: …`, a value that
changes with every request, as the very first text of the prompt) are no part of what is said: with them in it, no
prompt would ever begin like the one before, and the prefix cache would be of no use. They are cut off blocks of text;
what a person typed, a plain string of a turn, is left alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator

from homeserve.errors import InvalidField
from homeserve.server.bodies import depth_of
from homeserve.server.chat_call import ChatCall, ChoiceOfTool, Constraint, Reasoning, Tool, Tools, Where
from homeserve.server.chat_tools import NAME, NAME_RULE
from homeserve.server.constraints import schema_constraint
from homeserve.server.fields import DEPTH_LIMIT, Common, FunctionCall, Message, ToolCall
from homeserve.server.messages_fields import (
    Block,
    CountTokensRequest,
    DocumentBlock,
    ImageBlock,
    MessagesRequest,
    RedactedThinkingBlock,
    ResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolEntry,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from homeserve.server.reasoning import told_effort

TellIgnored = Callable[[str, str], None]
_WHERE = Where(parameters="input_schema")
"""Takes what is ignored: its kind, its name."""

_BILLING = re.compile(r"(?:x-anthropic-[\w-]+:[^\n]*(?:\n|\Z))+", re.IGNORECASE)
_CHOICES = {
    "auto": ChoiceOfTool.AUTO,
    "any": ChoiceOfTool.REQUIRED,
    "tool": ChoiceOfTool.ONE,
    "none": ChoiceOfTool.NONE,
}
_Placed = tuple[Block, str]
"""A content block, and the path to it."""


def message_call(fields: CountTokensRequest, tell_ignored: TellIgnored) -> ChatCall:
    """Raises InvalidField."""
    turns = _turns(fields.messages)
    continued = _continues(turns)
    if continued and fields.thinking is not None and fields.thinking.type == "enabled":
        raise InvalidField("thinking", "cannot be enabled where the last turn is the assistant's: it is past thinking")
    return ChatCall(
        fields=_common(fields),
        messages=_messages(fields, turns),
        tools=_tools(fields, tell_ignored),
        constraint=_constraint(fields),
        reasoning=Reasoning(enabled=False, told=False) if continued else _reasoning(fields),
        max_tokens=fields.max_tokens if isinstance(fields, MessagesRequest) else None,
        add_generation_prompt=not continued,
        continue_last=continued,
        where=_WHERE,
    )


# ------------------------------------------------------------------------------------------------------------ messages


def without_billing(text: str) -> str:
    """A block's text without the lines that are meant for Anthropic's servers."""
    found = _BILLING.match(text)
    return text if found is None else text[found.end() :]


def _turns(turns: list[Turn]) -> list[tuple[str, list[_Placed]]]:
    """Neighbours of one role as one: (role, its blocks)."""
    placed = ((turn, f"messages[{i}]") for i, turn in enumerate(turns))
    grouped = itertools.groupby(placed, key=lambda item: item[0].role)
    return [(role, [block for turn, where in same for block in _blocks(turn, where)]) for role, same in grouped]


def _blocks(turn: Turn, where: str) -> Iterator[_Placed]:
    """Blocks of one turn that say something. Raises InvalidField for those that do not belong there."""
    if isinstance(turn.content, str):
        yield TextBlock(text=turn.content), f"{where}.content"
        return
    for i, block in enumerate(turn.content):
        at = f"{where}.content[{i}]"
        _check_block(block, turn.role, at)
        if isinstance(block, TextBlock):
            text = without_billing(block.text)
            if text:
                yield TextBlock(text=text), at
        elif not isinstance(block, RedactedThinkingBlock):
            yield block, at


def _check_block(block: Block, role: str, at: str) -> None:
    if isinstance(block, ImageBlock | DocumentBlock):
        raise _unreadable(block, at)
    belongs = {
        "user": (TextBlock, ToolResultBlock),
        "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
        "system": (TextBlock,),
    }[role]
    if not isinstance(block, belongs):
        raise InvalidField(f"{at}.type", f"{_tag(block)!r} does not belong into a turn of role {role!r}")
    if isinstance(block, ToolUseBlock) and not depth_of(block.input, DEPTH_LIMIT):
        raise _too_deep(f"{at}.input")


def _unreadable(block: ImageBlock | DocumentBlock, at: str) -> InvalidField:
    return InvalidField(f"{at}.type", f"{_tag(block)!r} is not supported: only text is read here")


def _tag(block: Block) -> object:
    return block.__struct_config__.tag


def _continues(turns: list[tuple[str, list[_Placed]]]) -> bool:
    """Whether the answer goes on from the last turn. An empty one of the assistant is dropped. Raises InvalidField."""
    role, blocks = turns[-1]
    if role != "assistant":
        return False
    for block, at in blocks:
        if isinstance(block, ToolUseBlock):
            raise InvalidField(at, "calls a tool, and no tool_result follows: the last turn has to be the user's")
    texts = [block.text for block, _ in blocks if isinstance(block, TextBlock)]
    if not "".join(texts).strip():
        turns.pop()
        if not turns:
            raise InvalidField("messages", "have nothing but an empty turn of the assistant")
        return False
    return True


def _messages(fields: CountTokensRequest, turns: list[tuple[str, list[_Placed]]]) -> list[Message]:
    made = []
    begins = [] if turns[0][0] != "system" else [block for block, _ in turns.pop(0)[1]]
    system = _system(fields.system, begins)
    if system:
        made.append(Message(role="system", content=system))
    names: dict[str, str] = {}
    for role, blocks in turns:
        if role == "assistant":
            made.append(_assistant(blocks, names))
        else:
            made += _said(role, blocks, names)
    return made


def _system(system: str | list[TextBlock] | None, begins: list[Block]) -> str:
    """The system prompt, with that of a first turn of the system's: most templates take one such message."""
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    texts += [block.text for block in begins if isinstance(block, TextBlock)]
    return "\n".join(text for text in map(without_billing, texts) if text)


def _assistant(blocks: list[_Placed], names: dict[str, str]) -> Message:
    """`names` gets those of the tools that it calls, by the calls' ids."""
    texts, thoughts, calls = [], [], []
    for block, _ in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            names[block.id] = block.name
            function = FunctionCall(name=block.name, arguments=block.input or {})
            calls.append(ToolCall(function=function, id=block.id, type="function"))
    return Message(
        role="assistant",
        content="\n".join(texts),
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _said(role: str, blocks: list[_Placed], names: dict[str, str]) -> list[Message]:
    """A turn of the user's (or of the system's): results of tools first, for they answer what was just called."""
    made, texts = [], []
    for block, at in blocks:
        if isinstance(block, ToolResultBlock):
            content = _result(block, at)
            name = names.get(block.tool_use_id)
            made.append(Message(role="tool", content=content, tool_call_id=block.tool_use_id, name=name))
        elif isinstance(block, TextBlock):
            texts.append(block.text)
    if texts or not made:
        made.append(Message(role=role, content="\n".join(texts)))
    return made


def _result(block: ToolResultBlock, at: str) -> str:
    """Templates know no failed results: the text says it."""
    content: list[ResultBlock] = []
    if isinstance(block.content, str):
        content = [TextBlock(text=block.content)]
    elif block.content is not None:
        content = block.content
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, TextBlock):
            raise _unreadable(part, f"{at}.content[{i}]")
        texts.append(part.text)
    text = "\n".join(texts)
    return f"Error: {text}" if block.is_error and not text.lower().startswith("error") else text


# --------------------------------------------------------------------------------------------------------- other fields


def _common(fields: CountTokensRequest) -> Common:
    if not isinstance(fields, MessagesRequest):
        return Common()
    return Common(
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        min_p=fields.min_p,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        seed=fields.seed,
        stop=fields.stop_sequences,
        ignore_eos=fields.ignore_eos,
        min_tokens=fields.min_tokens,
        stream=fields.stream,
    )


def _tools(fields: CountTokensRequest, tell_ignored: TellIgnored) -> Tools:
    """Functions of the client's. What only Anthropic's servers or models know is skipped: an agent offers it anyway."""
    offered: dict[str, Tool] = {}
    for i, entry in enumerate(fields.tools or ()):
        if entry.type not in (None, "custom"):
            tell_ignored("tool type", entry.type)
            continue
        tool = _tool(entry, f"tools[{i}]")
        if tool.name in offered:
            raise InvalidField(f"tools[{i}].name", f"there are two tools of the name {tool.name!r}")
        offered[tool.name] = tool
    chosen = fields.tool_choice
    if chosen is None:
        return Tools(tuple(offered.values()))
    if chosen.type == "any" and not offered:
        raise InvalidField("tool_choice", "is 'any', and tools has none that this model could call")
    if chosen.type == "tool" and chosen.name not in offered:
        raise InvalidField("tool_choice.name", f"{chosen.name!r} is none of the tools that this model could call")
    return Tools(
        tuple(offered.values()),
        choice=_CHOICES[chosen.type],
        name=(chosen.name or "") if chosen.type == "tool" else "",
        parallel=not chosen.disable_parallel_tool_use,
    )


def _tool(entry: ToolEntry, at: str) -> Tool:
    if entry.name is None:
        raise InvalidField(f"{at}.name", "is required")
    if not NAME.fullmatch(entry.name):
        raise InvalidField(f"{at}.name", NAME_RULE)
    if entry.input_schema is None:
        raise InvalidField(f"{at}.input_schema", "is required")
    if not depth_of(entry.input_schema, DEPTH_LIMIT):
        raise _too_deep(f"{at}.input_schema")
    return Tool(entry.name, entry.description, entry.input_schema, bool(entry.strict))


def _constraint(fields: CountTokensRequest) -> Constraint | None:
    """The API promises that answers fit, so what of a schema cannot be enforced is refused."""
    where, wanted = "output_format", fields.output_format
    if fields.output_config is not None and fields.output_config.format is not None:
        where, wanted = "output_config.format", fields.output_config.format
    return None if wanted is None else schema_constraint(wanted.schema, f"{where}.schema", strict=True)


def _reasoning(fields: CountTokensRequest) -> Reasoning:
    """Where the client says nothing of thinking, the template decides, as on every other route."""
    effort = told_effort(fields.output_config.effort if fields.output_config is not None else None)
    thinking = fields.thinking
    if thinking is None:
        return Reasoning(effort=effort)
    enabled = thinking.type != "disabled"
    return Reasoning(
        enabled=enabled,
        effort=effort,
        budget=thinking.budget_tokens if enabled else None,
        told=enabled and thinking.display != "omitted",
    )


def _too_deep(where: str) -> InvalidField:
    return InvalidField(where, f"is nested more than {DEPTH_LIMIT} levels deep, or too large")
