"""The sampler against a plain, slow one: same candidates, same weights; seeds, penalties, log-probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plain_dry import plain_dry

from homeserve.wire.records import Dry, Sampling
from homeserve.worker import filters
from homeserve.worker.past import Past, TokenCounts, looks_back, no_vocabulary, past_of
from homeserve.worker.sampling import _XTC, LOGPROB_MIN, NotANumber, adjusted, draw, logprobs, uniform

F32 = npt.NDArray[np.float32]


def row(seed: int, vocab: int, scale: float, ties: bool = False) -> F32:
    z = np.random.default_rng(seed).standard_normal(vocab).astype(np.float32) * np.float32(scale)
    return np.round(z) if ties else z


def candidates(z: F32, sampling: Sampling, *, xtc: bool = False) -> tuple[Any, Any]:
    return filters.candidates(z, z, float(z.max()), sampling, xtc=xtc)


# ------------------------------------------------------------------------------------------------ the slow sampler


def slow_candidates(z: F32, s: Sampling, xtc: bool = False) -> dict[int, float] | None:
    """Token -> weight in float64 by whole sorts and Python sums; None where a cut falls on a rounding error."""
    scaled = z.astype(np.float64) / s.temperature
    weight = {i: math.exp(x - scaled.max()) for i, x in enumerate(scaled)}
    ids = sorted(weight, key=lambda i: (-z[i], i))
    if s.top_n_sigma > 0.0:
        mean = math.fsum(map(float, z)) / len(z)
        sigma = math.sqrt(math.fsum((float(x) - mean) ** 2 for x in z) / len(z))
        lowest = float(z.max()) - s.top_n_sigma * sigma
        if any(abs(float(x) - lowest) < 1e-5 for x in z):
            return None
        ids = [i for i in ids if z[i] >= lowest]
    if 0 < s.top_k < len(ids):
        ids = ids[: s.top_k]
    if s.typical_p < 1.0:
        total = math.fsum(weight[i] for i in ids)
        surprise = {i: -math.log(weight[i] / total) for i in ids}
        entropy = math.fsum(weight[i] / total * surprise[i] for i in ids)
        distance = {i: abs(surprise[i] - entropy) for i in ids}
        by_distance = sorted(ids, key=lambda i: (distance[i], i))
        kept = slow_prefix(by_distance, weight, s.typical_p)
        if kept is None or (
            len(kept) < len(ids) and distance[by_distance[len(kept)]] - distance[by_distance[len(kept) - 1]] < 1e-4
        ):
            return None
        ids = sorted(kept, key=lambda i: (-z[i], i))
    if s.top_p < 1.0:
        kept = slow_prefix(ids, weight, s.top_p)
        if kept is None:
            return None
        ids = kept
    if s.min_p > 0.0:
        best = max(weight[i] for i in ids)
        if any(abs(weight[i] / best - s.min_p) < 1e-5 for i in ids):
            return None
        ids = [i for i in ids if weight[i] >= s.min_p * best]
    if xtc:
        total = math.fsum(weight[i] for i in ids)
        if any(abs(weight[i] / total - s.xtc_threshold) < 1e-5 for i in ids):
            return None
        likely = [i for i in ids if weight[i] / total >= s.xtc_threshold]
        ids = [i for i in ids if i not in likely[:-1]]
    return {i: weight[i] for i in ids}


def slow_prefix(ids: list[int], weight: dict[int, float], mass: float) -> list[int] | None:
    total = math.fsum(weight[i] for i in ids)
    reached = 0.0
    for count, i in enumerate(ids, 1):
        reached += weight[i] / total
        if abs(reached - mass) < 1e-5 and count < len(ids):
            return None
        if reached >= mass:
            return ids[:count]
    return ids


_filters = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 5, 40, 600]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.9, 0.99]),
    typical_p=st.sampled_from([1.0, 1.0, 0.2, 0.8]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
    top_n_sigma=st.sampled_from([0.0, 0.0, 0.4, 1.0, 2.5]),
    xtc_threshold=st.sampled_from([0.0, 0.02, 0.1, 0.3, 0.6]),
)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 10_000),
    st.sampled_from([1, 2, 30, 700]),
    st.sampled_from([0.01, 1.0, 8.0]),
    st.booleans(),
    _filters,
    st.booleans(),
)
def test_candidates_and_weights_are_those_of_the_slow_sampler(
    seed: int, vocab: int, scale: float, ties: bool, sampling: Sampling, xtc: bool
) -> None:
    z = row(seed, vocab, scale, ties)
    expected = slow_candidates(z, sampling, xtc)
    assume(expected is not None)
    assert expected is not None
    ids, weights = candidates(z, sampling, xtc=xtc)
    found = range(vocab) if ids is None else ids.tolist()
    assert list(found) == sorted(expected)
    np.testing.assert_allclose(weights, [expected[i] for i in found], rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize(
    ("shares", "sampling", "xtc", "expected"),
    [
        ([0.1, 0.2, 0.3, 0.4], Sampling(top_n_sigma=1.0), False, [0, 0, 0.428571, 0.571429]),
        ([0.1, 0.2, 0.3, 0.4], Sampling(top_n_sigma=3.0), False, [0.1, 0.2, 0.3, 0.4]),
        ([0.97, 0.01, 0.01, 0.01], Sampling(typical_p=0.5), False, [1, 0, 0, 0]),
        ([0.4, 0.2, 0.2, 0.2], Sampling(typical_p=0.5), False, [0, 1 / 3, 1 / 3, 1 / 3]),
        ([0.4, 0.3, 0.2, 0.1], Sampling(xtc_threshold=0.09), True, [0, 0, 0, 1]),
        ([0.4, 0.3, 0.2, 0.1], Sampling(xtc_threshold=0.19), True, [0, 0, 2 / 3, 1 / 3]),
        ([0.4, 0.3, 0.2, 0.1], Sampling(xtc_threshold=0.29), True, [0, 0.5, 1 / 3, 1 / 6]),
        ([0.4, 0.3, 0.2, 0.1], Sampling(xtc_threshold=0.39), True, [0.4, 0.3, 0.2, 0.1]),
        ([0.4, 0.3, 0.2, 0.1], Sampling(xtc_threshold=0.09), False, [0.4, 0.3, 0.2, 0.1]),
    ],
)
def test_filters_are_llama_cpps(shares: list[float], sampling: Sampling, xtc: bool, expected: list[float]) -> None:
    """The cases of its own test, with what they become."""
    ids, weights = candidates(np.log(np.array(shares, np.float32)), sampling, xtc=xtc)
    found = np.zeros(len(shares))
    found[slice(None) if ids is None else ids] = weights / weights.sum()
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_of_equal_top_choices_the_one_with_the_highest_id_stays() -> None:
    z = np.log(np.array([0.2, 0.3, 0.2, 0.2, 0.1], np.float32))
    ids, _ = candidates(z, Sampling(xtc_threshold=0.15), xtc=True)
    assert ids is not None and ids.tolist() == [3, 4]
    ids, weights = candidates(z, Sampling(top_k=1, xtc_threshold=0.15), xtc=True)
    assert ids is not None and ids.tolist() == [1] and len(weights) == 1, "one alone stays"


def test_what_cannot_be_drawn_is_no_top_choice() -> None:
    z = np.array([3, -np.inf, 1, 2, -np.inf], np.float32)
    sampling = Sampling(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.0)
    assert {draw(z, sampling, None, position, 0) for position in range(50)} == {2}
    forbids = Sampling(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.0, forbidden=(2,), min_tokens=1)
    assert {draw(z, forbids, None, position, 0) for position in range(50)} == {3}


def test_what_a_penalty_took_makes_the_sigma_no_wider() -> None:
    """And what is forbidden has none."""
    z = row(4, 1000, 1.0)
    free, _ = candidates(z, Sampling(top_n_sigma=1.0))
    punished = z.copy()
    punished[free[3]] -= 1e9
    ids, _ = filters.candidates(z, punished, float(punished.max()), Sampling(top_n_sigma=1.0))
    assert ids is not None and ids.tolist() == [i for i in free.tolist() if i != free[3]]
    masked = z.copy()
    masked[np.setdiff1d(np.arange(1000), free)] = -np.inf
    ids, _ = candidates(masked, Sampling(top_n_sigma=1.0))
    assert ids is not None and 0 < len(ids) < len(free)


@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0, 4.0])
def test_a_large_vocabulary_is_cut_exactly(scale: float) -> None:
    """Flat rows take the widening and halving paths; the answer is that of one whole sort."""
    z = row(3, 60_000, scale)
    order = np.lexsort((np.arange(len(z)), -z))
    ids, _ = candidates(z, Sampling(top_k=1000))
    assert ids is not None and ids.tolist() == sorted(order[:1000].tolist())
    weights = np.exp((z - z.max())[order].astype(np.float64))
    reached = np.cumsum(weights) / weights.sum()
    ids, _ = candidates(z, Sampling(top_p=0.7))
    count = int(reached.searchsorted(0.7)) + 1
    assert ids is not None and abs(len(ids) - count) <= 1
    assert set(ids.tolist()) <= set(order[: count + 1].tolist())


@pytest.mark.parametrize("vocab", (1, 255, 256, 257, 1000, 2048))
def test_the_drawn_token_is_the_place_in_a_running_sum(vocab: int) -> None:
    """Whatever the vocabulary's length, and with long stretches that cannot be drawn at its start, middle and end."""
    z = np.random.default_rng(vocab).standard_normal(vocab).astype(np.float32)
    for first, last in ((0, 300), (520, 800), (900, 2048)):
        if last - first < vocab:
            z[first:last] = -np.inf
    sampling = Sampling(temperature=0.7, seed=9)
    edges = np.cumsum(np.exp((z.astype(np.float64) - z.max()) / 0.7))
    for position in range(300):
        token = draw(z, sampling, None, position, 0)
        assert token == int(edges.searchsorted(uniform(9, position) * edges[-1], side="right"))
        assert z[token] > -np.inf


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    z = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625], np.float32))
    for sampling, expected in (
        (Sampling(seed=7), [0.5, 0.25, 0.125, 0.0625, 0.0625]),
        (Sampling(seed=7, top_k=2), [2 / 3, 1 / 3, 0, 0, 0]),
        (Sampling(seed=7, temperature=0.5), [0.25 / 0.3359, 0.0625 / 0.3359, 0.0156 / 0.3359, 0.0116, 0.0116]),
    ):
        drawn = np.bincount([draw(z, sampling, None, position, 0) for position in range(3000)], minlength=5) / 3000
        np.testing.assert_allclose(drawn, expected, atol=0.035)


def test_xtc_acts_as_often_as_it_was_asked_to() -> None:
    z = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    for probability, expected in ((0.0, [0.5, 0.3, 0.2]), (1.0, [0.0, 0.6, 0.4]), (0.4, [0.3, 0.42, 0.28])):
        sampling = Sampling(seed=11, xtc_probability=probability, xtc_threshold=0.25)
        drawn = np.bincount([draw(z, sampling, None, position, 0) for position in range(900)], minlength=3) / 900
        np.testing.assert_allclose(drawn, expected, atol=0.05)


def test_at_temperature_0_nothing_below_it_is_looked_at() -> None:
    z = np.array([1, 3, 2, 2.9], np.float32)
    sampling = Sampling(temperature=0, xtc_probability=1.0, xtc_threshold=0.0, top_n_sigma=0.001, typical_p=0.1)
    assert draw(z, sampling, None, 9, 0) == 1


# ----------------------------------------------------------------------------------------------------------- seeds


def test_the_random_number_is_a_function_of_seed_and_position() -> None:
    """Pinned: a change here changes every seeded answer ever given."""
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0), uniform(-1, 5), uniform(2**64 - 1, 5)] == [
        0.6524484863740322,
        0.7012121095215252,
        0.36818951565166946,
        0.15403342580516755,
        0.15403342580516755,
    ]


_FLAT = (
    Sampling(seed=5, xtc_probability=1.0, xtc_threshold=0.1),
    Sampling(seed=5, xtc_probability=0.2, xtc_threshold=0.1),
)


def test_xtc_has_numbers_of_its_own() -> None:
    """Pinned as well. Where XTC acts, the number that draws is as even as elsewhere."""
    assert [uniform(0, 0, _XTC), uniform(0, 1, _XTC), uniform(7, 5, _XTC)] == [
        0.4273067750166728,
        0.19268762408772555,
        0.5379236390937692,
    ]
    pairs = np.array([[uniform(seed, p), uniform(seed, p, _XTC)] for seed in range(60) for p in range(60)])
    assert abs(np.corrcoef(pairs.T)[0, 1]) < 0.05
    assert abs(pairs[:, 1].mean() - 0.5) < 0.015
    acts = pairs[pairs[:, 1] < 0.2, 0]
    assert abs(acts.mean() - 0.5) < 0.04 and acts.max() > 0.95
    tokens = [draw(np.zeros(4, np.float32), sampling, None, p, 0) for sampling in _FLAT for p in range(400)]
    assert set(tokens[:400]) == {3}, "of equal ones all but the last are left out"
    np.testing.assert_allclose(np.bincount(tokens[400:]) / 400, [0.2, 0.2, 0.2, 0.4], atol=0.06)


def test_random_numbers_are_even_and_independent() -> None:
    grid = np.array([[uniform(seed, position) for position in range(100)] for seed in range(100)])
    assert 0.0 <= grid.min() and grid.max() < 1.0
    assert abs(grid.mean() - 0.5) < 0.01
    assert abs(grid.var() - 1 / 12) < 0.003
    for axis in (0, 1):
        ahead = np.roll(grid, 1, axis)
        assert abs(np.corrcoef(grid.ravel(), ahead.ravel())[0, 1]) < 0.03


@settings(deadline=None, max_examples=20)
@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**31 - 1), _filters)
def test_the_same_seed_and_position_draw_the_same_token_whatever_is_around(
    seed: int, position: int, filters: Sampling
) -> None:
    sampling = Sampling(filters.temperature, filters.top_k, filters.top_p, seed=seed)
    batch = np.stack([row(1, 500, 3.0), row(2, 500, 3.0), row(1, 500, 3.0)])
    alone = draw(row(1, 500, 3.0), sampling, None, position, 0)
    assert draw(batch[0], sampling, None, position, 0) == alone
    assert draw(batch[2], sampling, None, position, 0) == alone
    assert draw(batch[1:][1], sampling, None, position, 0) == alone


# ---------------------------------------------------------------------------------------------------------- greedy


def test_greedy_takes_the_largest_and_the_lowest_of_equals() -> None:
    assert draw(np.array([1, 3, 2, 3], np.float32), Sampling(temperature=0), None, 9, 0) == 1
    assert draw(np.array([1, 3, 2, 3], np.float32), Sampling(temperature=1e-9), None, 9, 0) == 1
    # Filters cannot remove the largest, so they do not matter.
    assert draw(np.array([1, 3, 2, 3], np.float32), Sampling(temperature=0, top_p=0.1, min_p=0.9), None, 9, 0) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_no_numbers_are_refused(temperature: float) -> None:
    for bad in ([1.0, math.nan, 5.0], [-math.inf] * 3):
        with pytest.raises(NotANumber, match="position 11"):
            draw(np.array(bad, np.float32), Sampling(temperature=temperature), None, 12, 0)


def test_the_row_is_not_changed() -> None:
    z = row(5, 100, 2.0)
    before = z.copy()
    counts = TokenCounts(100)
    counts.add(np.array([1, 2], np.int32), True)
    sampling = Sampling(1.0, 5, 0.9, 0.1, 0.9, 1.2, 0.5, 0.5, 3, ((4, 2.0),), 5, (6,), 10)
    draw(z, sampling, Past(counts), 3, 0)
    logprobs(z, 3, 5)
    np.testing.assert_array_equal(z, before)


# ------------------------------------------------------------------------------------------------------- penalties


def test_each_penalty_does_what_its_formula_says() -> None:
    """A token wins or loses against a rival that lies just on either side of the formula's value."""
    counts = TokenCounts(6)
    counts.add(np.array([0, 1], np.int32), False)
    counts.add(np.array([2, 2, 2, 3], np.int32), True)
    for sampling, token, logit, becomes in (
        (Sampling(0.0, repetition_penalty=1.5), 0, 3.0, 2.0),  # prompt tokens too
        (Sampling(0.0, repetition_penalty=1.5), 3, -1.0, -1.5),
        (Sampling(0.0, presence_penalty=0.5), 2, 3.0, 2.5),
        (Sampling(0.0, presence_penalty=0.5), 0, 3.0, 3.0),  # not prompt tokens
        (Sampling(0.0, frequency_penalty=0.5), 2, 3.0, 1.5),
        (Sampling(0.0, frequency_penalty=-0.5), 3, 3.0, 3.5),
        (Sampling(0.0, logit_bias=((4, -7.0),)), 4, 3.0, -4.0),
        (Sampling(0.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((2, 1.0),)), 2, 3.0, 2.75),
    ):
        for rival, winner in ((becomes - 0.01, token), (becomes + 0.01, 5)):
            z = np.full(6, -50, np.float32)
            z[token], z[5] = logit, rival
            assert draw(z, sampling, Past(counts) if looks_back(sampling) else None, 9, 4) == winner


def plain_adjusted(z: F32, s: Sampling, tokens: list[int], prompt_len: int) -> list[float]:
    """The steps before temperature, token by token. DRY without breakers."""
    output = tokens[prompt_len:]
    losses = plain_dry(tokens, s.dry) if s.dry is not None else {}
    found = []
    for token, logit in enumerate(map(float, z)):
        if token in tokens:
            logit = logit / s.repetition_penalty if logit > 0 else logit * s.repetition_penalty
        if token in output:
            logit -= s.presence_penalty + s.frequency_penalty * output.count(token)
        logit -= losses.get(token, 0.0)
        logit += dict(s.logit_bias).get(token, 0.0)
        forbidden = token in s.forbidden and len(output) < s.min_tokens
        found.append(-math.inf if forbidden else logit)
    return found


_steps = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.6, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.2]),
    logit_bias=st.sampled_from([(), ((0, 1.5), (3, -100.0))]),
    forbidden=st.sampled_from([(), (1, 2)]),
    min_tokens=st.sampled_from([0, 5, 40]),
    dry=st.none() | st.builds(Dry, st.just(0.8), allowed_len=st.sampled_from([1, 2]), last_n=st.sampled_from([-1, 12])),
)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), _steps, st.sampled_from([2, 6, 30]))
def test_all_steps_before_temperature_are_the_plain_formula(seed: int, sampling: Sampling, alphabet: int) -> None:
    rng = np.random.default_rng(seed)
    z, tokens, prompt_len = row(seed, 40, 4.0), rng.integers(0, alphabet, 30).tolist(), int(rng.integers(0, 31))
    seen = past_of(sampling, 40, no_vocabulary)
    assert (seen is not None) == looks_back(sampling)
    if seen is not None:
        seen.add(np.array(tokens, np.int32), np.arange(30) >= prompt_len)
    found = adjusted(z, sampling, seen, 30 - prompt_len)
    np.testing.assert_allclose(found, plain_adjusted(z, sampling, tokens, prompt_len), rtol=1e-5, atol=1e-5)


def test_counts_do_not_depend_on_how_tokens_were_cut() -> None:
    tokens = np.random.default_rng(0).integers(0, 50, 200).astype(np.int32)
    whole, cut = TokenCounts(50), TokenCounts(50)
    whole.add(tokens, np.arange(200) >= 120)
    for start in range(0, 200, 7):
        part = tokens[start : start + 7]
        cut.add(part, np.arange(start, start + len(part)) >= 120)
    np.testing.assert_array_equal(whole.seen(), cut.seen())
    for a, b in zip(whole.generated(), cut.generated(), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(whole.generated()[0], np.unique(tokens[120:]))
    assert whole.generated()[1].sum() == 80


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_tokens_wait_for_min_tokens(temperature: float) -> None:
    z = np.array([0, 30, 10, 0], np.float32)
    sampling = Sampling(temperature, forbidden=(1,), min_tokens=3)
    assert [draw(z, sampling, None, 20, generated) for generated in (0, 2, 3, 9)] == [2, 2, 1, 1]
    with pytest.raises(NotANumber, match="nothing to draw"):
        draw(z, Sampling(temperature, forbidden=(0, 1, 2, 3), min_tokens=1), None, 20, 0)


# ------------------------------------------------------------------------------------------------ log-probabilities


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 10_000),
    st.sampled_from([3, 50, 900]),
    st.sampled_from([0.1, 1.0, 20.0]),
    st.booleans(),
    st.integers(0, 20),
)
def test_logprobs_are_the_log_softmax_of_the_raw_logits(
    seed: int, vocab: int, scale: float, ties: bool, top: int
) -> None:
    z = row(seed, vocab, scale, ties)
    exact = z.astype(np.float64) - z.max()
    exact -= math.log(np.exp(exact).sum())
    token = seed % vocab
    found = logprobs(z, token, top)
    assert found.token == token
    assert found.logprob == pytest.approx(exact[token], abs=1e-4, rel=1e-5)
    order = sorted(range(vocab), key=lambda i: (-z[i], i))[:top]
    assert [i for i, _ in found.top] == order
    np.testing.assert_allclose([p for _, p in found.top], exact[order], atol=1e-4, rtol=1e-5)


def test_an_impossible_token_has_a_finite_logprob() -> None:
    assert logprobs(np.array([0.0, -math.inf], np.float32), 1, 2).logprob == LOGPROB_MIN
