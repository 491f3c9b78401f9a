"""Verifying by drawing keeps the distribution: chi-square of answers that came with drafts, over a small vocabulary.

The target's logits are a table by the two tokens before, the drafting block's are its own; requests differ by their
seed alone. What three tokens in a row should be is computed here from the table, in double precision and by another
way than the worker's. 2 000 draws of each kind; 20 000 in the slow tier.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from draft_rig import LANE_PAGES, Desk

from backends.base import Batch, Limits
from homeserve.wire.records import Sampling

SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
DRAWS = 20_000 if SLOW else 2_000
VOCAB, LANES, DRAFTS, LENGTH = 5, 4, 3, 4
PROMPT = [3, 1]
LEAST_P = 1e-3
TARGET = np.random.default_rng(17).normal(0, 1.4, (VOCAB, VOCAB, VOCAB)).astype(np.float32)
GUESS = (TARGET + np.random.default_rng(18).normal(0, 0.6, TARGET.shape)).astype(np.float32)
KINDS = {
    "cool": Sampling(temperature=0.6),
    "warm": Sampling(temperature=1.0),
    "hot": Sampling(temperature=1.7),
    "top-p": Sampling(temperature=1.2, top_p=0.85),
    "hot top-p": Sampling(temperature=2.0, top_p=0.9),
}

pytestmark = pytest.mark.timeout(240 if SLOW else 60)


class Tables:
    """A program without weights: logits from tables, by the last two tokens."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], int] = {}
        """Token by lane and position."""

    def run(self, batch: Batch) -> npt.NDArray[np.float32]:
        return self._rows(batch, TARGET)[batch.logit_rows]

    def draft(self, batch: Batch) -> npt.NDArray[np.float32]:
        return self._rows(batch, GUESS)

    def accept(self, kept: list[tuple[int, int]]) -> None:
        """It has no state but the tokens, and those are written over."""

    def copy_states(self, pairs: list[tuple[int, int]]) -> None:
        pass

    def _rows(self, batch: Batch, table: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        places = list(zip(batch.lanes.tolist(), batch.positions.tolist(), strict=True))
        self.seen |= dict(zip(places, batch.tokens.tolist(), strict=True))
        before = [self.seen.get((lane, position - 1), 0) for lane, position in places]
        return table[before, batch.tokens]


def drawn(sampling: Sampling, forced: str = "", draws: int = DRAWS) -> tuple[Counter[tuple[int, ...]], float]:
    """How often each three tokens were the second to fourth of an answer, and the part of the drafts that counted."""
    limits = Limits(rows=64, logit_rows=64, lanes=LANES, lane_pages=LANE_PAGES, held_rows=LANES * (1 + DRAFTS))
    desk = Desk(Tables(), forced=forced, drafts=DRAFTS, limits=limits, vocab=VOCAB)
    found: Counter[tuple[int, ...]] = Counter()
    for first in range(0, draws, LANES):
        desk.runner.run(desk.flush())
        for lane in range(LANES):
            made = {name: getattr(sampling, name) for name in ("temperature", "top_p")}
            desk.begin(lane, PROMPT, Sampling(**made, seed=1_000_003 * (first + lane)))
        asked = list(desk.requests.values())
        desk.run(*(desk.rows(each, len(PROMPT)) for each in asked))
        while short := [each for each in asked if len(each.samples) < LENGTH]:
            desk.run(*(desk.rows(each, 1, DRAFTS) for each in short))
        for each in asked:
            found[tuple(sample.token for sample in each.samples[1:LENGTH])] += 1
    counted = sum(rows - 1 for _, rows in desk.rounds) / sum(drafts for drafts, _ in desk.rounds)
    return found, counted


def chances(sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Of each three tokens behind the first one that is drawn."""
    chance: dict[tuple[int, ...], float] = {}
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        line = [*PROMPT, *tokens]
        odds = [kept(TARGET[line[at], line[at + 1]], sampling)[line[at + 2]] for at in range(LENGTH)]
        chance[tokens[1:]] = chance.get(tokens[1:], 0.0) + math.prod(odds)
    return chance


def kept(logits: npt.NDArray[np.float32], sampling: Sampling) -> list[float]:
    """The distribution that temperature and top-p leave of one row."""
    powers = [math.exp(float(each) / sampling.temperature) for each in logits]
    odds = [each / sum(powers) for each in powers]
    left, mass = set[int](), 0.0
    for token in sorted(range(VOCAB), key=lambda at: -odds[at]):
        if mass < sampling.top_p:
            left.add(token)
        mass += odds[token]
    whole = sum(odds[token] for token in left)
    return [odds[token] / whole if token in left else 0.0 for token in range(VOCAB)]


def chi_square(found: Counter[tuple[int, ...]], chance: dict[tuple[int, ...], float]) -> float:
    """The probability of a distance as large as this one or larger. Rare kinds are counted together."""
    bins = [(found[each], DRAWS * odds) for each, odds in chance.items() if DRAWS * odds >= 5]
    rare = [(found[each], DRAWS * odds) for each, odds in chance.items() if DRAWS * odds < 5]
    if sum(expected for _, expected in rare) >= 5:
        bins.append((sum(count for count, _ in rare), sum(expected for _, expected in rare)))
    assert sum(found[each] for each, odds in chance.items() if not odds) == 0, "what cannot be drawn was drawn"
    distance = sum((count - expected) ** 2 / expected for count, expected in bins)
    return upper_gamma((len(bins) - 1) / 2, distance / 2)


def upper_gamma(a: float, x: float) -> float:
    """Q(a, x) = 1 - P(a, x); P by its series, x^a e^-x / Gamma(a + 1) * sum x^n / ((a + 1) .. (a + n))."""
    if x <= 0:
        return 1.0
    term = total = 1.0
    step = 0
    while term > total * 1e-17:
        step += 1
        term *= x / (a + step)
        total += term
    return max(0.0, 1.0 - math.exp(a * math.log(x) - x - math.lgamma(a + 1)) * total)


def test_the_probability_of_a_distance_is_that_of_the_tables() -> None:
    """0.95 quantiles of chi-square as they are printed everywhere."""
    for freedom, distance in ((1, 3.841), (5, 11.070), (30, 43.773), (100, 124.342)):
        assert upper_gamma(freedom / 2, distance / 2) == pytest.approx(0.05, abs=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_that_came_with_drafts_have_the_targets_distribution(
    kind: str, measured: Callable[[str], None]
) -> None:
    found, counted = drawn(KINDS[kind])
    p = chi_square(found, chances(KINDS[kind]))
    measured(f"{kind}: p = {p:.3f} of {DRAWS} draws, {counted:.0%} of the drafts counted")
    assert found.total() == DRAWS and 0.2 < counted < 0.98
    assert p > LEAST_P


def test_the_same_test_finds_drafts_that_count_unseen() -> None:
    found, _ = drawn(KINDS["warm"], forced="accept:1")
    assert chi_square(found, chances(KINDS["warm"])) < 1e-9


def test_seeds_are_those_of_plain_decoding() -> None:
    """The same seeds give the same answers as without a draft: not the distribution alone."""
    plainly, _ = drawn(KINDS["hot top-p"], "accept:0", 400)
    assert plainly == drawn(KINDS["hot top-p"], draws=400)[0] and len(plainly) > 20
