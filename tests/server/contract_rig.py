"""What tests of the API's contract share: the document as the server tells it, and cases made from it.

schemathesis makes bodies from the document and holds answers against it: status, media type, headers, schema, and the
data of each event of a stream. Here the document is made stricter first: an answer may have no field that it does not
name. Three kinds of cases:

    as told   the body fits the document; rules between fields may still refuse it, so 400 is an answer
    broken    the body does not fit the document: anything but an error of the client is a failure
    grafted   a body that works, with a few fields of one that fits: this is what gets through to the engine
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from homeserve.server.openapi import path_of
from homeserve.server.routes import ROUTES

TIMEOUT_S = 30.0
"""For one answer. Nobody hangs; a machine that is busy answers later."""
TOKENS = 4
"""The most that a case may generate."""
GRAFTS = 4
_UNUSED = {"positive_data_acceptance", "use_after_free", "ensure_resource_availability", "object_level_authorization"}
"""The first would have every body accepted that fits the document; rules between fields are not in it. The others are
of APIs that keep things."""
_TURN = [{"role": "user", "content": "Say hello."}]
WORKING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _TURN, "max_tokens": TOKENS},
    "/v1/completions": {"prompt": "Say hello.", "max_tokens": TOKENS},
    "/v1/messages": {"messages": _TURN, "max_tokens": TOKENS},
    "/v1/messages/count_tokens": {"messages": _TURN},
    "/v1/responses": {"input": "Say hello.", "max_output_tokens": TOKENS},
    "/v1/responses/input_tokens": {"input": "Say hello."},
    "/v1/embeddings": {"input": "Say hello."},
    "/tokenize": {"prompt": "Say hello."},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/v1/homeserve/flip": {"to": "tensor"},
    "/v1/homeserve/models/{id}/unload": {"force": False},
}
"""A body for each route that takes one; that none is missing is a test."""
GENERATING = tuple(path for path, body in WORKING.items() if TOKENS in body.values())
POSTS = tuple(path_of(route) for route in ROUTES if route.body is not None)
QUESTIONS = tuple((route.method, path_of(route)) for route in ROUTES if route.body is None)
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of", "min_tokens")


def strict(document: dict[str, Any]) -> dict[str, Any]:
    """The document with answers that may have no field beyond those named."""
    made = copy.deepcopy(document)
    schemas = made["components"]["schemas"]
    for name in _reached(made, "responses") - _reached(made, "requestBody"):
        if "properties" in schemas[name]:
            schemas[name]["additionalProperties"] = False
    return made


def _reached(document: dict[str, Any], part: str) -> set[str]:
    """Components that this part of operations refers to, by whatever way."""
    found: set[str] = set()
    level = [operation.get(part) for path in document["paths"].values() for operation in path.values()]
    while level:
        at = level.pop()
        if isinstance(at, dict):
            name = str(at.get("$ref", "")).removeprefix("#/components/schemas/")
            if name in document["components"]["schemas"] and name not in found:
                found.add(name)
                level.append(document["components"]["schemas"][name])
            level += at.values()
        elif isinstance(at, list):
            level += at
    return found


class Contract:
    """A server and what it says of itself. `told` counts answers by status."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.session = requests.Session()
        self.document = self.session.get(f"{url}/openapi.json", timeout=TIMEOUT_S).json()
        self.schema = schemathesis.openapi.from_dict(strict(self.document))
        self.schema.config.update(base_url=url)
        self.told: Counter[tuple[str, int]] = Counter()
        self.undrawn = 0
        """Answers to grammars that this model has no tokens for."""

    def operation(self, method: str, path: str) -> Any:
        return self.schema[path][method]

    def send(self, case: Any, kind: str) -> schemathesis.Response:
        """The answer, which fits the document, or the test fails."""
        response = case.call(session=self.session, timeout=TIMEOUT_S)
        self.told[kind, response.status_code] += 1
        self.undrawn += b"no token could be drawn" in response.content
        case.validate_response(response, excluded_checks=[c for c in CHECKS.get_all() if c.__name__ in _UNUSED])
        return response

    def post(self, path: str, body: Any, **headers: str) -> schemathesis.Response:
        """Send this body; the answer fits the document."""
        names = {"id": "none"} if "{id}" in path else None
        case = self.operation("POST", path).Case(
            body=body, media_type="application/json", headers=headers or None, path_parameters=names
        )
        return self.send(case, "own")

    def get(self, path: str, **names: str) -> schemathesis.Response:
        """Ask for this; the answer fits the document."""
        return self.send(self.operation("GET", path).Case(path_parameters=names or None), "own")

    def run(self, method: str, path: str, kind: str, count: int) -> int:
        """Send `count` cases of a kind. Returns how many were sent: fewer where there are no more."""
        operation, sent = self.operation(method, path), 0
        mode = GenerationMode.NEGATIVE if kind == "broken" else GenerationMode.POSITIVE
        fields = sorted(WORKING.get(path, {}))

        def one(case: Any, data: st.DataObject) -> None:
            nonlocal sent
            if kind == "grafted":
                case.body = _graft(case.body, path, data)
            if kind != "broken" and isinstance(case.body, dict):
                _bound(case.body, fields)
            self.send(case, kind)
            sent += 1

        options = settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        options(given(case=operation.as_strategy(generation_mode=mode), data=st.data())(one))()
        return sent


def _graft(body: Any, path: str, data: st.DataObject) -> dict[str, Any]:
    """A body that works, with some fields of `body` that it does not have."""
    working = WORKING[path]
    names = sorted(body.keys() - working.keys() - {"model"}) if isinstance(body, dict) else []
    chosen = data.draw(st.lists(st.sampled_from(names), max_size=GRAFTS, unique=True)) if names else []
    return {name: body[name] for name in chosen} | working


def _bound(body: dict[str, Any], fields: list[str]) -> None:
    """Keep a body from asking for much: it is the fields that are tried here, not the model's patience."""
    for name in _LIMITS:
        value = body.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > TOKENS:
            body[name] = TOKENS
    for name in ("max_tokens", "max_output_tokens"):
        if name in fields and body.get(name) is None:
            body[name] = TOKENS
