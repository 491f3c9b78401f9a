"""What answers of the OpenAI routes look like, and errors, as types: for the document (`openapi.py`), not for encoding.

The shapes build plain values (`shapes.py`), for they have no time for more. That they build what is written here is
held by tests, which read real answers against these types with every unknown field refused. A field that may be left
out is `UNSET` by default; one that is always there and may be unknown is null.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

Finish = Literal["stop", "length", "tool_calls"]


class ErrorFacts(msgspec.Struct, kw_only=True):
    """What is wrong and where. The code is a stable word for programs."""

    message: str
    type: str
    param: str | None
    """The field of the request, where it is one."""
    code: str
    needed_mib: float | UnsetType = UNSET
    """Of a flip that does not fit, as the two below."""
    available_mib: float | UnsetType = UNSET
    device: str | UnsetType = UNSET


class Error(msgspec.Struct, kw_only=True):
    """An error in OpenAI's shape."""

    error: ErrorFacts


class AnthropicErrorFacts(msgspec.Struct, kw_only=True):
    """What is wrong."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, kw_only=True):
    """An error in Anthropic's shape."""

    type: Literal["error"]
    error: AnthropicErrorFacts
    request_id: str | UnsetType = UNSET


class ModelFacts(msgspec.Struct, kw_only=True):
    """What homeserve tells of a model beside OpenAI's fields."""

    state: Literal["unloaded", "loading", "loaded", "unloading", "failed"]
    arch: str | None
    """Null until it was loaded once, and so is what else is read from its files."""
    quant: str | None
    reason: str | UnsetType = UNSET
    """Why it failed."""


class Model(msgspec.Struct, kw_only=True):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    """Seconds of the epoch."""
    owned_by: str
    max_model_len: int | None
    """The most tokens of one request, prompt and answer together."""
    homeserve: ModelFacts


class Models(msgspec.Struct, kw_only=True):
    """The models of this server, in and out; of one model none until it is loaded."""

    object: Literal["list"]
    data: list[Model]


class PromptTokens(msgspec.Struct, kw_only=True):
    """Of the prompt's tokens, those that were not computed again."""

    cached_tokens: int


class AnswerTokens(msgspec.Struct, kw_only=True):
    """Of the answer's tokens, those of thoughts."""

    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Counts of tokens. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: AnswerTokens


class DraftCounts(msgspec.Struct, kw_only=True):
    """What drafting brought."""

    rounds: int
    drafted: int
    accepted: int
    accept_len: float | None
    """Tokens per round."""
    by_position: list[float]
    """Share of drafts that were accepted, by their place in the round."""
    carried: int
    """Rounds behind a flip over which a sequence was carried."""


class Timing(msgspec.Struct, kw_only=True):
    """How the answer was made. Null: it did not happen."""

    request_id: str
    queue_ms: float | None
    ttft_ms: float | None
    """From the request to the first token."""
    prefill_ms: float | None
    decode_ms: float | None
    prefill_tok_s: float | None
    decode_tok_s: float | None
    cached_tokens: int
    flips_crossed: int
    """Changes of the layout that it went through."""
    restarts: int
    """Deaths of workers that it went through."""
    draft: DraftCounts | None


class CallOfFunction(msgspec.Struct, kw_only=True):
    """A function's name and its arguments as JSON text; in a stream the name comes first and the text in pieces."""

    arguments: str
    name: str | UnsetType = UNSET


class Call(msgspec.Struct, kw_only=True):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CallOfFunction


class CallDelta(msgspec.Struct, kw_only=True):
    """A tool call, or what it gained."""

    index: int
    function: CallOfFunction
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class TokenLogprob(msgspec.Struct, kw_only=True):
    """A token that might have been drawn."""

    token: str
    logprob: float
    """Natural logarithm; -9999 for a token that could not be drawn."""
    bytes: list[int]


class DrawnLogprob(TokenLogprob, kw_only=True):
    """A token that was drawn, and the likeliest ones."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of the tokens of a choice, or of a piece of it."""

    content: list[DrawnLogprob]
    refusal: None


class AnswerMessage(msgspec.Struct, kw_only=True):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    """Its thoughts."""
    tool_calls: list[Call] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    token_ids: list[int] | UnsetType = UNSET
    """Where `return_token_ids` asks for them."""


class ChatAnswer(msgspec.Struct, kw_only=True):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    homeserve: Timing
    prompt_token_ids: list[int] | UnsetType = UNSET


class MessageDelta(msgspec.Struct, kw_only=True):
    """What the model said since the last event."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChoiceDelta(msgspec.Struct, kw_only=True):
    """What a choice gained."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed answer. The last one has `usage` and `homeserve`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoiceDelta]
    usage: Usage | None | UnsetType = UNSET
    homeserve: Timing | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class LogprobLists(msgspec.Struct, kw_only=True):
    """Log-probabilities as parallel lists. Of a prompt's first token there are none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """In characters of the text of the choice."""


class TextChoice(msgspec.Struct, kw_only=True):
    """One continuation, or in a stream a piece of it."""

    index: int
    text: str
    logprobs: LogprobLists | None
    finish_reason: Finish | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextAnswer(msgspec.Struct, kw_only=True):
    """A whole continuation."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage
    homeserve: Timing


class TextChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed continuation. The last one has `usage` and `homeserve`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage | None | UnsetType = UNSET
    homeserve: Timing | UnsetType = UNSET


class Tokens(msgspec.Struct, kw_only=True):
    """Ids of tokens, and how many there are."""

    schema: Literal[1]
    tokens: list[int]
    count: int


class Text(msgspec.Struct, kw_only=True):
    """The text of tokens."""

    schema: Literal[1]
    prompt: str
