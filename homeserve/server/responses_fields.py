"""The fields of `/v1/responses`, as msgspec structs. The sampling fields are those of every route (`Common`).

OpenAI's API lets items and tools be of many types. Here each is one struct with the fields of all types that are read,
because items of a conversation come without a type too, and because a type that is not known must not fail the whole
request. What a type needs is checked where it is read (`responses_call`); fields of no interest here are ignored.

The server keeps no responses: what refers to one that was kept (`previous_response_id`, `conversation`, `prompt`,
`background`) is refused by name, with what to send instead.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from homeserve.errors import InvalidField
from homeserve.server.bodies import depth_of
from homeserve.server.fields import (
    DEPTH_LIMIT,
    LOGPROBS_LIMIT,
    MESSAGES_LIMIT,
    TOOLS_LIMIT,
    Common,
    StreamOptions,
    refuse_unsupported,
)
from homeserve.server.reasoning import Effort

METADATA_LIMIT = 16
"""Pairs of `metadata`."""
INCLUDES_LIMIT = 32
LOGPROBS = "message.output_text.logprobs"
"""The one value of `include` that changes something here."""

_Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Key = Annotated[str, Meta(max_length=64)]
_Text512 = Annotated[str, Meta(max_length=512)]
_Budget = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Summary = Literal["auto", "concise", "detailed"]


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message, of a tool's output or of a thought. Read are `input_text`, `output_text`, `text`, `refusal`,
    `reasoning_text` and `summary_text`; images, files and sound are refused."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    """The text of a part of type `refusal`."""


class InputItem(msgspec.Struct, kw_only=True):
    """One item of the conversation.

    `message` (also without a type): `role` user, assistant, system or developer, and `content`.
    `function_call`: `call_id`, `name`, `arguments`. `function_call_output`: `call_id`, `output`.
    `custom_tool_call` and `custom_tool_call_output`: the same of tools of free text, with `input`.
    `reasoning`: a thought of an earlier turn, by `content` or else by `summary`; encrypted ones cannot be read and are
    left out.
    `item_reference` is refused, because nothing is stored. Items of tools that run at OpenAI are left out where they
    hold nothing to read, and refused where they do.
    """

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    """JSON, as text."""
    input: Any = None
    output: str | list[ContentPart] | dict[str, Any] | None = None
    summary: list[ContentPart] | None = None
    encrypted_content: Any = None
    status: str | None = None


class ToolSpec(msgspec.Struct, kw_only=True):
    """A tool. Of type `function`: a function that the model may call; its `parameters` are a JSON schema. Other types
    run at OpenAI or at the client in ways of their own: they are skipped."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """True: arguments always fit the schema."""


class AllowedTool(msgspec.Struct, kw_only=True):
    """A tool by its name."""

    type: str
    name: str | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """`{type: function, name}`: this one is called. `{type: allowed_tools, mode, tools}`: those alone are offered."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[AllowedTool], Meta(max_length=TOOLS_LIMIT)] | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """What the answer's text has to be: `text`, `json_object`, or `json_schema` with `schema`."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Taken and given back; models here know no such knob."""


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """How much the model thinks, where its template knows of it. `none`: not at all."""

    effort: Effort | None = None
    summary: Summary | None = None
    """Any: thoughts are told as summaries, in full, for clients that read nothing else."""
    generate_summary: Summary | None = None
    """The older name of `summary`."""


class ResponseStreamOptions(StreamOptions, kw_only=True):
    """The final event has `usage` in any case."""

    include_obfuscation: bool | None = None
    """Taken; no event is padded."""


class _Conversation(Common, kw_only=True):
    """What a response and a count of its tokens are made from."""

    input: str | Annotated[list[InputItem], Meta(max_length=MESSAGES_LIMIT)] | None = None
    """The user's text, or the whole conversation. Empty: as a user who says nothing."""
    instructions: str | None = None
    """What the system says before the conversation."""
    tools: Annotated[list[ToolSpec], Meta(max_length=TOOLS_LIMIT)] | None = None
    tool_choice: str | ToolChoice | None = None
    """`auto`, `none`, `required`, or an object."""
    parallel_tool_calls: bool | None = None
    """False: at most one call in one response."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    reasoning_budget: _Budget | None = None
    """The most tokens of a thought, beyond OpenAI's API. The same under other names:"""
    thinking_budget: _Budget | None = None
    thinking_token_budget: _Budget | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """Nothing is ever dropped from the input: a conversation that is too long is refused, under `auto` too."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template, beyond OpenAI's API."""
    previous_response_id: str | None = None
    """Refused: responses are not kept."""
    conversation: Any = None
    """Refused: conversations are not kept."""
    prompt: Any = None
    """Refused: there are no stored prompts."""


class ResponsesRequest(_Conversation, kw_only=True):
    """A request of `/v1/responses`."""

    max_output_tokens: _Positive | None = None
    """Of thoughts, calls and text together. None: the rest of the context."""
    top_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_LIMIT)] | None = None
    include: Annotated[list[str], Meta(max_length=INCLUDES_LIMIT)] | None = None
    """`message.output_text.logprobs` gives log-probabilities; other values ask for what is never there."""
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    """Taken; responses are never kept, and say so (`store: false`)."""
    background: bool | None = None
    """True is refused."""
    metadata: Annotated[dict[_Key, _Text512], Meta(max_length=METADATA_LIMIT)] | None = None
    max_tool_calls: _Positive | None = None
    """Of tools that run at OpenAI; given back."""
    service_tier: str | None = None
    """Taken; there is one tier."""
    prompt_cache_key: str | None = None
    """Taken and given back; prompts are found in the cache by their tokens."""
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    moderation: Any = None
    """Refused: nothing here moderates."""


class InputTokensRequest(_Conversation, kw_only=True):
    """A request of `/v1/responses/input_tokens`."""


_NOT_KEPT = {
    "previous_response_id": "responses are not kept here; send the whole conversation as input, earlier output too",
    "conversation": "conversations are not kept here; send the whole conversation as input",
    "prompt": "there are no stored prompts here; send instructions and input",
    "moderation": "nothing here moderates; leave it out",
}


def refuse_unkept(fields: ResponsesRequest | InputTokensRequest) -> None:
    """Raises InvalidField for what this server cannot do and must not leave out in silence."""
    for name, why in _NOT_KEPT.items():
        if getattr(fields, name, None) is not None:
            raise InvalidField(name, why)
    if isinstance(fields, ResponsesRequest) and fields.background:
        raise InvalidField("background", "responses are not kept here, so none can be fetched later; use stream: true")
    if fields.n is not None and fields.n != 1:
        raise InvalidField("n", "a response has one answer; /v1/chat/completions takes n")
    if not depth_of(fields.chat_template_kwargs, DEPTH_LIMIT):
        raise InvalidField("chat_template_kwargs", f"is nested more than {DEPTH_LIMIT} levels deep, or too large")
    refuse_unsupported(fields)
