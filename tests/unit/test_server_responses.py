"""`/v1/responses` over real sockets, on a fleet that answers from a script (`http_world`), and OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import openai
import pydantic
import pytest
from http_world import ANSWER, PlainTemplates, World, serving
from responses_check import check_response, check_stream

from homeserve.errors import InvalidField, WorkerLost
from homeserve.server.responses_call import responses_call
from homeserve.server.responses_schemas import InputTokens
from homeserve.text.answer import Part, PartKind, PlainReader
from homeserve.text.dialects import CALLS, THOUGHTS, Dialect

PATH = "/v1/responses"
TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}

HERMES = Dialect(
    next(form for form in THOUGHTS if form.name == "think-tags"),
    next(form for form in CALLS if form.name == "tagged-json"),
)


class Sum(pydantic.BaseModel):
    a: int
    b: int


class LetterReader(PlainReader):
    """Reads the script `?` as a thought, `!` as the name of a call, what follows as its arguments, the rest as text."""

    def __init__(self) -> None:
        self._kind = PartKind.TEXT

    def push(self, text: str) -> list[Part]:
        return [part for letter in text for part in self._letter(letter)]

    def _letter(self, letter: str) -> Iterator[Part]:
        if letter == "?":
            self._kind = PartKind.THOUGHT
        elif letter == ".":
            self._kind = PartKind.TEXT
        elif letter == "!":
            self._kind, self.called = PartKind.CALL, True
            yield Part(PartKind.CALL, "", 0, "add", "call_1")
        elif self._kind is PartKind.CALL:
            yield Part(PartKind.CALL, letter, 0)
        else:
            yield Part(self._kind, letter)


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homeserve.server.chat_ask.reader_maker", lambda *of_what: LetterReader)


async def ask(world: World, **fields: Any) -> tuple[int, Any]:
    return await world.post(PATH, {"input": "q", **fields})


async def stream(world: World, **fields: Any) -> list[Any]:
    return await world.stream(PATH, **{"input": "q", **fields})


@asynccontextmanager
async def client_of(world: World) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=world.url("/v1"), api_key="none", max_retries=0, timeout=5) as client:
        yield client


# --------------------------------------------------------------------------------------------------------------- bodies


async def test_a_response_has_output_usage_and_timings() -> None:
    async with serving() as world:
        status, body = await ask(world, model="tiny")
        assert status == 200
        check_response(body)
        assert body["id"].startswith("resp_") and body["model"] == "tiny" and body["status"] == "completed"
        (item,) = body["output"]
        assert (item["type"], item["role"], item["content"][0]["text"]) == ("message", "assistant", ANSWER)
        assert body["usage"]["input_tokens"] == len("user: q\n")
        assert body["usage"]["output_tokens"] == len(ANSWER.encode())
        assert body["homeserve"]["restarts"] == 0


async def test_the_limit_of_tokens_makes_it_incomplete() -> None:
    async with serving() as world:
        _, body = await ask(world, max_output_tokens=5)
        check_response(body)
        assert body["output"][0]["content"][0]["text"] == "Hi, w" and body["status"] == "incomplete"
        assert body["incomplete_details"] == {"reason": "max_output_tokens"} and body["usage"]["output_tokens"] == 5


@pytest.mark.parametrize("empty", ["", []])
async def test_probes_are_answered(empty: Any) -> None:
    async with serving() as world:
        status, body = await ask(world, input=empty, max_output_tokens=1, tools=[{"type": "web_search"}])
        assert status == 200 and body["usage"]["output_tokens"] == 1 and body["tools"] == []


async def test_thoughts_and_calls_are_items(reading: None) -> None:
    async with serving(context=2048) as world:
        world.fleet.script = b'?Hm.So:!{"a":1}'
        _, body = await ask(world, tools=[TOOL])
        check_response(body)
        assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call"]
        assert body["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm"}]
        call = body["output"][2]
        assert (call["call_id"], call["name"], call["arguments"]) == ("call_1", "add", '{"a":1}')
        assert check_stream(await stream(world, tools=[TOOL]))["output"][2]["arguments"] == '{"a":1}'


async def test_what_a_model_writes_in_its_own_format_becomes_items() -> None:
    async with serving(context=2048) as world:
        world.change(dialect=HERMES)
        written = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        world.fleet.script = f"<think>\nHm.\n</think>\n\nOne moment.{written}".encode()
        _, body = await ask(world, tools=[TOOL])
        check_response(body)
        thought, message, call = body["output"]
        assert thought["content"][0]["text"].strip() == "Hm." and message["content"][0]["text"].strip() == "One moment."
        assert call["name"] == "add" and json.loads(call["arguments"]) == {"a": 1} and call["call_id"]
        assert body["status"] == "completed" and body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        streamed = check_stream(await stream(world, tools=[TOOL]))
        assert [item["type"] for item in streamed["output"]] == ["reasoning", "message", "function_call"]
        assert streamed["output"][2]["arguments"] == call["arguments"]
        cut = check_stream(await stream(world, tools=[TOOL], max_output_tokens=len(world.fleet.script) - 20))
        assert cut["status"] == "incomplete" and cut["output"][2]["status"] == "incomplete"


async def test_the_prompt_is_the_one_of_a_chat_with_the_same_messages() -> None:
    seen: list[Any] = []

    class Listening(PlainTemplates):
        async def render(self, messages: Any, tools: Any = None, **more: Any) -> str:
            seen.append((messages, tools, more))
            return await super().render(messages, tools, **more)

    thought, said = {"type": "reasoning_text", "text": "Hm"}, {"type": "output_text", "text": "One moment."}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "1+2?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [thought]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [said]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a":1,"b":2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
    ]
    function = {"name": "add", "arguments": '{"a":1,"b":2}'}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+2?"},
        {
            "role": "assistant",
            "content": "One moment.",
            "reasoning_content": "Hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    async with serving() as world:
        world.change(templates=Listening())
        _, body = await ask(world, input=items, instructions="Be brief.")
        _, chat = await world.chat(messages=messages)
        assert seen[0] == seen[1]
        assert body["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
        assert body["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]


async def test_tools_reach_the_template_unless_they_may_not_be_called() -> None:
    seen: list[Any] = []

    class Listening(PlainTemplates):
        async def render(self, messages: Any, tools: Any = None, **more: Any) -> str:
            seen.append((tools, more))
            return await super().render(messages, tools, **more)

    async with serving(context=2048) as world:
        world.change(templates=Listening())
        world.change(dialect=HERMES)
        for choice in ("auto", "none"):
            await ask(
                world, tools=[{"type": "custom", "name": "x"}, TOOL], tool_choice=choice, reasoning={"effort": "low"}
            )
        assert [tool["function"]["name"] for tool in seen[0][0]] == ["add"] and seen[1][0] is None
        assert seen[0][1]["reasoning_effort"] == "low"


async def test_the_tokens_of_an_input_are_counted() -> None:
    async with serving() as world:
        status, body = await world.post(f"{PATH}/input_tokens", {"input": "q", "instructions": "x"})
        assert (status, body) == (200, {"object": "response.input_tokens", "input_tokens": len("system: x\nuser: q\n")})
        assert msgspec.convert(body, InputTokens).input_tokens == body["input_tokens"]
        _, wrong = await world.post(f"{PATH}/input_tokens", {"input": [{"role": "user"}]})
        assert wrong["error"]["param"] == "input[0].content"


AGENT: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<cwd>/home</cwd>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "**Listing**"}],
            "content": None,
            "encrypted_content": None,
        },
        {"type": "function_call", "name": "exec", "arguments": '{"cmd":["ls"]}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "a.py\n"},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
    ],
    "tools": [
        {"type": "function", "name": "exec", "description": "Runs.", "strict": False, "parameters": {"type": "object"}},
        {
            "type": "custom",
            "name": "patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
        },
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "inner", "parameters": {}}]},
        {"type": "image_generation", "output_format": "png"},
        {"type": "local_shell"},
        {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
        {"type": "mcp", "server_label": "x", "server_url": "http://x", "require_approval": "never"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "text": {"verbosity": "medium"},
    "client_metadata": {"installation": "x"},
}
"""What coding agents send."""


async def test_what_an_agent_sends_is_answered(reading: None) -> None:
    seen: list[Any] = []

    class Listening(PlainTemplates):
        async def render(self, messages: Any, tools: Any = None, **more: Any) -> str:
            seen.append((messages, tools))
            return await super().render(messages, tools, **more)

    async with serving(context=2048) as world:
        world.change(templates=Listening())
        world.change(dialect=HERMES)
        world.fleet.script = b'?Hm!{"cmd":[]}'
        final = check_stream(await stream(world, **AGENT))
    assert [item["type"] for item in final["output"]] == ["reasoning", "function_call"]
    assert final["output"][0]["summary"] == [{"type": "summary_text", "text": "Hm"}]
    assert [tool["name"] for tool in final["tools"]] == ["exec"] and final["prompt_cache_key"] == "0199"
    ((messages, tools),) = seen
    assert [message["role"] for message in messages] == ["system", "user", "user", "assistant", "tool"]
    assert messages[0]["content"] == "You are a coding agent.\n\nSandboxed."
    assert messages[3]["reasoning_content"] == "**Listing**"
    assert messages[3]["tool_calls"][0]["function"] == {"name": "exec", "arguments": {"cmd": ["ls"]}}
    assert [tool["function"]["name"] for tool in tools] == ["exec"]


# -------------------------------------------------------------------------------------------------------------- streams


async def test_a_stream_says_what_a_body_says() -> None:
    async with serving() as world:
        response = check_stream(await stream(world))
        _, body = await ask(world)
        assert response["output"][0]["content"] == body["output"][0]["content"]
        assert response["usage"] == body["usage"] and response["status"] == body["status"] == "completed"


async def test_events_have_names_and_there_is_no_done() -> None:
    async with serving() as world:
        body = {"input": "q", "stream": True, "max_output_tokens": 1}
        async with world.client.post(world.url(PATH), json=body) as response:
            blocks = (await response.text()).rstrip("\n").split("\n\n")
        assert len(blocks) == 9
        for block in blocks:
            name, data = block.split("\n")
            assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]


async def test_the_first_token_goes_out_before_there_is_a_second() -> None:
    async with serving() as world:
        world.fleet.held = True
        async with world.client.post(world.url(PATH), json={"input": "q", "stream": True}) as response:
            await world.wait_for(lambda: len(world.fleet.kept) > 0)
            world.fleet.release(1)
            text = b""
            while b'"delta":"H"' not in text:
                text += await response.content.readany()
            assert b'"delta":"i"' not in text and b"response.created" in text
        await world.wait_for(lambda: world.running == 0)


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_frees_its_place(streamed: bool) -> None:
    async with serving() as world:
        world.fleet.held = True
        asking = asyncio.create_task(ask(world, stream=streamed))
        await world.wait_for(lambda: world.running == 1)
        asking.cancel()
        await world.wait_for(lambda: world.running == 0)
        world.fleet.held = False
        world.fleet.release()
        _, census = await world.get("/v1/homeserve/census")
        assert census["idle"] and census["ok"]


async def test_a_failure_after_the_stream_began_is_a_failed_response(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as world:
        world.fleet.held = True
        asking = asyncio.create_task(stream(world))
        await world.wait_for(lambda: world.running == 1 and bool(world.fleet.kept))
        world.fleet.release(1)
        with caplog.at_level(logging.CRITICAL):
            world.fleet.engine._give_up(WorkerLost("the reason"))
        events = await asking
        response = check_stream(events)
        assert response["status"] == "failed" and response["error"]["code"] == "server_error"
        assert "the reason" not in json.dumps(events)


# --------------------------------------------------------------------------------------------------------------- errors


def assert_error(answer: tuple[int, Any], status: int, code: str, param: str | None = None) -> None:
    assert answer[0] == status, answer
    error = answer[1]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code and error["param"] == param


@pytest.mark.parametrize("streamed", [True, False])
async def test_errors_before_the_answer_have_the_openai_shape(streamed: bool) -> None:
    async with serving() as world:
        part = [{"type": "input_text", "text": 3}]
        asked = [{"role": "user", "content": "q"}] * 2
        wrong = await ask(world, input=[*asked, {"role": "user", "content": part}], stream=streamed)
        assert_error(wrong, 400, "invalid_field", "input[2].content[0].text")
        assert_error(await ask(world, input="x" * 300, stream=streamed), 400, "context_overflow", "input")
        assert_error(await ask(world, model="other", stream=streamed), 404, "model_not_found", "model")
        assert_error(await ask(world, input=None, stream=streamed), 400, "invalid_field", "input")
        world.state = "draining"
        assert_error(await ask(world, stream=streamed), 503, "draining")
        assert world.fleet.seq == 0


async def test_long_conversations_are_read_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def call(fields: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return responses_call(fields)

    monkeypatch.setattr("homeserve.server.responses.responses_call", call)
    items: list[Any] = [{"role": "user", "content": "q"}] * 300
    async with serving(context=4096) as world:
        assert (await ask(world, input=items, max_output_tokens=1))[0] == 200
        assert_error(await ask(world, input=[*items, {"role": "user"}]), 400, "invalid_field", "input[300].content")
        assert (await ask(world, max_output_tokens=1))[0] == 200
    assert threads == [False, False, True]


async def test_an_error_of_the_template_is_about_the_input() -> None:
    class Refusing(PlainTemplates):
        async def render(self, messages: Any, tools: Any = None, **more: Any) -> str:
            raise InvalidField("messages", "roles must alternate", fix="let them")

    async with serving() as world:
        world.change(templates=Refusing())
        answer = await ask(world)
        assert_error(answer, 400, "invalid_field", "input")
        assert answer[1]["error"]["message"] == "input: roles must alternate"
        assert_error(await world.chat(), 400, "invalid_field", "messages")


async def test_a_full_queue_is_429() -> None:
    async with serving(waiting=0) as world:
        world.fleet.held = True
        asking = [asyncio.create_task(ask(world)) for _ in range(4)]
        await world.wait_for(lambda: world.running == 4)
        assert_error(await ask(world), 429, "queue_full")
        for task in asking:
            task.cancel()
        await world.wait_for(lambda: world.running == 0)


async def test_tools_that_are_skipped_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(context=2048) as world:
        with caplog.at_level(logging.INFO, "homeserve.server"):
            for _ in range(2):
                status, _ = await ask(world, tools=[{"type": "web_search"}, {"type": "mcp", "server_label": "x"}, TOOL])
                assert status == 200
        told = [record.getMessage() for record in caplog.records if "was ignored" in record.getMessage()]
        assert [("web_search" in line, "mcp" in line) for line in told] == [(False, True), (True, False)]


# --------------------------------------------------------------------------------------------------- official client


async def test_the_client_creates_and_streams() -> None:
    async with serving() as world, client_of(world) as client:
        response = await client.responses.create(model="tiny", input="q", instructions="x")
        assert response.output_text == ANSWER and response.status == "completed" and response.store is False
        assert response.usage is not None and response.usage.output_tokens == len(ANSWER.encode())
        text = ""
        async for event in await client.responses.create(model="tiny", input="q", stream=True):
            text += event.delta if event.type == "response.output_text.delta" else ""
        assert text == ANSWER


async def test_the_clients_own_stream_takes_thoughts_and_calls(reading: None) -> None:
    async with serving(context=2048) as world, client_of(world) as client:
        world.fleet.script = b'?Hm.So:!{"a":1}'
        async with client.responses.stream(model="tiny", input="q", tools=[TOOL]) as events:
            snapshots = [e.snapshot async for e in events if e.type == "response.function_call_arguments.delta"]
            final = await events.get_final_response()
        assert snapshots[-1] == '{"a":1}' and final.output_text == "So:"
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        back: Any = [{"role": "user", "content": "q"}, *(item.to_dict() for item in final.output)]
        back.append({"type": "function_call_output", "call_id": "call_1", "output": "1"})
        again = await client.responses.create(model="tiny", input=back)
        assert again.status == "completed"


async def test_the_client_parses_structured_text(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(*of_what: Any) -> None: ...

    monkeypatch.setattr("homeserve.server.chat_ask.guide_of", none)
    async with serving() as world, client_of(world) as client:
        world.fleet.script = b'{"a":1,"b":2}'
        response = await client.responses.parse(model="tiny", input="q", text_format=Sum)
        assert response.output_parsed == Sum(a=1, b=2)
        assert response.text is not None and response.text.format is not None
        assert response.text.format.type == "json_schema"
        async with client.responses.stream(model="tiny", input="q", text_format=Sum) as events:
            assert (await events.get_final_response()).output_parsed == Sum(a=1, b=2)


async def test_the_clients_errors_name_the_field() -> None:
    async with serving() as world, client_of(world) as client:
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.responses.create(model="tiny", input="q", previous_response_id="resp_1")
        assert wrong.value.param == "previous_response_id" and wrong.value.code == "invalid_field"
