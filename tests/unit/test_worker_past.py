"""What DRY takes, against the rule written out plainly; and that a past is made of tokens alone, however they came."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_dry import plain_dry

from homeserve.engine.prompts import _needs_history
from homeserve.wire.records import Dry, Sampling
from homeserve.worker import past
from homeserve.worker.past import PENALTY_MAX, Past, TokenOrder, looks_back, no_vocabulary, past_of

TEXTS = ["a", "b", "c", "y", "\n", "x:y"]
"""Of tokens 0 to 5."""
A, B, C, Y, LINE, COLON = range(6)


def tokens_with(text: str) -> frozenset[int]:
    return frozenset(token for token, spelled in enumerate(TEXTS) if text in spelled)


def order(dry: Dry, tokens: Sequence[int] = ()) -> TokenOrder:
    made = TokenOrder(dry, tokens_with)
    made.add(np.array(tokens, np.int32))
    return made


def taken(made: TokenOrder) -> dict[int, float]:
    ids, losses = made.penalties()
    assert ids.tolist() == sorted(set(ids.tolist()))
    return dict(zip(ids.tolist(), losses.tolist(), strict=True))


def test_a_token_that_would_go_on_a_repetition_loses_by_its_length() -> None:
    """The example of the module's head: `c` would make a repetition of 3 longer, `b` one of 1, `y` one of 2."""
    history = [A, B, C, C, B, C, Y, A, B, C]
    assert taken(order(Dry(2.0, base=3.0, allowed_len=1), history)) == {B: 2.0, C: 18.0, Y: 6.0}
    assert taken(order(Dry(2.0, base=3.0, allowed_len=2), history)) == {C: 6.0, Y: 2.0}
    assert taken(order(Dry(2.0, base=3.0, allowed_len=4), history)) == {}


def test_only_the_window_is_looked_at() -> None:
    history = [A, B, C, C, B, C, Y, A, B, C]
    assert taken(order(Dry(1.0, allowed_len=2, last_n=9), history)) == {C: 1.0, Y: 1.0}, "`b c` and no longer `a b c`"
    assert taken(order(Dry(1.0, allowed_len=2, last_n=6), history)) == {Y: 1.0}
    assert taken(order(Dry(1.0, allowed_len=2, last_n=5), history)) == {}
    assert taken(order(Dry(1.0, allowed_len=2, last_n=0), history)) == {}


def test_no_repetition_reaches_over_a_breaker_and_none_is_punished() -> None:
    history = [A, B, LINE, C, Y, A, B, LINE, C]
    assert taken(order(Dry(1.0, base=2.0, allowed_len=1), history)) == {Y: 8.0}
    assert taken(order(Dry(1.0, base=2.0, allowed_len=1, breakers=("\n",)), history)) == {Y: 1.0}
    assert taken(order(Dry(1.0, base=2.0, allowed_len=2, breakers=("\n",)), history)) == {}
    assert taken(order(Dry(1.0, allowed_len=1), history[:7])) == {LINE: 1.75}
    assert taken(order(Dry(1.0, allowed_len=1, breakers=("\n",)), history[:7])) == {}
    assert taken(order(Dry(1.0, allowed_len=1, breakers=("\n",)), history[:8])) == {}, "right behind a breaker"
    assert taken(order(Dry(1.0, allowed_len=1, breakers=(":",)), [COLON, A, COLON])) == {}, "a part of a token's text"


@pytest.mark.parametrize(
    ("vocab", "history", "multiplier", "allowed_len", "breaker", "expected"),
    [
        (4, [0, 1], 1.0, 2, "", [0.25] * 4),
        (4, [0, 1, 2, 0, 1], 1.0, 2, "", [0.296923, 0.296923, 0.109232, 0.296923]),
        (5, [0, 1, 3, 4, 0, 1], 1.0, 2, "y", [0.2] * 5),
        (5, [0, 1, 2, 0, 1], 2.0, 2, "", [0.241818, 0.241818, 0.032727, 0.241818, 0.241818]),
        (5, [0, 1, 2, 3, 4, 0, 1], 1.0, 4, "", [0.2] * 5),
    ],
)
def test_it_is_what_llama_cpp_says(
    vocab: int, history: list[int], multiplier: float, allowed_len: int, breaker: str, expected: list[float]
) -> None:
    """The cases of its own test (`test_dry`, base 1.1): what a flat distribution becomes."""
    made = order(Dry(multiplier, 1.1, allowed_len, len(history), (breaker,) if breaker else ()), history)
    logits = np.zeros(vocab)
    ids, losses = made.penalties()
    logits[ids] -= losses
    weights = np.exp(logits)
    np.testing.assert_allclose(weights / weights.sum(), expected, atol=1e-6)


_dry = st.builds(
    Dry,
    multiplier=st.sampled_from([0.5, 2.0]),
    base=st.sampled_from([1.0, 1.75, 3.0]),
    allowed_len=st.sampled_from([0, 1, 2, 3, 7]),
    last_n=st.sampled_from([-1, -1, 1, 4, 9, 20]),
    breakers=st.sampled_from([(), ("\n",), ("\n", ":"), ("x", "a", "q")]),
)


@settings(deadline=None, max_examples=25)
@given(_dry, st.integers(1, 6), st.integers(0, 2**32))
def test_it_is_the_rule_however_the_history_came_and_went(dry: Dry, alphabet: int, seed: int) -> None:
    """Tokens come one by one and in chunks, are looked at now and then, and are taken back."""
    chance = random.Random(seed)
    made, history = order(dry), list[int]()
    for _ in range(16):
        if history and chance.random() < 0.3:
            count = chance.randint(0, min(len(history), 12))
            made.take_back(count)
            del history[len(history) - count :]
        # Often what has been said before.
        at = chance.randrange(len(history)) if history else 0
        said = history[at : at + chance.randint(1, 12)] if chance.random() < 0.5 else []
        more = said or [chance.randrange(alphabet) for _ in range(chance.choice([1, 1, 1, 2, 10]))]
        made.add(np.array(more, np.int32))
        history += more
        if chance.random() < 0.7:
            assert taken(made) == pytest.approx(plain_dry(history, dry, tokens_with))
    assert taken(made) == pytest.approx(plain_dry(history, dry, tokens_with))


@pytest.mark.parametrize("period", [1, 2, 7])
def test_one_long_repetition_costs_no_more_than_a_number(period: int) -> None:
    """A power that float32 does not hold is not asked for, and what is left of a logit is a number."""
    history = [token % period for token in range(3000)]
    for base, most in ((1.75, 0.8 * 1.75 ** int(88.7228391 / math.log(1.75))), (1.0, 0.8)):
        assert taken(order(Dry(0.8, base), history)) == {3000 % period: min(most, PENALTY_MAX)}
    left = np.float32(10) - np.float32(taken(order(Dry(1000.0, 1000.0), history))[3000 % period])
    assert np.isfinite(left) and left < -1e36


def test_tokens_one_by_one_are_not_counted_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw behind each token costs one pass; so does a round of drafts and what is taken back of it."""
    counted = []
    from_nothing = TokenOrder._from_nothing

    def watched(self: TokenOrder) -> Any:
        counted.append(len(self.tokens()))
        return from_nothing(self)

    monkeypatch.setattr(TokenOrder, "_from_nothing", watched)
    dry = Dry(1.0, allowed_len=1)
    made = order(dry, [0, 1, 2, 0, 1])
    made.penalties()
    for round_ in range(20):
        for token in (round_ % 3, 1, 2, 0):
            made.add(np.array([token], np.int32))
            made.penalties()
        made.take_back(round_ % 4)
        assert taken(made) == pytest.approx(plain_dry(made.tokens(), dry, tokens_with))
    assert counted == [5]


def test_breakers_are_looked_for_once() -> None:
    asked = []

    def found(text: str) -> frozenset[int]:
        asked.append(text)
        return tokens_with(text)

    made = TokenOrder(Dry(1.0, allowed_len=1, breakers=("\n", ":")), found)
    made.add(np.array([A, B, A], np.int32))
    assert asked == [], "nobody draws yet"
    for token in (B, LINE, A):
        made.add(np.array([token], np.int32))
        made.penalties()
    assert asked == ["\n", ":"]


def test_breakers_are_looked_for_beside_the_rows_and_the_first_draw_waits() -> None:
    may, asked = threading.Event(), threading.Event()

    def found(text: str) -> frozenset[int]:
        asked.set()
        assert may.wait(60) and threading.current_thread() is not threading.main_thread()
        return tokens_with(text)

    made = Past(order=TokenOrder(Dry(1.0, allowed_len=1, breakers=("\n",)), found))
    made.begin()
    assert asked.wait(60) and made.order is not None
    made.add(np.array([A, LINE, A], np.int32), False)
    may.set()
    assert taken(made.order) == {}
    made.begin()
    failing = order(Dry(1.0, allowed_len=1, breakers=("\n",)), [A, B, A])
    failing._tokens_with = no_vocabulary
    failing.begin()
    with pytest.raises(RuntimeError, match="no vocabulary"):
        failing.penalties()


def test_where_there_is_no_vocabulary_breakers_are_an_error_and_none_are_not() -> None:
    made = TokenOrder(Dry(1.0, allowed_len=1), no_vocabulary)
    made.add(np.array([A, B, A], np.int32))
    assert taken(made) == {B: 1.0}
    made = TokenOrder(Dry(1.0, allowed_len=1, breakers=("\n",)), no_vocabulary)
    made.add(np.array([A, B, A], np.int32))
    with pytest.raises(RuntimeError, match="no vocabulary"):
        made.penalties()


def test_a_lane_keeps_what_its_settings_look_at() -> None:
    assert past_of(Sampling(top_k=3, xtc_probability=1.0), 10, no_vocabulary) is None
    counting = past_of(Sampling(presence_penalty=1.0), 10, no_vocabulary)
    assert counting is not None and counting.counts is not None and counting.order is None
    ordered = past_of(Sampling(dry=Dry(1.0)), 10, no_vocabulary)
    assert ordered is not None and ordered.counts is None and ordered.order is not None
    both = past_of(Sampling(dry=Dry(1.0), repetition_penalty=1.1), 10, no_vocabulary)
    assert both is not None and both.counts is not None and both.order is not None
    assert looks_back(Sampling(dry=Dry(1.0))) and not looks_back(Sampling(temperature=0.0))


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(dry=Dry(1.0)), Sampling(repetition_penalty=1.1), Sampling(presence_penalty=-1.0)]
    + [Sampling(frequency_penalty=0.1), Sampling(xtc_probability=1.0, top_n_sigma=1.0, typical_p=0.5)],
)
def test_the_engine_sends_cached_tokens_where_a_lane_looks_back_at_them(sampling: Sampling) -> None:
    assert _needs_history(sampling) == looks_back(sampling)


def test_a_past_is_taken_back_whole() -> None:
    made = past_of(Sampling(dry=Dry(1.0, allowed_len=1), frequency_penalty=1.0), 6, tokens_with)
    assert isinstance(made, Past) and made.counts is not None and made.order is not None
    made.add(np.array([A, B, A], np.int32), np.array([False, False, True]))
    made.add(np.array([B, C], np.int32), True)
    made.take_back(np.array([B, C], np.int32), np.array([True, True]))
    assert made.order.tokens() == [A, B, A] and made.counts.seen().tolist() == [A, B]
    assert made.counts.generated()[0].tolist() == [A]


def test_the_places_of_equal_beginnings_are_those_of_a_plain_search() -> None:
    chance = random.Random(1)
    for _ in range(200):
        tokens = [chance.randrange(chance.choice([1, 2, 3])) for _ in range(chance.randint(0, 40))]
        plain = [
            next((n for n in range(len(tokens) - at) if tokens[n] != tokens[at + n]), len(tokens) - at) if at else 0
            for at in range(len(tokens))
        ]
        assert past._prefix_lengths(tokens) == plain
        reach = chance.choice([0, 1, 3, len(tokens)])
        compared = past._compared(np.array(tokens, np.int32), reach)
        assert compared is None or compared.tolist() == [min(length, reach) for length in plain]


def test_what_takes_too_many_comparisons_is_left_to_the_other_way() -> None:
    varied = np.random.default_rng(2).integers(0, 50, 2000).astype(np.int32)
    assert past._compared(varied, 2000) is not None
    assert past._compared(np.zeros(2000, np.int32), 2000) is None
    assert past._compared(np.zeros(2000, np.int32), 3) is not None, "a breaker is near"
