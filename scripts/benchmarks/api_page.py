"""Writes the reference of the HTTP API, docs/API.md, from the document that the server tells (`scripts/api`).

With `--check` nothing is written: exit code 1 where the page is not what the document says.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from homeserve.server.openapi import document, path_of
from homeserve.server.route import EVENTS, JSON
from homeserve.server.routes import ROUTES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "API.md"
_REFERENCE = "#/components/schemas/"
INTRO = """# The HTTP API

Made from the table of routes by `scripts/api`; a test holds page and table equal. A running server tells the same at
`/openapi.json` (OpenAPI 3.1). [CLIENTS.md](CLIENTS.md) says how to point programs at it.

- Every field may be null, which means "not said". Fields that are not listed are ignored, and named in the log once.
- A field of a wrong type or out of its range is 400, and the error names it.
- Errors have OpenAI's shape ([Error](#error)), on `/v1/messages` Anthropic's ([AnthropicError](#anthropicerror)).
- With `--api-key-file` a key is sent as `Authorization: Bearer KEY` or `x-api-key: KEY`. Where the page says *open*,
  none is needed. Every other route may answer 401 `unauthorized`, and every route 403 to pages of other sites and 500.
- Every answer has `x-request-id`: the one that was sent, or a new one.
- Streams are server-sent events; a comment or a ping keeps a silent one open every 15 s.
"""


def told() -> dict[str, Any]:
    """The document as JSON values."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(document(ROUTES)))
    return found


def page(of: dict[str, Any]) -> str:
    """The reference."""
    schemas = of["components"]["schemas"]
    bodies = {route.body.__name__ for route in ROUTES if route.body is not None}
    lines = [INTRO, *_contents(of)]
    for tag in of["tags"]:
        lines += [f"## {tag['name']}", ""]
        for route in ROUTES:
            if route.tag == tag["name"]:
                lines += _route(
                    route.method, path_of(route), of["paths"][path_of(route)][route.method.lower()], schemas
                )
    lines += ["## Objects", ""]
    for name, schema in schemas.items():
        if name not in bodies:
            lines += [f"### {name}", "", *_object(schema)]
    return "\n".join(lines).rstrip() + "\n"


def _contents(of: dict[str, Any]) -> Iterator[str]:
    yield "| route | what for |"
    yield "|---|---|"
    for route in ROUTES:
        name = f"{route.method} {path_of(route)}"
        yield f"| [`{name}`](#{_anchor(name)}) | {route.says} |"
    yield ""


def _anchor(title: str) -> str:
    """How a heading is linked to, by the rules of GitHub."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _route(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    yield f"### {method} {path}"
    yield ""
    yield operation["summary"] + (" *Open.*" if not operation["security"] else "")
    yield ""
    if "requestBody" in operation:
        name = operation["requestBody"]["content"][JSON]["schema"]["$ref"].removeprefix(_REFERENCE)
        yield from _object(schemas[name])
    yield "| status | answer |"
    yield "|---:|---|"
    for status, answer in operation["responses"].items():
        if status not in ("401", "403", "500"):
            yield f"| {status} | {_answer(answer)} |"
    yield ""
    stream = operation["responses"].get("200", {}).get("content", {}).get(EVENTS)
    if stream is not None:
        yield from _events(stream["schema"])


def _answer(answer: dict[str, Any]) -> str:
    kinds = []
    for kind, content in answer.get("content", {}).items():
        if kind == EVENTS:
            continue
        schema = content.get("schema", {})
        # An error's schema is the shape of errors, and the codes of this status, which its words name already.
        shapes = [part for part in schema.get("anyOf", [schema]) if "allOf" not in part]
        words = [_word(shape) for shape in shapes if "$ref" in shape]
        kinds.append(" or ".join(words) if words else "" if kind == JSON else f"`{kind}`")
    said = [answer["description"], *(f"{kind}." for kind in kinds if kind)]
    return " ".join(said)


def _events(schema: dict[str, Any]) -> Iterator[str]:
    yield f"With `stream: true`: {schema['description']}"
    yield ""
    yield "| event | data |"
    yield "|---|---|"
    for form in schema["anyOf"]:
        data = form["properties"]["data"]
        name = form["properties"].get("event", {}).get("const", "")
        if "contentSchema" in data:
            yield f"| {f'`{name}`' if name else ''} | {_word(data['contentSchema'])} |"
    yield ""


def _object(schema: dict[str, Any]) -> Iterator[str]:
    if "description" in schema:
        yield schema["description"].replace("\n", " ")
        yield ""
    fields = schema.get("properties", {})
    if not fields:
        return
    required = set(schema.get("required", ()))
    yield "| field | type | |"
    yield "|---|---|---|"
    for name, field in fields.items():
        mark = "" if name in required else " ?"
        yield f"| `{name}`{mark} | {_word(field)} | {field.get('description', '').replace('|', chr(92) + '|')} |"
    yield ""


def _word(schema: dict[str, Any]) -> str:
    """A type in words."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_REFERENCE)
        return f"[{name}](#{_anchor(name)})"
    if "anyOf" in schema:
        words = dict.fromkeys(_word(part) for part in schema["anyOf"])
        return " or ".join(words)
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema.get("type", "anything")
    if kind == "array":
        items = [_word(item) for item in schema.get("prefixItems", [])]
        inner = schema.get("items")
        of = f"[{', '.join(items)}]" if items else f"list of {_word(inner)}" if isinstance(inner, dict) else "list"
        return of + _range(schema, "minItems", "maxItems")
    if kind == "object":
        inner = schema.get("additionalProperties")
        return (f"object of {_word(inner)}" if isinstance(inner, dict) and inner else "object") + _range(
            schema, "minProperties", "maxProperties"
        )
    return str(kind) + _range(schema, "minimum", "maximum") + _range(schema, "minLength", "maxLength", " characters")


def _range(schema: dict[str, Any], low: str, high: str, of: str = "") -> str:
    """` (0 to 1)`; empty without bounds."""
    least, most = schema.get(low), schema.get(high)
    if low == "minimum" and "exclusiveMinimum" in schema:
        least = f"over {schema['exclusiveMinimum']}"
    if least is not None and most is not None:
        return f" ({least} to {most}{of})"
    if most is not None:
        return f" (at most {most}{of})"
    return f" (at least {least}{of})" if least is not None else ""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/api", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")
    given = parser.parse_args(argv)
    wanted = page(told())
    stale = not PAGE.exists() or PAGE.read_text() != wanted
    if stale and not given.check:
        PAGE.write_text(wanted)
    if stale:
        print(f"{PAGE.relative_to(ROOT)} {'is stale' if given.check else 'written'}")
    print(f"{len(ROUTES)} routes")
    return 1 if given.check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
