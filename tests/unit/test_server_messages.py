"""`/v1/messages` over real sockets: the official client, the shape of every error, and what an agent really sends."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from http_world import ANSWER, World, serving
from pydantic import TypeAdapter

from homeserve.errors import WorkerLost
from homeserve.server.bodies import INLINE_BYTES
from homeserve.text.dialects import dialect_of

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
Q: list[Any] = [{"role": "user", "content": "q"}]
PROMPT = "user: q\n"
WEATHER: Any = {"name": "get_weather", "description": "Weather.", "input_schema": {"type": "object"}}


def client_of(world: World, **more: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=world.url(""), max_retries=0, timeout=60, **({"api_key": "none"} | more))


async def ask(world: World, **fields: Any) -> tuple[int, Any]:
    return await world.post("/v1/messages", {"messages": Q, "max_tokens": 100, **fields})


async def events_of(world: World, **fields: Any) -> list[tuple[str, Any]]:
    """(name, data) of every event of a stream."""
    body = {"messages": Q, "max_tokens": 100, "stream": True, **fields}
    async with world.client.post(world.url("/v1/messages"), json=body) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["request-id"] == response.headers["x-request-id"]
        text = await response.text()
    frames = [frame.split("\n") for frame in text.removesuffix("\n\n").split("\n\n")]
    assert all(len(frame) == 2 for frame in frames)
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in frames]


# -------------------------------------------------------------------------------------------------------------- answers


async def test_the_official_client_gets_a_message() -> None:
    async with serving() as world, client_of(world) as client:
        message = await client.messages.create(model="tiny", max_tokens=100, messages=Q)
        TypeAdapter(Message).validate_python(message.to_dict())
        (block,) = message.content
        assert block.type == "text" and block.text == ANSWER
        assert (message.model, message.role, message.type) == ("tiny", "assistant", "message")
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
        assert message.id.startswith("msg_") and message.id.endswith(message._request_id or "-")
        assert message.usage.input_tokens == len(PROMPT)
        assert message.usage.output_tokens == len(ANSWER.encode())


async def test_the_official_client_streams() -> None:
    async with serving() as world, client_of(world) as client:
        async with client.messages.stream(model="tiny", max_tokens=100, messages=Q) as stream:
            texts = [text async for text in stream.text_stream]
            message = await stream.get_final_message()
        assert "".join(texts) == ANSWER and len(texts) > 1
        (block,) = message.content
        assert block.type == "text" and block.text == ANSWER
        assert message.stop_reason == "end_turn" and message.usage.output_tokens == len(ANSWER.encode())


async def test_the_official_client_counts_what_a_message_would_take() -> None:
    async with serving(context=1024) as world, client_of(world) as client:
        more: Any = {"system": "Be brief.", "tools": [WEATHER], "thinking": {"type": "disabled"}}
        count = await client.messages.count_tokens(model="tiny", messages=Q, **more)
        TypeAdapter(MessageTokensCount).validate_python(count.to_dict())
        message = await client.messages.create(model="tiny", max_tokens=1, messages=Q, **more)
        assert count.input_tokens == message.usage.input_tokens > len("system: Be brief.\n" + PROMPT)
        assert len(world.fleet.said) == 1, "nothing was generated for the count"


async def test_every_event_is_one_of_anthropics() -> None:
    async with serving() as world:
        events = await events_of(world)
        for name, data in events:
            EVENTS.validate_python(data)
            assert name == data["type"]
        names = [name for name, _ in events]
        assert [names[0], names[1], *names[-3:]] == [
            *("message_start", "content_block_start"),
            *("content_block_stop", "message_delta", "message_stop"),
        ]
        assert set(names[2:-3]) == {"content_block_delta"}
        assert events[-2][1]["homeserve"]["restarts"] == 0


async def test_the_answer_is_that_of_the_chat_route() -> None:
    async with serving() as world:
        asked = {"temperature": 1, "seed": 7, "max_tokens": 9}
        _, chat = await world.chat(**asked)
        _, message = await ask(world, **asked)
        assert message["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
        assert message["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
        assert message["stop_reason"] == "max_tokens" and chat["choices"][0]["finish_reason"] == "length"


async def test_a_stop_sequence_is_told() -> None:
    async with serving() as world:
        _, message = await ask(world, stop_sequences=["zzz", ", w"])
        assert message["content"] == [{"type": "text", "text": "Hi"}]
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", ", w")
        events = await events_of(world, stop_sequences=["zzz", ", w"])
        assert events[-2][1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": ", w"}
        assert world.running == 0


async def test_no_tokens_fill_the_cache_and_say_nothing() -> None:
    async with serving() as world:
        status, message = await ask(world, max_tokens=0)
        assert status == 200 and message["content"] == [] and message["usage"]["output_tokens"] == 0
        assert message["stop_reason"] == "max_tokens"
        assert [name for name, _ in await events_of(world, max_tokens=0)] == [
            *("message_start", "message_delta", "message_stop"),
        ]


async def test_an_answer_that_fills_the_context_is_told_from_one_that_was_limited() -> None:
    async with serving() as world:
        world.fleet.script = b"x" * 1000
        _, message = await ask(world, max_tokens=5000)
        assert message["stop_reason"] == "model_context_window_exceeded"
        assert message["usage"]["output_tokens"] == 256 - len(PROMPT)


async def test_an_answer_goes_on_from_what_was_begun() -> None:
    async with serving() as world:
        begun = [*Q, {"role": "assistant", "content": "The answer is ("}]
        _, message = await ask(world, messages=begun)
        assert message["content"] == [{"type": "text", "text": ANSWER}]
        assert message["usage"]["input_tokens"] == len(PROMPT + "assistant: The answer is (")


async def test_a_template_that_cannot_be_gone_on_from_is_told() -> None:
    class Deaf:
        async def render(self, messages: Any, tools: Any = None, **more: Any) -> str:
            return "".join(f"{m['role']}\n" for m in messages)

    async with serving() as world:
        world.change(templates=Deaf())
        status, body = await ask(world, messages=[*Q, {"role": "assistant", "content": "So"}])
        assert status == 400 and "cannot go on from" in body["error"]["message"]
        assert (await ask(world))[0] == 200


@pytest.mark.parametrize(("opens", "status"), [("<think>\n", 400), ("<think>\n\n</think>\n\n", 200)])
async def test_a_begun_answer_is_not_gone_on_with_inside_a_thought(opens: str, status: int) -> None:
    class Thinking:
        async def render(self, messages: Any, tools: Any = None, **more: Any) -> str:
            return "".join(f"{m['role']}\n{opens}{m['content'].strip()}<end>\n" for m in messages)

    async with serving() as world:
        world.change(templates=Thinking(), dialect=THINKS_AND_CALLS)
        answer = await ask(world, messages=[*Q, {"role": "assistant", "content": " So\nit is "}])
        assert answer[0] == status
        if status == 400:
            assert_error(answer, 400, "invalid_request_error", "into a thought")


async def test_a_client_that_leaves_is_aborted() -> None:
    async with serving() as world:
        world.fleet.held = True
        asking = asyncio.create_task(events_of(world))
        await world.wait_for(lambda: world.running == 1)
        asking.cancel()
        await world.wait_for(lambda: world.running == 0)


async def test_silence_is_filled_with_ping_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homeserve.server.sse.PING_S", 0.005)
    async with serving() as world, client_of(world) as client:
        world.fleet.held = True
        body = {"messages": Q, "max_tokens": 9, "stream": True}
        async with world.client.post(world.url("/v1/messages"), json=body) as response:
            assert await response.content.readuntil(b"\n\n") == b'event: ping\ndata: {"type":"ping"}\n\n'
            world.fleet.held = False
            world.fleet.release()
            assert (await response.content.read()).endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
        world.fleet.held = True
        stream = await client.messages.create(model="tiny", max_tokens=2, messages=Q, stream=True)
        await asyncio.sleep(0.02)
        world.fleet.held = False
        world.fleet.release()
        assert [event.type async for event in stream][0] == "message_start", "the client skips pings"


# ------------------------------------------------------------------------------------------------- thoughts and calls


THINKS_AND_CALLS = dialect_of({}, ("think-tags", "tagged-json"))
SAYS = (
    "<think>\nLet me see.\n</think>\n\nLooking.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
)


async def test_the_official_client_reads_thoughts_and_calls() -> None:
    async with serving(context=1024) as world, client_of(world) as client:
        world.change(dialect=THINKS_AND_CALLS)
        world.fleet.script = SAYS.encode()
        asked: Any = {"model": "tiny", "max_tokens": 900, "messages": Q, "tools": [WEATHER]}
        asked["thinking"] = {"type": "enabled", "budget_tokens": 800}
        message = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        for made in (message, streamed):
            thought, text, use = made.content
            assert thought.type == "thinking" and thought.thinking.strip() == "Let me see." and thought.signature
            assert text.type == "text" and text.text.strip() == "Looking."
            assert use.type == "tool_use" and use.name == "get_weather" and use.input == {"city": "Paris"}
            assert use.id and made.stop_reason == "tool_use"
            details = made.usage.output_tokens_details
            assert details is not None and 0 < details.thinking_tokens < made.usage.output_tokens


async def test_what_the_client_got_may_be_sent_back() -> None:
    async with serving(context=1024) as world, client_of(world) as client:
        world.change(dialect=THINKS_AND_CALLS)
        world.fleet.script = SAYS.encode()
        asked: Any = {"model": "tiny", "max_tokens": 500, "tools": [WEATHER]}
        message = await client.messages.create(messages=Q, **asked)
        (use,) = [block for block in message.content if block.type == "tool_use"]
        result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "It rains."}
        turns: list[Any] = [*Q, message.to_param(), {"role": "user", "content": [result]}]
        world.fleet.script = b"It rains there."
        answer = await client.messages.create(messages=turns, **asked)
        assert [block.type for block in answer.content] == ["text"] and answer.stop_reason == "end_turn"
        assert answer.usage.input_tokens > message.usage.input_tokens


async def test_thoughts_that_nobody_asked_to_hear_are_not_told() -> None:
    async with serving(context=1024) as world:
        world.change(dialect=THINKS_AND_CALLS)
        world.fleet.script = SAYS.encode()
        _, message = await ask(world, thinking={"type": "disabled"})
        assert [block["type"] for block in message["content"]] == ["text"]
        _, message = await ask(world)
        assert message["content"][0]["type"] == "thinking"


# --------------------------------------------------------------------------------------------------------------- agents

SYSTEM = "You are Claude Code, Anthropic's official CLI. " + "Be careful. " * 20


def claude_code(cch: str, *turns: Any) -> dict[str, Any]:
    """A request as Claude Code sends it."""
    marked = {"cache_control": {"type": "ephemeral"}}
    return {
        "model": "tiny",
        "max_tokens": 32000,
        "stream": True,
        "system": [
            {
                "type": "text",
                "text": f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={cch};",
            },
            {"type": "text", "text": SYSTEM, **marked},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>"},
                    {"type": "text", "text": "List the files.", **marked},
                ],
            },
            *turns,
        ],
        "tools": [
            {"name": "Bash", "description": "Runs a command.", "input_schema": {"type": "object", "properties": {}}},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "temperature": 1,
    }


async def test_a_request_of_claude_code_is_answered() -> None:
    async with serving(context=2048) as world:
        fields = claude_code("5aa3d")
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-app": "cli"}
        async with world.client.post(world.url("/v1/messages?beta=true"), json=fields, headers=headers) as response:
            assert response.status == 200
            text = await response.text()
        assert text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
        (start,) = [
            json.loads(line[6:]) for line in text.split("\n") if line.startswith('data: {"type":"message_start"')
        ]
        fields["system"] = fields["system"][1:]
        _, count = await world.post("/v1/messages/count_tokens?beta=true", fields)
        assert start["message"]["usage"]["input_tokens"] == count["input_tokens"] > len(SYSTEM)


async def test_a_billing_block_that_changes_leaves_the_prefix_cache_of_use() -> None:
    """Each turn of an agent finds all of the turns before it, in whole pages, although its first block is another."""
    async with serving(context=2048, prefix_cache=True) as world:
        usage = []
        turns: list[Any] = []
        for cch in ("5aa3d", "00c11", "f3f3f"):
            fields = claude_code(cch, *turns) | {"stream": False, "max_tokens": 4}
            _, message = await world.post("/v1/messages", fields)
            usage.append(message["usage"])
            turns += [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "And now?"}]
        assert usage[0]["cache_read_input_tokens"] == 0 and usage[0]["input_tokens"] > len(SYSTEM)
        assert all(told["cache_read_input_tokens"] > len(SYSTEM) for told in usage[1:])
        whole = [told["input_tokens"] + told["cache_read_input_tokens"] for told in usage]
        assert whole[0] < whole[1] < whole[2]


async def test_a_large_conversation_is_taken_apart_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    original = asyncio.to_thread

    async def watched(function: Any, *args: Any, **more: Any) -> Any:
        called.append(function.__name__)
        return await original(function, *args, **more)

    monkeypatch.setattr(asyncio, "to_thread", watched)
    async with serving() as world:
        assert (await ask(world))[0] == 200 and "message_call" not in called
        await ask(world, system=[{"type": "text", "text": "x", "pad": "y" * INLINE_BYTES}])
        assert called.count("message_call") == 1


# --------------------------------------------------------------------------------------------------------------- errors


def assert_error(answer: tuple[int, Any], status: int, kind: str, words: str = "") -> None:
    assert answer[0] == status, answer
    body = answer[1]
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error" and body["request_id"]
    assert set(body["error"]) == {"type", "message"} and body["error"]["type"] == kind
    assert words in body["error"]["message"]
    if status != 413:  # a type of the API that its client's types lack
        TypeAdapter(ErrorResponse).validate_python(body)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_errors_have_anthropics_shape(path: str) -> None:
    async with serving(body_limit_bytes=4096) as world:
        asked = {"messages": Q, "max_tokens": 5}
        assert_error(await world.post(path, b"{"), 400, "invalid_request_error", "body: is not JSON")
        assert_error(await world.post(path, b'{"messages": [], "\xff": 1}'), 400, "invalid_request_error", "body")
        assert_error(
            await world.post(path, asked | {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
            400,
            "invalid_request_error",
            "messages[0].content[0].text: is required",
        )
        assert_error(await world.post(path, asked | {"model": "gpt"}), 404, "not_found_error", "there is: tiny")
        assert_error(await world.post(path, b"x" * 5000), 413, "request_too_large", "4096")
        assert_error(await world.get(path), 405, "invalid_request_error")
        assert_error(await world.post(path + "/batches", {}), 404, "not_found_error", "nothing at")
        assert_error(await world.post(path, asked, headers={"Origin": "http://evil"}), 403, "permission_error")
        assert_error(await world.post(path, asked, headers={"Host": "evil.org"}), 403, "permission_error")


async def test_other_routes_keep_their_shape() -> None:
    async with serving() as world:
        for path in ("/v1/messages2", "/v1/completions"):
            _, body = await world.post(path, {})
            assert set(body) == {"error"} and "code" in body["error"]


async def test_errors_tell_the_request() -> None:
    async with serving() as world:
        url, headers = world.url("/v1/messages"), {"x-request-id": "mine"}
        async with world.client.post(url, data=b"{", headers=headers) as response:
            assert response.headers["request-id"] == response.headers["x-request-id"] == "mine"
            assert (await response.json())["request_id"] == "mine"


async def test_a_missing_key_is_an_authentication_error(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("key-one\n")
    async with serving(api_key_file=str(file)) as world:
        assert_error(await ask(world), 401, "authentication_error")
        async with client_of(world, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model="tiny", max_tokens=5, messages=Q)
        body = {"messages": Q, "max_tokens": 1}
        for headers in ({"x-api-key": "key-one"}, {"Authorization": "Bearer key-one"}):
            assert (await world.post("/v1/messages", body, headers=headers))[0] == 200


async def test_a_prompt_that_is_too_long_is_told_in_the_words_that_agents_look_for() -> None:
    async with serving() as world:
        message = {"role": "user", "content": "x" * 300}
        words = "prompt is too long: 307 tokens > 256 maximum"
        assert_error(await ask(world, messages=[message]), 400, "invalid_request_error", words)
        status, body = await world.post("/v1/messages/count_tokens", {"messages": [message]})
        assert (status, body) == (200, {"input_tokens": 307})


async def test_a_full_queue_and_a_server_that_takes_nothing() -> None:
    async with serving(waiting=0) as world, client_of(world) as client:
        world.fleet.held = True
        asking = [asyncio.create_task(ask(world)) for _ in range(4)]
        await world.wait_for(lambda: world.running == 4)
        async with world.client.post(world.url("/v1/messages"), json={"messages": Q, "max_tokens": 1}) as response:
            assert response.headers["Retry-After"] == "1"
            assert_error((response.status, await response.json()), 429, "rate_limit_error")
        with pytest.raises(anthropic.RateLimitError):
            await client.messages.create(model="tiny", max_tokens=5, messages=Q)
        world.fleet.held = False
        world.fleet.release()
        assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 4
        world.state = "draining"
        assert_error(await ask(world), 503, "overloaded_error", "shutting down")
        with pytest.raises(anthropic.InternalServerError):
            await client.messages.create(model="tiny", max_tokens=5, messages=Q)
    async with serving(loaded=False) as world:
        world.state = "loading"
        assert_error(await ask(world), 503, "overloaded_error", "being loaded")
        count = await world.post("/v1/messages/count_tokens", {"messages": Q})
        assert_error(count, 503, "overloaded_error", "being loaded")


async def test_a_bug_is_told_with_the_request_id_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("homeserve.server.messages.message_call", broken)
    async with serving() as world:
        answer = await ask(world)
        assert_error(answer, 500, "api_error", answer[1]["request_id"])
        assert "secret" not in json.dumps(answer[1]) and "secret detail" in caplog.text


@pytest.fixture
async def failing(caplog: pytest.LogCaptureFixture) -> AsyncIterator[World]:
    """A world whose worker is lost for good once a request has begun."""
    async with serving() as world:
        world.fleet.held = True

        async def fail() -> None:
            await world.wait_for(lambda: world.running == 1 and bool(world.fleet.kept))
            with caplog.at_level(logging.CRITICAL):
                world.fleet.engine._give_up(WorkerLost("the reason"))

        task = asyncio.create_task(fail())
        yield world
        await task


async def test_a_failure_after_the_stream_began_is_an_error_event(failing: World) -> None:
    name, data = (await events_of(failing))[-1]
    assert name == "error"
    assert_error((500, data), 500, "api_error", data["request_id"])
    assert "the reason" not in json.dumps(data)


async def test_the_official_client_raises_a_failure_of_a_stream(failing: World) -> None:
    async with client_of(failing) as client:
        with pytest.raises(anthropic.APIStatusError) as caught:
            async with client.messages.stream(model="tiny", max_tokens=100, messages=Q) as stream:
                await stream.get_final_message()
        assert "api_error" in str(caught.value)
