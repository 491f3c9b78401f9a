"""Calls that end too early, or with text in between: what a client gets of the marks, and of a call's parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from homeserve.engine.request import FinishReason, TokenEvent
from homeserve.server.choice import Choice, join
from homeserve.server.shapes import ChatShape
from homeserve.text.answer import Part, PartKind, merged
from homeserve.text.dialects import CALLS, GENERIC, THOUGHTS, Dialect
from homeserve.text.reading import DialectReader

FORMS = {form.name: form for form in (*CALLS, GENERIC)}
TOOLS = {"f": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}}}
JSON_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "1"}}'
TAGS = "<tool_call>\n<function=f>\n<parameter=a>\n1"
BRACES = '<|tool_call>call:f{a:<|"|>1'
CUT = [
    ("generic", JSON_CALL, "\n</tool_call>", '{"a": "1"}'),
    ("tagged-json", JSON_CALL, "\n</tool_call>", '{"a": "1"}'),
    ("function-tags", TAGS, "\n</parameter>", '{"a": "1'),
    ("function-tags", TAGS + "\n</parameter>", "\n</function>", '{"a": "1"'),
    ("function-tags", TAGS + "\n</parameter>\n</function>", "\n</tool_call>", '{"a": "1"}'),
    ("call-braces", BRACES, '<|"|>', '{"a": "1'),
    ("call-braces", BRACES + '<|"|>}', "<tool_call|>", '{"a": "1"}'),
    ("channels", '<|channel|>commentary to=functions.f<|message|>{"a": "1"}', "<|call|>", '{"a": "1"}'),
]


def read(form: str, text: str, step: int = 1) -> tuple[Part, ...]:
    thought = THOUGHTS[0] if form == "channels" else None
    reader = DialectReader(Dialect(thought, FORMS[form]), tools=TOOLS, new_id=lambda: "id")
    pushed = [part for at in range(0, len(text), step) for part in reader.push(text[at : at + step])]
    return merged([*pushed, *reader.finish()])


@pytest.mark.parametrize(("form", "call", "mark", "arguments"), CUT)
def test_of_a_mark_that_was_to_close_a_call_nothing_stays(form: str, call: str, mark: str, arguments: str) -> None:
    for cut in range(len(mark)):
        (part,) = read(form, call + mark[:cut], step=1 + cut)
        assert (part.kind, part.name, part.text) == (PartKind.CALL, "f", arguments)


def test_of_a_mark_that_was_to_close_a_thought_nothing_stays() -> None:
    think = next(form for form in THOUGHTS if form.name == "think-tags")
    for cut in range(len(think.closes)):
        reader = DialectReader(Dialect(think, None))
        made = merged([*reader.push("<think>\nhm\n" + think.closes[:cut]), *reader.finish()])
        assert made == (Part(PartKind.THOUGHT, "hm"),)


def test_the_same_text_behind_other_text_is_text() -> None:
    _, text = read("generic", JSON_CALL + "\n</tool_call> where 1 <")
    assert text.text == "where 1 <"


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_text_between_the_tags_of_a_call_parts_no_call(step: int) -> None:
    answer = TAGS + "\n</parameter>\nand then\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>"
    call, text = read("function-tags", answer, step)
    assert (call.name, call.text) == ("f", '{"a": "1", "b": "2"}')
    assert text == Part(PartKind.TEXT, "and then")


def test_every_call_of_a_body_has_a_name() -> None:
    class Tokenizer:
        special_ids: frozenset[int] = frozenset()

        def token_bytes(self, token: int) -> bytes:
            return bytes([token])

    tokenizer: Any = Tokenizer()
    answer = TAGS + "\n</parameter>\nand then\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>"
    reader = DialectReader(Dialect(None, FORMS["function-tags"]), tools=TOOLS)
    choice = Choice(tokenizer, (), reader=reader)
    pieces = [choice.push(TokenEvent((token,))) for token in answer.encode()]
    whole = join([*pieces, choice.push(TokenEvent(finish=FinishReason.STOP))])
    ask: Any = SimpleNamespace(thought_told=True, logprobs=-1, token_ids=False)
    made = ChatShape(ask, tokenizer, request_id="r", model="m")._whole(0, whole)
    (call,) = made["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": "1", "b": "2"}'}
    assert made["message"]["content"] == "and then" and made["finish_reason"] == "tool_calls"
