"""The JSON of the two OpenAI generation routes: chat and completions, as whole bodies and as stream chunks.

Stream of a chat choice: role, thought and content and calls…, finish. Of a completion: text…, the last with its finish.
The very last chunk of a stream carries `usage` and the `homeserve` block: the last finish, or the extra chunk without
choices that `stream_options.include_usage` asks for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from homeserve import __version__
from homeserve.errors import RequestError
from homeserve.server.ask import Ask
from homeserve.server.choice import TOOL_CALLS, Piece
from homeserve.server.logprobs import chat_logprobs, completion_logprobs, join_lists, prompt_logprobs
from homeserve.server.shape import Event, Told, frames_of_text
from homeserve.server.timing import usage_block
from homeserve.text.answer import Part, PartKind

if TYPE_CHECKING:
    from homeserve.text.tokenizer import Tokenizer

FINGERPRINT = f"homeserve-{__version__}"
_MARK = "\x00"
"""Stands for the text of a chunk that is made ahead."""


class _Frame:
    """What every object of one answer begins with, and where usage is told."""

    prefix = ""
    body_kind = ""
    chunk_kind = ""
    ends_with_done = True

    def __init__(self, ask: Ask, tokenizer: Tokenizer, *, request_id: str, model: str) -> None:
        self._ask = ask
        self._tokenizer = tokenizer
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._head = {
            "id": f"{self.prefix}-{request_id}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }

    def body(self, pieces: Sequence[Piece], told: Told) -> dict[str, Any]:
        made = self._object(self.body_kind, [self._whole(i, piece) for i, piece in enumerate(pieces)])
        made["usage"] = usage_block(told.counts)
        made["homeserve"] = told.timing()
        return made

    def begin(self, told: Told) -> list[Event]:
        return []

    def piece(self, index: int, piece: Piece, told: Told) -> list[Event]:
        chunks = self._chunks(index, piece)
        if piece.finish is not None:
            self._ended.add(index)
        for chunk in chunks:
            if self._ask.continuous_usage:
                chunk["usage"] = usage_block(told.counts)
            elif self._ask.include_usage:
                chunk["usage"] = None
        if chunks and len(self._ended) == len(self._ask.calls) and not self._ask.include_usage:
            self._close(chunks[-1], told)
        return [Event(chunk) for chunk in chunks]

    def text_frames(self) -> Callable[[str], bytes] | None:
        ask = self._ask
        if ask.logprobs >= 0 or ask.token_ids or ask.continuous_usage:
            return None
        piece = Piece(parts=(Part(PartKind.TEXT, _MARK),))
        assert 0 in self._begun, "the first piece tells more than its text"
        (chunk,) = self._chunks(0, piece)
        if ask.include_usage:
            chunk["usage"] = None
        return frames_of_text(Event(chunk), _MARK)

    def end(self, told: Told) -> list[Event]:
        if not self._ask.include_usage:
            return []
        last = self._object(self.chunk_kind, [])
        self._close(last, told)
        return [Event(last)]

    def error(self, error: RequestError) -> Event:
        return Event(error.as_body())

    def ping(self) -> Event | None:
        return None

    @staticmethod
    def _close(chunk: dict[str, Any], told: Told) -> None:
        chunk["usage"] = usage_block(told.counts)
        chunk["homeserve"] = told.timing()

    def _whole(self, index: int, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._object(self.chunk_kind, [choice])

    def _begin(self, index: int) -> bool:
        """Whether this is the first piece of a choice."""
        if index in self._begun:
            return False
        self._begun.add(index)
        return True


class ChatShape(_Frame):
    prefix = "chatcmpl"
    body_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def body(self, pieces: Sequence[Piece], told: Told) -> dict[str, Any]:
        made = super().body(pieces, told)
        if self._ask.token_ids:
            made["prompt_token_ids"] = list(self._ask.prompts[0].ids)
        return made

    def _whole(self, index: int, piece: Piece) -> dict[str, Any]:
        calls = [_call(part) for part in piece.calls]
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.thought and self._ask.thought_told:
            message["reasoning_content"] = piece.thought
        if calls:
            message["content"] = piece.text or None
            message["tool_calls"] = calls
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish,
        }
        if self._ask.token_ids:
            choice["token_ids"] = list(piece.tokens)
        return choice

    def _chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        made = []
        if not piece.empty and self._begin(index):
            first = self._chunk(self._delta(index, {"role": "assistant", "content": ""}))
            if self._ask.token_ids:
                first["prompt_token_ids"] = list(self._ask.prompts[0].ids)
            made.append(first)
        told = [self._part_delta(part) for part in piece.parts]
        deltas = [delta for delta in told if delta is not None]
        if not deltas and piece.tokens and (self._ask.token_ids or self._ask.logprobs >= 0):
            deltas.append({"content": ""})
        for number, delta in enumerate(deltas):
            choice = self._delta(index, delta)
            if number == 0:  # log-probabilities and ids are of tokens, and those of a piece go out once
                choice["logprobs"] = self._logprobs(piece)
                if self._ask.token_ids:
                    choice["token_ids"] = list(piece.tokens)
            made.append(self._chunk(choice))
        if piece.finish is not None:
            made.append(self._chunk({**self._delta(index, {}), "finish_reason": piece.finish}))
        return made

    def _part_delta(self, part: Part) -> dict[str, Any] | None:
        if part.kind is PartKind.TEXT:
            return {"content": part.text} if part.text else None
        if part.kind is PartKind.THOUGHT:
            return {"reasoning_content": part.text} if part.text and self._ask.thought_told else None
        return {"tool_calls": [{"index": part.call, **_call(part)}]}

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self._ask.logprobs < 0:
            return None
        return chat_logprobs(self._tokenizer, piece.logprobs)


class FunctionShape(ChatShape):
    """The older form of calls: one at most, as `function_call`."""

    def _whole(self, index: int, piece: Piece) -> dict[str, Any]:
        choice = super()._whole(index, piece)
        calls = choice["message"].pop("tool_calls", None)
        if calls:
            choice["message"]["function_call"] = calls[0]["function"]
        return _finished_by_function(choice)

    def _part_delta(self, part: Part) -> dict[str, Any] | None:
        if part.kind is PartKind.CALL:
            return {"function_call": _call(part)["function"]}
        return super()._part_delta(part)

    def _chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        chunks = super()._chunks(index, piece)
        for chunk in chunks:
            _finished_by_function(chunk["choices"][0])
        return chunks


def _finished_by_function(choice: dict[str, Any]) -> dict[str, Any]:
    if choice["finish_reason"] == TOOL_CALLS:
        choice["finish_reason"] = "function_call"
    return choice


def _call(part: Part) -> dict[str, Any]:
    """A call, or what one gained: the first part of it has its id and name."""
    if not part.name:
        return {"function": {"arguments": part.text}}
    return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.text}}


class CompletionShape(_Frame):
    prefix = "cmpl"
    body_kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, ask: Ask, tokenizer: Tokenizer, *, request_id: str, model: str) -> None:
        super().__init__(ask, tokenizer, request_id=request_id, model=model)
        self._echoes = [_echo_text(ask, tokenizer, p) for p in range(len(ask.prompts))]

    def _whole(self, index: int, piece: Piece) -> dict[str, Any]:
        return self._choice(index, piece, first=True)

    def _chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        beginning = self._ask.echo and index not in self._begun and not piece.empty
        told = piece.tokens and (self._ask.token_ids or self._ask.logprobs >= 0)
        if not (piece.text or piece.finish or told or beginning):
            return []
        return [self._chunk(self._choice(index, piece, first=self._begin(index)))]

    def _choice(self, index: int, piece: Piece, *, first: bool) -> dict[str, Any]:
        prompt = self._ask.prompt_of(index)
        echo = self._echoes[index // self._ask.n] if first else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + piece.text,
            "logprobs": self._lists(index, piece, first=first) if self._ask.logprobs >= 0 else None,
            "finish_reason": piece.finish,
        }
        if self._ask.token_ids:
            choice["token_ids"] = list(piece.tokens)
            if first:
                choice["prompt_token_ids"] = list(prompt.ids)
        return choice

    def _lists(self, index: int, piece: Piece, *, first: bool) -> dict[str, Any]:
        before = len(self._echoes[index // self._ask.n])
        lists = completion_logprobs(self._tokenizer, piece.logprobs, [before + offset for offset in piece.offsets])
        if not (first and self._ask.echo):
            return lists
        ids = self._ask.prompt_of(index).ids
        return join_lists([prompt_logprobs(self._tokenizer, ids, piece.prompt_logprobs), lists])


def _echo_text(ask: Ask, tokenizer: Tokenizer, place: int) -> str:
    if not ask.echo:
        return ""
    prompt = ask.prompts[place]
    return tokenizer.decode(list(prompt.ids)) if prompt.text is None else prompt.text
