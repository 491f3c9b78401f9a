"""Which tokens have a text in their spelling, against a plain search."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeserve.worker.vocabulary import Spelled

SPELLINGS = [b"\n", b"", b"a\n", b":", b"ab", b"", b"b:a", b"\xe2\x80", b"\x94 x", b"aa", b""]


@pytest.mark.parametrize(
    ("wanted", "tokens"),
    [
        (b"\n", {0, 2}),
        (b":", {3, 6}),
        (b"ab", {4}),
        (b"\n:", set()),  # in neighbours
        (b":ab", set()),
        (b"\xe2\x80\x94", set()),  # a text of which each token has a part
        (b"aa", {9}),
        (b"aaa", set()),
        (b"longer than all", set()),
    ],
)
def test_a_text_is_in_a_token_or_it_is_not(wanted: bytes, tokens: set[int]) -> None:
    assert Spelled(SPELLINGS).containing(wanted) == tokens


@given(st.lists(st.binary(max_size=5), max_size=30), st.binary(min_size=1, max_size=4), st.integers(0, 2**32))
def test_it_is_a_plain_search(spellings: list[bytes], wanted: bytes, seed: int) -> None:
    small = [bytes(byte % 3 for byte in spelled) for spelled in spellings]
    for text in (bytes(byte % 3 for byte in wanted), random.Random(seed).choice(small or [b"x"]) or b"x"):
        plain = {token for token, spelled in enumerate(small) if text in spelled}
        assert Spelled(small).containing(text) == plain
