"""Two forms of a linear layer side by side on a card: how long each takes, and whether both compute the same.

Everything is the program's own: weights where they lie, buffers of the op, its scratch. So a trial belongs before the
first batch, and leaves the buffers as it found them: zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import numpy.typing as npt

from backends.base import Linear
from backends.gpu.batch import STAGING_LINE
from backends.gpu.device import Recording, Timed
from backends.gpu.forms import Forms, ShapeClass, class_of
from backends.gpu.library_gemm import Gemm, Product
from backends.gpu.ops.buffers import Rows
from backends.gpu.plan import Placed, Plan
from backends.gpu.recorder import cut
from backends.gpu.steps import dense
from backends.gpu.steps.base import BatchShape, Stored, stride_of

TRIES = 5
"""Measurements of a side, in turns with the other's; one more ahead of them is not counted, as caches are cold."""
MATRICES_MOST = 8
ENOUGH_BYTES = 64 << 20
"""Matrices of a class that are taken one after the other: so many, or as many as no cache holds."""
PASSING_BYTES = 8 << 20
"""Of rows that go to the card, or come back to be compared, at once."""
FLOAT_BYTES = 4
Floats = npt.NDArray[np.float32]
Step = Recording | Product


@dataclass(frozen=True)
class Timing:
    """Seconds: the median of some measurements, and how far the middle ones lie apart."""

    seconds: float
    spread: float

    @classmethod
    def of(cls, measured: Sequence[float]) -> Timing:
        ordered = sorted(measured)
        cut_off = len(ordered) // 4
        return cls(median(ordered), ordered[-1 - cut_off] - ordered[cut_off])

    def leads(self, other: Timing) -> bool:
        """By more than either varies."""
        return other.seconds - self.seconds > max(self.spread, other.spread)


@dataclass(frozen=True)
class Sample:
    """A Linear of one matrix. `rows`: the most that its op ever has."""

    op: Linear
    matrix: Stored
    rows: int

    @property
    def nbytes(self) -> int:
        return self.matrix.rows * self.matrix.quant.row_bytes(self.matrix.cols)


def samples_of(plan: Plan, places: Placed) -> dict[ShapeClass, list[Sample]]:
    """Matrices of a program's linear layers by class, each once; the classes with the most bytes first."""
    found: dict[ShapeClass, dict[str, Sample]] = {}
    for op, rows in zip(plan.ops, plan.op_rows, strict=True):
        for part in op.parts if isinstance(op, Linear) else ():
            if part.out.width and isinstance(op, Linear):
                sample = Sample(replace(op, parts=(part,)), places.matrix(part.weight), rows)
                found.setdefault(class_of(sample.matrix), {}).setdefault(part.weight.name, sample)
    groups = {each: list(samples.values()) for each, samples in found.items()}
    return dict(sorted(groups.items(), key=lambda item: -sum(sample.nbytes for sample in item[1])))


class Trial:
    """`spent`: seconds of the card so far, of `bound_s`. `gemm`: what multiplies products, where a form has any."""

    def __init__(self, device: Timed, places: Placed, bound_s: float, gemm: Gemm | None = None) -> None:
        self.spent, self._bound_s = 0.0, bound_s
        self.gemm = gemm
        self._device, self._places = device, places

    def times(self, samples: Sequence[Sample], rows: int, sides: tuple[Forms, Forms]) -> tuple[Timing, Timing] | None:
        """Of each side for so many rows, which every sample's op has room for. None where no time is left: the run
        ahead of the others says how long they would take. Raises GemmRefused, DriverError."""
        if self.spent >= self._bound_s:
            return None
        taken = _enough(samples)
        for sample in taken:
            self._write_rows(sample, rows)
        steps = [[step for sample in taken for step in self._steps(sample, rows, forms)] for forms in sides]
        measured: tuple[list[float], list[float]] = [], []
        try:
            each = sum(self._seconds(side) for side in steps)
            if self.spent + TRIES * each > self._bound_s:
                return None
            for _ in range(TRIES):
                for side, found in zip(steps, measured, strict=True):
                    found.append(self._seconds(side))
        finally:
            self._device.wait()
            self._close(steps)
            for sample in taken:
                self._clear(sample, rows)
        return Timing.of(measured[0]), Timing.of(measured[1])

    def distance(self, sample: Sample, rows: int, sides: tuple[Forms, Forms]) -> float:
        """How far the second side's result is from the first one's: the largest difference in a row, as a part of the
        largest number of the first in that row; infinite where one is no number. Raises GemmRefused, DriverError."""
        self._write_rows(sample, rows)
        own, other = (self._result(sample, rows, forms) for forms in sides)
        self._clear(sample, rows)
        if not (np.isfinite(own).all() and np.isfinite(other).all()):
            return float("inf")
        largest = np.maximum(np.abs(own).max(axis=1), np.finfo(np.float32).tiny)
        return float((np.abs(other - own).max(axis=1) / largest).max())

    # ---------------------------------------------------------------------------------------------------------- inside

    def _steps(self, sample: Sample, rows: int, forms: Forms) -> list[Step]:
        """As a program runs them: recordings, and products between them."""
        kept, self._places.forms = self._places.forms, forms
        try:
            work = dense.launches(sample.op, self._places, BatchShape(rows, rows, 1))
        finally:
            self._places.forms = kept
        found: list[Step] = []
        for segment in cut(work):
            found += [self._device.record(segment.launches)] if segment.launches else []
            found += [segment.product] if segment.product is not None else []
        return found

    def _seconds(self, steps: Sequence[Step]) -> float:
        seconds = self._device.seconds(lambda: self._run(steps))
        self.spent += seconds
        return seconds

    def _run(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, Product):
                assert self.gemm is not None, "a form with products has who makes them"
                self.gemm.multiply(step)
            else:
                self._device.replay(step)

    def _close(self, sides: Sequence[Sequence[Step]]) -> None:
        for step in (step for side in sides for step in side):
            if not isinstance(step, Product):
                step.close()

    def _result(self, sample: Sample, rows: int, forms: Forms) -> Floats:
        """[rows, outs], of the first rows where they are more than PASSING_BYTES."""
        out, width = self._ends(sample)[1]
        steps = self._steps(sample, rows, forms)
        count = max(1, min(rows, PASSING_BYTES // (FLOAT_BYTES * out.stride)))
        passing = self._device.pinned(FLOAT_BYTES * count * out.stride, STAGING_LINE)
        try:
            self._device.fill(out.at, 0xFF, FLOAT_BYTES * rows * out.stride)
            self._run(steps)
            self._device.download(passing.address, out.at, passing.nbytes)
            self._device.wait()
            return passing.bytes.view(np.float32).reshape(count, out.stride)[:, :width].copy()
        finally:
            self._device.wait()
            self._close([steps])
            passing.close()

    def _ends(self, sample: Sample) -> tuple[tuple[Rows, int], tuple[Rows, int]]:
        """Where rows of the input and of the output lie, and how wide they are."""
        src, out = sample.op.src, sample.op.parts[0].out
        return (self._places.rows(src), src.width), (self._places.rows(out), out.width)

    def _write_rows(self, sample: Sample, rows: int) -> None:
        """Normal numbers, the same for the same width; padding is zeros."""
        src, width = self._ends(sample)[0]
        line = FLOAT_BYTES * stride_of(width)
        count = max(1, min(rows, PASSING_BYTES // line))
        numbers = np.zeros((count, stride_of(width)), np.float32)
        numbers[:, :width] = np.random.default_rng(width).standard_normal((count, width), np.float32)
        passing = self._device.pinned(numbers.nbytes, STAGING_LINE)
        try:
            passing.bytes[:] = numbers.view(np.uint8).reshape(-1)
            for first in range(0, rows, count):
                self._device.upload(src.at + line * first, passing.address, line * min(count, rows - first))
            self._device.wait()
        finally:
            passing.close()

    def _clear(self, sample: Sample, rows: int) -> None:
        for place, _ in self._ends(sample):
            self._device.fill(place.at, 0, FLOAT_BYTES * rows * place.stride)
        self._device.wait()


def _enough(samples: Sequence[Sample]) -> list[Sample]:
    taken: list[Sample] = []
    for sample in samples[:MATRICES_MOST]:
        if sum(each.nbytes for each in taken) >= ENOUGH_BYTES:
            break
        taken.append(sample)
    return taken
