"""The JSON of `/v1/messages`: an answer as content blocks, whole or as events.

    message_start
    content_block_start, content_block_delta …, content_block_stop     for each block, one after the other
    message_delta                                                      how it ended, usage, the `homeserve` block
    message_stop

A run of parts of one kind is a block: `text`, `thinking`, or `tool_use` for each call. `message_start` waits for the
first token: only then it is known how much of the prompt was cached, and clients read that there. Until then pings
tell that the stream is alive.

`usage.input_tokens` counts what was computed of the prompt: cached tokens are in `cache_read_input_tokens` and in no
other count, so that the two add up to the prompt. Nothing is charged for putting tokens into the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from homeserve.engine.request import FinishReason
from homeserve.errors import RequestError
from homeserve.server.ask import Ask
from homeserve.server.choice import TOOL_CALLS, Piece
from homeserve.server.messages_errors import messages_error
from homeserve.server.shape import Counts, Event, Told
from homeserve.text.answer import Part, PartKind

SIGNATURE = "homeserve"
"""Of every thought. Clients need one that is not empty; nobody checks it."""
_LIMIT = FinishReason.LENGTH.value
_log = logging.getLogger("homeserve.server")


class MessageShape:
    """Of one answer. `max_tokens` as the client said it: an answer that had to end before them filled the context."""

    ends_with_done = False

    def __init__(self, ask: Ask, *, max_tokens: int, request_id: str, model: str) -> None:
        self._thought_told = ask.thought_told
        self._cut_by_context = ask.calls[0].max_tokens < max_tokens
        self._request_id = request_id
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
        self._begun = False
        self._ended: Piece | None = None
        self._index = -1
        self._open: tuple[PartKind, int] | None = None
        """Kind and number of the call of the block that is open."""

    # ------------------------------------------------------------------------------------------------------- whole

    def body(self, pieces: Sequence[Piece], told: Told) -> dict[str, Any]:
        (piece,) = pieces
        return {
            **self._head,
            "content": [self._block(part) for part in piece.parts if self._is_told(part)],
            **self._stop(piece),
            "usage": _usage(told.counts),
            "homeserve": told.timing(),
        }

    def _block(self, part: Part) -> dict[str, Any]:
        if part.kind is PartKind.TEXT:
            return {"type": "text", "text": part.text}
        if part.kind is PartKind.THOUGHT:
            return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE}
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": self._input(part)}

    def _input(self, part: Part) -> dict[str, Any]:
        """Arguments that were cut off, or are no object, cannot be told in a body: there is nothing of them."""
        try:
            return msgspec.json.decode(part.text or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            _log.warning("request %s: arguments of a call are no JSON object", self._request_id)
            return {}

    # ------------------------------------------------------------------------------------------------------ events

    def begin(self, told: Told) -> list[Event]:
        return []

    def piece(self, index: int, piece: Piece, told: Told) -> list[Event]:
        events = [] if self._begun else [self._start(told)]
        for part in piece.parts:
            if self._is_told(part):
                events += self._grown(part)
        if piece.finish is not None:
            events += self._close()
            self._ended = piece
        return events

    def end(self, told: Told) -> list[Event]:
        assert self._ended is not None, "every choice has ended"
        delta = {"type": "message_delta", "delta": self._stop(self._ended), "usage": _usage(told.counts)}
        return [_event({**delta, "homeserve": told.timing()}), _event({"type": "message_stop"})]

    def error(self, error: RequestError) -> Event:
        return _event(messages_error(error, self._request_id))

    def text_frames(self) -> Callable[[str], bytes] | None:
        return None

    def ping(self) -> Event | None:
        return _event({"type": "ping"})

    def _start(self, told: Told) -> Event:
        self._begun = True
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(told.counts),
        }
        return _event({"type": "message_start", "message": message})

    def _grown(self, part: Part) -> list[Event]:
        """The block that `part` belongs to gains it; where it is another one than before, that ends and this begins."""
        events: list[Event] = []
        if self._open != (part.kind, part.call):
            events += self._close()
            self._open = (part.kind, part.call)
            self._index += 1
            events.append(self._of_block("content_block_start", content_block=_empty(part)))
        if part.text:
            events.append(self._of_block("content_block_delta", delta=_delta(part)))
        return events

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        signature = {"type": "signature_delta", "signature": SIGNATURE}
        thought = self._open[0] is PartKind.THOUGHT
        self._open = None
        signed = [self._of_block("content_block_delta", delta=signature)] if thought else []
        return [*signed, self._of_block("content_block_stop")]

    def _of_block(self, kind: str, **more: Any) -> Event:
        return _event({"type": kind, "index": self._index, **more})

    # -------------------------------------------------------------------------------------------------------- both

    def _is_told(self, part: Part) -> bool:
        """Blocks are never empty, but for calls without arguments."""
        if part.kind is PartKind.CALL:
            return True
        return bool(part.text) and (part.kind is PartKind.TEXT or self._thought_told)

    def _stop(self, piece: Piece) -> dict[str, Any]:
        """Why it ended. A stop sequence ends an answer before its call is whole, so it is told first."""
        if piece.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": piece.stop}
        if piece.finish == TOOL_CALLS:
            reason = "tool_use"
        elif piece.finish == _LIMIT:
            reason = "model_context_window_exceeded" if self._cut_by_context else "max_tokens"
        else:
            reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}


def _event(data: dict[str, Any]) -> Event:
    return Event(data, data["type"])


def _empty(part: Part) -> dict[str, Any]:
    if part.kind is PartKind.TEXT:
        return {"type": "text", "text": ""}
    if part.kind is PartKind.THOUGHT:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}


def _delta(part: Part) -> dict[str, Any]:
    if part.kind is PartKind.TEXT:
        return {"type": "text_delta", "text": part.text}
    if part.kind is PartKind.THOUGHT:
        return {"type": "thinking_delta", "thinking": part.text}
    return {"type": "input_json_delta", "partial_json": part.text}


def _usage(counts: Counts) -> dict[str, Any]:
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.completion,
        "output_tokens_details": {"thinking_tokens": counts.thought},
    }
