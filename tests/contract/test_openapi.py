"""The document of the API: valid, whole, and with a description for each code that an error may have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import schemathesis

from homeserve import errors
from homeserve.errors import RequestError
from homeserve.server.application import build_application
from homeserve.server.context import LoadProgress, ServerContext
from homeserve.server.openapi import codes_of, document, path_of
from homeserve.server.route import ErrorShape
from homeserve.server.routes import ROUTES
from homeserve.settings import Settings

ONLY_AT_THE_EDGE = {"ReplicaLost", "UnknownRoute", "WrongMethod"}
"""Errors of paths and methods that are no route, and of what stands before servers."""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(document(ROUTES)))
    return found


def operations(of: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in of["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def test_it_is_valid(told: dict[str, Any]) -> None:
    schemathesis.openapi.from_dict(told).validate()


def test_it_has_every_route_that_the_application_answers(told: dict[str, Any]) -> None:
    models: Any = object()
    context = ServerContext(Settings(), lambda: "loading", lambda: LoadProgress("starting"), models)
    application = build_application(context)
    answered = {
        (route.method, re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.resource.canonical))
        for route in application.router.routes()
        if route.method != "HEAD" and route.resource is not None
    }
    assert answered == {(method, path) for method, path, _ in operations(told)}
    assert len(answered) == len(ROUTES)


def test_every_route_says_what_it_answers() -> None:
    for route in ROUTES:
        assert route.answers, route.path
        assert re.fullmatch(r"[A-Z].*\.", route.says), route.path
        assert all(answer.says for answer in route.answers)


def test_names_of_operations_are_unique(told: dict[str, Any]) -> None:
    names = [operation["operationId"] for _, _, operation in operations(told)]
    assert len(set(names)) == len(names)


def test_every_reference_leads_somewhere_and_every_schema_is_used(told: dict[str, Any]) -> None:
    text = msgspec.json.encode(told).decode()
    found = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert found == set(told["components"]["schemas"])


def test_every_error_of_the_tree_is_of_some_route(told: dict[str, Any]) -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RequestError)]
    wanted = {kind for kind in kinds if kind is not RequestError and kind.__name__ not in ONLY_AT_THE_EDGE}
    assert len(wanted) >= 12
    described: set[tuple[str, str]] = set()
    for _, _, operation in operations(told):
        for status, answer in operation["responses"].items():
            schema = str(answer.get("content", {}).get("application/json", {}))
            described |= {(status, code) for code in re.findall(r"'(\w+)'", schema)}
    missing = [
        (kind.__name__, code)
        for kind in wanted
        for status, codes in codes_of(kind).items()
        for code in codes
        if (str(status), code) not in described
    ]
    assert not missing


def test_errors_have_the_shape_of_their_api(told: dict[str, Any]) -> None:
    for route in ROUTES:
        responses = told["paths"][path_of(route)][route.method.lower()]["responses"]
        name = "AnthropicError" if route.error_shape is ErrorShape.ANTHROPIC else "Error"
        assert f"schemas/{name}'" in str(responses["500"]), route.path
        assert (route.error_shape is ErrorShape.ANTHROPIC) == route.path.startswith("/v1/messages")


def test_what_stands_below_a_field_is_its_description(told: dict[str, Any]) -> None:
    schemas = told["components"]["schemas"]
    assert schemas["Model"]["properties"]["created"]["description"] == "Seconds of the epoch."
    assert schemas["FlipBegun"]["properties"].keys() >= {"from", "to"}


def test_streams_are_described(told: dict[str, Any]) -> None:
    streaming = [route for route in ROUTES if route.stream is not None]
    assert len(streaming) >= 4
    assert all("stream" in route.body.__struct_fields__ for route in streaming if route.body is not None)
    for route in streaming:
        content = told["paths"][path_of(route)]["post"]["responses"]["200"]["content"]
        assert content.keys() == {"application/json", "text/event-stream"}
