"""Items of a Responses conversation as messages, and what their fields may be."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from homeserve.errors import InvalidField
from homeserve.server.bodies import BodyDecoder
from homeserve.server.chat_call import ChatCall, ChoiceOfTool, ConstraintKind, Tool
from homeserve.server.responses_call import responses_call, skipped
from homeserve.server.responses_fields import ResponsesRequest

ADD = {"type": "function", "name": "add", "description": "Sums.", "parameters": {"type": "object"}, "strict": True}
SUB = {"type": "function", "name": "sub"}
SEARCH = {"type": "web_search", "filters": {"allowed_domains": ["a"]}}
IMAGE = {"type": "input_image", "image_url": "data:,"}


def decoded(**fields: Any) -> ResponsesRequest:
    return BodyDecoder().decode(msgspec.json.encode(fields), ResponsesRequest)


def call_of(items: Any = "q", **fields: Any) -> ChatCall:
    return responses_call(decoded(input=items, **fields))


def messages(items: Any, **fields: Any) -> list[dict[str, Any]]:
    """What is said, without what is not; parts of a content as a list of texts."""
    made = []
    for message in msgspec.to_builtins(call_of(items, **fields).messages):
        said = {name: value for name, value in message.items() if value is not None}
        if isinstance(said.get("content"), list):
            said["content"] = [part["text"] for part in said["content"]]
        made.append(said)
    return made


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(said: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]}


def called(call_id: str, name: str = "add", arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def output(call_id: str, said: Any = "3") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": said}


def reasoning(**more: Any) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], **more}


def tool_call(call_id: str, name: str = "add", arguments: Any = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# ---------------------------------------------------------------------------------------------------------------- items


def test_a_text_is_what_the_user_says() -> None:
    assert messages("q") == [user("q")]
    assert messages("q", instructions="Be brief.") == [{"role": "system", "content": "Be brief."}, user("q")]


@pytest.mark.parametrize("items", ["", [], [{"type": "web_search_call", "id": "ws_1", "status": "completed"}]])
def test_a_probe_without_input_is_a_user_who_says_nothing(items: Any) -> None:
    assert messages(items, max_output_tokens=1) == [user("")]
    assert messages(items, instructions="Hi.") == [{"role": "system", "content": "Hi."}, user("")]


def test_items_without_a_type_are_messages() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages([user("q"), user(parts)]) == [user("q"), user(["a", "b"])]


def test_what_an_assistant_thinks_says_and_calls_is_one_turn() -> None:
    thought = reasoning(content=[{"type": "reasoning_text", "text": "Hm."}], encrypted_content="xx")
    items = [user("q"), thought, answer("Let me."), called("c1"), called("c2", "sub"), output("c1"), output("c2", "4")]
    assert messages([*items, answer("7")]) == [
        user("q"),
        {
            "role": "assistant",
            "content": ["Let me."],
            "reasoning_content": "Hm.",
            "tool_calls": [tool_call("c1"), tool_call("c2", "sub")],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "tool", "content": "4", "tool_call_id": "c2"},
        {"role": "assistant", "content": ["7"]},
    ]


def test_two_answers_in_a_row_stay_two() -> None:
    assert messages([user("q"), answer("a"), answer("b")]) == [
        user("q"),
        {"role": "assistant", "content": ["a"]},
        {"role": "assistant", "content": ["b"]},
    ]


def test_a_text_behind_a_call_is_of_the_same_turn() -> None:
    made = messages([user("q"), answer("a"), called("c1"), {"role": "assistant", "content": "b"}, output("c1")])
    assert made[1] == {"role": "assistant", "content": ["a", "b"], "tool_calls": [tool_call("c1")]}
    assert made[2]["role"] == "tool" and len(made) == 3


def test_thoughts_are_read_from_content_or_else_from_the_summary() -> None:
    summary = [{"type": "summary_text", "text": "s"}]
    both = reasoning(content=[{"type": "reasoning_text", "text": "c"}], summary=summary)
    assert messages([user("q"), both, answer("a")])[1]["reasoning_content"] == "c"
    assert messages([user("q"), reasoning(summary=summary, content=None), answer("a")])[1]["reasoning_content"] == "s"
    encrypted = messages([user("q"), reasoning(encrypted_content="gAAAA"), answer("a")])
    assert encrypted == [user("q"), {"role": "assistant", "content": ["a"]}]


def test_outputs_are_texts_or_parts() -> None:
    items = [called("c1"), output("c1", [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}])]
    assert messages(items)[1] == {"role": "tool", "content": ["a", "b"], "tool_call_id": "c1"}


def test_calls_of_free_text_are_read_as_calls() -> None:
    items = [
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
    ]
    assert messages(items) == [
        {"role": "assistant", "tool_calls": [tool_call("c1", "patch", {"input": "*** Begin"})]},
        {"role": "tool", "content": "ok", "tool_call_id": "c1"},
    ]


def test_instructions_and_the_system_messages_at_the_beginning_are_one() -> None:
    developer = {"role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]}
    made = messages([developer, user("q"), developer], instructions="Be brief.")
    assert made[0] == {"role": "system", "content": "Be brief.\n\nSandboxed."}
    assert made[1:] == [user("q"), {"role": "developer", "content": ["Sandboxed."]}]
    assert messages([developer, developer, user("q")])[0] == {"role": "system", "content": "Sandboxed.\n\nSandboxed."}
    assert messages([developer]) == [{"role": "system", "content": "Sandboxed."}]


def test_long_conversations_are_read_in_linear_time() -> None:
    items = [{"role": "system", "content": "x" * 1000}] * 2000
    items += [called(f"c{i}") for i in range(1000)] + [
        reasoning(summary=[{"type": "summary_text", "text": "x"}])
    ] * 1000
    made = call_of(items, instructions="y").messages
    assert len(made) == 2 and len(made[1].tool_calls or []) == 1000


# ---------------------------------------------------------------------------------------------------------------- tools


def test_functions_are_offered_and_other_tools_skipped() -> None:
    others = [{"type": kind, "name": "x"} for kind in ("namespace", "custom", "local_shell", "mcp", "image_generation")]
    fields = decoded(input="q", tools=[SEARCH, ADD, *others, SUB])
    tools = responses_call(fields).tools
    assert tools.offered == (Tool("add", "Sums.", {"type": "object"}, True), Tool("sub"))
    assert tools.choice is ChoiceOfTool.AUTO and tools.parallel
    assert ("tool of type", "web_search") in skipped(fields) and ("tool of type", "mcp") in skipped(fields)
    assert ("tool of type", "function") not in skipped(fields)


def test_choices_of_tools() -> None:
    def choice(wanted: Any, **more: Any) -> tuple[ChoiceOfTool, str, tuple[str, ...]]:
        tools = call_of(tools=[ADD, SUB, SEARCH], tool_choice=wanted, **more).tools
        return tools.choice, tools.name, tuple(tool.name for tool in tools.offered)

    both = ("add", "sub")
    assert choice("auto") == (ChoiceOfTool.AUTO, "", both)
    assert choice("none") == (ChoiceOfTool.NONE, "", both)
    assert choice("required") == (ChoiceOfTool.REQUIRED, "", both)
    assert choice({"type": "function", "name": "sub"}) == (ChoiceOfTool.ONE, "sub", both)
    allowed = {"type": "allowed_tools", "tools": [{"type": "function", "name": "sub"}, {"type": "web_search"}]}
    assert choice(allowed) == (ChoiceOfTool.AUTO, "", ("sub",))
    assert choice({**allowed, "mode": "required"}) == (ChoiceOfTool.REQUIRED, "", ("sub",))
    assert not call_of(tools=[ADD], parallel_tool_calls=False).tools.parallel


def test_formats_of_text_are_constraints() -> None:
    def constraint(wanted: Any) -> Any:
        return call_of(text={"format": wanted}).constraint

    assert constraint(None) is None and constraint({"type": "text"}) is None
    assert constraint({"type": "json_object"}).kind is ConstraintKind.JSON_OBJECT
    made = constraint({"type": "json_schema", "name": "n", "schema": {"type": "string"}})
    assert (made.kind, made.value) == (ConstraintKind.JSON_SCHEMA, {"type": "string"})
    assert made.where == "text.format.schema"


def test_efforts() -> None:
    assert call_of(reasoning={"effort": "high"}).reasoning.effort == "high"
    assert call_of(reasoning_budget=9).reasoning.budget == 9
    none = call_of(reasoning={"effort": "none"}).reasoning
    assert none.enabled is False and none.effort is None
    assert call_of().reasoning.enabled is None


def test_logprobs_are_asked_for_by_include_or_a_number() -> None:
    include = ["reasoning.encrypted_content", "message.output_text.logprobs"]
    assert call_of(include=include).logprobs == 0
    assert call_of(include=include, top_logprobs=3).logprobs == 3
    assert call_of(top_logprobs=2).logprobs == 2
    assert call_of(top_logprobs=0).logprobs == -1
    assert call_of(include=["reasoning.encrypted_content"]).logprobs == -1


# --------------------------------------------------------------------------------------------------------- wrong fields

DEEP: Any = {}
for _ in range(80):
    DEEP = {"a": DEEP}

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": 3}, "input"),
    ({"input": ["text"]}, "input[0]"),
    ({"input": [user("q"), {}]}, "input[1].type"),
    ({"input": [{"type": 3}]}, "input[0].type"),
    ({"input": [{"type": "what"}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ({"input": [{"type": "mcp_call", "output": "x"}]}, "input[0].type"),
    ({"input": [{"type": "computer_call_output", "output": {"type": "computer_screenshot"}}]}, "input[0].type"),
    ({"input": [{"type": "message", "content": "q"}]}, "input[0].role"),
    ({"input": [{"role": "robot", "content": "q"}]}, "input[0].role"),
    ({"input": [{"role": 1, "content": "q"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [user(3)]}, "input[0].content"),
    ({"input": [user("q"), user("q"), user([{"type": "input_text", "text": 3}])]}, "input[2].content[0].text"),
    ({"input": [user([{"type": "input_text"}])]}, "input[0].content[0].text"),
    ({"input": [user([{"text": "q"}])]}, "input[0].content[0].type"),
    ({"input": [user([{"type": "input_text", "text": "q"}, IMAGE])]}, "input[0].content[1].type"),
    ({"input": [user([{"type": "refusal"}])]}, "input[0].content[0].refusal"),
    ({"input": [{"type": "function_call", "name": "add", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "add"}]}, "input[0].arguments"),
    ({"input": [{**called("c"), "arguments": 3}]}, "input[0].arguments"),
    ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "x", "input": 1}]}, "input[0].input"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"input": [output("c", {"a": 1})]}, "input[0].output"),
    ({"input": [output("c", [IMAGE])]}, "input[0].output[0].type"),
    ({"input": [reasoning(summary=[{"type": "summary_text"}])]}, "input[0].summary[0].text"),
    ({"input": [reasoning(content=[{"type": "x", "text": "a"}])]}, "input[0].content[0].type"),
    ({"input": [user("q")] * 4097}, "input"),
    ({"instructions": ["a"]}, "instructions"),
    ({"model": 1}, "model"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "9"}, "max_output_tokens"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"include": "message.output_text.logprobs"}, "include"),
    ({"include": [1]}, "include[0]"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": 1}, "stream_options"),
    ({"stream_options": {"include_obfuscation": 1}}, "stream_options.include_obfuscation"),
    ({"store": "no"}, "store"),
    ({"truncation": "always"}, "truncation"),
    ({"user": 1}, "user"),
    ({"service_tier": 1}, "service_tier"),
    ({"metadata": {"a": 1}}, "metadata[...]"),
    ({"metadata": {"a": "x" * 513}}, "metadata[...]"),
    ({"metadata": {"k" * 65: "x"}}, "metadata"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"prompt_cache_key": 1}, "prompt_cache_key"),
    ({"reasoning": "high"}, "reasoning"),
    ({"reasoning": {"effort": "most"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"text": "json"}, "text"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"text": {"format": {}}}, "text.format.type"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": "s"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": DEEP}}}, "text.format.schema"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"name": "add"}]}, "tools[0].type"),
    ({"tools": [ADD, {"type": "function"}]}, "tools[1].name"),
    ({"tools": [{"type": "function", "function": {"name": "add"}}]}, "tools[0].name"),
    ({"tools": [{**ADD, "parameters": []}]}, "tools[0].parameters"),
    ({"tools": [{**ADD, "parameters": DEEP}]}, "tools[0].parameters"),
    ({"tools": [ADD] * 129}, "tools"),
    ({"tools": [ADD, SUB, ADD]}, "tools[2].name"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tool_choice": ""}, "tool_choice"),
    ({"reasoning_budget": 3, "thinking_budget": 4}, "thinking_budget"),
    ({"reasoning_budget": -2}, "reasoning_budget"),
    ({"tool_choice": 1}, "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required", "tools": [SEARCH]}, "tool_choice"),
    ({"tool_choice": {}}, "tool_choice.type"),
    ({"tool_choice": {"type": "web_search"}, "tools": [SEARCH, ADD]}, "tool_choice.type"),
    ({"tool_choice": {"type": "custom", "name": "x"}, "tools": [ADD]}, "tool_choice.type"),
    ({"tool_choice": {"type": "function"}, "tools": [ADD]}, "tool_choice.name"),
    ({"tool_choice": {"type": "function", "name": "sub"}, "tools": [ADD]}, "tool_choice.name"),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": [ADD]}, "tool_choice.tools"),
    (
        {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "x"}]}, "tools": [ADD]},
        "tool_choice.tools[0].name",
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp"}]}, "tools": [ADD]},
        "tool_choice.tools",
    ),
    ({"chat_template_kwargs": DEEP}, "chat_template_kwargs"),
    ({"n": 2}, "n"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": {"id": "conv_1"}}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"moderation": {"model": "m"}}, "moderation"),
    ({"background": True}, "background"),
]


@pytest.mark.parametrize(("fields", "name"), WRONG, ids=[f"{i}-{name}" for i, (_, name) in enumerate(WRONG)])
def test_a_wrong_field_is_named_in_the_words_of_responses(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidField) as wrong:
        responses_call(decoded(**{"input": "q", **fields}))
    assert wrong.value.field == name and wrong.value.message.startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("fields", "instead"),
    [
        ({"previous_response_id": "resp_1"}, "whole conversation as input"),
        ({"conversation": "conv_1"}, "whole conversation as input"),
        ({"prompt": {"id": "p"}}, "instructions and input"),
        ({"background": True}, "stream: true"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "send the item itself"),
    ],
)
def test_what_would_need_a_memory_says_what_to_send_instead(fields: dict[str, Any], instead: str) -> None:
    with pytest.raises(InvalidField, match=instead):
        responses_call(decoded(**{"input": "q", **fields}))


def test_what_has_no_effect_is_taken() -> None:
    call_of(
        store=True,
        truncation="auto",
        service_tier="priority",
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        background=False,
        previous_response_id=None,
        max_tool_calls=3,
        text={"verbosity": "low"},
        stream_options={"include_obfuscation": False},
        n=1,
        context_management=[{"type": "compaction"}],
    )
