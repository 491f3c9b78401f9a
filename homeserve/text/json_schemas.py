"""JSON schemas on their way to a grammar: what is taken from them, what is added, and what none can ever fit. Pure.

Blanks. JSON allows any number of them nearly anywhere, and a small model that may write one more may do so until its
tokens run out. So the grammar has the separators `": "` and `", "` and no other blank: what `json.dumps` writes, what
models have seen most on one line, one token in most vocabularies. (Where SmolLM2 might write any blanks, they were a
quarter of what it wrote at temperature 1, a screen of line ends among them; with eight at a time at most, a fifth.)
Whoever wants JSON indented can do that to what he got.

Closed objects. A schema that lists properties and says nothing of others allows any, in JSON Schema. Models that are
asked to write such an object seldom have more to say, and small ones then invent keys without end. What is left out
still fits the schema, so objects that list their properties are closed, unless something in the schema might need them
open (`_may_close`). An `additionalProperties` that is said is kept.

Annotations (titles, descriptions, examples) do not reach the grammar, which travels with every request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

SEPARATORS = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_OPTIONS = "x-guidance"
"""The key under which llguidance looks for its options, at the root."""
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment"}
)
_ONE = ("additionalProperties", "items", "contains", "not", "if", "then", "else", "propertyNames", "additionalItems",
        "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_KEEP_OPEN = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties", "allOf", "anyOf", "oneOf",
     "$ref", "$dynamicRef", "if", "not", "dependentSchemas", "propertyNames"}
)  # fmt: skip

Schema = dict[str, Any] | bool


def prepared(schema: Schema, *, strict: bool) -> dict[str, Any]:
    """The schema as the grammar compiler gets it. `strict` False: keywords that cannot be enforced are left out (and
    told by the compiler)."""
    root = {} if schema is True else {"enum": []} if schema is False else schema
    made = _stripped(root, _may_close(root))
    assert isinstance(made, dict), "the root is an object"
    made[_OPTIONS] = {**SEPARATORS, "lenient": not strict}
    return made


def children(schema: Any) -> Iterator[tuple[str, Any]]:
    """Schemas directly inside `schema`, with the path to each (`properties.a`, `anyOf[0]`)."""
    if not isinstance(schema, dict):
        return
    for key in _ONE:
        if isinstance(schema.get(key), dict | bool):
            yield key, schema[key]
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from ((f"{key}[{i}]", each) for i, each in enumerate(schema[key]))
    for key in _MAPS:
        if isinstance(schema.get(key), dict):
            yield from ((f"{key}.{name}", each) for name, each in schema[key].items())


def all_of(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and every one inside it, booleans left out."""
    if isinstance(schema, dict):
        yield schema
        for _, each in children(schema):
            yield from all_of(each)


def can_end(schema: Schema) -> bool:
    """Whether some finite value may fit. False only where each value would have to hold another one of its own kind:
    what is required of an object, or of an array's first items, leads back to where it began."""
    root = schema
    ending: set[str] = set()
    targets = {found["$ref"] for found in all_of(root) if isinstance(found.get("$ref"), str)}
    grew = True
    while grew:
        new = {ref for ref in targets - ending if _ends(_target(root, ref), ending)}
        ending |= new
        grew = bool(new)
    return _ends(root, ending)


def _ends(schema: Any, ending: set[str]) -> bool:
    if not isinstance(schema, dict):
        return True  # `False` is unsatisfiable for another reason, which the compiler tells
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith("#") and ref not in ending:
        return False
    if not all(_ends(each, ending) for each in _list(schema, "allOf")):
        return False
    for key in ("anyOf", "oneOf"):
        options = _list(schema, key)
        if options and not any(_ends(each, ending) for each in options):
            return False
    kind = schema.get("type")
    if kind == "object":
        return all(_ends(each, ending) for each in _required(schema))
    if kind == "array":
        return all(_ends(each, ending) for each in _first_items(schema))
    return True


def _required(schema: dict[str, Any]) -> Iterator[Any]:
    properties = schema.get("properties")
    for name in _list(schema, "required"):
        if isinstance(properties, dict) and isinstance(name, str) and name in properties:
            yield properties[name]


def _first_items(schema: dict[str, Any]) -> Iterator[Any]:
    """What an array of the fewest items has."""
    fewest = schema.get("minItems", 0)
    if not isinstance(fewest, int) or fewest < 1:
        return
    fixed = _list(schema, "prefixItems")
    yield from fixed[:fewest]
    if fewest > len(fixed) and "items" in schema:
        yield schema["items"]


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _target(root: Any, ref: str) -> Any:
    """What a `#/…` reference points to; True (anything) where it cannot be followed: the compiler tells."""
    if ref == "#":
        return root
    if not ref.startswith("#/"):
        return True
    found = root
    for word in ref[2:].split("/"):
        word = word.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and word.isdecimal() and int(word) < len(found):
            found = found[int(word)]
        elif isinstance(found, dict) and word in found:
            found = found[word]
        else:
            return True
    return found


def _may_close(root: Schema) -> bool:
    """Whether no object of the schema is one of several that hold together: then one that is closed would shut out the
    others' properties."""
    for schema in all_of(root):
        if "allOf" in schema or "$dynamicRef" in schema:
            return False
        if "$ref" in schema and schema.keys() - _ANNOTATIONS - {"$ref", "$defs", "definitions", "$schema", "$id"}:
            return False
    return True


def _stripped(schema: Any, close: bool) -> Any:
    """A copy without annotations; with `close`, objects that list their properties have no others."""
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _ANNOTATIONS or key == _OPTIONS:
            continue
        if key in _MAPS and isinstance(value, dict):
            made[key] = {name: _stripped(each, close) for name, each in value.items()}
        elif key in _LISTS and isinstance(value, list):
            made[key] = [_stripped(each, close) for each in value]
        else:
            made[key] = _stripped(value, close) if key in _ONE else value
    if close and _lists_all(made):
        made["additionalProperties"] = False
    return made


def _lists_all(schema: dict[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not properties or not isinstance(required, list):
        return False
    named = all(isinstance(name, str) and name in properties for name in required)
    return named and not _KEEP_OPEN & schema.keys()
