"""Delta nets without a card: a net's memory as a worker would have it, its launches, and the same net on the reference
in double precision, which keeps its states from batch to batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gpu_cases import Array, address, aligned, nothing

from backends.base import Batch, Buffer, DeltaNet, StateLayer, StatePool, Weight
from backends.gpu.launch import Launch
from backends.gpu.ops import delta
from backends.gpu.ops.buffers import Planes, Rows
from backends.reference.delta import DeltaWeights, States
from backends.reference.held import Held, run_delta_net

SLOTS, LANES, HELD = 5, 3, 16
FLOAT = 4


def batch_of(
    *runs: tuple[int, int, int], states: Sequence[int] = (4, 0, 2), hold: Sequence[int] = (), chain: Sequence[int] = ()
) -> Batch:
    """Runs of (lane, first position, rows)."""
    lanes = np.repeat([run[0] for run in runs], [run[2] for run in runs]).astype(np.int32)
    positions = np.concatenate([np.arange(first, first + rows) for _, first, rows in runs]).astype(np.int32)
    empty = np.zeros(0, np.int32)
    arrays = [np.array(each, np.int32) for each in (states, hold, chain)]
    tables = np.zeros((1, LANES, 1), np.int32)
    return Batch(
        *(positions, positions, positions[None], lanes, tables, empty),
        states=arrays[0],
        hold=arrays[1],
        chain=arrays[2],
    )


@dataclass
class BatchMemory:
    """What launches want to know of a batch, in memory."""

    batch: Batch
    chunk_least: int

    def __post_init__(self) -> None:
        found = delta.lane_runs(self.batch, LANES, self.chunk_least)
        self.arrays = [aligned(each) for each in (found.runs, self.batch.lanes, found.chunks)]
        runs, lanes, chunks = map(address, self.arrays)
        self.at = delta.RunsAt(runs, lanes, chunks, len(found.runs), len(found.chunks), found.rows)


@dataclass(frozen=True)
class Run:
    """One batch of a net: the launches, the memory that only they touch, and what they should give."""

    launches: tuple[Launch, ...]
    arrays: tuple[Array, ...]
    out: Array
    want: npt.NDArray[np.float64]
    planes: tuple[Array, ...] = ()


class Net:
    """One delta net, whose state lies behind that of another layer. What nobody may touch of the slots is NaN."""

    def __init__(self, rng: np.random.Generator, shape: delta.DeltaShape) -> None:
        self.rng, self.shape = rng, shape
        values = shape.value_heads * shape.value_dim
        layer = StateLayer(shape.channels, shape.kernel, shape.value_heads, shape.key_dim, shape.value_dim)
        self.reference = States(StatePool((layer,), SLOTS), np.dtype(np.float64))
        self.held = Held()

        def normal(*size: int) -> npt.NDArray[np.float32]:
            return aligned(rng.standard_normal(size).astype(np.float32))

        self.conv, self.dt_bias = normal(shape.channels, shape.kernel), normal(shape.value_heads)
        self.a, self.norm = aligned(-np.exp(normal(shape.value_heads) - 1)), normal(shape.value_dim)
        self.weights = DeltaWeights(*(each.astype(np.float64) for each in (self.conv, self.dt_bias, self.a, self.norm)))

        def named(name: str, width: int) -> Buffer:
            return Buffer(name, width)

        self.op = DeltaNet(
            *(named("mixed", shape.channels), named("z", values), named("beta", shape.value_heads)),
            *(named("alpha", shape.value_heads), named("out", values), 0),
            conv=Weight("conv", *self.conv.shape),
            dt_bias=Weight("dt", 1, shape.value_heads),
            a=Weight("a", 1, shape.value_heads),
            norm=Weight("norm", 1, shape.value_dim),
            key_heads=shape.key_heads,
            value_heads=shape.value_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            kernel=shape.kernel,
            eps=shape.eps,
            tiled=shape.tiled,
        )
        self.before, self.value_pad = 32, delta.padded(shape.value_dim)
        matrices = shape.value_heads * shape.key_dim * self.value_pad
        self.states = nothing((SLOTS, self.before + shape.window_floats + matrices + 16))
        self.states[:, self.before : self.before + (shape.kernel - 1) * shape.channels] = 0
        self._heads()[...] = 0
        self.kept = nothing((HELD, shape.convolved_floats))
        self.kept_mixed = nothing((HELD, shape.channels))

    def _heads(self) -> Array:
        """Matrices as they lie: [slots, heads, blocks, key_dim, 16]."""
        first = self.before + self.shape.window_floats
        count = self.shape.value_heads * self.shape.key_dim * self.value_pad
        size = self.states.strides[0], 4 * self.shape.key_dim * self.value_pad, 64 * self.shape.key_dim, 64, 4
        shape = (SLOTS, self.shape.value_heads, self.value_pad // 16, self.shape.key_dim, 16)
        return np.lib.stride_tricks.as_strided(self.states[:, first : first + count], shape, size)

    def set_states(self, conv: Array, matrix: Array) -> None:
        """States of the net and its reference: [slots, kernel - 1, channels], [slots, heads, keys, values]."""
        shape = self.shape
        self.reference.conv[0][...], self.reference.matrix[0][...] = conv, matrix
        self.states[:, self.before : self.before + conv[0].size] = conv.reshape(SLOTS, -1)
        padding = ((0, 0), (0, 0), (0, 0), (0, self.value_pad - shape.value_dim))
        blocks = np.pad(matrix, padding).reshape(SLOTS, shape.value_heads, shape.key_dim, -1, 16)
        self._heads()[...] = blocks.transpose(0, 1, 3, 2, 4)

    @property
    def memory(self) -> tuple[Array, ...]:
        return self.conv, self.dt_bias, self.a, self.norm, self.states, self.kept, self.kept_mixed

    def _at(self, convolved: Array, prepared: Array) -> delta.DeltaMemory:
        weights = (self.conv, self.dt_bias, self.a, self.norm)
        states = delta.StatesAt(address(self.states) + FLOAT * self.before, self.states.shape[1])
        scratch = (convolved, prepared, self.kept, self.kept_mixed)
        return delta.DeltaMemory(*map(address, weights), states, *map(address, scratch))

    def rows(self, count: int) -> list[npt.NDArray[np.float32]]:
        """mixed, z, beta and alpha of so many rows."""
        shape, values = self.shape, self.shape.value_heads * self.shape.value_dim
        sizes = ((shape.channels, 1), (values, 1), (shape.value_heads, 2), (shape.value_heads, 3))
        return [(by * self.rng.standard_normal((count, width))).astype(np.float32) for width, by in sizes]

    def run(
        self,
        batch: Batch,
        given: Sequence[npt.NDArray[np.float32]] | None = None,
        *,
        chunk_least: int = 0,
        quantised: bool = False,
        wider: int = 0,
        oracle: bool = True,
    ) -> Run:
        """`wider`: floats between rows of buffers. Without `oracle` the reference does not go along, and `want` is
        empty."""
        rows, shape = len(batch.lanes), self.shape
        given = given if given is not None else self.rows(rows)
        buffers, at = [], []
        for each in (*given, np.full(given[1].shape, np.nan, np.float32)):
            buffer = nothing((rows, each.shape[1] + wider))
            buffer[:, : each.shape[1]] = each
            buffers.append(buffer)
            at.append(Rows(address(buffer), buffer.shape[1]))
        inside = BatchMemory(batch, chunk_least)
        convolved = nothing((rows, shape.convolved_floats))
        prepared = nothing((max(1, inside.at.chunk_count), shape.prepared_floats))
        values = given[1].shape[1]
        planes: tuple[Array, ...] = ()
        if quantised:
            planes = tuple(nothing((rows, values), np.int8) for _ in range(2))
            planes = (*planes, nothing((rows, values // 32)), nothing((rows, values // 16)))
        mixed, z, beta, alpha, out = at
        launches = delta.delta_net(
            *(rows, shape, self._at(convolved, prepared), inside.at, mixed, z, beta, alpha, out),
            Planes(*map(address, planes)) if planes else None,
        )
        want = np.zeros((0, 0))
        if oracle:
            self.held.rows = {lane: int((batch.lanes == lane).sum()) for lane in np.flatnonzero(batch.hold >= 0)}
            self.held.replays = {}
            doubles = {
                name: each.astype(np.float64) for name, each in zip(("mixed", "z", "beta", "alpha"), given, strict=True)
            }
            want = run_delta_net(self.op, self.weights, self.reference, batch, doubles, self.held)
        return Run(
            launches,
            (*self.memory, *buffers, *inside.arrays, convolved, prepared, *planes),
            buffers[-1][:, :values],
            np.asarray(want, np.float64),
            planes,
        )

    def accept(self, batch: Batch, kept: Sequence[tuple[int, int]]) -> tuple[Launch, Array]:
        """Of the batch before: (lane, rows that count). Gives the launch, and what it reads beside the net's memory."""
        found = []
        for lane, rows in kept:
            position = int(batch.positions[batch.lanes == lane][0])
            found.append((int(batch.states[lane]), int(batch.hold[lane]), rows, position))
        accepts = aligned(delta.accepts_of(found))
        return delta.delta_accept(self.shape, self._at(self.kept, self.kept), address(accepts), len(found)), accepts

    def check_states(self, relative: float) -> None:
        """Every slot holds what the reference's does; columns that pad stay 0, and nobody touched what is around."""
        shape, window = self.shape, self.before + (self.shape.kernel - 1) * self.shape.channels
        conv = self.states[:, self.before : window].reshape(self.reference.conv[0].shape)
        np.testing.assert_array_equal(conv, self.reference.conv[0].astype(np.float32))
        heads = self._heads().transpose(0, 1, 3, 2, 4).reshape(SLOTS, shape.value_heads, shape.key_dim, self.value_pad)
        want = self.reference.matrix[0]
        np.testing.assert_allclose(heads[..., : shape.value_dim], want, rtol=0, atol=relative * np.abs(want).max())
        assert not heads[..., shape.value_dim :].any()
        ends = self.before + shape.window_floats
        assert np.isnan(self.states[:, : self.before]).all() and np.isnan(self.states[:, window:ends]).all()
        assert np.isnan(self.states[:, -16:]).all()


def close(got: Array, want: npt.NDArray[np.float64], relative: float) -> None:
    """A norm divides by the size of a head's result: errors are told in units of the largest output."""
    np.testing.assert_allclose(got, want, rtol=0, atol=relative * np.abs(want).max())
