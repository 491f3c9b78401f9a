"""What a card holds, emulated: weights in planes, pools as the CPU has them, payloads of the CPU to the byte."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import gpu_weights
import kernel_rig
import numpy as np
import pytest
from emulated_device import EmulatedDevice

from backends.base import (
    NO_STATES,
    PAGE_LEN,
    Buffer,
    EmbedRows,
    ExpertMatrix,
    Experts,
    KvLayer,
    KvPool,
    KvWindow,
    Linear,
    LinearPart,
    Norm,
    Op,
    PoolRuns,
    Routing,
    StateLayer,
    StatePart,
    StatePool,
    TensorView,
    Weight,
)
from backends.cpu import moves as cpu_moves
from backends.cpu import pools as cpu_pools
from backends.cpu.pieces import address_of
from backends.digest import BLOCK, digest
from backends.gpu import planes, weights
from backends.gpu.errors import DriverError, OutOfDeviceMemory
from backends.gpu.moves import LEAST_STAGING, CardMoves, Pieces, pieces_of, waves
from backends.gpu.ops import quants
from backends.gpu.pools import GpuPools, all_of, checked_parts
from backends.gpu.staging import LOAD_LINE, Staging
from backends.gpu.weights import CardWeights, OfFile, Rectangle
from backends.quant import QuantType
from homeserve.checkpoint.safetensors_forms import MadeView, Matrices
from homeserve.layouts.partition import Run
from homeserve.models.held_views import held_view

OUT = Buffer("out", 8)


def card(arch: str = "sm_86", **settings: Any) -> EmulatedDevice:
    return EmulatedDevice(arch, **settings)


def on_card(device: EmulatedDevice, address: int, nbytes: int) -> np.ndarray:
    """A copy of the card's memory, once all is done."""
    device.settle()
    assert device.memory.holds(address, nbytes)
    return np.frombuffer(ctypes.string_at(address, nbytes), np.uint8)


def view_of(name: str, matrix: gpu_weights.Matrix) -> TensorView:
    return TensorView(name, matrix.quant, matrix.rows, matrix.cols, matrix.file.reshape(-1))


def made_of(view: TensorView, count: int) -> TensorView:
    """The same as a stack of matrices that are made one by one."""
    data = view.data.reshape(count, -1)
    return MadeView(view.name, view.type, view.rows, view.cols, Matrices(count, lambda index: data[index].copy()))


def linear(view: TensorView, bias: TensorView | None = None) -> Linear:
    part = LinearPart(_weight(view), Buffer(f"{view.name}.out", view.rows), _weight(bias) if bias else None)
    return Linear(Buffer("src", view.cols), (part,))


def _weight(view: TensorView) -> Weight:
    return Weight(view.name, view.rows, view.cols)


def vector(name: str, values: np.ndarray) -> TensorView:
    return TensorView(name, QuantType.F32, 1, len(values), values.astype(np.float32).view(np.uint8))


class Loaded:
    """Weights of some views, filled into an arena that holds ones before."""

    def __init__(
        self,
        ops: Sequence[Op],
        views: Sequence[TensorView],
        staging: int = 4096,
        source: Any = None,
        arch: str = "sm_86",
    ) -> None:
        self.device = card(arch)
        self.weights = CardWeights(ops, {view.name: view for view in views})
        self.arena = self.device.allocate(self.weights.nbytes, "weights")
        self.device.fill(self.arena.address, 0xFF, self.weights.nbytes)
        self.staging = Staging(self.device, LOAD_LINE, staging)
        self.weights.place(self.arena.address)
        self.told: list[tuple[str, int, int]] = []
        weights.fill(self.device, self.staging, self.weights, source or OfFile(), lambda *told: self.told.append(told))

    def bytes(self) -> np.ndarray:
        return on_card(self.device, self.arena.address, self.weights.nbytes)

    def close(self) -> None:
        self.staging.close()
        self.arena.close()
        self.device.close()


def wanted(ops: Sequence[Op], views: Sequence[TensorView]) -> np.ndarray:
    """The arena by `planes.pack`, weight after weight."""
    by_name, out = {view.name: view for view in views}, []
    for name, form in {weight.name: form for op in ops for weight, form in weights.weights_of(op)}.items():
        view = by_name[name]
        data = np.ascontiguousarray(view.data)
        packed = planes.pack(view.type, data, view.rows, view.cols) if form == weights.MATRIX else data
        out.append(np.pad(packed, (0, -len(packed) % weights.ALIGN)))
    return np.concatenate(out)


# ------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("quant", quants.MATRICES, ids=quants.tag)
def test_a_matrix_of_each_type_lies_in_its_planes(quant: QuantType) -> None:
    """Through a staging that holds a few rows of it."""
    cols = 7 if quant in planes.FLOATS else max(256, quant.block_len)
    view = view_of("w", gpu_weights.matrix(quant, 21, cols, np.random.default_rng(1)))
    with closing(Loaded([linear(view)], [view], staging=5 * quant.row_bytes(cols) + 3)) as loaded:
        assert np.array_equal(loaded.bytes(), wanted([linear(view)], [view]))
        stored = loaded.weights.matrix(_weight(view))
        assert (stored.quant, stored.at, stored.rows, stored.cols) == (quant, loaded.arena.address, 21, cols)
        assert loaded.device.counts == {f"pack_{quants.tag(quant)}": 5}


@pytest.mark.parametrize("quant", [QuantType.Q4_K, QuantType.Q8_0, QuantType.F16], ids=quants.tag)
def test_a_row_that_is_longer_than_the_staging_goes_in_pieces_of_whole_blocks(quant: QuantType) -> None:
    view = view_of("w", gpu_weights.matrix(quant, 3, 1024, np.random.default_rng(2)))
    with closing(Loaded([linear(view)], [view], staging=quant.row_bytes(1024) * 2 // 5)) as loaded:
        assert np.array_equal(loaded.bytes(), wanted([linear(view)], [view]))


def test_shards_by_rows_and_by_columns_lie_as_matrices_of_their_own() -> None:
    rng = np.random.default_rng(3)
    whole = view_of("w", gpu_weights.matrix(QuantType.Q4_K, 24, 768, rng))
    floats = view_of("f", gpu_weights.matrix(QuantType.F32, 9, 10, rng))
    parts = [
        held_view(whole, "rows", [Run(4, 12)], [Run(0, 768)]),
        held_view(whole, "runs", [Run(0, 3), Run(16, 24)], [Run(0, 768)]),
        held_view(whole, "columns", [Run(0, 24)], [Run(256, 512)]),
        held_view(floats, "odd columns", [Run(0, 9)], [Run(3, 8)]),
    ]
    with closing(Loaded([linear(part) for part in parts], parts, staging=900)) as loaded:
        assert np.array_equal(loaded.bytes(), wanted([linear(part) for part in parts], parts))
        assert {stored.rows for stored in map(loaded.weights.matrix, map(_weight, parts))} == {8, 11, 24, 9}


def experts_of(gate_up: TensorView, down: TensorView, bias: TensorView, gains: TensorView, inner: int) -> Experts:
    both = _weight(gate_up)
    return Experts(
        Buffer("src", gate_up.cols),
        Buffer("logits", 3),
        Buffer("out", down.rows // 3),
        Routing(3, 2, gains=_weight(gains)),
        ExpertMatrix(both, inner, 2 * inner, 0, _weight(bias)),
        ExpertMatrix(both, inner, 2 * inner, inner, _weight(bias)),
        ExpertMatrix(_weight(down), down.rows // 3, down.rows // 3),
    )


def test_a_stack_that_is_made_matrix_by_matrix_lies_there_once() -> None:
    rng = np.random.default_rng(4)
    gate_up = made_of(view_of("gate_up", gpu_weights.matrix(QuantType.MXFP4, 3 * 8, 32, rng)), 3)
    down = made_of(view_of("down", gpu_weights.matrix(QuantType.MXFP4, 3 * 32, 32, rng)), 3)
    bias, gains = vector("bias", rng.standard_normal(24)), vector("gains", rng.standard_normal(3))
    op, views = experts_of(gate_up, down, bias, gains, 4), [gate_up, down, bias, gains]
    with closing(Loaded([op], views, staging=300)) as loaded:
        assert np.array_equal(loaded.bytes(), wanted([op], views))
        assert len(loaded.weights.placed) == 4
        at = loaded.weights.vector(op.gate.bias)
        assert on_card(loaded.device, at, 96).tobytes() == bias.data.tobytes()


def test_vectors_are_float32_whatever_the_file_has() -> None:
    rng = np.random.default_rng(5)
    views, values = [], []
    for quant in (QuantType.F32, QuantType.F16, QuantType.BF16):
        matrix = gpu_weights.matrix(quant, 1, 37, rng)
        views.append(view_of(quant.name, matrix))
        values.append(matrix.meaning)
    ops = [Norm(Buffer("a", 37), _weight(view), 1e-6, Buffer("b", 37)) for view in views]
    with closing(Loaded(ops, views, staging=100)) as loaded:
        for view, value in zip(views, values, strict=True):
            at = loaded.weights.vector(_weight(view))
            assert at % weights.ALIGN == 0
            assert np.array_equal(on_card(loaded.device, at, 148).view(np.float32), value[0])
        assert loaded.weights.vector(None) == 0


def test_a_tied_table_is_placed_once_and_all_of_a_load_is_told() -> None:
    rng = np.random.default_rng(6)
    table = view_of("table", gpu_weights.matrix(QuantType.Q4_0, 40, 32, rng))
    norm = vector("norm", rng.standard_normal(32))
    ops = [EmbedRows(_weight(table), OUT), Norm(OUT, _weight(norm), 1e-6, OUT), linear(table)]
    with closing(Loaded(ops, [table, norm])) as loaded:
        assert np.array_equal(loaded.bytes(), wanted(ops, [table, norm]))
        total = table.nbytes + norm.nbytes
        assert loaded.told == [("weights", 0, total), ("weights", table.nbytes, total), ("weights", total, total)]


def test_the_vendors_kernels_make_the_same_arena() -> None:
    rng = np.random.default_rng(7)
    views = [view_of(quant.name, gpu_weights.matrix(quant, 5, 256, rng)) for quant in (QuantType.Q6_K, QuantType.BF16)]
    ops = [linear(view) for view in views]
    with closing(Loaded(ops, views, arch="gfx1103")) as loaded:
        assert np.array_equal(loaded.bytes(), wanted(ops, views))


def test_what_an_op_does_not_want_is_refused() -> None:
    rng = np.random.default_rng(8)
    view = view_of("w", gpu_weights.matrix(QuantType.Q4_0, 4, 32, rng))
    with pytest.raises(ValueError, match=r"w is \[4, 32\], the op wants \[4, 64\]"):
        CardWeights([Linear(OUT, (LinearPart(Weight("w", 4, 64), OUT),))], {"w": view})
    with pytest.raises(ValueError, match="w is used as a matrix and as a vector"):
        CardWeights(
            [linear(replace(view, type=QuantType.F32, data=view.data)), Norm(OUT, _weight(view), 0.0, OUT)],
            {"w": replace(view, type=QuantType.F32)},
        )
    with pytest.raises(ValueError, match="w is Q4_0: vectors are floats"):
        CardWeights([Norm(OUT, _weight(view), 0.0, OUT)], {"w": view})
    with pytest.raises(ValueError, match="w is I8, which no card takes"):
        CardWeights([linear(view)], {"w": replace(view, type=QuantType.I8)})
    for data in (view.data[:-1], view.data[:-18], np.append(view.data, view.data)):
        with pytest.raises(ValueError, match=r"w: \d+ bytes of data for \[4, 32\] of Q4_0"):
            Loaded([linear(view)], [replace(view, data=data)])


def test_a_source_that_leaves_out_a_part_of_a_vector_is_found() -> None:
    class Short(OfFile):
        def rectangles(self, view: TensorView) -> Iterator[Rectangle]:
            yield Rectangle(0, 0, view.data[: view.nbytes - 4].reshape(1, -1))

    norm = vector("norm", np.ones(8))
    with pytest.raises(ValueError, match="norm: 28 bytes of data"):
        Loaded([Norm(OUT, _weight(norm), 0.0, OUT)], [norm], source=Short())


# --------------------------------------------------------------------------------------------------------------- pools

KINDS = ("F32", "F16", "BF16", "Q8_0", "F8")
STATES = StatePool((StateLayer(2 * 16 + 2 * 20, 4, 2, 16, 20), StateLayer(24, 2, 0, 0, 0)), 4)


def kv_pool(kind: str, dims: int = 32) -> KvPool:
    layers = (KvLayer(2, dims), KvLayer(1, 64, 1), KvLayer(3, dims))
    return KvPool(layers, 6 * PAGE_LEN, QuantType[kind], (KvWindow(20, 4 * PAGE_LEN),))


def cpu_pool(kv: KvPool, states: StatePool) -> cpu_pools.CpuPools:
    backend = kernel_rig.backend(kernel_rig.tested_levels()[0])
    pools = cpu_pools.CpuPools(backend.library, kv, states)
    pools.commit(backend.team, lambda *_: None)
    return pools


def fill_alike(device: EmulatedDevice, ours: GpuPools, theirs: cpu_pools.CpuPools, seed: int) -> None:
    """Random bytes, the same ones in both."""
    rng, device_sizes = np.random.default_rng(seed), ours.memory_lines()
    for region in theirs.memory_regions():
        data = rng.integers(0, 256, region.bytes, np.uint8)
        assert device_sizes[region.line] == region.bytes
        at = ours.kv_addresses(0)[0] if region.line == "kv" else ours.state_base
        device.settle()
        ctypes.memmove(region.address, data.ctypes.data, region.bytes)
        ctypes.memmove(at, data.ctypes.data, region.bytes)


@pytest.mark.parametrize("kind", KINDS)
def test_pools_are_as_long_and_lie_as_on_the_cpu(kind: str) -> None:
    dims = 32 if kind == "Q8_0" else 24
    kv, device = kv_pool(kind, dims), card()
    ours, theirs = GpuPools(device, kv, STATES), cpu_pool(kv, STATES)
    assert ours.memory_lines() == theirs.memory_lines() and ours.memory_regions() == () and ours.backed
    first = theirs.kv_addresses(0)[0] - ours.kv_addresses(0)[0]
    for layer in range(3):
        assert tuple(first + at for at in ours.kv_addresses(layer)) == theirs.kv_addresses(layer)
        assert ours.kv_pool(layer) == (*ours.kv_addresses(layer), (6, 4, 6)[layer])
    assert not on_card(device, ours.kv_addresses(0)[0], ours.memory_lines()["kv"]).any(), "zeroed"
    window, matrices, slot = ours.state(1)
    assert (window - ours.state_base, matrices - window, slot * 4) == (4992, 128, ours.memory_lines()["state"])
    ours.close()
    theirs.close()
    device.close()


def test_pools_without_rows_or_states_hold_nothing() -> None:
    device = card(capacity=0)
    pools = GpuPools(device, KvPool((), 0, QuantType.F16), NO_STATES, in_turns=True)
    pools.commit()
    assert pools.memory_lines() == {"kv": 0}
    pools.close()
    device.close()


def test_pools_in_turns_hold_memory_from_commit_to_release_alone() -> None:
    device, kv = card(), kv_pool("F16")
    pools = GpuPools(device, kv, STATES, in_turns=True)
    addresses = [pools.kv_pool(layer) for layer in range(3)] + [pools.state(0)]
    assert device.held == 0 and pools.memory_lines() == {"kv": 0, "state": 0} and not pools.backed
    pools.commit()
    lines = pools.memory_lines()
    assert all(lines.values()) and device.held >= sum(lines.values()) and pools.backed
    device.fill(addresses[0][0], 7, 100)
    pools.release()
    assert device.held == 0 and not pools.backed and not device.memory.holds(addresses[0][0])
    pools.commit()
    assert [pools.kv_pool(layer) for layer in range(3)] + [pools.state(0)] == addresses, "addresses never move"
    assert not on_card(device, addresses[0][0], lines["kv"]).any(), "new memory is zeroed"
    pools.close()
    assert device.held == 0


def test_pools_that_do_not_fit_say_of_what_they_are_made_and_hold_nothing() -> None:
    kv, states = kv_pool("F16"), StatePool(STATES.layers, 200)
    device = card(capacity=1 << 19)
    with pytest.raises(OutOfDeviceMemory, match="200 states of 5120 bytes in 2 layers"):
        GpuPools(device, kv, states)
    assert device.held == 0
    pools = GpuPools(device, kv, states, in_turns=True)
    with pytest.raises(MemoryError, match="200 states of 5120 bytes"):
        pools.commit()
    assert device.held == 0 and not pools.backed
    with pytest.raises(MemoryError, match="96 slots of 640 bytes in 2 layers, 64 slots of 256 bytes in 1 layers that"):
        GpuPools(card(capacity=100), kv, NO_STATES)
    with pytest.raises(DriverError, match="no virtual memory"):
        GpuPools(card(virtual_memory=False), kv, NO_STATES, in_turns=True)


def test_a_program_uses_whole_pools_that_are_what_it_takes_them_for() -> None:
    device, kv = card(), kv_pool("F16")
    pools = GpuPools(device, kv, STATES)
    parts = all_of(pools)
    assert checked_parts(parts, kv, STATES) is pools
    for wrong, own_kv, own_states, why in (
        (parts, replace(kv, type=QuantType.F32), STATES, "takes KV rows for F32"),
        (parts, replace(kv, slots=32), STATES, r"in \(32, 64\) slots"),
        (replace(parts, kv_layers=(0, 2, 1)), kv, STATES, "are not the program's"),
        (parts, kv, replace(STATES, slots=3), "takes 3 state slots"),
        (replace(parts, states=(StatePart(0, 1), StatePart(1))), kv, STATES, "not supported on cards"),
    ):
        with pytest.raises(ValueError, match=why):
            checked_parts(wrong, own_kv, own_states)
    pools.close()


# --------------------------------------------------------------------------------------------------------------- moves

RUNS = PoolRuns(
    kv=(((2, 0), np.array([4, 0, 1, 5], np.int32)), ((1,), np.array([2, 3], np.int32))),
    states=np.array([3, 1], np.int32),
    parts=((0, ((0, 16), (40, 72)), ((1, 2),)), (1, ((3, 24),), ())),
)
"""Pages in an order of their own, the last one among them; parts of a state with a head of 20 columns."""


def small_staging(device: EmulatedDevice, blocks: int = 1) -> Staging:
    return Staging(device, LOAD_LINE, LEAST_STAGING + (blocks - 1) * BLOCK)


@pytest.mark.parametrize(("kind", "arch"), [(kind, "sm_86") for kind in KINDS] + [("F16", "gfx1103")])
def test_a_payload_and_its_digest_are_the_cpus(kind: str, arch: str) -> None:
    """Packed by both, in waves here; then put at other places of other pools, and packed there by both again."""
    device, backend = card(arch), kernel_rig.backend(kernel_rig.tested_levels()[0])
    kv = kv_pool(kind)
    ours, theirs = GpuPools(device, kv, STATES), cpu_pool(kv, STATES)
    fill_alike(device, ours, theirs, seed=11)
    with closing(small_staging(device)) as staging:
        moves = CardMoves(device, staging)
        pieces, others = pieces_of(ours, RUNS), cpu_moves.pieces_of(theirs, RUNS)
        want, payload = np.zeros(others.nbytes, np.uint8), np.zeros(pieces.nbytes, np.uint8)
        told = others.pack(backend.library, backend.team, want.ctypes.data)
        assert moves.pack(pieces, memoryview(payload)) == told
        assert np.array_equal(payload, want) and pieces.nbytes > BLOCK
        to = replace(RUNS, kv=(((0, 2), np.array([3, 2, 1, 0], np.int32)), ((1,), np.array([0, 1], np.int32))))
        moves.unpack(pieces_of(ours, to), memoryview(payload))
        cpu_moves.pieces_of(theirs, to).unpack(backend.library, backend.team, address_of(memoryview(want)))
        for region in theirs.memory_regions():
            at = ours.kv_addresses(0)[0] if region.line == "kv" else ours.state_base
            found = on_card(device, at, region.bytes)
            assert found.tobytes() == ctypes.string_at(region.address, region.bytes), "nothing else has changed"
        assert moves.pack(pieces_of(ours, to), memoryview(payload)) == told
    ours.close()
    theirs.close()
    device.close()


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_the_cut_into_waves_changes_no_payload_and_no_digest(blocks: int) -> None:
    """Pieces of many lengths, of which some reach over several waves."""
    device, rng = card(), np.random.default_rng(12)
    lengths = np.array([5, 40_000, 3, 64, 16_384, 9_000, 1], np.int64)
    memory = device.allocate(80_000, "kv")
    data = rng.integers(0, 256, 80_000, np.uint8)
    ctypes.memmove(memory.address, data.ctypes.data, data.nbytes)
    order = rng.permutation(len(lengths))
    offsets = np.zeros(len(lengths), np.int64)
    offsets[order] = np.cumsum(lengths[order] + 7) - lengths[order]
    want = np.concatenate([data[at : at + length] for at, length in zip(offsets, lengths, strict=True)])
    pieces = Pieces(memory.address + offsets, np.cumsum(lengths))
    with closing(small_staging(device, blocks)) as staging:
        moves, out = CardMoves(device, staging), np.zeros(len(want), np.uint8)
        assert moves.pack(pieces, memoryview(out)) == digest(want.tobytes())
        assert np.array_equal(out, want)
        assert device.counts["gather_rows"] == -(-len(want) // (blocks * BLOCK))
        turned = want[::-1].copy()
        moves.unpack(pieces, memoryview(turned))
        after = data.copy()
        for at, first, length in zip(offsets, np.cumsum(lengths) - lengths, lengths, strict=True):
            after[at : at + length] = turned[first : first + length]
        assert np.array_equal(on_card(device, memory.address, 80_000), after)
    memory.close()


def test_waves_hold_no_more_pieces_than_there_is_room_for() -> None:
    lengths = np.concatenate([np.full(40_000, 1, np.int64), [3 * BLOCK], np.full(500, 100, np.int64)])
    pieces = Pieces(1000 * np.arange(1, len(lengths) + 1), np.cumsum(lengths))
    found = list(waves(pieces, 4 * BLOCK, BLOCK))
    assert [wave.first for wave in found] == [0, *np.cumsum([wave.nbytes for wave in found])[:-1]]
    assert sum(wave.nbytes for wave in found) == pieces.nbytes
    assert all(wave.nbytes % BLOCK == 0 for wave in found[:-1]) and all(wave.nbytes <= 4 * BLOCK for wave in found)
    assert all(0 < len(wave.places) <= BLOCK and (wave.lengths > 0).all() for wave in found)
    each = [np.arange(place, place + length) for wave in found for place, length in zip(*wave[2:], strict=True)]
    whole = [np.arange(place, place + length) for place, length in zip(pieces.places, lengths, strict=True)]
    assert np.array_equal(np.concatenate(each), np.concatenate(whole))


def test_no_rows_make_an_empty_payload() -> None:
    device = card()
    pools = GpuPools(device, kv_pool("F16"), STATES)
    with closing(small_staging(device)) as staging:
        moves, empty = CardMoves(device, staging), pieces_of(pools, PoolRuns())
        assert empty.nbytes == 0 and moves.pack(empty, memoryview(b"")) == digest(b"")
        moves.unpack(empty, memoryview(b""))
    pools.close()


def test_the_cards_memory_is_digested_where_it_lies() -> None:
    device, data = card(), np.random.default_rng(13).integers(0, 256, 2 * BLOCK + 300, np.uint8)
    memory = device.allocate(data.nbytes, "weights")
    ctypes.memmove(memory.address, data.ctypes.data, data.nbytes)
    with closing(small_staging(device)) as staging:
        moves = CardMoves(device, staging)
        assert moves.digest(memory.address, data.nbytes) == digest(data.tobytes())
        assert moves.digest(memory.address, data.nbytes) == digest(data.tobytes()), "it begins at 0 each time"
        moves.turn_bit(memory.address + 5)
        data[5] ^= 1
        assert moves.digest(memory.address, data.nbytes) == digest(data.tobytes())
    memory.close()


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        (PoolRuns(kv=(((3,), np.zeros(1, np.int32)),)), "KV layer 3 of 3"),
        (PoolRuns(kv=(((1,), np.array([3, 4], np.int32)),)), "pages 3 to 4 of layer 1, which has 4"),
        (PoolRuns(kv=(((0,), np.array([-1], np.int32)),)), "pages -1 to -1"),
        (PoolRuns(states=np.array([4], np.int32), parts=((0, (), ()),)), "state slots 4 to 4 of 4"),
        (PoolRuns(states=np.zeros(1, np.int32), parts=((2, (), ()),)), "state layer 2 of 2"),
        (PoolRuns(states=np.zeros(1, np.int32), parts=((0, ((0, 73),), ()),)), "channels 0 to 73 of state layer 0"),
        (PoolRuns(states=np.zeros(1, np.int32), parts=((0, (), ((1, 3),)),)), "heads 1 to 3 of state layer 0"),
    ],
)
def test_rows_that_there_are_not_are_refused(runs: PoolRuns, why: str) -> None:
    pools = GpuPools(card(), kv_pool("F16"), STATES)
    with pytest.raises(ValueError, match=why):
        pieces_of(pools, runs)
    pools.close()


def test_staging_that_does_not_fit_leaves_nothing_behind() -> None:
    device = card(capacity=1000)
    with pytest.raises(OutOfDeviceMemory, match="what passes between host and card"):
        Staging(device, LOAD_LINE, 1 << 20)
    assert device.held == 0
