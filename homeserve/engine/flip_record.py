"""What is kept of a flip, what it carries, and why one is not begun. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from homeserve.wire.records import FlipAnswer, FlipLive


class FlipRefused(Exception):
    """A flip that is not begun. `code`: bad_target, flip_running, already_there, single_rank, does_not_fit, flip_off or
    not_ready."""

    def __init__(
        self,
        code: str,
        message: str,
        needed_mib: float | None = None,
        available_mib: float | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.needed_mib = needed_mib
        self.available_mib = available_mib
        self.device = device


@dataclass(frozen=True)
class LiveSet:
    """What a flip carries: the maps for the ranks, and how much that is. `pages` of each KV group; `states` counts the
    states of lanes, `checkpoints` those of the prefix cache."""

    live: FlipLive
    requests: int
    pages: tuple[int, ...]
    rows: int
    states: int
    checkpoints: int
    nbytes: int
    """As the ranks pack it."""
    draft_rows: int = 0
    """Of the rows, those that the drafting block keeps keys and values of."""
    decoding: int = 0
    """Of the requests, those that draw tokens,"""
    half_done: int = 0
    """and those whose prompt is computed in part."""


@dataclass
class RankPart:
    """One rank's part of a flip; None where it has not said yet."""

    rank: int
    answer: str | None = None
    reason: str | None = None
    told: FlipAnswer | None = None
    us: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        told = self.told
        return {
            "rank": self.rank,
            "answer": self.answer,
            "reason": self.reason,
            "sent_bytes": told.sent_bytes if told else None,
            "received_bytes": told.received_bytes if told else None,
            "local_bytes": told.local_bytes if told else None,
            "refill_bytes": told.refill_bytes if told else None,
            "refill_tries": told.refill_tries if told else None,
            "digest": f"{told.digest:016x}" if told and told.digest else None,
            "parts_ms": {part: us / 1000 for part, us in self.us.items()},
        }


@dataclass
class FlipRecord:
    """One flip, as plain data. `ms` has an entry for each part that is over."""

    id: int
    epoch: int
    source: str
    to: str
    cause: str
    asked: float
    state: str = "accepted"
    reason: str | None = None
    why: str | None = None
    """The kind of the reason, by which abandoned flips are counted."""
    ms: dict[str, float | None] = field(
        default_factory=lambda: dict.fromkeys(("drain", "prepare", "commit", "verify", "refill", "total"))
    )
    live: LiveSet | None = None
    ranks: list[RankPart] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.state in ("committed", "abandoned")

    def as_json(self) -> dict[str, Any]:
        """The fields of GET /v1/homeserve/flip/{id}."""
        live = self.live
        return {
            "id": self.id,
            "epoch": self.epoch,
            "from": self.source,
            "to": self.to,
            "cause": self.cause,
            "state": self.state,
            "reason": self.reason,
            "ms": {part: None if ms is None else round(ms, 3) for part, ms in self.ms.items()},
            "live": {
                "requests": live.requests if live else None,
                "decoding": live.decoding if live else None,
                "half_done": live.half_done if live else None,
                "rows": live.rows if live else None,
                "states": live.states if live else None,
                "checkpoints": live.checkpoints if live else None,
                "draft_rows": live.draft_rows if live else None,
            },
            "ranks": [part.as_json() for part in self.ranks],
        }
