"""What a request says of the form of its answer, under any of the names that clients know, as one `Constraint`.

    response_format     text, json_object, json_schema (OpenAI); regex, grammar, lark, gbnf, choice
    json_schema         a schema                                                    llama.cpp, SGLang
    grammar, ebnf       GBNF or Lark, told apart by how rules are written           llama.cpp, SGLang
    regex               a pattern that the whole answer matches                     SGLang
    structured_outputs  {json, json_object, regex, choice, grammar}                 vLLM
    guided_json, guided_json_object, guided_regex, guided_choice, guided_grammar    vLLM before that

At most one of them may be given: two would have to hold at once, and nobody means that. Here is looked at what can be
seen without a compiler: types, sizes, depth. What a grammar is worth is found out by `homeserve.text.grammars`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from homeserve.errors import InvalidField
from homeserve.server.bodies import depth_of
from homeserve.server.chat_call import Constraint, ConstraintKind
from homeserve.server.fields import DEPTH_LIMIT, Common
from homeserve.text.grammar_wire import GRAMMAR_BYTES_LIMIT

TEXTS_LIMIT: Final = 4096
"""Texts of a choice."""
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)

_Reader = Callable[[Any, str], Constraint]


def constraint_of(fields: Common) -> Constraint | None:
    """What the answer has to be, None for anything. Raises InvalidField."""
    found: list[tuple[str, Constraint]] = []
    for name, read in _FIELDS.items():
        value = getattr(fields, name)
        if value is not None and (constraint := read(value, name)) is not None:
            found.append((name, constraint))
    if len(found) > 1:
        raise InvalidField(found[1][0], f"says what the answer has to be, and {found[0][0]} does so too: give one")
    return found[0][1] if found else None


# -------------------------------------------------------------------------------------------------------------- values


def schema_constraint(value: Any, where: str, *, strict: bool = False) -> Constraint:
    """A JSON schema: an object, `true` or `false`, or the text of one. Raises InvalidField."""
    if isinstance(value, str):
        value = _parsed(value, where)
    if not isinstance(value, dict | bool):
        raise InvalidField(where, "has to be a JSON schema: an object")
    if not depth_of(value, DEPTH_LIMIT):
        raise InvalidField(where, f"is nested more than {DEPTH_LIMIT} levels deep, or too large")
    return Constraint(ConstraintKind.JSON_SCHEMA, value, where, strict)


def _parsed(text: str, where: str) -> Any:
    try:
        return msgspec.json.decode(_text(text, where))
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidField(where, f"is a text that is no JSON: {error}") from None


def _json_object(value: Any, where: str) -> Constraint | None:
    if not isinstance(value, bool):
        raise InvalidField(where, "has to be true or false")
    return Constraint(ConstraintKind.JSON_OBJECT, where=where) if value else None


def _regex(value: Any, where: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, _text(value, where), where)


def _lark(value: Any, where: str) -> Constraint:
    return Constraint(ConstraintKind.LARK, _text(value, where), where)


def _gbnf(value: Any, where: str) -> Constraint:
    return Constraint(ConstraintKind.GBNF, _text(value, where), where)


def _grammar(value: Any, where: str) -> Constraint:
    """GBNF has rules `name ::= …`, Lark has `name: …`."""
    return _gbnf(value, where) if _GBNF_RULE.search(_text(value, where)) else _lark(value, where)


def _optional_grammar(value: Any, where: str) -> Constraint | None:
    """Clients of llama.cpp send an empty one with every request."""
    return None if value == "" else _grammar(value, where)


def _choice(value: Any, where: str) -> Constraint:
    if not isinstance(value, list) or not value:
        raise InvalidField(where, "has to be a list of texts, one at least")
    if len(value) > TEXTS_LIMIT:
        raise InvalidField(where, f"has {len(value)} texts; the limit is {TEXTS_LIMIT}")
    for i, text in enumerate(value):
        if not isinstance(text, str):
            raise InvalidField(f"{where}[{i}]", "has to be a text")
    _check_size("".join(value), where)
    return Constraint(ConstraintKind.CHOICE, list(value), where)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidField(where, "has to be a text")
    if not value:
        raise InvalidField(where, "is empty")
    _check_size(value, where)
    return value


def _check_size(text: str, where: str) -> None:
    if len(text) > GRAMMAR_BYTES_LIMIT or len(text.encode("utf-8", "replace")) > GRAMMAR_BYTES_LIMIT:
        raise InvalidField(where, f"is larger than {GRAMMAR_BYTES_LIMIT >> 10} KiB")


# ------------------------------------------------------------------------------------------------------ response_format


def _response_format(value: Mapping[str, Any], where: str) -> Constraint | None:
    kind = value.get("type")
    if kind is None:
        raise InvalidField(f"{where}.type", "is required")
    if kind == "text":
        return None
    if kind == "json_object":
        if value.get("schema") is not None:  # llama.cpp's way to give a schema
            return schema_constraint(value["schema"], f"{where}.schema")
        return Constraint(ConstraintKind.JSON_OBJECT, where=where)
    if kind == "json_schema":
        return _format_schema(value, where)
    if kind not in _FORMATS:
        known = ", ".join(("text", "json_object", "json_schema", *_FORMATS))
        raise InvalidField(f"{where}.type", f"{kind!r} is none of {known}")
    keys, read = _FORMATS[kind]
    key = next((key for key in keys if value.get(key) is not None), None)
    if key is None:
        raise InvalidField(f"{where}.{keys[0]}", "is required")
    return read(value[key], f"{where}.{key}")


def _format_schema(value: Mapping[str, Any], where: str) -> Constraint:
    """OpenAI's `{json_schema: {name, schema, strict}}`, or llama.cpp's `{schema}`."""
    inner = value.get("json_schema")
    if inner is None and value.get("schema") is not None:
        inner, at = value, where
    elif isinstance(inner, dict):
        at = f"{where}.json_schema"
    else:
        raise InvalidField(f"{where}.json_schema", "is required" if inner is None else "has to be an object")
    for key, kind in (("name", str), ("description", str), ("strict", bool)):
        if inner.get(key) is not None and not isinstance(inner[key], kind):
            raise InvalidField(f"{at}.{key}", f"has to be {'a text' if kind is str else 'true or false'}")
    if inner.get("schema") is None:
        raise InvalidField(f"{at}.schema", "is required")
    return schema_constraint(inner["schema"], f"{at}.schema", strict=bool(inner.get("strict")))


_FORMATS: dict[str, tuple[tuple[str, ...], _Reader]] = {
    "regex": (("pattern", "regex", "value"), _regex),
    "grammar": (("grammar", "value"), _grammar),
    "lark": (("grammar", "lark", "value"), _lark),
    "gbnf": (("grammar", "gbnf", "value"), _gbnf),
    "choice": (("choice", "value"), _choice),
}
"""Types beside OpenAI's: the keys under which their value may stand, and how it is read."""


# --------------------------------------------------------------------------------------------------- structured_outputs


def _structured_outputs(value: Mapping[str, Any], where: str) -> Constraint | None:
    given = [key for key, each in value.items() if each is not None and key not in _NO_MATTER]
    unknown = [key for key in given if key not in _STRUCTURED]
    if unknown:
        raise InvalidField(f"{where}.{unknown[0]}", f"is none of {', '.join(_STRUCTURED)}")
    if len(given) > 1:
        raise InvalidField(f"{where}.{given[1]}", f"and {given[0]} say both what the answer has to be: give one")
    if not given:
        raise InvalidField(where, f"needs one of {', '.join(_STRUCTURED)}")
    return _STRUCTURED[given[0]](value[given[0]], f"{where}.{given[0]}")


_STRUCTURED: dict[str, Callable[[Any, str], Constraint | None]] = {
    "json": schema_constraint,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
_NO_MATTER = frozenset({"disable_fallback", "disable_any_whitespace"})
"""What vLLM's clients may say of how it is done; there is one way here, and it writes no more blanks than two."""

_FIELDS: dict[str, Callable[[Any, str], Constraint | None]] = {
    "response_format": _response_format,
    "json_schema": schema_constraint,
    "grammar": _optional_grammar,
    "ebnf": _optional_grammar,
    "regex": _regex,
    "structured_outputs": _structured_outputs,
    "guided_json": schema_constraint,
    "guided_json_object": _json_object,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
}
