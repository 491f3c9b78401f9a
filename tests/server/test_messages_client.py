"""Anthropic's official client against a real server of the default model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
STORY: list[Any] = [{"role": "user", "content": "Tell me a story about a lighthouse keeper and a storm."}]
GREEDY: dict[str, Any] = {"temperature": 0}
BASH: Any = {
    "name": "Bash",
    "description": "Runs a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


@pytest.fixture
def client(server: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=100) as made:
        yield made


@pytest.fixture
def model(server: Any) -> str:
    (model,) = server.get("/v1/models")[1]["data"]
    return str(model["id"])


@pytest.fixture(autouse=True)
def idle_afterwards(server: Any, wait_until: Callable[..., Any]) -> Iterator[None]:
    """After each test nothing runs, and every page is free or cached."""
    yield
    wait_until("an idle census", lambda: server.get("/v1/homeserve/census")[1]["idle"])
    assert server.get("/v1/homeserve/census")[1]["ok"]


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def post(server: Any, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(server.url + path, json=body, timeout=100)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_message_knows_the_capital_of_france(client: anthropic.Anthropic, model: str) -> None:
    message = client.messages.create(model=model, max_tokens=64, messages=FRANCE, extra_body=GREEDY)
    TypeAdapter(Message).validate_python(message.to_dict())
    assert "Paris" in text_of(message)
    assert message.stop_reason == "end_turn" and message.stop_sequence is None
    assert 0 < message.usage.output_tokens < 64


def test_a_stream_says_what_a_body_says(client: anthropic.Anthropic, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "max_tokens": 40, "messages": STORY, "extra_body": GREEDY}
    body = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == text_of(final) == text_of(body)
    assert len(texts) > 20
    assert final.stop_reason == body.stop_reason == "max_tokens"
    assert final.usage.output_tokens == body.usage.output_tokens == 40
    whole = [(made.usage.cache_read_input_tokens or 0) + made.usage.input_tokens for made in (body, final)]
    assert whole[0] == whole[1]


def test_every_event_is_one_of_anthropics(client: anthropic.Anthropic, model: str, server: Any) -> None:
    body = {"model": model, "max_tokens": 12, "messages": STORY, "stream": True}
    text = httpx.post(f"{server.url}/v1/messages", json=body, timeout=100).text
    frames = [frame.split("\n") for frame in text.removesuffix("\n\n").split("\n\n")]
    for name, data in frames:
        event = EVENTS.validate_json(data.removeprefix("data: "))
        assert name == f"event: {event.type}"
    assert frames[0][0] == "event: message_start" and frames[-1][0] == "event: message_stop"


def test_the_text_is_that_of_the_chat_route(client: anthropic.Anthropic, model: str, server: Any) -> None:
    turns: list[Any] = [*STORY, {"role": "assistant", "content": "Once"}, {"role": "user", "content": "Go on."}]
    drawn = {"temperature": 1.0, "seed": 7}
    message = client.messages.create(model=model, max_tokens=24, messages=turns, system="Be brief.", extra_body=drawn)
    system = {"role": "system", "content": "Be brief."}
    chat = post(server, "/v1/chat/completions", {**drawn, "max_tokens": 24, "messages": [system, *turns]})
    assert text_of(message) == chat["choices"][0]["message"]["content"]
    other = client.messages.create(
        model=model, max_tokens=24, messages=turns, system="Be brief.", extra_body=drawn | {"seed": 8}
    )
    assert text_of(other) != text_of(message)


def test_counted_tokens_are_those_of_the_prompt(client: anthropic.Anthropic, model: str) -> None:
    more: dict[str, Any] = {"model": model, "messages": STORY, "system": "Be brief.", "tools": [BASH]}
    count = client.messages.count_tokens(**more)
    usage = client.messages.create(max_tokens=1, **more).usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert count.input_tokens > client.messages.count_tokens(**{**more, "tools": []}).input_tokens


def test_a_repeated_prompt_is_read_from_the_cache_and_counted_once(client: anthropic.Anthropic, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "max_tokens": 4, "extra_body": GREEDY}
    asked["messages"] = [{"role": "user", "content": "Tell me of the tides, and of the moon that makes them come."}]
    first, second = (client.messages.create(**asked).usage for _ in range(2))
    assert second.cache_read_input_tokens and second.cache_creation_input_tokens == 0
    assert second.cache_read_input_tokens > (first.cache_read_input_tokens or 0)
    whole = client.messages.count_tokens(model=model, messages=asked["messages"]).input_tokens
    for usage in (first, second):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == whole
    with client.messages.stream(**asked) as stream:
        usage = stream.get_final_message().usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (second.input_tokens, second.cache_read_input_tokens)


def test_a_stop_sequence_is_told_and_cut_off(client: anthropic.Anthropic, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "max_tokens": 64, "messages": FRANCE, "extra_body": GREEDY}
    message = client.messages.create(**asked, stop_sequences=["zzz", " Paris"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " Paris")
    assert "Paris" not in text_of(message) and text_of(message)


def test_an_answer_goes_on_from_a_begun_one(client: anthropic.Anthropic, model: str) -> None:
    begun = "The capital of France is"
    asked: dict[str, Any] = {"model": model, "max_tokens": 8, "extra_body": GREEDY}
    message = client.messages.create(messages=[*FRANCE, {"role": "assistant", "content": begun}], **asked)
    assert text_of(message).startswith(" Paris")
    prompt = client.messages.count_tokens(model=model, messages=FRANCE).input_tokens
    usage = message.usage
    assert prompt < usage.input_tokens + (usage.cache_read_input_tokens or 0) < prompt + 8


def test_closing_a_stream_frees_its_place(
    client: anthropic.Anthropic, model: str, server: Any, wait_until: Callable[..., Any]
) -> None:
    with client.messages.stream(model=model, max_tokens=500, messages=STORY) as stream:
        next(iter(stream.text_stream))
    wait_until("an idle server", lambda: server.get("/v1/homeserve/status")[1]["requests"]["running"] == 0)


def test_errors_are_the_clients_own(client: anthropic.Anthropic, model: str) -> None:
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        client.messages.create(model="gpt", max_tokens=5, messages=FRANCE)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: [0-9]+ tokens > 1024 maximum"):
        client.messages.create(model=model, max_tokens=5, messages=[{"role": "user", "content": "tale " * 1100}])
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type: 'image'") as caught:
        client.messages.create(model=model, max_tokens=5, messages=[{"role": "user", "content": [image]}])
    assert caught.value.request_id and caught.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
        client.messages.create(model=model, max_tokens=5, messages=FRANCE, stop_sequences=["x"] * 17)


# ---------------------------------------------------------------------------------------------------- tools and schemas


@pytest.mark.parametrize(
    "choice", [{"type": "tool", "name": "Bash"}, {"type": "any", "disable_parallel_tool_use": True}]
)
def test_a_call_that_has_to_be_is_made_and_streamed(client: anthropic.Anthropic, model: str, choice: Any) -> None:
    asked: dict[str, Any] = {"model": model, "max_tokens": 200, "tools": [BASH], "tool_choice": choice}
    asked |= {"messages": [{"role": "user", "content": "List the files here with ls."}], "extra_body": GREEDY}
    message = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    for made in (message, final):
        use = made.content[0]
        assert use.type == "tool_use" and use.name == "Bash" and use.id
        assert made.stop_reason == "tool_use"
        assert isinstance(use.input["command"], str)
    assert message.content[0].input == final.content[0].input == json.loads("".join(pieces))
    # And the answer to its result.
    result: Any = {"type": "tool_result", "tool_use_id": message.content[0].id, "content": "README.md"}
    turns = [*asked["messages"], message.to_param(), {"role": "user", "content": [result]}]
    assert client.messages.create(**(asked | {"messages": turns, "tool_choice": {"type": "none"}})).content


def test_an_answer_fits_the_output_format(client: anthropic.Anthropic, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    wanted = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    message = client.messages.create(model=model, max_tokens=200, messages=FRANCE, extra_body=wanted | GREEDY)
    assert message.stop_reason == "end_turn"
    jsonschema.validate(json.loads(text_of(message)), schema)
    nothing = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "string", "enum": []}}}}
    with pytest.raises(anthropic.BadRequestError, match="output_config.format.schema"):
        client.messages.create(model=model, max_tokens=9, messages=FRANCE, extra_body=nothing)


# --------------------------------------------------------------------------------------------------------------- agents


def claude_code(model: str, cch: str, *turns: Any) -> dict[str, Any]:
    """A request as Claude Code sends it, in small."""
    marked = {"cache_control": {"type": "ephemeral"}}
    billing = f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={cch};"
    rules = "You are an agent that runs commands. " + "Look before you change a file. " * 6
    said = {"type": "text", "text": "List the files of this folder.", **marked}
    return {
        "model": model,
        "max_tokens": 16,
        "system": [{"type": "text", "text": billing}, {"type": "text", "text": rules, **marked}],
        "messages": [{"role": "user", "content": [said]}, *turns],
        "tools": [BASH, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "extra_headers": {"anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"},
        "extra_body": {"context_management": {"edits": []}, **GREEDY},
    }


def test_an_agents_turns_are_found_in_the_cache_although_the_billing_block_changes(
    client: anthropic.Anthropic, model: str
) -> None:
    turns: list[Any] = []
    prompts, cached = [], []
    for cch in ("5aa3d", "00c11", "f3f3f"):
        with client.messages.stream(**claude_code(model, cch, *turns)) as stream:
            message = stream.get_final_message()
        cached.append(message.usage.cache_read_input_tokens or 0)
        prompts.append(message.usage.input_tokens + cached[-1])
        turns += [
            {"role": "assistant", "content": text_of(message) or "Done."},
            {"role": "user", "content": [{"type": "text", "text": "And now the next one."}]},
        ]
    assert prompts[0] < prompts[1] < prompts[2]
    # All but the part of a page at the end, and what a template writes otherwise once a turn is not the last.
    assert cached[1] > prompts[0] - 32 and cached[2] > prompts[1] - 32
