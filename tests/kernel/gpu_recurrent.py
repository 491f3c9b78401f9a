"""Cases of backends.gpu.ops.delta, a part of those of mixers: delta nets, held lanes, joined hidden rows, copies of
states."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import gpu_delta
import numpy as np
from gpu_buffers import F64, WIDER, check_planes, empty, filled, untouched
from gpu_cases import Array, Case, Maker, address, aligned

from backends.base import Batch
from backends.gpu.ops import delta as recurrent
from backends.gpu.ops.delta import DeltaShape


def shape_of(rng: np.random.Generator, keys: int, *, small: bool = False) -> DeltaShape:
    """A random shape of the form that takes heads of up to `keys`."""
    low = {64: 4, 128: 65, 256: 129}[keys]
    key_dim, value_dim = int(rng.integers(low, low + 40)), int(rng.integers(3, 70))
    if small:
        key_dim, value_dim = int(rng.integers(4, 20)), int(rng.integers(3, 40))
    share = int(rng.integers(1, 3))
    key_heads = int(rng.integers(1, 3))
    return DeltaShape(
        key_heads, share * key_heads, key_dim, value_dim, int(rng.integers(1, 5)), 1e-6, bool(rng.integers(2))
    )


def _delta(
    rng: np.random.Generator,
    warp: int,
    keys: int,
    *,
    chunks: bool = False,
    quantised: bool = False,
    small: bool = False,
) -> Case:
    """A sequence that begins, with others that go on."""
    shape = shape_of(rng, keys, small=small)
    if quantised:
        shape = DeltaShape(1, 2, shape.key_dim, 32 * int(rng.integers(1, 3)), shape.kernel, 1e-6)
    net = gpu_delta.Net(rng, shape)
    longest = int(rng.integers(65, 90)) if chunks else int(rng.integers(1, 6))
    batch = gpu_delta.batch_of((1, 0, longest), (0, int(rng.integers(3, 9)), int(rng.integers(1, 4))))
    _fill_states(net, rng)
    run = net.run(batch, chunk_least=20 if chunks else 0, quantised=quantised, wider=int(rng.choice(WIDER)))

    def check() -> None:
        gpu_delta.close(run.out, run.want, 2e-5)
        net.check_states(2e-5)
        if quantised:
            check_planes(run.planes, run.out.astype(np.float64))

    return Case(run.launches, run.arrays, check)


def _fill_states(net: gpu_delta.Net, rng: np.random.Generator) -> None:
    """States as they are behind three rows and more, the same for the net and its reference."""
    net.set_states(
        rng.standard_normal(net.reference.conv[0].shape).astype(np.float32),
        rng.standard_normal(net.reference.matrix[0].shape).astype(np.float32),
    )


def _delta_accept(rng: np.random.Generator, warp: int) -> Case:
    """Three held lanes, of which some rows count, all and none; one begins."""
    net = gpu_delta.Net(rng, shape_of(rng, 64, small=True))
    _fill_states(net, rng)
    counts = [int(each) for each in rng.integers(1, 6, 3)]
    first = (int(rng.integers(3, 9)), 0, 7)
    batch = gpu_delta.batch_of(*((lane, first[lane], counts[lane]) for lane in range(3)), hold=(5, 0, 10))
    run = net.run(batch)
    kept = [(1, counts[1]), (0, int(rng.integers(1, counts[0] + 1))), (2, 0)]
    launch, accepts = net.accept(batch, kept)
    net.held.accept(kept)

    def check() -> None:
        gpu_delta.close(run.out, run.want, 2e-5)
        net.check_states(2e-5)

    return Case((*run.launches, launch), (*run.arrays, accepts), check)


class Joined:
    """A JoinHidden of columns `first` .. `end` - 1: its buffers, its slots, what is kept of held rows."""

    def __init__(self, rng: np.random.Generator, batch: Batch) -> None:
        self.rng, self.batch, rows = rng, batch, len(batch.lanes)
        width, first = int(rng.integers(1, 400)), int(rng.integers(0, 9))
        self.shape = recurrent.JoinShape(rows, first, first + width)
        self.left, self.right = (filled(rng, rows, first + width + int(rng.integers(0, 5))) for _ in range(2))
        self.out = empty(rng, rows, 2 * width)
        self.states = filled(rng, gpu_delta.SLOTS, width)
        self.kept = empty(rng, gpu_delta.HELD, width)
        self.memory = gpu_delta.BatchMemory(batch, 0)
        self.at = recurrent.StatesAt(self.states.at.at, self.states.at.stride)
        self.columns = slice(first, first + width)
        self.arrays = tuple(each.memory for each in (self.left, self.right, self.out, self.states, self.kept))
        self.arrays = (*self.arrays, *self.memory.arrays)

    def want(self, before: Callable[[int], Array | int]) -> F64:
        rows = [np.broadcast_to(before(row), (self.shape.width,)) for row in range(self.shape.rows)]
        return np.concatenate([self.left.double[:, self.columns], np.stack(rows)], axis=1)


def _join(rng: np.random.Generator, warp: int, *, accept: bool = False) -> Case:
    counts = [int(each) for each in rng.integers(1, 5, 3)]
    batch = gpu_delta.batch_of(
        *((0, 5, counts[0]), (1, 0, counts[1]), (2, 3, counts[2])), hold=(-1, 6, 1) if accept else ()
    )
    join = Joined(rng, batch)
    states, right = join.states.double, join.right.double[:, join.columns]
    launches = recurrent.join_hidden(
        join.shape, join.left.at, join.right.at, join.out.at, join.at, join.memory.at, join.kept.at
    )
    firsts = {0: states[batch.states[0]], counts[0]: 0, counts[0] + counts[1]: states[batch.states[2]]}
    want = join.want(lambda row: firsts[row] if row in firsts else right[row - 1])
    after, ends = states.copy(), np.cumsum(counts)
    counted = {0: counts[0], 1: counts[1], 2: counts[2]}
    arrays = join.arrays
    if accept:
        counted = {0: counts[0], 1: int(rng.integers(1, counts[1] + 1)), 2: 0}
        held = [(int(batch.states[lane]), int(batch.hold[lane]), counted[lane], 0) for lane in (1, 2)]
        accepts = aligned(recurrent.accepts_of(held))
        launches += recurrent.join_accept(join.shape, join.kept.at, join.at, address(accepts), 2)
        arrays = (*arrays, accepts)
    for lane, rows in counted.items():
        if rows:
            after[batch.states[lane]] = right[ends[lane] - counts[lane] + rows - 1]

    def check() -> None:
        np.testing.assert_array_equal(join.out.rows, want)
        np.testing.assert_array_equal(join.states.rows, after)
        untouched(join.out, join.states, join.kept)

    return Case(launches, arrays, check)


def _join_chained(rng: np.random.Generator, warp: int) -> Case:
    batch = gpu_delta.batch_of((0, 4, 1), (2, 0, 1), (1, 6, 1), chain=(-1, -1, 0))
    join = Joined(rng, batch)
    states, right = join.states.double, join.right.double[:, join.columns]
    chain = aligned(batch.chain)
    launches = recurrent.join_chained(
        *(join.shape, join.left.at, join.right.at, join.out.at, join.at, join.memory.at, address(chain))
    )
    befores: list[Array | int] = [states[batch.states[0]], 0, right[0]]
    want = join.want(lambda row: befores[row])

    def check() -> None:
        np.testing.assert_array_equal(join.out.rows, want)
        np.testing.assert_array_equal(join.states.rows, states)

    return Case(launches, (*join.arrays, chain), check)


def _copy_states(rng: np.random.Generator, warp: int) -> Case:
    """Pairs that need those before them: two slots change places through a third one."""
    states = aligned(rng.integers(0, 1 << 32, (5, 16 * int(rng.integers(1, 90))), np.uint32))
    pairs = aligned(np.array([(3, 1), (0, 3), (1, 0), (2, 2), (0, 4)], np.int32))
    want = states.copy()
    for source, target in pairs.tolist():
        want[target] = want[source]
    launch = recurrent.copy_states(address(states), states[0].nbytes, address(pairs), len(pairs))

    def check() -> None:
        np.testing.assert_array_equal(states, want)

    return Case((launch,), (states, pairs), check)


CASES: dict[str, Maker] = {
    "delta_conv": partial(_delta, keys=64, small=True),
    **{f"delta_recurrent_{keys}": partial(_delta, keys=keys) for keys in recurrent.KEY_DIMS},
    "delta_prepare": partial(_delta, keys=64, small=True, chunks=True),
    **{f"delta_chunks_{keys}": partial(_delta, keys=keys, chunks=True) for keys in recurrent.KEY_DIMS},
    "delta_finish": partial(_delta, keys=64, quantised=True, small=True),
    "delta_accept": _delta_accept,
    "join_hidden": _join,
    "join_chained": _join_chained,
    "join_accept": partial(_join, accept=True),
    "copy_states": _copy_states,
}
