"""How many tokens to draft: as many as pay, sequence by sequence and plan by plan.

A round of k drafts emits 1 + a tokens, where a is how many drafts in a row were drawn. Its plan takes longer than a
plain one: k steps of the drafting block, and k rows more through the trunk. Both sides are known from what has
happened, and from nothing else:

    chance    of draft j, given that those before it were drawn: accepted / judged at that place, of this sequence, each
              round counting FADE less than the one after it. Begins at HOPE, worth TRUST rounds, so that a new sequence
              drafts at once, and one that cannot be predicted stops after a handful of rounds
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
its plan takes longer, and back into it what its tokens are worth. One that is accepted is repeated as soon as the purse
allows, so text that becomes predictable is found within one gap. A new sequence fills the purse: its first plans are
for finding out.

So text that cannot be predicted costs the rounds until its chance has fallen (in its first 64 tokens), and PROBE_SHARE
after that. Without measured times the first plain plans come first: a ratio needs both of its sides.

The choice has no part in what is drawn: an answer is the same with any number of drafts (layouts-and-flip, "verify by
drawing"). Pure: times come from the results of plans.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from homeserve.engine.draft_costs import DraftCosts
from homeserve.engine.draft_counts import DraftCounts as DraftCounts
from homeserve.engine.draft_counts import DraftTotals as DraftTotals

FADE = 0.9
"""Weight of a round beside the one after it."""
HOPE, TRUST = 0.7, 2.0
"""Chance of a draft of which nothing is known yet, and for how many rounds that counts."""
MARGIN = 1.02
"""By how much drafts must be better than none."""
GAP_FIRST, GAP_MOST = 4, 256
"""Plans between probes of one sequence."""
PROBE_SHARE, PROBE_LEAST = 0.02, 0.005
"""Of the time: the most that probes may cost, and what they may cost however often they were in vain."""
PURSE = 1.0
"""Most that is saved up for probes, in plain plans."""
LEAST_GAIN = 0.01
"""Tokens that a draft must add on average to be thought of at all."""


@dataclass
class Drafted:
    """What is known of one sequence's drafts."""

    counts: DraftCounts = field(default_factory=DraftCounts)
    carried: bool = False
    """It was carried over a flip, and nothing of it has been computed anew since."""
    fresh: bool = False
    """No round of it was counted since that flip."""
    judged: list[float] = field(default_factory=list)
    """Rounds in which draft j was judged, because those before it were drawn,"""
    drawn: list[float] = field(default_factory=list)
    """and those in which it was drawn too; both faded."""
    usual: int = 0
    """Drafts that the last choice gave it without a probe."""
    gap: int = GAP_FIRST
    quiet: int = 0
    """Plans since its last probe."""

    def chance(self, place: int) -> float:
        """That draft `place` (from 0) is drawn, if those before it are."""
        if place >= len(self.judged):
            return HOPE
        return self.drawn[place] / self.judged[place]

    def crossed(self, decoding: bool) -> None:
        """A flip has carried it."""
        self.carried, self.fresh = True, decoding

    def rebuilt(self) -> None:
        """What was computed of it is gone."""
        self.carried = self.fresh = False

    def judge(self, drafts: int, accepted: int) -> None:
        """A round: of its drafts so many were drawn, and the next one was not."""
        for place in range(min(drafts, accepted + 1)):
            if place == len(self.judged):
                self.judged.append(TRUST)
                self.drawn.append(TRUST * HOPE)
            self.judged[place] = FADE * self.judged[place] + 1
            self.drawn[place] = FADE * self.drawn[place] + (place < accepted)


class Drafting:
    """The policy of all sequences, and its totals. `most`: drafts of a round in any layout; `adapts`: as many as pay,
    or always as many as may be."""

    def __init__(self, most: int, *, adapts: bool = True) -> None:
        self.most = most
        self.adapts = adapts
        self._counts = DraftTotals()
        self._costs: dict[str, DraftCosts] = {}
        self._purse = PURSE

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

    def choose(self, layout: str, asked: Sequence[tuple[Drafted, int]], *, alone: bool = True) -> list[int]:
        """Drafts of each sequence of the next plan, `asked` being (what is known of it, the most it may have). `alone`:
        no prompt is to be computed beside them, so the plan's time will say something. Asked again without anything
        having come back, it answers the same."""
        if not self.adapts or not any(most for _, most in asked):
            return [most for _, most in asked]
        costs = self._of(layout)
        if alone and costs.wants_plain(len(asked)):
            return [0] * len(asked)
        chosen = _best(asked, costs)
        for (of, _), drafts in zip(asked, chosen, strict=True):
            of.usual = drafts
        return self._with_probes(asked, chosen, costs)

    # ---------------------------------------------------------------------------------------------------- events

    def begin(self) -> Drafted:
        """A new sequence."""
        self._purse = max(self._purse, PURSE)
        return Drafted()

    def count(self, of: Drafted, drafts: int, emitted: int) -> None:
        """A round of a sequence gave its reader so many tokens, at least one."""
        accepted = emitted - 1
        of.counts.count(drafts, accepted, carried=of.carried)
        self._counts.count(drafts, accepted, carried=of.carried, first=of.fresh)
        of.fresh = False

    def back(self, layout: str, rows: Sequence[tuple[Drafted, int, int]], seconds: float) -> None:
        """The decode rows of a plan are back: (sequence, drafts, of them drawn). `seconds`: how long it took the
        ranks, 0 where that says nothing (prompts went with it)."""
        if not rows or not self.adapts:
            return
        costs, lanes = self._of(layout), len(rows)
        ratio = costs.curve(lanes)
        drafts = sum(tried for _, tried, _ in rows)
        usual = sum(min(tried, of.usual) for of, tried, _ in rows)
        gained = sum(max(0, drawn - of.usual) for of, _, drawn in rows)
        for of, tried, drawn in rows:
            self._judge(of, tried, drawn)
        self._purse = min(PURSE, self._purse + PROBE_SHARE + gained / lanes - ratio(drafts) + ratio(usual))
        costs.add(lanes, drafts, seconds)

    # ---------------------------------------------------------------------------------------------------- inside

    def _of(self, layout: str) -> DraftCosts:
        return self._costs.setdefault(layout, DraftCosts())

    def _judge(self, of: Drafted, drafts: int, drawn: int) -> None:
        of.judge(drafts, drawn)
        of.quiet += 1
        if drafts > of.usual:  # a probe
            if drawn == drafts:
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
