"""Whom do they all wait for? Pure.

Ranks that exchange acts wait for one another, so when one of them stops the others soon stand still as well:

    rank 0 ──waits for──▶ rank 2 ──waits for──▶ rank 1 ╳

The one to be named is where the waiting ends. Who waits for whom stands in the memory of the exchanges, while nobody
moves (`standing`):

    mailboxes   piece n of all ranks belongs together, and nobody posts n + 1 before it has all of them: a rank that has
                posted more than another one waits for that one
    channels    as much is taken as was sent, and somebody sleeps until there is more: the reader waits for the writer

A rank that gave up waiting says itself for whom it did. Where only that is known, the rank at the end may be waiting
as well and about to say so; it is certain when it cannot run (it was stopped, it has ended) or has answered after all:
then it came too late.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_HALF = 1 << 31
"""Counts are words of 32 bits and go round: which of two is ahead is told by the shorter way."""


@dataclass(frozen=True)
class Wait:
    """In plan `seq` a rank waits for `peer`, or did in vain; `reason` says at which exchange."""

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

    `waits` are the waits known so far, by the rank that waits; `halted` the ranks that cannot run and owe an answer;
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
    if not path:  # it is the end itself: say who waits for it, where somebody does
        path += [(other, wait) for other, wait in sorted(waits.items()) if wait.peer == rank][:1]
    came_late = bool(path) and answered[rank] >= path[-1][1].seq
    return Culprit(rank, rank in halted or came_late, tuple(path))


def standing(acts: Mapping[str, Any], owed: Mapping[int, int]) -> dict[int, Wait]:
    """Who waits for whom, by rank, from the positions of a life in which nobody moves (`ActsMemory.positions`). `owed`
    has the plan that each rank owes; one that owes nothing waits for nobody."""
    posted = {box["rank"]: int(box["posted"]) for box in acts["mailboxes"]}
    waits = {}
    for box in acts["mailboxes"]:
        rank = box["rank"]
        behind = {other: _ahead(posted[rank], count) for other, count in posted.items()}
        peer = max(behind, key=lambda other: (behind[other], -other))
        if behind[peer] > 0 and rank in owed and box["last"] is not None:
            last = box["last"]
            waits[rank] = Wait(last["seq"], peer, f"for its part of {last['kind']} {last['label']!r}")
    for channel in acts["channels"]:
        rank = channel["to"]
        if channel["sleepers"] and not _ahead(channel["sent"], channel["taken"]) and rank in owed:
            waits[rank] = Wait(owed[rank], channel["from"], f"for its message {channel['taken'] + 1}")
    return waits


def _ahead(count: int, other: int) -> int:
    return (count - other + _HALF) % (2 * _HALF) - _HALF
