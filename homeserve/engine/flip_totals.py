"""Sums over all flips of one engine, for metrics: records are kept of the last few only. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

BYTES = {
    "sent": "sent_bytes",
    "received": "received_bytes",
    "local": "local_bytes",
    "refill": "refill_bytes",
}
"""Kind of bytes -> where a rank's answer has them. `local` are those that a rank keeps."""
ENGINE = "engine"
"""Who a time is of that no rank measured."""


class Ended(NamedTuple):
    """How a flip ended. `reason` is the kind of it, empty for one that was committed."""

    to: str
    cause: str
    result: str
    reason: str


class Part(Protocol):
    """One rank's part of a flip (`engine.flip.RankPart`)."""

    rank: int
    us: dict[str, int]

    @property
    def told(self) -> object | None: ...


class Record(Protocol):
    """A flip that is over (`engine.flip.FlipRecord`)."""

    to: str
    cause: str
    state: str
    why: str | None

    @property
    def ms(self) -> Mapping[str, float | None]: ...

    @property
    def ranks(self) -> Iterable[Part]: ...


class FlipTotals:
    """Counts by how flips ended; (how often, seconds) by (part, who), and bytes by (kind, rank)."""

    def __init__(self) -> None:
        self.ended: Counter[Ended] = Counter()
        self.took: dict[tuple[str, str], tuple[int, float]] = {}
        self.bytes: dict[tuple[str, int], int] = {}

    def add(self, record: Record) -> None:
        """Count a flip that has just ended."""
        committed = record.state == "committed"
        reason = "" if committed else record.why or "unknown"
        self.ended[Ended(record.to, record.cause, record.state, reason)] += 1
        for part, ms in record.ms.items():
            if ms is not None and part != "refill":  # the slowest rank's, which is among those of the ranks
                self._took(part, ENGINE, ms / 1e3)
        for rank in record.ranks:
            for part, us in rank.us.items():
                self._took(part, str(rank.rank), us / 1e6)
            for kind, name in BYTES.items():
                key = (kind, rank.rank)
                self.bytes[key] = self.bytes.get(key, 0) + getattr(rank.told, name, 0)

    def add_all(self, other: FlipTotals) -> None:
        """What another engine's flips came to."""
        self.ended.update(other.ended)
        for key, (count, seconds) in other.took.items():
            mine = self.took.get(key, (0, 0.0))
            self.took[key] = (mine[0] + count, mine[1] + seconds)
        for where, size in other.bytes.items():
            self.bytes[where] = self.bytes.get(where, 0) + size

    def _took(self, part: str, who: str, seconds: float) -> None:
        count, total = self.took.get((part, who), (0, 0.0))
        self.took[part, who] = (count + 1, total + seconds)
