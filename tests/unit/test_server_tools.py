"""Tools on `/v1/chat/completions`: the fields, the messages that templates get, and the answers, over real sockets."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from http_world import ByteTokenizer, serving

from homeserve.engine.request import FinishReason, TokenEvent
from homeserve.errors import InvalidField
from homeserve.server.bodies import BodyDecoder
from homeserve.server.bounds import Bounds
from homeserve.server.chat_call import ChatCall, ChoiceOfTool, Tools
from homeserve.server.chat_tools import chat_tools, with_tool_calls
from homeserve.server.choice import Choice, join
from homeserve.server.fields import ChatRequest, FunctionCall, Message, Part, ToolCall
from homeserve.server.prompts import Prompt, chat_prompt
from homeserve.server.readers import reader_maker
from homeserve.server.tool_messages import short_id, tool_messages
from homeserve.text.answer import Part as AnswerPart
from homeserve.text.answer import PartKind, PlainReader
from homeserve.text.detokenizer import Detokenizer
from homeserve.text.dialects import CALLS, GENERIC, NO_DIALECT, THOUGHTS, CallForm, Dialect
from homeserve.text.marks import marks_of
from homeserve.text.reading import DialectReader
from homeserve.text.stream import TextStream

FORMS = {form.name: form for form in (*CALLS, GENERIC)}
THINKS = {form.name: form for form in THOUGHTS}
F: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
G: dict[str, Any] = {"type": "function", "function": {"name": "g", "strict": True, "description": "does g"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
QWEN = Dialect(THINKS["think-tags"], FORMS["tagged-json"])


def fields(**more: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], **more}
    return BodyDecoder().decode(msgspec.json.encode(body), ChatRequest)


# --------------------------------------------------------------------------------------------------------------- fields


def test_tools_are_what_the_fields_say() -> None:
    assert chat_tools(fields()) == Tools()
    made = chat_tools(fields(tools=[F, G], parallel_tool_calls=False))
    assert [(tool.name, tool.strict, tool.description) for tool in made.offered] == [
        ("f", False, None),
        ("g", True, "does g"),
    ]
    assert made.choice is ChoiceOfTool.AUTO and not made.parallel and made.callable
    assert made.offered[1].for_template()["function"]["parameters"] == {"type": "object"}
    for word in ("auto", "none", "required"):
        assert chat_tools(fields(tools=[F], tool_choice=word)).choice.value == word
    one = chat_tools(fields(tools=[F, G], tool_choice={"type": "function", "function": {"name": "g"}}))
    assert (one.choice, one.name) == (ChoiceOfTool.ONE, "g")
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [G]}}
    allowed = chat_tools(fields(tools=[F, G], tool_choice=some))
    assert [tool.name for tool in allowed.offered] == ["g"] and allowed.choice is ChoiceOfTool.REQUIRED
    assert not chat_tools(fields(tools=[F], tool_choice="none")).callable
    assert not chat_tools(fields(tools=[], tool_choice="auto")).callable


def test_functions_are_tools_of_an_older_form() -> None:
    f = F["function"]
    assert chat_tools(fields(functions=[f])) == Tools(chat_tools(fields(tools=[F])).offered, parallel=False)
    assert chat_tools(fields(functions=[f], function_call="none")).choice is ChoiceOfTool.NONE
    one = chat_tools(fields(functions=[f], function_call={"name": "f"}))
    assert (one.choice, one.name, one.parallel) == (ChoiceOfTool.ONE, "f", False)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{}]}, "tools[0].function"),
        ({"tools": [F, {"type": "web_search"}]}, "tools[1].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 129}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]},
            "tools[0].function.description",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tools": [F, F]}, "tools[1].function.name"),
        ({"tools": [F], "functions": [F["function"]]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [F], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
        ({"tools": [F], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        (
            {"tools": [F], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [G]}}},
            "tool_choice.allowed_tools.tools[0]",
        ),
        (
            {"tools": [F], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [F] * 129}}},
            "tool_choice.allowed_tools.tools",
        ),
        ({"functions": [{"name": "f"}, {"name": "f"}]}, "functions[1].name"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name"),
        ({"functions": [{"name": "f"}], "function_call": "f"}, "function_call"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
)
def test_a_wrong_tool_is_named(more: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidField) as wrong:
        chat_tools(fields(**more))
    assert wrong.value.param == param


def test_a_schema_is_as_deep_as_it_may_be() -> None:
    deep: Any = 1
    for _ in range(100):
        deep = {"a": [deep]}
    with pytest.raises(InvalidField) as wrong:
        chat_tools(fields(tools=[{"type": "function", "function": {"name": "f", "parameters": deep}}]))
    assert wrong.value.param == "tools[0].function.parameters"


# ------------------------------------------------------------------------------------------------------------- messages


class Templates:
    """Refuses system messages, if asked to."""

    def __init__(self, *, takes_system: bool = True) -> None:
        self.takes_system = takes_system
        self.tried = 0

    async def render(self, messages: list[dict[str, Any]], **more: Any) -> str:
        self.tried += 1
        if not self.takes_system and messages[0]["role"] == "system":
            raise InvalidField("messages", "System role not supported")
        return "rendered"


def turns(id: str | None = "call_abc") -> list[Message]:
    call = ToolCall(function=FunctionCall(name="f", arguments='{"a": 1}'), id=id, type="function")
    return [
        Message(role="user", content="hi"),
        Message(role="assistant", content="I look.", tool_calls=[call]),
        Message(role="tool", content="3", tool_call_id=id),
        Message(role="user", content="thanks"),
    ]


async def written(
    form: CallForm | None, messages: list[Message], *offered: Any, templates: Any = None
) -> list[Message]:
    host: Any = templates or Templates()
    return await tool_messages(host, form, messages, offered)


def text_of(message: Message) -> str:
    if isinstance(message.content, list):
        return "\n".join(part.text or "" for part in message.content)
    return message.content or ""


async def test_a_template_without_calls_gets_them_as_text() -> None:
    made = await written(None, turns(), F)
    assert [message.role for message in made] == ["system", "user", "assistant", "user"]
    assert json.dumps(F) in text_of(made[0]) and GENERIC.opens in text_of(made[0])
    assert text_of(made[2]) == f"I look.\n{CALL}" and made[2].tool_calls is None
    assert text_of(made[3]) == "<tool_response>\n3\n</tool_response>\nthanks"
    reader = DialectReader(Dialect(None, GENERIC), tools={"f": None})
    parts = reader.push(text_of(made[2]))
    assert [(part.name, part.text) for part in parts if part.kind is PartKind.CALL] == [("f", '{"a": 1}')]


async def test_without_tools_only_what_was_called_is_rewritten() -> None:
    made = await written(None, turns())
    assert [message.role for message in made] == ["user", "assistant", "user"]
    plain = turns()[:1]
    assert await written(None, plain) == plain


async def test_tools_are_told_where_the_template_takes_it() -> None:
    system = [Message(role="system", content=[Part(type="text", text="Be brief.")]), *turns()[:1]]
    made = await written(None, system, F)
    assert len(made) == 2 and text_of(made[0]).startswith("Be brief.\n\nYou can call functions.")
    gemma = Templates(takes_system=False)
    for _ in range(2):
        made = await written(None, turns()[:1], F, templates=gemma)
        assert [message.role for message in made] == ["user"]
        assert text_of(made[0]).startswith("You can call functions.") and text_of(made[0]).endswith("\n\nhi")
    assert gemma.tried == 1, "what the template takes is tried once"


async def test_ids_are_as_the_template_takes_them_and_results_are_named() -> None:
    for form, id in (
        ("bracket-args", short_id("call_abc")),
        ("numbered-json", "functions.f:0"),
        ("channels", "call_abc"),
    ):
        made = await written(FORMS[form], turns(), F)
        calls = made[1].tool_calls
        assert calls is not None and calls[0].id == id == made[2].tool_call_id
        assert made[2].name == "f"
    assert len(short_id("call_abc")) == 9 and short_id("abcdefghi") == "abcdefghi"
    assert (await written(FORMS["bracket-args"], turns(None), F))[1].tool_calls[0].id  # type: ignore[index]


def test_messages_of_the_older_form_get_ids() -> None:
    older = [
        Message(role="user", content="hi"),
        Message(role="assistant", function_call=FunctionCall(name="f", arguments="{}")),
        Message(role="function", name="f", content="3"),
    ]
    made = with_tool_calls(older)
    assert made[1].tool_calls is not None and made[1].tool_calls[0].id == made[2].tool_call_id
    assert made[2].role == "tool" and made[1].function_call is None
    assert with_tool_calls(turns()) == turns()


# --------------------------------------------------------------------------------------------------------------- tokens


class Tokens:
    """Ids 0..255 are bytes; 256 and 257 are control tokens."""

    special_ids = frozenset({256, 257})

    def token_bytes(self, token: int) -> bytes:
        return {256: b"<think>", 257: b"<|other|>"}.get(token, bytes([token % 256]))


def test_a_control_token_that_is_a_mark_stands_in_the_text_and_no_stop_string_sees_it() -> None:
    marks = marks_of(QWEN.marks, [(256, "<think>"), (257, "<|other|>")])
    mark = marks.shown[256]
    assert Detokenizer(Tokens(), shown=marks.shown).push([97, 256, 257, 98]) == f"a{mark}b"
    assert Detokenizer(Tokens()).push([97, 256, 257, 98]) == "ab"
    cut = Detokenizer(Tokens(), shown=marks.shown)
    assert cut.push([0xC3, 256, 97]) == f"\ufffd{mark}a", "what was no whole character stays one that is none"
    assert Detokenizer(Tokens(), shown=marks.shown).push(mark.encode()) == "\ufffd", "a model may spell it"
    stream = TextStream(Tokens(), ["<think>"], shown=marks.shown)
    assert not stream.push([256, *b"<think"]).stopped
    assert stream.push(b">").stopped


def choice(dialect: Dialect = QWEN, *stops: str, **asked: Any) -> Choice:
    tokenizer: Any = Tokens()
    marks = marks_of(dialect.marks, [(256, "<think>")])
    return Choice(tokenizer, stops, reader=DialectReader(dialect, marks, tools={"f": None}, **asked))


def event(text: str | bytes, finish: FinishReason | None = None) -> TokenEvent:
    return TokenEvent(tuple(text.encode() if isinstance(text, str) else text), finish=finish)


def test_how_an_answer_with_a_call_ends() -> None:
    def finish_of(text: str, finish: FinishReason, *stops: str) -> Any:
        return join([choice(QWEN, *stops).push(event(text, finish))]).finish

    assert finish_of(CALL, FinishReason.STOP) == "tool_calls"
    assert finish_of("no call", FinishReason.STOP) == "stop"
    assert finish_of(CALL[:40], FinishReason.LENGTH) == "length", "a call that was cut is none to be made"
    assert finish_of(CALL, FinishReason.LENGTH) == "length"
    assert finish_of(CALL, FinishReason.LENGTH, '"a"') == "stop", "nor is one that a stop string cut"
    assert finish_of(f"{CALL} END", FinishReason.LENGTH, "END") == "tool_calls"


def test_an_answer_that_may_have_one_call_ends_with_it() -> None:
    one = choice(parallel=False)
    first = one.push(event(CALL + "\n" + CALL + " and more"))
    assert first.finish == "tool_calls" and first.stop_matched, "the engine is told to stop"
    assert [part.name for part in first.calls] == ["f"] and first.text == ""
    assert one.push(event("more", FinishReason.STOP)).empty


def test_a_thought_is_counted_and_no_text() -> None:
    one = choice()
    assert one.push(TokenEvent((256,))).parts == ()
    assert one.push(event("hm")).thought == "hm"
    last = one.push(event("</think>\n\nYes.", FinishReason.STOP))
    assert (last.text, last.thought, last.finish) == ("Yes.", "", "stop")
    assert one.thought_tokens == 1 + 2 + len("</think>\n\nYes.") and one.completion_tokens == 1 + 2 + 14


def test_marks_cut_in_two_events_are_marks() -> None:
    for at in range(1, len(CALL)):
        one = choice()
        piece = join([one.push(event(CALL[:at])), one.push(event(CALL[at:], FinishReason.STOP))])
        assert [part.text for part in piece.calls] == ['{"a": 1}'] and piece.text == "", at


# -------------------------------------------------------------------------------------------------------------- answers

TWO = "<think>hm</think>\n\nI look.\n" + CALL + "\n" + CALL.replace('"a": 1', '"b": "ö"')


async def test_a_body_has_thought_text_and_calls() -> None:
    async with serving(context=512) as world:
        world.change(dialect=QWEN)
        world.fleet.script = TWO.encode()
        _, body = await world.chat(tools=[F])
    message = body["choices"][0]["message"]
    assert message["reasoning_content"] == "hm" and message["content"] == "I look."
    calls = message["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "f", "arguments": '{"a": 1}'},
        {"name": "f", "arguments": '{"b": "ö"}'},
    ]
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    assert calls[0]["id"] != calls[1]["id"] and body["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_stream_says_what_a_body_says() -> None:
    async with serving(context=512) as world:
        world.change(dialect=QWEN)
        world.fleet.script = TWO.encode()
        chunks = [chunk for chunk in await world.chat_stream(tools=[F]) if chunk != "[DONE]"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    arguments = {0: "", 1: ""}
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            arguments[call["index"]] += call["function"]["arguments"]
            assert ("id" in call) == ("name" in call["function"])
    assert arguments == {0: '{"a": 1}', 1: '{"b": "ö"}'}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    ids = [call["id"] for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]
    assert len(set(ids)) == 2


async def test_without_tools_calls_are_text_and_a_thought_is_a_thought() -> None:
    async with serving(context=512) as world:
        world.change(dialect=QWEN)
        world.fleet.script = f"<think>hm</think>{CALL}".encode()
        for more in ({}, {"tools": [F], "tool_choice": "none"}):
            _, body = await world.chat(**more)
            message = body["choices"][0]["message"]
            assert message["content"] == CALL and message["reasoning_content"] == "hm"
            assert "tool_calls" not in message and body["choices"][0]["finish_reason"] == "stop"


async def test_a_cut_call_says_length_and_its_arguments_as_far_as_they_came() -> None:
    async with serving(context=512) as world:
        world.change(dialect=Dialect(None, FORMS["tagged-json"]))
        world.fleet.script = CALL.encode()
        _, body = await world.chat(tools=[F], max_tokens=CALL.index("1"))
    choice_ = body["choices"][0]
    assert choice_["finish_reason"] == "length"
    assert choice_["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": '}


async def test_the_older_form_answers_in_the_older_form() -> None:
    async with serving(context=512) as world:
        world.change(dialect=Dialect(None, FORMS["tagged-json"]))
        world.fleet.script = f"{CALL}\n{CALL}".encode()
        _, body = await world.chat(functions=[F["function"]])
        chunks = [chunk for chunk in await world.chat_stream(functions=[F["function"]]) if chunk != "[DONE]"]
    message = body["choices"][0]["message"]
    assert message["function_call"] == {"name": "f", "arguments": '{"a": 1}'} and "tool_calls" not in message
    assert body["choices"][0]["finish_reason"] == "function_call"
    deltas = [chunk["choices"][0]["delta"].get("function_call", {}) for chunk in chunks]
    assert "".join(delta.get("arguments", "") for delta in deltas) == '{"a": 1}'
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"


async def test_a_model_without_calls_is_told_of_tools_and_read() -> None:
    async with serving(context=2048) as world:
        world.fleet.script = CALL.encode()
        _, body = await world.chat(tools=[F])
        assert body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
        assert body["usage"]["prompt_tokens"] > 200, "the prompt has the tools"


# -------------------------------------------------------------------------------------------------------------- readers


class Named:
    """A tokenizer with control tokens of these texts."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts
        self.special_ids = frozenset(range(300, 300 + len(texts)))

    def token_text(self, token: int) -> str:
        return self._texts[token - 300]


def made_for(dialect: Dialect, tokenizer: Any, tools: Tools, prompt: str = "") -> Any:
    served: Any = SimpleNamespace(dialect=dialect, tokenizer=tokenizer)
    call = ChatCall(fields=fields(), messages=[], tools=tools)
    return reader_maker(served, call, Prompt((1,), prompt))()


def test_a_reader_sees_the_control_tokens_of_its_dialect() -> None:
    tokenizer = Named("<|im_end|>", "<think>", "<tool_call>", "</tool_call>", "<")
    offered = chat_tools(fields(tools=[F]))
    made = made_for(QWEN, tokenizer, offered, "<think>\n")
    assert set(made.shown) == {301, 302, 303} and made.thinking
    assert set(made_for(QWEN, tokenizer, Tools()).shown) == {301}
    assert isinstance(made_for(NO_DIALECT, tokenizer, Tools()), PlainReader)
    generic = made_for(NO_DIALECT, tokenizer, offered)
    assert set(generic.shown) == {302, 303}
    opens, closes = generic.shown[302], generic.shown[303]
    parts = generic.push(f'{opens}{{"name": "f", "arguments": {{}}}}{closes}')
    assert [(part.name, part.text) for part in parts] == [("f", "{}")]
    harmony = Dialect(THINKS["channels"], FORMS["channels"])
    gpt = made_for(harmony, Named("<|start|>", "<|channel|>", "<|message|>", "<|end|>"), offered, "<|start|>assistant")
    channel, message = gpt.shown[301], gpt.shown[302]
    assert gpt.push(f"{channel}final{message}Hi <|end|>") == [part_of("Hi <|end|>")]
    control = Named("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    plain = made_for(harmony, control, Tools(), "<|start|>assistant")
    start, channel, message, end = (plain.shown[token] for token in sorted(control.special_ids))
    said = plain.push(f"{channel}analysis{message}hm{end}{start}assistant{channel}final{message}Hi")
    assert said == [AnswerPart(PartKind.THOUGHT, "hm"), part_of("Hi")]


def part_of(text: str) -> Any:
    return AnswerPart(PartKind.TEXT, text)


async def test_tokenize_counts_what_a_chat_with_tools_has() -> None:
    async with serving(context=2048) as world:
        messages = [{"role": "user", "content": "q"}]
        _, body = await world.chat(tools=[F])
        status, counted = await world.post("/tokenize", {"messages": messages, "tools": [F]})
        assert status == 200 and counted["count"] == body["usage"]["prompt_tokens"] > 200


class Seen(Templates):
    """Keeps what it is asked to render."""

    messages: list[dict[str, Any]]

    async def render(self, messages: list[dict[str, Any]], **more: Any) -> str:
        self.messages = messages
        return "rendered"


async def test_an_earlier_thought_has_every_name_that_templates_know() -> None:
    """But one where the template that reads it takes a thought or a text in a message with calls, and not both."""
    seen: Any = Seen()
    tokenizer: Any = ByteTokenizer()
    call = ToolCall(function=FunctionCall(name="f", arguments=""), id="a")

    async def prompt(*messages: Message) -> list[dict[str, Any]]:
        await chat_prompt(
            seen, tokenizer, list(messages), bounds=Bounds(257, 64, 4), tools=None, add_generation_prompt=True,
            template_arguments={},
        )  # fmt: skip
        made: list[dict[str, Any]] = seen.messages
        return made

    names = ("reasoning_content", "reasoning", "thinking")
    (said,) = await prompt(Message(role="assistant", content="x", reasoning="hm"))
    assert [said.get(name) for name in names] == ["hm"] * 3
    (said,) = await prompt(Message(role="assistant", tool_calls=[call], reasoning_content="hm"))
    assert [said.get(name) for name in names] == ["hm"] * 3
    assert said["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    (said,) = await prompt(Message(role="assistant", content="x", tool_calls=[call], reasoning_content="hm"))
    assert [said.get(name) for name in names] == ["hm", "hm", None]
    (said,) = await prompt(Message(role="user", content="x"))
    assert not any(name in said for name in names)


async def test_a_template_of_single_calls_gets_them_one_by_one() -> None:
    calls = [ToolCall(function=FunctionCall(name="f", arguments=f"{{{n}}}"), id=f"id{n}") for n in range(2)]
    results = [Message(role="tool", content=f"r{n}", tool_call_id=f"id{n}") for n in (1, 0)]
    asked = Message(role="user", content="hi")
    two = Message(role="assistant", content="I look.", tool_calls=calls)
    made = await written(FORMS["bare-json"], [asked, two, *results, asked, Message(role="assistant", content="so")])
    told = [(m.role, m.content, [call.id for call in m.tool_calls or ()], m.tool_call_id) for m in made]
    assert told == [
        ("user", "hi", [], None),
        ("assistant", "I look.", ["id0"], None),
        ("tool", "r0", [], "id0"),
        ("assistant", None, ["id1"], None),
        ("tool", "r1", [], "id1"),
        ("user", "hi", [], None),
        ("assistant", "so", [], None),
    ]


async def test_a_result_like_an_earlier_one_is_not_lost() -> None:
    """Many clients number the calls of each turn from the beginning."""

    def turn(*ids: str) -> list[Message]:
        calls = [ToolCall(id=id, function=FunctionCall(name="f", arguments="{}")) for id in ids]
        results = [Message(role="tool", tool_call_id=id, content="ok", name="f") for id in ids]
        return [Message(role="assistant", tool_calls=calls), *results]

    made = await written(FORMS["bare-json"], [*turn("0", "1"), *turn("0"), *turn("0", "1")])
    assert [message.tool_call_id or message.role for message in made] == [
        *("assistant", "0", "assistant", "1"),
        *("assistant", "0"),
        *("assistant", "0", "assistant", "1"),
    ]
