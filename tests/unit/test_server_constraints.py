"""Every spelling of a constraint is understood, and every wrong one names its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from homeserve.errors import InvalidField
from homeserve.server.bodies import BodyDecoder
from homeserve.server.chat_call import Constraint, ConstraintKind
from homeserve.server.constraints import constraint_of
from homeserve.server.fields import ChatRequest, CompletionRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GBNF = 'root ::= "a" | b\nb ::= "c"'
LARK = 'start: "a" | b\nb: "c"'
OBJECT, JSON, REGEX, CHOICE, AS_LARK, AS_GBNF = (
    ConstraintKind.JSON_OBJECT, ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX, ConstraintKind.CHOICE,
    ConstraintKind.LARK, ConstraintKind.GBNF,
)  # fmt: skip


def read(fields: dict[str, Any]) -> Constraint | None:
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], **fields}).encode()
    return constraint_of(BodyDecoder().decode(body, ChatRequest))


SPELLINGS: list[tuple[dict[str, Any], Constraint]] = [
    ({"response_format": {"type": "json_object"}}, Constraint(OBJECT)),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        Constraint(JSON, SCHEMA, "response_format.schema"),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        Constraint(JSON, SCHEMA, "response_format.json_schema.schema", True),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": None}}},
        Constraint(JSON, SCHEMA, "response_format.json_schema.schema"),
    ),
    (
        {"response_format": {"type": "json_schema", "schema": SCHEMA, "strict": True}},
        Constraint(JSON, SCHEMA, "response_format.schema", True),
    ),
    ({"response_format": {"type": "regex", "pattern": "a+"}}, Constraint(REGEX, "a+", "response_format.pattern")),
    ({"response_format": {"type": "regex", "value": "a+"}}, Constraint(REGEX, "a+", "response_format.value")),
    ({"response_format": {"type": "grammar", "grammar": GBNF}}, Constraint(AS_GBNF, GBNF, "response_format.grammar")),
    ({"response_format": {"type": "grammar", "grammar": LARK}}, Constraint(AS_LARK, LARK, "response_format.grammar")),
    ({"response_format": {"type": "lark", "value": LARK}}, Constraint(AS_LARK, LARK, "response_format.value")),
    ({"response_format": {"type": "gbnf", "grammar": GBNF}}, Constraint(AS_GBNF, GBNF, "response_format.grammar")),
    ({"response_format": {"type": "choice", "choice": ["a"]}}, Constraint(CHOICE, ["a"], "response_format.choice")),
    ({"json_schema": SCHEMA}, Constraint(JSON, SCHEMA, "json_schema")),
    ({"json_schema": json.dumps(SCHEMA)}, Constraint(JSON, SCHEMA, "json_schema")),
    ({"json_schema": True}, Constraint(JSON, True, "json_schema")),
    ({"grammar": GBNF}, Constraint(AS_GBNF, GBNF, "grammar")),
    ({"grammar": "start ::= root\nroot ::= start"}, Constraint(AS_GBNF, "start ::= root\nroot ::= start", "grammar")),
    ({"grammar": LARK}, Constraint(AS_LARK, LARK, "grammar")),
    ({"ebnf": GBNF}, Constraint(AS_GBNF, GBNF, "ebnf")),
    ({"regex": "a"}, Constraint(REGEX, "a", "regex")),
    ({"structured_outputs": {"json": SCHEMA}}, Constraint(JSON, SCHEMA, "structured_outputs.json")),
    ({"structured_outputs": {"json": "{}"}}, Constraint(JSON, {}, "structured_outputs.json")),
    ({"structured_outputs": {"json_object": True}}, Constraint(OBJECT, where="structured_outputs.json_object")),
    (
        {"structured_outputs": {"regex": "a", "json": None, "disable_any_whitespace": True}},
        Constraint(REGEX, "a", "structured_outputs.regex"),
    ),
    ({"structured_outputs": {"choice": ["a", ""]}}, Constraint(CHOICE, ["a", ""], "structured_outputs.choice")),
    ({"structured_outputs": {"grammar": LARK}}, Constraint(AS_LARK, LARK, "structured_outputs.grammar")),
    ({"guided_json": SCHEMA}, Constraint(JSON, SCHEMA, "guided_json")),
    ({"guided_json_object": True}, Constraint(OBJECT, where="guided_json_object")),
    ({"guided_regex": "a"}, Constraint(REGEX, "a", "guided_regex")),
    ({"guided_choice": ["a"]}, Constraint(CHOICE, ["a"], "guided_choice")),
    ({"guided_grammar": GBNF}, Constraint(AS_GBNF, GBNF, "guided_grammar")),
]


@pytest.mark.parametrize("fields, meant", SPELLINGS, ids=lambda case: str(case)[:60])
def test_every_spelling_is_understood(fields: dict[str, Any], meant: Constraint) -> None:
    assert read(fields) == meant
    body = json.dumps({"prompt": "Hi", **fields}).encode()
    assert constraint_of(BodyDecoder().decode(body, CompletionRequest)) == meant


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"grammar": ""},
        {"ebnf": ""},
        {"guided_json_object": False},
        {"structured_outputs": {"json_object": False}},
        dict.fromkeys(("json_schema", "grammar", "regex", "structured_outputs", "guided_json", "guided_choice")),
    ],
    ids=str,
)
def test_what_asks_for_nothing_is_no_constraint(fields: dict[str, Any]) -> None:
    assert read(fields) is None


LARGE = "a" * (64 << 10)
DEEP: Any = {"type": "object"}
for _ in range(70):
    DEEP = {"items": DEEP}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": [1]}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": [], "name": "n"}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "name": 1}}},
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
        "response_format.json_schema.strict",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_object", "schema": 1}}, "response_format.schema"),
    ({"response_format": {"type": "regex"}}, "response_format.pattern"),
    ({"response_format": {"type": "regex", "pattern": 1}}, "response_format.pattern"),
    ({"response_format": {"type": "grammar", "grammar": ""}}, "response_format.grammar"),
    ({"response_format": {"type": "choice", "choice": {}}}, "response_format.choice"),
    ({"json_schema": 5}, "json_schema"),
    ({"json_schema": "{"}, "json_schema"),
    ({"json_schema": "7"}, "json_schema"),
    ({"json_schema": '"' + LARGE + '"'}, "json_schema"),
    ({"grammar": 5}, "grammar"),
    ({"grammar": LARGE + "é"}, "grammar"),
    ({"ebnf": []}, "ebnf"),
    ({"regex": ""}, "regex"),
    ({"regex": LARGE + "a"}, "regex"),
    ({"structured_outputs": "json"}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"regex": {}}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"grammar": ["a"]}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"guided_json": 1}, "guided_json"),
    ({"guided_json_object": "yes"}, "guided_json_object"),
    ({"guided_regex": 1}, "guided_regex"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a"] * 5000}, "guided_choice"),
    ({"guided_choice": [LARGE, "a"]}, "guided_choice"),
    ({"guided_choice": [1]}, "guided_choice[0]"),
    ({"guided_grammar": ""}, "guided_grammar"),
]


@pytest.mark.parametrize("fields, named", WRONG, ids=lambda case: str(case)[:60])
def test_every_wrong_value_names_its_field(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidField) as caught:
        read(fields)
    assert caught.value.field == named and len(str(caught.value)) < 300


NAMES = {
    "response_format": {"type": "json_object"}, "json_schema": SCHEMA, "grammar": LARK, "ebnf": GBNF, "regex": "a",
    "structured_outputs": {"regex": "a"}, "guided_json": SCHEMA, "guided_json_object": True, "guided_regex": "a",
    "guided_choice": ["a"], "guided_grammar": GBNF,
}  # fmt: skip


@pytest.mark.parametrize("second", list(NAMES)[1:])
def test_two_constraints_at_once_are_refused_and_both_named(second: str) -> None:
    for first in NAMES:
        if first != second:
            with pytest.raises(InvalidField) as caught:
                read({name: NAMES[name] for name in (first, second)})
            assert caught.value.field in (first, second) and first in str(caught.value) and second in str(caught.value)
    beside = {"response_format": {"type": "text"}, second: NAMES[second]}
    assert read(beside) is not None, "text is no constraint"
