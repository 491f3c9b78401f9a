"""Launches of a flip's moves: rows of pools as one payload, and the digest of a stream.

A payload is pieces of the pools one behind the other (`backends.cpu.moves` says in which order, and the pools have the
same layout here). `places` are addresses, uint64 [pieces], 0 for zeros; `ends` int64 [pieces], where each piece ends in
the stream; no piece is empty. A digest is summed up on the card, block by block, into one number that was 0 before;
`digest_of_total` makes of it what `backends.digest` says of the same bytes. A payload that is longer than a stream goes
in several, each but the last of whole blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.digest import BLOCK, MASK, STEP
from backends.gpu.launch import Launch, Symbol, params

THREADS = 256

GATHER_ROWS = Symbol(
    *("gather_rows", "moves", "Move"),
    params("stream, i64 bytes, places, ends, i32 count, total, i64 first_block"),
    THREADS,
    needs=("load128",),
)
SCATTER_ROWS = Symbol(
    *("scatter_rows", "moves", "Move"),
    params("stream, i64 bytes, places, ends, i32 count"),
    THREADS,
    needs=("load128",),
)
DIGEST = Symbol("digest", "moves", "Move", params("stream, i64 bytes, total"), THREADS, needs=("load128",))

SYMBOLS = (GATHER_ROWS, SCATTER_ROWS, DIGEST)


@dataclass(frozen=True)
class Pieces:
    """Both arrays of `piece_arrays` in the card's memory, and how many pieces there are."""

    places: int
    ends: int
    count: int


def piece_arrays(
    places: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], *, zeros: bool = False
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """(places, ends), without empty pieces. Raises ValueError for a length below 0, and for a place of 0 unless there
    may be `zeros`: in a stream that is gathered alone."""
    if len(lengths) and int(lengths.min()) < 0:
        raise ValueError(f"a piece of {int(lengths.min())} bytes")
    some = lengths > 0
    if not zeros and not places[some].all():
        raise ValueError("a piece without a place")
    return places[some].astype(np.uint64), np.cumsum(lengths[some], dtype=np.int64)


def gather_rows(stream: int, nbytes: int, pieces: Pieces, total: int = 0, first_block: int = 0) -> tuple[Launch, ...]:
    """Pieces to the stream of `nbytes` bytes, digested on the way where `total` is an address, as blocks `first_block`
    and so on of a payload. Nothing for 0 bytes."""
    args = (stream, nbytes, pieces.places, pieces.ends, pieces.count, total, first_block)
    return (Launch(GATHER_ROWS, _grid(nbytes), args),) if nbytes else ()


def scatter_rows(stream: int, nbytes: int, pieces: Pieces) -> tuple[Launch, ...]:
    """The stream to the pieces, none of which may be of zeros."""
    args = (stream, nbytes, pieces.places, pieces.ends, pieces.count)
    return (Launch(SCATTER_ROWS, _grid(nbytes), args),) if nbytes else ()


def digest(stream: int, nbytes: int, total: int) -> tuple[Launch, ...]:
    return (Launch(DIGEST, _grid(nbytes), (stream, nbytes, total)),) if nbytes else ()


def digest_of_total(total: int, nbytes: int) -> int:
    """The digest of a payload of `nbytes` bytes from the sum of its blocks."""
    x = total ^ (nbytes * STEP & MASK)
    x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD & MASK
    x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 & MASK
    return x ^ x >> 33


def _grid(nbytes: int) -> tuple[int, int, int]:
    return -(-nbytes // BLOCK), 1, 1
