"""JSON schemas drawn at random, requests whose answers must fit them, and the check that they do.

A schema is one of what strict modes allow: closed objects with required and optional properties, arrays, strings with
lengths, enums and patterns, numbers with bounds, `anyOf`, references, all of it nested. Most say how long things may
become, because a model that draws hot ends nothing by itself; a few do not, and are cut off.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema

Schema = dict[str, Any]
MAX_TOKENS = 160
NAMES = ("id", "name", "kind", "items", "a b", "größe", "x-1", "ok", "next", "t")
WORDS = ("red", "green", 'a "b"', "ä\n", "", "null", "0")
PATTERNS = ("^[a-f]{2,4}$", "^\\d{3}-\\d{2}$", "^(foo|bar)+z?$")
DEPTH = 3


def schema_of(seed: int) -> Schema:
    """An object; the same for the same seed."""
    draw = random.Random(f"schema {seed}")
    schema = _object(draw, DEPTH)
    if draw.random() < 0.3:
        schema["$defs"] = {"part": _any(draw, 1)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        schema["required"].append("part")
    return schema


def _any(draw: random.Random, depth: int) -> Schema:
    leaves: list[Callable[[random.Random], Schema]] = [_string, _string, _integer, _number, _enum, _simple]
    if depth <= 0 or draw.random() < 0.5:
        return draw.choice(leaves)(draw)
    return draw.choice((_object, _array, _any_of))(draw, depth)


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(NAMES, draw.randint(1, 4))
    required = [name for name in names if draw.random() < 0.7]
    properties = {name: _any(draw, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 2)
    return {"type": "array", "items": _any(draw, depth - 1), "minItems": least, "maxItems": least + draw.randint(0, 2)}


def _any_of(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(draw, depth - 1) for _ in range(draw.randint(2, 3))]}


def _string(draw: random.Random) -> Schema:
    kind = draw.random()
    if kind < 0.05:
        return {"type": "string"}
    if kind < 0.3:
        return {"type": "string", "pattern": draw.choice(PATTERNS), "maxLength": 12}
    least = draw.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 5)}


def _integer(draw: random.Random) -> Schema:
    least = draw.randint(-2000, 2000)
    return {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 3000)}


def _number(draw: random.Random) -> Schema:
    return (
        {"type": "number"} if draw.random() < 0.1 else {"type": "number", "minimum": 0, "maximum": 9, "multipleOf": 1}
    )


def _enum(draw: random.Random) -> Schema:
    return {"enum": draw.sample((*WORDS, 7, -1, True, None), draw.randint(1, 4))}


def _simple(draw: random.Random) -> Schema:
    return {"type": draw.choice(("boolean", "null"))}


def body_of(seed: int, **more: Any) -> dict[str, Any]:
    """A completion that has to fit `schema_of(seed)`, drawn hot."""
    chance = random.Random(f"body {seed}")
    asked = {"type": "json_schema", "json_schema": {"name": "part", "schema": schema_of(seed), "strict": True}}
    return {
        "prompt": f"count {chance.randrange(2, 900)}:",
        "max_tokens": MAX_TOKENS,
        "temperature": 1.5,
        "seed": seed,
        "response_format": asked,
    } | more


def check_answer(seed: int, text: str, finish: str, tokens: int) -> bool:
    """Whether the answer came to its end; then it has to fit."""
    if finish == "length":
        assert tokens == MAX_TOKENS, (seed, tokens, text)
        return False
    assert finish == "stop", (seed, finish, text)
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise AssertionError(f"schema {seed}: {text!r} is no JSON: {error}") from error
    jsonschema.validate(found, schema_of(seed), jsonschema.Draft202012Validator)
    return True


def told_of(ended: Sequence[bool]) -> str:
    return f"{sum(ended)} answers of {len(ended)} came to their end"
