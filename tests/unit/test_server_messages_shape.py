"""Answers as Anthropic's API writes them: made-up pieces in, blocks and events out, read by the client's own types."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent
from pydantic import TypeAdapter

from homeserve.engine.request import GenerateCall
from homeserve.errors import QueueFull, RequestFailed
from homeserve.server.answer_schemas import AnthropicError
from homeserve.server.ask import Ask
from homeserve.server.choice import Piece, join
from homeserve.server.messages_schemas import (
    BlockDelta,
    BlockStart,
    BlockStop,
    MessageAnswer,
    MessageEnd,
    MessagePing,
    MessageStart,
    MessageStop,
)
from homeserve.server.messages_shape import MessageShape
from homeserve.server.prompts import Prompt
from homeserve.server.shape import Counts, Event, Told
from homeserve.server.timing import timing_block
from homeserve.text.answer import Part, PartKind
from homeserve.wire.records import Sampling

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
MESSAGE: TypeAdapter[Any] = TypeAdapter(AnthropicMessage)
BETA_EVENTS: TypeAdapter[Any] = TypeAdapter(BetaRawMessageStreamEvent)
BETA_MESSAGE: TypeAdapter[Any] = TypeAdapter(BetaMessage)
SCHEMAS: dict[str, Any] = {
    "message_start": MessageStart,
    "content_block_start": BlockStart,
    "content_block_delta": BlockDelta,
    "content_block_stop": BlockStop,
    "message_delta": MessageEnd,
    "message_stop": MessageStop,
    "ping": MessagePing,
    "error": AnthropicError,
}
COUNTS = Counts(prompt=50, completion=7, cached=32, thought=3)


def told(counts: Counts = COUNTS) -> Told:
    class Times:
        submitted, scheduled, first_token, finished, flips_crossed, restarts = 1.0, 1.5, 2.0, 3.0, 0, 0

    times: Any = Times()
    return Told(lambda: counts, lambda: timing_block("r", [times], counts=counts))


def shape(max_tokens: int = 100, room: int = 1000, **more: Any) -> MessageShape:
    call = GenerateCall("r.0", (1,), Sampling(), max_tokens=min(max_tokens, room), end_tokens=frozenset())
    ask = Ask((Prompt((1,)),), 1, (call,), (), **more)
    return MessageShape(ask, max_tokens=max_tokens, request_id="r", model="tiny")


def text(said: str) -> Part:
    return Part(PartKind.TEXT, said)


def thought(said: str) -> Part:
    return Part(PartKind.THOUGHT, said)


def call(number: int, arguments: str = "", name: str = "", id: str = "") -> Part:
    return Part(PartKind.CALL, arguments, number, name, id)


WHOLE = (
    Piece((thought("I "),), (1,)),
    Piece((), (2,)),
    Piece((thought("think"), text("Let me ")), (3,)),
    Piece((text("look."), call(0, "", "get_weather", "call_1"), call(0, '{"city": ')), (4,)),
    Piece((call(0, '"Paris"}'), call(1, "", "now", "call_2")), (5,)),
    Piece((), (6,), finish="tool_calls"),
)
BLOCKS = [
    {"type": "thinking", "thinking": "I think", "signature": "homeserve"},
    {"type": "text", "text": "Let me look."},
    {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Paris"}},
    {"type": "tool_use", "id": "call_2", "name": "now", "input": {}},
]


def streamed(pieces: tuple[Piece, ...], made: MessageShape | None = None) -> list[Event]:
    made = made or shape()
    events = made.begin(told())
    for piece in pieces:
        events += made.piece(0, piece, told())
    return events + made.end(told())


def accumulated(events: list[Event]) -> dict[str, Any]:
    """What a client makes of a stream: blocks grow by their deltas, the end overwrites what the beginning said."""
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    for event in (event.data for event in events):
        EVENTS.validate_python(event)
        BETA_EVENTS.validate_python(event)
        if event["type"] == "message_start":
            message = dict(event["message"])
            assert message["content"] == []
        elif event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"] = [*message["content"], dict(event["content_block"])]
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            block, delta = message["content"][-1], event["delta"]
            name = delta["type"].removesuffix("_delta")
            if name == "input_json":
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
                assert block["type"] == "tool_use"
            else:
                block[name] += delta[name]
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"], "homeserve": event["homeserve"]}
    for index, arguments in inputs.items():
        message["content"][index]["input"] = msgspec.json.decode(arguments)
    return message


def check(event: Event) -> None:
    """The event is what its type says, with nothing more and nothing less."""
    assert event.name == event.data["type"]
    assert msgspec.to_builtins(msgspec.convert(event.data, SCHEMAS[event.name])) == event.data


# --------------------------------------------------------------------------------------------------------------- events


def test_each_kind_of_part_is_a_block_of_its_own() -> None:
    events = streamed(WHOLE)
    for event in events:
        check(event)
    assert [event.name for event in events if event.name != "content_block_delta"] == [
        "message_start",
        *("content_block_start", "content_block_stop") * 4,
        "message_delta",
        "message_stop",
    ]
    starts = [event.data for event in events if event.name == "content_block_start"]
    assert [start["index"] for start in starts] == [0, 1, 2, 3]
    assert [start["content_block"]["type"] for start in starts] == ["thinking", "text", "tool_use", "tool_use"]
    deltas = [event.data["delta"] for event in events if event.name == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == [
        *("thinking_delta", "thinking_delta", "signature_delta"),
        *("text_delta", "text_delta"),
        *("input_json_delta", "input_json_delta"),
    ]
    assert events[-2].data["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_a_stream_adds_up_to_the_body() -> None:
    whole = shape().body([join(WHOLE)], told())
    MESSAGE.validate_python(whole)
    BETA_MESSAGE.validate_python(whole)
    assert msgspec.to_builtins(msgspec.convert(whole, MessageAnswer)) == whole
    assert whole["content"] == BLOCKS
    assert accumulated(streamed(WHOLE)) == whole


def test_the_message_begins_with_the_first_token_when_it_is_known_what_was_cached() -> None:
    made = shape()
    assert made.begin(told(Counts(50, 0, 0))) == []
    ping = made.ping()
    assert ping is not None and ping == Event({"type": "ping"}, "ping")
    check(ping)
    (start,) = made.piece(0, Piece((), (1,)), told())
    usage = start.data["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (18, 32)
    assert start.data["message"]["content"] == [] and start.data["message"]["stop_reason"] is None


def test_cached_tokens_are_counted_once() -> None:
    for usage in (shape().body([join(WHOLE)], told())["usage"], streamed(WHOLE)[-2].data["usage"]):
        assert usage == {
            "input_tokens": 18,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 32,
            "output_tokens": 7,
            "output_tokens_details": {"thinking_tokens": 3},
        }


def test_the_last_events_tell_how_it_was_made() -> None:
    assert streamed(WHOLE)[-2].data["homeserve"]["ttft_ms"] == 1000.0
    assert shape().body([join(WHOLE)], told())["homeserve"]["cached_tokens"] == 32


def test_an_answer_of_nothing_has_no_blocks() -> None:
    events = streamed((Piece((), (1,), finish="stop"),))
    assert [event.name for event in events] == ["message_start", "message_delta", "message_stop"]
    assert accumulated(events)["content"] == []
    assert shape().body([Piece(finish="stop")], told())["content"] == []


def test_thoughts_that_the_client_does_not_hear_leave_no_trace() -> None:
    events = streamed(WHOLE, shape(thought_told=False))
    starts = [event.data for event in events if event.name == "content_block_start"]
    assert [(start["index"], start["content_block"]["type"]) for start in starts] == [
        (0, "text"),
        (1, "tool_use"),
        (2, "tool_use"),
    ]
    assert "think" not in str([event.data["delta"] for event in events if event.name == "content_block_delta"])
    assert shape(thought_told=False).body([join(WHOLE)], told())["content"] == BLOCKS[1:]


def test_a_failure_in_a_stream_is_an_event_of_anthropics() -> None:
    for error, kind in ((RequestFailed("r"), "api_error"), (QueueFull(3), "rate_limit_error")):
        event = shape().error(error)
        check(event)
        assert event.data["error"]["type"] == kind and event.data["request_id"] == "r"


# ---------------------------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize(
    ("piece", "reason", "sequence"),
    [
        (Piece((text("a"),), (1,), finish="stop"), "end_turn", None),
        (Piece((text("a"),), (1,), finish="length"), "max_tokens", None),
        (Piece((text("a"),), (1,), finish="stop", stop_matched=True, stop="END"), "stop_sequence", "END"),
        (Piece((call(0, "{}", "f", "c"),), (1,), finish="tool_calls"), "tool_use", None),
        (Piece((call(0, "{", "f", "c"),), (1,), finish="length"), "max_tokens", None),
        (Piece((call(0, "{", "f", "c"),), (1,), finish="tool_calls", stop="END"), "stop_sequence", "END"),
    ],
)
def test_why_an_answer_ended(piece: Piece, reason: str, sequence: str | None) -> None:
    ends = {"stop_reason": reason, "stop_sequence": sequence}
    whole = shape().body([piece], told())
    MESSAGE.validate_python(whole)
    assert {name: whole[name] for name in ends} == ends
    assert streamed((piece,))[-2].data["delta"] == ends


def test_an_answer_that_filled_the_context_says_so() -> None:
    cut = Piece((text("a"),), (1,), finish="length")
    whole = shape(max_tokens=100, room=60).body([cut], told())
    MESSAGE.validate_python(whole)
    assert whole["stop_reason"] == "model_context_window_exceeded"
    assert shape(max_tokens=60, room=60).body([cut], told())["stop_reason"] == "max_tokens"
    assert shape(max_tokens=0, room=60).body([cut], told())["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("arguments", ['{"city": "Par', "[1]", "nothing", '{"a":' * 5000])
def test_arguments_that_are_no_object_are_none_in_a_body(arguments: str, caplog: pytest.LogCaptureFixture) -> None:
    piece = Piece((call(0, arguments, "f", "c"),), (1,), finish="length")
    with caplog.at_level(logging.WARNING):
        whole = shape().body([piece], told())
    MESSAGE.validate_python(whole)
    assert whole["content"] == [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]
    assert "are no JSON object" in caplog.text and "'f'" not in caplog.text, "names are the client's"
    deltas = [event.data["delta"] for event in streamed((piece,)) if event.name == "content_block_delta"]
    assert deltas == [{"type": "input_json_delta", "partial_json": arguments}]
