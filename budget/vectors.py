"""Vectors: how whole units of weights, and rows of the KV pool, are divided over ranks.

There are two, because they answer two questions. The *weight vector* follows compute: it cuts heads, columns and rows
of matrices into shards. The *token vector* follows the memory that is left when the weights lie: it says which rank
keeps which token in the tensor layout. Never use the one for the other.

The owner rule. Let v be a token vector, S = sum(v), p its prefix sums, g the grain (a page in production). Slots are
counted in blocks of g:

    block b = slot div g        0 1 2 3 4 5 6 | 7 8 ...              v = (4, 2, 1), S = 7
    owner of b                  0 0 0 0 1 1 2 | 0 0 ...              r where p[r] <= b mod S < p[r + 1]
    row block on the owner      0 1 2 3 0 1 0 | 4 5 ...              (b div S) * v[r] + (b mod S - p[r])

Every rank finds owner and row from the slot number alone, whatever request holds the slot, and in each layer the same.
Rows of a rank are dense from 0: a pool of `pool_rows` rows has no hole, and no slot below the capacity lies outside of
it. The number of slots that all ranks can address is S * min(rows[r] div v[r]): one rank binds, and what the others
have beyond that is never reached. So the vector should be proportional to the rows that each rank has room for.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

LARGEST_SUM = 64
"""Of a token vector that is chosen here. A larger sum follows the rows more closely, but the last, partial round of
blocks wastes up to a whole one."""
VOCABULARY_UNIT = 64
"""Rows of the vocabulary that stay together."""


def apportion(units: int, weights: Sequence[int | float], at_least: int = 0) -> tuple[int, ...]:
    """`units` whole things over ranks in proportion to `weights`: quotas rounded down (but to no less than `at_least`),
    what is left to the largest fractions, ties to the lower rank.

    Where the minimum has given out more than there is, it is taken back from whoever has most above its quota, ties
    from the higher rank. Raises ValueError for negative or only zero weights, or fewer units than the minimum needs.
    """
    if not weights or any(not math.isfinite(weight) or weight < 0 for weight in weights) or not sum(weights):
        raise ValueError(f"weights must not be negative, and not all zero: {tuple(weights)}")
    if units < at_least * len(weights):
        raise ValueError(f"{units} units are too few for {len(weights)} ranks with at least {at_least} each")
    exact = [Fraction(weight) for weight in weights]
    per_weight = units / sum(exact, Fraction(0))
    quotas = [weight * per_weight for weight in exact]
    given = [max(at_least, math.floor(quota)) for quota in quotas]
    ranks = range(len(given))
    while sum(given) > units:
        given[max((r for r in ranks if given[r] > at_least), key=lambda r: (given[r] - quotas[r], r))] -= 1
    by_fraction = sorted(ranks, key=lambda r: (given[r] - quotas[r], r))
    for rank in by_fraction[: units - sum(given)]:
        given[rank] += 1
    return tuple(given)


def layers_of_ratio(ratio: Sequence[int], layers: int) -> tuple[int, ...]:
    """Layers of each rank: the numbers of `ratio` themselves where they sum to `layers`, else in proportion to them,
    but at least one."""
    return tuple(ratio) if sum(ratio) == layers else apportion(layers, ratio, at_least=1)


def legal_ends(layers: int, kv_sources: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Where a rank that is not the last may end: no layer (the first of a pair) is parted from the one whose K and V it
    reads."""
    barred = {end for layer, source in kv_sources for end in range(source + 1, layer + 1)}
    return tuple(end for end in range(1, layers) if end not in barred)


def heads_together(columns: int, block_len: int) -> int:
    """The fewest heads of `columns` columns each that are whole blocks of a matrix that sums over their columns."""
    return block_len // math.gcd(columns, block_len)


def reduced(vector: Sequence[int]) -> tuple[int, ...]:
    """The same proportions in the smallest whole numbers. Raises ValueError for entries that are not positive: a rank
    with weights but no rows of its own cannot be expressed."""
    if not vector or any(entry <= 0 for entry in vector):
        raise ValueError(f"a vector has one positive entry for each rank, not {tuple(vector)}")
    divisor = math.gcd(*vector)
    return tuple(entry // divisor for entry in vector)


def owner(slot: int, vector: Sequence[int], grain: int = 1) -> int:
    """The rank that keeps `slot` in the tensor layout."""
    return _place(slot, vector, grain)[0]


def row(slot: int, vector: Sequence[int], grain: int = 1) -> int:
    """The row of `slot` in its owner's pool."""
    return _place(slot, vector, grain)[1]


def _place(slot: int, vector: Sequence[int], grain: int) -> tuple[int, int]:
    block, within = divmod(slot, grain)
    turn, position = divmod(block, sum(vector))
    for rank, entry in enumerate(vector):
        if position < entry:
            return rank, (turn * entry + position) * grain + within
        position -= entry
    raise AssertionError("a position below the sum lies below some prefix")


def slot_of(rank: int, row: int, vector: Sequence[int], grain: int = 1) -> int:
    """The slot that has `row` of the pool of `rank`: `owner` and `row` backwards."""
    block, within = divmod(row, grain)
    turn, position = divmod(block, vector[rank])
    return (turn * sum(vector) + sum(vector[:rank]) + position) * grain + within


def pool_rows(slots: int, vector: Sequence[int], grain: int = 1) -> tuple[int, ...]:
    """Rows of each rank's pool that holds slots 0 .. slots-1 (padding apart): whole rounds of the vector, rounded up,
    because slots of the last, partial round already use rows of it."""
    turns = -(-slots // (grain * sum(vector)))
    return tuple(turns * entry * grain for entry in vector)


def units(rows: Sequence[int], vector: Sequence[int]) -> tuple[int, ...]:
    """How many whole rounds of the vector each rank has rows for. The least of them binds."""
    return tuple(have // entry for have, entry in zip(rows, vector, strict=True))


def capacity(rows: Sequence[int], vector: Sequence[int]) -> int:
    """Slots that all ranks can address when rank r has room for rows[r] (in whatever `rows` counts: rows or pages)."""
    return sum(vector) * min(units(rows, vector))


def best_token_vector(rows: Sequence[int], largest_sum: int = LARGEST_SUM) -> tuple[int, ...]:
    """The vector with a sum of at most `largest_sum` (or one entry each, for more ranks than that) that addresses the
    most; among equals the one with the smallest sum.

    For a given sum the best vector has the largest min(rows[r] / v[r]). Growing one entry at a time, always the one
    for which rows[r] / (v[r] + 1) is largest, gives it for every sum in turn (Jefferson's method of highest averages),
    so all sums are tried in `largest_sum` steps, and the result is the optimum. No entry is 0: a rank without any room
    makes the capacity 0, which the caller sees, instead of vanishing from the vector.
    """
    if not rows:
        raise ValueError("there is no rank")
    room = [max(0, have) for have in rows]
    ranks = range(len(room))
    vector = [1] * len(room)
    best, addressed = tuple(vector), capacity(room, vector)
    while sum(vector) < largest_sum:
        # A float tells two such quotients apart: they differ by more than one part in rows x sum, far above 2**-53.
        grown = max(ranks, key=lambda r: room[r] / (vector[r] + 1))
        vector[grown] += 1
        found = capacity(room, vector)
        if found > addressed:
            best, addressed = tuple(vector), found
    return reduced(best)


# ---------------------------------------------------------------------------------------------- what moves at a flip


@dataclass(frozen=True)
class Moved:
    """Cells (a layer's row of one slot) of a flip from pipeline to tensor; on the way back, sent and received swap."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    local: int
    total: int


def owned(slots: Iterable[int], vector: Sequence[int], grain: int = 1) -> tuple[int, ...]:
    """How many of `slots` each rank keeps."""
    counts = [0] * len(vector)
    for slot in slots:
        counts[owner(slot, vector, grain)] += 1
    return tuple(counts)


def owned_of_first(slots: int, vector: Sequence[int], grain: int = 1) -> tuple[int, ...]:
    """As `owned` for slots 0 .. slots-1, without walking them."""
    round_slots = grain * sum(vector)
    turns, rest = divmod(slots, round_slots)
    starts = accumulate(vector, initial=0)
    return tuple(
        turns * entry * grain + min(max(rest - start * grain, 0), entry * grain)
        for start, entry in zip(starts, vector, strict=False)
    )


def moved_cells(layers_per_stage: Sequence[int], vector: Sequence[int], slots: Iterable[int], grain: int = 1) -> Moved:
    """What a flip moves for the live `slots` when stage s holds layers_per_stage[s] attention layers in the pipeline
    layout: stage s gives rank r its layers of the slots that r keeps; what stage and rank share stays where it is."""
    return moved_of_owned(layers_per_stage, owned(slots, vector, grain))


def moved_of_owned(layers_per_stage: Sequence[int], counts: Sequence[int]) -> Moved:
    """As `moved_cells`, from how many slots each rank keeps."""
    layers, live = sum(layers_per_stage), sum(counts)
    pairs = list(zip(layers_per_stage, counts, strict=True))
    return Moved(
        sent=tuple(own_layers * (live - count) for own_layers, count in pairs),
        received=tuple((layers - own_layers) * count for own_layers, count in pairs),
        local=sum(own_layers * count for own_layers, count in pairs),
        total=layers * live,
    )
