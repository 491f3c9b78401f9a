"""The JSON of `/v1/responses`: the object `response` with its output, and its stream of events.

    response.created, response.in_progress, the events of each item in turn (`responses_output`),
    then one of response.completed, response.incomplete (max_output_tokens) and response.failed

A body is written by the same machine as a stream, from one piece, so that both have the same items. Every event has the
next `sequence_number`, from 0. The last one has the whole response with `usage` and the `homeserve` block; there is no
`[DONE]`.

Log-probabilities are of tokens, and go out with the text that they made certain: with the next delta of text. Those of
a thought or a call go out with the text behind it, for nobody can tell where between two tokens a thought ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from homeserve.errors import RequestError
from homeserve.server.ask import Ask
from homeserve.server.choice import Piece
from homeserve.server.logprobs import chat_logprobs
from homeserve.server.responses_output import CallItem, Json, MessageItem, OutputItem, SummaryItem, ThoughtItem
from homeserve.server.shape import Counts, Event, Told
from homeserve.text.answer import Part, PartKind

if TYPE_CHECKING:
    from homeserve.text.tokenizer import Tokenizer


class ResponsesShape:
    """`echo`: what the response repeats of the request (`responses_echo`). `summaries`: thoughts are told as these."""

    ends_with_done = False

    def __init__(
        self, ask: Ask, tokenizer: Tokenizer, *, request_id: str, model: str, echo: Json, summaries: bool = False
    ) -> None:
        self._ask = ask
        self._tokenizer = tokenizer
        self._name = request_id
        self._summaries = summaries
        self._sequence = 0
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._logprobs: list[Json] = []
        self._finish: str | None = None
        self._head: Json = {"id": f"resp_{request_id}", "object": "response", "created_at": int(time.time())}
        self._echo = {"model": model, **echo}

    def body(self, pieces: Sequence[Piece], told: Told) -> Json:
        (piece,) = pieces
        self._write(piece)
        return self._ended(told)

    def begin(self, told: Told) -> list[Event]:
        response = self._response("in_progress")
        return self._events([{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")])

    def piece(self, index: int, piece: Piece, told: Told) -> list[Event]:
        return self._events(self._write(piece))

    def end(self, told: Told) -> list[Event]:
        response = self._ended(told)
        return self._events([{"type": f"response.{response['status']}", "response": response}])

    def error(self, error: RequestError) -> Event:
        """OpenAI knows few codes of failed responses; the message has what is known."""
        self._close("incomplete")
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": error.message}
        (event,) = self._events([{"type": "response.failed", "response": response}])
        return event

    def text_frames(self) -> Callable[[str], bytes] | None:
        """Events are numbered."""
        return None

    def ping(self) -> Event | None:
        return None

    # --------------------------------------------------------------------------------------------------- the output

    def _write(self, piece: Piece) -> list[Json]:
        """The events of a piece."""
        if self._ask.logprobs >= 0:
            self._logprobs.extend(chat_logprobs(self._tokenizer, piece.logprobs)["content"])
        made = [event for part in piece.parts for event in self._write_part(part)]
        if piece.finish is None:
            return made
        self._finish = piece.finish
        if not self._items:  # an answer without a word is a message without one
            made += self._begin(Part(PartKind.TEXT))
        return made + self._close("incomplete" if piece.finish == "length" else "completed")

    def _write_part(self, part: Part) -> list[Json]:
        if part.kind is PartKind.THOUGHT and not self._ask.thought_told:
            return []
        made: list[Json] = []
        if self._open is None or not self._open.takes(part):
            if part.kind is not PartKind.CALL and not part.text:
                return []
            made = [*self._close("completed"), *self._begin(part)]
        assert self._open is not None, "it was begun"
        return made + self._open.add(part.text, self._take_logprobs() if part.kind is PartKind.TEXT else [])

    def _begin(self, part: Part) -> list[Json]:
        self._open = self._new_item(part)
        self._items.append(self._open)
        return self._open.opening()

    def _new_item(self, part: Part) -> OutputItem:
        index = len(self._items)
        if part.kind is PartKind.TEXT:
            return MessageItem(index, self._name)
        if part.kind is PartKind.CALL:
            return CallItem(index, self._name, part)
        return SummaryItem(index, self._name) if self._summaries else ThoughtItem(index, self._name)

    def _close(self, status: str) -> list[Json]:
        """The events that end the open item. Tokens that made no more text belong to it where the answer ends too."""
        item, self._open = self._open, None
        if item is None:
            return []
        ends = self._finish is not None and isinstance(item, MessageItem)
        return item.closing(status, self._take_logprobs() if ends else [])

    def _take_logprobs(self) -> list[Json]:
        taken, self._logprobs = self._logprobs, []
        return taken

    # ------------------------------------------------------------------------------------------------- the response

    def _events(self, datas: Iterable[Json]) -> list[Event]:
        made = []
        for data in datas:
            made.append(Event({**data, "sequence_number": self._sequence}, data["type"]))
            self._sequence += 1
        return made

    def _response(self, status: str, **more: Any) -> Json:
        return {
            **self._head,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            **self._echo,
            "output": [item.as_json() for item in self._items],
            "usage": None,
            **more,
        }

    def _ended(self, told: Told) -> Json:
        block = {"usage": usage_of_response(told.counts), "homeserve": told.timing()}
        if self._finish == "length":
            return self._response("incomplete", incomplete_details={"reason": "max_output_tokens"}, **block)
        return self._response("completed", completed_at=int(time.time()), **block)


def usage_of_response(counts: Counts) -> Json:
    """Tokens in the names of Responses. Nothing here is billed for being written to the cache."""
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.completion,
        "output_tokens_details": {"reasoning_tokens": counts.thought},
        "total_tokens": counts.prompt + counts.completion,
    }
