"""What a plan with drafts costs beside a plain one of the same sequences: measured, a guess until then. Pure.

Times are the shares (`timeline`) of plans with decode rows alone: nothing runs ahead of a plan with drafts, and the
pause in front of it counts. They are kept apart by how many sequences a plan carries and by how many drafts each of
them has on average (rounded up to a part of a draft, `PARTS`), the last `KEPT` of each, and the median of these counts,
from the `ENOUGH`-th one on: one plan that met a busy moment changes nothing, not even the first of its kind, which may
pay for what is cold. A draft more is never cheaper: where it was measured so, both cells have the mean of the two,
weighted by their samples (pool adjacent violators, Ayer et al. 1955), so that one cell that is wrong does not spoil
those above it. Between two numbers of drafts that were measured the time is on the line through both; beyond the last
one it grows by `GUESS` of a plain plan for each draft more. A number of sequences that was never measured costs, beside
its own plain plan, what the nearest one does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median_low

KEPT = 7
GUESS = 0.15
"""Of a plain plan's time, for each further draft of every sequence."""
PARTS = 4
"""Cells for each draft of every sequence: a step costs as much for one of them as for all, so the first row is dear."""
ENOUGH = 2
"""Plans of a kind from which their time counts as known."""
PLAIN_AGAIN = 128
"""Plans with drafts in a row after which a plain one is measured again."""


class _Lanes:
    """Times of plans with one number of sequences."""

    def __init__(self) -> None:
        self.cells: dict[int, deque[tuple[float, float]]] = {}
        """By drafts for each sequence, in parts, rounded up: (drafts for each sequence, seconds)."""
        self.since_plain = 0
        self.line: list[tuple[float, float]] = [(0.0, 1.0)]
        """(drafts for each sequence, time as a multiple of the plain plan's), rising."""

    @property
    def knows_plain(self) -> bool:
        return len(self.cells.get(0, ())) >= ENOUGH

    def add(self, drafts: float, seconds: float) -> None:
        self.cells.setdefault(-int(-PARTS * drafts // 1), deque(maxlen=KEPT)).append((drafts, seconds))
        self.since_plain = 0 if not drafts else self.since_plain + 1
        if self.knows_plain:
            self.line = self._line()

    def _line(self) -> list[tuple[float, float]]:
        plain = median_low(seconds for _, seconds in self.cells[0])
        cells = [cell for key, cell in sorted(self.cells.items()) if key and len(cell) >= ENOUGH]
        ratios = [(median_low(seconds for _, seconds in cell) / plain, len(cell)) for cell in cells]
        drafts = [sum(each for each, _ in cell) / len(cell) for cell in cells]
        return [(0.0, 1.0), *((at, max(1.0, ratio)) for at, ratio in zip(drafts, _rising(ratios), strict=True))]


def _rising(values: Sequence[tuple[float, int]]) -> list[float]:
    """The rising numbers that are nearest to (value, weight), in squares."""
    blocks: list[tuple[float, int, int]] = []  # mean, weight, how many values
    for value, weight in values:
        many = 1
        while blocks and blocks[-1][0] > value:
            mean, more, count = blocks.pop()
            value, weight, many = (mean * more + value * weight) / (more + weight), weight + more, many + count
        blocks.append((value, weight, many))
    return [mean for mean, _, many in blocks for _ in range(many)]


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
