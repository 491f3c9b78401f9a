"""How fast either layout is, and what a flip costs: measured, or the estimate until then.

A plan's *share* of the time is that of `timeline`: what a plan with rounds of drafting waits for the one before it
counts here as it does where it is decided whether drafts pay.

    prefill   prompt rows / share, of plans with prompts (decode rows ride along)     least rows: half a chunk or 64
    decode    tokens drawn / share, of plans with decode rows alone (rounds of drafting draw more than one in a row),
              apart by how many sequences decode (powers of two): a batch of eight is no faster for each of them, and
              a layout is not better for having had the larger one
    cost      seconds from the ask to the end, both ways together

Each is the ratio of two sums over the last `WINDOW` plans (flips: the last `FLIPS`): a mean by tokens that forgets. A
moving average of single ratios would give one short plan the weight of a long one.

What is measured grows old where nothing measures it again, as in the layout that the policy keeps away from: one bad
moment there would bar it for ever. So a speed below the estimate fades toward it, half of the way in each
`HALF_LIFE_S` since its last plan, and a plan that comes after so long begins its sum anew. One above the estimate
stays: it bars nothing, and whoever follows it measures again.

Pure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from homeserve.engine.policy import LayoutSpeeds
from homeserve.engine.timeline import PlanTimes
from homeserve.wire.records import PlanKind

WINDOW = 64
FLIPS = 8
LEAST_ROWS = 64
HALF_LIFE_S = 600.0
ENOUGH = 2
"""Plans from which a speed counts as measured: the first one after a change pays for what is cold."""


class _Sums:
    """Tokens and seconds of the last samples."""

    def __init__(self) -> None:
        self.samples: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self.last = 0.0
        """When the last one ended, in seconds of the clock."""

    def add(self, tokens: int, seconds: float, end: float) -> None:
        if seconds <= 0:
            return
        if end - self.last >= HALF_LIFE_S:
            self.samples.clear()
        self.samples.append((tokens, seconds))
        self.last = end

    def at(self, now: float | None, estimate: float | None) -> float | None:
        """The rate as it is believed at `now`, between what was measured and a better estimate."""
        rate = self.rate
        if rate is None or estimate is None or now is None or estimate <= rate:
            return rate or estimate
        weight = math.exp2(-max(0.0, now - self.last) / HALF_LIFE_S)
        return 1 / (weight / rate + (1 - weight) / estimate)

    @property
    def rate(self) -> float | None:
        if len(self.samples) < ENOUGH:
            return None
        return sum(tokens for tokens, _ in self.samples) / sum(seconds for _, seconds in self.samples)


class _Layout:
    def __init__(self, groups: int) -> None:
        self.groups = groups
        self.prefill = _Sums()
        self.decode: dict[int, _Sums] = {}
        """By the bit length of how many sequences decode."""
        self.plans = 0

    def decode_sums(self, decoding: int) -> _Sums:
        """With so many sequences, or with the next number that was measured."""
        known = [(size, sums) for size, sums in self.decode.items() if sums.rate is not None]
        want = decoding.bit_length()
        return min(known, key=lambda each: (abs(each[0] - want), each[0]))[1] if known else _Sums()

    def decode_rate(self, decoding: int) -> float | None:
        return self.decode_sums(decoding).rate


class Rates:
    """Speeds by layout. `groups`: decode groups of each layout; `estimates` as in `FlipLimits`."""

    def __init__(
        self,
        groups: Mapping[str, int],
        chunk: int,
        estimates: Mapping[str, tuple[float, float]] | None = None,
        cost_s: float = 3.0,
    ) -> None:
        self._layouts = {name: _Layout(count) for name, count in groups.items()}
        self._least_rows = min(LEAST_ROWS, max(1, chunk // 2))
        self._estimates = dict(estimates or {})
        self._cost_s = cost_s
        self._flips: dict[str, deque[float]] = {name: deque(maxlen=FLIPS) for name in groups}

    def add(self, layout: str, plans: Sequence[PlanTimes]) -> None:
        """Plans that ran in a layout, in the order of their answers."""
        into = self._layouts[layout]
        for plan in plans:
            if not plan.ranks:
                continue
            into.plans += 1
            if plan.prompt_rows >= self._least_rows:
                into.prefill.add(plan.prompt_rows, plan.seconds, plan.end / 1e6)
            elif plan.kind is PlanKind.DECODE:
                size = (plan.rows * into.groups).bit_length()
                into.decode.setdefault(size, _Sums()).add(plan.drawn or plan.rows, plan.seconds, plan.end / 1e6)

    def add_flip(self, to: str, seconds: float) -> None:
        """A flip that was committed took so long."""
        self._flips[to].append(seconds)

    @property
    def cost_s(self) -> float:
        """Seconds of two flips, there and back."""
        known = [sum(times) / len(times) for times in self._flips.values() if times]
        return 2 * sum(known) / len(known) if known else self._cost_s

    def measured(self, layout: str) -> bool:
        """Both of its speeds."""
        of = self._layouts[layout]
        return of.prefill.rate is not None and of.decode_rate(1) is not None

    def speeds(self, decoding: int = 1, now: float | None = None) -> dict[str, LayoutSpeeds]:
        """Of both layouts, with so many sequences that decode. Without a time nothing fades."""
        found = {}
        for name, of in self._layouts.items():
            prefill, decode = self._estimates.get(name, (None, None))
            sums = of.decode_sums(max(1, decoding))
            found[name] = LayoutSpeeds(of.prefill.at(now, prefill), sums.at(now, decode))
        return found

    def as_json(self) -> dict[str, dict[str, float | int | None]]:
        """What was measured, for `status`: `n` plans."""
        return {
            name: {
                "prefill_tok_s": _rounded(of.prefill.rate),
                "decode_tok_s": _rounded(of.decode_rate(1)),
                "n": of.plans,
            }
            for name, of in self._layouts.items()
        }


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 2)
