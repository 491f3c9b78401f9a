"""How many tokens are drafted: the policy on paper, against texts of known chances and plans of known times."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import pytest

from homeserve.engine.draft_costs import GUESS, PLAIN_AGAIN, DraftCosts
from homeserve.engine.draft_counts import DraftCounts
from homeserve.engine.speculation import PURSE, Drafted, Drafting, Row

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
        choice = drafting.choose("", [(of, MOST) for of in known])
        drafts = choice.drafts
        drawn = [_drawn(chance, text(at), count) for text, at, count in zip(texts, done, drafts, strict=True)]
        per_sequence = sum(drafts) / len(texts)
        low = int(per_sequence)
        high = min(low + 1, MOST)
        took = ratios[low] + (ratios[high] - ratios[low]) * (per_sequence - low)
        took *= 1 + chance.uniform(-0.02, 0.02)
        drafting.back("", list(map(Row, known, drafts, drawn, choice.usual)), took / 1000)
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


@pytest.mark.parametrize("seed", SEEDS)
def test_beside_each_other_each_has_what_pays_for_it(seed: int) -> None:
    """Two sequences that can be predicted and two that cannot, in the same plans."""
    told = decode([counting, noise, counting, noise], CHEAP, tokens=512, seed=seed)
    drafts = [of.drafts(64, 512) for of in told]
    means = [sum(each) / len(each) for each in drafts]
    assert min(means[0], means[2]) > 2.5 and max(means[1], means[3]) < 0.1, means
    plain = 4.0
    together = sum(of.speed(64) for of in told)
    assert together > 1.5 * plain


@pytest.mark.parametrize("lanes", [2, 8, 16])
def test_many_that_cannot_be_predicted_cost_no_more_than_one(lanes: int) -> None:
    told = decode([noise] * lanes, CHEAP, tokens=400)
    assert min(of.speed(64) for of in told) > 0.95


def test_short_answers_one_after_the_other_pay_their_trials_only() -> None:
    """Each of 128 tokens that cannot be predicted; all of it counts."""
    drafting, times, tokens = Drafting(MOST), 0.0, 0
    for seed in range(8):
        (told,) = decode([noise], CHEAP, tokens=128, seed=seed, drafting=drafting)
        tokens, times = tokens + told.plans[-1][0], times + told.plans[-1][1]
    assert tokens / times > 0.96


Cost = tuple[float, float]
"""Of a step of drafting, and of a row in every lane, in plain plans."""


def stream(
    drafting: Drafting, lanes: int, requests: int, text: Text, cost: Cost, tokens: int = 32, seed: int = 1
) -> Told:
    """Requests one after the other in each lane, all of `tokens`. A plan takes a plain one's time, a step for each
    draft of the longest round, and a row for each draft of all. Told: (requests begun, time, tokens of all lanes)."""
    chance, told, time, drawn_all = random.Random(seed), Told(), 0.0, 0
    left, done = requests, [tokens] * lanes
    known = [Drafted()] * lanes
    while True:
        for lane in range(lanes):
            if done[lane] >= tokens:
                known[lane], done[lane], left = drafting.begin(), lane if left == requests - lane else 0, left - 1
        if left <= 0:
            return told
        choice = drafting.choose("", [(of, min(MOST, tokens - at - 1)) for of, at in zip(known, done, strict=True)])
        drawn = [_drawn(chance, text(at), count) for at, count in zip(done, choice.drafts, strict=True)]
        took = 1 + cost[0] * max(choice.drafts) + cost[1] * sum(choice.drafts) / lanes
        took *= 1 + chance.uniform(-0.02, 0.02)
        drafting.back("", list(map(Row, known, choice.drafts, drawn, choice.usual)), took / 1000)
        done = [at + 1 + more for at, more in zip(done, drawn, strict=True)]
        time, drawn_all = time + took, drawn_all + lanes + sum(drawn)
        told.plans.append((requests - left, time, drawn_all))


def of_plain(told: Told, lanes: int, behind: int, until: int = 1 << 30) -> float:
    """Tokens per plain plan's time, once so many requests were over."""
    part = [(time, tokens) for over, time, tokens in told.plans if behind <= over - lanes <= until]
    return (part[-1][1] - part[0][1]) / (part[-1][0] - part[0][0]) / lanes


COSTS = [(0.05, 0.15), (0.05, 0.25), (0.10, 0.15), (0.10, 0.25)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize(("chance", "lanes", "requests"), [(0.0, 1, 45), (0.3, 1, 45), (0.0, 16, 160), (0.3, 16, 160)])
def test_short_answers_in_a_row_learn_from_those_before_them(
    chance: float, lanes: int, requests: int, cost: Cost, seed: int
) -> None:
    """Each of 32 tokens that cannot be predicted well: a new one does not begin with hope again."""
    told = stream(Drafting(MOST), lanes, requests, lambda _: (chance,) * MOST, cost, seed=seed)
    speed = of_plain(told, lanes, 20)
    print(f"p {chance}, {lanes} lanes, {cost}: {speed:.3f} of plain")
    assert speed >= 0.97


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize(("lanes", "tokens"), [(1, 16), (1, 32), (16, 16), (16, 32)])
def test_short_answers_that_can_be_predicted_gain_from_the_first_round_on(lanes: int, tokens: int, cost: Cost) -> None:
    """Of 16 and 32 tokens; the best that there is is always three drafts, as far as `max_tokens` lets them."""
    always = of_plain(stream(Drafting(MOST, adapts=False), lanes, 80, counting, cost, tokens), lanes, 20)
    speed = of_plain(stream(Drafting(MOST), lanes, 80, counting, cost, tokens), lanes, 20)
    print(f"{tokens} tokens, {lanes} lanes, {cost}: {speed:.3f} of {always:.3f}")
    assert speed > 0.95 * always > 1.3


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_asked_changes_and_later_answers_begin_otherwise(seed: int) -> None:
    """Short answers that can be predicted behind many that cannot, and the other way round."""
    drafting = Drafting(MOST)
    stream(drafting, 1, 30, noise, COSTS[0], seed=seed)
    assert drafting.begin().chance(0) < 0.15
    told = stream(drafting, 1, 40, counting, COSTS[0], seed=seed)
    print(f"from noise to counting: {of_plain(told, 1, 0, 10):.2f}, {of_plain(told, 1, 15):.2f} of plain")
    assert of_plain(told, 1, 15) > 1.6 and drafting.begin().chance(0) > 0.6
    told = stream(drafting, 1, 40, noise, COSTS[0], seed=seed)
    assert of_plain(told, 1, 12) > 0.96 and drafting.begin().chance(0) < 0.2


def test_hope_is_for_the_first_few_of_a_server() -> None:
    drafting = Drafting(MOST)
    assert drafting.begin().chance(0) == 0.7
    early = drafting.begin()
    for _ in range(3):
        of = drafting.begin()
        for _ in range(100):
            of.judge(3, 0)
    assert drafting.begin().chance(0) == early.chance(0) < 0.1, "what waited meanwhile knows it too"
    good = drafting.begin()
    for _ in range(1000):
        good.judge(3, 3)
    assert 0.2 < drafting.begin().chance(0) < 0.5, "a long one says no more than eight rounds"
    assert drafting.begin().chance(2) > 0.7


def test_a_new_sequence_fills_no_purse() -> None:
    """What probes cost is counted over all sequences, however short each of them is."""
    drafting, probes, plans = Drafting(MOST), 0, 3000
    for at in range(plans):
        if at % 8 == 0:
            of = drafting.begin()
        choice = drafting.choose("", [(of, MOST)])
        probes += sum(choice.drafts) > sum(choice.usual)
        drafting.back("", [Row(of, choice.drafts[0], 0, choice.usual[0])], STEEP[choice.drafts[0]])
    assert 0.6 * probes < 0.015 * plans + PURSE + 1


def test_a_probe_costs_no_more_than_a_full_purse() -> None:
    """Drafts that cost many plain plans at first, and then few: those that pay are found soon all the same."""
    drafting = Drafting(MOST)
    of = drafting.begin()
    for drafts in (0, 0, 1, 1):
        drafting.back("", [Row(of, drafts, 0)], 1 + 9.0 * drafts)
    for _ in range(8):
        of.judge(3, 0)
    found = 0
    for at in range(400):
        choice = drafting.choose("", [(of, MOST)])
        (drafts,) = choice.drafts
        found += drafts > 0
        drafting.back("", [Row(of, drafts, 0, choice.usual[0])], 1 + 9.0 * drafts)
        assert drafting._purse > -0.01, at
    assert found >= 2


def test_always_as_many_where_it_does_not_adapt() -> None:
    drafting = Drafting(MOST, adapts=False)
    asked = [(drafting.begin(), 3), (drafting.begin(), 1), (drafting.begin(), 0)]
    assert drafting.choose("", asked).drafts == [3, 1, 0]
    for of, most in asked:
        drafting.back("", [Row(of, most, 0, most)], 1.0)
    assert drafting.choose("", asked).drafts == [3, 1, 0]


def test_a_choice_is_the_same_until_something_comes_back() -> None:
    drafting = Drafting(MOST)
    of = [drafting.begin() for _ in range(3)]
    for _ in range(3):
        drafting.back("", [Row(each) for each in of], 1.0)
    asked = [(each, 3) for each in of]
    assert len({tuple(drafting.choose("", asked).drafts) for _ in range(9)}) == 1


def test_each_layout_has_times_of_its_own() -> None:
    drafting = Drafting(MOST)
    of = drafting.begin()
    for _ in range(3):
        drafting.back("tensor", [Row(of)], 1.0)
    assert drafting.choose("tensor", [(of, 3)]).drafts == [3]
    assert drafting.choose("pipeline", [(of, 3)]).drafts == [0], "no plain plan was measured there"
    assert drafting.choose("pipeline", [(of, 3)], alone=False).drafts == [3], "beside a prompt nothing can be measured"


# ---------------------------------------------------------------------------------------------------------------- costs


def test_times_between_measured_ones_lie_on_a_line_and_are_guessed_beyond() -> None:
    costs = DraftCosts()
    assert costs.wants_plain(1) and costs.ratio(1, 2) == pytest.approx(1 + 2 * GUESS)
    for _ in range(2):
        costs.add(1, 0, 10.0)
    assert not costs.wants_plain(1)
    costs.add(1, 2, 14.0)
    assert costs.ratio(1, 2) == pytest.approx(1 + 2 * GUESS), "one plan may have met what is cold"
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
    """Cells that contradict each other have their mean, by samples: the one below is as doubtful as the one above."""
    costs = DraftCosts()
    for drafts, seconds, samples in ((0, 1.0, 2), (1, 1.5, 2), (2, 1.2, 4), (3, 1.6, 2)):
        for _ in range(samples):
            costs.add(1, drafts, seconds)
    assert [costs.ratio(1, drafts) for drafts in range(4)] == pytest.approx([1.0, 1.3, 1.3, 1.6])
    for drafts, seconds in ((2, 0.5), (1, 0.5)):
        for _ in range(14):
            costs.add(1, drafts, seconds)
    assert [costs.ratio(1, drafts) for drafts in range(4)] == pytest.approx([1.0, 1.0, 1.0, 1.6]), "nor than none"


@pytest.mark.parametrize("cold", [2.0, 4.0, 20.0])
def test_one_slow_first_plan_decides_nothing(cold: float) -> None:
    """The first plan with each number of drafts pays for what is cold: the second one of its kind comes at once."""
    drafting = Drafting(MOST)
    of, seen, chosen = drafting.begin(), set[int](), []
    for _ in range(12):
        choice = drafting.choose("", [(of, MOST)])
        (drafts,) = choice.drafts
        chosen.append(drafts)
        drafting.back("", [Row(of, drafts, drafts, choice.usual[0])], CHEAP[drafts] * (1 if drafts in seen else cold))
        seen.add(drafts)
    assert chosen[:2] == [0, 0] and chosen[2:] == [MOST] * 10


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
    for _ in range(12):
        of.judge(3, 0)
    assert of.chance(0) < 0.1 and of.chance(1) == 0.7, "what was never judged"
    for _ in range(8):
        of.judge(3, 3)
    assert min(of.chance(place) for place in range(3)) > 0.5
