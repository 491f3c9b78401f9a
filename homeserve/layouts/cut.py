"""The pipeline layout: which layers each rank holds, and where a cut may fall.

    layers     0 ........ 13 | 14 ...... 26 | 27 .... 39       NEXTN 40
               rank 0          rank 1         rank 2 ──────────┘
               embeds                         final norm, head, drafting block

A cut comes from the planner as ranges, or from `--pipeline-ratio` as one number for each rank. The ratio speaks of the
*backbone*: a file that counts its drafting block as one more layer does not change it. Numbers that sum to the layers
of the backbone are layers; numbers with a smaller sum are proportions (2,1,1 of 64 is 32, 16, 16); a larger sum is
neither, and refused.

A layer that reads the K and V of another one is on the rank of that one, because K and V do not travel. So a cut may
not fall between the two (`legal_ends` lists where it may). Every rank has a layer.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from budget.placement import ranges_of
from budget.vectors import layers_of_ratio
from homeserve.errors import SettingError
from homeserve.layouts.partition import Run, checked_vector

FIELD = "pipeline_ratio"


@dataclass(frozen=True)
class PipelineCut:
    """Layers of each rank: contiguous, none empty, together all of the backbone."""

    ranges: tuple[Run, ...]

    @property
    def layers(self) -> int:
        return self.ranges[-1].end

    @property
    def embedding_rank(self) -> int:
        """The rank that looks up the rows of the embedding table."""
        return 0

    @property
    def head_rank(self) -> int:
        """The rank with the final norm, the head and the drafting block. It samples."""
        return len(self.ranges) - 1

    def rank_of(self, layer: int) -> int:
        """Layers from `layers` on are those of the drafting block."""
        if layer >= self.layers:
            return self.head_rank
        return next(rank for rank, run in enumerate(self.ranges) if layer < run.end)

    def held(self, layers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Of `layers` (of one kind, say) those of each rank, ascending."""
        ordered = sorted(layers)
        return tuple(
            tuple(layer for layer in ordered if self.rank_of(layer) == rank) for rank in range(len(self.ranges))
        )


def cut_by_ratio(ratio: Sequence[int], layers: int, kv_sources: Mapping[int, int], nextn: int = 0) -> PipelineCut:
    """The cut of a ratio. `layers` of the backbone, `nextn` behind them; `kv_sources` is, for each layer that has no K
    and V of its own, the layer that it reads. Raises SettingError with the arithmetic."""
    numbers = checked_vector(ratio, FIELD)
    shown, total = "+".join(map(str, numbers)), sum(numbers)
    if total > layers:
        beyond = f" ({layers + nextn} with the drafting block, which is not cut)" if nextn else ""
        raise SettingError(
            f"{FIELD}: {shown} = {total}, and the backbone has {layers} layers{beyond}",
            field=FIELD,
            fix=f"give numbers that sum to {layers}, or smaller ones as proportions",
        )
    return cut_of_ranges(ranges_of(layers_of_ratio(numbers, layers)), layers, kv_sources)


def cut_of_ranges(ranges: Sequence[tuple[int, int]], layers: int, kv_sources: Mapping[int, int]) -> PipelineCut:
    """A cut as the planner gives it. Raises SettingError for layers that nobody or two ranks hold, a rank without a
    layer, and a layer without its source of K and V."""
    expected = 0
    for rank, (first, end) in enumerate(ranges):
        if first != expected:
            fault = "are on no rank" if first > expected else "are on two ranks"
            low, high = sorted((first, expected))
            raise SettingError(f"layers {low} to {high - 1} {fault}: rank {rank} begins with {first}", field=FIELD)
        if end <= first:
            raise SettingError(
                f"rank {rank} has no layer: {len(ranges)} ranks, {layers} layers, ranges {list(ranges)}",
                field=FIELD,
                fix=f"use at most {layers} devices",
            )
        expected = end
    if expected != layers:
        raise SettingError(f"the ranges end with layer {expected - 1}, and there are {layers} layers", field=FIELD)
    _check_sources([end for _, end in ranges[:-1]], layers, kv_sources)
    return PipelineCut(tuple(Run(first, end) for first, end in ranges))


def legal_ends(layers: int, kv_sources: Mapping[int, int]) -> tuple[int, ...]:
    """Where a rank that is not the last may end: no later layer reads the K and V of an earlier one."""
    return tuple(end for end in range(1, layers) if _separated(end, kv_sources) is None)


def _check_sources(ends: Sequence[int], layers: int, kv_sources: Mapping[int, int]) -> None:
    for rank, end in enumerate(ends):
        reader = _separated(end, kv_sources)
        if reader is not None:
            legal = ", ".join(map(str, legal_ends(layers, kv_sources))) or "nowhere"
            raise SettingError(
                f"layer {reader} reads the K and V of layer {kv_sources[reader]}, and rank {rank} ends before layer"
                f" {end}: both must be on one rank",
                field=FIELD,
                fix=f"a rank may end before layer: {legal}",
            )


def _separated(end: int, kv_sources: Mapping[int, int]) -> int | None:
    """The first layer that a cut at `end` separates from its source."""
    return min((layer for layer, source in kv_sources.items() if source < end <= layer), default=None)
