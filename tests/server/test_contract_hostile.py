"""Clients that send what nobody should, and leave when they like: a clear error for them, nothing for anybody else.

While they do, another client asks the same question again and again, and is told the same each time. Afterwards the
server is idle, its census adds up, no rank has died and nothing was said of a failure.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

# The test folders are no package (pytest's importlib mode); what tests of the contract share lies here.
sys.path.insert(0, str(Path(__file__).parent))

from contract_rig import GENERATING, POSTS, WORKING

SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
pytestmark = pytest.mark.timeout(300)
ANSWER_S = 30.0
WRONG: tuple[Any, ...] = (
    "x\u0000\ufffe",
    "y" * 5000,
    "",
    -1,
    1 << 70,
    0.5,
    1e308,
    True,
    [],
    [[[[]]]],
    ["z"] * 300,
    {},
    {"type": {"type": "nonsense"}},
)
QUESTION = {"prompt": "The lighthouse keeper", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def document(server: Any) -> Any:
    return server.get("/openapi.json")[1]


@pytest.fixture(autouse=True)
def unharmed(server: Any, wait_until: Callable[..., Any]) -> Iterator[None]:
    """The other client, and the look around afterwards."""
    wanted, told, done = ask(server), [], threading.Event()
    failed = server.get("/v1/homeserve/status")[1]["requests"]["failed"]

    def repeat() -> None:
        while not done.is_set():
            told.append(ask(server))

    other = threading.Thread(target=repeat)
    other.start()
    yield
    done.set()
    other.join(ANSWER_S)
    assert not other.is_alive() and told and set(told) == {wanted}
    wait_until("an idle server", lambda: server.get("/v1/homeserve/census")[1]["idle"])
    census = server.get("/v1/homeserve/census")[1]
    assert census["ok"]
    assert all(pool["free"] + pool["cached"] == pool["capacity"] for pool in census["ranks"])
    status = server.get("/v1/homeserve/status")[1]
    assert status["requests"]["failed"] == failed and all(rank["restarts"] == 0 for rank in status["ranks"])
    assert "Traceback" not in server.err, server.err


def ask(server: Any) -> str:
    answer = httpx.post(f"{server.url}/v1/completions", json=QUESTION, timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def connect(server: Any) -> socket.socket:
    parts = urllib.parse.urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=ANSWER_S)


def request_of(path: str, body: bytes, *, length: str = "", more: bytes = b"") -> bytes:
    size = length or str(len(body))
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n".encode() + more + b"\r\n" + body


def all_of(link: socket.socket) -> bytes:
    """What comes until the other side closes."""
    parts = []
    while part := link.recv(65536):
        parts.append(part)
    return b"".join(parts)


# --------------------------------------------------------------------------------------------------------------- fields


@pytest.mark.parametrize("path", POSTS)
def test_every_field_wrong_in_turn(server: Any, document: Any, path: str) -> None:
    """Each field gets each value that the document does not allow there: 400, and the error names the field."""
    operation = document["paths"][path]["post"]
    name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    fields = document["components"]["schemas"][name]["properties"]
    sent = 0
    with httpx.Client(timeout=ANSWER_S) as client:
        for field, schema in fields.items():
            allowed = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
            for value in WRONG:
                if allowed.is_valid(value):
                    continue
                answer = client.post(f"{server.url}{path}", json=WORKING[path] | {field: value})
                sent += 1
                assert answer.status_code == 400, (field, value, answer.text)
                error = answer.json()["error"]
                where = error["param"] if "param" in error else error["message"]
                assert where.startswith(field), (field, value, error)
    print(f"{path}: {len(fields)} fields, {sent} wrong values")
    assert sent >= len(fields)


# --------------------------------------------------------------------------------------------------------------- bodies


@pytest.mark.parametrize("path", POSTS)
def test_text_that_is_no_utf8(server: Any, path: str) -> None:
    body = json.dumps(WORKING[path]).encode().replace(b"Say", b"\xc3\x28\xff")
    body = body if b"\xff" in body else b'{"%s": "\xff"}' % next(iter(WORKING[path])).encode()
    answer = httpx.post(f"{server.url}{path}", content=body, timeout=ANSWER_S)
    assert answer.status_code == 400, answer.text


def test_bodies_that_never_end_hold_nobody_up(server: Any) -> None:
    """Two hundred clients send half a body and wait. (`unharmed` is served meanwhile.)"""
    body = json.dumps(WORKING["/v1/completions"]).encode()
    with ExitStack() as held:
        for number in range(200):
            link = held.enter_context(closing(connect(server)))
            link.sendall(
                request_of(GENERATING[number % len(GENERATING)], body[: len(body) // 2], length=str(len(body)))
            )
        for _ in range(3):
            assert ask(server)
        running = server.get("/v1/homeserve/status")[1]["requests"]
        assert running["running"] <= 1 and running["waiting"] == 0, "only what has arrived takes a place"


@pytest.mark.skipif(not SLOW, reason="of the slow tier: a body has a minute to arrive")
def test_a_body_that_is_late_is_an_error(server: Any) -> None:
    with closing(connect(server)) as link:
        link.settimeout(90)
        link.sendall(request_of("/v1/completions", b'{"pro', length="100"))
        began = time.monotonic()
        answer = link.recv(65536)
        assert answer.startswith(b"HTTP/1.1 400") and b"did not arrive" in answer
        assert time.monotonic() - began > 50


def test_bodies_far_over_the_limit(server: Any) -> None:
    """Refused by what they say of themselves, before anything of them is read."""
    for path in POSTS:
        with closing(connect(server)) as link:
            link.sendall(request_of(path, b"", length=str(1 << 40)))
            answer = link.recv(65536)
            assert answer.startswith(b"HTTP/1.1 413"), (path, answer[:200])


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"messages":' * 50_000,
        b'{"a":' + b"9" * 100_000 + b"}",
        b'{"prompt": "' + b"\\u0000" * 50_000 + b'"}',
        b'{"prompt": [' + b"1," * 600_000 + b"1]}",
        b'{"stop": {' + b",".join(b'"%d": 1' % n for n in range(50_000)) + b"}}",
    ],
    ids=["lists", "objects", "digits", "nulls", "values", "names"],
)
@pytest.mark.parametrize("path", GENERATING)
def test_bodies_that_are_work(server: Any, path: str, body: bytes) -> None:
    answer = httpx.post(f"{server.url}{path}", content=body, timeout=ANSWER_S)
    assert answer.status_code == 400, answer.text


# ----------------------------------------------------------------------------------------------------------------- wire

CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n"
NONSENSE = {
    "size": CHUNKED + b"\r\nzz\r\nabc\r\n0\r\n\r\n",
    "negative size": CHUNKED + b"\r\n-5\r\nabc\r\n0\r\n\r\n",
    "size without end": CHUNKED + b"\r\n" + b"f" * 70_000,
    "longer than it says": CHUNKED + b"\r\n3\r\nabcdef\r\n0\r\n\r\n",
    "shorter than it says": CHUNKED + b"\r\nff\r\nabc\r\n0\r\n\r\n",
    "two lengths": CHUNKED + b"Content-Length: 3\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "twice chunked": CHUNKED.replace(b"chunked", b"chunked, chunked") + b"\r\n3\r\nabc\r\n0\r\n\r\n",
    "extension": CHUNKED + b"\r\n3;" + b"x" * 70_000 + b"\r\nabc\r\n0\r\n\r\n",
    "gzip": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
    "no number": request_of("/v1/completions", b"abc", length="3x"),
    "many headers": b"GET /health HTTP/1.1\r\nHost: a\r\n"
    + b"".join(b"x-%d: y\r\n" % n for n in range(5000))
    + b"\r\n",
    "one long header": HEALTH + b"x: " + b"y" * 200_000 + b"\r\n\r\n",
    "bytes in a header": HEALTH + b"x\x00y: \xff\xfe\r\n\r\n",
    "bytes in the path": b"GET /v1/models/\xff\xfe\x00 HTTP/1.1\r\nHost: a\r\n\r\n",
    "long path": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "no version": b"GET /health\r\n\r\n",
    "version": b"GET /health HTTP/9.9\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500,
    "lines": b"\r\n" * 50_000,
    "upgrade": HEALTH + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    "expectation": request_of("/v1/completions", b"{}", more=b"Expect: nonsense\r\n"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_on_the_wire(server: Any, name: str) -> None:
    """An error of the client, or its connection is closed; what is no error is answered."""
    with closing(connect(server)) as link:
        try:
            link.sendall(NONSENSE[name])
            link.shutdown(socket.SHUT_WR)
            answer = all_of(link)
        except ConnectionError:  # it was closed while we were still talking
            answer = b""
    fine = name in ("upgrade", "lines", "no version")
    assert answer == b"" or answer.startswith(
        (b"HTTP/1.1 4", b"HTTP/1.0 4", *((b"HTTP/1.1 200", b"HTTP/0.9 200") if fine else ()))
    )
    assert b"Traceback" not in answer


# ------------------------------------------------------------------------------------------------------------- leaving


@pytest.mark.parametrize("path", GENERATING)
def test_a_client_that_leaves_at_every_point_of_its_request(server: Any, path: str) -> None:
    body = json.dumps(WORKING[path] | {"stream": True}).encode()
    whole = request_of(path, body)
    for at in range(0, len(whole) + 1, 1 if SLOW else 3):
        with closing(connect(server)) as link:
            link.sendall(whole[:at])


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "body"])
@pytest.mark.parametrize("path", GENERATING)
def test_a_client_that_leaves_at_every_point_of_its_answer(server: Any, path: str, stream: bool) -> None:
    """After so many reads of one byte, and some in between by reset."""
    tokens = {"max_tokens", "max_output_tokens"} & WORKING[path].keys()
    body = WORKING[path] | {"stream": stream} | dict.fromkeys(tokens, 200)
    for at in range(0, 400, 8 if SLOW else 40):
        with closing(connect(server)) as link:
            if at % 16:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            link.sendall(request_of(path, json.dumps(body).encode()))
            read = 0
            while stream and read < at:
                read += len(link.recv(at - read)) or at


def test_requests_on_one_connection_one_behind_the_other(server: Any) -> None:
    """Sent before the first is answered; each gets its own answer, in order, and leaving drops those behind."""
    body = json.dumps(QUESTION).encode()
    with closing(connect(server)) as link:
        for _ in range(4):
            link.sendall(request_of("/v1/completions", body))
        told = b""
        while told.count(b"HTTP/1.1 200") < 4 or not told.endswith(b"}"):
            told += link.recv(65536)
    with closing(connect(server)) as link:
        for _ in range(50):
            link.sendall(request_of("/v1/completions", body))
