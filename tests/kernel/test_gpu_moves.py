"""A flip's moves on a card, emulated: the payload and the digest are those of the CPU backend, byte for byte."""

from __future__ import annotations

import os

import kernel_rig
import numpy as np
import pytest
import simt_rig as rig
from gpu_cases import address, aligned, moves, nothing

from backends.base import KvLayer, KvPool, KvWindow, PoolRuns, StateLayer, StatePool
from backends.cpu.moves import pieces_of
from backends.cpu.pieces import Pieces
from backends.cpu.pools import CpuPools
from backends.digest import BLOCK, digest
from backends.gpu.ops import moves as ops
from backends.quant import QuantType

SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "0", 16)
RIGS: tuple[tuple[rig.Vendor, int], ...] = (("cuda", 32), ("hip", 64))
widths = pytest.mark.parametrize(("vendor", "warp"), RIGS, ids=[f"{vendor}{warp}" for vendor, warp in RIGS])
LENGTHS = (1, 3, 8, 15, 16, 17, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 200)


def digest_on(stream: np.ndarray, vendor: rig.Vendor, warp: int) -> int:
    total = aligned(np.zeros(1, np.uint64))
    rig.load("moves", vendor, warp).run(*ops.digest(int(stream.ctypes.data), len(stream), address(total)))
    return ops.digest_of_total(int(total[0]), len(stream))


@widths
@pytest.mark.parametrize("name", sorted(moves.CASES))
def test_each_case_is_a_plain_copy(vendor: rig.Vendor, warp: int, name: str) -> None:
    for seed in (SEED, SEED + 1, SEED + 2):
        case = moves.CASES[name](np.random.default_rng(seed), warp)
        rig.load("moves", vendor, warp).run(*case.launches, backwards=bool(seed % 2))
        case.check()


@widths
def test_the_digest_is_that_of_numpy_at_any_length_and_place(vendor: rig.Vendor, warp: int) -> None:
    data = np.random.default_rng(SEED).integers(0, 256, 4 * BLOCK).astype(np.uint8)
    assert digest_on(data[:0], vendor, warp) == digest(b"")
    for length in LENGTHS:
        for shift in (0, 4, 7):
            stream = data[shift : shift + length]
            assert digest_on(stream, vendor, warp) == digest(stream.tobytes()), (length, shift)


@widths
def test_the_digest_sees_where_bytes_stand(vendor: rig.Vendor, warp: int) -> None:
    data = np.random.default_rng(SEED).integers(0, 256, 3 * BLOCK + 64).astype(np.uint8)
    whole = digest_on(data, vendor, warp)
    for unit in (1, 8, 16, 64, 4096, BLOCK):
        swapped = data.copy()
        swapped[:unit], swapped[unit : 2 * unit] = data[unit : 2 * unit], data[:unit]
        assert digest_on(swapped, vendor, warp) != whole, unit


def filled_pools(rng: np.random.Generator) -> CpuPools:
    library = kernel_rig.backend(kernel_rig.tested_levels()[0]).library
    kv = KvPool((KvLayer(2, 32), KvLayer(1, 64, 1)), 96, QuantType.F16, (KvWindow(20, 64),))
    states = StatePool((StateLayer(2 * 16 + 2 * 20, 4, 2, 16, 20), StateLayer(24, 2, 0, 0, 0)), 4)
    pools = CpuPools(library, kv, states)
    for region in pools.memory_regions():
        memory = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * region.bytes).from_address(region.address))
        memory[:] = rng.integers(0, 256, region.bytes)
    return pools


RUNS = PoolRuns(
    kv=(((0,), np.array([4, 0, 1, 5], np.int32)), ((1,), np.array([2, 3], np.int32))),
    states=np.array([3, 1], np.int32),
    parts=((0, ((0, 16), (40, 72)), ((1, 2),)), (1, ((3, 24),), ())),
)
"""Pages in an order of their own, parts of a state with a head whose columns are no multiple of 16."""


def on_card(pieces: Pieces) -> tuple[np.ndarray, np.ndarray]:
    return aligned(pieces.places.astype(np.uint64)), aligned(pieces.ends)


@widths
def test_a_payload_of_the_pools_is_the_cpus_to_the_byte(vendor: rig.Vendor, warp: int) -> None:
    """Packed by the one and by the other, and unpacked again into other pools."""
    backend = kernel_rig.backend(kernel_rig.tested_levels()[0])
    source, target = (filled_pools(np.random.default_rng(seed)) for seed in (SEED, SEED + 1))
    pieces, others = pieces_of(source, RUNS), pieces_of(target, RUNS)
    want, payload = np.zeros(pieces.nbytes, np.uint8), nothing((pieces.nbytes,), np.uint8)
    told = pieces.pack(backend.library, backend.team, address(want))
    kernels, total = rig.load("moves", vendor, warp), aligned(np.zeros(1, np.uint64))
    places, ends = on_card(pieces)
    at = ops.Pieces(address(places), address(ends), len(ends))
    kernels.run(*ops.gather_rows(address(payload), pieces.nbytes, at, address(total)))
    assert np.array_equal(payload, want)
    assert ops.digest_of_total(int(total[0]), len(payload)) == told == digest(want.tobytes())
    places, ends = on_card(others)
    kernels.run(
        *ops.scatter_rows(address(payload), others.nbytes, ops.Pieces(address(places), address(ends), len(ends)))
    )
    again = np.zeros(others.nbytes, np.uint8)
    assert others.pack(backend.library, backend.team, address(again)) == told
    assert np.array_equal(again, want)
    source.close()
    target.close()


def test_pieces_without_bytes_are_left_out_and_wrong_ones_refused() -> None:
    places, ends = ops.piece_arrays(np.array([10, 20, 30], np.int64), np.array([4, 0, 8], np.int64))
    assert places.tolist() == [10, 30] and ends.tolist() == [4, 12]
    assert ops.gather_rows(0, 0, ops.Pieces(0, 0, 0)) == () == ops.digest(0, 0, 0)
    with pytest.raises(ValueError, match="-1 bytes"):
        ops.piece_arrays(np.array([10], np.int64), np.array([-1], np.int64))
    with pytest.raises(ValueError, match="without a place"):
        ops.piece_arrays(np.array([10, 0], np.int64), np.array([1, 1], np.int64))
    assert ops.piece_arrays(np.array([0], np.int64), np.array([5], np.int64), zeros=True)[1].tolist() == [5]
