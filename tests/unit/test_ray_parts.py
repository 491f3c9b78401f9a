"""What the Ray integration decides without Ray: which text routes, which routes pass, how a loss is told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from homeserve.errors import SettingError
from homeserve.integrations import ray
from homeserve.integrations.ingress import PASSED_ON, lost_event
from homeserve.integrations.prefix import ROUTED_CHARACTERS, prefix_text
from homeserve.integrations.replica import Head, whole_events
from homeserve.server.routes import ROUTES


def text(path: str = "/v1/chat/completions", **fields: Any) -> str:
    return prefix_text(path, json.dumps(fields).encode())


# --------------------------------------------------------------------------------------------------------------- prefix

SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "Hello"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}


def test_the_next_turn_begins_like_the_one_before() -> None:
    first = text(messages=[SYSTEM, HELLO], temperature=0.3)
    second = text(messages=[SYSTEM, HELLO, CALL, {"role": "tool", "content": "42"}], seed=1)
    assert second.startswith(first) and len(second) > len(first)


def test_parts_are_texts_like_texts() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
    assert text(messages=[SYSTEM, parts]) == text(messages=[SYSTEM, HELLO])


def test_what_a_template_writes_first_comes_first() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert text(system="A", tools=tools, messages=[HELLO]).startswith("A" + json.dumps(tools, sort_keys=True))
    assert text("/v1/responses", instructions="A", input="B") == "AB"
    assert text(prompt="A") == "A" and text(prompt=[1, 23]) == "1,23,"
    assert text(messages=[HELLO]) != text(messages=[{**HELLO, "role": "system"}])


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"null", b"{}", b'{"messages": [[[[[[[[[["deep"]]]]]]]]]]}', b"\xff", b'"x"']
)
def test_a_body_without_a_text_has_the_path(body: bytes) -> None:
    """Ray's router divides by the length of the text."""
    assert prefix_text("/v1/models", body) == "/v1/models"


def test_a_body_that_is_too_deep_for_a_parser_is_no_error() -> None:
    assert prefix_text("/p", b"[" * 100_000) == "/p"


def test_long_prompts_are_cut() -> None:
    assert len(text(prompt="x" * 10 * ROUTED_CHARACTERS)) == ROUTED_CHARACTERS
    assert len(text(prompt=list(range(5000)))) == ROUTED_CHARACTERS


# --------------------------------------------------------------------------------------------------------------- routes

OF_ONE_BOX = (
    "/",
    "/metrics",
    "/v1/models/{id",
    "/v1/homeserve/",
    "/static/",
)
"""Beginnings of routes that are not passed on, or, as models by name, by their beginning."""


def test_every_route_is_passed_on_or_of_one_box() -> None:
    """A new route has to be put into PASSED_ON, or told here to be of one box."""
    mine = {(route.method, route.path) for route in ROUTES}
    assert mine >= PASSED_ON
    for method, path in sorted(mine - PASSED_ON):
        assert path == "/" or path.startswith(OF_ONE_BOX[1:]), (method, path)


# -------------------------------------------------------------------------------------------------------------- streams


async def pieces(*given: bytes) -> AsyncIterator[bytes]:
    for each in given:
        yield each


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([b"data: 1\n\ndata: 2\n\n"], [b"data: 1\n\ndata: 2\n\n"]),
        ([b"data: 1\n\nda", b"ta: 2", b"\n", b"\n"], [b"data: 1\n\n", b"data: 2\n\n"]),
        ([b": ping\n\n", b"x"], [b": ping\n\n", b"x"]),
        ([b"", b"\n", b"\n"], [b"\n\n"]),
        ([], []),
    ],
)
async def test_streams_are_cut_between_events_only(given: list[bytes], expected: list[bytes]) -> None:
    assert [piece async for piece in whole_events(pieces(*given))] == expected


def test_a_loss_is_told_in_the_shape_of_the_route() -> None:
    kind, data = lost_event("/v1/messages?beta=true").decode().rstrip("\n").split("\n")
    assert kind == "event: error" and json.loads(data[6:])["type"] == "error"
    kind, data = lost_event("/v1/responses").decode().rstrip("\n").split("\n")
    assert kind == "event: error" and json.loads(data[6:])["code"] == "server_error"
    told = lost_event("/v1/chat/completions")
    assert told.endswith(b"\n\n") and json.loads(told[6:])["error"]["code"] == "replica_lost"


def test_a_stream_is_known_by_its_type() -> None:
    assert Head(200, (("content-type", "text/event-stream; charset=utf-8"),)).is_stream
    assert not Head(200, (("content-type", "application/json"),)).is_stream


# -------------------------------------------------------------------------------------------------------------- options


def test_words_of_serve_run_become_options() -> None:
    options = ray.Options.of(
        {"model": "m.gguf", "flags": "--context 512 --model-id 'a b'", "replicas": "2", "gpus": "0.5"}
    )
    assert options.replicas == 2 and options.gpus == 0.5
    assert options.arguments() == ["m.gguf", "--context", "512", "--model-id", "a b"]


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ({"replica": 2}, "replica"),
        ({"replicas": "two"}, "replicas"),
        ({"replicas": -1}, "below 0"),
        ({"cpus": "nan"}, "cpus"),
    ],
)
def test_a_word_that_cannot_be_used_is_named(args: dict[str, Any], word: str) -> None:
    with pytest.raises(SettingError, match=word):
        ray.Options.of(args)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(ray, "import_module", missing)
    with pytest.raises(SettingError) as told:
        ray.app({})
    assert "homeserve[ray]" in str(told.value.fix)
    with pytest.raises(SettingError, match="no prefix-aware router"):
        ray.router_path()


@pytest.mark.parametrize(
    ("flags", "word"), [("--prt 1", "--prt"), ("--port 8001", "every replica has its own"), ("--context x", "context")]
)
def test_flags_are_checked_before_anything_is_deployed(flags: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "_ray_serve", lambda: None)
    with pytest.raises(SettingError, match=word):
        ray.build_app(ray.Options(flags=flags))


class Cluster:
    """Of the module `ray` what is asked."""

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def nodes() -> list[dict[str, Any]]:
        boxes = [{"CPU": 8.0}, {"CPU": 8.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 1.0}, {}]
        dead = {"Alive": False, "Resources": {"CPU": 8.0, "GPU": 2.0}}
        return [dead, *({"Alive": True, "Resources": box} for box in boxes)]


@pytest.mark.parametrize(("gpus", "found"), [(0.0, 3), (1.0, 2), (2.0, 1)])
def test_a_replica_for_each_box_that_has_what_it_takes(
    gpus: float, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "import_module", lambda name: Cluster)
    assert ray._boxes(ray.Options(gpus=gpus)) == found


def test_no_box_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "import_module", lambda name: Cluster)
    with pytest.raises(SettingError, match="no box"):
        ray._boxes(ray.Options(gpus=3.0))
