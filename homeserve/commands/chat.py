"""Talk to a model in the terminal: with the server at --url, with the one that runs, or with a temporary one.

`--prompt TEXT` asks one question and prints the answer alone. Without it: /reset forgets what was said, /exit or Ctrl-D
leaves, Ctrl-C cuts an answer short.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING, Any

from homeserve.commands.reach import first_key, running_urls
from homeserve.commands.temporary import TemporaryServer
from homeserve.errors import SettingError
from homeserve.settings import Option

if TYPE_CHECKING:
    import argparse

    import aiohttp

INTERRUPTED = 130

_TEMPERATURE = Option("float", "", "", low=0, high=2)
_MAX_TOKENS = Option("int", "", "", low=1, high=1 << 24)

_CONNECT_S = 10.0
_SILENCE_S = 300.0
"""The server pings well within this; a longer silence is a dead server."""
_TURNS = 512
"""Messages of a conversation that are kept: the context runs out long before."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="for a temporary server (default: the default model)")
    parser.add_argument("--url", metavar="URL", help="server to talk to, such as http://127.0.0.1:8000")
    parser.add_argument("--prompt", metavar="TEXT", help="ask this, print the answer to stdout, and leave")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--temperature", metavar="T", help="0 is always the likeliest token (default: the server's)")
    parser.add_argument("--max-tokens", metavar="N", help="longest answer")
    parser.add_argument("--api-key-file", metavar="FILE", help="its first key is sent")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    if args.url and args.model:
        raise SettingError("MODEL is for a temporary server, and --url names one", field="url", fix="leave one out")
    with ExitStack() as stack:
        url = args.url or _running_url(environ, args.model) or _temporary_url(stack, args.model)
        talk = Talk(url.rstrip("/"), _options(args), first_key(args.api_key_file, environ))
        loop = asyncio.new_event_loop()
        stack.callback(loop.close)
        if args.prompt is not None:
            return _once(loop, talk, args.prompt)
        return _converse(loop, talk)


class Talk:
    """One conversation with one server."""

    def __init__(self, url: str, options: dict[str, Any], key: str | None) -> None:
        self.url = url
        self._system = options.pop("system", None)
        self._options = options
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._messages: list[dict[str, str]] = []
        self._model: str | None = None
        self.reset()

    def reset(self) -> None:
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    async def ask(self, text: str, out: IO[str]) -> None:
        """Write the answer to `out` as it comes. Raises SettingError for what the server refuses."""
        import aiohttp

        asked = [*self._messages[-_TURNS:], {"role": "user", "content": text}]
        answer: list[str] = []
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
        try:
            async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
                body = {"model": await self._model_id(session), "messages": asked, "stream": True, **self._options}
                async for piece in self._stream(session, body):
                    answer.append(piece)
                    out.write(piece)
                    out.flush()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise SettingError(f"{self.url}: {error or 'no answer'}", field="url", fix="see homeserve ps") from None
        finally:
            if answer:
                self._messages = [*asked, {"role": "assistant", "content": "".join(answer)}]

    async def _model_id(self, session: aiohttp.ClientSession) -> str:
        if self._model is None:
            async with session.get(f"{self.url}/v1/models") as response:
                await self._refuse_bad(response)
                models = (await response.json(content_type=None))["data"]
            self._model = str(models[0]["id"])
        return self._model

    async def _stream(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> AsyncIterator[str]:
        async with session.post(f"{self.url}/v1/chat/completions", json=body) as response:
            await self._refuse_bad(response)
            async for line in response.content:
                if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                    continue
                chunk = json.loads(line[5:])
                if "error" in chunk:
                    raise SettingError(f"{self.url}: {chunk['error'].get('message')}", field="url")
                for choice in chunk.get("choices", ()):
                    if piece := choice.get("delta", {}).get("content"):
                        yield piece

    async def _refuse_bad(self, response: aiohttp.ClientResponse) -> None:
        if response.status == 200:
            return
        text = await response.text()
        try:
            message = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"answered {response.status} {response.reason}"
        raise SettingError(f"{self.url}: {message}", field="url")


def _once(loop: asyncio.AbstractEventLoop, talk: Talk, prompt: str) -> int:
    if not _answer(loop, talk, prompt):
        return INTERRUPTED
    sys.stdout.write("\n")
    sys.stdout.flush()
    return 0


def _converse(loop: asyncio.AbstractEventLoop, talk: Talk) -> int:
    print(f"talking to {talk.url}; /reset forgets, /exit leaves", file=sys.stderr)
    while True:
        text = _read_line()
        if text is None or text in ("/exit", "/quit"):
            return 0
        if text == "/reset":
            talk.reset()
        elif text:
            _answer(loop, talk, text)
            print(flush=True)


def _read_line() -> str | None:
    """A line from the terminal; None at its end or at Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)
        return None
    finally:
        signal.signal(signal.SIGINT, before)


def _answer(loop: asyncio.AbstractEventLoop, talk: Talk, text: str) -> bool:
    """False when it was cut short by Ctrl-C or SIGTERM: the request is aborted by closing its connection."""
    task = loop.create_task(talk.ask(text, sys.stdout))
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        loop.run_until_complete(task)
    except asyncio.CancelledError:
        return False
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            signal.signal(number, _stop_here)
    return True


def _stop_here(number: int, frame: object) -> None:
    """Between two answers a signal ends the command by the ordinary way out, which stops a temporary server."""
    raise SystemExit(INTERRUPTED)


def _running_url(environ: Mapping[str, str], model: str | None) -> str | None:
    """The newest server that is ready; none where a model was asked for by name."""
    ready = running_urls(environ)
    return ready[0] if ready and model is None else None


def _temporary_url(stack: ExitStack, model: str | None) -> str:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop_here)
    server = TemporaryServer(model)
    stack.callback(server.stop)
    print("no server runs; starting a temporary one …", file=sys.stderr, flush=True)
    return server.start()


def _options(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if args.system is not None:
        options["system"] = args.system
    if args.temperature is not None:
        options["temperature"] = _TEMPERATURE.convert(args.temperature, "--temperature", "temperature")
    if args.max_tokens is not None:
        options["max_tokens"] = _MAX_TOKENS.convert(args.max_tokens, "--max-tokens", "max_tokens")
    return options
