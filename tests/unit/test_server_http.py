"""The server over real sockets, with the real engine on a fleet that answers from a script (`http_world`)."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import socket
import urllib.parse
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import uvloop
import yarl
from http_world import ANSWER, serving

from homeserve.corridor import CorridorSampler
from homeserve.measure import MeasuredBudget, Members
from homeserve.server import sse
from homeserve.server.gate import SPARE


class OneGibFree:
    """A reader of free memory."""

    def __call__(self) -> tuple[int]:
        return (1 << 30,)

    def close(self) -> None: ...


# --------------------------------------------------------------------------------------------------------------- bodies


async def test_a_chat_answer_has_text_usage_and_timings() -> None:
    async with serving() as world:
        status, body = await world.chat(model="tiny")
        assert status == 200
        assert body["object"] == "chat.completion" and body["model"] == "tiny" and body["id"].startswith("chatcmpl-")
        (choice,) = body["choices"]
        assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
        assert choice["finish_reason"] == "stop" and choice["index"] == 0 and choice["logprobs"] is None
        prompt_tokens, completion_tokens = len("user: q\n"), len(ANSWER.encode())
        assert body["usage"] == {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
        told = body["homeserve"]
        assert set(told) == {
            *("request_id", "queue_ms", "ttft_ms", "prefill_ms", "decode_ms", "prefill_tok_s", "decode_tok_s"),
            *("cached_tokens", "flips_crossed", "restarts", "draft"),
        }
        assert told["restarts"] == 0 and told["draft"] is None
        assert told["ttft_ms"] >= told["prefill_ms"] >= 0


async def test_the_limit_of_tokens_ends_an_answer() -> None:
    async with serving() as world:
        _, body = await world.chat(max_tokens=5)
        assert body["choices"][0]["message"]["content"] == "Hi, w"
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 5


async def test_a_code_point_cut_by_the_limit_becomes_a_replacement() -> None:
    async with serving() as world:
        _, body = await world.chat(max_tokens=6)
        assert body["choices"][0]["message"]["content"] == "Hi, w\ufffd"


async def test_a_stop_string_ends_an_answer_and_its_sequence() -> None:
    async with serving() as world:
        _, body = await world.chat(stop=["zzz", ", w"])
        assert body["choices"][0]["message"]["content"] == "Hi"
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == 5
        assert world.running == 0


async def test_choices_are_told_apart_and_the_prompt_counts_once() -> None:
    async with serving() as world:
        _, body = await world.chat(n=3)
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert body["usage"]["prompt_tokens"] == len("user: q\n")
        assert body["usage"]["completion_tokens"] == 3 * len(ANSWER.encode())


async def test_chat_logprobs_carry_bytes_and_alternatives() -> None:
    async with serving() as world:
        _, body = await world.chat(logprobs=True, top_logprobs=2, max_tokens=6)
        content = body["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content[:3]] == ["H", "i", ","]
        assert content[0]["bytes"] == [72] and content[0]["logprob"] == -0.5
        assert content[0]["top_logprobs"][0] == {"token": "A", "logprob": -1.0, "bytes": [65]}
        assert content[0]["top_logprobs"][1]["logprob"] == -9999.0
        assert content[5]["bytes"] == [0xC3]


async def test_completion_logprobs_are_parallel_lists() -> None:
    async with serving() as world:
        _, body = await world.complete(logprobs=1, max_tokens=8)
        choice = body["choices"][0]
        lists = choice["logprobs"]
        assert choice["text"] == "Hi, wör" and body["object"] == "text_completion"
        assert lists["tokens"] == ["H", "i", ",", " ", "w", "bytes:\\xc3", "bytes:\\xb6", "r"]
        assert lists["text_offset"] == [0, 1, 2, 3, 4, 5, 5, 6]
        assert lists["token_logprobs"] == [-0.5] * 8
        assert lists["top_logprobs"][0] == {"A": -1.0, "H": -0.5}


async def test_echo_gives_the_prompt_back_with_its_logprobs() -> None:
    async with serving() as world:
        _, body = await world.complete(echo=True, logprobs=1, max_tokens=2)
        choice = body["choices"][0]
        assert choice["text"] == "abcHi"
        assert choice["logprobs"]["tokens"] == ["a", "b", "c", "H", "i"]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25, -0.5, -0.5]
        assert choice["logprobs"]["top_logprobs"][:2] == [None, {"b": -0.25}]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]


async def test_a_completion_of_no_tokens_scores_the_prompt() -> None:
    async with serving() as world:
        _, body = await world.complete(echo=True, logprobs=0, max_tokens=0)
        choice = body["choices"][0]
        assert choice["text"] == "abc" and choice["finish_reason"] == "length"
        assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25]
        assert body["usage"]["completion_tokens"] == 0


async def test_completions_take_batches_and_ids() -> None:
    async with serving() as world:
        _, body = await world.complete(prompt=["ab", "c"], n=2, max_tokens=2, echo=True)
        assert [choice["text"] for choice in body["choices"]] == ["abHi", "abHi", "cHi", "cHi"]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == 8
        _, body = await world.complete(prompt=[97, 98], max_tokens=1, echo=True, return_token_ids=True)
        choice = body["choices"][0]
        assert choice["text"] == "abH" and choice["token_ids"] == [72] and choice["prompt_token_ids"] == [97, 98]


async def test_token_ids_come_where_asked_for() -> None:
    async with serving() as world:
        _, body = await world.chat(return_token_ids=True, max_tokens=2)
        assert body["prompt_token_ids"] == list(b"user: q\n")
        assert body["choices"][0]["token_ids"] == [72, 105]
        events = await world.chat_stream(return_token_ids=True, max_tokens=2)
        assert events[0]["prompt_token_ids"] == list(b"user: q\n")
        ids = [event["choices"][0].get("token_ids", []) for event in events[:-1]]
        assert sum(ids, []) == [72, 105]


# -------------------------------------------------------------------------------------------------------------- streams


async def test_a_chat_stream_is_role_text_finish_done() -> None:
    async with serving() as world:
        events = await world.chat_stream()
        assert events.pop() == "[DONE]"
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        assert len({event["id"] for event in events}) == 1
        deltas = [event["choices"][0]["delta"] for event in events]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta["content"] for delta in deltas[1:-1]) == ANSWER
        assert deltas[-1] == {}
        finishes = [event["choices"][0]["finish_reason"] for event in events]
        assert finishes == [None] * (len(events) - 1) + ["stop"]
        assert events[-1]["usage"]["completion_tokens"] == len(ANSWER.encode())
        assert events[-1]["homeserve"]["restarts"] == 0
        assert all("usage" not in event and "homeserve" not in event for event in events[:-1])


async def test_include_usage_adds_a_chunk_without_choices() -> None:
    async with serving() as world:
        events = await world.chat_stream(stream_options={"include_usage": True})
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"] == [] and events[-2]["usage"]["completion_tokens"] == len(ANSWER.encode())
        assert "homeserve" in events[-2]
        assert all(event["usage"] is None for event in events[:-2])


async def test_continuous_usage_counts_up() -> None:
    async with serving() as world:
        events = await world.chat_stream(stream_options={"include_usage": True, "continuous_usage_stats": True})
        counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
        assert counts == sorted(counts) and counts[-1] == len(ANSWER.encode())


async def test_a_completion_stream_ends_with_its_finish() -> None:
    async with serving() as world:
        events = await world.stream("/v1/completions", prompt="abc", echo=True, logprobs=0, max_tokens=3)
        assert events.pop() == "[DONE]"
        choices = [event["choices"][0] for event in events]
        assert "".join(choice["text"] for choice in choices) == "abcHi,"
        assert [choice["finish_reason"] for choice in choices][-1] == "length"
        offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
        assert offsets == [0, 1, 2, 3, 4, 5]


async def test_choices_of_a_stream_are_interleaved() -> None:
    async with serving() as world:
        events = await world.chat_stream(n=3)
        texts = {0: "", 1: "", 2: ""}
        order = []
        for event in events[:-1]:
            choice = event["choices"][0]
            texts[choice["index"]] += choice["delta"].get("content", "")
            order.append(choice["index"])
        assert set(texts.values()) == {ANSWER}
        assert order.index(2) < len(order) - 1 - order[::-1].index(0)


async def test_the_first_token_goes_out_before_there_is_a_second() -> None:
    async with serving() as world:
        world.fleet.held = True
        body = {"messages": [{"role": "user", "content": "q"}], "stream": True}
        async with world.client.post(world.url("/v1/chat/completions"), json=body) as response:
            await world.wait_for(lambda: len(world.fleet.kept) > 0)
            world.fleet.release(1)
            text = b""
            while b'"H"' not in text:
                text += await response.content.readany()
            assert b'"i"' not in text
        await world.wait_for(lambda: world.running == 0)


async def test_silence_is_filled_with_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homeserve.server.sse.PING_S", 0.005)
    async with serving() as world:
        world.fleet.held = True
        body = {"messages": [{"role": "user", "content": "q"}], "stream": True}
        async with world.client.post(world.url("/v1/chat/completions"), json=body) as response:
            assert await response.content.readuntil(b"\n\n") == b": ping\n\n"
            world.fleet.held = False
            world.fleet.release()
            assert (await response.content.read()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_aborted(n: int, stream: bool) -> None:
    async with serving() as world:
        world.fleet.held = True
        body = {"messages": [{"role": "user", "content": "q"}], "stream": stream, "n": n}
        asking = asyncio.create_task(world.post("/v1/chat/completions", body))
        await world.wait_for(lambda: world.running == n)
        asking.cancel()
        await world.wait_for(lambda: world.running == 0)
        world.fleet.held = False
        world.fleet.release()
        _, census = await world.get("/v1/homeserve/census")
        assert census["idle"] and census["ok"]


async def test_a_failure_after_the_stream_began_is_an_event(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as world:
        world.fleet.held = True
        asking = asyncio.create_task(world.chat_stream())
        await world.wait_for(lambda: world.running == 1 and bool(world.fleet.kept))
        world.fleet.release(1)
        with caplog.at_level(logging.CRITICAL):
            from homeserve.errors import WorkerLost

            world.fleet.engine._give_up(WorkerLost("the reason"))
        events = await asking
        error = events[-1]["error"]
        assert error["code"] == "server_error" and error["type"] == "server_error"
        assert "the reason" not in json.dumps(events)


async def test_a_stalled_reader_is_let_go() -> None:
    async with serving() as world:
        object.__setattr__(world.context.settings, "stream_stall_s", 0.01)
        world.fleet.script = b"x" * 200
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        stalls = []
        original = sse.EventStream.abandon

        def abandon(stream: sse.EventStream) -> None:
            stalls.append(stream)
            original(stream)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sse.EventStream, "abandon", abandon)
            patch.setattr(sse.EventStream, "write_nowait", lambda stream, data: False)
            patch.setattr(sse.EventStream, "write", _fat_write)
            body = json.dumps({"prompt": "q", "stream": True, "max_tokens": 200}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await world.wait_for(lambda: bool(stalls))
        await world.wait_for(lambda: world.running == 0)
        writer.close()


_write = sse.EventStream.write


async def _fat_write(self: sse.EventStream, data: bytes) -> None:
    """Fills every buffer between the server and a client that does not read."""
    await _write(self, b": " + b"x" * (1 << 20) + b"\n\n")


# ---------------------------------------------------------------------------------------------------- errors and limits


def assert_error(answer: tuple[int, Any], status: int, code: str, param: str | None = None) -> None:
    assert answer[0] == status, answer
    error = answer[1]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code and error["param"] == param


async def test_errors_have_the_openai_shape() -> None:
    async with serving() as world:
        assert_error(await world.get("/v1/nothing"), 404, "not_found")
        assert_error(await world.get("/v1/chat/completions"), 405, "method_not_allowed")
        assert_error(await world.chat(model="other"), 404, "model_not_found", "model")
        assert_error(await world.get("/v1/models/other"), 404, "model_not_found", "model")
        assert_error(await world.chat(temperature="x"), 400, "invalid_field", "temperature")
        assert_error(await world.post("/v1/chat/completions", b"{"), 400, "invalid_field", "body")
        assert_error(await world.complete(prompt="x" * 256), 400, "context_overflow", "prompt")
        assert_error(await world.complete(prompt=[999]), 400, "invalid_field", "prompt[0]")


async def test_the_longest_prompt_that_fits_is_answered() -> None:
    async with serving() as world:
        status, body = await world.complete(prompt="x" * 255)
        assert status == 200 and body["usage"]["completion_tokens"] == 1


async def test_a_bug_is_told_with_the_request_id_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as world:
        answer = await world.post("/v1/completions", {"prompt": "boom"}, headers={"x-request-id": "abc-1"})
        assert_error(answer, 500, "server_error")
        assert "abc-1" in answer[1]["error"]["message"] and "secret" not in json.dumps(answer[1])
        assert any("abc-1" in r.getMessage() and r.exc_info for r in caplog.records)


async def test_request_ids_are_kept_or_made() -> None:
    async with serving() as world:
        for given, kept in (("abc", True), ("a b", False), ("x" * 129, False), ("", False)):
            async with world.client.get(world.url("/health"), headers={"x-request-id": given}) as response:
                assert (response.headers["x-request-id"] == given) is kept
                assert response.headers["x-request-id"]
        async with world.client.post(
            world.url("/v1/chat/completions"),
            json={"messages": [{"role": "user", "content": "q"}], "stream": True},
            headers={"x-request-id": "mine"},
        ) as response:
            assert response.headers["x-request-id"] == "mine"
            assert b'"chatcmpl-mine"' in await response.read()


async def test_a_large_body_is_refused_before_and_while_it_comes() -> None:
    async with serving(body_limit_bytes=1024) as world:
        assert_error(await world.post("/v1/completions", b"x" * 2000), 413, "body_too_large", "body")

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(4):
                yield b"x" * 500

        async with world.client.post(world.url("/v1/completions"), data=chunks()) as response:
            assert_error((response.status, await response.json()), 413, "body_too_large", "body")
        assert (await world.complete())[0] == 200


async def test_a_full_queue_is_429_and_nothing_stays_behind() -> None:
    async with serving(waiting=2) as world:
        world.fleet.held = True
        asking = asyncio.create_task(world.chat(n=6))
        await world.wait_for(lambda: world.running == 6)
        async with world.client.post(world.url("/v1/completions"), json={"prompt": "x"}) as response:
            assert response.headers["Retry-After"] == "1"
            assert_error((response.status, await response.json()), 429, "queue_full")
        asking.cancel()
        await world.wait_for(lambda: world.running == 0)
        asking = asyncio.create_task(world.chat(n=4))
        await world.wait_for(lambda: world.running == 4)
        assert_error(await world.chat(n=4), 429, "queue_full")
        await world.wait_for(lambda: world.running == 4)
        asking.cancel()
        await world.wait_for(lambda: world.running == 0)
        assert_error(await world.chat(n=16), 400, "invalid_field", "n")
        assert_error(await world.complete(prompt=["a"] * 7), 400, "invalid_field", "prompt")
        assert world.running == 0


async def test_loading_is_503_with_progress() -> None:
    async with serving(loaded=False) as world:
        world.state = "loading"
        for path in ("/health", "/ready"):
            status, body = await world.get(path)
            assert status == 503
            assert body == {
                "schema": 1,
                "status": "loading",
                "stage": "reading weights",
                "done_bytes": 3,
                "total_bytes": 10,
            }
        assert_error(await world.chat(), 503, "loading")
        for path in ("census", "budget", "corridor"):
            assert_error(await world.get(f"/v1/homeserve/{path}"), 503, "loading")
        assert (await world.get("/v1/models")) == (200, {"object": "list", "data": []})
        status, body = await world.get("/v1/homeserve/status")
        assert status == 200 and body["state"] == "loading"
        assert body["requests"] == {"running": None, "waiting": None, "finished": None, "aborted": None, "failed": None}
        assert body["model"] == dict.fromkeys(("id", "path", "arch", "quant", "context"))


async def test_health_tells_the_state() -> None:
    async with serving() as world:
        assert await world.get("/health") == (200, {"schema": 1, "status": "ok"})
        assert await world.get("/ready") == (200, {"schema": 1, "status": "ready"})
        world.state = "recovering"
        assert (await world.get("/health"))[0] == 200
        assert (await world.get("/ready"))[0] == 503
        world.state = "draining"
        assert (await world.get("/health"))[0] == 503
        assert_error(await world.chat(), 503, "draining")


async def test_keys(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("# people\nkey-one\nkey-two\n")
    async with serving(api_key_file=str(file)) as world:
        for path in ("/health", "/ready", "/"):
            async with world.client.get(world.url(path)) as response:
                assert response.status == 200
        for headers in (
            {},
            {"Authorization": "Bearer key"},
            {"Authorization": "Basic key-one"},
            {"x-api-key": "# people"},
        ):
            assert_error(await world.get("/v1/models", headers=headers), 401, "unauthorized")
        for headers in (
            {"Authorization": "Bearer key-one"},
            {"authorization": "bearer key-two"},
            {"x-api-key": "key-one"},
        ):
            assert (await world.get("/v1/models", headers=headers))[0] == 200
        for path in ("/metrics", "/v1/none", "/v1/homeserve/budget", "/v1/homeserve/corridor"):
            assert_error(await world.get(path), 401, "unauthorized")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: " + b"b" * 20000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: banana\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\r\n\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"H%d: x\r\n" % i for i in range(300)) + b"\r\n",
    ],
)
async def test_garbage_is_refused_and_the_server_goes_on(garbage: bytes) -> None:
    async with serving() as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(garbage)
        writer.write_eof()
        answer = await reader.read()
        assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))
        writer.close()
        assert (await world.get("/health"))[0] == 200


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"b" * 20000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: banana\r\n\r\n",
    ],
    ids=["TLS", "a long header", "no length"],
)
async def test_an_answer_to_garbage_does_not_name_the_library(garbage: bytes) -> None:
    async with serving() as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(garbage)
        answer = await reader.read()
        writer.close()
        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
        assert b"\r\nServer: homeserve\r\n" in answer and b"\r\nX-Content-Type-Options: nosniff\r\n" in answer
        assert b"aiohttp" not in answer and b"Python/" not in answer


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_connections_beyond_the_limit_are_told_so(
    run: Callable[[Coroutine[Any, Any, None]], None], caplog: pytest.LogCaptureFixture
) -> None:
    """On both loops: they accept connections in different ways."""
    run(_too_many_connections(caplog))


async def _too_many_connections(caplog: pytest.LogCaptureFixture) -> None:
    limit = 1 + SPARE
    async with serving(max_running=1, max_waiting=0) as world:
        links = [socket.create_connection(("127.0.0.1", world.port)) for _ in range(limit)]
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ") and b'"too_many_connections"' in answer
        assert [str(limit) in record.getMessage() for record in caplog.records] == [True]
        writer.close()
        await writer.wait_closed()
        for link in links:
            link.close()
        while b"503" in answer:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = await reader.readline()
            writer.close()
            await writer.wait_closed()
        assert answer.startswith(b"HTTP/1.1 200")


# ------------------------------------------------------------------------------------------------------- other routes


async def test_models_are_listed() -> None:
    async with serving() as world:
        _, body = await world.get("/v1/models")
        (model,) = body["data"]
        assert model["id"] == "tiny" and model["object"] == "model" and model["created"] == 5
        assert model["homeserve"]["state"] == "loaded"
        assert (await world.get("/v1/models/tiny"))[1] == model


async def test_tokenize_and_back() -> None:
    async with serving() as world:
        assert await world.post("/tokenize", {"prompt": "hé"}) == (
            200,
            {"schema": 1, "tokens": [104, 195, 169], "count": 3},
        )
        _, body = await world.post("/tokenize", {"messages": [{"role": "user", "content": "q"}]})
        assert bytes(body["tokens"]) == b"user: q\n"
        assert await world.post("/detokenize", {"tokens": [104, 195, 169]}) == (200, {"schema": 1, "prompt": "hé"})
        assert_error(await world.post("/tokenize", {}), 400, "invalid_field", "prompt")
        assert_error(await world.post("/detokenize", {"tokens": [1, 257]}), 400, "invalid_field", "tokens[1]")
        assert_error(await world.post("/detokenize", {"tokens": [-1]}), 400, "invalid_field", "tokens[0]")


STATUS_KEYS = {
    "model": {"id", "path", "arch", "quant", "context"},
    "vectors": {"weight", "token"},
    "pipeline": {"ranges"},
    "requests": {"running", "waiting", "finished", "aborted", "failed"},
    "kv": {"capacity_tokens", "used_tokens", "cached_tokens", "windows"},
    "prefix": {"lookups", "hits", "hit_tokens"},
    "draft": {"enabled", "why_not", "accept_len", "accept_rate", "by_position", "carried", "uncarried"},
    "flip": {"policy", "committed", "abandoned", "hold_reason", "unarmed_work_count"},
    "layouts_measured": {"pipeline", "tensor"},
    "engine": {"plans_issued", "plans_acked", "loop_lag_ms", "step_overhead_ms"},
    "load": {"stage", "done_bytes", "total_bytes"},
}
PLAIN_KEYS = {"schema", "version", "commit", "state", "layout", "epoch", "memory_domain", "ranks", "events"}
RANK_KEYS = {
    *("rank", "pid", "device", "backend", "isa", "threads", "restarts", "last_seq", "layers", "busy_ms", "idle_ms"),
    *("rss_mib", "lines_mib", "copied_bytes", "collectives"),
}


async def test_status_has_every_key() -> None:
    async with serving() as world:
        await world.chat()
        _, body = await world.get("/v1/homeserve/status")
        assert set(body) >= PLAIN_KEYS | set(STATUS_KEYS)
        for name, keys in STATUS_KEYS.items():
            assert set(body[name]) >= keys, name
        (rank,) = body["ranks"]
        assert set(rank) >= RANK_KEYS
        assert rank["lines_mib"] == {"weights": 3.0} and rank["restarts"] == 2 and rank["isa"] == "avx2"
        assert body["pipeline"]["ranges"] == [[0, 4]]
        assert body["requests"]["finished"] == 1 and body["engine"]["plans_issued"] > 0
        assert body["engine"]["step_overhead_ms"]["p50"] is not None


async def test_budget_and_corridor_are_served_as_they_are_made() -> None:
    async with serving() as world:
        assert_error(await world.get("/v1/homeserve/corridor"), 503, "loading")  # loaded, and nobody has made one
        sampler = CorridorSampler(256 << 20, lambda: "ready", lambda breach: None, OneGibFree())
        sampler.start()
        try:
            await world.wait_for(lambda: any(least for *_, least in sampler.levels()))
            budget = MeasuredBudget({"schema": 1, "plan": {"kv_tokens": 16}}, (), lambda: Members(0, os.getpid(), ()))
            world.context.corridor = sampler
            world.change(budget=budget)
            status, body = await world.get("/v1/homeserve/corridor")
            assert (status, body["schema"], body["floor_mib"], body["period_ms"]) == (200, 1, 256, 100)
            (device,) = body["devices"]
            assert set(device) >= {"index", "min_free_mib", "at", "phase", "breaches", "samples"}
            assert (device["min_free_mib"], device["breaches"], device["samples"][0][1:]) == (1024, 0, [1024, "ready"])
            status, body = await world.get("/v1/homeserve/budget")
            assert (status, body["schema"], body["plan"]) == (200, 1, {"kv_tokens": 16})
            names = {"device", "line", "predicted_mib", "measured_mib", "how"}
            assert all(set(row) == names for row in body["measured"])
            async with world.client.get(world.url("/metrics")) as response:
                assert 'homeserve_corridor_min_free_bytes{device="0"} 1.073741824e+09' in await response.text()
        finally:
            sampler.stop()


async def test_metrics_are_in_the_format_of_prometheus() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    async with serving() as world:
        await world.chat()
        async with world.client.get(world.url("/metrics")) as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            text = await response.text()
        samples = {
            (sample.name, tuple(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert samples["homeserve_prompt_tokens_total", ()] == len("user: q\n")
        assert samples["homeserve_generation_tokens_total", ()] == len(ANSWER.encode())
        assert samples["homeserve_requests_running", ()] == 0 and samples["homeserve_requests_waiting", ()] == 0
        assert samples["homeserve_ttft_seconds_count", ()] == 1
        assert samples["homeserve_inter_token_seconds_count", ()] == len(ANSWER.encode()) - 1
        assert samples["homeserve_worker_restarts_total", (("rank", "0"),)] == 2
        assert samples["homeserve_kv_used_ratio", ()] == 0 and samples["homeserve_epoch", ()] == 0


async def test_two_servers_share_no_metrics() -> None:
    async with serving() as one, serving() as other:
        await one.chat()
        async with other.client.get(other.url("/metrics")) as response:
            assert "homeserve_ttft_seconds_count 0" in await response.text()


async def test_the_page_comes_with_a_strict_policy() -> None:
    async with serving() as world:
        for path, kind in (
            ("/", "text/html"),
            ("/static/chat.js", "text/javascript"),
            ("/static/chat.css", "text/css"),
        ):
            async with world.client.get(world.url(path)) as response:
                assert response.status == 200 and response.content_type == kind
                assert "script-src 'self'" in response.headers["Content-Security-Policy"]
                tag = response.headers["ETag"]
            async with world.client.get(world.url(path), headers={"If-None-Match": tag}) as response:
                assert response.status == 304
        assert (await world.get("/", headers={"Accept": "application/json"}))[1]["model"] == "tiny"
        assert_error(await world.get("/static/../application.py"), 404, "not_found")
        assert_error(await world.get("/static/%2e%2e/application.py"), 404, "not_found")


async def test_no_answer_names_the_library_or_allows_other_origins() -> None:
    async with serving() as world:
        async with world.client.get(world.url("/version"), headers={"Origin": "http://evil"}) as response:
            assert response.status == 403
            assert response.headers["Server"] == "homeserve"
            assert not [name for name in response.headers if name.lower().startswith("access-control")]


async def test_a_server_without_keys_lets_in_programs_and_its_own_page() -> None:
    async with serving() as world:
        body = {"prompt": "abc", "max_tokens": 1}
        own = f"http://127.0.0.1:{world.port}"
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        for headers in ({}, form, {"Origin": own, "Content-Type": "application/json"}, {"Host": "localhost"}):
            assert (await world.post("/v1/completions", body, headers=headers))[0] == 200
        for headers in ({"Origin": "http://evil"}, {"Origin": "null"}, {"Origin": own, "Content-Type": "text/plain"}):
            answer = await world.post("/v1/completions", body, headers=headers)
            assert_error(answer, 403, "forbidden_origin")
            assert answer[1]["error"]["type"] == "permission_error"
        for path in ("/", "/health", "/v1/models"):
            assert_error(await world.get(path, headers={"Host": "evil.example"}), 403, "forbidden_host")
        assert world.running == 0


async def test_keys_open_the_door_to_every_name(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("key\n")
    async with serving(api_key_file=str(file)) as world:
        headers = {"Host": "evil.example", "Origin": "http://evil", "x-api-key": "key"}
        assert (await world.get("/v1/models", headers=headers))[0] == 200


async def test_ids_that_the_model_lacks_never_reach_a_plan() -> None:
    async with serving() as world:
        world.change(model=dataclasses.replace(world.model.model, vocab=200))
        plans = world.fleet.seq
        for fields in ({"stop_token_ids": [200]}, {"logit_bias": {"200": 1}}):
            answer = await world.complete(min_tokens=1, **fields)
            assert_error(answer, 400, "invalid_field", next(iter(fields)))
        assert_error(await world.complete(prompt=[200]), 400, "invalid_field", "prompt[0]")
        assert_error(await world.complete(prompt="\u0438"), 400, "invalid_field", "prompt")
        assert_error(
            await world.chat(messages=[{"role": "user", "content": "\u0438"}]), 400, "invalid_field", "messages"
        )
        assert world.fleet.seq == plans
        assert (await world.post("/detokenize", {"tokens": [97] * 257}))[1]["error"]["param"] == "tokens"


async def test_a_model_that_is_taken_away_is_told_as_that_and_not_as_the_servers_end() -> None:
    """Its engine takes nothing any more, between the lease and the call."""
    async with serving() as world:
        await world.model.engine.drain(0)
        assert_error(await world.chat(), 503, "model_unloaded", "model")
        status, body = await world.post("/v1/embeddings", {"input": "a"})
        assert (status, body["error"]["code"]) == (503, "model_unloaded")


@pytest.mark.parametrize("name", ["a b/ä?x=1&y#z%2F", "tiny"])
async def test_the_address_that_an_unload_tells_is_that_of_the_model(name: str) -> None:
    async with serving() as world:
        world.change(model=dataclasses.replace(world.model.model, id=name))
        path = "/v1/homeserve/models/" + urllib.parse.quote(name, safe="") + "/load"
        async with world.client.post(yarl.URL(world.url(path), encoded=True)) as response:
            told = await response.json()
        assert told["id"] == name
        async with world.client.get(yarl.URL(world.url(told["url"]), encoded=True)) as response:
            assert (await response.json())["id"] == name
