"""Grammars as they are compiled: which texts they take, in every form that a client may send them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from homeserve.text.grammar_compile import Compiler, byte_tokenizer
from homeserve.text.grammar_wire import CHOICE, GBNF, JSON_SCHEMA, LARK, REGEX, Calls, Check, Checked, Function

VOCAB = 400
SPECIAL = {3: "<|start|>", 5: "<|channel|>", 7: "<|message|>", 9: "<|end|>", 399: "<tool_call>"}
COMPILER = Compiler(VOCAB, SPECIAL)
BYTES = [token for token in range(VOCAB) if token not in SPECIAL][:256]


def grammar(kind: str, value: Any, strict: bool = False, **more: Any) -> str:
    made = COMPILER.check(Check(kind, value, strict, **more))
    assert not made.error, made.error
    return made.grammar


def takes(grammar: str, text: str | list[int]) -> bool:
    """Whether the text fits, as a whole. A list has ids of control tokens, and characters' ids."""
    ids = [BYTES[value] for value in text.encode()] if isinstance(text, str) else text
    matcher = LLMatcher(byte_tokenizer(VOCAB, SPECIAL), grammar, log_level=0)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting() and not matcher.is_error()


def spelled(*parts: str | int) -> list[int]:
    made: list[int] = []
    for part in parts:
        made += [part] if isinstance(part, int) else [BYTES[value] for value in part.encode()]
    return made


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}},
    "required": ["a", "b"],
}


def test_json_has_one_blank_behind_commas_and_colons_and_no_other() -> None:
    made = grammar(JSON_SCHEMA, SCHEMA)
    assert takes(made, json.dumps({"a": 1, "b": ["x", "y"]}))
    for text in (
        '{"a":1,"b":[]}',
        '{"a":  1, "b": []}',
        '{ "a": 1, "b": []}',
        '{"a": 1, "b": []} ',
        '\n{"a": 1, "b": []}',
    ):
        assert not takes(made, text), text
    assert not takes(made, json.dumps({"a": 1, "b": [], "c": 2})), "an object that lists its properties is closed"
    assert takes(
        grammar("json_object", {"type": "object"}), json.dumps({"x": [1, {"y": None}], "z": "é"}, ensure_ascii=False)
    )
    assert not takes(grammar("json_object", {"type": "object"}), "[1]")


def test_recursion_that_may_stop_is_taken() -> None:
    tree: Any = {"$ref": "#/$defs/t", "$defs": {"t": {
        "type": "object", "required": ["v", "l"],
        "properties": {"v": {"type": "integer"}, "l": {"type": "array", "items": {"$ref": "#/$defs/t"}}},
    }}}  # fmt: skip
    assert takes(grammar(JSON_SCHEMA, tree, True), json.dumps({"v": 1, "l": [{"v": 2, "l": [{"v": 3, "l": []}]}]}))


def test_options_of_the_compiler_are_not_the_clients() -> None:
    made = grammar(JSON_SCHEMA, {**SCHEMA, "x-guidance": {"whitespace_flexible": True, "key_separator": "=", "no": 1}})
    assert takes(made, '{"a": 1, "b": []}') and not takes(made, '{ "a": 1, "b": []}')


REGEXES = [
    ("[0-9]+", "12", "1a"), ("^[0-9]+$", "12", "1a"), ("a\\$", "a$", "a"), ("a\\\\$", "a\\", "a\\$"), ("^", "", "^"),
    ("a|b", "b", "ab"), ("(?i)ab", "AB", "b"), ("a/b", "a/b", "ab"), ("a\nb", "a\nb", "ab"), (".", "é", "\n"),
    ('"[^"]*"', '"x"', '"'), ("a$|b", "b", "c"),
]  # fmt: skip


@pytest.mark.parametrize("pattern, fits, other", REGEXES)
def test_the_whole_answer_matches_a_pattern(pattern: str, fits: str, other: str) -> None:
    made = grammar(REGEX, pattern)
    assert takes(made, fits) and not takes(made, other)


def test_texts_of_a_choice_are_taken_as_they_are() -> None:
    texts = ["a", "ab", 'q"', "b\\", "é日😀", "\x00\x1f\x7f", "\n", "/x/", "%json", "$", "\u2028", ""]
    made = grammar(CHOICE, texts)
    assert all(takes(made, text) for text in texts)
    assert not any(takes(made, text) for text in ("b", "aa", "\\n", "A"))
    assert takes(grammar(CHOICE, ["yes", "yes"]), "yes")


JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws   # a comment with "quotes
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
GRAMMARS: list[tuple[str, list[str], list[str]]] = [
    (JSON_GBNF, ['{"a": [1, true, "x\\n"]}', "{}"], ["[1]", '{"a"}']),
    ('root ::= start a-b a_b A-B\nstart ::= "s"\na-b ::= "1"\na_b ::= "2"\nA-B ::= "3"', ["s123"], ["s122", "s111"]),
    (r'root ::= [\u0041-\u0043]+ "\u00e9\x41" [\xe9-\xea]', ["ABCéAê"], ["DéAê", "AéAa"]),
    (r'root ::= "\"\\" [\]\[^"]{2,3} "\U0001F600"', ['"\\[]😀', '"\\^"^😀'], ['"\\]😀']),
    ('root ::= a |\n  b\na ::= "1" # one\nb ::= "2"', ["1", "2"], ["3"]),
    ('root ::= ("a" | "b"){2} c?\nc ::= c "x" | "y"', ["ab", "bayxx"], ["a", "aax"]),
    (
        'root ::= ("a"{1,2}){2} (("b"+ )* | "c" ( "d"? )+ # so\n) [)*]',
        ["aa)", "aaaabb*", "aacdd)"],
        ["a)", "aaaaa)", "aab"],
    ),
    ("root ::= jp+\njp ::= [ぁ-ゟ] | [一-鿿]", ["ぁ一"], ["x"]),
]


@pytest.mark.parametrize("text, fits, other", GRAMMARS, ids=lambda case: "")
def test_gbnf_is_taken(text: str, fits: list[str], other: list[str]) -> None:
    made = grammar(GBNF, text)
    assert all(takes(made, each) for each in fits) and not any(takes(made, each) for each in other)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('root ::= foo\n\n# so\nfoo ::= "a"{3,1}', "rule 'foo', line 4: range end must be >= start"),
        ('root ::= a_b a-b\na-b ::= [z-a]\na_b ::= "x"', "rule 'a-b', line 2: invalid regex"),
        ('start ::= [z-a]\n root ::= start', "rule 'start', line 1: invalid regex"),
        ("root ::= [z-a]", "rule 'root', line 1: invalid regex"),
        ('root ::= "x" $ "y"', "is no GBNF: Expected name at line 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_gbnf_is_told_of_the_clients_own_text(text: str, said: str) -> None:
    found = COMPILER.check(Check(GBNF, text)).error
    assert found.startswith(said) and (said.startswith("is no") or found.endswith("(of its translation to Lark)"))


def test_a_grammar_with_too_many_ways_to_go_on_is_refused_before_it_is_drawn_from() -> None:
    assert "items; max is 2000" in COMPILER.check(Check(CHOICE, [f"{i:05}" for i in range(2100)])).error
    assert not COMPILER.check(Check(CHOICE, [f"{i:05}" for i in range(500)])).error
    assert not COMPILER.check(Check(REGEX, "")).error, "where nothing but the end may come first"


def test_lark_may_name_control_tokens() -> None:
    made = grammar(LARK, "start: <tool_call> WORD <[9]>\nWORD: /[a-z]+/")
    assert takes(made, spelled(399, "ab", 9)) and not takes(made, "<tool_call>ab<|end|>")


def test_an_answer_in_channels_has_the_head_of_its_message() -> None:
    made = grammar(REGEX, "a+", in_channels=True)
    assert takes(made, spelled(5, "final", 7, "aa")), "without a thought"
    assert takes(made, spelled(3, "assistant", 5, "final", 7, "aa")), "behind one"
    assert not takes(made, "aa")


FUNCTIONS = [Function("get", {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}, True)]
CALLED = '<tool_call>\n{"name": "get", "arguments": {"n": 1}}\n</tool_call>'


def either(**more: Any) -> Checked:
    compiler = Compiler(VOCAB, {})
    return compiler.check(Check(calls=Calls("tagged-json", FUNCTIONS, **more)))


def plainly(grammar: str, text: str) -> bool:
    tokenizer = byte_tokenizer(VOCAB, {})
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


def test_calls_alone_and_within_free_text() -> None:
    forced, free = either(), either(free=True)
    assert plainly(forced.grammar, CALLED) and not plainly(forced.grammar, "no call")
    assert plainly(free.grammar, "no call") and plainly(free.grammar, "so: " + CALLED)
    assert not plainly(free.grammar, "so: " + CALLED.replace("1", '"x"'))


def test_an_answer_with_a_schema_or_calls() -> None:
    made = Compiler(VOCAB, {}).check(Check(JSON_SCHEMA, SCHEMA, calls=Calls("tagged-json", FUNCTIONS)))
    assert plainly(made.grammar, CALLED) and plainly(made.grammar, '{"a": 1, "b": []}')
    assert not plainly(made.grammar, "no call")


def test_what_is_wrong_with_a_tool_is_said_of_the_tools() -> None:
    for schema, words in (({"type": "nil"}, "Invalid type: nil"), (False, "anyOf is empty")):
        functions = [*FUNCTIONS, Function("bad", schema)]
        made = COMPILER.check(Check(REGEX, "a", calls=Calls("tagged-json", functions)))
        assert (made.of_calls, made.function) == (True, "bad") and words in made.error
    loose = COMPILER.check(Check(calls=Calls("tagged-json", [Function("f", {"properties": {"x": {"not": {}}}})])))
    assert not loose.error and loose.ignored == ["not"]
    strict = Function("f", {"properties": {"x": {"not": {}}}}, True)
    assert "not cannot be enforced" in COMPILER.check(Check(calls=Calls("", [strict]))).error


def test_vocabularies_of_any_kind() -> None:
    for vocab, special in ((10, {}), (256, {0: "<s>"}), (5000, {4999: "<x>", 7000: "<beyond>"})):
        made = Compiler(vocab, special).check(Check(REGEX, "é+"))
        assert made.grammar and not made.error


def test_a_place_is_looked_for_in_bounded_time() -> None:
    wrong = {"properties": {"a": {"items": {"type": "nil"}}}}
    ticks = iter([0.0, 0.5, 2.0])
    found = Compiler(VOCAB, {}, clock=lambda: next(ticks)).check(Check(JSON_SCHEMA, wrong))
    assert found.error == "properties.a: Invalid type: nil", "as far as it is known"
    assert COMPILER.check(Check(JSON_SCHEMA, wrong)).error == "properties.a.items: Invalid type: nil"
