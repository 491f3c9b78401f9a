"""Answers split into text, thought and calls: recorded turns of every family, any cutting, and what is broken.

tests/data/templates/turns.json holds one assistant turn per family, rendered by `transformers` from a conversation with
a thought and a call; more_turns.json those of further formats, with two calls, rendered by this program's own host.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from homeserve.text.answer import Part, PartKind, PlainReader, merged
from homeserve.text.dialects import CALLS, GENERIC, THOUGHTS, Dialect, dialect_of
from homeserve.text.marks import STAND_INS, Marks, marks_of
from homeserve.text.reading import DialectReader, call_id

DATA = Path(__file__).parent.parent / "data" / "templates"
TURNS: dict[str, dict[str, Any]] = json.loads((DATA / "turns.json").read_text())["families"]
MORE: dict[str, dict[str, Any]] = json.loads((DATA / "more_turns.json").read_text())["families"]
FORMS = {form.name: form for form in (*CALLS, GENERIC)}
THINKS = {form.name: form for form in THOUGHTS}
TOOLS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {"place": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"}},
    },
    "f": None,
}
KOELN = ("weather", {"place": "Köln <1>", "days": 2})
DEEP = ("weather", {"place": "B", "deep": {"a": [1, "x", True, None]}})
ENDS = {  # where an answer of the family ends, and what stands before it in a turn
    "qwen2": ("<|im_start|>assistant\n", "<|im_end|>"),
    "qwen3": ("<|im_start|>assistant\n", "<|im_end|>"),
    "qwen35": ("<|im_start|>assistant\n", "<|im_end|>"),
    "qwen3-coder": ("<|im_start|>assistant\n", "<|im_end|>"),
    "gemma4": ("<|turn>model\n", "<|tool_response>"),
    "gpt-oss": ("<|start|>assistant", "<|call|>"),
    "llama3": ("assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "llama3.2": ("assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "mistral-nemo": ("[/INST]", "</s>"),
    "mistral-small": ("[/INST]", "</s>"),
    "ministral3": ("[/INST]", "</s>"),
}


def reader(
    dialect: Dialect, *, prompt: str = "", parallel: bool = True, marks: Marks | None = None, tools: Any = TOOLS
) -> DialectReader:
    ids = (f"id{i}" for i in itertools.count())
    return DialectReader(dialect, marks, prompt=prompt, parallel=parallel, tools=tools, new_id=lambda: next(ids))


def read(made: DialectReader, pushes: Iterable[str]) -> tuple[Part, ...]:
    parts = [part for text in pushes for part in made.push(text)]
    return merged([*parts, *made.finish()])


def told(parts: Sequence[Part]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Text, thought and calls."""
    texts = ["".join(p.text for p in parts if p.kind is kind) for kind in (PartKind.TEXT, PartKind.THOUGHT)]
    calls = {p.call: p.name for p in parts if p.kind is PartKind.CALL and p.name}
    arguments = {call: "".join(p.text for p in parts if p.kind is PartKind.CALL and p.call == call) for call in calls}
    return texts[0], texts[1], [(name, json.loads(arguments[call])) for call, name in calls.items()]


def of(name: str, text: str, thought: str = "", **asked: Any) -> tuple[Part, ...]:
    """What is read of a text in the call form of that name."""
    return read(reader(Dialect(THINKS.get(thought), FORMS[name]), **asked), [text])


def as_tokens(dialect: Dialect, text: str) -> tuple[Marks, str]:
    """The answer of a model that has every <|…|> and […] as a control token."""
    names = {name for mark in dialect.marks for name in re.findall(r"<[^<>\n]+>|\[[A-Z_/]+\]", mark)}
    marks = marks_of(dialect.marks, enumerate(sorted(names)))
    return marks, marks.written(text)


# ------------------------------------------------------------------------------------------------------ recorded turns


def answer_of(name: str) -> tuple[Dialect, str, str]:
    """The family's dialect, the prompt's end and the answer."""
    starts, ends = ENDS[name]
    turn: str = TURNS[name]["turn"]
    at = turn.index(starts) + len(starts)
    signs = " ".join([*TURNS[name]["signs"], "tools"])
    return dialect_of({"default": signs}, ("", "")), starts, turn[at : turn.index(ends, at)]


@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize("name", sorted(ENDS))
def test_the_recorded_turn_is_read_back(name: str, with_tokens: bool) -> None:
    dialect, prompt, answer = answer_of(name)
    marks, written = as_tokens(dialect, answer) if with_tokens else (None, answer)
    text, thought, calls = told(read(reader(dialect, prompt=prompt, marks=marks), [written]))
    assert calls == [KOELN]
    assert thought == ("" if TURNS[name]["thought"] is None or name == "ministral3" else "hm")
    assert text == ""


@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize("name", sorted(MORE))
def test_two_recorded_calls_are_read_back(name: str, with_tokens: bool) -> None:
    turn = MORE[name]
    dialect = Dialect(THINKS.get(turn["thought"]), FORMS[turn["call"]])
    marks, written = as_tokens(dialect, turn["answer"]) if with_tokens else (None, turn["answer"])
    parts = read(reader(dialect, prompt=turn["prompt"], marks=marks), [written])
    text, thought, calls = told(parts)
    assert calls == ([KOELN, DEEP] if turn["calls"] == 2 else [KOELN])
    assert thought == turn["says"] and text == ""
    assert len({part.id for part in parts if part.name}) == turn["calls"]


def test_every_form_has_a_recorded_turn() -> None:
    seen = {turn["call"] for turn in (*TURNS.values(), *MORE.values())} - {None}
    assert seen == {form.name for form in CALLS}


# -------------------------------------------------------------------------------------------- written, and read again

KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
WORDS = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters=STAND_INS), max_size=12)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**12), 10**12),
        st.floats(allow_nan=False, allow_infinity=False, width=32),
        WORDS,
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=6,
)


def braces(value: Any) -> str:
    """As Gemma's template writes a value."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{braces(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(braces, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def written(name: str, arguments: dict[str, Any]) -> str:
    match name:
        case "tagged-json":
            whole = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=False)
            return f"<tool_call>\n{whole}\n</tool_call>"
        case "call-braces":
            return f"<|tool_call>call:f{braces(arguments)}<tool_call|>"
        case "call-expressions":
            pairs = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            return f"<|tool_call_start|>[f({pairs})]<|tool_call_end|>"
        case _:
            texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
            tags = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
            return f"<tool_call>\n<function=f>\n{tags}</function>\n</tool_call>"


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.dictionaries(KEYS, VALUES, max_size=4), min_size=1, max_size=3), WORDS, WORDS)
@pytest.mark.parametrize("name", ["tagged-json", "call-braces", "call-expressions", "function-tags"])
def test_what_was_written_is_read(name: str, calls: list[dict[str, Any]], text: str, thought: str) -> None:
    types: dict[type, str] = {str: "string"}
    schema = {"properties": {k: {"type": types.get(type(v), "x")} for call in calls for k, v in call.items()}}
    if name == "function-tags":  # one schema for all calls, so each key is of one type
        calls = calls[:1]
    answer = f"<think>{thought}</think>{text}" + "\n".join(written(name, call) for call in calls)
    parts = read(reader(Dialect(THINKS["think-tags"], FORMS[name]), tools={"f": schema}), [answer])
    assert told(parts) == (text.strip(), thought.strip(), [("f", call) for call in calls])


# --------------------------------------------------------------------------------------------------------- any cutting

ANSWERS = [
    ("tagged-json", "think-tags", "<think>\nhm <tool> \n</think>\n\nI look. \n<tool_call>\n"
     '{"name": "f", "arguments": {"a": "}<", "b": [1, {"c": "\\"</tool_call>"}]}}\n</tool_call>\n'
     '<tool_call>{"arguments": {"x": 1}, "name": "f"}'
     "</tool_call> done <tool_cal"),
    ("function-tags", "think-tags", "Now:\n<tool_call>\n<function=weather>\n<parameter=place>\nK\"ö\nln\n</parameter>\n"
     "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>x"),
    ("call-braces", "channel-tags", '<|channel>thought\nhm\n<channel|>a<|tool_call>call:f{a:1,b:<|"|>{<<|"|>,c:{d:[True'
     ",None]}}<tool_call|>"),
    ("channels", "channels", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>"
     "I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": 1}"
     "<|call|><|start|>assistant<|channel|>final<|message|>It < is <| 3."),
    ("bracket-args", "bracket-think", "[THINK]hm[/THINK]ok [TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{\"a\": \"[\"}"
     "[TOOL_CALLS]f[ARGS]{}"),
    ("call-expressions", "think-tags",
     "<|tool_call_start|>[f(a='x\\'<', b=[1, {'c': (1, 2)}]), f()]<|tool_call_end|>x"),
    ("dsml-tools", "think-tags", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
     '<｜DSML｜parameter name="a" string="true">1</｜DSML｜parameter>\n'
     '<｜DSML｜parameter name="b" string="false">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
     "</｜DSML｜tool_calls>"),
    ("function-tags", "seed-think", '<function=<seed:think>\\{"name": "f": {name>x <parameter=a>1</parameter> y  z'
     "</function> \n</tool_call>\n<tool_call>\n<function=f></function>"),
    ("bare-json", "", '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {}}\n{"nam": 1}'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "thought", "text"), ANSWERS, ids=[name for name, _, _ in ANSWERS])
def test_the_parts_do_not_depend_on_how_the_text_was_cut(name: str, thought: str, text: str) -> None:
    dialect = Dialect(THINKS.get(thought), FORMS[name])
    whole = read(reader(dialect), [text])
    assert read(reader(dialect), text) == whole
    rng = random.Random(name)
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text)), 6))
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        assert read(reader(dialect), pieces) == whole


@pytest.mark.parametrize(("name", "thought", "text"), ANSWERS, ids=[name for name, _, _ in ANSWERS])
def test_what_has_come_is_the_beginning_of_what_comes(name: str, thought: str, text: str) -> None:
    """An answer that ends early says the beginning of what the whole one says: nothing is taken back."""
    dialect = Dialect(THINKS.get(thought), FORMS[name])
    pushed = reader(dialect)
    so_far: list[Part] = []
    whole = read(reader(dialect), [text])
    for char in text:
        so_far = list(merged([*so_far, *pushed.push(char)]))
        for had, has in zip(so_far, whole, strict=False):
            assert (had.kind, had.call, had.name, had.id) == (has.kind, has.call, has.name, has.id)
            assert has.text.startswith(had.text)


MARKS = sorted({mark for form in (*CALLS, GENERIC) for mark in form.marks} | {t.opens for t in THOUGHTS}
               | {t.closes for t in THOUGHTS})  # fmt: skip
PIECES = st.lists(
    st.one_of(
        st.sampled_from(MARKS),
        st.sampled_from(
            ['{"name": "f"', ', "arguments": ', '{"a": 1}', "}", "{", "[", "]", "f", "(", ")", "'", '"', "\\"]
        ),
        st.text(max_size=6),
    ),
    max_size=14,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(st.sampled_from(sorted(FORMS)), st.sampled_from(["", *sorted(THINKS)]), PIECES)
def test_broken_answers_are_read_to_their_end_and_cut_alike(name: str, thought: str, pieces: list[str]) -> None:
    dialect = Dialect(THINKS.get(thought), FORMS[name])
    text = "".join(pieces)
    whole = read(reader(dialect), [text])
    assert read(reader(dialect), text) == whole
    assert read(reader(dialect), pieces) == whole
    for part in whole:
        part.text.encode()
        part.name.encode()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_text_without_marks_comes_out_as_it_is(text: str) -> None:
    if any(char in STAND_INS for char in text):
        return
    for name, thought in (("tagged-json", "think-tags"), ("function-tags", ""), ("bracket-args", "bracket-think")):
        assert told(of(name, text, thought))[0] == text
    assert told(read(reader(Dialect(THINKS["think-tags"], None)), [text]))[0] == text


BROKEN = [
    ("tagged-json", "<tool_call> what? </tool_call>"),
    ("tagged-json", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
    ("tagged-json", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    ("tagged-json", '<tool_call>\n{"na'),
    ("tagged-json", '<tool_call>{"name" "f"}'),
    ("function-tags", "<tool_call>\nno function"),
    ("function-tags", "<tool_call>\n<function=f"),
    ("call-braces", "<|tool_call>call:f and so on"),
    ("bracket-args", "[TOOL_CALLS] nothing\nof that"),
    ("invoke-tags", '<minimax:tool_call>\n<invoke nam="f">'),
    ("call-expressions", "<|tool_call_start|>[f and g]"),
    ("bare-json", '{"answer": 42}'),
    ("bare-json", '{"name": "Bob", "parameters": {"is": "a person"}}'),
    ("bare-json", '{"name": "Bob", "parameters": {"is'),
]


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_what_only_looks_like_a_call_is_text(name: str, text: str) -> None:
    made = reader(Dialect(None, FORMS[name]))
    parts = read(made, [text])
    assert told(parts) == (text, "", []) and not made.called


# ------------------------------------------------------------------------------------------------------ text, thought


def test_text_goes_out_at_once_and_only_what_may_be_a_mark_waits() -> None:
    made = reader(Dialect(THINKS["think-tags"], FORMS["tagged-json"]))
    assert made.push("I ") == [Part(PartKind.TEXT, "I")]
    assert made.push("look <") == [Part(PartKind.TEXT, " look")]
    assert made.push("tool_") == []
    assert made.push("box>") == [Part(PartKind.TEXT, " <tool_box>")]
    assert made.push("<tool_call") == [] and made.finish() == [Part(PartKind.TEXT, "<tool_call")]


def test_a_thought_is_no_text_and_space_around_it_neither() -> None:
    made = reader(Dialect(THINKS["think-tags"], None))
    assert read(made, ["<thi", "nk>\n hm\n\n", "</think>\n\nYes. \n"]) == (
        Part(PartKind.THOUGHT, "hm"),
        Part(PartKind.TEXT, "Yes. \n"),
    )


def test_a_prompt_may_have_opened_the_thought() -> None:
    made = reader(Dialect(THINKS["think-tags"], None), prompt="<|im_start|>assistant\n<think>\n")
    assert made.thinking
    assert made.push("hm") == [Part(PartKind.THOUGHT, "hm")] and made.thinking
    assert made.push("</think>Yes") == [Part(PartKind.TEXT, "Yes")] and not made.thinking
    cut = reader(Dialect(THINKS["think-tags"], None), prompt="<think>")
    assert read(cut, ["never ending"]) == (Part(PartKind.THOUGHT, "never ending"),) and cut.thinking


def test_a_text_may_speak_of_thoughts() -> None:
    text = "Write <think> and then </think>."
    assert told(of("tagged-json", text, "think-tags"))[:2] == (text, "")


def test_control_tokens_are_marks_anywhere_and_their_spelling_is_text() -> None:
    dialect = Dialect(THINKS["think-tags"], FORMS["tagged-json"])
    marks = marks_of(dialect.marks, [(1, "<think>"), (2, "</think>"), (3, "<tool_call>"), (4, "<|other|>")])
    assert set(marks.shown) == {1, 2, 3}
    opens, closes, call = (marks.shown[token] for token in (1, 2, 3))
    made = reader(dialect, marks=marks)
    text = f'Yes. {opens}hm{closes}<think> {call}{{"name": "f", "arguments": {{}}}}</tool_call>' + closes
    assert told(read(made, [text])) == ("Yes.<think>", "hm", [("f", {})])
    assert told(read(reader(dialect, marks=marks), [f"a{call}b{closes}c"]))[0] == "abc"


def test_channels() -> None:
    dialect = Dialect(THINKS["channels"], FORMS["channels"])

    def said(text: str, prompt: str = "<|start|>assistant", **asked: Any) -> Any:
        return told(read(reader(dialect, prompt=prompt, **asked), [text]))

    final = "<|channel|>final<|message|>Hi."
    assert said(final) == ("Hi.", "", [])
    thought = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
    assert said(f"{thought}<|start|>assistant{final}") == ("Hi.", "ab", [])
    assert said("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + final) == ("I look.Hi.", "", [])
    call = '<|channel|>analysis to=functions.f code<|message|>{"a": 1}'
    assert said(f"{call}<|call|>") == said(call) == ("", "", [("f", {"a": 1})])
    assert said(" to=f<|channel|>commentary json<|message|>{}<|end|><|start|>assistant to=functions.f<|channel|>x"
                "<|message|>{}") == ("", "", [("f", {}), ("f", {})])  # fmt: skip
    assert said(call, tools=None) == ("", '{"a": 1}', [])
    assert said("Hello, to=you < all") == ("Hello, to=you < all", "", [])
    assert said("<|channel|>ana") == ("", "", [])
    assert said("Hi.", prompt="<|start|>assistant<|channel|>final<|message|>") == ("Hi.", "", [])
    assert said("b", prompt="<|start|>assistant<|channel|>analysis<|message|>a") == ("", "b", [])


# ---------------------------------------------------------------------------------------------------------------- calls


def test_arguments_come_as_they_are_written() -> None:
    made = reader(Dialect(None, FORMS["tagged-json"]))
    assert made.push('<tool_call>\n{"name": "f"') == []
    assert made.push(', "arguments": {"a"') == [Part(PartKind.CALL, '{"a"', call=0, name="f", id="id0")]
    assert made.push(": [1") == [Part(PartKind.CALL, ": [1", call=0)]
    assert made.push("]}}") == [Part(PartKind.CALL, "]}", call=0)] and made.called
    assert made.push("\n</tool_call>\n") == [] == made.finish()


def test_bare_texts_become_json_as_they_come() -> None:
    made = reader(Dialect(None, FORMS["function-tags"]))
    made.push("<tool_call>\n<function=weather>\n<parameter=place>\n")
    assert made.push('K"ö') == [Part(PartKind.CALL, 'K\\"ö', call=0)]
    assert made.push("\nln") == [Part(PartKind.CALL, "\\nln", call=0)]
    assert made.push("\n</parameter>\n") == [Part(PartKind.CALL, '"', call=0)]


def test_arguments_of_each_call_are_its_own() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' * 2 + "x"
    parts = of("tagged-json", text)
    assert [(p.call, p.name, p.id, p.text) for p in parts] == [
        (0, "f", "id0", '{"a": 1}'),
        (1, "f", "id1", '{"a": 1}'),
        (-1, "", "", "x"),
    ]


def test_a_call_that_is_cut_ends_where_it_was_cut() -> None:
    cut = of("tagged-json", '<tool_call>{"name": "f", "arguments": {"place": "Kö')
    assert [(p.name, p.text) for p in cut] == [("f", '{"place": "Kö')]
    cut = of("function-tags", "<tool_call>\n<function=weather>\n<parameter=place>\nKö")
    assert [(p.name, p.text) for p in cut] == [("weather", '{"place": "Kö')]
    cut = of("bare-json", '{"name": "weather", "par')
    assert [(p.name, p.text) for p in cut] == [("weather", "")]
    cut = of("call-braces", '<|tool_call>call:f{a:{b:<|"|>Kö')
    assert [(p.name, p.text) for p in cut] == [("f", '{"a": {"b": "Kö')]


def test_a_call_inside_a_thought_is_a_call() -> None:
    """vLLM loses it: its issue 39056."""
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    dialect = Dialect(THINKS["think-tags"], FORMS["tagged-json"])
    never_closed = read(reader(dialect, prompt="<think>\n"), ["I need f.\n", call])
    assert told(never_closed) == ("", "I need f.", [("f", {"a": 1})])
    closed = read(reader(dialect), ["<think>hm\n", call, "\nand on</think>\n\nYes."])
    assert told(closed) == ("Yes.", "hmand on", [("f", {"a": 1})])
    tags = Dialect(THINKS["think-tags"], FORMS["function-tags"])
    text = "<think>hm<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    assert told(read(reader(tags), [text])) == ("", "hm", [("f", {"a": 1})])


def test_many_tokens_at_once_lose_no_call() -> None:
    """vLLM drops streamed calls where drafts bring several tokens at a time: its issue 39598."""
    text = "<think>hm</think>" + '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n' * 3
    dialect = Dialect(THINKS["think-tags"], FORMS["tagged-json"])
    for width in (1, 2, 3, 7, 50, len(text)):
        pushes = [text[at : at + width] for at in range(0, len(text), width)]
        assert told(read(reader(dialect), pushes)) == ("", "hm", [("f", {"a": 1})] * 3)


def test_an_unknown_tool_is_told_by_its_name() -> None:
    assert told(of("tagged-json", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'))[2] == [("nobody", {})]


def test_one_call_is_enough_where_no_more_are_wanted() -> None:
    made = reader(Dialect(None, FORMS["tagged-json"]), parallel=False)
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    made.push("Hm. " + call[:-3])
    assert not made.done or made.called
    parts = read(made, [call, "more"])
    assert made.done and not parts
    for name, text in (
        ("bracket-list", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]'),
        ("call-expressions", "<|tool_call_start|>[f(), f()]<|tool_call_end|>"),
        ("channels", "<|channel|>commentary to=functions.f<|message|>{}<|call|><|start|>assistant to=f<|message|>{}"),
    ):
        thought = "channels" if name == "channels" else ""
        assert told(of(name, text, thought, parallel=False))[2] == [("f", {})]


def test_without_tools_there_are_no_calls() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert told(of("tagged-json", text, "think-tags", tools=None))[0] == text


def test_other_ways_of_writing_the_same_call() -> None:
    for text in (
        '{"name": "f", "parameters": {"a": 1}}',
        '{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}',
        '{"name": "f", "arguments": "{\\"a\\": 1}"}',
        '{"arguments": {"a": 1}, "id": "x", "name": "f"}',
        '[{"name": "f", "arguments": {"a": 1}}]',
    ):
        assert told(of("tagged-json", f"<tool_call>\n{text}\n</tool_call>")) == ("", "", [("f", {"a": 1})]), text
    for text in ('{"name": "f"}', '{"name": "f", "arguments": null}', '{"name": "f", "arguments": {}}'):
        assert told(of("tagged-json", f"<tool_call>{text}</tool_call>"))[2] == [("f", {})], text


def test_values_without_quotes_are_what_the_schema_says() -> None:
    schema = {
        "properties": {
            "s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": ["number", "null"]},
            "u": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/n"}]}, "e": {"enum": ["1", "2"]},
            "o": {"type": "object"},
        },
        "$defs": {"n": {"type": "integer"}},
    }  # fmt: skip
    values = {
        "s": "007",
        "i": "7",
        "n": "null",
        "u": "7",
        "e": "1",
        "o": "{'a': [1, True, None]}",
        "x": "[1]",
        "y": "no",
    }
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    parts = of("function-tags", f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>", tools={"f": schema})
    assert told(parts)[2] == [
        ("f", {"s": "007", "i": 7, "n": None, "u": 7, "e": "1", "o": {"a": [1, True, None]}, "x": [1], "y": "no"})
    ]


def test_ids_are_as_templates_and_clients_want_them() -> None:
    assert len(call_id(short=True)) == 9 and call_id(short=True).isalnum()
    assert call_id(short=False).startswith("call_") and len(call_id(short=False)) == 29
    given = of("bracket-args", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}")
    assert [part.id for part in given] == ["abcdefghi", "id0"], "an id is given out once"
    numbered = of("numbered-json", "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>")
    assert [(part.name, part.id) for part in numbered] == [("f", "functions.f:3")]


def test_a_long_answer_takes_time_that_grows_with_its_length_alone() -> None:
    """What looks like the beginning of a call again and again is not read again and again."""
    made = reader(Dialect(THINKS["think-tags"], FORMS["tagged-json"]))
    parts = read(made, ['<tool_call>{"arguments": "' * 400])
    assert told(parts)[0] == '<tool_call>{"arguments": "' * 400
    deep = of("call-braces", "<|tool_call>call:f{a:" + "[" * 4000)
    assert deep[0].name == "f" and deep[0].text.count("[") == 4000


def test_a_plain_reader_reads_text() -> None:
    made = PlainReader()
    assert made.push("<think>") == [Part(PartKind.TEXT, "<think>")] and made.push("") == [] == made.finish()
    assert not (made.called or made.thinking or made.calling or made.done or made.shown)
