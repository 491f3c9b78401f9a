"""The JSON of the two generation routes: chat and completions, as whole bodies and as stream chunks.

A `Shape` belongs to one answer and keeps what its chunks need between them (which choices have begun, where their text
stands). It only builds plain values; `respond` sends them.

Stream of a chat choice: role, content…, finish. Of a completion: text…, the last with its finish. The very last chunk
of a stream carries `usage` and the `homeserve` block: the last finish, or the extra chunk without choices that
`stream_options.include_usage` asks for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from homeserve import __version__
from homeserve.server.ask import Ask
from homeserve.server.choice import Piece
from homeserve.server.logprobs import chat_logprobs, completion_logprobs, join_lists, prompt_logprobs

if TYPE_CHECKING:
    from homeserve.text.tokenizer import Tokenizer

FINGERPRINT = f"homeserve-{__version__}"


class Shape(Protocol):
    """How one answer is written."""

    def body(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The whole answer from one Piece per choice; `usage` and `homeserve` are added by the caller."""
        ...

    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """The chunks that a piece of choice `index` makes; none if there is nothing to tell."""
        ...

    def tail(self) -> dict[str, Any]:
        """The chunk without choices that ends a stream with usage."""
        ...


class _Frame:
    """What every object of one answer begins with."""

    prefix = ""
    body_kind = ""
    chunk_kind = ""

    def __init__(self, ask: Ask, tokenizer: Tokenizer, *, request_id: str, model: str) -> None:
        self._ask = ask
        self._tokenizer = tokenizer
        self._begun: set[int] = set()
        self._head = {
            "id": f"{self.prefix}-{request_id}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }

    def tail(self) -> dict[str, Any]:
        return self._object(self.chunk_kind, [])

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

    def body(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        choices = [self._choice(i, piece) for i, piece in enumerate(pieces)]
        made = self._object(self.body_kind, choices)
        if self._ask.token_ids:
            made["prompt_token_ids"] = list(self._ask.prompts[0].ids)
        return made

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish,
        }
        if self._ask.token_ids:
            choice["token_ids"] = list(piece.tokens)
        return choice

    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        made = []
        if not piece.empty and self._begin(index):
            first = self._chunk(self._delta(index, {"role": "assistant", "content": ""}))
            if self._ask.token_ids:
                first["prompt_token_ids"] = list(self._ask.prompts[0].ids)
            made.append(first)
        wanted = piece.text or (piece.tokens and (self._ask.token_ids or self._ask.logprobs >= 0))
        if wanted:
            choice = self._delta(index, {"content": piece.text})
            choice["logprobs"] = self._logprobs(piece)
            if self._ask.token_ids:
                choice["token_ids"] = list(piece.tokens)
            made.append(self._chunk(choice))
        if piece.finish is not None:
            made.append(self._chunk({**self._delta(index, {}), "finish_reason": piece.finish}))
        return made

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self._ask.logprobs < 0:
            return None
        return chat_logprobs(self._tokenizer, piece.logprobs)


class CompletionShape(_Frame):
    prefix = "cmpl"
    body_kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, ask: Ask, tokenizer: Tokenizer, *, request_id: str, model: str) -> None:
        super().__init__(ask, tokenizer, request_id=request_id, model=model)
        self._echoes = [_echo_text(ask, tokenizer, p) for p in range(len(ask.prompts))]

    def body(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        return self._object(self.body_kind, [self._choice(i, piece, first=True) for i, piece in enumerate(pieces)])

    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
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
