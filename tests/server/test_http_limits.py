"""What a real server does with requests that are too large, too many, too slow, too strange or not allowed."""

from __future__ import annotations

import json
import socket
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import httpx
import openai
import pytest

LONG: dict[str, Any] = {"prompt": "a b c", "max_tokens": 1900, "ignore_eos": True, "stream": True}


@pytest.fixture
def small(box: Any, tiny: str) -> Any:
    """A server with limits that are easy to reach."""
    return box.up(
        *(tiny, "--max-running", "1", "--max-waiting", "1", "--body-limit-bytes", "4096"),
        *("--header-limit-bytes", "1024"),
    )


def requests_of(run: Any) -> Any:
    return run.get("/v1/homeserve/status")[1]["requests"]


def connect(run: Any) -> socket.socket:
    parts = urllib.parse.urlsplit(run.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=30)


def post(run: Any, path: str, body: Any, **more: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(run.url + path, content=content, timeout=60, **more)


def assert_error(answer: httpx.Response, status: int, code: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["code"] == code
    assert answer.headers["x-request-id"]


def head(length: int) -> bytes:
    return f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


def test_limits(small: Any, wait_until: Callable[..., Any]) -> None:
    """One server for all: starting it is what costs."""
    oversize_bodies(small)
    garbage(small)
    full_queue(small, wait_until)
    census = small.get("/v1/homeserve/census")[1]
    assert census["ok"] and census["idle"]


def oversize_bodies(run: Any) -> None:
    assert_error(post(run, "/v1/completions", {"prompt": "x" * 5000}), 413, "body_too_large")

    def chunks() -> Iterator[bytes]:
        for _ in range(16):
            yield b"x" * 1024

    answer = httpx.post(run.url + "/v1/completions", content=chunks(), timeout=60)
    assert_error(answer, 413, "body_too_large")
    assert_error(post(run, "/v1/completions", b'{"prompt": ' + b"[" * 4000), 400, "invalid_field")
    assert post(run, "/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def garbage(run: Any) -> None:
    pieces = (
        b"\x00" * 64,
        b"GET / HTTP/1.1\r\n" + b"A: " + b"b" * 4096 + b"\r\n\r\n",
        b"GET /" + b"a" * 4096 + b" HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        head(100) + b"{",
    )
    for piece in pieces:
        with closing(connect(run)) as link:
            link.sendall(piece)
            link.shutdown(socket.SHUT_WR)
            answer = link.recv(4096)
            assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), piece[:40]
    assert run.get("/health")[0] == 200


def full_queue(run: Any, wait_until: Callable[..., Any]) -> None:
    with closing(connect(run)) as first, closing(connect(run)) as second:
        body = json.dumps(LONG).encode()
        first.sendall(head(len(body)) + body)
        wait_until("one to run", lambda: requests_of(run)["running"] == 1)
        second.sendall(head(len(body)) + body)
        wait_until("one to wait", lambda: requests_of(run)["waiting"] == 1)
        refused = post(run, "/v1/completions", {"prompt": "x"})
        assert_error(refused, 429, "queue_full")
        assert int(refused.headers["Retry-After"]) >= 1
    wait_until("both to be aborted", lambda: requests_of(run)["running"] == requests_of(run)["waiting"] == 0)
    assert post(run, "/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_stalled_reader_is_let_go(box: Any, tiny: str, wait_until: Callable[..., Any]) -> None:
    """A client that asks for more than all buffers hold and reads none of it: its sequences end long before the last
    token of the last."""
    run = box.up(tiny, "--max-running", "4", "--max-waiting", "124", "--stream-stall-s", "1")
    asked = LONG | {
        "prompt": ["a b c"] * 8,
        "n": 16,
        "logprobs": 20,
        "stream_options": {"continuous_usage_stats": True},
    }
    body = json.dumps(asked).encode()
    with closing(socket.socket()) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        parts = urllib.parse.urlsplit(run.url)
        link.connect((parts.hostname, parts.port))
        link.sendall(head(len(body)) + body)
        wait_until("them to run", lambda: requests_of(run)["running"] > 0)
        wait_until("them to be let go", lambda: requests_of(run)["running"] == requests_of(run)["waiting"] == 0)
    told = requests_of(run)
    assert told["aborted"] > 0 and told["aborted"] + told["finished"] == 128, run.err
    census = run.get("/v1/homeserve/census")[1]
    assert census["ok"] and census["idle"]


def test_keys_are_asked_for(box: Any, tiny: str, tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alpha\nbeta\n")
    run = box.up(tiny, "--api-key-file", str(keys))
    with openai.OpenAI(base_url=f"{run.url}/v1", api_key="gamma", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as refused:
            stranger.models.list()
    assert refused.value.code == "unauthorized"
    with openai.OpenAI(base_url=f"{run.url}/v1", api_key="beta", max_retries=0) as friend:
        assert friend.models.list().data
    assert run.get("/health")[0] == 200 and run.get("/v1/models")[0] == 401
