"""A server in the hands of whoever operates it: restarts under load, logs, and what these never tell."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from box import Box, wait_until

COUNTER = str(Path(__file__).parents[1] / "data" / "counter.gguf")
FLAGS = ("--threads", "1", "--context", "1024", "--kv-tokens", "8192", "--max-running", "8")
CANARY = "xyzzy"
"""No word of any message of ours."""
pytestmark = pytest.mark.timeout(300)


def post(run: Any, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(run.url + path, data, {"Content-Type": "application/json"} | headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


# ------------------------------------------------------------------------------------------------------ leaving


class Balancer:
    """Sends each request to the next server that is ready, as it knows from looking now and then."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self.ready = list(urls)
        self.client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60))
        self.turn = 0
        self.ended = False
        self.answered: dict[str, int] = dict.fromkeys(urls, 0)
        self.failed: list[str] = []

    async def look(self) -> None:
        while not self.ended:
            self.ready = [url for url in self.urls if await self._is_ready(url)]
            await asyncio.sleep(0.1)

    async def _is_ready(self, url: str) -> bool:
        try:
            async with self.client.get(f"{url}/ready") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def ask(self, number: int) -> None:
        """A user: requests one after the other, every other one a stream."""
        while not self.ended:
            self.turn += 1
            url, stream = self.ready[self.turn % len(self.ready)], bool(self.turn % 2)
            body = {"prompt": f"count {number}:", "max_tokens": 60, "temperature": 0, "stream": stream}
            try:
                async with self.client.post(f"{url}/v1/completions", json=body) as response:
                    text = await response.text()
            except aiohttp.ClientError as error:
                self.failed.append(f"{url}: {error!r}")
                continue
            if response.status == 200 and ("data: [DONE]" in text if stream else '"finish_reason":"length"' in text):
                self.answered[url] += 1
            else:
                self.failed.append(f"{url}: {response.status} {text[-200:]}")


def test_a_rolling_restart_under_load_loses_no_request(box: Box) -> None:
    delay = ("--drain-delay-s", "1")
    first, second = box.up(COUNTER, *FLAGS, *delay), box.up(COUNTER, *FLAGS)

    async def drive() -> tuple[Balancer, Any]:
        balancer = Balancer([first.url, second.url])
        first_url = first.url
        async with balancer.client, asyncio.TaskGroup() as group:
            group.create_task(balancer.look())
            for number in range(6):
                group.create_task(balancer.ask(number))
            while min(balancer.answered.values()) < 5:
                await asyncio.sleep(0.01)
            first.send(signal.SIGTERM)
            await asyncio.to_thread(first.wait)
            by_then = dict(balancer.answered)
            third = await asyncio.to_thread(box.up, COUNTER, *FLAGS)
            balancer.urls = [second.url, third.url]
            balancer.answered.setdefault(third.url, 0)
            while balancer.answered[third.url] < 5:
                await asyncio.sleep(0.01)
            assert balancer.answered[first_url] == by_then[first_url]
            balancer.ended = True
        return balancer, third

    balancer, third = asyncio.run(drive())
    assert balancer.failed == []
    for run in (second, third):
        run.send(signal.SIGTERM)
    for run in (first, second, third):
        assert run.wait() == 0, run.err
    assert [run.left_behind() for run in (first, second, third)] == [[], [], []]


def test_readiness_ends_first_and_connections_are_told_to_close(box: Box) -> None:
    run = box.up(COUNTER, *FLAGS, "--drain-delay-s", "30", "--drain-timeout-s", "60")
    url = run.url

    async def drive() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as client:
            body = {"prompt": "count 1:", "max_tokens": 900, "temperature": 0, "stream": True}
            async with client.post(f"{url}/v1/completions", json=body) as stream:
                await stream.content.readline()
                run.send(signal.SIGTERM)
                while True:
                    async with client.get(f"{url}/ready") as ready:
                        if ready.status == 503:
                            break
                asked = body | {"max_tokens": 3, "stream": False}
                async with client.post(f"{url}/v1/completions", json=asked) as late:
                    assert (late.status, late.headers["Connection"]) == (200, "close"), "it is still taken"
                run.send(signal.SIGTERM)  # no more delay; open requests are cut off
                text = (await stream.content.read()).decode()
        assert "data:" in text

    began = time.monotonic()
    asyncio.run(drive())
    assert run.wait() == 0 and time.monotonic() - began < 25, run.err
    assert run.left_behind() == []


# ------------------------------------------------------------------------------------------------------ logs


def test_logs_are_shown_of_a_server_that_runs_and_of_one_that_ran(box: Box) -> None:
    run = box.up(COUNTER, *FLAGS)
    port = json.loads(run.ready_file.read_text())["port"]
    assert post(run, {"prompt": "count 1:", "max_tokens": 3}, **{"x-request-id": "first"})[0] == 200
    shown = box.run("logs", "--port", str(port))
    assert shown.process.returncode == 0 and shown.err == ""
    assert f"url={run.url}" in shown.out and "id=first" in shown.out
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO app: ", shown.out)
    following = box.start("logs", "-f", "-n", "1", "--json", ready=False)
    wait_until("the last line", lambda: "first" in following.out)
    assert post(run, {"prompt": "count 1:", "max_tokens": 3}, **{"x-request-id": "second"})[0] == 200
    run.send(signal.SIGTERM)
    assert run.wait() == 0, run.err
    assert following.wait() == 0, "it ends with the server"
    lines = [json.loads(line) for line in following.out.splitlines()]
    assert [line["id"] for line in lines if line["from"] == "server.requests"] == ["first", "second"]
    last = box.run("logs", "--lines", "1000")
    assert "id=second" in last.out and "the last one" in last.err
    (kept,) = (box.folder / "0" / "home" / ".local" / "state" / "homeserve").iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_what_cannot_be_shown_is_said(box: Box, tmp_path: Path) -> None:
    none = box.run("logs")
    assert none.process.returncode == 2 and "no server runs" in none.err
    blocked = tmp_path / "file"
    blocked.write_text("")
    run = box.up(COUNTER, *FLAGS, "--log-dir", str(blocked))
    assert "homeserve logs will not show this server" in run.err
    shown = box.run("logs")
    assert shown.process.returncode == 2 and "keeps no log" in shown.err


# ------------------------------------------------------------------------------------------------------ privacy


def hostile() -> list[tuple[str, Any]]:
    """Requests that say the word: good, bad and broken ones."""
    chat = {"messages": [{"role": "user", "content": f"count {CANARY}"}], "max_tokens": 8}
    schema = {"type": "object", "properties": {CANARY: {"const": CANARY}}, "required": [CANARY], CANARY: 1}
    tool = {"type": "function", "function": {"name": CANARY, "description": CANARY, "parameters": schema}}
    pattern = {"type": "string", "pattern": f"({CANARY}"}
    return [
        ("/v1/completions", {"prompt": f"count {CANARY}", "max_tokens": 8}),
        ("/v1/completions", {"prompt": f"count {CANARY}", "max_tokens": 8, "stream": True, "logprobs": 3}),
        ("/v1/completions", {"prompt": CANARY * 2000}),
        ("/v1/completions", {"prompt": CANARY, "temperature": CANARY}),
        ("/v1/completions", {"prompt": CANARY, "stop": [CANARY] * 1000}),
        ("/v1/completions", f'{{"prompt": "{CANARY}'.encode()),
        ("/v1/completions", b"\xff" + CANARY.encode()),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", chat | {"stream": True, "user": CANARY, "stop": CANARY}),
        ("/v1/chat/completions", chat | {"tools": [tool], "tool_choice": "required"}),
        (
            "/v1/chat/completions",
            chat | {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        ),
        (
            "/v1/chat/completions",
            chat | {"response_format": {"type": "json_schema", "json_schema": {"schema": pattern}}},
        ),
        ("/v1/chat/completions", chat | {"response_format": {"type": "grammar", "grammar": f'root ::= "{CANARY}" ('}}),
        ("/v1/chat/completions", chat | {"response_format": {"type": "grammar", "grammar": f'root ::= "{CANARY}"'}}),
        ("/v1/chat/completions", chat | {"chat_template_kwargs": {"x": CANARY}}),
        ("/v1/chat/completions", {"messages": [{"role": CANARY, "content": CANARY}]}),
        ("/v1/responses", {"input": CANARY, "max_output_tokens": 8, "tools": [{"type": "web_search"}]}),
        ("/v1/messages", chat | {"system": CANARY}),
        ("/v1/messages", chat | {"tools": [{"name": CANARY, "input_schema": schema}]}),
        ("/v1/embeddings", {"input": CANARY}),
        ("/tokenize", {"prompt": CANARY}),
    ]


@pytest.mark.parametrize("form", ["text", "json"])
def test_nothing_that_a_server_writes_tells_what_was_said(box: Box, form: str) -> None:
    """Not of requests that fail either, and not when a worker dies of one."""
    fault = {"HOMESERVE_TESTING": "1", "HOMESERVE_FAULT": "rank=0,step=decode,nth=20,action=kill"}
    run = box.up(COUNTER, *FLAGS, "--draft", "off", "--log-level", "debug", "--log-format", form, **fault)
    statuses = [post(run, body, path)[0] for path, body in hostile()]
    assert statuses.count(200) >= 5 and statuses.count(400) >= 5 and 500 not in statuses, statuses
    assert post(run, {"prompt": f"count {CANARY}", "max_tokens": 200})[0] == 200
    assert run.get("/v1/homeserve/status")[1]["ranks"][0]["restarts"] == 1, "the worker died on the way"
    status = json.dumps(run.get("/v1/homeserve/status")[1])
    run.send(signal.SIGTERM)
    assert run.wait() == 0, run.err
    written = written_by(box)
    assert "completion_tokens" in written and "lost" in written
    assert CANARY not in written and CANARY not in status


def written_by(box: Box) -> str:
    """Everything: streams, kept logs, evidence of failures."""
    texts = []
    for folder, _, names in os.walk(box.folder):
        for name in names:
            path = Path(folder) / name
            if path.is_file() and path.stat().st_size < 1 << 24:
                texts.append(path.read_bytes().decode("utf-8", "replace"))
    return "\n".join(texts)


def test_with_full_logs_everybody_is_warned_and_they_have_it(box: Box) -> None:
    run = box.up(COUNTER, *FLAGS, "--log-requests", "full")
    assert post(run, {"prompt": f"count {CANARY}", "max_tokens": 8})[0] == 200
    assert "prompts and answers of all users" in run.err
    assert re.search(rf'prompt="count {CANARY}" answer=', run.err)
