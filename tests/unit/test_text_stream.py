"""Detokenizer, stop matcher and text stream: however ids and text are cut, the result is the same."""

from __future__ import annotations

import os

from hypothesis import example, given, settings
from hypothesis import strategies as st

from homeserve.text.detokenizer import Detokenizer
from homeserve.text.stop import StopMatcher
from homeserve.text.stream import TextStream

SPECIAL = 256
many = settings(max_examples=3_000 if os.environ.get("HOMESERVE_TEST_TIER") == "slow" else 40)


class Bytes:
    """Ids 0-255 spell one byte, 256 is a control token."""

    special_ids = frozenset({SPECIAL})

    def token_bytes(self, token: int) -> bytes:
        return b"<end>" if token == SPECIAL else bytes([token])


def cut(values: list[int], cuts: list[int]) -> list[list[int]]:
    """`values` in pieces whose lengths follow `cuts`."""
    pieces, at = [], 0
    for length in cuts:
        pieces.append(values[at : at + length])
        at += length
    return [*pieces, values[at:]]


texts = st.text(st.sampled_from("abcé日😀 \n"), max_size=30) | st.text(max_size=20)
cuts = st.lists(st.integers(0, 6), max_size=30)


@many
@given(st.binary(max_size=60), cuts)
@example("😀".encode()[:3] + b"a", [1, 1, 1])
@example(b"\xe6\x97", [])
@example(b"\xf0\x9f\xf0\x9f\x98\x80", [2, 2])
def test_any_split_gives_the_text_of_all_bytes(data: bytes, lengths: list[int]) -> None:
    detokenizer = Detokenizer(Bytes())
    text = "".join(detokenizer.push(piece) for piece in cut(list(data), lengths)) + detokenizer.finish()
    assert text == data.decode("utf-8", "replace")


@many
@given(texts, cuts)
def test_no_push_gives_out_a_broken_code_point(text: str, lengths: list[int]) -> None:
    sound = text.encode("utf-8", "replace").decode()
    detokenizer = Detokenizer(Bytes())
    parts = [detokenizer.push(piece) for piece in cut(list(sound.encode()), lengths)]
    assert detokenizer.finish() == "" and "".join(parts) == sound
    assert all(sound.startswith("".join(parts[:count])) for count in range(len(parts)))


def test_control_tokens_are_text_only_where_asked_for() -> None:
    assert Detokenizer(Bytes()).push([97, SPECIAL, 98]) == "ab"
    assert Detokenizer(Bytes(), skip_special=False).push([97, SPECIAL, 98]) == "a<end>b"


def test_a_control_token_between_the_bytes_of_a_code_point() -> None:
    detokenizer = Detokenizer(Bytes())
    first, second = "é".encode()
    assert detokenizer.push([first]) == "" and detokenizer.push([SPECIAL, second]) == "é"


# -------------------------------------------------------------------------------------------------------------- stops


def expected(text: str, stops: list[str]) -> str:
    """By definition: the stop that is complete first ends the text; of two complete at once, the longer."""
    for end in range(len(text) + 1):
        found = [end - len(stop) for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            return text[: min(found)]
    return text


few = st.text("ab", max_size=14)


@many
@given(few, st.lists(st.text("ab", max_size=4), max_size=4), cuts)
@example("aab", ["ab"], [1, 1])
@example("abab", ["aba", "ba"], [2])
@example("abab", ["abab", "ba"], [])
@example("aaab", ["aaaa", "aab"], [1, 1, 1])
def test_stops_by_definition_whatever_the_split(text: str, stops: list[str], lengths: list[int]) -> None:
    matcher = StopMatcher(stops)
    out, stopped = "", False
    wanted = expected(text, stops)
    for piece in cut(list(range(len(text))), lengths):
        safe, stopped = matcher.push("".join(text[i] for i in piece))
        out += safe
        assert wanted.startswith(out), "a part of a stop came out"
    out += matcher.finish()
    assert out == wanted and stopped == (len(wanted) < len(text)) == (matcher.matched is not None)


def test_text_is_held_only_while_it_may_be_a_stop() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("go S") == ("go ", False)
    assert matcher.push("T") == ("", False)
    assert matcher.push("x ST") == ("STx ", False)
    assert matcher.push("OP and more") == ("", True) and matcher.matched == "STOP"
    assert matcher.push("more") == ("", True) and matcher.finish() == ""


def test_no_stops_hold_nothing() -> None:
    matcher = StopMatcher([""])
    assert matcher.push("abc") == ("abc", False) and matcher.finish() == ""


# ------------------------------------------------------------------------------------------------------------- stream


@many
@given(st.binary(max_size=30), st.lists(st.text("abcé", max_size=3), max_size=3), cuts)
def test_a_stream_is_decoding_and_stopping(data: bytes, stops: list[str], lengths: list[int]) -> None:
    whole = data.decode("utf-8", "replace")
    stream = TextStream(Bytes(), stops)
    deltas = [stream.push(piece) for piece in cut(list(data), lengths)] + [stream.finish()]
    text = "".join(delta.text for delta in deltas)
    assert text == expected(whole, stops)
    assert deltas[-1].stopped == (stream.stop is not None) == (len(text) < len(whole))
    assert sum(delta.tokens_used for delta in deltas) == stream.tokens <= len(data)
    if stream.stop is None:
        assert stream.tokens == len(data)


def test_the_token_that_completes_a_stop_is_the_last_one_used() -> None:
    stream = TextStream(Bytes(), ["END"])
    delta = stream.push(list(b"abENDcd"))
    assert (delta.text, delta.stopped, delta.tokens_used) == ("ab", True, 5)
    assert stream.push(list(b"x")).tokens_used == 0 and stream.finish().text == "" and stream.tokens == 5


def test_offsets_count_the_characters_before_each_token() -> None:
    stream = TextStream(Bytes(), ["zz"])
    assert stream.push(list("aé".encode())).offsets == (0, 1, 1)
    assert stream.push(list(b"zb")).offsets == (2, 3)
    assert stream.finish().text == ""
