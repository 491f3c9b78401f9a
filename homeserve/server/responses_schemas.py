"""What answers of `/v1/responses` look like, as types: for the document (`openapi.py`), not for encoding.

That the shape builds what is written here is held by tests, with every unknown field refused, and beside that against
the types of OpenAI's own client.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from homeserve.server.answer_schemas import Timing

Status = Literal["completed", "incomplete", "in_progress", "failed"]
ItemStatus = Literal["completed", "incomplete", "in_progress"]


class TopTokenLogprob(msgspec.Struct, kw_only=True):
    """A token that was likely."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopTokenLogprob, kw_only=True):
    """A token that was drawn, and the most likely ones of its place."""

    top_logprobs: list[TopTokenLogprob]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Text of the answer."""

    text: str
    annotations: list[Any]
    """Always empty: nothing here cites."""
    logprobs: list[TokenLogprob]
    """Empty where they were not asked for."""


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """A thought."""

    text: str


class SummaryText(msgspec.Struct, kw_only=True, tag_field="type", tag="summary_text"):
    """A thought, where a summary was asked for: the whole of it."""

    text: str


class MessageOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """What the model says."""

    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought before."""

    id: str
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText] | UnsetType = UNSET
    """Left out where a summary was asked for."""


class FunctionCallOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function. `incomplete`: the answer was cut in the middle of its arguments."""

    id: str
    status: ItemStatus
    call_id: str
    """What the output of the function has to name."""
    name: str
    arguments: str
    """JSON, as text."""


OutputItem = MessageOutput | ReasoningOutput | FunctionCallOutput


class InputTokensDetails(msgspec.Struct, kw_only=True):
    """Of the prompt's tokens, those that were not computed again."""

    cached_tokens: int
    cache_write_tokens: int
    """Always 0: what is computed is cached without being counted again."""


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    """Of the answer's tokens, those of thoughts."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct, kw_only=True):
    """Why a response failed."""

    code: Literal["server_error"]
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    """Why a response is not complete: its tokens, or the context, were used up."""

    reason: Literal["max_output_tokens"]


class ReasoningInForce(msgspec.Struct, kw_only=True):
    effort: str | None
    summary: str | None


class FunctionInForce(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool


class Response(msgspec.Struct, kw_only=True):
    """A response, and the settings in force for it."""

    id: str
    object: Literal["response"]
    created_at: int
    """Seconds of the epoch."""
    status: Status
    completed_at: int | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    """Null before the end."""
    homeserve: Timing | UnsetType = UNSET
    """At the end."""
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: ReasoningInForce
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    """`format`, and `verbosity` where it was said."""
    tool_choice: str | dict[str, Any]
    tools: list[FunctionInForce]
    """Without those that were skipped."""
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class InputTokens(msgspec.Struct, kw_only=True):
    """The tokens that a prompt would have."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class _Event(msgspec.Struct, kw_only=True):
    type: str
    sequence_number: int
    """Counts the events of a stream, from 0."""


class ResponseEvent(_Event, kw_only=True):
    """The response as of now."""

    response: Response


class ItemEvent(_Event, kw_only=True):
    """An item of the output begins or ends."""

    output_index: int
    item: OutputItem


class _OfItem(_Event, kw_only=True):
    item_id: str
    output_index: int


class PartEvent(_OfItem, kw_only=True):
    """A part of an item begins or ends."""

    content_index: int
    part: OutputText | ReasoningText


class TextDelta(_OfItem, kw_only=True):
    """More text of the answer."""

    content_index: int
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(_OfItem, kw_only=True):
    """All text of a part."""

    content_index: int
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(_OfItem, kw_only=True):
    """More of a thought."""

    content_index: int
    delta: str


class ReasoningDone(_OfItem, kw_only=True):
    """A whole thought."""

    content_index: int
    text: str


class SummaryPartEvent(_OfItem, kw_only=True):
    """A thought begins or ends that is told as a summary."""

    summary_index: int
    part: SummaryText


class SummaryDelta(_OfItem, kw_only=True):
    """More of a thought that is told as a summary."""

    summary_index: int
    delta: str


class SummaryDone(_OfItem, kw_only=True):
    """A whole thought that is told as a summary."""

    summary_index: int
    text: str


class ArgumentsDelta(_OfItem, kw_only=True):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(_OfItem, kw_only=True):
    """All arguments of a call."""

    name: str
    arguments: str


_WHOLE = ("created", "in_progress", "completed", "incomplete", "failed")
RESPONSE_EVENTS: dict[str, tuple[type[_Event], ...]] = {
    **dict.fromkeys((f"response.{when}" for when in _WHOLE), (ResponseEvent,)),
    "response.output_item.added": (ItemEvent,),
    "response.output_item.done": (ItemEvent,),
    "response.content_part.added": (PartEvent,),
    "response.content_part.done": (PartEvent,),
    "response.output_text.delta": (TextDelta,),
    "response.output_text.done": (TextDone,),
    "response.reasoning_text.delta": (ReasoningDelta,),
    "response.reasoning_text.done": (ReasoningDone,),
    "response.reasoning_summary_part.added": (SummaryPartEvent,),
    "response.reasoning_summary_part.done": (SummaryPartEvent,),
    "response.reasoning_summary_text.delta": (SummaryDelta,),
    "response.reasoning_summary_text.done": (SummaryDone,),
    "response.function_call_arguments.delta": (ArgumentsDelta,),
    "response.function_call_arguments.done": (ArgumentsDone,),
}
