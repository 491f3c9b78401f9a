"""Copies of pieces and their digest: those of NumPy on every level, however many threads and whatever the chunk."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
from ctypes import byref, c_uint64
from typing import Any

import kernel_rig as rig
import numpy as np
import pytest
from one_page import PAGE, make_one

from backends.base import KvLayer, KvPool, PoolRuns, StateLayer, StatePool
from backends.cpu import abi
from backends.cpu.moves import pieces_of
from backends.cpu.pieces import Pieces, address_of, joined
from backends.cpu.pools import CpuPools
from backends.digest import BLOCK, digest
from backends.quant import QuantType

LENGTHS = (0, 1, 7, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 5 * BLOCK + 100, 131072, 300_001)
RNG = np.random.default_rng(7)
DATA = RNG.integers(0, 256, 1 << 20, dtype=np.uint8)


def native(backend: Any, data: np.ndarray) -> int:
    return int(backend.library.hs_digest(backend.team, data.ctypes.data if data.size else None, data.size))


@pytest.mark.parametrize("length", LENGTHS)
def test_the_digest_is_that_of_numpy(level: str, length: int) -> None:
    data = DATA[3 : 3 + length]
    assert native(rig.backend(level), data) == digest(data.tobytes())


def test_the_digest_has_its_numbers() -> None:
    """Ranks of different builds compare them: they are part of what a flip is."""
    numbers = [digest(bytes(range(256)) * times) for times in (0, 1, 63, 64, 257)]
    assert hashlib.sha256(repr(numbers).encode()).hexdigest()[:16] == "3d35208097e965bf"


def test_the_digest_sees_where_bytes_stand(level: str) -> None:
    backend, data = rig.backend(level), DATA[: 4 * BLOCK + 640].copy()
    whole = native(backend, data)
    for unit in (1, 2, 4, 8, 32, 64, 4096, BLOCK):
        for first, other in ((0, 1), (1, 3), (0, len(data) // unit - 1)):
            swapped = data.copy()
            one, two = slice(first * unit, (first + 1) * unit), slice(other * unit, (other + 1) * unit)
            swapped[one], swapped[two] = data[two], data[one]
            if not np.array_equal(swapped, data):
                assert native(backend, swapped) != whole, (unit, first, other)
    zeros = np.zeros(BLOCK + 64, np.uint8)
    assert len({native(backend, zeros[:length]) for length in (0, 1, 64, 65, BLOCK, BLOCK + 1)}) == 6


def test_the_digest_sees_every_bit(level: str) -> None:
    backend = rig.backend(level)
    for data in (DATA[:192].copy(), np.zeros(192, np.uint8), np.full(192, 255, np.uint8)):
        seen = {native(backend, data)}
        for bit in range(8 * len(data)):
            data[bit // 8] ^= 1 << bit % 8
            seen.add(native(backend, data))
            data[bit // 8] ^= 1 << bit % 8
        assert len(seen) == 8 * len(data) + 1


def scattered(sizes: list[int], gap: int = 5) -> tuple[np.ndarray, Pieces]:
    """Memory, and pieces of it in an order of their own."""
    order = np.random.default_rng(len(sizes)).permutation(len(sizes))
    offsets = np.zeros(len(sizes), np.int64)
    at = 3
    for index in order:
        offsets[index] = at
        at += sizes[index] + gap
    memory = np.resize(DATA, at + 64).copy()
    places = offsets + memory.ctypes.data
    return memory, Pieces(np.ascontiguousarray(places), np.cumsum(sizes, dtype=np.int64))


SIZES = (
    [1],
    [64],
    [BLOCK],
    [100, 28, 64, 1, 31, 4096, 0, 0, 7],
    [3000] * 40,
    [272 * 16] * 100,
    [5] * 997,
    [200_003, 1, 65],
)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)}x{sizes[0]}")
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shift", [0, 1])
def test_pieces_become_a_stream_and_the_stream_becomes_pieces(
    level: str, sizes: list[int], threads: int, shift: int
) -> None:
    backend = rig.backend(level, threads)
    memory, pieces = scattered(sizes)
    start = memory.ctypes.data
    wanted = np.concatenate([memory[p - start :][:size] for p, size in zip(pieces.places, sizes, strict=True)])
    out = np.full(pieces.nbytes + shift + 64, 99, np.uint8)
    stream = out[shift : shift + pieces.nbytes]
    assert pieces.pack(backend.library, backend.team, stream.ctypes.data) == digest(wanted.tobytes())
    assert np.array_equal(stream, wanted) and (out[shift + pieces.nbytes :] == 99).all() and (out[:shift] == 99).all()
    out[:] = 99
    assert pieces.fill(backend.library, backend.team, stream.ctypes.data) == digest(wanted.tobytes())
    assert np.array_equal(stream, wanted) and (out[shift + pieces.nbytes :] == 99).all() and (out[:shift] == 99).all()
    before = memory.copy()
    for place, size in zip(pieces.places, sizes, strict=True):
        memory[place - start :][:size] = 0
    pieces.unpack(backend.library, backend.team, stream.ctypes.data)
    assert np.array_equal(memory, before)


@pytest.mark.parametrize("chunk", [BLOCK, 3 * BLOCK, 1 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_neither_chunk_nor_threads_change_a_digest(level: str, chunk: int, threads: int) -> None:
    backend = rig.backend(level, threads)
    _, pieces = scattered([70_000, 3, 130_000, 64, 99_999])
    record = abi.Pieces(pieces.places.ctypes.data, pieces.ends.ctypes.data, len(pieces.ends), chunk)
    for copy in (backend.library.hs_pack, backend.library.hs_fill):
        out, found = np.zeros(pieces.nbytes, np.uint8), c_uint64()
        assert copy(backend.team, byref(record), out.ctypes.data, byref(found)) == abi.OK
        assert found.value == digest(out.tobytes())


@pytest.mark.parametrize("page", range(0, 3 * BLOCK // PAGE, 2))
@pytest.mark.parametrize("threads", [1, 2])
def test_a_fill_digests_what_lies_there_and_not_what_was_to_be_there(level: str, page: int, threads: int) -> None:
    """In memory that does not keep it: of two neighbouring pages the first one is lost."""
    backend = rig.backend(level, threads)
    source = DATA[: 3 * BLOCK].copy()
    pieces = Pieces.of(np.array([source.ctypes.data]), np.array([source.size]))
    right = digest(source.tobytes())
    with mmap.mmap(-1, source.size) as memory:
        stream = np.frombuffer(memory, np.uint8)
        make_one(stream.ctypes.data + page * PAGE, stream.ctypes.data + (page ^ 1) * PAGE)
        assert pieces.pack(backend.library, backend.team, stream.ctypes.data) == right, "of what was to be stored"
        found = pieces.fill(backend.library, backend.team, stream.ctypes.data)
        assert found == digest(stream.tobytes()) != right
        del stream


def test_a_spoilt_stream_has_one_bit_that_is_another() -> None:
    backend, source = rig.backend(rig.tested_levels()[0]), DATA[:500].copy()
    zeros = np.zeros(1, np.int64), np.array([70], np.int64)
    pieces = joined([zeros, (np.array([source.ctypes.data], np.int64), np.array([500], np.int64))])
    out = np.zeros(pieces.nbytes, np.uint8)
    spoilt = pieces.spoilt().fill(backend.library, backend.team, out.ctypes.data)
    wanted = np.concatenate([np.zeros(70, np.uint8), source])
    assert np.flatnonzero(out != wanted).tolist() == [70] and out[70] == wanted[70] ^ 1
    assert spoilt == digest(out.tobytes()) != pieces.fill(backend.library, backend.team, out.ctypes.data)
    assert np.array_equal(out, wanted)


def test_places_of_zeros_are_zeros_in_the_stream(level: str) -> None:
    backend, source = rig.backend(level), DATA[:500].copy()
    first = np.array([source.ctypes.data], np.int64), np.array([100], np.int64)
    zeros = np.zeros(1, np.int64), np.array([BLOCK + 3], np.int64)
    last = np.array([source.ctypes.data + 200], np.int64), np.array([300], np.int64)
    pieces = joined([first, zeros, last])
    wanted = np.concatenate([source[:100], np.zeros(BLOCK + 3, np.uint8), source[200:]])
    for copy in (pieces.pack, pieces.fill):
        out = np.full(pieces.nbytes, 9, np.uint8)
        assert copy(backend.library, backend.team, out.ctypes.data) == digest(wanted.tobytes())
        assert np.array_equal(out, wanted)
    with pytest.raises(ValueError, match="a shape"):
        pieces.unpack(backend.library, backend.team, out.ctypes.data)


def test_pieces_that_go_on_are_one_and_ends_that_fall_are_refused(level: str) -> None:
    pieces = Pieces.of(np.array([64, 96, 0, 0, 128, 200]), np.array([32, 32, 5, 6, 0, 8]))
    assert pieces.places.tolist() == [64, 0, 0, 200] and pieces.ends.tolist() == [64, 69, 75, 83]
    backend, out = rig.backend(level), np.zeros(64, np.uint8)
    falling = Pieces(np.array([out.ctypes.data] * 2), np.array([32, 16]))
    for copy in (falling.pack, falling.fill):
        with pytest.raises(ValueError, match="a shape"):
            copy(backend.library, backend.team, out.ctypes.data)


# ----------------------------------------------------------------------------------------------------------- pools

KINDS = ("F32", "F16", "Q8_0", "F8")


def filled(pools: CpuPools, backend: Any) -> None:
    pools.commit(backend.team, lambda *_: None)
    for region in pools.memory_regions():
        memory = (ctypes.c_uint8 * region.bytes).from_address(region.address)
        np.frombuffer(memory, np.uint8)[:] = np.random.default_rng(region.bytes).integers(0, 256, region.bytes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_has_the_same_bytes_in_every_pool(level: str, kind: str) -> None:
    """From a pool with two layers to one with three, at other pages, and back from there."""
    backend = rig.backend(level)
    layer = KvLayer(2, 32)
    source = CpuPools(backend.library, KvPool((layer, layer), 8 * 16, QuantType[kind]), StatePool())
    target = CpuPools(backend.library, KvPool((layer, layer, layer), 5 * 16, QuantType[kind]), StatePool())
    filled(source, backend)
    filled(target, backend)
    there = pieces_of(source, PoolRuns(kv=(((0, 1), np.array([6, 1, 3], np.int32)),)))
    here = pieces_of(target, PoolRuns(kv=(((2, 0), np.array([4, 0, 2], np.int32)),)))
    assert there.nbytes == here.nbytes == 2 * 3 * 2 * 2 * 16 * QuantType[kind].row_bytes(32)
    payload = bytearray(there.nbytes)
    digests = [there.pack(backend.library, backend.team, address_of(memoryview(payload)))]
    here.unpack(backend.library, backend.team, address_of(memoryview(payload)))
    again = bytearray(here.nbytes)
    digests.append(here.pack(backend.library, backend.team, address_of(memoryview(again))))
    assert payload == again and digests[0] == digests[1] == digest(payload)
    source.close()
    target.close()


@pytest.mark.parametrize("value_dim", [16, 24, 8])
def test_parts_of_a_state_are_found_at_full_width_and_packed(level: str, value_dim: int) -> None:
    """Tiled value heads: key heads 2 and 3 of 4, and of 8 value heads those of these, in two runs."""
    backend, kernel, key_dim = rig.backend(level), 4, 8
    whole = StateLayer(2 * 4 * key_dim + 8 * value_dim, kernel, 8, key_dim, value_dim)
    part = StateLayer(2 * 2 * key_dim + 4 * value_dim, kernel, 4, key_dim, value_dim)
    source = CpuPools(backend.library, KvPool((), 0, QuantType.F32), StatePool((part, whole), 3))
    target = CpuPools(backend.library, KvPool((), 0, QuantType.F32), StatePool((part,), 5))
    filled(source, backend)
    filled(target, backend)
    q, k, v = 2 * key_dim, 6 * key_dim, 8 * key_dim
    channels = ((q, q + 2 * key_dim), (k, k + 2 * key_dim))
    channels += tuple((v + first * value_dim, v + (first + 2) * value_dim) for first in (2, 6))
    there = pieces_of(source, PoolRuns(states=np.array([0, 2], np.int32), parts=((1, channels, ((2, 4), (6, 8))),)))
    one = ((0, part.channels),)
    here = pieces_of(target, PoolRuns(states=np.array([4, 1], np.int32), parts=((0, one, ((0, 4),)),)))
    floats = (kernel - 1) * part.channels + 4 * key_dim * value_dim
    assert there.nbytes == here.nbytes == 2 * 4 * floats
    payload, again = bytearray(there.nbytes), bytearray(there.nbytes)
    there.pack(backend.library, backend.team, address_of(memoryview(payload)))
    here.unpack(backend.library, backend.team, address_of(memoryview(payload)))
    here.pack(backend.library, backend.team, address_of(memoryview(again)))
    assert payload == again
    source.close()
    target.close()


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        (PoolRuns(kv=(((1,), np.zeros(1, np.int32)),)), "KV layer 1 of 1"),
        (PoolRuns(kv=(((0,), np.array([3, 4], np.int32)),)), "pages 3 to 4 of layer 0, which has 4"),
        (PoolRuns(kv=(((0,), np.array([-1], np.int32)),)), "pages -1 to -1"),
        (PoolRuns(states=np.array([2], np.int32), parts=((0, (), ()),)), "state slots 2 to 2 of 2"),
        (PoolRuns(states=np.zeros(1, np.int32), parts=((1, (), ()),)), "state layer 1 of 1"),
        (PoolRuns(states=np.zeros(1, np.int32), parts=((0, ((0, 33),), ()),)), "channels 0 to 33 of state layer 0"),
        (PoolRuns(states=np.zeros(1, np.int32), parts=((0, (), ((1, 3),)),)), "heads 1 to 3 of state layer 0"),
    ],
)
def test_rows_that_there_are_not_are_refused(runs: PoolRuns, why: str) -> None:
    backend = rig.backend(rig.tested_levels()[0])
    layer = StateLayer(32, 4, 2, 8, 8)
    pools = CpuPools(backend.library, KvPool((KvLayer(1, 16),), 64, QuantType.F16), StatePool((layer,), 2))
    with pytest.raises(ValueError, match=why):
        pieces_of(pools, runs)
    pools.close()


def test_both_layouts_in_one_buffer(level: str) -> None:
    """Rows of two layouts that lie over each other at different strides: all are read before one is written, so they
    arrive as in pools of their own."""
    backend = rig.backend(level)
    memory = RNG.integers(0, 256, 64 * 1024, dtype=np.uint8)
    rows, width = 200, 96
    sources = memory.ctypes.data + 64 * np.arange(rows, dtype=np.int64) * 3
    targets = memory.ctypes.data + 32 + 160 * np.arange(rows, dtype=np.int64)[::-1]
    wanted = [memory[64 * 3 * at :][:width].copy() for at in range(rows)]
    lengths = np.full(rows, width, np.int64)
    transit = np.zeros(rows * width, np.uint8)
    packed = Pieces.of(sources, lengths).pack(backend.library, backend.team, transit.ctypes.data)
    Pieces.of(np.ascontiguousarray(targets), lengths).unpack(backend.library, backend.team, transit.ctypes.data)
    found = [memory[target - memory.ctypes.data :][:width] for target in targets]
    assert all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert packed == digest(transit.tobytes())
