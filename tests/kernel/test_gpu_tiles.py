"""Products of tiles in every layout of lanes: NVIDIA's two, AMD's three, and the one without matrix cores.

The numbers are small integers, so that results are exact: a fragment with two values changed about is seen.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import simt_rig as rig
from gpu_cases import Array, address, aligned, nothing

from backends.gpu.launch import Launch, Symbol, params

SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "0", 16)
ENTRY = Path(__file__).parent / "tiles_entry.cu"
LAYOUTS: tuple[tuple[rig.Vendor, int, str], ...] = (
    ("cuda", 32, "TILES_MMA16"),
    ("cuda", 32, "TILES_MMA8"),
    ("cuda", 32, "TILES_PLAIN"),
    ("hip", 32, "TILES_WMMA11"),
    ("hip", 32, "TILES_WMMA12"),
    ("hip", 32, "TILES_PLAIN"),
    ("hip", 64, "TILES_MFMA"),
    ("hip", 64, "TILES_PLAIN"),
)
layouts = pytest.mark.parametrize(("vendor", "warp", "layout"), LAYOUTS, ids=[f"{v}{w}-{t}" for v, w, t in LAYOUTS])


def product(vendor: rig.Vendor, warp: int, layout: str, a: Array, b: Array, c: Array, transposed: bool) -> Array:
    """a b^T + c as the kernel has it, a and b [16, k]; checks that each value is one lane's."""
    symbol = Symbol("tiles", "tiles_entry", "", params("out, owners, a, b, c, i32 tiles, i32 transposed"), warp)
    out, owners = nothing((16, 16)), aligned(np.zeros((16, 16), np.int32))
    left, right, sums = (aligned(each) for each in (a.astype(np.float16), b.astype(np.float16), c))
    arrays = (address(out), address(owners), address(left), address(right), address(sums))
    launch = Launch(symbol, (1, 1, 1), (*arrays, a.shape[1] // 16, int(transposed)))
    rig.load(ENTRY, vendor, warp, layout).run(launch)
    assert (owners == 1).all(), "a value that several lanes have, or none"
    return out


@layouts
@pytest.mark.parametrize("transposed", [False, True], ids=["lines", "transposed"])
def test_a_product_of_tiles_is_exact(vendor: rig.Vendor, warp: int, layout: str, transposed: bool) -> None:
    rng = np.random.default_rng(SEED)
    for tiles in (1, 4):
        a, b = (rng.integers(-8, 9, (16, 16 * tiles)).astype(np.float32) for _ in range(2))
        c = rng.integers(-99, 99, (16, 16)).astype(np.float32)
        np.testing.assert_array_equal(product(vendor, warp, layout, a, b, c, transposed), a @ b.T + c)


@layouts
def test_each_row_is_its_own(vendor: rig.Vendor, warp: int, layout: str) -> None:
    """No number in one row of A spoils that row alone, and one in a line of B that column."""
    a, b = np.ones((16, 16), np.float32), np.ones((16, 16), np.float32)
    a[5, 3], b[9, 14] = np.nan, np.inf
    got = product(vendor, warp, layout, a, b, np.zeros((16, 16), np.float32), False)
    want = np.full((16, 16), 16.0)
    want[:, 9], want[5] = np.inf, np.nan
    np.testing.assert_array_equal(got, want)
