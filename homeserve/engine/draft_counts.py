"""What rounds of drafting have brought: drafts, and how many of them were drawn, of one sequence or of many. Pure.

A *round* drafts k tokens and checks them in one plan; it emits one token more than it accepts. So the accept length,
tokens emitted per round, is 1 + accepted / rounds. A round counts with the tokens that the engine gave its stream: what
was drawn behind an end token is nobody's. A stop string is found later, in the text that the
server makes of the stream: tokens behind it, of the round that brought it and of any that was on its way, are counted
here and shown to nobody. So `1 + accepted` of all rounds may be a few more than the tokens of an answer that ended so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any


@dataclass
class DraftCounts:
    """Lists have an entry for each place of a draft in its round, the first one first."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    carried: int = 0
    """Rounds behind a flip over which the sequence was carried."""
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def count(self, drafts: int, accepted: int, *, carried: bool = False) -> None:
        """One round."""
        ones = [1] * drafts
        self.add(DraftCounts(1, drafts, accepted, int(carried), ones, ones[:accepted] + [0] * (drafts - accepted)))

    def add(self, other: DraftCounts) -> None:
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.carried += other.carried
        self.drafted_at = [sum(each) for each in zip_longest(self.drafted_at, other.drafted_at, fillvalue=0)]
        self.accepted_at = [sum(each) for each in zip_longest(self.accepted_at, other.accepted_at, fillvalue=0)]

    @property
    def accept_len(self) -> float | None:
        """Tokens emitted per round; None without any."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def accept_rate(self) -> float | None:
        """Drafts accepted of those made."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def by_position(self) -> list[float]:
        """The same at each place that was ever drafted. (A draft behind one that was not drawn is not accepted.)"""
        return [hits / tries for hits, tries in zip(self.accepted_at, self.drafted_at, strict=True)]

    def as_json(self) -> dict[str, Any]:
        """`homeserve.draft` of a response."""
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accept_len": _rounded(self.accept_len),
            "by_position": [round(rate, 4) for rate in self.by_position],
            "carried": self.carried,
        }


class DraftTotals:
    """Counts over all sequences, those that were carried over a flip apart from the others."""

    def __init__(self) -> None:
        self.carried = DraftCounts()
        self.uncarried = DraftCounts()
        self.first = DraftCounts()
        """Of the carried ones, each sequence's first round behind each flip."""

    def count(self, drafts: int, accepted: int, *, carried: bool, first: bool) -> None:
        (self.carried if carried else self.uncarried).count(drafts, accepted, carried=carried)
        if first:
            self.first.count(drafts, accepted, carried=True)

    @property
    def totals(self) -> DraftCounts:
        both = DraftCounts()
        both.add(self.carried)
        both.add(self.uncarried)
        return both

    def as_json(self) -> dict[str, Any]:
        """`draft` of the status, but whether it is on and why not."""
        totals = self.totals
        parts = {"carried": self.carried, "uncarried": self.uncarried, "first": self.first}
        return {
            "accept_len": _rounded(totals.accept_len),
            "accept_rate": _rounded(totals.accept_rate),
            "by_position": [round(rate, 4) for rate in totals.by_position],
            **{name: {"accept_len": _rounded(of.accept_len), "rounds": of.rounds} for name, of in parts.items()},
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
