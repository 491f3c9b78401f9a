"""The fields of `/v1/messages` and `/v1/messages/count_tokens`, as msgspec structs.

As in `fields.py` every field may be null, but for the three that Anthropic's API asks for: `messages`, and of a message
`role` and `content`; and `max_tokens` where something is generated. The API requires that one, the official clients
cannot leave it out, and an answer without a limit from a small model may be as long as the context.

Content blocks are tagged by `type`. Blocks that this server's models cannot read (images, documents) are known here, so
that their refusal can say so. What a struct does not name is ignored, `cache_control` above all: prefixes are cached
here without being asked for.

Not Anthropic's are the fields at the end of `MessagesRequest`. They are what the other routes have, and make answers
repeatable (`seed`) and measurable (`ignore_eos`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from homeserve.server.fields import MESSAGES_LIMIT, STOPS_LIMIT

TOOLS_LIMIT = 512
"""More than OpenAI's: agents offer those of all their tool servers at once."""
BLOCKS_LIMIT = 4096
"""Content blocks of one message."""
NAME_LEN = 256

_Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Stop = Annotated[str, Meta(max_length=1024)]
_Name = Annotated[str, Meta(min_length=1, max_length=NAME_LEN)]


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None
    """What this server signs it with says nothing; nobody checks it."""


class RedactedThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="redacted_thinking"):
    """A thought that only its author can read: it does not enter the prompt."""

    data: str


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: _Name
    input: dict[str, Any] | None = None


class ImageBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="image"):
    """Known, and refused."""


class DocumentBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="document"):
    """Known, and refused."""


ResultBlock = TextBlock | ImageBlock | DocumentBlock


class ToolResultBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | Annotated[list[ResultBlock], Meta(max_length=BLOCKS_LIMIT)] | None = None
    is_error: bool | None = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock | ImageBlock | DocumentBlock


class Turn(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Meta(max_length=BLOCKS_LIMIT)]


class ToolEntry(msgspec.Struct, kw_only=True):
    """A function of the client's (`type` absent or `custom`), or something that Anthropic's servers do, or their models
    know by name: those are skipped, whatever their fields."""

    type: str | None = None
    name: _Name | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceEntry(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """`adaptive` and `between_tools` leave it to the model how much it thinks."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """What makes the prompt."""

    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MESSAGES_LIMIT)]
    model: str | None = None
    system: str | Annotated[list[TextBlock], Meta(max_length=BLOCKS_LIMIT)] | None = None
    tools: Annotated[list[ToolEntry], Meta(max_length=TOOLS_LIMIT)] | None = None
    tool_choice: ToolChoiceEntry | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Where `output_config.format` was before."""
    cache_control: Any = None
    """Accepted, and of no use to a server at home, as the fields below."""
    betas: Any = None
    container: Any = None
    context_management: Any = None
    inference_geo: Any = None
    service_tier: Any = None
    speed: Any = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: _Count
    """0 computes the prompt, so that it is in the cache, and answers nothing."""
    stop_sequences: Annotated[list[_Stop], Meta(max_length=STOPS_LIMIT)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: _Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    metadata: dict[str, Any] | None = None
    """Accepted, and of no use to a server at home."""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """Not a field of Anthropic's, as those below: the same seed gives the same answer."""
    min_p: _Share | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    ignore_eos: bool | None = None
    min_tokens: _Count | None = None
