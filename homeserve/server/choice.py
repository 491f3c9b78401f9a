"""One choice of an answer, from token events to text: pure, no sockets and no engine.

`push` takes what the engine said and gives the next `Piece` of the answer. Text may come later than its tokens: an
incomplete character, a possible beginning of a stop string and of a mark of the model's formats are held back. Tokens
after a stop string do not count.
Log-probabilities of the prompt may come chunk by chunk; they go out together, with the first token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from homeserve.engine.request import FinishReason, TokenEvent
from homeserve.text.answer import AnswerReader, Part, PartKind, PlainReader, merged
from homeserve.text.stream import TextStream
from homeserve.wire.records import Logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from homeserve.text.tokenizer import Tokenizer

_FAILURES = (FinishReason.ABORT, FinishReason.ERROR, FinishReason.UNDRAWN)
TOOL_CALLS = "tool_calls"
"""How a choice ends whose answer calls tools."""


class Piece(msgspec.Struct, frozen=True):
    """What a choice gained: parts of its answer, its tokens, and how it ended, where it did (`stop`, `length` or
    `tool_calls`).

    `offsets[i]`: characters of the answer that were complete before token i.
    """

    parts: tuple[Part, ...] = ()
    tokens: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    finish: str | None = None
    stop_matched: bool = False
    stop: str | None = None
    """The stop string that ended it, with `stop_matched`."""
    embedding: bytes = b""

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if part.kind is PartKind.TEXT)

    @property
    def thought(self) -> str:
        return "".join(part.text for part in self.parts if part.kind is PartKind.THOUGHT)

    @property
    def calls(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.kind is PartKind.CALL)

    @property
    def empty(self) -> bool:
        return not (self.parts or self.tokens or self.finish)


class ChoiceFailed(Exception):
    """The engine ended the sequence without an answer. `reason` is for the log, not for the client."""

    def __init__(self, finish: FinishReason, reason: str | None) -> None:
        self.finish = finish
        self.reason = reason or finish.value
        super().__init__(self.reason)


class Choice:
    """State of one choice. `completion_tokens` counts what the client is told, `thought_tokens` those of a thought
    among them."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], *, silent: bool = False, reader: AnswerReader | None = None
    ) -> None:
        self._reader = reader or PlainReader()
        self._text = TextStream(tokenizer, stops, shown=self._reader.shown)
        self._silent = silent
        self._of_prompt: list[Logprobs] = []
        self.completion_tokens = 0
        self.thought_tokens = 0
        self.finish: str | None = None

    @property
    def plain(self) -> bool:
        """Whether every token is a part of the text and nothing else: `push_plain` does."""
        return not (self._silent or self._text.has_stops) and type(self._reader) is PlainReader

    def push_plain(self, tokens: Sequence[int]) -> str:
        """The text that `tokens` make complete, of a choice that is plain and goes on."""
        self.completion_tokens += len(tokens)
        return self._text.push_plain(tokens)

    def push(self, event: TokenEvent) -> Piece:
        """The next piece. Raises ChoiceFailed. After the finish, pieces are empty."""
        if self.finish is not None:
            return Piece()
        if event.finish in _FAILURES:
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
        parts = self._read(text, used, stopped=stopped)
        stopped = stopped or self._reader.done
        return Piece(
            parts=parts,
            tokens=event.tokens[:used],
            offsets=delta.offsets,
            logprobs=event.logprobs[:used],
            prompt_logprobs=self._take_of_prompt() if event.tokens or self.finish else (),
            finish=self.finish,
            stop_matched=stopped and event.finish is None,
            stop=self._text.stop,
            embedding=event.embedding,
        )

    def _read(self, text: str, tokens: int, *, stopped: bool) -> tuple[Part, ...]:
        """The parts that `text` makes certain; at the end also the rest, and whether the answer is a call. An answer
        that has all that it may have ends there; a call that a stop string cut is none that could be made."""
        before = self._reader.thinking
        parts = self._reader.push(text)
        if before or self._reader.thinking:
            self.thought_tokens += tokens
        if self._reader.done and not stopped:
            self.finish = FinishReason.STOP.value
        if self.finish is not None:
            cut = stopped and self._reader.calling
            parts += self._reader.finish()
            if self._reader.called and self.finish == FinishReason.STOP.value and not cut:
                self.finish = TOOL_CALLS
        return merged(parts)

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
        parts=merged(part for p in pieces for part in p.parts),
        tokens=tuple(token for p in pieces for token in p.tokens),
        offsets=tuple(offset for p in pieces for offset in p.offsets),
        logprobs=tuple(entry for p in pieces for entry in p.logprobs),
        prompt_logprobs=tuple(entry for p in pieces for entry in p.prompt_logprobs),
        finish=pieces[-1].finish if pieces else None,
        stop=pieces[-1].stop if pieces else None,
        embedding=pieces[-1].embedding if pieces else b"",
    )
