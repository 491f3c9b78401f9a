"""What one rank of a fleet runs: its layers in the pipeline layout, its part of every layer in the tensor layout.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PIPELINE, TENSOR = "pipeline", "tensor"


@dataclass(frozen=True)
class Share:
    """Rank `rank` of `ranks` in `layout`. `layers` are its own ones (pipeline), `weight_vector` has an entry for each
    rank (tensor). Make it with `pipeline` or `tensor`."""

    layout: str
    rank: int
    ranks: int
    layers: range = range(0)
    weight_vector: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank} of {self.ranks} ranks")
        if self.layout == PIPELINE and (not self.layers or (self.layers.start == 0) != (self.rank == 0)):
            raise ValueError(f"rank {self.rank} cannot have layers {self.layers.start} to {self.layers.stop - 1}")
        if self.layout == TENSOR and len(self.weight_vector) != self.ranks:
            raise ValueError(f"a weight vector of {len(self.weight_vector)} numbers for {self.ranks} ranks")
        if self.layout not in (PIPELINE, TENSOR):
            raise ValueError(f"there is no layout {self.layout!r}")

    @staticmethod
    def pipeline(rank: int, ranges: Sequence[tuple[int, int]]) -> Share:
        """`ranges` are the layers [first, end) of each rank."""
        return Share(PIPELINE, rank, len(ranges), range(*ranges[rank]))

    @staticmethod
    def tensor(rank: int, weight_vector: Sequence[int]) -> Share:
        return Share(TENSOR, rank, len(weight_vector), weight_vector=tuple(weight_vector))

    @property
    def divides(self) -> bool:
        """Whether every layer is cut: the tensor layout, unless one rank has all of it."""
        return self.layout == TENSOR and self.ranks > 1

    @property
    def is_last(self) -> bool:
        return self.rank == self.ranks - 1
