"""What answers of `/v1/messages` look like, as types: for the document (`openapi.py`), not for encoding.

That the shape builds what is written here is held by tests, with every unknown field refused, and beside that against
the types of Anthropic's own client.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from homeserve.server.answer_schemas import Timing

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextAnswerBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Some of what the model says."""

    text: str


class ThinkingAnswerBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """A thought."""

    thinking: str
    signature: str
    """A constant: nothing is signed here."""


class ToolUseAnswerBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A tool call. `input` is empty where the answer was cut in the middle of it."""

    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextAnswerBlock | ThinkingAnswerBlock | ToolUseAnswerBlock


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    """Of the answer's tokens, those of thoughts."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """Counts of tokens. The prompt's are the first three together."""

    input_tokens: int
    """Those that were computed."""
    cache_creation_input_tokens: int
    """Always 0: what is computed is cached without being counted again."""
    cache_read_input_tokens: int
    """Those that were in the cache."""
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class MessageBegun(msgspec.Struct, kw_only=True):
    """A message that has no content yet."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    """The one that ended the answer, where one did."""
    usage: MessageUsage


class MessageAnswer(MessageBegun, kw_only=True):
    """A whole answer."""

    homeserve: Timing


class MessageStart(msgspec.Struct, kw_only=True):
    """Comes with the first token: then it is known what of the prompt was cached."""

    type: Literal["message_start"]
    message: MessageBegun


class BlockStart(msgspec.Struct, kw_only=True):
    """A block begins, and the one before has ended."""

    type: Literal["content_block_start"]
    index: int
    content_block: AnswerBlock


class BlockTextDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class BlockThinkingDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking_delta"):
    """More of a thought."""

    thinking: str


class BlockSignatureDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="signature_delta"):
    """The end of a thought."""

    signature: str


class BlockJsonDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="input_json_delta"):
    """More of a call's arguments, as JSON text."""

    partial_json: str


class BlockDelta(msgspec.Struct, kw_only=True):
    """A block grows."""

    type: Literal["content_block_delta"]
    index: int
    delta: BlockTextDelta | BlockThinkingDelta | BlockSignatureDelta | BlockJsonDelta


class BlockStop(msgspec.Struct, kw_only=True):
    """A block ends."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnding(msgspec.Struct, kw_only=True):
    """How the answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageEnd(msgspec.Struct, kw_only=True):
    """How the answer ended, and what it took."""

    type: Literal["message_delta"]
    delta: MessageEnding
    usage: MessageUsage
    homeserve: Timing


class MessageStop(msgspec.Struct, kw_only=True):
    """The last event."""

    type: Literal["message_stop"]


class MessagePing(msgspec.Struct, kw_only=True):
    """The stream is alive, and there is nothing to say."""

    type: Literal["ping"]


class TokensCount(msgspec.Struct, kw_only=True):
    """How long a prompt is, as its template writes it."""

    input_tokens: int
