"""The ledger: named byte amounts, who holds them, and when.

    moment      what is alive
    boot        weights are placed, pools made; staging buffers exist
    pipeline    the pipeline layout serves (prefill)
    tensor      the tensor layout serves (decode)
    flip        from one to the other: source backing has been released, the target's is being filled

A line names the moments at which its bytes are held ("always" is all four). The sum of a moment is a plain sum over its
lines, so whatever is never held together is never added together: a pool that only one layout backs is held in that
layout's moment, and during the flip the larger of the two. The peak of a device is its largest moment. A plan fits when
no device's peak exceeds its ceiling, and no pool of memory that several devices share is exceeded by all of them.

Some lines grow with the number of tokens of the KV pool: a line is a sum of *terms*, each with fixed bytes and bytes
per token, and of those some stop growing at a number of tokens of their own. The solver looks for the largest number
of tokens whose ledger fits.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BOOT, PIPELINE, TENSOR, FLIP = "boot", "pipeline", "tensor", "flip"
MOMENTS = (BOOT, PIPELINE, TENSOR, FLIP)
ALWAYS = MOMENTS


@dataclass(frozen=True)
class Line:
    """`bytes` held by device `device` (its index) at the moments `held`.

    `source` is "computed" (from shapes), "measured" (read on this box) or "reserve" (allowed for). `note` says in a few
    words what the number is made of.
    """

    device: int
    name: str
    bytes: int
    held: tuple[str, ...]
    source: str
    note: str = ""

    @property
    def held_words(self) -> tuple[str, ...]:
        """As the report and the JSON say it: ("always",), or the moments."""
        return ("always",) if len(self.held) == len(MOMENTS) else self.held


@dataclass(frozen=True)
class Term:
    """A line, or a part of one, before the number of tokens is known: `fixed` bytes, and `per_token` for each token of
    the pool.

    `until` > 0: it grows with the first so many tokens only. (Layers with a window keep no more than the windows of all
    requests. Buffers grow with the longest request, which is as long as the pool until that holds the whole context.)
    """

    device: int
    name: str
    fixed: float
    held: tuple[str, ...]
    source: str
    note: str = ""
    per_token: float = 0.0
    until: int = 0

    @property
    def most(self) -> float:
        """Its largest size where it is bounded, else what it holds without tokens."""
        return self.fixed + self.per_token * self.until

    def exact(self, tokens: int) -> float:
        """Its bytes with a pool of so many tokens."""
        return self.fixed + self.per_token * (min(tokens, self.until) if self.until else tokens)

    def at(self, tokens: int) -> Line:
        return Line(self.device, self.name, whole(self.exact(tokens)), self.held, self.source, self.note)


def whole(exact: float) -> int:
    """Rounded up, but not past what a float got wrong in its last digits."""
    return math.ceil(round(exact, 3))


def lines_at(terms: Iterable[Term], tokens: int) -> tuple[Line, ...]:
    """The lines with a pool of so many tokens. Terms of one device, name and time are parts of one line, which has the
    first one's note and source; what holds nothing is no line."""
    parts: dict[tuple[int, str, tuple[str, ...]], list[Term]] = {}
    for term in terms:
        parts.setdefault((term.device, term.name, term.held), []).append(term)
    sums = ((own[0], whole(sum(term.exact(tokens) for term in own))) for own in parts.values())
    return tuple(Line(one.device, one.name, size, one.held, one.source, one.note) for one, size in sums if size)


def held_bytes(lines: Iterable[Line], device: int, moment: str) -> int:
    """What `device` holds at `moment`."""
    return sum(line.bytes for line in lines if line.device == device and moment in line.held)


def peak_bytes(lines: Sequence[Line], device: int) -> int:
    """The most that `device` holds at any moment: the minimum of free memory is continuous, boot counts."""
    return max(held_bytes(lines, device, moment) for moment in MOMENTS)
