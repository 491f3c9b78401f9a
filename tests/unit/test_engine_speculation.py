"""How many tokens are drafted: the policy on paper, against texts of known chances and plans of known times."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import pytest

from homeserve.engine.draft_costs import GUESS, PLAIN_AGAIN, DraftCosts
from homeserve.engine.draft_counts import DraftCounts
from homeserve.engine.speculation import Drafted, Drafting

Text = Callable[[int], Sequence[float]]
"""Position -> chance of each draft of a round there, if those before it were drawn."""

MOST = 3
CHEAP = (1.0, 1.15, 1.3, 1.45)
STEEP = (1.0, 1.6, 2.2, 2.8)
HOPELESS = (1.0, 2.5, 4.0, 5.5)
"""Time of a plan with 0..3 drafts, beside a plain one's."""


def counting(_: int) -> Sequence[float]:
    return (0.95, 0.95, 0.95)


def noise(_: int) -> Sequence[float]:
    return (0.03, 0.03, 0.03)


def prose(_: int) -> Sequence[float]:
    return (0.5, 0.4, 0.3)


def short_sighted(_: int) -> Sequence[float]:
    return (0.95, 0.1, 0.1)


def switching(at: int) -> Sequence[float]:
    return counting(at) if at // 256 % 2 else noise(at)


@dataclass
class Told:
    """One sequence's decoding: (tokens so far, time so far, drafts) of each plan, in plain plans."""

    plans: list[tuple[int, float, int]] = field(default_factory=list)

    def speed(self, first: int = 0, end: int = 1 << 30) -> float:
        """Tokens per plain plan's time, of plans that end between two positions."""
        part = [(at, time) for at, time, _ in self.plans if first <= at <= end]
        return (part[-1][0] - part[0][0]) / (part[-1][1] - part[0][1])

    def drafts(self, first: int, end: int) -> list[int]:
        return [drafts for at, _, drafts in self.plans if first <= at < end]


def decode(
    texts: Sequence[Text], ratios: Sequence[float], tokens: int = 768, seed: int = 1, drafting: Drafting | None = None
) -> list[Told]:
    """Sequences that decode side by side. A plan takes what its drafts for each sequence cost, within two percent."""
    chance = random.Random(seed)
    drafting = drafting or Drafting(MOST)
    known, told, done, time = [drafting.begin() for _ in texts], [Told() for _ in texts], [0] * len(texts), 0.0
    while min(done) < tokens:
        drafts = drafting.choose("", [(of, MOST) for of in known])
        drawn = [_drawn(chance, text(at), count) for text, at, count in zip(texts, done, drafts, strict=True)]
        per_sequence = sum(drafts) / len(texts)
        low = int(per_sequence)
        high = min(low + 1, MOST)
        took = ratios[low] + (ratios[high] - ratios[low]) * (per_sequence - low)
        took *= 1 + chance.uniform(-0.02, 0.02)
        drafting.back("", list(zip(known, drafts, drawn, strict=True)), took / 1000)
        time += took
        for n, of in enumerate(known):
            if drafts[n]:
                drafting.count(of, drafts[n], drawn[n] + 1)
            done[n] += drawn[n] + 1
            told[n].plans.append((done[n], time, drafts[n]))
    return told


def _drawn(chance: random.Random, chances: Sequence[float], drafts: int) -> int:
    drawn = 0
    while drawn < drafts and chance.random() < chances[drawn]:
        drawn += 1
    return drawn


def best(text: Text, ratios: Sequence[float]) -> tuple[float, int]:
    """Tokens per plain plan's time with the number of drafts that is best, and that number."""
    found, tokens, product = (1.0, 0), 1.0, 1.0
    for drafts, chance in enumerate(text(300), 1):
        product *= chance
        tokens += product
        found = max(found, (tokens / ratios[drafts], drafts))
    return found


SEEDS = range(3)


@pytest.mark.parametrize("ratios", [CHEAP, STEEP, HOPELESS])
@pytest.mark.parametrize("text", [noise, counting, prose, short_sighted, switching])
def test_behind_its_first_64_tokens_no_text_is_slower_than_plain(text: Text, ratios: Sequence[float]) -> None:
    """Where drafts never pay, what they are tried for costs less than a twentieth, whatever the seed."""
    speeds = [decode([text], ratios, seed=seed)[0].speed(64) for seed in SEEDS]
    print(f"{text.__name__} at {ratios}: {min(speeds):.3f} .. {max(speeds):.3f} of plain")
    assert min(speeds) > 0.95


@pytest.mark.parametrize(
    ("text", "ratios", "share"),
    [(counting, CHEAP, 0.96), (counting, STEEP, 0.95), (prose, CHEAP, 0.95), (short_sighted, CHEAP, 0.95),
     (short_sighted, STEEP, 0.95)],
)  # fmt: skip
def test_where_drafts_pay_nearly_all_of_it_is_earned(text: Text, ratios: Sequence[float], share: float) -> None:
    most, _ = best(text, ratios)
    speeds = [decode([text], ratios, seed=seed)[0].speed(64) for seed in SEEDS]
    print(f"{text.__name__} at {ratios}: {median(speeds):.3f} of {most:.3f} at best")
    assert median(speeds) > share * most and min(speeds) > 0.9 * most


@pytest.mark.parametrize("ratios", [CHEAP, (1.0, 1.05, 1.1, 1.15), (1.0, 1.5, 1.55, 1.6)])
def test_predictable_text_is_drafted_best_within_16_rounds(ratios: Sequence[float]) -> None:
    for seed in SEEDS:
        (told,) = decode([counting], ratios, tokens=400, seed=seed)
        rounds = [drafts for _, _, drafts in told.plans if drafts][:32]
        assert sum(drafts == MOST for drafts in rounds[16:]) >= 14, rounds


def test_text_that_becomes_predictable_is_found_and_let_go_again() -> None:
    """256 tokens of each in turn: drafted soon after the turn, and not long behind its end."""
    gained = []
    for seed in SEEDS:
        (told,) = decode([switching], CHEAP, seed=seed)
        for turn in (256,):
            gained.append(told.speed(turn, turn + 255))
            late = told.drafts(turn + 96, turn + 250)
            assert sum(drafts == MOST for drafts in late) > 0.9 * len(late)
        behind = told.drafts(512 + 32, 768)
        assert sum(behind) < 0.1 * len(behind), "drafts behind the turn to noise"
    print(f"first 256 predictable tokens behind 256 others: {median(gained):.2f} of plain")
    assert median(gained) > 1.7


def test_beside_each_other_each_has_what_pays_for_it() -> None:
    """Two sequences that can be predicted and two that cannot, in the same plans."""
    for seed in SEEDS:
        told = decode([counting, noise, counting, noise], CHEAP, seed=seed)
        drafts = [of.drafts(64, 768) for of in told]
        means = [sum(each) / len(each) for each in drafts]
        assert min(means[0], means[2]) > 2.5 and max(means[1], means[3]) < 0.1, means
        plain = 4.0
        together = sum(of.speed(64) for of in told)
        assert together > 1.5 * plain


def test_many_that_cannot_be_predicted_cost_no_more_than_one() -> None:
    for lanes in (2, 8, 16):
        told = decode([noise] * lanes, CHEAP, tokens=600)
        assert min(of.speed(64) for of in told) > 0.95


def test_short_answers_one_after_the_other_pay_their_trials_only() -> None:
    """Each of 128 tokens that cannot be predicted; all of it counts."""
    drafting, times, tokens = Drafting(MOST), 0.0, 0
    for seed in range(8):
        (told,) = decode([noise], CHEAP, tokens=128, seed=seed, drafting=drafting)
        tokens, times = tokens + told.plans[-1][0], times + told.plans[-1][1]
    assert tokens / times > 0.96


def test_always_as_many_where_it_does_not_adapt() -> None:
    drafting = Drafting(MOST, adapts=False)
    asked = [(drafting.begin(), 3), (drafting.begin(), 1), (drafting.begin(), 0)]
    assert drafting.choose("", asked) == [3, 1, 0]
    for of, most in asked:
        drafting.back("", [(of, most, 0)], 1.0)
    assert drafting.choose("", asked) == [3, 1, 0]


def test_a_choice_is_the_same_until_something_comes_back() -> None:
    drafting = Drafting(MOST)
    of = [drafting.begin() for _ in range(3)]
    for _ in range(3):
        drafting.back("", [(each, 0, 0) for each in of], 1.0)
    asked = [(each, 3) for each in of]
    assert len({tuple(drafting.choose("", asked)) for _ in range(9)}) == 1


def test_each_layout_has_times_of_its_own() -> None:
    drafting = Drafting(MOST)
    of = drafting.begin()
    for _ in range(3):
        drafting.back("tensor", [(of, 0, 0)], 1.0)
    assert drafting.choose("tensor", [(of, 3)]) == [3]
    assert drafting.choose("pipeline", [(of, 3)]) == [0], "no plain plan was measured there"
    assert drafting.choose("pipeline", [(of, 3)], alone=False) == [3], "beside a prompt nothing can be measured"


# ---------------------------------------------------------------------------------------------------------------- costs


def test_times_between_measured_ones_lie_on_a_line_and_are_guessed_beyond() -> None:
    costs = DraftCosts()
    assert costs.wants_plain(1) and costs.ratio(1, 2) == pytest.approx(1 + 2 * GUESS)
    for _ in range(2):
        costs.add(1, 0, 10.0)
    assert not costs.wants_plain(1)
    costs.add(1, 2, 14.0)
    assert [costs.ratio(1, drafts) for drafts in range(5)] == pytest.approx([1, 1.2, 1.4, 1.4 + GUESS, 1.4 + 2 * GUESS])
    assert costs.ratio(2, 2) == pytest.approx(1.2), "as of the nearest number of sequences"
    assert costs.wants_plain(2)


def test_one_busy_moment_changes_no_time() -> None:
    costs = DraftCosts()
    for seconds in (1.0, 1.0, 1.0, 50.0):
        costs.add(4, 0, seconds)
    for seconds in (1.4, 90.0, 1.4):
        costs.add(4, 4, seconds)
    assert costs.ratio(4, 4) == pytest.approx(1.4)


def test_a_draft_more_is_never_cheaper() -> None:
    costs = DraftCosts()
    for drafts, seconds in ((0, 1.0), (0, 1.0), (1, 1.5), (2, 1.2), (3, 1.6)):
        costs.add(1, drafts, seconds)
    assert [costs.ratio(1, drafts) for drafts in range(4)] == pytest.approx([1.0, 1.5, 1.5, 1.6])


def test_plain_plans_are_measured_again() -> None:
    costs = DraftCosts()
    for _ in range(2):
        costs.add(1, 0, 1.0)
    for _ in range(PLAIN_AGAIN):
        assert not costs.wants_plain(1)
        costs.add(1, 3, 1.4)
    assert costs.wants_plain(1)
    costs.add(1, 0, 1.0)
    assert not costs.wants_plain(1)


def test_a_plan_without_a_time_says_nothing() -> None:
    costs = DraftCosts()
    costs.add(1, 0, 0.0)
    costs.add(1, 0, 0.0)
    assert costs.wants_plain(1)


# --------------------------------------------------------------------------------------------------------------- counts


def test_counts_by_position_and_their_json() -> None:
    counts = DraftCounts()
    for drafts, accepted in ((3, 2), (3, 0), (1, 1), (2, 2)):
        counts.count(drafts, accepted)
    counts.count(3, 3, carried=True)
    assert counts.as_json() == {
        "rounds": 5,
        "drafted": 12,
        "accepted": 8,
        "accept_len": 2.6,
        "by_position": [0.8, 0.75, 0.3333],
        "carried": 1,
    }
    assert DraftCounts().as_json()["accept_len"] is None and DraftCounts().accept_rate is None
    both = DraftCounts()
    both.add(counts)
    both.add(counts)
    assert (both.rounds, both.accepted_at, both.drafted_at) == (10, [8, 6, 2], [10, 8, 6])
    assert counts.rounds == 5, "what is added stays what it was"


def test_rounds_behind_a_flip_are_told_apart_and_the_first_of_them() -> None:
    drafting = Drafting(MOST)
    stays, crosses, half = drafting.begin(), drafting.begin(), drafting.begin()
    drafting.count(crosses, 3, 1)
    crosses.crossed(True)
    half.crossed(False)
    drafting.count(crosses, 3, 4)
    drafting.count(crosses, 3, 3)
    drafting.count(half, 2, 2)
    drafting.count(stays, 1, 1)
    assert (drafting.uncarried.rounds, drafting.carried.rounds, drafting.first.rounds) == (2, 3, 1)
    assert (drafting.uncarried.accepted, drafting.carried.accepted, drafting.first.accepted) == (0, 6, 3)
    assert (drafting.totals.rounds, drafting.totals.carried, crosses.counts.carried) == (5, 3, 2)
    crosses.crossed(True)
    crosses.rebuilt()
    drafting.count(crosses, 3, 1)
    assert (drafting.uncarried.rounds, drafting.first.rounds) == (3, 1), "computed anew, nothing of it was carried"
    told = drafting.as_json()
    assert list(told) == ["accept_len", "accept_rate", "by_position", "carried", "uncarried", "first"]
    assert told["carried"] == {"accept_len": 3.0, "rounds": 3}


def test_a_sequence_of_which_nothing_is_known_may_be_predictable() -> None:
    of = Drafted()
    assert of.chance(0) == of.chance(7) == 0.7
    for _ in range(8):
        of.judge(3, 0)
    assert of.chance(0) < 0.1 and of.chance(1) == 0.7, "what was never judged"
    for _ in range(8):
        of.judge(3, 3)
    assert min(of.chance(place) for place in range(3)) > 0.5
