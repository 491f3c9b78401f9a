"""What an argument without quotes is: by the tool's JSON schema where it says so, else by how the value looks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from homeserve.text.loose_values import as_json, in_string, python_literal, word

TEXT = frozenset({"string"})
_REFERENCES_MAX = 8
_NAMES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null",
}  # fmt: skip


def types_of(parameters: Any, key: str) -> frozenset[str]:
    """JSON types that a tool's schema admits for its parameter `key`; empty where it does not say."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return _types(schema, parameters, _REFERENCES_MAX)


def _types(schema: Any, root: Any, depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return frozenset()
    said = schema.get("type")
    if isinstance(said, str):
        return frozenset({said})
    if isinstance(said, list):
        return frozenset(one for one in said if isinstance(one, str))
    if isinstance(schema.get("$ref"), str):
        return _types(_at(root, schema["$ref"]), root, depth - 1)
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(_NAMES.get(type(value), "string") for value in values)
    found: frozenset[str] = frozenset()
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            found |= frozenset().union(*(_types(one, root, depth - 1) for one in schema[name]))
    return found


def _at(root: Any, pointer: str) -> Any:
    """What `#/a/b` points to; None where there is nothing."""
    value = root
    for step in pointer.removeprefix("#").strip("/").split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def argument(text: str, types: frozenset[str]) -> str:
    """The JSON of a bare value. A text stays one where it may be, and is nothing else that may be."""
    string = f'"{in_string(text)}"'
    if types == TEXT:
        return string
    found = _value(text.strip())
    if found is None or not text.strip():
        return string
    kind, written = found
    if "string" in types and kind not in types and not (kind == "integer" and "number" in types):
        return string
    return written


def _value(text: str) -> tuple[str, str] | None:
    """(JSON type, JSON) of what looks like a value: JSON, or a literal of Python; None for a text."""
    try:
        return _NAMES[type(as_json(text))], text
    except (ValueError, RecursionError):
        pass
    if text in ("True", "False"):
        return "boolean", word(text)
    if text == "None":
        return "null", "null"
    if text[:1] in ("[", "{", "("):
        literal = python_literal(text)
        if literal is not None:
            return ("object" if literal[0] == "{" else "array"), literal
    return None
