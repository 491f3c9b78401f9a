"""Whatever state the server is in, a route answers with a status and a code that the document has for it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from http_world import World, serving

from homeserve.server.keys import is_open
from homeserve.server.openapi import document, path_of
from homeserve.server.route import Route
from homeserve.server.routes import ROUTES

DOCUMENT = document(ROUTES)
GENERATING = [route for route in ROUTES if route.stream is not None]
WITH_BODY = [route for route in ROUTES if route.body is not None]
NEVER_REFUSED = {"/health", "/ready", "/metrics", "/version", "/v1/models", "/v1/homeserve/status", "/openapi.json"}
"""Answered in every state, beside the page."""
_TURN = [{"role": "user", "content": "q"}]


def name(route: Route) -> str:
    return f"{route.method} {path_of(route)}"


def body_of(route: Route) -> dict[str, Any]:
    """A body that works."""
    fields = route.body.__struct_fields__ if route.body is not None else ()
    found: dict[str, Any] = {"messages": _TURN} if "messages" in fields else {}
    for field in ("input", "prompt"):
        if field in fields and not found:
            found[field] = "abc"
    known = {"max_tokens": 3, "max_output_tokens": 3, "tokens": [97], "to": "tensor"}
    return found | {field: value for field, value in known.items() if field in fields}


async def answer(world: World, route: Route, body: Any = None, **headers: str) -> tuple[int, str]:
    """Status and code of an answer that was found to be as described. (The code of Anthropic's shape is its type.)"""
    path = path_of(route).replace("{id}", "1")
    data = body if isinstance(body, bytes) or route.body is None else json.dumps(body or body_of(route)).encode()
    async with world.client.request(route.method, world.url(path), data=data, headers=headers) as response:
        kind = response.content_type
        told = await response.json() if kind == "application/json" else None
        status = response.status
    described = DOCUMENT["paths"][path_of(route)][route.method.lower()]["responses"]
    assert str(status) in described, (status, told)
    content = described[str(status)]["content"]
    assert kind in content, (status, kind)
    if told is not None:
        schema = {**content[kind]["schema"], "components": DOCUMENT["components"]}
        jsonschema.Draft202012Validator(schema).validate(told)
    error = (told.get("error") or {}) if isinstance(told, dict) else {}
    return status, error.get("code") or error.get("type") or ""


async def test_while_the_model_is_being_loaded() -> None:
    async with serving(loaded=False) as world:
        world.state = "loading"
        for route in ROUTES:
            status, code = await answer(world, route)
            path = path_of(route)
            if path in ("/health", "/ready"):
                assert (status, code) == (503, "")
            elif path in NEVER_REFUSED or route.tag == "Page":
                assert status == 200, path
            elif path == "/v1/models/{id}":
                assert status == 404
            else:
                assert status == 503 and code in ("loading", "overloaded_error"), (path, status, code)


async def test_while_it_shuts_down() -> None:
    async with serving() as world:
        world.state = "draining"
        for route in GENERATING:
            status, code = await answer(world, route)
            assert status == 503 and code in ("draining", "overloaded_error"), path_of(route)


async def test_without_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alpha\n")
    async with serving(api_key_file=str(keys)) as world:
        for route in ROUTES:
            status, _ = await answer(world, route)
            assert (status == 401) != is_open(path_of(route)), path_of(route)
            assert (await answer(world, route, **{"x-api-key": "alpha"}))[0] != 401


async def test_for_a_page_of_another_site() -> None:
    async with serving() as world:
        for route in ROUTES:
            status, code = await answer(world, route, Host="attacker.example")
            assert status == 403 and code in ("forbidden_host", "permission_error"), path_of(route)


@pytest.mark.parametrize("route", WITH_BODY, ids=name)
async def test_bodies_that_cannot_be_used(route: Route) -> None:
    async with serving(body_limit_bytes=4096) as world:
        for broken in (b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"a": "\xff"}', b"[" * 4000, b"nul"):
            if route.bare and broken in (b"", b'{"a": "\xff"}'):
                continue  # no body at all, or one of which nothing is read
            status, code = await answer(world, route, broken)
            assert status == 400 and code in ("invalid_field", "invalid_request_error"), broken[:20]
        status, code = await answer(world, route, b" " * 5000)
        assert status == 413 and code in ("body_too_large", "request_too_large")


@pytest.mark.parametrize("route", [route for route in WITH_BODY if "model" in route.body.__struct_fields__], ids=name)
async def test_a_model_that_is_not_here(route: Route) -> None:
    async with serving() as world:
        status, code = await answer(world, route, body_of(route) | {"model": "other"})
        assert status == 404 and code in ("model_not_found", "not_found_error")


@pytest.mark.parametrize("route", GENERATING, ids=name)
async def test_a_full_queue(route: Route) -> None:
    async with serving(waiting=0) as world:
        world.fleet.held = True
        busy = [asyncio.create_task(answer(world, route)) for _ in range(4)]
        try:
            await world.wait_for(lambda: world.running == 4)
            status, code = await answer(world, route)
            assert status == 429 and code in ("queue_full", "rate_limit_error")
        finally:
            for each in busy:
                each.cancel()
            await asyncio.gather(*busy, return_exceptions=True)


async def test_a_method_that_is_not_allowed_and_a_path_that_is_none() -> None:
    async with serving() as world:
        for route in ROUTES:
            path = path_of(route).replace("{id}", "1")
            async with world.client.request("PATCH", world.url(path)) as response:
                assert response.status == 405
                assert route.method in response.headers["Allow"]
                assert (await response.json())["error"]["message"]
        for path in ("/api/version", "/props", "/get_model_info", "/api/v0/models", "/stats", "/v1", "/v2/models"):
            status, told = await world.get(path)
            assert status == 404 and told["error"]["code"] == "not_found"


async def test_head_says_what_get_says_without_a_body() -> None:
    async with serving() as world:
        for route in ROUTES:
            if route.method != "GET" or "homeserve/" in route.path or "{" in route.path:
                continue
            async with world.client.head(world.url(route.path)) as response:
                assert response.status == 200 and await response.read() == b""
                assert response.headers["x-request-id"]
