"""One server, seen from a conversation: its models, and answers as they come.

A server that is loading is waited for, and says how far it is. What goes wrong becomes a `SettingError` with what the
server said and what to do here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from homeserve.chat.clean import cleaned
from homeserve.errors import SettingError

if TYPE_CHECKING:
    import aiohttp

CONNECT_S = 10.0
SILENCE_S = 300.0
"""The server pings well within this; a longer silence is a dead server."""
RETRY_S = 1.0
_LINE_BYTES_MAX = 1 << 20
_ADVICE = {
    "unauthorized": "name the server's keys: --api-key-file FILE",
    "model_not_found": "/model lists what is there",
    "context_overflow": "/undo takes back the last question, /reset begins anew",
}


@dataclass(frozen=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class Thought:
    """A piece of what the model thinks before it."""

    text: str


@dataclass(frozen=True)
class Waits:
    """The server is loading: how far it is."""

    text: str


@dataclass(frozen=True)
class Facts:
    """Numbers of a whole answer; None where the server does not tell."""

    completion_tokens: int | None = None
    cached_tokens: int | None = None
    ttft_ms: float | None = None
    decode_tok_s: float | None = None
    finish: str | None = None
    restarts: int | None = None
    flips_crossed: int | None = None


Piece = Text | Thought | Waits | Facts


@dataclass(frozen=True)
class ListedModel:
    id: str
    state: str


class Client:
    """`url` without /v1. `sleep` is waited between two looks at a server that loads."""

    def __init__(self, url: str, key: str | None, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._sleep = sleep
        self._first: str | None = None
        """What `first_model` found; None while it has found nothing."""

    async def models(self) -> list[ListedModel]:
        """Raises SettingError."""
        with self._told():
            async with self._session() as session, session.get(f"{self.url}/v1/models") as response:
                await self._refuse_bad(response)
                found = (await response.json(content_type=None))["data"]
            return [ListedModel(str(each["id"]), str((each.get("homeserve") or {}).get("state", ""))) for each in found]

    async def first_model(self) -> str:
        """The one that a server of others lists first, for those want to be told a name. Empty for our own, which takes
        the one used last; where none is listed yet; and where the server cannot be asked, which whoever asks it next
        is told."""
        if self._first is None:
            try:
                models = await self.models()
            except SettingError:
                return ""
            if models:
                self._first = "" if models[0].state else models[0].id
        return self._first or ""

    async def ask(self, messages: Sequence[Mapping[str, str]], fields: Mapping[str, Any]) -> AsyncIterator[Piece]:
        """The answer to a conversation. Raises SettingError for what the server refuses, and where it goes away."""
        body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, **fields}
        with self._told():
            async with self._session() as session:
                while True:
                    async with session.post(f"{self.url}/v1/chat/completions", json=body) as response:
                        if not await self._is_loading(response):
                            await self._refuse_bad(response)
                            async for piece in self._pieces(response):
                                yield piece
                            return
                    yield Waits(await self._how_far(session))
                    await self._sleep(RETRY_S)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What fails on the way, and an answer that is none, as SettingErrors."""
        import aiohttp
        from aiohttp.http_exceptions import HttpProcessingError

        try:
            yield
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._gone(cleaned(str(error)) or "no answer") from None
        except (HttpProcessingError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._gone(f"what it answers is not understood ({type(error).__name__})") from None

    async def _pieces(self, response: aiohttp.ClientResponse) -> AsyncIterator[Piece]:
        finish, whole = None, False
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            if line.strip() == b"data: [DONE]":
                whole = True
                continue
            chunk = json.loads(line[5:])
            if "error" in chunk:
                message = cleaned(str(chunk["error"].get("message")))
                raise SettingError(f"{self.url}: {message}", field="url")
            for choice in chunk.get("choices") or ():
                finish = choice.get("finish_reason") or finish
                delta = choice.get("delta") or {}
                if thought := delta.get("reasoning_content"):
                    yield Thought(thought)
                if text := delta.get("content"):
                    yield Text(text)
            if chunk.get("usage"):
                yield _facts(chunk, finish)
        if not whole:
            raise self._gone("it ended before the answer did")

    async def _is_loading(self, response: aiohttp.ClientResponse) -> bool:
        return response.status == 503 and _error_of(await response.text()).get("code") == "loading"

    async def _how_far(self, session: aiohttp.ClientSession) -> str:
        async with session.get(f"{self.url}/health") as response:
            health = await response.json(content_type=None)
        done, total = health.get("done_bytes"), health.get("total_bytes")
        share = f" {100 * (done or 0) // total} %" if total else ""
        return f"{health.get('stage') or health.get('status')}{share}"

    async def _refuse_bad(self, response: aiohttp.ClientResponse) -> None:
        if response.status == 200:
            return
        error = _error_of(await response.text())
        message = cleaned(str(error.get("message") or f"answered {response.status} {response.reason}"))
        raise SettingError(f"{self.url}: {message}", field="url", fix=_ADVICE.get(str(error.get("code"))))

    def _gone(self, why: str) -> SettingError:
        return SettingError(f"{self.url}: {why}", field="url", fix="see homeserve ps")

    def _session(self) -> aiohttp.ClientSession:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
        return aiohttp.ClientSession(headers=self._headers, timeout=timeout, read_bufsize=_LINE_BYTES_MAX)


def _facts(chunk: Mapping[str, Any], finish: str | None) -> Facts:
    usage, made = chunk["usage"], chunk.get("homeserve") or {}
    return Facts(
        completion_tokens=usage.get("completion_tokens"),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        ttft_ms=made.get("ttft_ms"),
        decode_tok_s=made.get("decode_tok_s"),
        finish=finish,
        restarts=made.get("restarts"),
        flips_crossed=made.get("flips_crossed"),
    )


def _error_of(text: str) -> dict[str, Any]:
    """The error in a body; empty where it has none of the usual shape."""
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}
