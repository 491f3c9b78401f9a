"""The largest KV pool whose ledger fits: every device at every moment, and every pool of memory that devices share.

Each term of a line is `fixed + per_token * tokens`, and some stop growing: buffers at the length of the longest
request, layers with a window when the windows of all requests are kept. So what a device holds at a moment is a curve
of straight pieces that gets flatter where a term ends, and the largest number of tokens that fits is a quotient in the
piece in which the ceiling is reached. Memory that several devices share (an APU and its host) is exceeded by all of
them together: there the number is found by halving, because a carve-out that lies outside the shared part makes the
sum bend upwards.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from budget.ceilings import Ceilings
from budget.ledger import MOMENTS, Line, Term, peak_bytes, whole

TOKENS_MAX = 1 << 40


@dataclass(frozen=True)
class Room:
    """How many tokens fit (negative: not even none do), and what says so.

    `device`, `moment` are where the room ends; `short_bytes` is what lacks there for no token at all; `devices[d]` is
    what device d alone would allow.
    """

    tokens: int
    device: int
    moment: str
    short_bytes: int
    devices: tuple[int, ...]


def room(terms: Sequence[Term], ceilings: Ceilings) -> Room:
    """Tokens that fit. A device whose ceiling is unknown bounds nothing (the plan says so as a doubt)."""
    sums = _Sums(terms, ceilings)
    best = Room(TOKENS_MAX, len(ceilings.devices) - 1, MOMENTS[0], 0, ())
    alone = []
    for device in ceilings.devices:
        most = TOKENS_MAX
        for moment in MOMENTS:
            tokens, short = sums.alone(device.index, moment)
            most = min(most, tokens)
            if (tokens, -short) < (best.tokens, -best.short_bytes):
                best = Room(tokens, device.index, moment, short, ())
        alone.append(most)
    for pool, size in enumerate(ceilings.pools):
        members = [device for device in ceilings.devices if device.pool == pool]
        if size is None or len(members) < 2:
            continue
        for moment in MOMENTS:
            tokens, short = sums.together(pool, size, moment, best.tokens)
            if (tokens, -short) < (best.tokens, -best.short_bytes):
                at = max(0, tokens)
                grows = max(members, key=lambda device: sums.weight(device.index, moment, at))
                best = Room(tokens, grows.index, moment, short, ())
    return Room(best.tokens, best.device, best.moment, best.short_bytes, tuple(alone))


def fits(lines: Sequence[Line], ceilings: Ceilings) -> bool:
    """The proof: every peak under its ceiling, every shared pool under its size."""
    for device in ceilings.devices:
        if device.ceiling_bytes is not None and peak_bytes(lines, device.index) > device.ceiling_bytes:
            return False
    terms = [Term(line.device, line.name, line.bytes, line.held, line.source) for line in lines]
    sums = _Sums(terms, ceilings)
    return all(
        size is None or sums.pooled(pool, moment, 0) <= size
        for pool, size in enumerate(ceilings.pools)
        for moment in MOMENTS
    )


class _Sums:
    """What each device holds at each moment, as a function of the tokens."""

    def __init__(self, terms: Sequence[Term], ceilings: Ceilings) -> None:
        self._ceilings = ceilings
        count = len(ceilings.devices)
        self._fixed = {moment: [0.0] * count for moment in MOMENTS}
        self._slope = {moment: [0.0] * count for moment in MOMENTS}
        """Bytes of each token that never end."""
        self._ends: dict[str, list[dict[int, float]]] = {moment: [{} for _ in range(count)] for moment in MOMENTS}
        """Bytes of each token that end, by the number of tokens at which they do."""
        for term in terms:
            for moment in term.held:
                # As a line does, each term rounds up to whole bytes: one more, so that the proof holds.
                self._fixed[moment][term.device] += whole(term.fixed) + (1 if term.per_token else 0)
                if term.until:
                    ends = self._ends[moment][term.device]
                    ends[term.until] = ends.get(term.until, 0.0) + term.per_token
                else:
                    self._slope[moment][term.device] += term.per_token

    def held(self, device: int, moment: str, tokens: int) -> float:
        ended = sum(slope * min(tokens, until) for until, slope in self._ends[moment][device].items())
        return self._fixed[moment][device] + self._slope[moment][device] * tokens + ended

    def weight(self, device: int, moment: str, tokens: int) -> tuple[bool, float]:
        """Which member of a shared pool is named: one that grows with the tokens, then the largest."""
        return self._slope[moment][device] > 0, self.held(device, moment, tokens)

    def alone(self, device: int, moment: str) -> tuple[int, int]:
        """(tokens that fit, bytes that lack for none)."""
        ceiling = self._ceilings.devices[device].ceiling_bytes
        if ceiling is None:
            return TOKENS_MAX, 0
        left = ceiling - self._fixed[moment][device]
        if left < 0:
            return -1, math.ceil(-left)
        begin = 0
        for end, slope in self._pieces(device, moment):
            if slope * (end - begin) > left:
                return begin + math.floor(left / slope), 0
            left -= slope * (end - begin)
            begin = end
        return TOKENS_MAX, 0

    def _pieces(self, device: int, moment: str) -> list[tuple[int, float]]:
        """Where each straight piece ends, and what it grows by for a token; the steepest is the first."""
        slope, pieces = self._slope[moment][device], [(TOKENS_MAX, self._slope[moment][device])]
        for until, ending in sorted(self._ends[moment][device].items(), reverse=True):
            slope += ending
            pieces.append((until, slope))
        return pieces[::-1]

    def pooled(self, pool: int, moment: str, tokens: int) -> float:
        """What the members of a shared pool hold of it; a carve-out takes the first bytes of its device."""
        return sum(
            max(0.0, self.held(device.index, moment, tokens) - device.private_bytes)
            for device in self._ceilings.devices
            if device.pool == pool
        )

    def together(self, pool: int, size: int, moment: str, most: int) -> tuple[int, int]:
        over = self.pooled(pool, moment, 0) - size
        if over > 0:
            return -1, math.ceil(over)
        if most < 0 or self.pooled(pool, moment, most) <= size:
            return most if most >= 0 else TOKENS_MAX, 0
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            if self.pooled(pool, moment, middle) <= size:
                low = middle
            else:
                high = middle
        return low, 0
