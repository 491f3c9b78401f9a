"""Request bodies: what is read, what is refused, and that the refusal names the field."""

from __future__ import annotations

import logging
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeserve.errors import InvalidField, UnknownModel
from homeserve.server.bodies import (
    CONTAINERS_LIMIT,
    HANDED_ON_LIMIT,
    IGNORED_NAMES_LIMIT,
    INLINE_BYTES,
    VALUES_LIMIT,
    BodyDecoder,
    depth_of,
)
from homeserve.server.fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    refuse_unsupported,
)

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    body = msgspec.json.encode({"messages": MESSAGES, **fields})
    decoded = BodyDecoder().decode(body, ChatRequest)
    refuse_unsupported(decoded)
    return decoded


def completion(**fields: Any) -> CompletionRequest:
    decoded = BodyDecoder().decode(msgspec.json.encode({"prompt": "hi", **fields}), CompletionRequest)
    refuse_unsupported(decoded)
    return decoded


def refused(make: Any, **fields: Any) -> InvalidField:
    with pytest.raises(InvalidField) as caught:
        make(**fields)
    assert caught.value.code == "invalid_field" and caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [MESSAGES[0], {"role": "user", "content": [{"type": 4}]}]}, "messages[1].content[0].type"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.01}, "top_p"),
        ({"min_p": -1}, "min_p"),
        ({"typical_p": 2}, "typical_p"),
        ({"typical_p": 0}, "typical_p"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty"),
        ({"dry_multiplier": 1001}, "dry_multiplier"),
        ({"dry_multiplier": 0.8, "dry_base": 0.99}, "dry_base"),
        ({"dry_base": -1}, "dry_base"),
        ({"dry_allowed_length": -1}, "dry_allowed_length"),
        ({"dry_allowed_length": 2.5}, "dry_allowed_length"),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n"),
        ({"dry_sequence_breakers": "x"}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": ["x", 1]}, "dry_sequence_breakers[1]"),
        ({"dry_sequence_breakers": ["x" * 65]}, "dry_sequence_breakers[0]"),
        ({"dry_sequence_breakers": ["x"] * 65}, "dry_sequence_breakers"),
        ({"xtc_probability": 1.5}, "xtc_probability"),
        ({"xtc_probability": "much"}, "xtc_probability"),
        ({"xtc_threshold": -0.1}, "xtc_threshold"),
        ({"mirostat": 2}, "mirostat"),
        ({"dynatemp_range": 0.5}, "dynatemp_range"),
        ({"top_n_sigma": "wide"}, "top_n_sigma"),
        ({"top_n_sigma": 1001}, "top_n_sigma"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"tfs_z": 0}, "tfs_z"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"ignore_eos": True, "min_tokens": 2, "stop_token_ids": [1]}, "min_tokens"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": "2"}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [3]}, "stop[0]"),
        ({"stop": 3}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"tools": [1]}, "tools[0]"),
        ({"response_format": "json_object"}, "response_format"),
        ({"guided_json": 1}, "guided_json"),
        ({"grammar": {}}, "grammar"),
        ({"reasoning_effort": "some"}, "reasoning_effort"),
        ({"reasoning_budget": -2}, "reasoning_budget"),
        ({"thinking_budget": "9"}, "thinking_budget"),
        ({"thinking_token_budget": 1.5}, "thinking_token_budget"),
        ({"modalities": ["audio"]}, "modalities"),
    ],
)
def test_a_wrong_chat_field_is_named(fields: dict[str, Any], path: str) -> None:
    error = refused(chat, **fields)
    assert error.param == path
    assert path in error.message


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "a", 2.5]}, "prompt[2]"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
    ],
)
def test_a_wrong_completion_field_is_named(fields: dict[str, Any], path: str) -> None:
    assert refused(completion, **fields).param == path


def test_a_missing_field_is_said_to_be_required() -> None:
    with pytest.raises(InvalidField, match="prompt: is required"):
        BodyDecoder().decode(b"{}", CompletionRequest)


def test_null_means_not_said() -> None:
    names = [name for name in ChatRequest.__struct_encode_fields__ if name != "messages"]
    assert chat(**dict.fromkeys(names)) == chat()


def test_fields_that_do_nothing_are_accepted() -> None:
    chat(tools=[], functions=[])
    chat(dry_multiplier=0, dry_base=1.75, xtc_probability=0.0, xtc_threshold=0.1, mirostat=0, mirostat_tau=5.0)
    chat(dry_multiplier=-1.0, xtc_probability=-1.0, top_n_sigma=-1.0, dry_base=0, dry_penalty_last_n=0)
    chat(tfs_z=1.0, use_beam_search=False, bad_words=[])
    completion(n=3, best_of=3)
    assert chat(repeat_penalty=1.1, repetition_penalty=1.1).repeat_penalty == 1.1


def test_fields_of_bench_tools_are_accepted() -> None:
    fields = chat(
        ignore_eos=True,
        min_tokens=4,
        return_token_ids=True,
        cache_prompt=False,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        max_completion_tokens=5,
        max_tokens=6,
        seed=1,
        stop=["a"],
        tool_choice="none",
        response_format={"type": "text"},
    )
    assert fields.min_tokens == 4 and fields.max_completion_tokens == 5
    assert completion(prompt=[1, 2, 3], echo=True, logprobs=1, best_of=1).prompt == [1, 2, 3]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nope",
        b"[1]",
        b'"text"',
        b"null",
        b'{"messages": [',
        b'{"messages": [{"role": "\xff"}]}',
        b'{"messages": [{"role": "user"}]} trailing',
        b'{"temperature": NaN, "messages": []}',
        b'{"x": ' + b"[" * 100_000,
        b'{"messages": [{"role": "user"}], "tools": ' + b'[{"a":' * 50_000,
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidField) as caught:
        BodyDecoder().decode(body, ChatRequest)
    assert caught.value.param == "body"


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode()))
def test_no_bytes_crash_the_decoder(body: bytes) -> None:
    for kind in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest):
        try:
            BodyDecoder().decode(body, kind)
        except InvalidField:
            pass


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(ChatRequest.__struct_encode_fields__), _JSON, max_size=5))
def test_any_json_is_read_or_refused_with_a_field(fields: dict[str, Any]) -> None:
    try:
        refuse_unsupported(BodyDecoder().decode(msgspec.json.encode(fields), ChatRequest))
    except InvalidField as error:
        assert error.param


def test_an_unknown_field_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    decoder = BodyDecoder()
    body = msgspec.json.encode({"messages": MESSAGES, "frobnicate": 1})
    with caplog.at_level(logging.INFO, "homeserve.server"):
        decoder.decode(body, ChatRequest)
        decoder.decode(body, ChatRequest)
    assert [record.getMessage() for record in caplog.records] == [
        "field 'frobnicate' of a request is not used here and was ignored"
    ]


def test_names_of_ignored_fields_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    decoder = BodyDecoder()
    many = {"messages": MESSAGES} | {f"x{i}": 0 for i in range(2 * IGNORED_NAMES_LIMIT)}
    with caplog.at_level(logging.INFO, "homeserve.server"):
        decoder.decode(msgspec.json.encode(many), ChatRequest)
    assert len(caplog.records) == IGNORED_NAMES_LIMIT


def test_deep_values_that_are_handed_on_are_refused() -> None:
    deep: Any = 1
    for _ in range(100):
        deep = {"a": [deep]}
    assert refused(chat, chat_template_kwargs={"a": deep}).param == "chat_template_kwargs"


def test_depth_counts_levels() -> None:
    assert depth_of(1, 0) and depth_of([1], 1) and depth_of({"a": [1]}, 2)
    assert not depth_of({"a": [[1]]}, 2)
    assert depth_of([1] * HANDED_ON_LIMIT, 2) and not depth_of([1] * (HANDED_ON_LIMIT + 1), 2)


async def test_a_large_body_is_decoded_in_a_thread_and_its_values_are_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads = []
    decode = BodyDecoder.decode

    def watched(self: BodyDecoder, body: bytes, kind: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return decode(self, body, kind)

    monkeypatch.setattr(BodyDecoder, "decode", watched)
    decoder = BodyDecoder()
    large = msgspec.json.encode({"prompt": "x" * INLINE_BYTES, "frobnicate": 1})
    with caplog.at_level(logging.INFO, "homeserve.server"):
        assert (await decoder.read(b'{"prompt": "x"}', CompletionRequest)).prompt == "x"
        assert len((await decoder.read(large, CompletionRequest)).prompt) == INLINE_BYTES
    assert threads == [True, False] and not caplog.records
    with pytest.raises(InvalidField, match=f"body: has more than {VALUES_LIMIT} values"):
        await decoder.read(b'{"prompt": [' + b"1," * VALUES_LIMIT + b"1,1]}", CompletionRequest)


@pytest.mark.parametrize("one", ["[[[[]]]]", '{"a":{"a":{"a":{}}}}'])
async def test_lists_and_objects_of_a_large_body_are_bounded(one: str) -> None:
    """They have no commas among them when they are nested, and decoding holds every other thread."""

    def body(count: int) -> bytes:
        return f'{{"prompt": "x", "response_format": {{"x": [{",".join([one] * count)}]}}}}'.encode()

    decoder = BodyDecoder()
    with pytest.raises(InvalidField, match=f"body: has more than {CONTAINERS_LIMIT} lists and objects"):
        await decoder.read(body(CONTAINERS_LIMIT // 4), CompletionRequest)
    assert (await decoder.read(body(CONTAINERS_LIMIT // 4 - 1), CompletionRequest)).prompt == "x"


def test_an_error_does_not_repeat_megabytes() -> None:
    """The beginning and the end of a message stay: the field, and what is wrong."""
    for error in (
        InvalidField("stop", f"{'x' * 1_000_000!r} is no text"),
        InvalidField("structured_outputs." + "k" * 1_000_000, "is no text"),
        UnknownModel("m" * 1_000_000, ("counter",)),
    ):
        told = error.as_body()["error"]
        assert len(told["message"]) < 2100 and len(told["param"] or "") < 2100
        assert " … " in told["message"]
    short = InvalidField("stop", "x" * 1000).as_body()["error"]
    assert short["message"] == "stop: " + "x" * 1000 and short["param"] == "stop"
