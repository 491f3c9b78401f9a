"""Calls of tools with the official client against a real server: of the default model, whose template has no calls, and
of made-up models with a template that has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "get_time": TIME}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": f"{name} of a city", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris for 3 days?"}]
NAMED: Any = {"type": "function", "function": {"name": "get_time"}}


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=100) as made:
        yield made


def ask(client: openai.OpenAI, **more: Any) -> Any:
    fields = {"model": "", "messages": ASKED, "tools": TOOLS, "temperature": 0, "max_tokens": 250, **more}
    return client.chat.completions.create(**fields)


def check_calls(calls: Any) -> list[tuple[str, Any]]:
    """(name, arguments) of each; they fit the schema, and no id is there twice."""
    made = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
    for name, arguments in made:
        jsonschema.validate(arguments, SCHEMAS[name])
    assert len({call.id for call in calls}) == len(made)
    return made


def test_a_required_call_is_made_and_fits(client: openai.OpenAI) -> None:
    choice = ask(client, tool_choice="required").choices[0]
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    calls = check_calls(choice.message.tool_calls)
    assert ("get_weather", {"city": "Paris", "days": 3}) in calls


@pytest.mark.parametrize("seed", range(4))
def test_a_required_call_fits_at_any_temperature(client: openai.OpenAI, seed: int) -> None:
    choice = ask(client, tool_choice="required", temperature=1.5, seed=seed, parallel_tool_calls=False).choices[0]
    assert choice.finish_reason in ("tool_calls", "length")
    if choice.finish_reason == "tool_calls":
        assert len(check_calls(choice.message.tool_calls)) == 1


def test_the_named_tool_is_called_and_no_other(client: openai.OpenAI) -> None:
    choice = ask(client, tool_choice=NAMED).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert [name for name, _ in check_calls(choice.message.tool_calls)] == ["get_time"]


def test_a_stream_has_the_same_call(client: openai.OpenAI) -> None:
    whole = ask(client, tool_choice=NAMED).choices[0].message.tool_calls
    chunks = list(ask(client, tool_choice=NAMED, stream=True))
    deltas = [call for chunk in chunks for c in chunk.choices for call in c.delta.tool_calls or ()]
    assert len(deltas) > 3, "arguments come as they are written"
    assert [delta.function.name for delta in deltas if delta.id] == ["get_time"]
    assert {delta.index for delta in deltas} == {0}
    arguments = "".join(delta.function.arguments for delta in deltas)
    assert arguments == whole[0].function.arguments
    assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == "tool_calls"


def test_the_clients_own_helper_puts_the_stream_together(client: openai.OpenAI, server: Any) -> None:
    (model,) = client.models.list().data
    with client.chat.completions.stream(
        model=model.id, messages=ASKED, tools=TOOLS, tool_choice="required", temperature=0, max_tokens=250
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert [json.loads(event.arguments) for event in done] == [arguments for _, arguments in check_calls(calls)]


def test_two_calls_in_one_answer(client: openai.OpenAI) -> None:
    """Greedy, this model asks twice; with one call at most, once."""
    two = ask(client, tool_choice="required").choices[0]
    assert len(check_calls(two.message.tool_calls)) == 2 and two.finish_reason == "tool_calls"
    one = ask(client, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert check_calls(one.message.tool_calls) == check_calls(two.message.tool_calls)[:1]
    assert one.finish_reason == "tool_calls"
    chunks = list(ask(client, tool_choice="required", stream=True))
    deltas = [call for chunk in chunks for c in chunk.choices for call in c.delta.tool_calls or ()]
    for index, (_, arguments) in enumerate(check_calls(two.message.tool_calls)):
        streamed = "".join(delta.function.arguments for delta in deltas if delta.index == index)
        assert json.loads(streamed) == arguments


def test_a_conversation_goes_on_behind_a_result(client: openai.OpenAI) -> None:
    message = ask(client, tool_choice="required", parallel_tool_calls=False).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "rain", "celsius": 11}'}
    answer = ask(client, messages=[*ASKED, message, result], max_tokens=40)
    assert answer.choices[0].message.content
    assert answer.usage.prompt_tokens_details.cached_tokens > 100, "the conversation so far was found again"


def test_a_cut_call_says_length(client: openai.OpenAI) -> None:
    choice = ask(client, tool_choice=NAMED, max_tokens=18).choices[0]
    assert choice.finish_reason == "length"
    calls = choice.message.tool_calls or []
    assert all(not call.function.arguments.endswith("}") for call in calls)


def test_tools_that_may_be_called_leave_text_free(client: openai.OpenAI) -> None:
    for choice in ("auto", "none"):
        answer = ask(client, tool_choice=choice, max_tokens=20).choices[0]
        assert answer.message.content and answer.message.tool_calls is None and answer.finish_reason == "length"


def test_a_strict_tool_can_be_called_or_not(client: openai.OpenAI) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    plain = ask(client, tools=strict, max_tokens=20).choices[0].message
    assert plain.content
    told = "Answer with a function call and nothing else: <tool_call>"
    answer = ask(client, tools=strict, messages=[{"role": "user", "content": told}], temperature=1.2, max_tokens=80)
    if answer.choices[0].finish_reason == "tool_calls":
        check_calls(answer.choices[0].message.tool_calls)


def test_the_older_form(client: openai.OpenAI) -> None:
    functions = [tool["function"] for tool in TOOLS]
    answer = client.chat.completions.create(
        model="", messages=ASKED, functions=functions, function_call={"name": "get_time"}, temperature=0
    )
    call = answer.choices[0].message.function_call
    assert call is not None and call.name == "get_time"
    jsonschema.validate(json.loads(call.arguments), TIME)
    assert answer.choices[0].finish_reason == "function_call"


def test_wrong_tools_are_the_clients_error(client: openai.OpenAI) -> None:
    never = {"type": "object", "properties": {"a": False}, "required": ["a"]}
    for tools, code in (
        ([{"type": "function", "function": {"name": "f", "parameters": never}}], "schema_unsatisfiable"),
        ([{"type": "function", "function": {"name": "f", "parameters": {"type": 7}}}], "invalid_field"),
    ):
        with pytest.raises(openai.BadRequestError) as wrong:
            ask(client, tools=tools, tool_choice="required")
        assert wrong.value.code == code and str(wrong.value.param).startswith("tools")
        assert "'f', function.parameters: " in wrong.value.message
