"""One choice of an answer, from token events to text: pure, no sockets and no engine.

`push` takes what the engine said and gives the next `Piece` of the answer. Text may come later than its tokens: an
incomplete character and a possible beginning of a stop string are held back. Tokens after a stop string do not count.
Log-probabilities of the prompt may come chunk by chunk; they go out together, with the first token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from homeserve.engine.request import FinishReason, TokenEvent
from homeserve.text.stream import TextStream
from homeserve.wire.records import Logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from homeserve.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Piece:
    """What a choice gained: text, its tokens, and how it ended, where it did (`stop` or `length`).

    `offsets[i]`: characters of the answer that were complete before token i.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    finish: str | None = None
    stop_matched: bool = False

    @property
    def empty(self) -> bool:
        return not (self.text or self.tokens or self.finish)


class ChoiceFailed(Exception):
    """The engine ended the sequence without an answer. `reason` is for the log, not for the client."""

    def __init__(self, finish: FinishReason, reason: str | None) -> None:
        self.finish = finish
        self.reason = reason or finish.value
        super().__init__(self.reason)


class Choice:
    """State of one choice. `completion_tokens` counts what the client is told."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], *, silent: bool = False) -> None:
        self._text = TextStream(tokenizer, stops)
        self._silent = silent
        self._of_prompt: list[Logprobs] = []
        self.completion_tokens = 0
        self.finish: str | None = None

    def push(self, event: TokenEvent) -> Piece:
        """The next piece. Raises ChoiceFailed. After the finish, pieces are empty."""
        if self.finish is not None:
            return Piece()
        if event.finish in (FinishReason.ABORT, FinishReason.ERROR):
            raise ChoiceFailed(event.finish, event.error)
        self._of_prompt.extend(event.prompt_logprobs)
        if self._silent:
            return self._push_silent(event)
        delta = self._text.push(event.tokens)
        text, used, stopped = delta.text, delta.tokens_used, delta.stopped
        if event.finish is not None and not stopped:
            tail = self._text.finish()
            text, stopped = text + tail.text, tail.stopped
            self.finish = event.finish.value
        if stopped:
            self.finish = FinishReason.STOP.value
        self.completion_tokens += used
        return Piece(
            text=text,
            tokens=event.tokens[:used],
            offsets=delta.offsets,
            logprobs=event.logprobs[:used],
            prompt_logprobs=self._take_of_prompt() if event.tokens or self.finish else (),
            finish=self.finish,
            stop_matched=stopped and event.finish is None,
        )

    def _push_silent(self, event: TokenEvent) -> Piece:
        """A completion of no tokens: only the prompt's own log-probabilities are of interest."""
        if event.finish is None:
            return Piece()
        self.finish = FinishReason.LENGTH.value
        return Piece(prompt_logprobs=self._take_of_prompt(), finish=self.finish)

    def _take_of_prompt(self) -> tuple[Logprobs, ...]:
        taken, self._of_prompt = tuple(self._of_prompt), []
        return taken


def join(pieces: Sequence[Piece]) -> Piece:
    """All pieces of a choice as one."""
    return Piece(
        text="".join(p.text for p in pieces),
        tokens=tuple(token for p in pieces for token in p.tokens),
        offsets=tuple(offset for p in pieces for offset in p.offsets),
        logprobs=tuple(entry for p in pieces for entry in p.logprobs),
        prompt_logprobs=tuple(entry for p in pieces for entry in p.prompt_logprobs),
        finish=pieces[-1].finish if pieces else None,
    )
