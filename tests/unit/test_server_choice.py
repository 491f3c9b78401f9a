"""One choice: what of the engine's tokens becomes text, counts, and is told."""

from __future__ import annotations

from typing import Any

import pytest

from homeserve.engine.request import FinishReason, TokenEvent
from homeserve.server.choice import Choice, ChoiceFailed, Piece, join
from homeserve.wire.records import Logprobs


class ByteTokenizer:
    """Ids 0..255 are bytes."""

    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


def choice(*stops: str, silent: bool = False) -> Choice:
    tokenizer: Any = ByteTokenizer()
    return Choice(tokenizer, stops, silent=silent)


def event(text: str, finish: FinishReason | None = None) -> TokenEvent:
    tokens = tuple(text.encode())
    return TokenEvent(tokens, tuple(Logprobs(token, -1.0) for token in tokens), finish=finish)


def test_tokens_behind_a_stop_string_do_not_count() -> None:
    one = choice("lo w")
    piece = one.push(event("hello world"))
    assert piece.text == "hel" and piece.finish == "stop" and piece.stop_matched
    assert piece.tokens == tuple(b"hello w") and len(piece.logprobs) == len(piece.offsets) == 7
    assert one.completion_tokens == 7
    assert one.push(event("more", FinishReason.STOP)) == Piece()
    assert one.completion_tokens == 7


def test_text_may_come_later_than_its_tokens() -> None:
    one = choice("lo!")
    first, second = one.push(event("hello")), one.push(event(" you", FinishReason.LENGTH))
    assert first.text == "hel" and len(first.tokens) == 5 and not first.empty
    assert second.text == "lo you" and second.finish == "length"
    assert second.offsets == (5, 6, 7, 8)


def test_what_is_held_back_comes_out_at_the_end() -> None:
    one = choice("abc")
    assert one.push(event("xab")).text == "x"
    last = one.push(TokenEvent(finish=FinishReason.STOP))
    assert last.text == "ab" and last.finish == "stop" and not last.stop_matched


def test_a_stop_and_the_end_together_leave_nothing_to_abort() -> None:
    piece = choice("lo").push(event("hello", FinishReason.LENGTH))
    assert piece.finish == "stop" and not piece.stop_matched


@pytest.mark.parametrize("finish", [FinishReason.ABORT, FinishReason.ERROR, FinishReason.UNDRAWN])
def test_an_end_without_an_answer_is_a_failure(finish: FinishReason) -> None:
    with pytest.raises(ChoiceFailed) as failed:
        choice().push(TokenEvent(finish=finish, error="why"))
    assert failed.value.finish is finish and failed.value.reason == "why"


def test_prompt_logprobs_come_together_with_the_first_token() -> None:
    one = choice()
    parts = [Logprobs(i, -1.0) for i in range(3)]
    assert one.push(TokenEvent(prompt_logprobs=tuple(parts[:2]))).prompt_logprobs == ()
    assert one.push(TokenEvent(prompt_logprobs=tuple(parts[2:]))).empty
    assert one.push(event("a")).prompt_logprobs == tuple(parts)
    assert one.push(event("b")).prompt_logprobs == ()


def test_a_silent_choice_tells_only_of_its_prompt() -> None:
    one = choice(silent=True)
    assert one.push(TokenEvent(prompt_logprobs=(Logprobs(1, -1.0),))).empty
    piece = one.push(event("a", FinishReason.LENGTH))
    assert piece == Piece(prompt_logprobs=(Logprobs(1, -1.0),), finish="length")
    assert one.completion_tokens == 0


def test_pieces_join_to_the_whole() -> None:
    one = choice()
    pieces = [one.push(event("h")), one.push(event("i")), one.push(TokenEvent(finish=FinishReason.STOP))]
    whole = join(pieces)
    assert whole.text == "hi" and whole.tokens == tuple(b"hi") and whole.offsets == (0, 1) and whole.finish == "stop"
