"""Values that are written with bare keys and quotes of their own (`homeserve.text.loose_values`), as rules that fit a
JSON schema: types, properties, what is required, items, enumerations, lengths of texts and references. What else a
schema says of a value (ranges, patterns) is not enforced in such a format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from homeserve.text.lark_rules import LarkRules, texts

_INTEGER = r"/-?(0|[1-9][0-9]{0,17})/"
_NUMBER = r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/"
_KEY = r"/[A-Za-z_][A-Za-z0-9_]*/"
_NOTHING = '""'
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")


class LooseGrammar:
    """Values of one tool. `root`: its schema, in which references point; `quote`: what stands around texts."""

    def __init__(self, rules: LarkRules, root: Any, quote: str, name: str) -> None:
        self._rules = rules
        self._root = root
        self._quote = quote
        self._name = name
        self._references: dict[str, str] = {}

    def object(self, schema: Any) -> str:
        """An object with the braces around it: properties in the order of the schema, other ones where it says none."""
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if not isinstance(properties, Mapping) or not properties:
            if isinstance(schema, Mapping) and schema.get("additionalProperties") is False:
                return '"{}"'
            pair = f'{_KEY} ":" {self._any()}'
            return f'"{{" ({pair} ("," {pair})*)? "}}"'
        required = schema.get("required") or ()
        pairs = [
            (f"{json.dumps(f'{key}:', ensure_ascii=False)} {self.value(of_key)}", key in required)
            for key, of_key in properties.items()
        ]
        return f'"{{" {optional_list(self._rules, self._name, pairs)} "}}"'

    def value(self, schema: Any) -> str:
        """The name of a rule for one value."""
        if not isinstance(schema, Mapping) or not schema:
            return self._any()
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self._referred(reference)
        if "const" in schema or isinstance(schema.get("enum"), list):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return self._rules.one_of(f"{self._name}_enum", (self._constant(value) for value in values))
        for union in ("anyOf", "oneOf"):
            if isinstance(schema.get(union), list):
                return self._rules.one_of(f"{self._name}_any", (self.value(each) for each in schema[union]))
        said = schema.get("type", "object" if "properties" in schema else list(_TYPES))
        types = [said] if isinstance(said, str) else said
        return self._rules.one_of(f"{self._name}_value", (self._of_type(each, schema) for each in types))

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        match kind:
            case "string":
                return self._string(schema)
            case "integer":
                return _INTEGER
            case "number":
                return _NUMBER
            case "boolean":
                return '"true" | "false"'
            case "null":
                return '"null"'
            case "array":
                item = self.value(schema.get("items")) if isinstance(schema.get("items"), Mapping) else self._any()
                return f'"[" ({item} ("," {item})*)? "]"'
            case _:
                return self.object(schema)

    def _string(self, schema: Any = None) -> str:
        return f"{self._rules.written(self._quote)} {self._rules.through(self._quote, f'/{texts(schema)}/')}"

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            quote = self._rules.written(self._quote)
            return f"{quote} {json.dumps(value, ensure_ascii=False)} {quote}"
        return json.dumps(json.dumps(value, ensure_ascii=False), ensure_ascii=False)

    def _referred(self, pointer: str) -> str:
        if pointer not in self._references:
            name = self._references[pointer] = f"{self._name}_ref_{len(self._references)}"
            target: Any = self._root
            for step in pointer.removeprefix("#").strip("/").split("/"):
                step = step.replace("~1", "/").replace("~0", "~")
                target = target.get(step) if step and isinstance(target, Mapping) else target
            self._rules.rule(name, self.value(target))
        return self._references[pointer]

    def _any(self) -> str:
        """Any value, nested as deep as it likes."""
        name = "loose_any"
        pair = f'{_KEY} ":" {name}'
        body = (
            f'{self._string()} | {_NUMBER} | "true" | "false" | "null" | "[" ({name} ("," {name})*)? "]"'
            f' | "{{" ({pair} ("," {pair})*)? "}}"'
        )
        return self._rules.rule(name, body)


def optional_list(
    rules: LarkRules, name: str, items: list[tuple[str, bool]], separator: str = '","', opened: bool = False
) -> str:
    """Items in their order with separators between them, those that are not required at will. Right to left: what
    follows an item depends only on whether anything stands before it."""
    first, later = "", ""  # what may follow where nothing, or something, stands before
    for at in reversed(range(len(items))):
        item, required = items[at]
        begun = f"{item} {later}".strip()
        go_on = f"{separator} {begun}".strip()
        if required:
            first, later = begun, go_on
        else:
            first = rules.rule(f"{name}_first_{at}", f"{begun} | {first or _NOTHING}")
            later = rules.rule(f"{name}_later_{at}", f"{go_on} | {later or _NOTHING}")
        if required and len(items) > 1:
            first, later = rules.rule(f"{name}_first_{at}", first), rules.rule(f"{name}_later_{at}", later)
    return later if opened else first
