"""Whom do they all wait for? Pure.

Ranks that exchange acts wait for one another, so when one of them stops the others soon stand still as well, and each
knows only whom it waited for itself:

    rank 0 ──waits for──▶ rank 2 ──waits for──▶ rank 1 ╳

The one to be named is where the waiting ends. It is known for certain when that rank cannot run (it was stopped, it has
ended), or when it has answered the plan in question after all: then it came too late. Else it may be waiting itself and
about to say for whom, and is named only when it has had the time to.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Wait:
    """In plan `seq` a rank waited for `peer` in vain; `reason` in its own words."""

    seq: int
    peer: int
    reason: str


@dataclass(frozen=True)
class Culprit:
    """Rank `rank` holds the others up. `waits` are the waits that led to it, in order of the path."""

    rank: int
    certain: bool
    waits: tuple[tuple[int, Wait], ...]


def culprit(first: int, waits: Mapping[int, Wait], halted: Collection[int], answered: Sequence[int]) -> Culprit:
    """Where the waiting that begins with rank `first` ends.

    `waits` are the waits told so far, by the rank that waited; `halted` the ranks that cannot run and owe an answer;
    `answered` the last plan that each rank has answered. Ranks that wait in a ring (which the order of the plan log
    rules out) are told by the one that is furthest behind.
    """
    rank, path = first, list[tuple[int, Wait]]()
    while rank in waits and rank not in halted:
        if any(rank == passed for passed, _ in path):
            behind = min((answered[passed], passed) for passed, _ in path)[1]
            return Culprit(behind, True, tuple(path))
        path.append((rank, waits[rank]))
        rank = waits[rank].peer
    if rank not in halted and halted:
        rank = min(halted, key=lambda each: (answered[each], each))
        return Culprit(rank, True, tuple(path))
    came_late = bool(path) and answered[rank] >= path[-1][1].seq
    return Culprit(rank, rank in halted or came_late, tuple(path))
