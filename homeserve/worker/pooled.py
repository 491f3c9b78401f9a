"""The embedding of a lane: from the rows behind the output norm to one vector of length 1.

    mean    the sum of all rows over their number
    last    the last row
    cls     the first row

`mean` gathers over the chunks of a prompt. Rows are added one by one in the order of their positions, in float64: so
the bits of an embedding do not depend on how the prompt was cut, or on who else was in the plans. What is gathered is a
cache, as all of a lane is: after a restart it comes again with the rows. At a change of layout it stays, because the
rank that samples is the same one.

`mean` and `cls` need the rows from position 0 on, so such a lane begins without a cached prefix (`needs_all_rows`).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from homeserve.wire.records import CLS, LAST, MEAN, POOLINGS

Rows = npt.NDArray[np.float32]


class Pooled:
    """What is known of one lane's embedding."""

    def __init__(self, pooling: str) -> None:
        assert pooling in POOLINGS, f"{pooling} was checked with the plan"
        self.pooling = pooling
        self._vector: npt.NDArray[np.float64] | None = None
        """float64 `[hidden]`: the sum so far, or the one row."""

    def wants(self, start: int, *, last: bool) -> bool:
        """Whether rows from position `start` on, with the `last` of the lane or without, have to be looked at."""
        return {MEAN: True, LAST: last, CLS: start == 0}[self.pooling]

    def add(self, rows: Rows) -> None:
        """The rows `[n, hidden]` that come next, of those that it wants."""
        if self.pooling != MEAN:
            self._vector = rows[-1 if self.pooling == LAST else 0].astype(np.float64)
            return
        if self._vector is None:
            self._vector = np.zeros(rows.shape[1], np.float64)
        for row in rows:
            self._vector += row

    def embedding(self) -> bytes:
        """Float32 `[hidden]`, of length 1; empty where there is none of such a length. (What a sum is divided by is
        gone with the length.)"""
        assert self._vector is not None, "a lane has rows"
        length = math.sqrt(float(np.add.reduce(self._vector * self._vector)))
        if not (0.0 < length < math.inf):
            return b""
        return (self._vector / length).astype("<f4").tobytes()
