"""The fields of a request: names, types and ranges, as msgspec structs. What is written here is all that is checked by
type; what needs the model (token ids, context) is checked where the model is known.

Every field may be null, which means "not said". Fields that this version cannot honour and that would change the answer
are refused by name (`refused`), never dropped: a client that asked for JSON must not get prose.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from homeserve.errors import InvalidField
from homeserve.server.bodies import depth_of

CHOICES_LIMIT = 16
PROMPTS_LIMIT = 128
STOPS_LIMIT = 16
BREAKERS_LIMIT = 64
LOGPROBS_LIMIT = 20
MESSAGES_LIMIT = 4096
TOOLS_LIMIT = 128
DEPTH_LIMIT = 64
"""Levels of nesting in values that are handed on as they are (tools, template arguments)."""

_Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Factor = Annotated[float, Meta(ge=0.01, le=10)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Stop = Annotated[str, Meta(max_length=1024)]
_Stops = Annotated[list[_Stop], Meta(max_length=STOPS_LIMIT)]
_Bias = Annotated[float, Meta(ge=-100, le=100)]
_Breakers = Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=BREAKERS_LIMIT)]
_Objects = list[dict[str, Any]]
_Schema = dict[str, Any] | bool | str
"""A JSON schema, or the text of one."""
_Budget = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""Tokens; -1: no bound."""


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Common(msgspec.Struct, kw_only=True):
    """What chat and completions share."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: _Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: _Share | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    repetition_penalty: _Factor | None = None
    repeat_penalty: _Factor | None = None
    """The same under llama.cpp's name."""
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: Annotated[dict[int, _Bias], Meta(max_length=1024)] | None = None
    seed: _Seed | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_LIMIT)] | None = None
    stop: _Stop | _Stops | None = None
    stop_token_ids: Annotated[list[_Count], Meta(max_length=128)] | None = None
    ignore_eos: bool | None = None
    min_tokens: _Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_prompt: bool | None = None
    """Accepted for bench tools; whether prompts are cached is the server's setting."""
    user: str | None = None
    response_format: dict[str, Any] | None = None
    """This and the ten that follow say what the answer has to be (`homeserve.server.constraints`)."""
    json_schema: _Schema | None = None
    grammar: str | None = None
    ebnf: str | None = None
    regex: str | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: _Schema | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    dry_multiplier: Annotated[float, Meta(le=1000)] | None = None
    """Off at 0 and below, as `xtc_probability` and `top_n_sigma` are."""
    dry_base: Annotated[float, Meta(ge=0, le=1000)] | None = None
    dry_allowed_length: _Count | None = None
    dry_penalty_last_n: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """-1: all tokens, 0: off."""
    dry_sequence_breakers: _Breakers | None = None
    xtc_probability: Annotated[float, Meta(le=1)] | None = None
    xtc_threshold: _Share | None = None
    top_n_sigma: Annotated[float, Meta(le=1000)] | None = None
    mirostat: float | None = None
    mirostat_mode: float | None = None
    dynatemp_range: float | None = None
    smoothing_factor: float | None = None
    top_a: float | None = None
    tfs: float | None = None
    tfs_z: float | None = None
    use_beam_search: bool | None = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    truncate_prompt_tokens: Any = None


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    function: FunctionCall
    id: str | None = None
    type: str | None = None


class Part(msgspec.Struct, kw_only=True):
    """A part of a message's content; only text is known."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    """A call in the form that was before `tool_calls`."""
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same under another name."""


class ChatRequest(Common, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES_LIMIT)]
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_LIMIT)] | None = None
    tools: Annotated[_Objects, Meta(max_length=TOOLS_LIMIT)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: Annotated[_Objects, Meta(max_length=TOOLS_LIMIT)] | None = None
    function_call: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    reasoning_budget: _Budget | None = None
    """The most tokens of a thought. The same under other names:"""
    thinking_budget: _Budget | None = None
    thinking_token_budget: _Budget | None = None
    modalities: list[str] | None = None


class CompletionRequest(Common, kw_only=True):
    prompt: str | list[str | int | list[int]]
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_LIMIT)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: _Positive | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES_LIMIT)] | None = None
    add_special: bool | None = None
    tools: Annotated[_Objects, Meta(max_length=TOOLS_LIMIT)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[_Count]
    model: str | None = None


_OFF_AT_MOST_0 = ("mirostat", "mirostat_mode", "dynatemp_range", "smoothing_factor", "top_a")
"""Samplers that this version lacks. Clients send them with every request; up to 0 they do nothing."""
_OFF_FROM_1 = ("tfs", "tfs_z")
_OFF_IF_EMPTY = ("use_beam_search", "allowed_token_ids", "bad_words", "truncate_prompt_tokens")
_LATER = "is not supported by this version"


def refuse_unsupported(fields: Common) -> None:
    """Raises InvalidField for what is understood, would change the answer, and cannot be honoured yet."""
    if isinstance(fields, ChatRequest):
        _refuse_chat(fields)
    _refuse_samplers(fields)
    if isinstance(fields, CompletionRequest):
        _refuse_completion(fields)


def _refuse_samplers(fields: Common) -> None:
    asked = [name for name in _OFF_AT_MOST_0 if (getattr(fields, name) or 0) > 0]
    asked += [name for name in _OFF_FROM_1 if (value := getattr(fields, name)) is not None and value < 1]
    asked += [name for name in _OFF_IF_EMPTY if getattr(fields, name)]
    if asked:
        raise InvalidField(asked[0], f"{_LATER}; leave it out")
    one, other = fields.repetition_penalty, fields.repeat_penalty
    if one is not None and other is not None and one != other:
        raise InvalidField("repeat_penalty", f"is {other}, but repetition_penalty, the same thing, is {one}")
    if (fields.dry_multiplier or 0) > 0 and fields.dry_base is not None and fields.dry_base < 1:
        raise InvalidField("dry_base", "has to be at least 1: a longer repetition is punished more")
    if fields.ignore_eos and fields.min_tokens and fields.stop_token_ids:
        raise InvalidField("min_tokens", f"together with ignore_eos and stop_token_ids {_LATER}")


def _refuse_chat(fields: ChatRequest) -> None:
    if fields.top_logprobs is not None and not fields.logprobs:
        raise InvalidField("top_logprobs", "needs logprobs: true")
    if fields.modalities is not None and fields.modalities != ["text"]:
        raise InvalidField("modalities", "only text is supported")
    if not depth_of(fields.chat_template_kwargs, DEPTH_LIMIT):
        raise InvalidField("chat_template_kwargs", f"is nested more than {DEPTH_LIMIT} levels deep, or too large")


def _refuse_completion(fields: CompletionRequest) -> None:
    if fields.suffix:
        raise InvalidField("suffix", f"filling a gap {_LATER}")
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise InvalidField("best_of", f"another number of candidates than n {_LATER}")
