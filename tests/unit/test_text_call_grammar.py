"""Grammars of calls: what they let a model write, the reader of the same format reads, and the arguments fit.

Answers are drawn from the grammar itself, byte by byte, with random bytes wherever it leaves a choice.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from homeserve.text.answer import Part, PartKind, merged
from homeserve.text.call_grammar import calls_grammar
from homeserve.text.dialects import CALLS, CHANNEL_MARKS, GENERIC, CallBody, CallForm, Dialect
from homeserve.text.grammar_compile import byte_tokenizer
from homeserve.text.marks import Marks, marks_of
from homeserve.text.reading import DialectReader

WEATHER = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "exact": {"type": "boolean"},
    },
    "required": ["place", "exact"],
    "additionalProperties": False,
}
TRIP = {
    "type": "object",
    "properties": {
        "stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}},
        "note": {"type": ["string", "null"]},
        "name": {"type": "string", "minLength": 1, "maxLength": 4},
    },
    "required": ["stops", "name"],
    "additionalProperties": False,
    "$defs": {
        "stop": {
            "type": "object",
            "properties": {"at": {"type": "string"}, "km": {"type": "number"}},
            "required": ["at"],
            "additionalProperties": False,
        }
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[tuple[str, Any]] = [("weather", WEATHER), ("plan_trip", TRIP), ("ping", NOTHING)]
SCHEMAS = dict(TOOLS)
FORMS = {form.name: form for form in (*CALLS, GENERIC)}
VOCAB = 400
BYTES_MAX = 400
DRAWS = 2


def marks_in(form: CallForm) -> tuple[str, ...]:
    return form.marks + (CHANNEL_MARKS if form.body is CallBody.CHANNELS else ())


def control_texts(form: CallForm) -> tuple[str, ...]:
    """Names in the marks that models have as control tokens: <|…|> and the like."""
    made = [mark for mark in marks_in(form) if mark.startswith("<|") and mark.endswith("|>")]
    made += [mark for mark in form.marks if mark in ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")]
    made += ["<|tool_call>", "<tool_call|>"] if form.name == "call-braces" else []
    made += ["｜DSML｜"] if form.name.startswith("dsml") else []  # within marks, behind what is spelled
    return tuple(dict.fromkeys(made))


class Vocabulary:
    """Bytes, and control tokens where `with_tokens`."""

    def __init__(self, form: CallForm, *, with_tokens: bool) -> None:
        texts = control_texts(form) if with_tokens else ()
        self.special = {300 + i: text for i, text in enumerate(texts)}
        self.tokenizer: LLTokenizer = byte_tokenizer(VOCAB, self.special)
        self.by_text = {text: token for token, text in self.special.items()}
        self.of_byte = {self.tokenizer.tokenize_bytes(bytes([value]))[0]: value for value in range(256)}
        self.marks: Marks = marks_of(marks_in(form), self.special.items())


def drawn(vocabulary: Vocabulary, grammar: str, wanted: Sequence[str], rng: random.Random, begun: str = "") -> str:
    """One answer that the grammar allows, control tokens as their stand-ins. `wanted`: texts that it is led to, since
    random bytes never spell the end of anything."""
    matcher = LLMatcher(vocabulary.tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    for _ in range(20):
        matcher.reset()
        text = drawn_once(vocabulary, matcher, [text.encode() for text in wanted], rng, begun.encode())
        if text is not None:
            return text
    pytest.fail("no answer comes to its end")


def drawn_once(
    vocabulary: Vocabulary, matcher: LLMatcher, leads: Sequence[bytes], rng: random.Random, begun: bytes
) -> str | None:
    out = bytearray(begun)
    assert matcher.try_consume_tokens(vocabulary.tokenizer.tokenize_bytes(begun)) == len(begun)
    for _ in range(BYTES_MAX):
        allowed = [t for t in allowed_tokens(matcher) if t in vocabulary.of_byte or t in vocabulary.special]
        if matcher.is_accepting() and (rng.random() < 0.6 or not allowed):
            return out.decode("utf-8", "replace")
        assert allowed, bytes(out)
        token = choice_of(vocabulary, allowed, bytes(out), leads, rng)
        assert matcher.try_consume_tokens([token]) == 1
        if token in vocabulary.special:
            out += vocabulary.marks.shown[token].encode()
        else:
            out.append(vocabulary.of_byte[token])
    return None


def allowed_tokens(matcher: LLMatcher) -> list[int]:
    bits = int.from_bytes(matcher.compute_bitmask(), "little") & ((1 << VOCAB) - 1)
    found = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found


def choice_of(
    vocabulary: Vocabulary, allowed: Sequence[int], out: bytes, leads: Sequence[bytes], rng: random.Random
) -> int:
    special = [token for token in allowed if token in vocabulary.special]
    if special and rng.random() < 0.5:
        return rng.choice(special)
    bytes_of = {vocabulary.of_byte[token]: token for token in allowed if token in vocabulary.of_byte}
    if len(bytes_of) > 1 and 10 not in bytes_of:
        # Within JSON's quotes a mark is text, which formats without quotes cannot tell.
        bytes_of.pop(ord("<"), None)
    for lead in leads:
        for length in range(len(lead) - 1, 0, -1):
            if out.endswith(lead[:length]) and lead[length] in bytes_of and rng.random() < 0.97:
                return bytes_of[lead[length]]
    firsts = [lead[0] for lead in leads if lead[0] in bytes_of] + [b for b in b"\"'}])" if b in bytes_of]
    if firsts and rng.random() < 0.4:
        return bytes_of[rng.choice(firsts)]
    plain = [b for b in bytes_of if 32 <= b < 127] or list(bytes_of)
    return bytes_of[rng.choice(plain)] if plain else rng.choice(list(allowed))


def parts_of(form: CallForm, marks: Marks, text: str) -> tuple[Part, ...]:
    prompt = "<|start|>assistant" if form.body is CallBody.CHANNELS else ""
    thought = None
    if form.body is CallBody.CHANNELS:
        from homeserve.text.dialects import THOUGHTS

        thought = THOUGHTS[0]
    reader = DialectReader(Dialect(thought, form), marks, prompt=prompt, tools=SCHEMAS)
    return merged([*reader.push(text), *reader.finish()])


def check_calls(parts: Sequence[Part], text: str) -> int:
    calls = [part for part in parts if part.kind is PartKind.CALL]
    for call in calls:
        try:
            jsonschema.validate(json.loads(call.text), SCHEMAS[call.name])
        except (ValueError, jsonschema.ValidationError) as error:
            pytest.fail(f"{call.text!r} of {text!r}: {error}")
    return len(calls)


@pytest.mark.parametrize("with_tokens", [True, False])
@pytest.mark.parametrize("name", sorted(FORMS))
def test_what_is_forced_is_calls_that_fit(name: str, with_tokens: bool) -> None:
    form = FORMS[name]
    vocabulary = Vocabulary(form, with_tokens=with_tokens)
    grammar = grammar_of(form, vocabulary, parallel=True, text=False)
    rng = random.Random(f"{name} {with_tokens}")
    for _ in range(DRAWS):
        text = drawn(vocabulary, grammar, leads_of(form), rng)
        parts = parts_of(form, vocabulary.marks, text)
        assert check_calls(parts, text) >= 1, text
        assert all(part.kind is PartKind.CALL for part in parts), (text, parts)


@pytest.mark.parametrize("name", sorted(FORMS))
def test_one_call_at_most_is_one_call(name: str) -> None:
    form = FORMS[name]
    vocabulary = Vocabulary(form, with_tokens=True)
    grammar = grammar_of(form, vocabulary, parallel=False, text=False)
    rng = random.Random(name)
    for _ in range(DRAWS):
        text = drawn(vocabulary, grammar, leads_of(form), rng)
        assert check_calls(parts_of(form, vocabulary.marks, text), text) == 1, text


@pytest.mark.parametrize("name", sorted(FORMS))
def test_in_free_text_a_call_fits_once_it_is_opened(name: str) -> None:
    form = FORMS[name]
    vocabulary = Vocabulary(form, with_tokens=False)
    grammar = grammar_of(form, vocabulary, parallel=True, text=True)
    begun = f"I look. {form.section[0] or form.opens}" if form.opens else '{"n'
    if form.body is CallBody.CHANNELS:
        begun = "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to="
    rng = random.Random(name)
    found = 0
    for _ in range(DRAWS):
        text = drawn(vocabulary, grammar, leads_of(form), rng, begun)
        found += check_calls(parts_of(form, vocabulary.marks, text), text)
    assert found, "calls were drawn at all"
    plain = LLMatcher(vocabulary.tokenizer, grammar)
    if form.body is not CallBody.CHANNELS:
        assert plain.try_consume_tokens(vocabulary.tokenizer.tokenize_bytes(b"No tool is needed.")) == 18
        assert plain.is_accepting()


def grammar_of(form: CallForm, vocabulary: Vocabulary, *, parallel: bool, text: bool) -> str:
    return calls_grammar(form, TOOLS, parallel=parallel, text=text, special=vocabulary.by_text)


def leads_of(form: CallForm) -> tuple[str, ...]:
    """Ends of texts, which random bytes would never spell."""
    made = [form.quote, *(CHANNEL_MARKS if form.body is CallBody.CHANNELS else ())]
    made += [form.tag.closes] if form.tag else []
    return tuple(mark for mark in made if mark)


def test_several_calls_can_follow_each_other() -> None:
    for name, text in {
        "tagged-json": '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
        "function-tags": "<tool_call>\n<function=ping>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=ping>\n</function>\n</tool_call>",
        "separated-json": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    }.items():
        form = FORMS[name]
        vocabulary = Vocabulary(form, with_tokens=False)
        for parallel in (True, False):
            matcher = LLMatcher(vocabulary.tokenizer, grammar_of(form, vocabulary, parallel=parallel, text=False))
            tokens = vocabulary.tokenizer.tokenize_bytes(text.encode())
            assert (matcher.try_consume_tokens(tokens) == len(tokens)) is parallel
            assert not parallel or matcher.is_accepting()


def test_an_unknown_name_and_a_wrong_type_cannot_be_written() -> None:
    form = FORMS["tagged-json"]
    vocabulary = Vocabulary(form, with_tokens=False)
    grammar = grammar_of(form, vocabulary, parallel=True, text=False)
    for text, stops in (
        ('<tool_call>\n{"name": "nobody"', '": "'),
        ('<tool_call>\n{"name": "weather", "arguments": {"place": 7', '"place": '),
    ):
        tokens = vocabulary.tokenizer.tokenize_bytes(text.encode())
        taken = LLMatcher(vocabulary.tokenizer, grammar).try_consume_tokens(tokens)
        assert taken == text.index(stops) + len(stops)


def test_marks_are_written_by_their_tokens() -> None:
    grammar = calls_grammar(GENERIC, TOOLS, parallel=True, text=True, special={"<tool_call>": 7, "</tool_call>": 8})
    assert "<[7]>" in grammar and "<[8]>" in grammar and '"<tool_call>"' not in grammar


def test_values_that_spell_a_control_token_are_text() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["<|im_end|>"]}}, "required": ["a"]}
    for name in ("function-tags", "call-braces", "tagged-json"):
        grammar = calls_grammar(FORMS[name], [("f", schema)], parallel=True, text=False, special={"<|im_end|>": 7})
        assert "<|im_end|>" in grammar and "<[7]>" not in grammar
