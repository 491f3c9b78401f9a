"""Median and spread of a few runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest of the sorted values."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Spread:
    """Of at least one value. Single runs are noisy, and a mean follows the worst of them: the median is what counts."""

    runs: int
    median: float
    p10: float
    p90: float


def spread(values: Sequence[float], digits: int = 3) -> Spread:
    return Spread(
        len(values),
        round(statistics.median(values), digits),
        round(quantile(values, 0.1), digits),
        round(quantile(values, 0.9), digits),
    )
