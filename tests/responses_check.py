"""Whether responses and their streams are what OpenAI's own types and this server's description say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from homeserve.server import responses_schemas as schemas

_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_FINAL = ("response.completed", "response.incomplete", "response.failed")


def check_response(body: dict[str, Any]) -> None:
    """Every field fits OpenAI's type and ours, and there is none that we do not describe."""
    Response.model_validate_json(msgspec.json.encode(body), strict=True)
    assert msgspec.to_builtins(msgspec.convert(body, schemas.Response)) == body


def check_stream(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Types, numbers, the order, and that what is done is what its deltas said. Returns the final response."""
    for number, event in enumerate(events):
        told = _EVENT.validate_json(msgspec.json.encode(event), strict=True)
        assert told.type == event["type"] and event["sequence_number"] == number
        (kind,) = schemas.RESPONSE_EVENTS[event["type"]]
        assert msgspec.to_builtins(msgspec.convert(event, kind)) == event
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in _FINAL and not set(kinds[:-1]) & set(_FINAL)
    final: dict[str, Any] = events[-1]["response"]
    assert kinds[-1] == f"response.{final['status']}"
    items = [event for event in events if "output_index" in event]
    places = [event["output_index"] for event in items]
    assert places == sorted(places), "items come one after the other"
    assert sorted(set(places)) == list(range(len(final["output"])))
    for place, item in enumerate(final["output"]):
        _check_item([event for event in items if event["output_index"] == place], item)
    return final


def _check_item(events: list[dict[str, Any]], item: dict[str, Any]) -> None:
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[0] == "output_item.added" and kinds.count("output_item.added") == 1
    assert all(event.get("item_id", item["id"]) == item["id"] for event in events)
    assert events[0]["item"]["id"] == item["id"] and events[0]["item"]["status"] == "in_progress"
    if kinds[-1] != "output_item.done":
        return  # the response failed in the middle of it
    assert events[-1]["item"] == item
    name, around, text = _written(item)
    deltas = [event["delta"] for event in events if "delta" in event]
    assert "".join(deltas) == text and all(deltas)
    inner = [*around[:1], *[f"{name}.delta"] * len(deltas), f"{name}.done", *around[1:]]
    assert kinds == ["output_item.added", *inner, "output_item.done"]
    (done,) = [event for event in events if event["type"] == f"response.{name}.done"]
    assert done["arguments" if item["type"] == "function_call" else "text"] == text


def _written(item: dict[str, Any]) -> tuple[str, tuple[str, ...], str]:
    """What the events of an item's text are called, what begins and ends its part, and the text."""
    if item["type"] == "function_call":
        return "function_call_arguments", (), item["arguments"]
    if item["type"] == "reasoning" and item["summary"]:
        part = ("reasoning_summary_part.added", "reasoning_summary_part.done")
        return "reasoning_summary_text", part, item["summary"][0]["text"]
    name = "reasoning_text" if item["type"] == "reasoning" else "output_text"
    return name, ("content_part.added", "content_part.done"), item["content"][0]["text"]
