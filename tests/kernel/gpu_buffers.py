"""Buffers of activations for emulated kernels: rows further apart than they are wide, and planes of quantised ones.

What a kernel must not touch is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gpu_cases import Array, address, nothing

from backends.gpu.ops.buffers import Planes, Rows

F64 = npt.NDArray[np.float64]
WIDER = (0, 4, 3)


@dataclass(frozen=True)
class Filled:
    """A buffer in memory: all of it, its rows, and what a launch is told."""

    memory: Array
    rows: Array

    @property
    def at(self) -> Rows:
        return Rows(address(self.memory), self.memory.shape[1])

    @property
    def double(self) -> F64:
        """What it holds now, as a copy."""
        return self.rows.astype(np.float64)


def filled(rng: np.random.Generator, rows: int, width: int, by: float = 1.0) -> Filled:
    memory = nothing((rows, width + int(rng.choice(WIDER))))
    memory[:, :width] = by * rng.standard_normal((rows, width))
    return Filled(memory, memory[:, :width])


def empty(rng: np.random.Generator, rows: int, width: int) -> Filled:
    memory = nothing((rows, width + int(rng.choice(WIDER))))
    return Filled(memory, memory[:, :width])


def untouched(*buffers: Filled) -> None:
    """What lies behind the rows is as it was."""
    for each in buffers:
        assert np.isnan(each.memory[:, each.rows.shape[1] :]).all()


def close(got: Array, want: F64, relative: float = 2e-6, absolute: float = 1e-6) -> None:
    np.testing.assert_allclose(got, want, rtol=relative, atol=absolute)


def planes(rows: int, width: int) -> tuple[tuple[Array, ...], Planes]:
    arrays = (nothing((rows, width), np.int8), nothing((rows, width), np.int8), nothing((rows, width // 32)))
    arrays = (*arrays, nothing((rows, width // 16)))
    return arrays, Planes(*map(address, arrays))


def check_planes(arrays: Sequence[Array], x: F64) -> None:
    """They hold x to half a step of each block, and the sums of what they hold."""
    hi, lo, scale, sums = (each.astype(np.float64) for each in arrays)
    blocks = x.reshape(len(x), -1, 32)
    np.testing.assert_allclose(scale, np.abs(blocks).max(axis=2) / 32512, rtol=1e-5)
    integers = (256 * hi + lo).reshape(blocks.shape)
    np.testing.assert_allclose(integers * scale[..., None], blocks, rtol=3e-6, atol=0.51 * float(scale.max()))
    held = (integers * scale[..., None]).reshape(len(x), -1, 16).sum(axis=2)
    np.testing.assert_allclose(sums, held, rtol=1e-5, atol=1e-6)
