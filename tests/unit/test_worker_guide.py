"""An answer under its guide: what may come next is a function of the answer's tokens, and of nothing else."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from draft_rig import DRAFTS, GREEDY, VOCAB, Desk, Ranks, Request, Toy
from guide_rig import AB, CLOSE, END, THINK, KnownVocabulary, guide, json_guide
from ranks import on_paper, shape_of

from homeserve.text.grammar_wire import PARSER_LIMITS
from homeserve.wire.records import Guide, LaneRows, NewLane, Plan, PlanKind, Sampling, pack_ints
from homeserve.worker import course as courses
from homeserve.worker import guide as guides
from homeserve.worker.answering import STAND_IN
from homeserve.worker.course import Course, GuideFailed, Phase
from homeserve.worker.guide import Guides
from homeserve.worker.lanes import LaneRefused
from homeserve.worker.sampling import NotANumber

WORDS = KnownVocabulary()
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": ["ab", "c", 7]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
JSON = json_guide(OBJECT)
WORD = 'start: "a" /[bc]{1,3}/ "0"\n'
HOT = Sampling(temperature=1.5, seed=11)


def course(of: Guide, threads: int = 0) -> Course:
    made = Guides(WORDS, threads)
    matchers = made.grammars.copier(of.grammar) if of.grammar else None
    return Course(of, WORDS.size, matchers, made.thoughts(of) if of.thought_closes else None)


def allowed(at: Course) -> set[int] | None:
    mask = at.mask()
    if mask is None:
        return None
    assert mask.shape == (WORDS.size,) and set(np.unique(mask)) <= {0.0, -np.inf}
    return set(np.flatnonzero(mask == 0).tolist())


def follow(of: Guide, tokens: Sequence[int]) -> Course:
    """The course behind tokens, each of which was allowed."""
    at = course(of)
    for token in tokens:
        may = allowed(at)
        assert may is None or token in may, (WORDS.text(tokens[: at.consumed]), token, may)
        at.take(token)
    return at


# --------------------------------------------------------------------------------------------------------- the course


def test_a_grammar_allows_what_it_says_and_the_end_where_it_is_complete() -> None:
    ids = WORDS.ids
    assert allowed(course(guide(WORD))) == {*ids("a"), AB}
    assert allowed(follow(guide(WORD), ids("a"))) == set(ids("b") + ids("c"))
    assert allowed(follow(guide(WORD), [AB])) == {*ids("b"), *ids("c"), *ids("0")}
    assert allowed(follow(guide(WORD), [*ids("acb"), *ids("c")])) == set(ids("0"))
    done = follow(guide(WORD), ids("ac0"))
    assert allowed(done) == {END} and done.phase is Phase.ANSWER
    done.take(END)
    assert done.phase is Phase.ENDED and allowed(done) == {END}
    for token in (END, STAND_IN, 7):  # rows that were on their way
        done.take(token)
        assert allowed(done) == {END}


def test_several_ends_are_allowed_together_where_the_grammar_may_go_on_as_well() -> None:
    at = follow(guide('start: "a"+\n', ends=(END, 5)), WORDS.ids("aa"))
    assert allowed(at) == {*WORDS.ids("a"), END, 5}


def test_what_is_no_text_is_in_no_string() -> None:
    assert not {THINK, CLOSE, END} & (allowed(follow(json_guide({"type": "string"}), WORDS.ids('"'))) or set())


def test_without_a_grammar_everything_is_allowed_and_nothing_ends() -> None:
    at = course(guide())
    for token in (3, END, END, 5):
        assert allowed(at) is None
        at.take(token)
    assert at.phase is Phase.ANSWER


THOUGHTS = {"opens": [THINK], "closes": [CLOSE]}


def test_a_thought_is_free_and_the_grammar_begins_behind_it() -> None:
    of = guide(WORD, **THOUGHTS)
    assert allowed(course(of)) == {*WORDS.ids("a"), AB, THINK}
    thinks = follow(of, [THINK])
    assert thinks.phase is Phase.THOUGHT and allowed(thinks) == set(range(VOCAB)) - {END}
    answers = follow(of, [THINK, *WORDS.ids("ab0"), CLOSE])
    assert answers.phase is Phase.ANSWER and allowed(answers) == {*WORDS.ids("a"), AB}
    assert allowed(follow(of, [THINK, 5, CLOSE, *WORDS.ids("ac0")])) == {END}
    assert allowed(follow(of, WORDS.ids("a"))) == set(WORDS.ids("b") + WORDS.ids("c"))


@pytest.mark.parametrize(("budget", "told"), [(0, 0), (1, 1), (3, 3)])
@pytest.mark.parametrize("in_thought", [True, False])
@pytest.mark.parametrize("grammar", [WORD, ""])
def test_a_thought_ends_with_its_budget(budget: int, told: int, in_thought: bool, grammar: str) -> None:
    of = guide(grammar, opens=[THINK], closes=[CLOSE], in_thought=in_thought, budget=budget)
    begins = [] if in_thought else [THINK]
    for count in range(told):
        assert allowed(follow(of, begins + [5] * count)) == (set(range(VOCAB)) - {END} if grammar else None)
    spent = follow(of, begins + [5] * told)
    assert spent.phase is Phase.THOUGHT and allowed(spent) == {CLOSE}
    spent.take(CLOSE)
    assert spent.phase is Phase.ANSWER and allowed(spent) == ({*WORDS.ids("a"), AB} if grammar else None)


def test_a_thought_that_closes_by_itself_with_its_last_token_is_not_closed_again() -> None:
    of = guide(WORD, closes=[CLOSE], in_thought=True, budget=2)
    assert allowed(follow(of, [5, CLOSE])) == {*WORDS.ids("a"), AB}


def test_what_closes_may_have_several_ids_and_begin_within_itself() -> None:
    closes = [1, 1, 2]
    of = guide("", closes=closes, in_thought=True, budget=6)
    assert follow(of, [1, 1, 1, 2]).phase is Phase.ANSWER
    assert follow(of, [1, 2, 1, 1]).phase is Phase.THOUGHT
    forced = follow(of, [5, 5, 5, 5, 1, 1])  # half closed when the budget is spent: the rest follows
    assert allowed(forced) == {2}
    whole = follow(of, [5] * 6)
    for token in closes:
        assert whole.phase is Phase.THOUGHT and allowed(whole) == {token}
        whole.take(token)
    assert whole.phase is Phase.ANSWER


def test_what_opens_may_begin_as_the_grammar_does() -> None:
    a, b, c = (WORDS.ids(letter)[0] for letter in "abc")
    of = guide(WORD, opens=[a, b, THINK], closes=[CLOSE])
    assert allowed(follow(of, [a])) == {b, c} and follow(of, [a]).phase is Phase.OPENING
    assert allowed(follow(of, [a, b])) == {b, c, *WORDS.ids("0"), THINK}
    assert follow(of, [a, b, THINK]).phase is Phase.THOUGHT
    assert follow(of, [a, b, c]).phase is Phase.ANSWER
    assert allowed(follow(of, [a, b, THINK, 4, CLOSE])) == {a, AB}


def test_what_opens_stays_alone_where_the_grammar_begins_otherwise() -> None:
    of = guide(WORD, opens=[5, 6], closes=[CLOSE])
    assert allowed(course(of)) == {5, *WORDS.ids("a"), AB} and allowed(follow(of, [5])) == {6}
    with pytest.raises(GuideFailed, match="begins as a thought"):
        follow(of, [5]).take(7)


@pytest.mark.parametrize(
    ("of", "tokens", "why"),
    [
        (guide('start: "a" "0"\n', ends=()), "a0", courses.NO_END),
        (guide(WORD), "b", "does|token"),
        (guide("start: ("), "", "lark|expected|grammar"),
        (json_guide({"type": "nothing"}), "", "nothing"),
    ],
)
def test_what_cannot_go_on_says_why(of: Guide, tokens: str, why: str) -> None:
    with pytest.raises(GuideFailed, match=f"(?i){why}") as failed:
        at = course(of)
        for token in WORDS.ids(tokens):
            at.take(token)
        at.mask()
    assert len(str(failed.value)) <= courses.REASON_CHARS_MAX and "\n" not in str(failed.value)


def test_masks_are_functions_of_the_tokens() -> None:
    """At each place of random answers: that of a course that took every token, and that of one made anew."""
    rng = np.random.default_rng(3)
    of = json_guide(OBJECT, opens=[THINK], closes=[CLOSE], budget=4)
    for _ in range(6):
        goes_on, tokens = course(of), list[int]()
        while goes_on.phase is not Phase.ENDED:
            mask = goes_on.mask()
            assert mask is not None
            anew = course(of)
            for token in tokens:  # without a mask between
                anew.take(token)
            assert np.array_equal(mask, anew.mask()), tokens
            tokens.append(int(rng.choice(np.flatnonzero(mask == 0))))
            goes_on.take(tokens[-1])
        check(tokens)


def check(tokens: Sequence[int]) -> None:
    """An answer of OBJECT, perhaps behind a thought, and its end."""
    if tokens[0] == THINK:
        closed = list(tokens).index(CLOSE)
        assert closed <= 15
        tokens = tokens[closed + 1 :]
    assert tokens[-1] == END
    found = json.loads(WORDS.text(tokens[:-1]))
    assert set(found) == {"a", "b"} and found["b"] in ("ab", "c", 7) and 0 <= found["a"] <= 99, found


# -------------------------------------------------------------------------------------------------------------- lanes


def desk(threads: int = 0, **more: Any) -> Desk:
    made = Desk(Toy(wrong=lambda position: position % 3 == 0), **more)
    made.lanes.guides = Guides(WORDS, threads)
    return made


def guided(of: Guide, **more: Any) -> Sampling:
    return Sampling(guide=of, **({"temperature": 1.5, "seed": 11} | more))


def whole(at: Desk, request: Request, drafts: Sequence[int] = (0,), limit: int = 40) -> list[int]:
    """The tokens of an answer up to its end."""
    while END not in (found := [sample.token for sample in request.samples]) and len(found) < limit:
        at.answer(request, len(found) + 1 + max(drafts), drafts)
    return found[: found.index(END) + 1] if END in found else found


def plain(sampling: Sampling) -> list[int]:
    at = desk()
    return whole(at, at.begin(1, PROMPT, sampling))


@pytest.mark.parametrize("seed", range(12))
def test_answers_are_what_their_guide_says(seed: int) -> None:
    check(plain(guided(JSON, seed=seed)))
    check(plain(guided(json_guide(OBJECT, opens=[THINK], closes=[CLOSE], budget=4), seed=seed)))
    check(plain(guided(JSON, seed=seed, top_k=3, repetition_penalty=1.3, presence_penalty=0.5, min_p=0.1)))


@pytest.mark.parametrize("in_thought", [True, False])
def test_a_thought_has_its_whole_budget_behind_any_prompt(in_thought: bool) -> None:
    """That never closes by itself: what the prompt has in front of it is no part of it."""
    of = json_guide(OBJECT, opens=[THINK], closes=[CLOSE], in_thought=in_thought, budget=7)
    answer = plain(guided(of, logit_bias=((CLOSE, -100.0), (THINK, 100.0))))
    assert answer.index(CLOSE) == (7 if in_thought else 8)
    check(answer[answer.index(CLOSE) + 1 :])


def test_log_probabilities_are_those_of_the_models_own_logits() -> None:
    at = desk()
    request = at.begin(1, PROMPT, guided(JSON, top_logprobs=2, seed=5))
    (first,) = at.answer(request, 1)
    free = desk()
    (same,) = free.answer(free.begin(1, PROMPT, Sampling(temperature=1.5, seed=5, top_logprobs=2)), 1)
    assert first.logprobs is not None and same.logprobs is not None and first.token != same.token
    assert first.logprobs.top == same.logprobs.top and first.logprobs.token == first.token


@pytest.mark.parametrize(
    "of", [JSON, json_guide(OBJECT, closes=[CLOSE], in_thought=True, budget=5)], ids=["", "thought"]
)
def test_a_restart_at_every_place_goes_on_the_same(of: Guide) -> None:
    """From the tokens so far as a prompt in chunks, as after a lost worker or a preemption."""
    sampling = guided(of, seed=3)
    answer = plain(sampling)
    for known in range(len(answer)):
        again = desk()
        request = again.begin(1, PROMPT + answer[:known], sampling)
        request.prompt_len = len(PROMPT)
        again.run(again.rows(request, 4))
        again.run(again.rows(request, len(PROMPT) + known - 4))
        assert answer[:known] + whole(again, request) == answer, known


@pytest.mark.parametrize("cached", [16, 32])
def test_a_prefix_hit_in_the_middle_of_an_answer_goes_on_the_same(cached: int) -> None:
    """What the cache has computed comes as history."""
    of, prompt = json_guide(OBJECT, closes=[CLOSE], in_thought=True, budget=30), PROMPT
    answer = [5] * 30 + [CLOSE, *WORDS.ids('{"a":7')]
    tokens = prompt + answer
    at = desk()
    new = NewLane(1, 9, len(prompt), guided(of), history=pack_ints(tokens[:cached]))
    rows = LaneRows(1, 9, cached, pack_ints(tokens[cached:]), pack_ints([0, 1, 2, 3]), sample=True)
    plan = Plan(1, 0, PlanKind.PREFILL, 1, new=(new,), rows=(rows,))
    (sample,) = at.runner.run(plan).samples
    assert WORDS.text([sample.token])[:1] in "0123456789,"
    at.lanes.lanes[1] = None
    bare = Plan(2, 0, PlanKind.PREFILL, 1, new=(NewLane(1, 9, len(prompt), guided(of)),), rows=(rows,))
    with pytest.raises(LaneRefused, match="history"):
        at.runner.run(bare)


@pytest.mark.parametrize("drafts", [(1,), (3,), (DRAFTS,), (3, 0, 1, 4, 2)], ids=str)
def test_drafts_change_nothing(drafts: tuple[int, ...]) -> None:
    of, counted = json_guide(OBJECT, closes=[CLOSE], in_thought=True, budget=14), 0
    for seed in range(4):
        sampling = guided(of, seed=seed, temperature=0.3)
        at = desk()
        answer = whole(at, at.begin(1, PROMPT, sampling), drafts)
        assert answer == plain(sampling)
        check([THINK, *answer])
        counted += sum(each - 1 for _, each in at.rounds)
    assert counted > 0


def test_rows_behind_the_end_draw_ends() -> None:
    """Plans run ahead: tokens behind the end come, are no error, and nobody reads them."""
    at, limit = desk(), 50
    request = at.begin(1, PROMPT, guided(JSON))
    answer = whole(at, request)
    tokens = [sample.token for sample in at.answer(request, len(answer) + 5)]
    assert tokens[: len(answer)] == answer and tokens[len(answer) :] == [END] * 5 and len(tokens) < limit


def test_ends_that_are_forbidden_are_drawn_where_nothing_else_is_left() -> None:
    """With ignore_eos no end may be drawn; a complete grammar leaves nothing else."""
    sampling = guided(JSON, forbidden=(END,), min_tokens=1000)
    at = desk()
    check(whole(at, at.begin(1, PROMPT, sampling)))
    more = guided(guide('start: "a"+\n'), forbidden=(END,), min_tokens=6)
    at = desk()
    tokens = [sample.token for sample in at.answer(at.begin(1, PROMPT, more), 9)]
    assert END not in tokens[:6] and set(tokens) <= {*WORDS.ids("a"), END}


def test_rows_that_come_again_behind_a_failed_plan_draw_the_same() -> None:
    """Lane 1 has drawn when lane 2 finds no number: what its guide was told is taken back."""
    bad: set[int] = set()
    at = Desk(Toy(spoilt=lambda position: position in bad))
    at.lanes.guides = Guides(WORDS, 0)
    sampling = guided(JSON, seed=2)
    mine, other = at.begin(1, PROMPT, sampling), at.begin(2, PROMPT * 4)
    at.run(at.rows(mine, len(PROMPT)), at.rows(other, 4 * len(PROMPT)))
    bad.add(len(other.tokens))
    with pytest.raises(NotANumber):
        at.runner.run(at.plan(at.rows(mine, 1, 2), at.rows(other, 1, 2)))
    bad.clear()
    at.run(at.rows(mine, 1, 2), at.rows(other, 1, 2))
    assert whole(at, mine, (2,)) == plain(sampling)


# ----------------------------------------------------------------------------------------------------------- failures


BOUNDED = guide('start: a\na: b | c\nb: "a" a\nc: "a" a | "a"\n')


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_guide_that_fails_ends_its_own_lane_alone(monkeypatch: pytest.MonkeyPatch, drafts: int) -> None:
    monkeypatch.setitem(PARSER_LIMITS, "step_max_items", 20)
    at = desk()
    mine = at.begin(1, PROMPT, guided(BOUNDED, forbidden=(END,), min_tokens=50))
    other = at.begin(2, PROMPT, guided(JSON))
    at.run(at.rows(mine, len(PROMPT)), at.rows(other, len(PROMPT)))
    while not mine.samples[-1].failed:
        at.run(at.rows(mine, 1, drafts), at.rows(other))
    assert mine.samples[-1].token == -1 and "limit 20" in mine.samples[-1].failed and len(mine.samples) < 12
    assert all(sample.token in WORDS.ids("a") for sample in mine.samples[:-1])
    assert at.lanes[1].last_token == STAND_IN
    mine.tokens[-1] = STAND_IN  # rows that were on their way
    for told in (True, False):
        at.run(at.rows(mine, told=told), at.rows(other))
        assert mine.samples[-1].failed == mine.samples[-2].failed
        mine.tokens[-1] = STAND_IN
    answer = whole(at, other)
    check(answer)
    alone = desk()
    assert whole(alone, alone.begin(2, PROMPT, guided(JSON))) == answer


@pytest.mark.parametrize("drafts", [0, 3])
def test_ranks_go_on_together_when_a_guide_fails(monkeypatch: pytest.MonkeyPatch, drafts: int) -> None:
    """The ranks that do not draw are told of something in the place of a token; all compute the same rows."""
    monkeypatch.setitem(PARSER_LIMITS, "step_max_items", 20)
    group = on_paper(3, shape_of(3, depth=6))
    ranks = Ranks(group, [Toy(wrong=lambda position: position % 3 == 0, collective=acts) for acts in group.acts])
    ranks.last.lanes.guides = Guides(WORDS, 0)
    mine = ranks.begin(1, PROMPT, guided(BOUNDED, forbidden=(END,), min_tokens=50))
    other = ranks.begin(2, PROMPT, guided(JSON, seed=4))
    ranks.run(ranks.last.rows(mine, len(PROMPT)), ranks.last.rows(other, len(PROMPT)))
    while not mine.samples[-1].failed:
        ranks.run(ranks.last.rows(mine, 1, drafts), ranks.last.rows(other, 1, drafts))
    assert [desk.lanes[1].last_token for desk in ranks.desks if drafts] == [STAND_IN] * 3 * bool(drafts)
    mine.tokens[-1] = STAND_IN
    for _ in range(2):  # rows that were on their way
        ranks.run(ranks.last.rows(mine, told=False), ranks.last.rows(other, told=False))
        mine.tokens[-1] = STAND_IN
    while other.samples[-1].token != END:
        ranks.run(ranks.last.rows(other, 1, drafts))
    tokens = [sample.token for sample in other.samples]
    assert tokens[: tokens.index(END) + 1] == plain(guided(JSON, seed=4))


def test_a_grammar_that_others_have_worn_out_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a copy shares with others is not this answer's doing."""
    at = desk()
    assert at.lanes.guides is not None
    grammars = at.lanes.guides.grammars
    found = grammars.begin(JSON.grammar).result()

    class WornOut:
        def deep_copy(self) -> Any:
            copy = found.deep_copy()
            copy.consume_token(VOCAB - 1)  # from here on it says no to everything
            return copy

    grammars._kept[JSON.grammar].__dict__["_result"] = WornOut()
    check(whole(at, at.begin(1, PROMPT, guided(JSON))))
    assert JSON.grammar not in grammars._kept


def test_grammars_are_compiled_once_and_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guides, "GRAMMARS_KEPT", 2)
    monkeypatch.setattr(guides, "COPIES_MAX", 3)
    grammars = Guides(WORDS, 0).grammars
    texts = [f'start: "{letter}"\n' for letter in "abc"]
    first = grammars.begin(texts[0])
    assert grammars.begin(texts[0]) is first
    grammars.begin(texts[1])
    grammars.begin(texts[0])
    grammars.begin(texts[2])
    assert list(grammars._kept) == [texts[0], texts[2]] and grammars.begin(texts[0]) is first
    for _ in range(3):
        grammars.copier(texts[0])
    assert grammars.begin(texts[0]) is not first


def test_masks_are_made_in_threads_that_end_with_the_rank() -> None:
    before = set(threading.enumerate())
    at = desk(threads=2)
    requests = [at.begin(lane, PROMPT, guided(JSON, seed=lane)) for lane in (1, 2, 3)]
    at.run(*(at.rows(each, len(PROMPT)) for each in requests))
    for _ in range(30):
        at.run(*(at.rows(each) for each in requests))
    for lane, each in enumerate(requests, 1):
        tokens = [sample.token for sample in each.samples]
        alone = desk()
        assert tokens[: tokens.index(END) + 1] == whole(alone, alone.begin(lane, PROMPT, guided(JSON, seed=lane)))
    made = {re.sub(r"_\d+", "", thread.name) for thread in set(threading.enumerate()) - before}
    assert made == {"mask", "grammar"}
    assert at.lanes.guides is not None
    at.lanes.guides.close()
    assert set(threading.enumerate()) <= before


def test_a_plan_with_ids_beyond_the_vocabulary_is_refused() -> None:
    at = desk()
    request = at.begin(1, PROMPT, guided(guide(WORD, ends=(VOCAB,))))
    with pytest.raises(LaneRefused, match="vocabulary"):
        at.run(at.rows(request, 4))


def test_tokens_that_contain_a_text() -> None:
    assert WORDS.containing("b") == {*WORDS.ids("b"), AB} and WORDS.containing("zz") == frozenset()


def test_a_lane_without_a_guide_costs_nothing() -> None:
    at = desk()
    request = at.begin(1, PROMPT, GREEDY)
    at.answer(request, 3)
    assert at.lanes[1].guide is None and not at.lanes.guides.grammars._kept  # type: ignore[union-attr]
