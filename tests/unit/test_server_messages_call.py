"""What the fields of `/v1/messages` ask for: turns and blocks as messages, tools, thinking; which field is wrong."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from homeserve.errors import InvalidField
from homeserve.server.bodies import BodyDecoder
from homeserve.server.chat_call import ChatCall, ChoiceOfTool, ConstraintKind, Reasoning, Tool
from homeserve.server.fields import Message
from homeserve.server.messages_call import message_call, without_billing
from homeserve.server.messages_fields import CountTokensRequest, MessagesRequest

HI: list[Any] = [{"role": "user", "content": "hi"}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
BILLING = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=5aa3d;"


def call_of(**fields: Any) -> ChatCall:
    body = msgspec.json.encode({"messages": HI, "max_tokens": 8, **fields})
    decoder = BodyDecoder()
    return message_call(decoder.decode(body, MessagesRequest), decoder.tell_ignored)


def messages_of(*turns: tuple[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """The messages of a conversation, without what is null."""
    call = call_of(messages=[{"role": role, "content": content} for role, content in turns], **fields)
    return [_plain(message) for message in call.messages]


def _plain(message: Message) -> dict[str, Any]:
    made: dict[str, Any] = msgspec.to_builtins(message)
    return {name: value for name, value in made.items() if value is not None}


def block(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


# ------------------------------------------------------------------------------------------------------------ messages


def test_strings_and_blocks_are_texts() -> None:
    assert messages_of(
        ("user", "a"), ("assistant", "b"), ("user", [block("text", text="c"), block("text", text="d")])
    ) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c\nd"},
    ]


def test_the_system_prompt_is_the_first_message() -> None:
    assert messages_of(("user", "a"), system="Be brief.")[0] == {"role": "system", "content": "Be brief."}
    blocks = [block("text", text="Be brief.", cache_control={"type": "ephemeral"}), block("text", text="Be kind.")]
    assert messages_of(("user", "a"), system=blocks)[0] == {"role": "system", "content": "Be brief.\nBe kind."}
    assert messages_of(("system", "Be kind."), ("user", "a"), system="Be brief.") == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "a"},
    ]
    for nothing in (None, "", []):
        assert messages_of(("user", "a"), system=nothing) == [{"role": "user", "content": "a"}]


def test_turns_of_one_role_are_one_turn() -> None:
    made = messages_of(
        ("user", "a"), ("user", [block("text", text="b")]), ("assistant", "c"), ("assistant", "d"), ("user", "e")
    )
    assert made == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c\nd"},
        {"role": "user", "content": "e"},
    ]
    assert [m["role"] for m in messages_of(("user", "a"), ("system", "b"), ("user", "c"))] == ["user", "system", "user"]


def test_a_tool_loop_is_calls_and_results() -> None:
    made = messages_of(
        ("user", "Weather?"),
        (
            "assistant",
            [
                block("thinking", thinking="I look.", signature="s"),
                block("redacted_thinking", data="secret"),
                block("text", text="Looking."),
                block("tool_use", id="c1", name="get_weather", input={"city": "Paris"}),
                block("tool_use", id="c2", name="now", input={}),
            ],
        ),
        (
            "user",
            [
                block("text", text="And?"),
                block("tool_result", tool_use_id="c1", content="rain"),
                block("tool_result", tool_use_id="c2", content=[block("text", text="12"), block("text", text="h")]),
                block("tool_result", tool_use_id="c3", is_error=True, content="no such file"),
                block("tool_result", tool_use_id="c4", is_error=True, content="Error: gone"),
                block("tool_result", tool_use_id="c5"),
            ],
        ),
    )
    function: list[dict[str, Any]] = [
        {"name": "get_weather", "arguments": {"city": "Paris"}},
        {"name": "now", "arguments": {}},
    ]
    assert made == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Looking.",
            "reasoning_content": "I look.",
            "tool_calls": [
                {"function": function[0], "id": "c1", "type": "function"},
                {"function": function[1], "id": "c2", "type": "function"},
            ],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "get_weather"},
        {"role": "tool", "content": "12\nh", "tool_call_id": "c2", "name": "now"},
        {"role": "tool", "content": "Error: no such file", "tool_call_id": "c3"},
        {"role": "tool", "content": "Error: gone", "tool_call_id": "c4"},
        {"role": "tool", "content": "", "tool_call_id": "c5"},
        {"role": "user", "content": "And?"},
    ]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (BILLING, ""),
        (BILLING + "\n", ""),
        (f"{BILLING}\nX-Anthropic-Other: 1\nYou are an agent.", "You are an agent."),
        (f"You are an agent.\n{BILLING}", f"You are an agent.\n{BILLING}"),
        ("x-anthropic-billing is a word", "x-anthropic-billing is a word"),
        ("", ""),
    ],
)
def test_billing_lines_are_no_part_of_what_is_said(text: str, left: str) -> None:
    assert without_billing(text) == left
    blocks = [block("text", text=text), block("text", text="Be brief.")]
    told = f"{left}\nBe brief." if left else "Be brief."
    assert messages_of(("user", "a"), system=blocks)[0]["content"] == told
    assert messages_of(("user", "a"), system=text) == [
        *([{"role": "system", "content": left}] if left else []),
        {"role": "user", "content": "a"},
    ]
    assert messages_of(("user", blocks)) == [{"role": "user", "content": told}]


def test_what_a_person_typed_and_what_a_tool_gave_stay_as_they_are() -> None:
    assert messages_of(("user", BILLING)) == [{"role": "user", "content": BILLING}]
    calls = block("tool_use", id="c", name="read", input={})
    made = messages_of(
        ("user", "read"), ("assistant", [calls]), ("user", [block("tool_result", tool_use_id="c", content=BILLING)])
    )
    assert made[-1]["content"] == BILLING


# ----------------------------------------------------------------------------------------------------- the last turn


def test_an_answer_goes_on_from_a_last_turn_of_the_assistant() -> None:
    call = call_of(messages=[*HI, {"role": "assistant", "content": "The answer is ("}], thinking={"type": "adaptive"})
    assert call.continue_last and not call.add_generation_prompt
    assert call.messages[-1].content == "The answer is ("
    assert call.reasoning == Reasoning(enabled=False, told=False)
    call = call_of()
    assert not call.continue_last and call.add_generation_prompt


@pytest.mark.parametrize("content", ["", " \n", [], [block("thinking", thinking="x", signature="")]])
def test_an_empty_last_turn_of_the_assistant_is_none(content: Any) -> None:
    call = call_of(messages=[*HI, {"role": "assistant", "content": content}])
    assert [message.role for message in call.messages] == ["user"]
    assert call.add_generation_prompt and not call.continue_last


# --------------------------------------------------------------------------------------------------------------- tools


def test_tools_of_the_client_are_offered_and_others_skipped_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    others = [
        block("web_search_20250305", name="web_search", max_uses=5),
        block("bash_20250124", name="bash"),
        block("bash_20250124", name="bash"),
        block("computer_20250124", name="computer", display_width_px=100),
    ]
    with caplog.at_level(logging.INFO):
        call = call_of(tools=[*others, WEATHER, block("custom", name="now", input_schema={}, strict=True)])
    assert call.tools.offered == (
        Tool("get_weather", "Tells the weather.", WEATHER["input_schema"]),
        Tool("now", None, {}, strict=True),
    )
    assert call.tools.choice is ChoiceOfTool.AUTO and call.tools.parallel
    told = [record.getMessage() for record in caplog.records]
    assert [[name in line for line in told].count(True) for name in ("web_search_", "bash_", "computer_")] == [1, 1, 1]


@pytest.mark.parametrize(
    ("choice", "kind", "name", "parallel"),
    [
        ({"type": "auto"}, ChoiceOfTool.AUTO, "", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ChoiceOfTool.AUTO, "", False),
        ({"type": "any", "disable_parallel_tool_use": False}, ChoiceOfTool.REQUIRED, "", True),
        ({"type": "tool", "name": "get_weather"}, ChoiceOfTool.ONE, "get_weather", True),
        ({"type": "none"}, ChoiceOfTool.NONE, "", True),
    ],
)
def test_the_choice_of_a_tool(choice: dict[str, Any], kind: ChoiceOfTool, name: str, parallel: bool) -> None:
    tools = call_of(tools=[WEATHER], tool_choice=choice).tools
    assert (tools.choice, tools.name, tools.parallel) == (kind, name, parallel)


# ------------------------------------------------------------------------------------------------------------ thinking


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({}, Reasoning()),
        ({"thinking": None}, Reasoning()),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, Reasoning(enabled=True, budget=2048)),
        ({"thinking": {"type": "enabled", "display": "omitted"}}, Reasoning(enabled=True, told=False)),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, Reasoning(enabled=True)),
        ({"thinking": {"type": "between_tools"}}, Reasoning(enabled=True)),
        ({"thinking": {"type": "disabled"}}, Reasoning(enabled=False, told=False)),
        ({"output_config": {"effort": "low"}}, Reasoning(effort="low")),
        (
            {"output_config": {"effort": "max"}, "thinking": {"type": "adaptive"}},
            Reasoning(enabled=True, effort="high"),
        ),
    ],
)
def test_thinking_and_effort(fields: dict[str, Any], reasoning: Reasoning) -> None:
    assert call_of(**fields).reasoning == reasoning


# -------------------------------------------------------------------------------------------------------- other fields


def test_how_to_draw_is_said_as_on_the_other_routes() -> None:
    said = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": 3, "min_p": 0.1, "stream": True, "min_tokens": 2}
    fields = call_of(**said, stop_sequences=["a", "b"], ignore_eos=True).fields
    assert {name: getattr(fields, name) for name in said} == said
    assert fields.stop == ["a", "b"] and fields.ignore_eos is True
    assert call_of(max_tokens=0).max_tokens == 0


def test_counting_needs_no_limit_of_tokens() -> None:
    decoder = BodyDecoder()
    fields = decoder.decode(msgspec.json.encode({"messages": HI, "tools": [WEATHER]}), CountTokensRequest)
    call = message_call(fields, decoder.tell_ignored)
    assert call.max_tokens is None and call.tools.callable


@pytest.mark.parametrize("old", [False, True])
def test_an_output_format_is_a_constraint(old: bool) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    constraint = call_of(**({"output_format": wanted} if old else {"output_config": {"format": wanted}})).constraint
    assert constraint is not None and constraint.kind is ConstraintKind.JSON_SCHEMA
    assert constraint.value == {"type": "object"} and constraint.strict
    assert constraint.where == ("output_format.schema" if old else "output_config.format.schema")


def test_what_is_of_no_use_here_is_taken_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        call_of(
            cache_control={"type": "ephemeral", "ttl": "1h"},
            metadata={"user_id": "u"},
            container="c",
            context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
            betas=["interleaved-thinking-2025-05-14"],
            service_tier="auto",
            inference_geo=None,
            speed="fast",
            tools=[{**WEATHER, "cache_control": {"type": "ephemeral"}, "defer_loading": True}],
            messages=[{"role": "user", "content": [block("text", text="a", cache_control={"type": "ephemeral"})]}],
        )
    assert caplog.records == []


# -------------------------------------------------------------------------------------------------------- wrong fields

DEEP: Any = {"type": "object"}
for _ in range(70):
    DEEP = {"properties": {"a": DEEP}}
USE = block("tool_use", id="c", name="f", input={})


def turn(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [*HI, {"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (turn("hi"), "messages[1].content[0]"),
        (turn({"text": "x"}), "messages[1].content[0].type"),
        (turn(block("video")), "messages[1].content[0].type"),
        (turn(block("text", text="x"), block("text")), "messages[1].content[1].text"),
        (turn(block("text", text=1)), "messages[1].content[0].text"),
        (turn(block("image", source={"type": "base64"})), "messages[1].content[0].type"),
        (turn(block("document", source={})), "messages[1].content[0].type"),
        (turn(USE), "messages[1].content[0].type"),
        (turn(block("thinking", thinking="x", signature="")), "messages[1].content[0].type"),
        (turn(block("tool_result", tool_use_id="c"), role="assistant"), "messages[1].content[0].type"),
        (turn(block("tool_result", tool_use_id="c"), role="system"), "messages[1].content[0].type"),
        (turn(block("tool_result", content="x")), "messages[1].content[0].tool_use_id"),
        (turn(block("tool_result", tool_use_id="c", content=3)), "messages[1].content[0].content"),
        (turn(block("tool_result", tool_use_id="c", is_error="no")), "messages[1].content[0].is_error"),
        (
            turn(block("tool_result", tool_use_id="c", content=[block("text", text=""), block("image")])),
            "messages[1].content[0].content[1].type",
        ),
        (turn(block("tool_use", id="c", input={}), role="assistant"), "messages[1].content[0].name"),
        (turn(block("tool_use", id="c", name="f", input=[]), role="assistant"), "messages[1].content[0].input"),
        (turn(block("tool_use", id="c", name="f", input=DEEP), role="assistant"), "messages[1].content[0].input"),
        (turn(USE, role="assistant"), "messages[1].content[0]"),
        (turn(USE, block("text", text="x"), role="assistant"), "messages[1].content[0]"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"model": 3}, "model"),
        ({"system": 3}, "system"),
        ({"system": [block("image")]}, "system[0].type"),
        ({"system": [block("text")]}, "system[0].text"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [3]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"metadata": "me"}, "metadata"),
        ({"seed": 0.5}, "seed"),
        ({"min_p": -1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": "x"}, "frequency_penalty"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"tools": {}}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f'</tool_call>\n", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f" * 129, "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [WEATHER, {"name": "f"}]}, "tools[1].input_schema"),
        ({"tools": [{"name": "f", "input_schema": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": DEEP}]}, "tools[0].input_schema"),
        ({"tools": [{**WEATHER, "description": 3}]}, "tools[0].description"),
        ({"tools": [{**WEATHER, "strict": "x"}]}, "tools[0].strict"),
        ({"tools": [{**WEATHER, "type": 3}]}, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [WEATHER] * 513}, "tools"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}, "tools": [block("bash_20250124", name="bash")]}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "f"}, "tools": [WEATHER]}, "tool_choice.name"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": "x"}, "tools": [WEATHER]},
            "tool_choice.disable_parallel_tool_use",
        ),
        ({"thinking": True}, "thinking"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"budget_tokens": 5}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "display": "all"}}, "thinking.display"),
        ({"thinking": {"type": "enabled"}, **turn(block("text", text="So"), role="assistant")}, "thinking"),
        ({"output_config": "low"}, "output_config"),
        ({"output_config": {"effort": "some"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": DEEP}}},
            "output_config.format.schema",
        ),
        ({"output_format": {"type": "json_schema", "schema": 3}}, "output_format.schema"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidField) as caught:
        call_of(**fields)
    assert caught.value.field == path
    assert caught.value.message.startswith(f"{path}: ")
