"""What a reader of one sequence holds: an async iterator of TokenEvents, with a bounded backlog.

The engine never waits for a reader. Tokens that are not read yet gather here and the next `anext` gets all of them as
one event, so a slow reader costs one event, not one per token. Past `backlog_limit` unread tokens the stream asks the
engine to hold the sequence, and to let it go on with the next read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from homeserve.engine.draft_counts import DraftCounts
from homeserve.engine.request import FinishReason, Timings, TokenEvent, Usage
from homeserve.wire.records import Logprobs


class TokenStream:
    """Iterates over TokenEvents until the one that carries `finish`."""

    def __init__(
        self,
        request_id: str,
        prompt_tokens: int,
        now: float,
        backlog_limit: int,
        on_hold: Callable[[bool], None],
        drafts: DraftCounts | None = None,
    ) -> None:
        self.request_id = request_id
        self.timings = Timings(submitted=now)
        self.usage = Usage(prompt_tokens=prompt_tokens)
        self.drafts = drafts or DraftCounts()
        """Rounds of drafting, as they come back."""
        self._backlog_limit = backlog_limit
        self._on_hold = on_hold
        self._held = False
        self._ended = False
        self._tokens: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._prompt_logprobs: list[Logprobs] = []
        self._finish: FinishReason | None = None
        self._error: str | None = None
        self._embedding = b""
        self._ready = asyncio.Event()

    @property
    def finished(self) -> bool:
        """The last event is here, read or not."""
        return self._finish is not None

    def push(self, event: TokenEvent) -> None:
        """Add what became known. Ignored after the finish."""
        if self._finish is not None:
            return
        self._tokens.extend(event.tokens)
        self._logprobs.extend(event.logprobs)
        self._prompt_logprobs.extend(event.prompt_logprobs)
        self._finish = event.finish
        self._error = event.error
        self._embedding = event.embedding
        self.usage.completion_tokens += len(event.tokens)
        self._ready.set()
        if not self._held and self._finish is None and len(self._tokens) > self._backlog_limit:
            self._held = True
            self._on_hold(True)

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._ended:
            raise StopAsyncIteration
        await self._ready.wait()
        self._ready.clear()
        came = tuple(self._tokens), tuple(self._logprobs), tuple(self._prompt_logprobs)
        event = TokenEvent(*came, self._finish, self._error, self._embedding)
        self._tokens.clear()
        self._logprobs.clear()
        self._prompt_logprobs.clear()
        self._ended = self._finish is not None
        if self._held:
            self._held = False
            self._on_hold(False)
        return event
