"""What a flip carries: every page and state slot that is not free.

The maps are made from the free lists, by which everybody else goes too: a page is carried if and only if it is not
free, so nothing that somebody holds can be forgotten, whoever holds it and whatever of it is filled. What the prefix
cache alone keeps is carried as far as there is room for it; the rest is dropped before, least recently used first.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.base import PAGE_LEN
from homeserve.engine.flip import LiveSet
from homeserve.engine.pages import PagePool
from homeserve.engine.request import FlipLimits
from homeserve.engine.sizes import MOST_RANKS
from homeserve.engine.states import StateSlots
from homeserve.wire.records import FlipLive

PADDING = 64 * MOST_RANKS**2
"""What payloads, each from a cache line on, may take beyond their bytes: left over where the cache fills the room."""


def resident_bytes(pool: PagePool, states: StateSlots, lanes: int, limits: FlipLimits) -> int:
    """What open sequences hold, with `lanes` of them."""
    pages = [census.live + census.protected for census in pool.census()]
    return _bytes(pages, lanes + states.taken if limits.state_bytes else 0, limits)


def cached_bytes(pool: PagePool, states: StateSlots, limits: FlipLimits) -> int:
    """What only the prefix cache keeps."""
    return _bytes(pool.cached(), states.kept, limits)


def shed(pool: PagePool, states: StateSlots, lanes: int, limits: FlipLimits, most: int = 256) -> bool:
    """Drop what the cache keeps beyond the room for it, at most so many pages and checkpoints at once: a large cache
    takes a while, and others wait meanwhile. Says whether more has to go."""
    if limits.unified:  # nothing is carried there: all of the cache stays
        return False
    room = min(limits.cache_bytes, limits.transit_bytes - PADDING - resident_bytes(pool, states, lanes, limits))
    for _ in range(most):
        if cached_bytes(pool, states, limits) <= room or not _drop_one(pool, states):
            return False
    return cached_bytes(pool, states, limits) > room


def live_set(pool: PagePool, states: StateSlots, lanes: Sequence[int], limits: FlipLimits) -> LiveSet:
    """What is to be carried; cached pages and checkpoints beyond the room for them are dropped."""
    while shed(pool, states, len(lanes), limits):
        pass
    census = pool.census()
    pages = [each.live + each.protected + each.cached for each in census]
    recurrent = limits.state_bytes > 0
    checkpoints = states.kept + states.taken
    count = len(lanes) if recurrent else 0
    return LiveSet(
        live=FlipLive(
            tuple(pool.held(group) for group in range(len(census))), states.held(lanes) if recurrent else b""
        ),
        requests=len(lanes),
        pages=tuple(pages),
        rows=sum(pages) * PAGE_LEN,
        states=count,
        checkpoints=checkpoints,
        nbytes=_bytes(pages, count + checkpoints, limits),
    )


def _bytes(pages: Sequence[int], states: int, limits: FlipLimits) -> int:
    carried = sum(count * size for count, size in zip(pages, limits.page_bytes, strict=True))
    return carried + states * limits.state_bytes


def _drop_one(pool: PagePool, states: StateSlots) -> bool:
    """The page that was used least recently goes, with all that its node has; then windows and checkpoints of nodes
    that somebody reads."""
    return any(pool.drop_cached(group) for group in range(len(pool.windows))) or states.drop_oldest()
