"""`homeserve chat` in a real terminal (a pseudo one, whose screen pyte computes), with a real server."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyte
import pytest
from box import Box, Run, children

LIMIT_S = 90.0
COUNTER = str(Path(__file__).parents[1] / "data" / "counter.gguf")
ENTER, NEXT_LINE, CTRL_C, CTRL_D, CTRL_R, UP = "\r", "\x1b\r", "\x03", "\x04", "\x12", "\x1b[A"


class Terminal:
    """`homeserve chat` with a terminal of so many columns and rows. To be closed."""

    def __init__(self, box: Box, *argv: str, columns: int = 80, rows: int = 30, **environ: str) -> None:
        variables = box.environ | {"HOME": str(box.folder), "TERM": "xterm-256color", "LANG": "C.UTF-8"} | environ
        self._descriptor, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        command = ["setsid", "--ctty", "--wait", sys.executable, "-P", "-m", "homeserve", "chat", *argv]
        self.process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, env=variables, cwd=box.folder, start_new_session=True
        )
        os.close(inner)
        self._screen = pyte.HistoryScreen(columns, rows, history=5000)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""

    def resize(self, columns: int, rows: int) -> None:
        self._screen.resize(rows, columns)
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    @property
    def lines(self) -> list[str]:
        """All that is on the screen or has left it at the top."""
        columns = range(self._screen.columns)
        gone = ["".join(line[column].data for column in columns) for line in self._screen.history.top]
        return [line.rstrip() for line in [*gone, *self._screen.display]]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait(self, what: str, condition: Callable[[], Any]) -> None:
        ends = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < ends, f"waited for {what}:\n{self.text}"
            assert self._pump() or condition(), f"it ended before {what}:\n{self.text}"

    def wait_prompt(self) -> None:
        """An empty line to type into, at the end of all."""
        self.wait("the prompt", lambda: (said := [line for line in self.lines if line]) and said[-1] == ">")

    def wait_end(self) -> int:
        ends = time.monotonic() + LIMIT_S
        while self._pump():
            assert time.monotonic() < ends, f"it does not end:\n{self.text}"
        return self.process.wait(LIMIT_S)

    def close(self) -> None:
        """The terminal goes away, and with it who was in it."""
        os.close(self._descriptor)
        try:
            self.process.wait(LIMIT_S)
        finally:
            self.process.kill()

    def _pump(self) -> bool:
        """Take what was written; False at the end."""
        ready, _, _ = select.select([self._descriptor], [], [], 0.05)
        if not ready:
            return True
        try:
            data = os.read(self._descriptor, 1 << 16)
        except OSError:  # what Linux says when the last writer is gone
            return False
        self.raw += data
        self._stream.feed(data)
        if b"\x1b[6n" in data:
            os.write(self._descriptor, b"\x1b[1;1R")
        return bool(data)


@pytest.fixture
def terminal(box: Box, server: Run) -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def start(*argv: str, **more: Any) -> Terminal:
        more.setdefault("XDG_STATE_HOME", str(box.folder / "state"))
        made.append(Terminal(box, *(argv or ("--url", server.url, "--temperature", "0", "--max-tokens", "40")), **more))
        made[-1].wait_prompt()
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_a_conversation(terminal: Any) -> None:
    chat = terminal()
    chat.type("What is the capital of France?" + ENTER)
    chat.wait("an answer with its numbers", lambda: "first after" in chat.text)
    assert "Paris" in chat.text
    chat.wait_prompt()
    chat.type("two" + NEXT_LINE + "lines" + ENTER)
    chat.wait("the second answer", lambda: chat.text.count("first after") == 2)
    chat.wait_prompt()
    assert "> two\n. lines" in chat.text
    chat.type("/set temperature 9" + ENTER)
    chat.wait("an error", lambda: "error: temperature: 9 is outside 0 to 2" in chat.text)
    chat.wait_prompt()
    chat.type(CTRL_D)
    assert chat.wait_end() == 0


def test_ctrl_c_cuts_an_answer_and_the_server_is_rid_of_it(terminal: Any, server: Run, wait_until: Any) -> None:
    chat = terminal("--url", server.url, "--temperature", "0")
    chat.type("Write a very long story about a dragon." + ENTER)
    chat.wait("a part of the answer", lambda: len(chat.text) > 400)
    chat.type(CTRL_C)
    chat.wait("the cut", lambda: "cut short" in chat.text)
    wait_until("nobody runs", lambda: server.get("/v1/homeserve/status")[1]["requests"]["running"] == 0)
    lines = [line for line in chat.lines if line.strip()]
    assert len(lines) == len(dict.fromkeys(lines)), "a line was left over where the answer was drawn again"
    chat.wait_prompt()
    chat.type(CTRL_C)
    assert chat.wait_end() == 0


def test_what_was_typed_is_there_the_next_time(terminal: Any, box: Box) -> None:
    first = terminal()
    first.type("/set" + ENTER)
    first.wait("the fields", lambda: "reasoning_effort" in first.text)
    first.wait_prompt()
    first.type(CTRL_D)
    assert first.wait_end() == 0
    again = terminal()
    again.type(UP)
    again.wait("the line of before", lambda: again.lines and "> /set" in again.text)
    assert [json.loads(line) for line in (box.folder / "state/homeserve/chat_history").read_text().splitlines()] == [
        "/set"
    ]


@pytest.mark.parametrize("columns", [20, 40])
def test_a_narrow_terminal(terminal: Any, columns: int) -> None:
    chat = terminal(columns=columns)
    chat.type("What is the capital of France?" + ENTER)
    chat.wait("an answer with its numbers", lambda: "first" in chat.text and "ms" in chat.text)
    assert "Paris" in chat.text.replace("\n", "")
    chat.wait_prompt()


def test_no_color_means_no_color(terminal: Any) -> None:
    chat = terminal(NO_COLOR="1")
    chat.type("Say hi." + ENTER)
    chat.wait("an answer with its numbers", lambda: "first after" in chat.text)
    styles = {int(number) for found in re.findall(rb"\x1b\[([\d;]+)m", chat.raw) for number in found.split(b";")}
    assert styles and not styles & {*range(30, 39), *range(40, 49), *range(90, 108)}


def test_a_dumb_terminal_gets_plain_text(box: Box, server: Run) -> None:
    chat = Terminal(box, "--url", server.url, "--temperature", "0", "--max-tokens", "20", TERM="dumb")
    try:
        chat.wait("the prompt", lambda: chat.text.rstrip().endswith(">"))
        chat.type("What is the capital of France?\n")
        chat.wait("an answer with its numbers", lambda: "first after" in chat.text)
        assert b"\x1b" not in chat.raw and "Paris" in chat.text
    finally:
        chat.close()


def test_a_server_that_dies_costs_one_answer(box: Box, smollm2: str, wait_until: Any) -> None:
    run = box.up(smollm2, "--max-running", "2", "--context", "512")
    port = json.loads(run.ready_file.read_text())["port"]
    chat = Terminal(box, "--url", run.url, "--temperature", "0", "--max-tokens", "12")
    try:
        chat.wait_prompt()
        os.kill(run.pid, signal.SIGKILL)
        run.process.wait()
        chat.type("What is the capital of France?" + ENTER)
        chat.wait("what to do", lambda: "/retry asks it again" in chat.text)
        again = box.up(smollm2, "--max-running", "2", "--context", "512", "--port", str(port))
        assert again.url == run.url
        chat.wait_prompt()
        chat.type("/retry" + ENTER)
        chat.wait("the answer", lambda: "first after" in chat.text)
        assert "Paris" in chat.text
    finally:
        chat.close()


def test_without_a_terminal_lines_are_questions_and_answers_are_all_of_stdout(box: Box, server: Run) -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "homeserve",
            "chat",
            "--url",
            server.url,
            "--temperature",
            "0",
            "--max-tokens",
            "12",
        ],
        input='What is the capital of France?\n"""\nSay\nhi.\n"""\n',
        env=box.environ | {"HOME": str(box.folder)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "Paris" in run.stdout and "\x1b" not in run.stdout + run.stderr
    assert "first after" not in run.stdout + run.stderr


def test_what_is_pasted_is_one_message_and_can_be_searched(terminal: Any, box: Box) -> None:
    chat = terminal()
    chat.type("\x1b[200~Say hi.\nIn French.\x1b[201~")
    chat.wait("both lines", lambda: "> Say hi.\n. In French." in chat.text)
    chat.type(ENTER)
    chat.wait("one answer with its numbers", lambda: "first after" in chat.text)
    chat.wait_prompt()
    assert chat.text.count("first after") == 1
    chat.type(CTRL_R + "Fren")
    chat.wait("what was found", lambda: chat.text.count("In French.") == 2)
    chat.type(CTRL_C)
    history = box.folder / "state" / "homeserve" / "chat_history"
    assert [json.loads(line) for line in history.read_text().splitlines()] == ["Say hi.\nIn French."]


def test_a_terminal_may_be_resized_while_an_answer_comes(terminal: Any, server: Run) -> None:
    chat = terminal("--url", server.url, "--temperature", "0", "--max-tokens", "120", columns=100)
    chat.type("Write a very long story about a dragon." + ENTER)
    chat.wait("a part of the answer", lambda: len(chat.text) > 250)
    chat.resize(40, 20)
    chat.wait("its numbers", lambda: "first after" in chat.text.replace("\n", " "))
    chat.wait_prompt()


def hostile_server() -> ThreadingHTTPServer:
    """Every answer of it gives orders to the terminal."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            for text in ("\x1b]0;owned\x07", "\x1b[2J", "a\x9b31mb\n\n", "```\n\x1b]52;c;QQ==\x07\n```\n", "ended"):
                chunk = {"choices": [{"delta": {"content": text}}]}
                self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *arguments: object) -> None:
            """Not to the test's stderr."""

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.mark.parametrize("flags", [(), ("--plain",)])
def test_what_a_model_writes_is_no_order_to_the_terminal(terminal: Any, flags: tuple[str, ...]) -> None:
    with hostile_server() as hostile:
        thread = threading.Thread(target=hostile.serve_forever)
        thread.start()
        try:
            chat = terminal("--url", f"http://127.0.0.1:{hostile.server_address[1]}", *flags)
            chat.type("x" + ENTER)
            chat.wait("the end", lambda: "ended" in chat.text)
            chat.wait_prompt()
        finally:
            hostile.shutdown()
            thread.join()
    assert "^[]0;owned^G^[[2Ja\\x9b31mb" in chat.text and "^[]52;c;QQ==^G" in chat.text
    assert not any(order in chat.raw for order in (b"\x1b]", b"\x1b[2J", b"\xc2\x9b", b"\x07"))


@pytest.mark.parametrize("how", ["ctrl-d", "window closed", "SIGTERM"])
def test_a_temporary_server_goes_with_the_chat(box: Box, wait_until: Any, how: str) -> None:
    chat = Terminal(box, COUNTER)
    try:
        chat.wait_prompt()
        below = children(chat.process.pid)
        servers = set().union(*map(children, below))
        assert servers, "it has a server"
        if how == "ctrl-d":
            chat.type(CTRL_D)
            assert chat.wait_end() == 0
        elif how == "SIGTERM":
            for pid in below:
                os.kill(pid, signal.SIGTERM)
            assert chat.wait_end() == 130
    finally:
        chat.close()
    wait_until("its server has ended", lambda: not any(os.path.exists(f"/proc/{pid}") for pid in below | servers))
