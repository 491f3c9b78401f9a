"""The corridor: how much memory stayed free on each device, continuously, and how often it was less than the floor.

A plan promises that the floor stays free at the peak. Whether it did is a matter of minima, and minima are short: a
staging buffer that lives for a tenth of a second is enough to end a process. So what is kept is built around minima:

- The least value of each device since the start is kept exactly, with its time and phase, however much is thinned out.
- Samples are a ring of bounded size. When it is full, neighbours in its older half become one, the lower of the two.
  So old times are told coarsely and recent ones finely, and no dip is ever smoothed away.
- A breach is an episode, not a sample: it begins with a value below the floor and is over after `CALM_SAMPLES` in a row
  that are not. A value that hovers around the floor is one breach.

Unknown (None) is kept as unknown: it neither begins nor ends a breach.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from budget.facts import MIB

CAPACITY = 600
"""Samples kept of a device: the last half minute in full at 100 ms, and what was before in steps that double."""
CALM_SAMPLES = 10


@dataclass(frozen=True)
class Sample:
    """Bytes free on one device at `at_s` seconds after the start, while the server was in `phase`."""

    at_s: float
    free_bytes: int | None
    phase: str


@dataclass(frozen=True)
class Breach:
    """The first value of an episode below the floor."""

    device: int
    floor_bytes: int
    sample: Sample


@dataclass
class _Track:
    """One device."""

    floor_bytes: int
    samples: list[Sample] = field(default_factory=list)
    least: Sample | None = None
    breaches: int = 0
    calm: int = CALM_SAMPLES
    """Values in a row that were not below the floor; fewer than CALM_SAMPLES: a breach goes on."""


class Corridor:
    """`floor_bytes` names what shall stay free on each device, in the order in which `sample` gives their values."""

    def __init__(self, floor_bytes: Sequence[int], period_ms: float, capacity: int = CAPACITY) -> None:
        if capacity < 4:
            raise ValueError(f"a corridor of {capacity} samples cannot be thinned out: give at least 4")
        self.period_ms = period_ms
        self.taken = 0
        """Times that `sample` was called,"""
        self.first_s: float | None = None
        """when first and when last, and the longest pause between two calls: proof that somebody looked."""
        self.last_s: float | None = None
        self.longest_gap_s = 0.0
        self._capacity = capacity
        self._tracks = [_Track(floor) for floor in floor_bytes]

    def set_floors(self, floor_bytes: Sequence[int]) -> None:
        """Floors as the plan has them, once there is one; devices that are new begin here."""
        for track, floor in zip(self._tracks, floor_bytes, strict=False):
            track.floor_bytes = floor
        self._tracks += [_Track(floor) for floor in floor_bytes[len(self._tracks) :]]

    def sample(self, at_s: float, phase: str, free: Sequence[int | None]) -> tuple[Breach, ...]:
        """Take one value for each device (fewer: the rest is unknown). Returns the breaches that begin with it."""
        if self.last_s is not None:
            self.longest_gap_s = max(self.longest_gap_s, at_s - self.last_s)
        self.first_s, self.last_s = at_s if self.first_s is None else self.first_s, at_s
        self.taken += 1
        begun = []
        for device, track in enumerate(self._tracks):
            sample = Sample(at_s, free[device] if device < len(free) else None, phase)
            if self._take(track, sample):
                begun.append(Breach(device, track.floor_bytes, sample))
        return tuple(begun)

    def least(self, device: int) -> Sample | None:
        """The lowest value since the start; None while nothing is known."""
        return self._tracks[device].least

    def level(self, device: int) -> tuple[int, int | None, int | None]:
        """(floor, free at the last sample, least free since the start) in bytes; None: not known."""
        track = self._tracks[device]
        last = track.samples[-1].free_bytes if track.samples else None
        return track.floor_bytes, last, track.least.free_bytes if track.least is not None else None

    def breaches(self, device: int) -> int:
        return self._tracks[device].breaches

    def samples(self, device: int) -> tuple[Sample, ...]:
        return tuple(self._tracks[device].samples)

    def __len__(self) -> int:
        return len(self._tracks)

    def as_json(self, indices: Sequence[int] | None = None) -> dict[str, Any]:
        """The body of `/v1/homeserve/corridor`. `indices` are the devices' own numbers where they are not 0, 1, 2.

        `floor_mib` is the highest of the devices' floors; each has its own beside its values.
        """
        numbers = range(len(self._tracks)) if indices is None else indices
        pairs = zip(numbers, self._tracks, strict=False)
        span = None if self.first_s is None or self.last_s is None else round(self.last_s - self.first_s, 3)
        return {
            "schema": 1,
            "floor_mib": _mib(max((track.floor_bytes for track in self._tracks), default=None)),
            "period_ms": self.period_ms,
            "taken": self.taken,
            "seconds": span,
            "longest_gap_ms": round(self.longest_gap_s * 1e3, 1),
            "devices": [_device(number, track) for number, track in sorted(pairs, key=lambda pair: pair[0])],
        }

    def _take(self, track: _Track, sample: Sample) -> bool:
        """Whether a breach begins."""
        track.samples.append(sample)
        if len(track.samples) > self._capacity:
            track.samples = _thinned(track.samples)
        free = sample.free_bytes
        if free is None:
            return False
        if track.least is None or track.least.free_bytes is None or free < track.least.free_bytes:
            track.least = sample
        if free >= track.floor_bytes:
            track.calm += 1
            return False
        begins = track.calm >= CALM_SAMPLES
        track.calm = 0
        track.breaches += begins
        return begins


def _thinned(samples: list[Sample]) -> list[Sample]:
    """Neighbours in the older half become one."""
    half = len(samples) // 4 * 2
    old = [_lower(samples[index], samples[index + 1]) for index in range(0, half, 2)]
    return old + samples[half:]


def _lower(first: Sample, second: Sample) -> Sample:
    if first.free_bytes is None:
        return second
    if second.free_bytes is None:
        return first
    return second if second.free_bytes < first.free_bytes else first


def _device(number: int, track: _Track) -> dict[str, Any]:
    least = track.least
    return {
        "index": number,
        "floor_mib": _mib(track.floor_bytes),
        "min_free_mib": None if least is None else _mib(least.free_bytes),
        "at": None if least is None else round(least.at_s, 3),
        "phase": None if least is None else least.phase,
        "breaches": track.breaches,
        "samples": [[round(each.at_s, 3), _mib(each.free_bytes), each.phase] for each in track.samples],
    }


def _mib(count: int | None) -> float | None:
    return None if count is None else round(count / MIB, 2)
