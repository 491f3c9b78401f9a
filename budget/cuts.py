"""How a model is cut over ranks: layers in the pipeline layout, shares in the tensor layout, rows of the KV pool.

Three kinds of candidates, of which the planner tries each:

    by speed       in proportion to what each rank reads in a second: nobody waits
    by memory      in proportion to what the lines that no cut can change leave of each ceiling
    fullest        the cut of layers with the largest pool of all: found exactly, because layers lie in a row. For a
                   given number of tokens, give each rank in turn as many layers as fit (fewer where the next one could
                   not hold its first); if the last can take the rest, that many tokens fit, and no cut could do more

With the fullest cut among the candidates, a model that fits a pipeline at all is never refused for want of a cut, and
more memory never means a smaller pool. In the tensor layout the sum of what all ranks have left does not depend on the
weight vector, so any that fits is as good as another: by memory, and evened out where heads and blocks are too coarse
to follow it. The token vector then follows what is left.

Ranks that share the CPU are alike and have one memory, so none of this helps: they get even parts (`even_cut`).

A layer that reads the K and V of an earlier one lies on the rank of that one; no cut that is chosen here parts them.

Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from budget.ceilings import Ceilings, Device
from budget.host_lines import KV
from budget.job import Job, Share
from budget.ledger import TENSOR, Term
from budget.placement import Cut, Option, Shard, last_share, layer_share, pipeline_shares, ranges_of, tensor_shares
from budget.solve import TOKENS_MAX, room
from budget.speed import DeviceRates, rates_of, shared_rates
from budget.terms import standing, standing_bytes, terms
from budget.vectors import apportion, best_token_vector, layers_of_ratio, legal_ends, reduced
from budget.wish import PAGE

_BLENDS = (0.0, 0.5, 1.0)
"""Between a cut by speed (0) and a cut by memory (1)."""
_VECTOR_UNITS = 64
_POOL_MOST = 1 << 32
"""Tokens beyond which no cut is compared."""


def rates(job: Job, device: Device, together: int = 1) -> DeviceRates:
    """Of a rank there. `together`: how many ranks compute at the same time on the CPU."""
    found = rates_of(device, job.wish.threads or None)
    return shared_rates(found, together, job.wish.threads, job.wish.cores) if together > 1 else found


def cuts(job: Job, option: Option, ceilings: Ceilings) -> list[Cut]:
    """The cuts that are worth a look; the one that was asked for alone."""
    count = len(job.layers)
    given = _given_cut(job, option)
    if given is not None:
        return [given]
    if len(option.ranks) == 1:
        return [Cut(((0, count),))]
    if option.host_only:
        return [even_cut(job, len(option.ranks))]
    found = [
        ranges
        for shares in _blended(job, option, ceilings)
        if _is_legal(job, ranges := ranges_of(apportion(count, shares, at_least=1)))
    ]
    full = fullest(job, option, ceilings)
    every = dict.fromkeys([*found, *([full.ranges] if full is not None else [])])
    return [Cut(ranges) for ranges in every] or [even_cut(job, len(option.ranks))]


def even_cut(job: Job, ranks: int) -> Cut:
    """Ranks that are alike: each ends where a layer may end that is nearest to its part of what a prompt's token reads.
    (The head is not counted: a prompt needs it once.)

    Raises ValueError where there are fewer places to cut than cuts.
    """
    count = len(job.layers)
    sums = [0.0, *accumulate(layer.read_bytes for layer in job.layers)]
    legal = legal_ends(count, job.shape.kv_sources)
    if len(legal) < ranks - 1:
        raise ValueError(f"{ranks} ranks and {len(legal)} places to cut")
    ends: list[int] = []
    for rank in range(1, ranks):
        first, last = len(ends), len(legal) - (ranks - 1 - rank)
        there = [end for end in legal[first:last] if not ends or end > ends[-1]]
        ends.append(min(there, key=lambda end: abs(sums[end] - sums[-1] * rank / ranks)))
    return Cut(tuple(zip([0, *ends], [*ends, count], strict=True)))


def cut_with_cpu(job: Job, option: Option, ceilings: Ceilings, comfort: int) -> Cut:
    """The CPU (rank 0) takes the fewest first layers with which the cards have `comfort` tokens, or as many as give
    most: with each layer that it takes the cards have more room, and the host less."""
    given = _given_cut(job, option)
    if given is not None:
        return given
    count = len(job.layers)
    cards = replace(option, ranks=option.ranks[1:])

    def cut(first: int) -> Cut:
        full = fullest(job, option, ceilings, first)
        if full is None:  # no cut fits; this one shows by how much
            least = 1 if count - first >= len(cards.ranks) else 0
            parts = apportion(count - first, _blended(job, cards, ceilings)[-1], at_least=least)
            full = Cut(tuple((begin + first, end + first) for begin, end in ranges_of(parts)))
        return Cut(((0, first), *full.ranges))

    return cut(_fewest(count - 1, comfort, lambda first: _rooms(job, option, ceilings, cut(first))))


def with_experts(job: Job, option: Option, ceilings: Ceilings, comfort: int) -> tuple[Option, Cut]:
    """The option with the fewest layers' experts on the CPU that leave `comfort` tokens (or with what was asked), and
    the cut of what stays on the cards."""

    def placed(layers: int) -> tuple[Option, Cut]:
        there = replace(option, expert_layers=layers)
        cut = _given_cut(job, there) or fullest(job, there, ceilings)
        return there, cut or cuts(job, there, ceilings)[-1]

    if option.expert_layers:
        return placed(option.expert_layers)

    def rooms(layers: int) -> tuple[int, int]:
        there, cut = placed(layers)
        return _rooms(job, there, ceilings, cut)

    return placed(_fewest(len(job.layers), comfort, rooms))


def shards(job: Job, option: Option, ceilings: Ceilings) -> list[Shard]:
    """Weight vectors that are worth a look; the token vector is left open where none was asked for."""
    given = reduced(job.wish.token_vector) if job.wish.token_vector else ()
    if job.wish.weight_vector:
        return [Shard(reduced(job.wish.weight_vector), given)]
    if option.host_only:  # ranks that are alike
        return [Shard((1,) * len(option.ranks), given)]
    vectors = [apportion(_VECTOR_UNITS, s, at_least=1) for s in _blended(job, option, ceilings)]
    vectors.append(_evened(job, option, ceilings, vectors[-1]))
    return [Shard(vector, given) for vector in dict.fromkeys(map(reduced, vectors))]


def token_vector(
    job: Job, option: Option, ceilings: Ceilings, pipeline: Sequence[Share], shard: Shard
) -> tuple[int, ...]:
    """The vector that addresses the most tokens with what the weights leave of each rank, at the worst of the moments
    at which the rank's rows are held."""
    if option.host_only:  # one memory for all: no vector addresses more of it, and even parts are read the fastest
        return (1,) * len(option.ranks)
    tensor = tensor_shares(job, replace(shard, tokens=(1,) * len(option.ranks)))
    # Rows of windows follow the same vector: where nothing else is kept, they are what it divides.
    row = sum(share.kv_row for share in tensor) or sum(rows.row for share in tensor for rows in share.windows)
    if not row:
        return (1,) * len(option.ranks)
    found = terms(job, option, ceilings, pipeline, tensor)
    pools = {term.device: term.held for term in found if _divided(term)}
    rows = []
    for index in option.ranks:
        own = [term for term in found if term.device == index and not (_divided(term) and term.until)]
        held = max(sum(term.most for term in own if moment in term.held) for moment in pools[index])
        rows.append(max(1, int(((ceilings.devices[index].ceiling_bytes or 0) - held) / row / PAGE)))
    return best_token_vector(rows)


def fullest(job: Job, option: Option, ceilings: Ceilings, first: int = 0) -> Cut | None:
    """The cut with the largest pool; None where no cut fits. With `first`, rank 0 has so many layers already, and the
    rest is cut over the others. Memory that devices share is not looked at: the ledger does that."""
    count, ranks = len(job.layers), option.ranks[1:] if first else option.ranks
    least = 1 if count - first >= len(ranks) else 0
    parted = set(range(1, count)) - set(legal_ends(count, job.shape.kv_sources))
    stack = _Stack([layer_share(job, option, index) for index in range(first, count)])
    tail = _Stack([last_share(job, option)])
    beside = [
        (ceilings.devices[index].ceiling_bytes or 0, standing(job, option, ceilings.devices[index])) for index in ranks
    ]

    def left_for(tokens: int) -> list[float]:
        """Of each rank, what its layers may take. Buffers grow with the tokens too, up to the longest request."""
        return [ceiling - held(tokens) for ceiling, held in beside]

    def ends(tokens: int) -> tuple[int, ...] | None:
        """Where each rank's layers end; None if so many tokens do not fit."""
        left = left_for(tokens)

        def weight(end: int) -> float:
            return stack.held(end, tokens)

        known: dict[tuple[int, int], tuple[int, ...] | None] = {}

        def reach(rank: int, begin: int) -> tuple[int, ...] | None:
            """The ends of `rank` and those after it, the last one aside, that leave least to the last; None where one
            of them cannot hold even its least."""
            if rank == len(left) - 1:
                return ()
            if (rank, begin) in known:
                return known[rank, begin]
            most = bisect_right(range(stack.layers + 1), weight(begin) + left[rank], key=weight) - 1
            best: tuple[int, ...] | None = None
            for end in range(min(most, stack.layers - least * (len(left) - 1 - rank)), begin + least - 1, -1):
                if first + end in parted:
                    continue
                rest = reach(rank + 1, end)
                if rest is not None and (best is None or (end, *rest)[-1] > best[-1]):
                    best = (end, *rest)
                if None not in known.values():
                    break  # as many as fit on each: nothing reaches further
            known[rank, begin] = best
            return best

        found = reach(0, 0)
        if found is None:
            return None
        begin = found[-1] if found else 0
        rest = weight(stack.layers) - weight(begin) + tail.held(1, tokens)
        return (*found, stack.layers) if rest <= left[-1] else None

    if ends(0) is None:
        return None
    row = stack.row[-1] + tail.row[-1]
    # Without rows that keep every token nothing grows once the windows do not.
    low, high = 0, 1 + (int(min(_POOL_MOST, sum(left_for(0)) / row)) if row else max(stack.stops, tail.stops))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if ends(middle) is not None else (low, middle)
    parts = ends(low) or ()
    return Cut(tuple((a + first, b + first) for a, b in zip([0, *parts], parts, strict=False)))


# ------------------------------------------------------------------------------------------------------------- details


class _Stack:
    """Sums over the first layers of a row of layers: fixed bytes, bytes a token, and bytes a token that end."""

    def __init__(self, shares: Sequence[Share]) -> None:
        self.layers = len(shares)
        self.row = [0.0, *accumulate(share.kv_row for share in shares)]
        self._fixed = [0.0, *accumulate(share.weights + share.kv_fixed + share.state for share in shares)]
        slots = {rows.slots for share in shares for rows in share.windows}
        self._ending = {
            until: [0.0, *accumulate(sum(r.row for r in share.windows if r.slots == until) for share in shares)]
            for until in slots
        }
        self.stops = max(slots, default=0)
        """Tokens from which on no window grows."""

    def held(self, end: int, tokens: int) -> float:
        """Of the first `end` layers, with a pool of so many tokens."""
        ending = sum(row[end] * min(tokens, until) for until, row in self._ending.items())
        return self._fixed[end] + self.row[end] * tokens + ending


def _divided(term: Term) -> bool:
    """Whether the token vector divides it: rows of the tensor layout."""
    return term.name in (KV, f"{KV}, {TENSOR}") and TENSOR in term.held


def _fewest(most: int, comfort: int, rooms: Callable[[int], tuple[int, int]]) -> int:
    """The smallest number from 1 to `most` that gives `comfort` tokens, or the one that gives the most. `rooms` tells
    the tokens of the cards, which grow with the number, and those of the host, which shrink."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        cards, host = rooms(middle)
        low, high = (low, middle) if cards >= min(comfort, max(0, host)) else (middle + 1, high)
    return max((low - 1, low), key=lambda number: min(rooms(number))) if low > 1 and min(rooms(low)) < comfort else low


def _rooms(job: Job, option: Option, ceilings: Ceilings, cut: Cut) -> tuple[int, int]:
    """Tokens that the cards alone would allow, and the host alone."""
    found = room(terms(job, option, ceilings, pipeline_shares(job, option, cut), ()), ceilings)
    host = len(ceilings.devices) - 1
    cards = min(found.devices[index] for index in option.ranks if index != host)
    # Memory that cards and host share binds both.
    return min(cards, found.tokens if found.tokens < min(found.devices) else TOKENS_MAX), found.devices[host]


def _blended(job: Job, option: Option, ceilings: Ceilings) -> list[list[float]]:
    """For each blend the share of each rank: of the speed to read weights, of the memory."""
    devices = [ceilings.devices[index] for index in option.ranks]
    speed = [rates(job, device).read_bytes_s for device in devices]
    memory = [max(1.0, (device.ceiling_bytes or 0) - standing_bytes(job, option, device)) for device in devices]
    by_speed = [entry / sum(speed) for entry in speed]
    by_memory = [entry / sum(memory) for entry in memory]
    return [[(1 - b) * s + b * m for s, m in zip(by_speed, by_memory, strict=True)] for b in _BLENDS]


def _evened(job: Job, option: Option, ceilings: Ceilings, vector: tuple[int, ...]) -> tuple[int, ...]:
    """`vector` with units moved from the fullest rank to the emptiest as long as that helps: heads and blocks are
    coarse, so a rank may get more bytes than its share of the vector."""
    ranks = range(len(vector))
    devices = [ceilings.devices[index] for index in option.ranks]
    room_of = [(device.ceiling_bytes or 0) - standing_bytes(job, option, device) for device in devices]

    def left(entries: tuple[int, ...]) -> list[float]:
        shares = tensor_shares(job, Shard(reduced(entries), (1,) * len(entries)))
        held = [share.weights + share.kv_copies + share.state + share.kv_fixed for share in shares]
        return [have - size for have, size in zip(room_of, held, strict=True)]

    best, have = vector, left(vector)
    for _ in range(_VECTOR_UNITS):
        full, empty = min(ranks, key=have.__getitem__), max(ranks, key=have.__getitem__)
        for step in (1, 2, 4):
            moved = tuple(entry + step * ((rank == empty) - (rank == full)) for rank, entry in enumerate(best))
            if min(moved) >= 1 and min(found := left(moved)) > min(have):
                best, have = moved, found
                break
        else:
            break
    return best


def _given_cut(job: Job, option: Option) -> Cut | None:
    count, ratio = len(job.layers), job.wish.pipeline_ratio
    if not ratio:
        return None
    return Cut(ranges_of(layers_of_ratio(ratio, count)))


def _is_legal(job: Job, ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether every layer is on the rank of the one whose K and V it reads."""
    legal = legal_ends(len(job.layers), job.shape.kv_sources)
    return all(end in legal for _, end in ranges[:-1] if 0 < end < len(job.layers))
