"""What a chat asks for, whichever API it came by.

    /v1/chat/completions ─┐
    /v1/responses ────────┼─▶ ChatCall ──chat_ask──▶ Ask ──respond──▶ pieces ──Shape──▶ the API's own JSON
    /v1/messages ─────────┘

A route translates its own fields into a `ChatCall` and its answer's pieces back; what lies between knows no API. Errors
name the fields as the route calls them: `where` has the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from homeserve.server.fields import Common, Message


class ChoiceOfTool(Enum):
    """Whether the model calls tools. `ONE`: the one that is named, and nothing else."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    ONE = "one"


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema, None for a function without any. `strict`:
    arguments always fit it."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect a tool: OpenAI's form."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters if self.parameters is not None else {"type": "object"}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Tools:
    offered: tuple[Tool, ...] = ()
    choice: ChoiceOfTool = ChoiceOfTool.AUTO
    name: str = ""
    """Of the one, where the choice is `ONE`."""
    parallel: bool = True
    """Whether one answer may have several calls."""

    @property
    def callable(self) -> bool:
        return bool(self.offered) and self.choice is not ChoiceOfTool.NONE


class ConstraintKind(Enum):
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"
    GBNF = "gbnf"


@dataclass(frozen=True)
class Constraint:
    """What the answer's text has to be. `value` is the schema, the pattern, the list of texts or the grammar; `where`
    the field that it came from. `strict`: a keyword of the schema that cannot be enforced is refused, else ignored."""

    kind: ConstraintKind
    value: Any = None
    where: str = "response_format"
    strict: bool = False


@dataclass(frozen=True)
class Reasoning:
    """None: as the model's template has it by default. `budget` is the most tokens of a thought; `told`: whether the
    client hears the thought."""

    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None
    told: bool = True


@dataclass(frozen=True)
class Where:
    """How the route calls what an error may be about."""

    messages: str = "messages"
    tools: str = "tools"
    parameters: str = "function.parameters"
    """Of a tool: its schema."""
    tool_choice: str = "tool_choice"
    max_tokens: str = "max_tokens"


@dataclass(frozen=True)
class ChatCall:
    """`fields` has what is said about drawing, stops and streaming."""

    fields: Common
    messages: list[Message]
    tools: Tools = Tools()
    constraint: Constraint | None = None
    reasoning: Reasoning = Reasoning()
    max_tokens: int | None = None
    """None: the rest of the context."""
    logprobs: int = -1
    """-1: none; else how many alternatives each token comes with."""
    template_arguments: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_last: bool = False
    """The answer goes on from the last message's text (`add_generation_prompt` is False then)."""
    where: Where = Where()
