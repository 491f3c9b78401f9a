"""Exponentials, logarithms and angles of the device code against float64, in units in the last place."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import simt_rig as rig
from numpy.typing import NDArray

from backends.gpu.launch import Launch, Symbol, params

SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "0", 16)
ENTRIES = Path(__file__).parent / "gate" / "functions.cu"
PARAMS = params("x, y, out, i32 count")
Floats = NDArray[np.float32]


def run(name: str, x: Floats, y: Floats | None = None) -> Floats:
    x = np.ascontiguousarray(x, np.float32)
    y = x if y is None else np.ascontiguousarray(y, np.float32)
    out = np.empty_like(x)
    symbol = Symbol(f"of_{name}", "functions", "", PARAMS, 64)
    args = (rig.address(x), rig.address(y), rig.address(out), x.size)
    rig.load(ENTRIES, "cuda", 32).run(Launch(symbol, (1, 1, 1), args))
    return out


def error_ulp(found: Floats, want: NDArray[np.float64]) -> float:
    """The largest distance to the exact value, in steps of the floats there. Infinite where one alone is infinite or no
    number; below the normal floats a step is the smallest one."""
    with np.errstate(over="ignore"):
        rounded = want.astype(np.float32)
    same = (found == rounded) | (np.isnan(found) & np.isnan(want))
    step = np.spacing(np.maximum(np.abs(rounded), np.finfo(np.float32).tiny)).astype(np.float64)
    with np.errstate(invalid="ignore"):
        distance = np.where(same & ~np.isfinite(rounded), 0.0, np.abs(found - want) / step)
    return float(np.nan_to_num(distance, nan=np.inf).max())


def spread(low: float, high: float, count: int = 20000) -> Floats:
    """Floats with evenly drawn exponents, of both signs where `low` is below zero, and both ends."""
    rng = np.random.default_rng(SEED)
    least = low if low > 0 else 1e-40
    sizes = np.exp(rng.uniform(np.log(least), np.log(high), count)).astype(np.float32)
    if low < 0:
        sizes *= rng.choice(np.array([-1.0, 1.0], np.float32), count)
    return np.concatenate([sizes, np.array([low, high], np.float32)])


@pytest.mark.parametrize(
    ("name", "low", "high", "most"),
    [
        ("exp", -110.0, 110.0, 1.0),
        ("log", 1e-44, 3.4e38, 1.0),
        ("tanh", -20.0, 20.0, 2.0),
        ("sin", -2e6, 2e6, 2.0),
        ("cos", -2e6, 2e6, 2.0),
        ("rsqrt", 1e-44, 3.4e38, 2.0),
    ],
)
def test_functions_are_within_their_errors(name: str, low: float, high: float, most: float) -> None:
    x = spread(low, high)
    wide = x.astype(np.float64)
    want = 1.0 / np.sqrt(wide) if name == "rsqrt" else getattr(np, name)(wide)
    assert error_ulp(run(name, x), want) <= most


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_angles_of_far_positions(name: str) -> None:
    """Every position times every frequency of a rope is an angle: whole numbers, and multiples of pi/2 among them."""
    rng = np.random.default_rng(SEED)
    quarters = (np.arange(1, 600000, 7) * (np.pi / 2)).astype(np.float32)
    x = np.concatenate([rng.integers(0, 1_000_000, 20000).astype(np.float32), quarters])
    assert error_ulp(run(name, x), getattr(np, name)(x.astype(np.float64))) <= 2.0


def test_frequencies_of_a_rope() -> None:
    """theta^(-2 i / d), where both stand in a model: the powers that there are."""
    theta = np.repeat(np.array([1e4, 5e5, 1e6, 1e7], np.float32), 128)
    y = np.tile(-np.arange(128) / 128, 4).astype(np.float32)
    assert error_ulp(run("pow", theta, y), theta.astype(np.float64) ** y.astype(np.float64)) <= 2.0


@pytest.mark.parametrize(("reach", "most"), [(16.0, 2.0), (80.0, 10.0)])
def test_powers(reach: float, most: float) -> None:
    rng = np.random.default_rng(SEED)
    x = spread(1e-30, 1e30)
    y = (rng.uniform(-reach, reach, x.size) / np.log(x.astype(np.float64))).astype(np.float32)
    assert error_ulp(run("pow", x, y), x.astype(np.float64) ** y.astype(np.float64)) <= most


def test_ends_of_the_range() -> None:
    inf, nan = np.inf, np.nan
    cases: dict[str, tuple[list[float], list[float]]] = {
        "exp": ([0.0, -0.0, inf, -inf, nan, 88.8, -104.0], [1.0, 1.0, inf, 0.0, nan, inf, 0.0]),
        "log": ([1.0, 0.0, -0.0, inf, -1.0, nan], [0.0, -inf, -inf, inf, nan, nan]),
        "tanh": ([0.0, inf, -inf, nan, 1e-30], [0.0, 1.0, -1.0, nan, 1e-30]),
        "sin": ([0.0, inf, nan], [0.0, nan, nan]),
        "cos": ([0.0, -inf, nan], [1.0, nan, nan]),
        "rsqrt": ([4.0, 0.0, inf, -1.0, nan], [0.5, inf, 0.0, nan, nan]),
    }
    for name, (x, want) in cases.items():
        np.testing.assert_array_equal(run(name, np.array(x, np.float32)), np.array(want, np.float32), err_msg=name)
    x = np.array([2, 0, 0, 0, 5, 1, inf, inf, -2, nan, 2, 3e38, 1e-30], np.float32)
    y = np.array([10, 2, -2, 0, 0, nan, 2, -2, 2, 1, nan, 2, 2], np.float32)
    want = np.array([1024, 0, inf, 1, 1, 1, inf, 0, nan, nan, nan, inf, 0], np.float32)
    np.testing.assert_array_equal(run("pow", x, y), want)
