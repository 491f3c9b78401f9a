"""Shards: which bytes of a tensor each rank holds in the tensor layout.

A tensor is a matrix `[rows, cols]` (vectors are `[1, cols]`). A rank's shard of it is a list of *pieces*; a piece is
runs of rows times runs of columns, packed one behind the other in that order:

    q | k | v of a delta net, by rows          an output projection, by columns
    q ▓▓▓▓······                                ▓▓▓▓···▓▓▓▓···▓▓▓▓···
    k ▓▓▓▓······     one piece, three runs      ▓▓▓▓···▓▓▓▓···▓▓▓▓···   tiled value heads: one piece, three runs
    v ▓▓▓▓······                                ▓▓▓▓···▓▓▓▓···▓▓▓▓···

A piece is held once among all ranks, or it is a *copy*: then every rank has the same one. Nothing else exists, and
`check_cover` proves it of a split: every element of the tensor is held exactly once, or by everybody.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from homeserve.layouts.partition import Run


@dataclass(frozen=True)
class TensorForm:
    """Shape of a tensor and its quant blocks: `block_len` elements of a row lie in `block_bytes`."""

    rows: int
    cols: int
    block_len: int = 1
    block_bytes: int = 4

    def row_bytes(self, columns: int) -> int:
        """Bytes of `columns` elements of a row. Raises ValueError where they are no whole blocks."""
        blocks, rest = divmod(columns, self.block_len)
        if rest:
            raise ValueError(f"{columns} columns are no whole number of blocks of {self.block_len}")
        return blocks * self.block_bytes

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes(self.cols)


@dataclass(frozen=True)
class Piece:
    rows: tuple[Run, ...]
    cols: tuple[Run, ...]
    copied: bool = False

    @property
    def height(self) -> int:
        return sum(run.size for run in self.rows)

    @property
    def width(self) -> int:
        return sum(run.size for run in self.cols)

    def nbytes(self, form: TensorForm) -> int:
        """Raises ValueError where a run of columns begins or ends inside a quant block."""
        ends = [form.row_bytes(run.end) - form.row_bytes(run.first) for run in self.cols]
        return self.height * sum(ends)


Split = tuple[tuple[Piece, ...], ...]
"""Pieces of one tensor, for each rank."""
Runs = Sequence[Sequence[Run]]
"""Runs of each rank."""


def by_rows(form: TensorForm, runs: Runs) -> Split:
    return tuple(_piece(own, (Run(0, form.cols),)) for own in runs)


def by_columns(form: TensorForm, runs: Runs) -> Split:
    return tuple(_piece((Run(0, form.rows),), own) for own in runs)


def along(form: TensorForm, runs: Runs, *, vector: bool) -> Split:
    """By what a projection gives: rows of its matrix, elements of a `vector`. (A matrix may have one row, too.)"""
    return by_columns(form, runs) if vector else by_rows(form, runs)


def copied(form: TensorForm, ranks: int) -> Split:
    """The same on every rank."""
    return ((Piece((Run(0, form.rows),), (Run(0, form.cols),), copied=True),),) * ranks


def copied_along(form: TensorForm, runs: Sequence[Run], ranks: int, *, vector: bool) -> Split:
    """Some rows of a matrix, or elements of a vector, on every rank."""
    (pieces,) = along(form, [runs], vector=vector)
    return (tuple(replace(piece, copied=True) for piece in pieces),) * ranks


def once(form: TensorForm, rank: int, ranks: int) -> Split:
    """All of it on one rank: what is added to a sum that is completed once, like the bias of an output projection."""
    whole = Piece((Run(0, form.rows),), (Run(0, form.cols),))
    return tuple((whole,) if each == rank else () for each in range(ranks))


def joined(first: Split, second: Split) -> Split:
    """Two splits of different parts of one tensor."""
    return tuple(a + b for a, b in zip(first, second, strict=True))


def held_bytes(form: TensorForm, split: Split) -> tuple[int, ...]:
    """Of each rank, copies included."""
    return tuple(sum(piece.nbytes(form) for piece in pieces) for pieces in split)


def check_cover(form: TensorForm, split: Split) -> None:
    """Raises ValueError with the place where an element of the tensor is held by nobody or twice, where a copy is not
    on every rank, or where a cut falls into a quant block."""
    every = [(rank, piece) for rank, pieces in enumerate(split) for piece in pieces]
    rows = _edges(form.rows, (run for _, piece in every for run in piece.rows))
    cols = _edges(form.cols, (run for _, piece in every for run in piece.cols))
    for _, piece in every:
        piece.nbytes(form)
    held: Counter[tuple[int, int]] = Counter()
    for rank, piece in every:
        weight = 1 if piece.copied else len(split)  # a copy on every rank counts as much as one holder
        if piece.copied and any(piece not in pieces for pieces in split):
            raise ValueError(f"rank {rank} has a copy of {piece} that another rank lacks")
        for top in _inside(rows, piece.rows):
            for left in _inside(cols, piece.cols):
                held[top, left] += weight
    for top in rows[:-1]:
        for left in cols[:-1]:
            if held[top, left] != len(split):
                times = held[top, left] / len(split)
                raise ValueError(f"row {top}, column {left} of {form.rows} x {form.cols} is held {times:g} times")


def _piece(rows: Sequence[Run], cols: Sequence[Run]) -> tuple[Piece, ...]:
    """One piece without its empty runs, or none."""
    kept = tuple(run for run in rows if run.size), tuple(run for run in cols if run.size)
    return (Piece(*kept),) if all(kept) else ()


def _edges(whole: int, runs: Iterable[Run]) -> list[int]:
    found = {0, whole, *(edge for run in runs for edge in (run.first, run.end))}
    if min(found) < 0 or max(found) > whole:
        raise ValueError(f"a piece reaches from {min(found)} to {max(found)} in a tensor of {whole}")
    return sorted(found)


def _inside(edges: Sequence[int], runs: Iterable[Run]) -> list[int]:
    """The beginnings of the cells of a grid that lie in `runs`, as often as they do."""
    cells = list(pairwise(edges))
    return [first for run in runs for first, end in cells if run.first <= first and end <= run.end]
