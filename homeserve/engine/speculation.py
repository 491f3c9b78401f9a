"""How many tokens to draft: as many as pay, sequence by sequence and plan by plan.

A round of k drafts emits 1 + a tokens, where a is how many drafts in a row were drawn. Its plan takes longer than a
plain one: k steps of the drafting block, and k rows more through the trunk. Both sides are known from what has
happened, and from nothing else:

    chance    of draft j, given that those before it were drawn: accepted / judged at that place, of this sequence, each
              round counting FADE less than the one after it. Begins, worth TRUST rounds, at what the first rounds of
              the sequences before it have brought (`_Starts`), and at HOPE where there were none: a new sequence does
              what was right for the last ones, and a handful of its own rounds overrules that
    gain      of draft j: the product of the chances 1..j, the tokens that it adds on average
    ratio     time of a plan with D drafts beside a plain one of the same sequences (`draft_costs`)

Choice. Gains fall along a sequence, so the D best drafts of all sequences of a plan are the D largest gains, whatever
their order. The plan takes the D for which

    (sequences + the D largest gains) / ratio(D)

is largest, and none at all where that is not MARGIN better than without. With one sequence D is its k; with several,
one that cannot be predicted goes without drafts in the same plan in which another has three.

Probes. What is not drafted is not judged, so a sequence that was bad once would stay off for ever. Each therefore
drafts one more than it would, now and then: after `gap` plans, twice as many after each probe in vain, at most so many
that probes cost PROBE_LEAST of the time; all sequences that are nearly due probe in the same plan. And all probes
together may not cost more than PROBE_SHARE of what plans take: each plan pays into a purse, a probe pays out of it what
its plan takes longer (one that would empty a full purse takes no more than that), and back into it what its tokens are
worth. One that is accepted is repeated as soon as the purse allows, so text that becomes predictable is found within
one gap. The purse is full when the server starts, and a new sequence adds nothing to it: many short answers in a row
that cannot be predicted cost what one long one does.

So text that cannot be predicted costs the rounds until its chance has fallen, of the first few sequences of a server or
behind a change of what is asked, and PROBE_SHARE after that. Without measured times the first plain plans come first: a
ratio needs both of its sides.

A round that ends a life. What drafts may be what a fault needs to show itself. A sequence that was in a round when a
worker was lost is barred from drafting for good, and with the second life lost in a round (`LIVES`), fewer than
`SOUND_ROUNDS` behind the first, drafting is off for this server, whose status says why (`off_because`).

The choice has no part in what is drawn: an answer is the same with any number of drafts (layouts-and-flip, "verify by
drawing"). Pure: times come from the results of plans.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from homeserve.engine.draft_costs import DraftCosts
from homeserve.engine.draft_counts import DraftCounts as DraftCounts
from homeserve.engine.draft_counts import DraftTotals as DraftTotals

FADE = 0.9
"""Weight of a round beside the one after it."""
HOPE, TRUST = 0.7, 3.0
"""Chance of a draft of which nothing is known yet, and for how many rounds counts what is believed at the start."""
START_ROUNDS = 8
"""Rounds of each sequence from which later ones learn how to begin: a long one tells them no more than a short one."""
START_FADE = 0.97
"""Weight of such a round beside the next one of any sequence."""
MARGIN = 1.02
"""By how much drafts must be better than none."""
GAP_FIRST, GAP_MOST = 4, 256
"""Plans between probes of one sequence."""
PROBE_SHARE, PROBE_LEAST = 0.015, 0.005
"""Of the time: the most that probes may cost, and what they may cost however often they were in vain."""
PURSE = 1.0
"""Most that is saved up for probes, in plain plans."""
LEAST_GAIN = 0.01
"""Tokens that a draft must add on average to be thought of at all."""
LIVES = 2
"""Lives of the ranks that end in a round, with which drafting ends too,"""
SOUND_ROUNDS = 1000
"""unless so many rounds have come back in between."""


class _Places:
    """Rounds in which draft j was judged, because those before it were drawn, and those in which it was drawn too; both
    faded."""

    def __init__(self, fade: float) -> None:
        self._fade = fade
        self._judged: list[float] = []
        self._drawn: list[float] = []

    def chance(self, place: int) -> float | None:
        """None: never judged."""
        return self._drawn[place] / self._judged[place] if place < len(self._judged) else None

    def judge(self, drafts: int, accepted: int, begin: Callable[[int], float]) -> None:
        """A round: of its drafts so many were drawn, and the next one was not. `begin`: chances before the first."""
        for place in range(min(drafts, accepted + 1)):
            if place == len(self._judged):
                self._judged.append(TRUST)
                self._drawn.append(TRUST * begin(place))
            self._judged[place] = self._fade * self._judged[place] + 1
            self._drawn[place] = self._fade * self._drawn[place] + (place < accepted)


class _Starts:
    """The first rounds of all sequences: what a new one is believed to be like."""

    def __init__(self) -> None:
        self._places = _Places(START_FADE)

    def chance(self, place: int) -> float:
        known = self._places.chance(place)
        return HOPE if known is None else known

    def judge(self, drafts: int, accepted: int) -> None:
        self._places.judge(drafts, accepted, lambda _: HOPE)


@dataclass
class Drafted:
    """What is known of one sequence's drafts."""

    counts: DraftCounts = field(default_factory=DraftCounts)
    carried: bool = False
    """It was carried over a flip, and nothing of it has been computed anew since."""
    fresh: bool = False
    """No round of it was counted since that flip."""
    starts: _Starts = field(default_factory=_Starts)
    """What is believed of it before it was judged itself."""
    places: _Places = field(default_factory=lambda: _Places(FADE))
    rounds: int = 0
    """Rounds of it that were judged."""
    gap: int = GAP_FIRST
    quiet: int = 0
    """Plans since its last probe."""

    def chance(self, place: int) -> float:
        """That draft `place` (from 0) is drawn, if those before it are."""
        known = self.places.chance(place)
        return self.starts.chance(place) if known is None else known

    def crossed(self, decoding: bool) -> None:
        """A flip has carried it."""
        self.carried, self.fresh = True, decoding

    def rebuilt(self) -> None:
        """What was computed of it is gone."""
        self.carried = self.fresh = False

    def judge(self, drafts: int, accepted: int) -> None:
        """A round: of its drafts so many were drawn, and the next one was not."""
        if not drafts:
            return
        self.places.judge(drafts, accepted, self.starts.chance)
        if self.rounds < START_ROUNDS:
            self.starts.judge(drafts, accepted)
        self.rounds += 1


@dataclass(frozen=True)
class Choice:
    """Drafts of each sequence of a plan, and how many of them without a probe. Nothing depends on it before its plan is
    back."""

    drafts: list[int]
    usual: list[int]


class Row(NamedTuple):
    """A decode row of a plan that is back."""

    of: Drafted
    drafts: int = 0
    drawn: int = 0
    """Drafts that were drawn."""
    usual: int = 0
    """Drafts that it would have had without a probe."""


class Drafting:
    """The policy of all sequences, and its totals. `most`: drafts of a round in any layout; `adapts`: as many as pay,
    or always as many as may be."""

    def __init__(self, most: int, *, adapts: bool = True) -> None:
        self.most = most
        self.adapts = adapts
        self._counts = DraftTotals()
        self._costs: dict[str, DraftCosts] = {}
        self._purse = PURSE
        self._starts = _Starts()
        self._lives = self._sound = 0
        self.off_because = ""
        """Why nothing is drafted any more; empty as long as something may be."""

    # ------------------------------------------------------------------------------------------------- questions

    @property
    def totals(self) -> DraftCounts:
        return self._counts.totals

    @property
    def carried(self) -> DraftCounts:
        """Of sequences that were carried over a flip, since then,"""
        return self._counts.carried

    @property
    def uncarried(self) -> DraftCounts:
        """and of all others."""
        return self._counts.uncarried

    @property
    def first(self) -> DraftCounts:
        """Of the carried ones, each sequence's first round behind each flip."""
        return self._counts.first

    def as_json(self) -> dict[str, Any]:
        return self._counts.as_json()

    def choose(self, layout: str, asked: Sequence[tuple[Drafted, int]], *, alone: bool = True) -> Choice:
        """Drafts of each sequence of the next plan, `asked` being (what is known of it, the most it may have). `alone`:
        no prompt is to be computed beside them, so the plan's time will say something. A question: nothing changes."""
        none = [0] * len(asked)
        if self.off_because:
            return Choice(none, none)
        if not self.adapts or not any(most for _, most in asked):
            most = [most for _, most in asked]
            return Choice(most, most)
        costs = self._of(layout)
        if alone and costs.wants_plain(len(asked)):
            return Choice(none, none)
        usual = _best(asked, costs)
        return Choice(self._with_probes(asked, usual, costs), usual)

    # ---------------------------------------------------------------------------------------------------- events

    def begin(self) -> Drafted:
        """A new sequence."""
        return Drafted(starts=self._starts)

    def count(self, of: Drafted, drafts: int, emitted: int) -> None:
        """A round of a sequence gave its stream so many tokens, at least one."""
        accepted = emitted - 1
        of.counts.count(drafts, accepted, carried=of.carried)
        self._counts.count(drafts, accepted, carried=of.carried, first=of.fresh)
        of.fresh = False
        self._sound += 1

    def lost(self, why: str) -> None:
        """A life of the ranks ended in a round, for `why`."""
        self._lives = 1 if self._sound >= SOUND_ROUNDS else self._lives + 1
        self._sound = 0
        if self._lives == LIVES:
            self.off_because = f"{LIVES} times a worker was lost while it drafted; the last time: {why}"

    def back(self, layout: str, rows: Sequence[Row], seconds: float) -> None:
        """The decode rows of a plan are back. `seconds`: how long it took the ranks, 0 where that says nothing (prompts
        went with it)."""
        if not rows or not self.adapts:
            return
        costs, lanes = self._of(layout), len(rows)
        ratio = costs.curve(lanes)
        drafts = sum(row.drafts for row in rows)
        usual = sum(min(row.drafts, row.usual) for row in rows)
        gained = sum(max(0, row.drawn - row.usual) for row in rows)
        for row in rows:
            self._judge(row)
        cost = min(PURSE, ratio(drafts) - ratio(usual) - gained / lanes)
        self._purse = min(PURSE, self._purse + PROBE_SHARE - cost)
        costs.add(lanes, drafts, seconds)

    # ---------------------------------------------------------------------------------------------------- inside

    def _of(self, layout: str) -> DraftCosts:
        return self._costs.setdefault(layout, DraftCosts())

    @staticmethod
    def _judge(row: Row) -> None:
        of = row.of
        of.judge(row.drafts, row.drawn)
        of.quiet += 1
        if row.drafts > row.usual:  # a probe
            if row.drawn == row.drafts:
                of.gap, of.quiet = GAP_FIRST, GAP_FIRST
            else:
                of.gap, of.quiet = min(2 * of.gap, GAP_MOST), 0

    def _with_probes(self, asked: Sequence[tuple[Drafted, int]], chosen: list[int], costs: DraftCosts) -> list[int]:
        able = [at for at, (_, most) in enumerate(asked) if chosen[at] < most]
        if not able:
            return chosen
        total, ratio = sum(chosen), costs.curve(len(asked))
        cost = ratio(total + len(able)) - ratio(total)
        longest = max(GAP_FIRST, cost / PROBE_LEAST)
        gaps = {at: min(asked[at][0].gap, longest) for at in able}
        if self._purse < min(cost, PURSE) or all(asked[at][0].quiet < gap for at, gap in gaps.items()):
            return chosen
        probing = {at for at, gap in gaps.items() if 2 * asked[at][0].quiet >= gap}
        return [drafts + (at in probing) for at, drafts in enumerate(chosen)]


def _best(asked: Sequence[tuple[Drafted, int]], costs: DraftCosts) -> list[int]:
    """The drafts of each sequence with which a plan emits the most tokens in its time."""
    lanes = len(asked)
    chosen, taken, tokens = [0] * lanes, [0] * lanes, float(lanes)
    best, ratio = MARGIN * tokens, costs.curve(lanes)
    heap = [(-of.chance(0), at) for at, (of, most) in enumerate(asked) if most]
    heapq.heapify(heap)
    drafts = 0
    while heap and -heap[0][0] >= LEAST_GAIN:
        gain, at = heapq.heappop(heap)
        of, most = asked[at]
        taken[at] += 1
        drafts += 1
        tokens -= gain
        if taken[at] < most:
            heapq.heappush(heap, (gain * of.chance(taken[at]), at))
        if (value := tokens / ratio(drafts)) > best:
            chosen, best = list(taken), value
    return chosen
