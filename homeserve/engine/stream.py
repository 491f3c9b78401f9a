"""What the one reader of a sequence holds: an async iterator of TokenEvents, with a bounded backlog.

The engine never waits for a reader. Tokens that are not read yet gather here and the next `anext` gets all of them as
one event, so a slow reader costs one event, not one per token. Past `backlog_limit` unread tokens the stream asks the
engine to hold the sequence, and to let it go on with the next read.

A reader that never waits may listen instead (`listen`): it is called with what came, behind the step that made it. That
spares the loop a future and the waking of a task for each token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from homeserve.engine.draft_counts import DraftCounts
from homeserve.engine.request import FinishReason, Timings, TokenEvent, Usage


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
        on_news: Callable[[TokenStream], None] | None = None,
    ) -> None:
        """`on_news` hears once that there is something for a listener, and is to call `tell` soon."""
        self.request_id = request_id
        self.timings = Timings(submitted=now)
        self.usage = Usage(prompt_tokens=prompt_tokens)
        self.drafts = drafts or DraftCounts()
        """Rounds of drafting, as they come back."""
        self._backlog_limit = backlog_limit
        self._on_hold = on_hold
        self._held = False
        self._ended = False
        self._finish: FinishReason | None = None
        self._unread: list[TokenEvent] = []
        self._unread_tokens = 0
        self._waiter: asyncio.Future[None] | None = None
        """Of the reader, while it waits."""
        self._on_news = on_news
        self._listener: Callable[[TokenEvent], None] | None = None
        self._told_of = False
        """The engine knows that there are news."""

    @property
    def finished(self) -> bool:
        """The last event is here, read or not."""
        return self._finish is not None

    def push(self, event: TokenEvent) -> None:
        """Add what became known. Ignored after the finish."""
        if self._finish is not None:
            return
        self._unread.append(event)
        self._unread_tokens += len(event.tokens)
        self._finish = event.finish
        self.usage.completion_tokens += len(event.tokens)
        if self._listener is not None:
            self._tell_soon()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if not self._held and self._finish is None and self._unread_tokens > self._backlog_limit:
            self._held = True
            self._on_hold(True)

    def listen(self, listener: Callable[[TokenEvent], None] | None) -> None:
        """Have `listener` called with all that comes, and with what is unread already; it does not raise. None: no
        more; what comes then waits for the next reader."""
        self._listener = listener
        if listener is not None and self._unread:
            self._tell_soon()

    def tell(self) -> None:
        """Call the listener, if there still is one, with what it has not heard."""
        self._told_of = False
        if self._listener is not None and self._unread:
            self._listener(self._take())

    def _tell_soon(self) -> None:
        assert self._on_news is not None, "a stream of an engine has somebody who tells"
        if not self._told_of:
            self._told_of = True
            self._on_news(self)

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._ended:
            raise StopAsyncIteration
        if not self._unread:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._take()

    def _take(self) -> TokenEvent:
        """All that is unread, which is something."""
        event = _joined(self._unread)
        self._unread.clear()
        self._unread_tokens = 0
        self._ended = self._finish is not None
        if self._held:
            self._held = False
            self._on_hold(False)
        return event


def _joined(events: list[TokenEvent]) -> TokenEvent:
    """Several, at least one, as one; how it ended is said by the last."""
    *_, last = events
    if len(events) == 1:
        return last
    return TokenEvent(
        tuple([token for event in events for token in event.tokens]),
        tuple([entry for event in events for entry in event.logprobs]),
        tuple([entry for event in events for entry in event.prompt_logprobs]),
        last.finish,
        last.error,
        last.embedding,
    )
