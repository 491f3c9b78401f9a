"""Tests of `homeserve bench` by name, and which requests they share."""

from __future__ import annotations

import pytest

from homeserve.bench.names import USUAL, parse
from homeserve.bench.run import grouped
from homeserve.errors import SettingError


def test_names_are_read_in_order_and_each_once() -> None:
    found = parse("pp512, TG128@2048,tg128,conc8,ttft512,start,rss,flip,step,tg128@0,pp512")
    told = [(test.name, test.kind, test.count, test.depth) for test in found]
    assert told[:3] == [("pp512", "pp", 512, 0), ("tg128@2048", "tg", 128, 2048), ("tg128@0", "tg", 128, 0)]
    assert [name for name, *_ in told[3:]] == ["conc8", "ttft512", "start", "rss", "flip", "step"]
    assert [test.name for test in found if test.asks] == ["pp512", "tg128@2048", "tg128@0", "conc8", "ttft512"]


def test_the_usual_ones_are_those_of_the_help() -> None:
    assert [test.name for test in parse(USUAL)] == USUAL.split(",")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pp", "'pp' is no test"),
        ("tg128-2048", "'tg128-2048' is no test; did you mean tg128@2048?"),
        ("flips", "did you mean flip?"),
        ("", "'' is no test"),
        ("pp512,,rss", "'' is no test"),
        ("pp0", "pp0: 0 is outside 1 to 1048576"),
        ("conc999", "999 is outside 1 to 256"),
        ("tg1@0", "1 is outside 2 to"),
        ("tg8@99999999", "99999999 is outside 0 to"),
        ("pp99999999999", "is no test"),
        ("rss," * 64 + "rss", "65 names"),
    ],
)
def test_what_is_no_name_is_refused_with_the_names_that_there_are(text: str, words: str) -> None:
    with pytest.raises(SettingError) as caught:
        parse(text)
    assert words in caught.value.message and caught.value.field == "tests" and caught.value.fix
    if "is no test" in words:
        assert "ppN, tgN@D, concN, ttftN, start, rss, flip, step" in caught.value.fix


def test_a_prompt_of_a_length_is_sent_once_for_all_that_is_asked_of_it() -> None:
    asks = parse("pp512,pp2048,tg128@0,tg16@2048,tg32@2048,ttft512,ttft2048,conc8")
    assert grouped(asks) == [
        (512, 0, ("pp512", "ttft512")),
        (2048, 16, ("pp2048", "tg16@2048", "ttft2048")),
        (0, 128, ("tg128@0",)),
        (2048, 32, ("tg32@2048",)),
    ]
