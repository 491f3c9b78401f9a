"""Small launches of every GPU kernel, one module for each module of `backends.gpu.ops`.

A module `gpu_cases/<module>.py` has a table CASES: a name -> a function (rng, warp) that makes a Case. The name is the
symbol that the case is there for, or `symbol:variant` (another shape, another mode); every symbol of the module's
SYMBOLS has one. test_simt.py runs the tables: the fast sample every symbol at both widths and some under sanitizers,
the slow tier all. A function must make the same case from the same `rng`, and keep it small: some ten blocks, a few
milliseconds.

    def _norm(rng: np.random.Generator, warp: int) -> Case:
        rows, width = int(rng.integers(1, 4)), int(rng.integers(1, 300))       # tails
        x, weight = aligned(rng.standard_normal((rows, width), np.float32)), ...   # as allocations on a card are
        out = nothing((rows, width))                                           # NaN: what is not written is seen
        launch = mixers.norm(address(out), address(x), address(weight), rows, width, 1e-5, warp=warp)

        def check() -> None:
            np.testing.assert_allclose(out, reference.norm(x, weight, 1e-5), rtol=1e-5)

        return Case((launch,), (out, x, weight), check)

    CASES = {"norm_f32": _norm, ...}                # by types: {f"linear_{q}": partial(_linear, q) for q in QUANTS}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import simt_rig as rig
from numpy.typing import NDArray
from simt_rig import address, aligned

from backends.gpu.launch import Launch

__all__ = ["Array", "Case", "Maker", "address", "aligned", "nothing", "run", "run_sanitized"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Case:
    """Launches in order, all memory that they touch (each array is one allocation under sanitizers: never hand out an
    address into a larger array that is not listed), and what must hold afterwards. `tables`: arrays of addresses."""

    launches: tuple[Launch, ...]
    arrays: tuple[Array, ...]
    check: Callable[[], None]
    tables: tuple[Array, ...] = ()


Maker = Callable[[np.random.Generator, int], Case]


def nothing(shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    """An aligned array of ones bits: NaN as float32 and half, -1 as an integer."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return aligned(np.full(size, 0xFF, np.uint8)).view(dtype).reshape(shape)


def run(
    case: Case,
    vendor: rig.Vendor,
    warp: int,
    *,
    sanitizer: rig.Sanitizer | None = None,
    whole: bool = True,
    backwards: bool = False,
) -> None:
    """Runs a case's launches, one after the other, and its check. `sanitizer` and `whole`: as of `run_sanitized`."""
    if sanitizer:
        return run_sanitized([case], vendor, warp, sanitizer, whole=whole)
    for launch in case.launches:
        rig.load(launch.symbol.file, vendor, warp).run(launch, backwards=backwards)
    case.check()


def run_sanitized(
    cases: Sequence[Case], vendor: rig.Vendor, warp: int, sanitizer: rig.Sanitizer, *, whole: bool = True
) -> None:
    """Runs cases under a sanitizer, and their checks. Launches of one library share a process. `whole`: a library is
    compiled for all types that its file has, or else for that of the launch alone."""

    def library(launch: Launch) -> tuple[str, ...]:
        return (launch.symbol.file, *([f"QUANT={launch.symbol.quant}"] if launch.symbol.quant and not whole else []))

    arrays = [each for case in cases for each in case.arrays]
    tables = [each for case in cases for each in case.tables]
    for (file, *defines), launches in groupby((each for case in cases for each in case.launches), library):
        runner = rig.build(file, vendor, warp, *defines, sanitizer=sanitizer)
        rig.sanitized(runner, list(launches), arrays, tables=tables)
    for case in cases:
        case.check()
