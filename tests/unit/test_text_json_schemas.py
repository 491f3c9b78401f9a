"""Schemas on their way to a grammar: what is taken off, what is closed, and what can never end."""

from __future__ import annotations

from typing import Any

import pytest

from homeserve.text.json_schemas import SEPARATORS, can_end, prepared


def bare(schema: Any, strict: bool = False) -> dict[str, Any]:
    made = prepared(schema, strict=strict)
    assert made.pop("x-guidance") == {**SEPARATORS, "lenient": not strict}
    return made


def test_annotations_go_and_properties_of_their_names_stay() -> None:
    schema = {
        "title": "T", "description": "D", "$comment": "C", "type": "object",
        "properties": {"title": {"type": "string", "title": "x", "examples": [1]}, "default": {"const": {"title": 1}}},
        "required": ["title"], "x-guidance": {"whitespace_flexible": True},
    }  # fmt: skip
    assert bare(schema, strict=True) == {
        "type": "object",
        "properties": {"title": {"type": "string"}, "default": {"const": {"title": 1}}},
        "required": ["title"],
        "additionalProperties": False,
    }
    assert "title" in schema, "what came in is as it was"


OPEN: list[Any] = [
    {"type": "object"},
    {"type": "object", "properties": {}},
    {"properties": {"a": {}}, "additionalProperties": True},
    {"properties": {"a": {}}, "additionalProperties": {"type": "string"}},
    {"properties": {"a": {}}, "patternProperties": {"^x": {}}},
    {"properties": {"a": {}}, "required": ["b"]},
    {"properties": {"a": {}}, "minProperties": 3},
    {"properties": {"a": {}}, "anyOf": [{"required": ["b"]}]},
    {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
    {"properties": {"x": {"$ref": "#/$defs/a", "required": ["b"]}}, "$defs": {"a": {"properties": {"a": {}}}}},
    {"items": {"allOf": [{}]}, "properties": {"a": {}}},
]


@pytest.mark.parametrize("schema", OPEN, ids=str)
def test_what_may_need_other_properties_stays_open(schema: Any) -> None:
    assert bare(schema) == schema


def test_objects_that_list_their_properties_are_closed_wherever_they_are() -> None:
    inner = {"properties": {"a": {"type": "null"}}}
    schema = {"$defs": {"d": inner}, "anyOf": [inner, {"items": inner}, {"$ref": "#/$defs/d"}]}
    closed = {**inner, "additionalProperties": False}
    assert bare(schema) == {"$defs": {"d": closed}, "anyOf": [closed, {"items": closed}, {"$ref": "#/$defs/d"}]}


def test_booleans_are_schemas() -> None:
    assert bare(True) == {} and bare(False) == {"enum": []}


def node(**more: Any) -> dict[str, Any]:
    return {"$ref": "#/$defs/n", "$defs": {"n": more}}


NEXT = {"properties": {"next": {"$ref": "#/$defs/n"}}}
ENDLESS: list[Any] = [
    {"$ref": "#"},
    node(type="object", **NEXT, required=["next"]),
    node(type="array", items={"$ref": "#/$defs/n"}, minItems=1),
    node(type="array", prefixItems=[{"type": "null"}, {"$ref": "#/$defs/n"}], minItems=2),
    node(anyOf=[{"$ref": "#/$defs/n"}, {"type": "object", **NEXT, "required": ["next"]}]),
    node(allOf=[{"type": "object"}, {"$ref": "#/$defs/n"}]),
    {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
            "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]},
        },
    },
    {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
]
ENDING: list[Any] = [
    {}, True, False, {"$ref": "http://elsewhere"}, {"$ref": "#/nowhere"},
    node(type="object", **NEXT),
    node(type=["object", "null"], **NEXT, required=["next"]),
    node(**NEXT, required=["next"]),
    node(type="object", properties={"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}, required=["next"]),
    node(type="array", items={"$ref": "#/$defs/n"}),
    node(type="array", prefixItems=[{"type": "null"}, {"$ref": "#/$defs/n"}], minItems=1),
    {"type": "object", "properties": {"x~/y": {"$ref": "#/properties/z"}, "z": {"type": "null"}}, "required": ["x~/y"]},
]  # fmt: skip


@pytest.mark.parametrize("schema", ENDLESS, ids=str)
def test_what_holds_itself_for_ever_cannot_end(schema: Any) -> None:
    assert not can_end(schema)


@pytest.mark.parametrize("schema", ENDING, ids=str)
def test_recursion_that_may_stop_can_end(schema: Any) -> None:
    assert can_end(schema)
