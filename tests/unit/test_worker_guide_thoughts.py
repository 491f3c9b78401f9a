"""Thoughts whose marks are spelled with ordinary tokens: they begin and end wherever their text is complete, as for
whoever reads the answer."""

from __future__ import annotations

import numpy as np
import pytest
from guide_rig import KnownVocabulary, guide, json_guide

from homeserve.wire.records import Guide
from homeserve.worker.course import Course, GuideFailed, Phase
from homeserve.worker.guide import Guides
from homeserve.worker.thought import Mark

SPELLED = [
    *(bytes([at]) for at in b'</think>{}":,0123456789ab \n.x'),
    *(b">\n\n", b".</", b"</", b"think", b">a", b">b", b"> 0", b"\xe2\x82", b">\xe2", b"k>\n0", b"</think>\n"),
    *(b"</think>x", b"<end>", b"</think>"),
]
WORDS = KnownVocabulary(SPELLED, frozenset({len(SPELLED) - 2, len(SPELLED) - 1}))
END, CONTROL = len(SPELLED) - 2, len(SPELLED) - 1
NUMBER = 'start: "0" /[ab]{1,3}/\n'


def at(text: bytes) -> int:
    return SPELLED.index(text)


OPENS = [at(b"<"), at(b"think"), at(b">")]
CLOSES = [at(b"</"), at(b"think"), at(b">")]


def spelled_guide(grammar: str = NUMBER, *, in_thought: bool = True, budget: int = -1) -> Guide:
    return guide(grammar, (END,), opens=OPENS, closes=CLOSES, in_thought=in_thought, budget=budget)


def behind(of: Guide, *tokens: bytes) -> Course:
    """The course behind tokens, all of which were allowed."""
    guides = Guides(WORDS, 0)
    course = Course(of, WORDS.size, guides.grammars.copier(of.grammar) if of.grammar else None, guides.thoughts(of))
    for token in tokens:
        may = allowed(course)
        assert may is None or token in may, (token, may)
        course.take(at(token))
    return course


def allowed(course: Course) -> set[bytes] | None:
    mask = course.mask()
    return None if mask is None else {SPELLED[token] for token in np.flatnonzero(mask == 0).tolist()}


@pytest.mark.parametrize(
    "tokens",
    [
        [b"</", b"think", b">"],
        [b".</", b"think", b">"],
        [b"</", b"think", b">\n\n"],
        [b"x", b".</", b"think", b">\n\n"],
        [b"<", b"/", b"t", b"h", b"i", b"n", b"k", b">"],
        [b"<", b"<", b"</", b"</", b"think", b">"],
        [b"</think>\n"],
    ],
    ids=lambda tokens: b"|".join(tokens).decode(),
)
def test_a_thought_ends_however_its_mark_is_cut(tokens: list[bytes]) -> None:
    course = behind(spelled_guide(), *tokens)
    assert course.phase is Phase.ANSWER and allowed(course) == {b"0"}


def test_what_follows_the_mark_in_its_token_is_the_grammars_beginning() -> None:
    course = behind(spelled_guide(), b"</", b"think", b"> 0")
    assert course.phase is Phase.ANSWER and allowed(course) == {b"a", b"b"}
    course = behind(spelled_guide(), b"</", b"t", b"h", b"i", b"n", b"k>\n0", b"a", b"a", b"a")
    assert allowed(course) == {b"<end>"}
    starts = behind(spelled_guide('start: " 0" "x" | "0" "a"\n'), b"</", b"think", b"> 0")
    assert allowed(starts) == {b"x"}, "a blank that the grammar wants is its own"


def test_a_token_that_ends_the_thought_and_breaks_the_grammar_is_not_allowed() -> None:
    nearly = behind(spelled_guide(), b"</", b"think")
    may = allowed(nearly)
    assert may is not None and {b">", b">\n\n", b"> 0", b"x", b"<", b"k>\n0"} <= may
    assert not {b">a", b">b", b">\xe2", b"<end>"} & may, "half a character is no beginning either"
    assert b"</think>x" not in may and b"</think>\n" in may
    assert b">a" in (allowed(behind(spelled_guide(), b"</")) or ()), "where it ends nothing it is as free as the rest"
    with pytest.raises(GuideFailed, match="ends the thought"):
        nearly.take(at(b">a"))


def test_marks_that_begin_within_what_has_begun_are_seen() -> None:
    inner = Mark([at(each) for each in (b"0", b"0", b"1")], WORDS)
    assert inner.begun("x00") == "00" and inner.begun("000") == "00" and inner.begun("01") == ""
    assert inner.completing("00") == {at(b"1"): ""} and inner.completing("0") == {}
    assert Mark(CLOSES, WORDS).completing("</think")[at(b"</think>x")] == "x"


@pytest.mark.parametrize("grammar", [NUMBER, ""])
def test_a_budget_closes_what_is_half_written_anew(grammar: str) -> None:
    """Forced are the mark's own ids, and they go on with what is there where that was cut like them."""
    whole = behind(spelled_guide(grammar, budget=2), b"x", b"</")
    assert allowed(whole) == {b"think"}
    other = behind(spelled_guide(grammar, budget=2), b"x", b".</")
    for token in (b"</", b"think", b">"):
        assert other.phase is Phase.THOUGHT and allowed(other) == {token}
        other.take(at(token))
    assert other.phase is Phase.ANSWER and allowed(other) == ({b"0"} if grammar else None)


@pytest.mark.parametrize("begins", [[b"<", b"think", b">\n\n"], [b"\n", b"<", b"t", b"h", b"i", b"n", b"k", b">"]])
def test_a_thought_begins_however_its_mark_is_cut(begins: list[bytes]) -> None:
    """Without a grammar nothing holds the model to one way; the budget counts all the same."""
    course = behind(spelled_guide("", in_thought=False, budget=2), *begins)
    assert course.phase is Phase.THOUGHT
    for _ in range(2):
        assert allowed(course) is None
        course.take(at(b"x"))
    assert allowed(course) == {b"</"}


def test_what_begins_like_the_mark_and_is_none_is_the_answer() -> None:
    course = behind(spelled_guide('start: "<thx" | "<t" "0"\n', in_thought=False), b"<", b"t")
    assert course.phase is Phase.OPENING and allowed(course) == {b"h", b"0"}
    course.take(at(b"0"))
    assert course.phase is Phase.ANSWER and allowed(course) == {b"<end>"}
    assert behind(spelled_guide("", in_thought=False, budget=0), b"<", b"x").phase is Phase.ANSWER


def test_a_control_token_is_that_token_and_not_its_letters() -> None:
    of = guide(NUMBER, (END,), closes=[CONTROL], in_thought=True)
    spoken_of = behind(of, b"</", b"think", b">a")
    assert spoken_of.phase is Phase.THOUGHT
    spoken_of.take(CONTROL)
    assert spoken_of.phase is Phase.ANSWER and allowed(spoken_of) == {b"0"}
    ordinary = behind(spelled_guide(), b"x")
    ordinary.take(CONTROL)
    assert ordinary.phase is Phase.THOUGHT, "nor the other way round"


def test_a_space_that_the_tokenizer_puts_in_front_is_no_part_of_the_mark() -> None:
    of = guide(NUMBER, (END,), closes=[at(b" "), *CLOSES], in_thought=True)
    assert behind(of, b"</", b"think", b">").phase is Phase.ANSWER


def test_a_mark_that_nothing_spells_fails_the_guide() -> None:
    words = KnownVocabulary([*SPELLED, b""])
    of = guide(NUMBER, (END,), closes=[len(SPELLED)], in_thought=True)
    guides = Guides(words, 0)
    with pytest.raises(GuideFailed, match="does not spell"):
        Course(of, words.size, guides.grammars.copier(of.grammar), guides.thoughts(of))


def test_the_vocabulary_is_read_ahead_for_a_budget_alone() -> None:
    words, read = KnownVocabulary(SPELLED), list[str]()
    known = words._known
    words._known = lambda: read.append("") or known()  # type: ignore[func-returns-value, method-assign]
    guides = Guides(words, 1)
    guides.lane(spelled_guide("", budget=3)).begin()
    guides._compiling.shutdown()  # type: ignore[union-attr]
    assert read
    guides.close()


def test_json_behind_a_thought_that_ends_in_a_token() -> None:
    of = json_guide({"type": "object"}, (END,), closes=CLOSES, in_thought=True)
    assert allowed(behind(of, b".</", b"think", b">\n\n")) == {b"{"}
