"""Cases of backends.gpu.ops.moves: pieces of every length and place, and streams of every length, against plain copies
and backends.digest."""

from __future__ import annotations

from functools import partial

import numpy as np

from backends.digest import digest
from backends.gpu.ops import moves as ops
from gpu_cases import Array, Case, Maker, address, aligned, nothing

POOL = 60_000


def pieces_of(rng: np.random.Generator, pool: Array, lengths: list[int], zeros: bool) -> tuple[Array, Array, Array]:
    """Places of pieces in `pool` that do not overlap, in any order, most at multiples of 16 bytes; (places, ends,
    stream)."""
    starts, at = [], 0
    for length in rng.permutation(lengths).tolist():
        at += int(rng.integers(0, 5)) if rng.integers(4) == 0 else -at % 16
        starts.append((at, length))
        at += length
    order = rng.permutation(len(starts))
    stream, places = [], []
    for index in order.tolist():
        first, length = starts[index]
        none = zeros and rng.integers(5) == 0
        places.append(0 if none else address(pool) + first)
        stream.append(np.zeros(length, np.uint8) if none else pool[first : first + length].copy())
    sizes = np.array([len(each) for each in stream], np.int64)
    found, ends = ops.piece_arrays(np.array(places, np.int64), sizes, zeros=zeros)
    return aligned(found), aligned(ends), np.concatenate(stream)


def _lengths(rng: np.random.Generator, few: bool) -> list[int]:
    """Some long, some of a few bytes, an empty one."""
    if few:
        return [int(rng.integers(20_000, 40_000)), int(rng.integers(1, 9))]
    return [*rng.integers(1, 40, 60).tolist(), *rng.integers(500, 5000, 6).tolist(), 0, 4096, 4]


def _gather(rng: np.random.Generator, warp: int, *, few: bool = False, counted: bool = True, shifted: int = 0) -> Case:
    pool = aligned(rng.integers(0, 256, POOL).astype(np.uint8))
    places, ends, want = pieces_of(rng, pool, _lengths(rng, few), zeros=True)
    stream, total = nothing((shifted + len(want) + 3,), np.uint8), aligned(np.zeros(1, np.uint64))
    launches = ops.gather_rows(
        address(stream) + shifted,
        len(want),
        ops.Pieces(address(places), address(ends), len(ends)),
        address(total) if counted else 0,
    )

    def check() -> None:
        np.testing.assert_array_equal(stream[shifted : shifted + len(want)], want)
        assert (stream[shifted + len(want) :] == 0xFF).all() and (stream[:shifted] == 0xFF).all()
        assert not counted or ops.digest_of_total(int(total[0]), len(want)) == digest(want.tobytes())

    return Case(launches, (pool, stream, total, ends), check, (places,))


def _scatter(rng: np.random.Generator, warp: int, *, few: bool = False) -> Case:
    pool = aligned(rng.integers(0, 256, POOL).astype(np.uint8))
    places, ends, _ = pieces_of(rng, pool, _lengths(rng, few), zeros=False)
    stream = aligned(rng.integers(0, 256, int(ends[-1])).astype(np.uint8))
    want, first = pool.copy(), 0
    for place, end in zip(places.tolist(), ends.tolist(), strict=True):
        at = place - address(pool)
        want[at : at + end - first] = stream[first:end]
        first = end
    launches = ops.scatter_rows(address(stream), len(stream), ops.Pieces(address(places), address(ends), len(ends)))

    def check() -> None:
        np.testing.assert_array_equal(pool, want)

    return Case(launches, (pool, stream, ends), check, (places,))


def _digest(rng: np.random.Generator, warp: int, *, most: int) -> Case:
    stream = aligned(rng.integers(0, 256, int(rng.integers(1, most))).astype(np.uint8))
    total = aligned(np.zeros(1, np.uint64))

    def check() -> None:
        assert ops.digest_of_total(int(total[0]), len(stream)) == digest(stream.tobytes())

    return Case(ops.digest(address(stream), len(stream), address(total)), (stream, total), check)


CASES: dict[str, Maker] = {
    "gather_rows": _gather,
    "gather_rows:few": partial(_gather, few=True),
    "gather_rows:no digest": partial(_gather, counted=False),
    "gather_rows:unaligned stream": partial(_gather, shifted=4),
    "scatter_rows": _scatter,
    "scatter_rows:few": partial(_scatter, few=True),
    "digest": partial(_digest, most=60_000),
    "digest:short": partial(_digest, most=200),
}
