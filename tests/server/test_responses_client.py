"""`/v1/responses` of a real server of the default model, by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pydantic
import pytest
from responses_check import check_response, check_stream

FRANCE = "What is the capital of France? Answer in one sentence."
STORY = "Tell me a story about a lighthouse keeper and a storm."


class City(pydantic.BaseModel):
    """Closed, as OpenAI wants strict schemas."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=12)
    large: bool


OBJECT: Any = {"type": "json_object"}
ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "integer", "maximum": 99}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=100) as made:
        yield made


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    (model,) = client.models.list().data
    return model.id


@pytest.fixture(autouse=True)
def idle_afterwards(server: Any, wait_until: Callable[..., Any]) -> Iterator[None]:
    """After each test nothing runs, and every page is free or cached."""
    yield
    wait_until("an idle server", lambda: requests_of(server)["running"] == requests_of(server)["waiting"] == 0)
    wait_until("an idle census", lambda: server.get("/v1/homeserve/census")[1]["idle"])
    assert server.get("/v1/homeserve/census")[1]["ok"]


def requests_of(server: Any) -> Any:
    return server.get("/v1/homeserve/status")[1]["requests"]


def events_of(client: openai.OpenAI, **asked: Any) -> list[Any]:
    """What the server sent, as it was sent."""
    with client.responses.with_streaming_response.create(stream=True, **asked) as raw:
        lines = list(raw.iter_lines())
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    datas = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names == [data["type"] for data in datas]
    return datas


def test_a_response_knows_the_capital_of_france(client: openai.OpenAI, model: str) -> None:
    raw = client.responses.with_raw_response.create(model=model, input=FRANCE, temperature=0)
    check_response(json.loads(raw.text))
    response = raw.parse()
    assert "Paris" in response.output_text and response.status == "completed"
    assert response.usage is not None and response.model_extra is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.model_extra["homeserve"]["ttft_ms"] > 0


def test_a_stream_says_what_a_body_says(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "input": STORY, "temperature": 0, "max_output_tokens": 40}
    body = client.responses.create(**asked)
    events = events_of(client, **asked)
    final = check_stream(events)
    assert body.status == final["status"] == "incomplete" and events[-1]["type"] == "response.incomplete"
    assert final["output"][0]["content"][0]["text"] == body.output_text
    assert len([event for event in events if event["type"] == "response.output_text.delta"]) > 20
    with client.responses.stream(**asked) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
    assert snapshots[-1] == body.output_text


@pytest.mark.parametrize("seed", [3, 8])
def test_the_text_is_the_one_of_a_chat_with_the_same_messages_and_seed(
    client: openai.OpenAI, model: str, seed: int
) -> None:
    turns: list[Any] = [
        {"role": "user", "content": FRANCE},
        {"role": "assistant", "content": "Paris is the capital of France."},
        {"role": "user", "content": STORY},
    ]
    drawn: dict[str, Any] = {"model": model, "temperature": 1, "extra_body": {"seed": seed}}
    chat = client.chat.completions.create(
        messages=[{"role": "system", "content": "You are a poet."}, *turns], max_tokens=24, **drawn
    )
    items = [
        turns[0],
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Paris is the capital of France.", "annotations": []}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": STORY}]},
    ]
    asked: dict[str, Any] = {"instructions": "You are a poet.", "input": items, "max_output_tokens": 24, **drawn}
    response = client.responses.create(**asked)
    assert response.output_text == chat.choices[0].message.content
    assert response.usage is not None and chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    final = check_stream(events_of(client, **asked))
    assert final["output"][0]["content"][0]["text"] == response.output_text
    counted = client.responses.input_tokens.count(model=model, instructions="You are a poet.", input=items)
    assert counted.input_tokens == response.usage.input_tokens


def test_what_was_said_goes_back_as_it_came(client: openai.OpenAI, model: str) -> None:
    first = client.responses.create(model=model, input=FRANCE, temperature=0)
    history: Any = [{"role": "user", "content": FRANCE}, *first.output, {"role": "user", "content": "And of Spain?"}]
    second = client.responses.create(model=model, input=history, temperature=0, max_output_tokens=24)
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_logprobs_spell_the_text(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "input": FRANCE, "temperature": 0, "max_output_tokens": 8}
    asked |= {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    (item,) = check_stream(events_of(client, **asked))["output"]
    (content,) = item["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content["logprobs"]).decode() == content["text"]
    assert all(len(entry["top_logprobs"]) == 3 and entry["logprob"] <= 0 for entry in content["logprobs"])


def test_structured_text_is_parsed_by_the_client(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "input": "Name a city.", "max_output_tokens": 60, "text_format": City}
    response = client.responses.parse(**asked, temperature=1.5, extra_body={"seed": 5})
    assert isinstance(response.output_parsed, City) and response.status == "completed"
    with client.responses.stream(**asked, temperature=1.5, extra_body={"seed": 5}) as stream:
        assert stream.get_final_response().output_parsed == response.output_parsed
    plain = client.responses.create(model=model, input=FRANCE, temperature=0, text={"format": OBJECT})
    assert plain.status == "completed" and isinstance(json.loads(plain.output_text), dict)
    cut = client.responses.create(model=model, input=FRANCE, text={"format": OBJECT}, max_output_tokens=1)
    assert cut.status == "incomplete" and cut.output_text.startswith("{")
    with pytest.raises(openai.BadRequestError) as wrong:
        schema = {"type": "json_schema", "name": "n", "schema": {"type": "no such type"}}
        client.responses.create(model=model, input="q", extra_body={"text": {"format": schema}})
    assert wrong.value.param == "text.format.schema"


def test_a_call_that_must_be_made_is_an_item(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "input": "What is 2 plus 3?", "tools": [ADD], "temperature": 0}
    final = check_stream(events_of(client, **asked, tool_choice="required", parallel_tool_calls=False))
    (call,) = [item for item in final["output"] if item["type"] == "function_call"]
    assert call["name"] == "add" and set(json.loads(call["arguments"])) == {"a", "b"}
    history: Any = [
        {"role": "user", "content": "What is 2 plus 3?"},
        *final["output"],
        {"type": "function_call_output", "call_id": call["call_id"], "output": "5"},
    ]
    after = client.responses.create(model=model, input=history, tools=[ADD], tool_choice="none", max_output_tokens=20)
    assert [item.type for item in after.output] == ["message"]


def test_closing_a_stream_frees_its_place(
    client: openai.OpenAI, model: str, server: Any, wait_until: Callable[..., Any]
) -> None:
    before = requests_of(server)
    stream = client.responses.create(
        model=model, input=STORY, stream=True, max_output_tokens=900, extra_body={"ignore_eos": True}
    )
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    assert requests_of(server)["running"] == 1
    stream.close()
    wait_until("the place to be free", lambda: requests_of(server)["running"] == 0)
    assert requests_of(server)["aborted"] == before["aborted"] + 1


def test_an_agents_probe_and_its_tools_are_taken(client: openai.OpenAI, model: str) -> None:
    tools: Any = [{"type": "web_search"}, {"type": "custom", "name": "patch"}, {"type": "namespace", "name": "n"}]
    response = client.responses.create(model=model, input="", max_output_tokens=1, extra_body={"tools": tools})
    assert response.usage is not None and response.usage.output_tokens == 1 and response.tools == []


def test_errors_are_the_clients_own(client: openai.OpenAI, model: str) -> None:
    wrong: dict[str, Any] = {
        "previous_response_id": {"previous_response_id": "resp_1"},
        "temperature": {"temperature": -1},
        "tool_choice.type": {"tool_choice": {"type": "web_search_preview"}, "tools": [{"type": "web_search_preview"}]},
        "input[0].content[0].type": {
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": ""}]}]
        },
    }
    for param, fields in wrong.items():
        with pytest.raises(openai.BadRequestError) as error:
            client.responses.create(**{"model": model, "input": FRANCE, **fields})
        assert (error.value.param, error.value.code) == (param, "invalid_field")
    with pytest.raises(openai.BadRequestError) as long:
        client.responses.create(model=model, input="word " * 2000)
    assert long.value.code == "context_overflow" and long.value.param == "input"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-9", input=FRANCE)
