"""`/openapi.json`: the API in OpenAPI 3.1, made of the table of routes and the types that it names.

Nothing is described twice. Bodies are the structs against which requests are decoded, so a limit there is the limit
here; what a string below a field of a struct says is the field's description. Errors come from the error tree: each
status of a route lists the codes that it may have. What is told of answers is held against real ones by tests.

A route that streams has `text/event-stream` beside its JSON. OpenAPI 3.1 has no words for streams; as OpenAPI 3.2 does
with `itemSchema`, the schema there is that of one event, an object of the strings `event` (where events have names) and
`data`, and `contentSchema` says what the JSON in `data` is.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from aiohttp import web

from homeserve import __version__
from homeserve.errors import FlipNotBegun, Forbidden, RateLimited, RequestError, RequestFailed, Unauthorized
from homeserve.server.answer_schemas import AnthropicError, Error
from homeserve.server.bodies import encode
from homeserve.server.keys import is_open
from homeserve.server.rate_limits import is_limited
from homeserve.server.route import EVENTS, JSON, Answer, ErrorShape, Route, Stream

VERSION = "3.1.0"
_SCHEMAS = "#/components/schemas/"
_EDGE: tuple[type[RequestError], ...] = (Unauthorized, Forbidden, RateLimited, RequestFailed)
"""What the edge may answer on every route."""
_SHAPES: dict[ErrorShape, type[msgspec.Struct]] = {ErrorShape.OPENAI: Error, ErrorShape.ANTHROPIC: AnthropicError}
_CODES: dict[type[RequestError], dict[int, tuple[str, ...]]] = {
    Forbidden: {403: ("forbidden_host", "forbidden_origin")},
    FlipNotBegun: {
        400: ("bad_target",),
        409: ("already_there", "does_not_fit", "flip_off", "flip_running", "not_ready", "single_rank"),
    },
}
"""Errors whose code is not their class's."""
_WORDS = {
    400: "The request cannot be used as it is.",
    401: "A key is needed.",
    403: "A page of another site asks.",
    404: "There is no such thing.",
    409: "Not now.",
    413: "The body is too large.",
    429: "The queue is full, or the client's limits are used up; `Retry-After` says when to try again.",
    500: "It failed; the message has the request's id and nothing else.",
    503: "Nothing is taken now: the model is being loaded, or the server shuts down.",
    507: "It does not fit into memory, even alone.",
}
_PARAMETER = re.compile(r"\{(?P<name>\w+)(?::[^{}]*)?\}")
_DESCRIPTION = """An LLM server for the box you have at home.

Every answer has the header `x-request-id`: the one that was sent, or a new one. Fields that are not listed are ignored.
A field that is null is as if it were not there. Beyond what is listed, each route answers 405 to another method, and
anything that is no HTTP gets 400 as plain text. A connection too many gets 503 `too_many_connections`. Where clients
are limited (`--rate-limit-requests`, `--rate-limit-tokens`), answers that count have OpenAI's `x-ratelimit-*` headers.
"""


class Document:
    """The document as bytes, made once."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes
        self._bytes: bytes | None = None
        self._turn = asyncio.Lock()

    async def body(self) -> bytes:
        async with self._turn:
            if self._bytes is None:
                self._bytes = await asyncio.to_thread(lambda: encode(document(self._routes)))
            return self._bytes


DOCUMENT = web.AppKey("document", Document)


async def get_openapi(request: web.Request) -> web.StreamResponse:
    return web.Response(body=await request.app[DOCUMENT].body(), content_type=JSON)


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The document of `routes` as plain values."""
    types = list(_types(routes))
    # msgspec describes what is named; the references say under which name it stands.
    references, schemas = msgspec.json.schema_components(types, ref_template=_SCHEMAS + "{name}")
    described = dict(zip(types, references, strict=True))
    _describe_fields(types, schemas)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(path_of(route), {})[route.method.lower()] = _operation(route, described)
    return {
        "openapi": VERSION,
        "info": {"title": "homeserve", "version": __version__, "description": _DESCRIPTION},
        "servers": [{"url": "/"}],
        "tags": [{"name": name} for name in dict.fromkeys(route.tag for route in routes)],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "headers": {"x-request-id": {"description": "The request's id.", "schema": {"type": "string"}}},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "A key of `--api-key-file`."},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same."},
            },
        },
    }


def path_of(route: Route) -> str:
    """The route's path as OpenAPI writes it: `/v1/models/{id}`."""
    return _PARAMETER.sub(r"{\g<name>}", route.path)


def codes_of(error: type[RequestError]) -> dict[int, tuple[str, ...]]:
    """The statuses that an error may have, with the codes of each."""
    return _CODES.get(error, {error.status: (error.code,)})


# ----------------------------------------------------------------------------------------------------------- operations


def _operation(route: Route, described: dict[Any, Any]) -> dict[str, Any]:
    names = [found["name"] for found in _PARAMETER.finditer(route.path)]
    made: dict[str, Any] = {
        "operationId": _operation_id(route),
        "summary": route.says,
        "tags": [route.tag],
        # Keys are a setting of the server: with one or without one, as it was started.
        "security": [] if is_open(route.path) else [{}, {"bearer": []}, {"key": []}],
        "responses": _responses(route, described),
    }
    if names:
        made["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if route.body is not None:
        made["requestBody"] = {"required": not route.bare, "content": {JSON: {"schema": described[route.body]}}}
    return made


def _operation_id(route: Route) -> str:
    """`post_v1_chat_completions`"""
    return "_".join([route.method.lower(), *re.findall(r"\w+", path_of(route))])


def _responses(route: Route, described: dict[Any, Any]) -> dict[str, Any]:
    made: dict[int, dict[str, Any]] = {}
    for answer in route.answers:
        made[answer.status] = _answer(answer, described)
    if route.stream is not None:
        content = made[route.answers[0].status].setdefault("content", {})
        content[EVENTS] = {"schema": _event(route.stream, described)}
    for status, codes in sorted(_codes(route).items()):
        _add_error(made, status, codes, described[_SHAPES[route.error_shape]], route.error_shape)
    return {str(status): made[status] for status in sorted(made)}


def _answer(answer: Answer, described: dict[Any, Any]) -> dict[str, Any]:
    headers: dict[str, Any] = {"x-request-id": {"$ref": "#/components/headers/x-request-id"}}
    for name, says in answer.headers.items():
        headers[name] = {"description": says, "schema": {"type": "string"}}
    made: dict[str, Any] = {"description": answer.says, "headers": headers}
    if answer.schema is not None:
        made["content"] = {answer.kind: {"schema": described[answer.schema]}}
    elif answer.kind:
        made["content"] = {answer.kind: {}}
    for kind in answer.also:
        made["content"][kind] = {}
    return made


def _event(stream: Stream, described: dict[Any, Any]) -> dict[str, Any]:
    """The schema of one event."""
    forms: list[dict[str, Any]] = []
    for name, kinds in stream.events.items():
        data = {
            "type": "string",
            "contentMediaType": JSON,
            "contentSchema": _any_of([described[kind] for kind in kinds]),
        }
        if name:
            properties = {"event": {"const": name}, "data": data}
            forms.append({"title": name, "properties": properties, "required": ["event", "data"]})
        else:
            done = {"title": "the end", "properties": {"data": {"const": "[DONE]"}}, "required": ["data"]}
            forms += [{"title": "an event", "properties": {"data": data}, "required": ["data"]}, done]
    return {"type": "object", "description": stream.says, "anyOf": forms}


def _add_error(
    made: dict[int, dict[str, Any]], status: int, codes: Sequence[str], shape: dict[str, Any], error_shape: ErrorShape
) -> None:
    """Describe errors of a status; one that is an answer too (health's 503) stays what it is, or the error."""
    schema = shape
    if error_shape is ErrorShape.OPENAI:
        code = {"properties": {"code": {"enum": sorted(codes)}}}
        schema = {"allOf": [shape, {"properties": {"error": code}}]}
    known = made.get(status)
    if known is not None:
        content = known["content"][JSON]
        content["schema"] = _any_of([content["schema"], schema])
        return
    said = ", ".join(f"`{code}`" for code in sorted(codes))
    error = Answer(f"{_WORDS[status]} {said}", status=status, kind="", headers=_error_headers(status))
    made[status] = _answer(error, {}) | {"content": {JSON: {"schema": schema}}}


def _error_headers(status: int) -> dict[str, str]:
    if status == 401:
        return {"WWW-Authenticate": "Bearer"}
    return {"Retry-After": "Seconds."} if status == 429 else {}


def _any_of(schemas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}


def _codes(route: Route) -> dict[int, list[str]]:
    """Statuses of the route's errors and the edge's, with their codes."""
    found: dict[int, list[str]] = {}
    for error in dict.fromkeys((*route.errors, *_EDGE)):
        if error is Unauthorized and is_open(route.path):
            continue
        if error is RateLimited and not is_limited(route.method, route.path):
            continue
        for status, codes in codes_of(error).items():
            known = found.setdefault(status, [])
            known += [code for code in codes if code not in known]
    return found


# ---------------------------------------------------------------------------------------------------------------- types


def _types(routes: Iterable[Route]) -> Iterator[Any]:
    """Every type that the table names, each once."""
    seen: set[Any] = {None}
    for route in routes:
        answers = [answer.schema for answer in route.answers]
        events = [kind for kinds in route.stream.events.values() for kind in kinds] if route.stream is not None else []
        for kind in (route.body, *answers, *events, _SHAPES[route.error_shape]):
            if kind not in seen:
                seen.add(kind)
                yield kind


def _describe_fields(types: Iterable[Any], schemas: dict[str, Any]) -> None:
    """Give fields the strings that stand below them in their class."""
    sources = _Sources()
    for kind, names in _classes(types).items():
        # Where two classes have one name, msgspec writes the module before it.
        schema = schemas.get(f"{kind.__module__}.{kind.__name__}") or schemas.get(kind.__name__) or {}
        for name, says in sources.fields_of(kind).items():
            field = schema.get("properties", {}).get(names.get(name))
            if field is not None:
                field.setdefault("description", says)


def _classes(types: Iterable[Any]) -> dict[type, dict[str, str]]:
    """Every class that is reached from `types`: name of a field -> its name in JSON."""
    found: dict[type, dict[str, str]] = {}
    level: list[Any] = list(msgspec.inspect.multi_type_info(types))
    while level:
        at = level.pop()
        if isinstance(at, msgspec.inspect.StructType | msgspec.inspect.DataclassType):
            if at.cls in found:
                continue
            found[at.cls] = {field.name: field.encode_name for field in at.fields}
        if isinstance(at, msgspec.inspect.Type | msgspec.inspect.Field):
            level += [getattr(at, name) for name in at.__struct_fields__]
        elif isinstance(at, tuple):
            level += at
    return found


class _Sources:
    """Strings below fields. Python keeps none of them, so the modules' texts are read; where there is no text (a
    frozen program), fields have no description."""

    def __init__(self) -> None:
        self._classes: dict[str, dict[str, dict[str, str]]] = {}

    def fields_of(self, kind: type) -> dict[str, str]:
        """Name of a field -> what is said of it, also of those that are inherited."""
        found: dict[str, str] = {}
        for base in reversed(kind.__mro__):
            found |= self._module(base.__module__).get(base.__name__, {})
        return found

    def _module(self, name: str) -> dict[str, dict[str, str]]:
        if name not in self._classes:
            try:
                tree = ast.parse(inspect.getsource(sys.modules[name]))
            except (OSError, TypeError):
                tree = ast.Module([], [])
            self._classes[name] = {node.name: _said(node) for node in tree.body if isinstance(node, ast.ClassDef)}
        return self._classes[name]


def _said(node: ast.ClassDef) -> dict[str, str]:
    """What stands below each field of a class."""
    found = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            found[field.target.id] = " ".join(below.value.value.split())
    return found
