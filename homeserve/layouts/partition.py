"""Partition units: what must stay together when a family of tensors is divided over ranks, and who gets how many.

In the tensor layout a projection into a stage is cut by rows, and the matrix out of it by the columns that belong to
those rows. Its columns lie in quant blocks of one scale each, so a cut has to fall between two blocks *of that tensor*.
A *unit* is the smallest number of heads or columns for which it always does:

    columns of the matrix    |  head 0  |  head 1  |  head 2  |  head 3  |     head_dim 128
    its blocks of 256        |        block 0      |        block 1      |     2 heads are a unit

    family               things          unit
    query heads          heads           heads whose columns of the output projection are whole blocks
    KV heads             heads           one (they are rows only); copied where there are fewer than ranks
    key heads            GDN key heads   those whose *value* columns are whole blocks
    columns              FFN columns     a block of the down projection; of small blocks 16 columns together
    experts              experts         one; of wide experts, columns as above (`experts`)
    vocabulary           rows            64, the last unit may be short

Units are given out by the weight vector with largest remainders (`budget.vectors.apportion`). A rank may get none: its
partial sum is zero then. The one thing that is refused is a rank that could not take part in attention at all, because
there are more ranks than query heads.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from budget.geometry import FINE_UNITS
from budget.vectors import VOCABULARY_UNIT, apportion, heads_together
from homeserve.errors import SettingError

ROWS_TOGETHER = 16
"""Rows of a packed matrix that lie together."""


@dataclass(frozen=True, order=True)
class Run:
    """Things first .. end-1."""

    first: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.first

    def times(self, width: int, offset: int = 0) -> Run:
        """The same run where each thing is `width` wide and the first one begins at `offset`."""
        return Run(offset + self.first * width, offset + self.end * width)


@dataclass(frozen=True)
class Partition:
    """`whole` things over ranks, `unit` of them always together; `parts[r]` is how many units rank r has. Rank 0 has
    the first things. Where `unit` does not divide `whole`, the last unit is short."""

    family: str
    whole: int
    unit: int
    parts: tuple[int, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        """The things of each rank."""
        ends = [min(self.whole, end * self.unit) for end in accumulate(self.parts)]
        return tuple(Run(first, end) for first, end in zip([0, *ends], ends, strict=False))

    @property
    def units(self) -> int:
        return sum(self.parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(run.size for run in self.runs)

    @property
    def first_holder(self) -> int:
        """The first rank that has any. It adds what must be added once (the bias of a sum)."""
        return next(rank for rank, part in enumerate(self.parts) if part)


def checked_vector(vector: Sequence[int], field: str) -> tuple[int, ...]:
    """`vector`, one positive entry for each rank. Raises SettingError with the entry that is not."""
    if not vector:
        raise SettingError(f"{field}: there is no number for any rank", field=field)
    for rank, entry in enumerate(vector):
        if entry < 1:
            shown = ",".join(map(str, vector))
            raise SettingError(
                f"{field} {shown}: rank {rank} has {entry} of {sum(vector)} parts, and every rank has a part",
                field=field,
                fix="give whole numbers from 1 on, or fewer devices",
            )
    return tuple(vector)


def query_heads(heads: int, head_dim: int, block_len: int, vector: Sequence[int]) -> Partition:
    """Of an attention whose output projection has blocks of `block_len`. Raises SettingError for more ranks than
    heads."""
    if len(vector) > heads:
        raise SettingError(
            f"the tensor layout has {len(vector)} ranks and this model an attention of {heads} query heads:"
            f" {len(vector) - heads} ranks would never attend",
            field="devices",
            fix=f"use at most {heads} devices, or the pipeline layout",
        )
    return _divided("query heads", heads, heads_together(head_dim, block_len), vector)


def kv_heads(heads: int, vector: Sequence[int]) -> Partition | None:
    """Of the K and V projections; None where every rank has all of them, because there are fewer heads than ranks."""
    return _divided("KV heads", heads, 1, vector) if heads >= len(vector) else None


def key_heads(
    heads: int, values_per_key: int, value_dim: int, tiled: bool, block_len: int, vector: Sequence[int]
) -> Partition:
    """Of a delta net with `values_per_key` value heads of `value_dim` for each key head.

    In the grouped order the value columns of a key head lie together; in the tiled order they lie in as many runs as a
    key head has value heads, and each run must be whole blocks by itself.
    """
    columns = value_dim if tiled and values_per_key > 1 else values_per_key * value_dim
    return _divided("key heads", heads, heads_together(columns, block_len), vector)


def ffn_columns(width: int, block_len: int, vector: Sequence[int]) -> Partition:
    """Where it leaves enough units, columns of smaller blocks go 16 together: as many rows of the matrices in front lie
    together in memory, and a rank's part of them is then a view where ranks share it."""
    together = math.lcm(block_len, ROWS_TOGETHER)
    fine = width % together == 0 and width // together >= FINE_UNITS
    return _divided("columns", width, together if fine else block_len, vector)


def experts(count: int, width: int, block_len: int, vector: Sequence[int]) -> Partition:
    """Of `count` experts of `width` columns: each is cut by columns where that gives at least `FINE_UNITS` units, else
    they are dealt out whole. The family says which."""
    if width % block_len == 0 and width // block_len >= FINE_UNITS:
        return ffn_columns(width, block_len, vector)
    return _divided("experts", count, 1, vector)


def vocabulary(rows: int, vector: Sequence[int]) -> Partition:
    units = -(-rows // VOCABULARY_UNIT)
    return Partition("vocabulary", rows, VOCABULARY_UNIT, apportion(units, vector))


def _divided(family: str, whole: int, unit: int, vector: Sequence[int]) -> Partition:
    """In units of `unit`. Where that does not divide `whole`, no cut falls between two blocks everywhere: all of it is
    one unit then."""
    together = unit if whole % unit == 0 else whole
    return Partition(family, whole, together, apportion(whole // together, vector))
