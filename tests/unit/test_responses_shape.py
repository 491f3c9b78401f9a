"""Responses and their events from made-up pieces: text, thoughts, calls, and what cuts them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from http_world import ByteTokenizer
from responses_check import check_response, check_stream

from homeserve.errors import Draining, RequestFailed
from homeserve.server.ask import Terms, ask_for
from homeserve.server.bounds import Bounds
from homeserve.server.choice import Piece, join
from homeserve.server.prompts import Prompt
from homeserve.server.responses_call import responses_call
from homeserve.server.responses_echo import echo_of, summary_of
from homeserve.server.responses_fields import ResponsesRequest
from homeserve.server.responses_shape import ResponsesShape
from homeserve.server.shape import Counts, Told
from homeserve.text.answer import Part, PartKind
from homeserve.wire.records import Logprobs

TIMING = {
    "request_id": "r",
    "queue_ms": 1.0,
    "ttft_ms": 1.0,
    "prefill_ms": 1.0,
    "decode_ms": None,
    "prefill_tok_s": None,
    "decode_tok_s": None,
    "cached_tokens": 3,
    "flips_crossed": 0,
    "restarts": 0,
    "draft": None,
}
TOLD = Told(lambda: Counts(prompt=7, completion=5, cached=3, thought=2), lambda: dict(TIMING))
TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}]


def text(said: str, **more: Any) -> Piece:
    return Piece((Part(PartKind.TEXT, said),), **more)


def thought(said: str) -> Piece:
    return Piece((Part(PartKind.THOUGHT, said),))


def call(number: int, said: str = "", name: str = "") -> Piece:
    return Piece((Part(PartKind.CALL, said, number, name, f"call_{number}" if name else ""),))


def ended(how: str) -> Piece:
    return Piece(finish=how)


def shape_of(*, told: bool = True, **asked: Any) -> ResponsesShape:
    fields = msgspec.convert({"input": "q", **asked}, ResponsesRequest)
    made, tokenizer = responses_call(fields), ByteTokenizer()
    terms = Terms(made.max_tokens, made.logprobs, thought_told=told)
    ask = ask_for(fields, terms, [Prompt((1, 2))], tokenizer, bounds=Bounds(257, 256, 12), request_id="r.1")  # type: ignore[arg-type]
    summaries = summary_of(fields) is not None
    return ResponsesShape(
        ask,
        tokenizer,  # type: ignore[arg-type]
        request_id="r",
        model="tiny",
        echo=echo_of(fields, made, ask),
        summaries=summaries,
    )


def events_of(pieces: list[Piece], **asked: Any) -> list[dict[str, Any]]:
    shape = shape_of(**asked)
    events = [
        *shape.begin(TOLD),
        *(event for piece in pieces for event in shape.piece(0, piece, TOLD)),
        *shape.end(TOLD),
    ]
    assert all(event.name == event.data["type"] for event in events)
    assert not shape.ends_with_done and shape.ping() is None
    return [event.data for event in events]


def response_of(pieces: list[Piece], **asked: Any) -> dict[str, Any]:
    """Of the stream, after the body was seen to be the same."""
    streamed = check_stream(events_of(pieces, **asked))
    body = shape_of(**asked).body([join(pieces)], TOLD)
    check_response(body)
    times = {"created_at": 0, "completed_at": 0}
    assert body | times == streamed | times
    return body


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


ANSWERS = {
    "text": ([text("Hel"), text("lo"), ended("stop")], ["message"]),
    "no text": ([ended("stop")], ["message"]),
    "text with the finish": ([text("Hello", finish="stop")], ["message"]),
    "thought": ([thought("Hm"), thought("m."), text("Yes"), ended("stop")], ["reasoning", "message"]),
    "thought alone": ([thought("Hmm"), ended("length")], ["reasoning"]),
    "call": ([call(0, name="add"), call(0, '{"a"'), call(0, ":1}"), ended("tool_calls")], ["function_call"]),
    "call at once": ([call(0, '{"a":1}', "add"), ended("tool_calls")], ["function_call"]),
    "call without arguments": ([call(0, name="add"), ended("tool_calls")], ["function_call"]),
    "calls": (
        [text("Let me."), call(0, '{"a":1}', "add"), call(1, "{}", "sub"), ended("tool_calls")],
        ["message", "function_call", "function_call"],
    ),
    "all in one piece": (
        [
            Piece(
                (
                    Part(PartKind.THOUGHT, "Hm."),
                    Part(PartKind.TEXT, "So: "),
                    Part(PartKind.CALL, "{}", 0, "add", "call_a"),
                    Part(PartKind.TEXT, "Done."),
                ),
                finish="tool_calls",
            )
        ],
        ["reasoning", "message", "function_call", "message"],
    ),
    "a call that was cut": ([text("x"), call(0, '{"a', "add"), ended("length")], ["message", "function_call"]),
}


@pytest.mark.parametrize("summary", [None, "auto"])
@pytest.mark.parametrize("name", ANSWERS)
def test_every_answer_is_what_openais_types_take(name: str, summary: str | None) -> None:
    pieces, items = ANSWERS[name]
    response = response_of(pieces, tools=TOOLS, reasoning={"summary": summary})
    assert [item["type"] for item in response["output"]] == items
    cut = pieces[-1].finish == "length"
    assert response["status"] == ("incomplete" if cut else "completed")
    assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)
    statuses = [item["status"] for item in response["output"]]
    assert statuses == ["completed"] * (len(items) - 1) + ["incomplete" if cut else "completed"]
    assert (response["completed_at"] is None) == cut


def test_a_text_goes_out_in_openais_order() -> None:
    assert kinds(events_of([text("Hel"), text("lo"), ended("stop")])) == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed"),
    ]


def test_a_thought_and_calls_go_out_in_openais_order() -> None:
    pieces = [thought("Hm"), call(0, name="add"), call(0, "{}"), call(1, "[]", "sub"), ended("tool_calls")]
    told = kinds(events_of(pieces))
    assert told == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    summed = kinds(events_of(pieces, reasoning={"generate_summary": "detailed"}))
    assert summed[2:8] == [
        *("output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
    ]


def test_every_event_has_the_next_number() -> None:
    events = events_of([thought("a"), text("b"), call(0, "{}", "add"), ended("tool_calls")])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_arguments_that_are_done_are_those_that_came() -> None:
    pieces = [call(0, '{"a":', "add"), call(0, "1"), call(0, "}"), ended("tool_calls")]
    events = events_of(pieces)
    deltas = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
    (done,) = [event for event in events if event["type"].endswith("arguments.done")]
    assert deltas == ['{"a":', "1", "}"] and done["arguments"] == '{"a":1}' and done["name"] == "add"
    (item,) = events[-1]["response"]["output"]
    assert (item["arguments"], item["call_id"], item["name"]) == ('{"a":1}', "call_0", "add")


def test_an_answer_that_was_cut_is_incomplete() -> None:
    events = events_of([call(0, '{"a', "add"), ended("length")])
    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete" and response["output"][0]["arguments"] == '{"a'


def test_usage_is_told_in_the_names_of_responses() -> None:
    events = events_of([text("x"), ended("stop")])
    assert events[-1]["response"]["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 12,
    }
    assert events[-1]["response"]["homeserve"] == TIMING
    assert events[0]["response"]["usage"] is None and "homeserve" not in events[0]["response"]


def test_thoughts_that_the_client_does_not_hear_are_left_out() -> None:
    response = response_of([thought("Hm"), text("x"), ended("stop")], told=False)
    assert [item["type"] for item in response["output"]] == ["message"]


def test_logprobs_go_out_with_the_text_that_their_tokens_made() -> None:
    entries = [Logprobs(token, -0.5, ((65, -1.0),)) for token in b"H\xc3\xb6!"]
    pieces = [
        text("H", logprobs=(entries[0],)),
        Piece(logprobs=(entries[1],)),
        text("ö", logprobs=(entries[2],)),
        Piece(logprobs=(entries[3],), finish="stop"),
    ]
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    events = events_of(pieces, **asked)
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [[entry["bytes"] for entry in delta] for delta in deltas] == [[[72]], [[0xC3], [0xB6]]]
    (content,) = response_of(pieces, **asked)["output"][0]["content"]
    assert [entry["bytes"] for entry in content["logprobs"]] == [[72], [0xC3], [0xB6], [33]]
    assert content["logprobs"][0]["top_logprobs"] == [{"token": "A", "logprob": -1.0, "bytes": [65]}]
    assert response_of(pieces)["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("error", [RequestFailed("r"), Draining("the server is shutting down")])
def test_a_failure_has_what_was_said_and_no_more(error: Any) -> None:
    shape = shape_of()
    events = [*shape.begin(TOLD), *shape.piece(0, text("Hel"), TOLD), shape.error(error)]
    response = check_stream([event.data for event in events])
    assert events[-1].name == "response.failed" and response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": error.message}
    (item,) = response["output"]
    assert item["status"] == "incomplete" and item["content"][0]["text"] == "Hel"


def test_a_response_repeats_the_settings_in_force() -> None:
    schema = {"type": "object"}
    response = response_of(
        [text("{}"), ended("stop")],
        tools=[*TOOLS, {"type": "web_search"}],
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
        text={"format": {"type": "json_schema", "name": "n", "schema": schema}, "verbosity": "low"},
        reasoning={"effort": "low"},
        store=True,
        truncation="auto",
        service_tier="flex",
        metadata={"a": "b"},
        instructions="Be brief.",
        temperature=0,
        max_output_tokens=9,
        parallel_tool_calls=False,
        prompt_cache_key="k",
    )
    assert response["tools"] == [{**TOOLS[0], "description": None}]
    assert response["text"]["format"] == {"type": "json_schema", "name": "n", "schema": schema, "strict": False}
    assert (response["store"], response["truncation"], response["service_tier"]) == (False, "disabled", "default")
    assert (response["temperature"], response["top_p"], response["max_output_tokens"]) == (0.0, 1.0, 9)
    assert (response["instructions"], response["metadata"]) == ("Be brief.", {"a": "b"})
    assert response["parallel_tool_calls"] is False and response["reasoning"] == {"effort": "low", "summary": None}
