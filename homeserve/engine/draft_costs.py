"""What a plan with drafts costs beside a plain one of the same sequences: measured, a guess until then. Pure.

Times are those of the ranks, from the end of the plan before, of plans with decode rows alone: nothing runs ahead of a
plan with drafts, and what that costs counts. They are kept apart by how many sequences a plan carries and by how many
drafts each of them has on average (rounded up), the last `KEPT` of each, and the median of these counts: one plan that
met a busy moment changes nothing. Between two numbers of drafts that were measured the time is on the line through
both; beyond the last one it grows by `GUESS` of a plain plan for each draft more. A number of sequences that was never
measured costs, beside its own plain plan, what the nearest one does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median_low

KEPT = 7
GUESS = 0.15
"""Of a plain plan's time, for each further draft of every sequence."""
PLAIN_ENOUGH = 2
"""Plain plans from which their time counts as known: the first one of its kind may pay for what is cold."""
PLAIN_AGAIN = 128
"""Plans with drafts in a row after which a plain one is measured again."""


class _Lanes:
    """Times of plans with one number of sequences."""

    def __init__(self) -> None:
        self.cells: dict[int, deque[tuple[float, float]]] = {}
        """By drafts for each sequence, rounded up: (drafts for each sequence, seconds)."""
        self.since_plain = 0
        self.line: list[tuple[float, float]] = [(0.0, 1.0)]
        """(drafts for each sequence, time as a multiple of the plain plan's), rising."""

    @property
    def knows_plain(self) -> bool:
        return len(self.cells.get(0, ())) >= PLAIN_ENOUGH

    def add(self, drafts: float, seconds: float) -> None:
        self.cells.setdefault(-int(-drafts // 1), deque(maxlen=KEPT)).append((drafts, seconds))
        self.since_plain = 0 if not drafts else self.since_plain + 1
        if self.knows_plain:
            self.line = self._line()

    def _line(self) -> list[tuple[float, float]]:
        plain = median_low(seconds for _, seconds in self.cells[0])
        line = [(0.0, 1.0)]
        for _, samples in sorted((key, samples) for key, samples in self.cells.items() if key):
            drafts = sum(each for each, _ in samples) / len(samples)
            ratio = median_low(seconds for _, seconds in samples) / plain
            line.append((drafts, max(ratio, line[-1][1])))  # a draft more is never cheaper
        return line


class DraftCosts:
    """Of one layout."""

    def __init__(self) -> None:
        self._lanes: dict[int, _Lanes] = {}

    def add(self, lanes: int, drafts: int, seconds: float) -> None:
        """A plan of `lanes` decode rows with so many drafts together took so long."""
        if seconds > 0:
            self._lanes.setdefault(lanes, _Lanes()).add(drafts / lanes, seconds)

    def wants_plain(self, lanes: int) -> bool:
        """A plain plan of so many sequences has to be measured, so that others can be compared with it."""
        of = self._lanes.get(lanes)
        return of is None or not of.knows_plain or of.since_plain >= PLAIN_AGAIN

    def ratio(self, lanes: int, drafts: int) -> float:
        """Time of such a plan, as a multiple of a plain one's."""
        return self.curve(lanes)(drafts)

    def curve(self, lanes: int) -> Callable[[int], float]:
        """The same of any number of drafts."""
        line = self._nearest(lanes)
        return lambda drafts: _at(line, drafts / lanes)

    def _nearest(self, lanes: int) -> list[tuple[float, float]]:
        of = self._lanes.get(lanes)
        if of is None or not of.knows_plain:
            known = [count for count, other in self._lanes.items() if other.knows_plain]
            if not known:
                return [(0.0, 1.0)]
            of = self._lanes[min(known, key=lambda count: (max(count, lanes) / min(count, lanes), count))]
        return of.line


def _at(line: list[tuple[float, float]], drafts: float) -> float:
    left, low = line[0]
    for right, high in line:
        if drafts <= right:
            return low + (high - low) * (drafts - left) / (right - left) if right > left else high
        left, low = right, high
    return low + GUESS * (drafts - left)
