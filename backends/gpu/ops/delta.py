"""Launches of recurrent layers: delta nets, joined hidden rows, held lanes, copies of states.

    delta_*                         DeltaNet: three launches at decode, five where a prompt goes by chunks
    delta_accept join_accept        rows of held lanes that count
    join_hidden join_chained        JoinHidden
    copy_states                     pairs of slots in order

How a state lies in memory: backends/states.py; how the work is divided: the headers of these names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.base import Batch
from backends.gpu.launch import Launch
from backends.gpu.ops.buffers import NONE, PLANES, Planes, Rows, symbol

Ints = npt.NDArray[np.int32]

JOIN_COLUMNS = 256
CHUNK = 64
"""Positions of a chunk of the delta rule; chunks end at multiples of it."""
CHUNK_LEAST = 32
"""Rows of a lane from which on it goes by chunks, where its bits may depend on where its prompt is cut."""
CHUNKED_LANES = 16
"""Lanes of a batch that go by chunks, those with most rows: of many short prompts each chunk would be nearly empty."""
CONV_ROWS = 8
"""Rows that a block of the convolution takes one after the other in a prompt."""
KEY_DIMS = (64, 128, 256)
"""Largest key_dim of each form of the delta rule, which is also the largest value_dim."""
CHUNK_COLUMNS = {64: 32, 128: 32, 256: 16}
RECURRENT_COLUMNS = {64: 32, 128: 32, 256: 16}
RUN_FIELDS = 8
LANES = 16


def padded(count: int) -> int:
    """Rounded up to whole blocks of 16, as states and their rows lie in memory."""
    return -(-count // LANES) * LANES


# ------------------------------------------------------------------------------------------------------------- symbols

_SHAPE = "i32 key_heads, i32 value_heads, i32 key_dim, i32 value_dim"
_JOIN = "left, i32 left_stride, right, i32 right_stride, out, i32 out_stride, states, i64 slot_floats"
JOIN_HIDDEN = symbol(
    *("join_hidden", "join_hidden", "JoinHidden"),
    f"{_JOIN}, kept, i32 kept_stride, runs, lanes, i32 first, i32 width",
    256,
    load128=False,
)
JOIN_CHAINED = symbol(
    "join_chained",
    "join_hidden",
    "JoinHidden",
    f"{_JOIN}, runs, lanes, chain, i32 first, i32 width",
    256,
    load128=False,
)
JOIN_ACCEPT = symbol(
    *("join_accept", "join_hidden", "JoinHidden"),
    "kept, i32 kept_stride, states, i64 slot_floats, accepts, i32 width",
    256,
    load128=False,
)
DELTA_CONV = symbol(
    *("delta_conv", "delta", "DeltaNet"),
    "mixed, i32 mixed_stride, beta, i32 beta_stride, alpha, i32 alpha_stride, conv, dt_bias, a, convolved, kept,"
    f" i32 stride, states, i64 slot_floats, runs, lanes, i32 rows, i32 each, {_SHAPE}, i32 kernel, float eps",
    128,
)
DELTA_RECURRENT = {
    keys: symbol(
        *(f"delta_recurrent_{keys}", "delta", "DeltaNet"),
        f"convolved, kept, i32 stride, matrices, i64 slot_floats, out, i32 out_stride, runs, {_SHAPE}, i32 tiled",
        64,
    )
    for keys in KEY_DIMS
}
DELTA_PREPARE = symbol(
    "delta_prepare", "delta", "DeltaNet", f"convolved, i32 stride, chunks, prepared, {_SHAPE}, i32 tiled", 256
)
DELTA_CHUNKS = {
    keys: symbol(
        *(f"delta_chunks_{keys}", "delta", "DeltaNet"),
        f"convolved, i32 stride, matrices, i64 slot_floats, out, i32 out_stride, runs, prepared, {_SHAPE}, i32 tiled",
        8 * CHUNK_COLUMNS[keys],
    )
    for keys in KEY_DIMS
}
DELTA_FINISH = symbol(
    *("delta_finish", "delta", "DeltaNet"),
    f"out, i32 out_stride, z, i32 z_stride, norm, {PLANES}, mixed, i32 mixed_stride, kept_mixed, i32 kept_stride,"
    f" states, i64 slot_floats, runs, lanes, {_SHAPE}, i32 kernel, float eps",
    128,
)
DELTA_ACCEPT = symbol(
    *("delta_accept", "delta", "DeltaNet"),
    "kept, i32 stride, kept_mixed, i32 mixed_stride, states, matrices, i64 slot_floats, accepts,"
    f" {_SHAPE}, i32 tiled, i32 kernel",
    256,
)
COPY_STATES = symbol("copy_states", "states", "DeltaNet", "states, i64 slot_bytes, pairs, i32 count", 256)

SYMBOLS = (
    *(DELTA_CONV, *DELTA_RECURRENT.values(), DELTA_PREPARE, *DELTA_CHUNKS.values(), DELTA_FINISH, DELTA_ACCEPT),
    *(JOIN_HIDDEN, JOIN_CHAINED, JOIN_ACCEPT, COPY_STATES),
)


# --------------------------------------------------------------------------------------------------------- lanes' rows


@dataclass(frozen=True)
class LaneRuns:
    """What a batch has of each lane, for kernels that know states: `runs` int32 [lanes, 8] and `chunks` int32 [n, 4]
    (kernels/floats.h and delta_chunks.h); `rows` of the longest lane that goes row by row, 0 where none does."""

    runs: Ints
    chunks: Ints
    rows: int


def lane_runs(batch: Batch, lanes: int, chunk_least: int = CHUNK_LEAST) -> LaneRuns:
    """`chunk_least`: lanes with so many rows go by chunks, `CHUNKED_LANES` of them, unless they are held; 0: none
    does."""
    runs = [(0, 0, 0, -1, -1, 0, 0, 0)] * lanes
    chunks: list[tuple[int, int, int, int]] = []
    starts = [0, *(np.flatnonzero(batch.lanes[1:] != batch.lanes[:-1]) + 1).tolist()]
    spans = list(zip(starts, [*starts[1:], len(batch.lanes)], strict=True))
    single, chunked = 0, _chunked(batch, spans, chunk_least)
    for first, end in spans:
        lane, position, rows = int(batch.lanes[first]), int(batch.positions[first]), end - first
        slot = int(batch.states[lane]) if len(batch.states) else 0
        place = int(batch.hold[lane]) if len(batch.hold) else -1
        by_chunks = first in chunked
        runs[lane] = first, rows, slot, place, len(chunks) if by_chunks else -1, position, 0, 0
        if by_chunks:
            cuts = [0, *range(CHUNK - position % CHUNK, rows, CHUNK), rows]
            chunks += [(lane, first + a, b - a, 0) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
        else:
            single = max(single, rows)
    table = np.array(runs, np.int32).reshape(lanes, RUN_FIELDS)
    return LaneRuns(table, np.array(chunks, np.int32).reshape(-1, 4), single)


def _chunked(batch: Batch, spans: Sequence[tuple[int, int]], least: int) -> set[int]:
    """First rows of the lanes that go by chunks."""
    held = {int(lane) for lane in np.flatnonzero(batch.hold >= 0)}
    long = [(end - first, first) for first, end in spans if 0 < least <= end - first]
    free = [each for each in long if int(batch.lanes[each[1]]) not in held]
    return {first for _, first in sorted(free, key=lambda each: -each[0])[:CHUNKED_LANES]}


def most_chunks(rows: int, lanes: int) -> int:
    """Chunks of a batch of so many rows in so many lanes at most. A lane with n rows touches (n + 126) // 64 of them if
    it begins at the last position of one."""
    chunked = min(lanes, rows // CHUNK_LEAST, CHUNKED_LANES)
    return (rows + chunked * (2 * CHUNK - 2)) // CHUNK if chunked else 0


def accepts_of(kept: Sequence[tuple[int, int, int, int]]) -> Ints:
    """(slot, place, rows, position of the first row) of each held lane, as `accept` kernels read them."""
    return np.array(kept, np.int32).reshape(-1, 4)


@dataclass(frozen=True)
class RunsAt:
    """The arrays of `LaneRuns` and the batch's `lanes` in the card's memory, and what a launch must know of them."""

    runs: int
    lanes: int
    chunks: int
    lane_count: int
    chunk_count: int
    single_rows: int


@dataclass(frozen=True)
class StatesAt:
    """A layer of the states: the address of its window in slot 0, and floats from slot to slot."""

    at: int
    slot_floats: int


# ---------------------------------------------------------------------------------------------------------- delta nets


@dataclass(frozen=True)
class DeltaShape:
    """As in `DeltaNet`. Raises ValueError for heads wider than 256, which no kernel has registers for."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    eps: float
    tiled: bool = False

    def __post_init__(self) -> None:
        if max(self.key_dim, self.value_dim) > KEY_DIMS[-1]:
            raise ValueError(f"delta net heads of {self.key_dim} x {self.value_dim}: at most {KEY_DIMS[-1]}")

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def convolved_floats(self) -> int:
        """Floats of a row between the kernels, in scratch or kept: q, k, v of each head padded to 16, three gates."""
        heads = 2 * self.key_heads * padded(self.key_dim) + self.value_heads * padded(self.value_dim)
        return heads + padded(3 * self.value_heads)

    @property
    def prepared_floats(self) -> int:
        """Scratch of one chunk."""
        return self.value_heads * (2 * CHUNK * CHUNK + 2 * CHUNK)

    @property
    def window_floats(self) -> int:
        return padded((self.kernel - 1) * self.channels)

    @property
    def keys(self) -> int:
        """Which form it takes."""
        return next(most for most in KEY_DIMS if self.key_dim <= most)

    @property
    def heads(self) -> tuple[int, int, int, int]:
        return self.key_heads, self.value_heads, self.key_dim, self.value_dim


@dataclass(frozen=True)
class DeltaMemory:
    """Addresses of one delta net's weights, of its scratch (`convolved_floats` for each row of a batch,
    `prepared_floats` for each chunk) and of what is kept of held rows (`convolved_floats` and `channels` for each). All
    are multiples of 16."""

    conv: int
    dt_bias: int
    a: int
    norm: int
    states: StatesAt
    convolved: int
    prepared: int = 0
    kept: int = 0
    kept_mixed: int = 0


def delta_net(
    rows: int,
    shape: DeltaShape,
    memory: DeltaMemory,
    runs: RunsAt,
    mixed: Rows,
    z: Rows,
    beta: Rows,
    alpha: Rows,
    out: Rows,
    planes: Planes | None = None,
) -> tuple[Launch, ...]:
    """All launches of a `DeltaNet`, in order. `planes` want a value_dim that is a multiple of 32."""
    to = planes or Planes()
    to.check(shape.value_dim)
    states, stride, keys = memory.states, shape.convolved_floats, shape.keys
    matrices = states.at + 4 * shape.window_floats
    each = CONV_ROWS if runs.chunk_count else 1
    conv_grid = (-(-(2 * shape.key_heads + shape.value_heads) // 4), -(-rows // each), 1)
    conv_args = (mixed.at, mixed.stride, beta.at, beta.stride, alpha.at, alpha.stride, memory.conv, memory.dt_bias)
    launches = [
        Launch(
            *(DELTA_CONV, conv_grid),
            (
                *(*conv_args, memory.a, memory.convolved, memory.kept, stride, states.at, states.slot_floats),
                *(runs.runs, runs.lanes, rows, each, *shape.heads, shape.kernel, shape.eps),
            ),
        )
    ]
    shared = (matrices, states.slot_floats, out.at, out.stride, runs.runs)
    tail = (*shape.heads, int(shape.tiled))
    if runs.single_rows:
        grid = (-(-shape.value_dim // RECURRENT_COLUMNS[keys]), shape.value_heads, runs.lane_count)
        launches.append(Launch(DELTA_RECURRENT[keys], grid, (memory.convolved, memory.kept, stride, *shared, *tail)))
    if runs.chunk_count:
        grid = (shape.value_heads, runs.chunk_count, 1)
        launches.append(Launch(DELTA_PREPARE, grid, (memory.convolved, stride, runs.chunks, memory.prepared, *tail)))
        grid = (-(-shape.value_dim // CHUNK_COLUMNS[keys]), shape.value_heads, runs.lane_count)
        launches.append(Launch(DELTA_CHUNKS[keys], grid, (memory.convolved, stride, *shared, memory.prepared, *tail)))
    grid = (-(-shape.value_heads // 4) + -(-shape.channels // 128), rows, 1)
    finish = (out.at, out.stride, z.at, z.stride, memory.norm, *to.addresses, mixed.at, mixed.stride)
    windows = (memory.kept_mixed, shape.channels, states.at, states.slot_floats, runs.runs, runs.lanes)
    launches.append(Launch(DELTA_FINISH, grid, (*finish, *windows, *shape.heads, shape.kernel, shape.eps)))
    return tuple(launches)


def delta_accept(shape: DeltaShape, memory: DeltaMemory, accepts: int, count: int) -> Launch:
    """The rows that count of `count` held lanes; `accepts`: where the array of `accepts_of` is."""
    states = memory.states
    parts = max(shape.key_dim * padded(shape.value_dim) // 4, shape.channels)
    args = (memory.kept, shape.convolved_floats, memory.kept_mixed, shape.channels, states.at)
    matrices = (states.at + 4 * shape.window_floats, states.slot_floats, accepts)
    grid = (-(-parts // 256), shape.value_heads + 1, count)
    return Launch(DELTA_ACCEPT, grid, (*args, *matrices, *shape.heads, int(shape.tiled), shape.kernel))


# ------------------------------------------------------------------------------------------ hidden rows, and all slots


@dataclass(frozen=True)
class JoinShape:
    """Columns first .. end - 1 of `rows` rows."""

    rows: int
    first: int
    end: int

    @property
    def width(self) -> int:
        return self.end - self.first

    @property
    def grid(self) -> tuple[int, int, int]:
        return -(-self.width // JOIN_COLUMNS), self.rows, 1


def join_hidden(
    shape: JoinShape, left: Rows, right: Rows, out: Rows, states: StatesAt, runs: RunsAt, kept: Rows = NONE
) -> tuple[Launch, ...]:
    """`kept`: where rows of held lanes go, [held rows, width]. Nothing without columns."""
    if not shape.width:
        return ()
    buffers = (left.at, left.stride, right.at, right.stride, out.at, out.stride, states.at, states.slot_floats)
    args = (*buffers, kept.at, kept.stride, runs.runs, runs.lanes, shape.first, shape.width)
    return (Launch(JOIN_HIDDEN, shape.grid, args),)


def join_chained(
    shape: JoinShape, left: Rows, right: Rows, out: Rows, states: StatesAt, runs: RunsAt, chain: int
) -> tuple[Launch, ...]:
    """In a step of drafting: `right` is what the step before left."""
    if not shape.width:
        return ()
    buffers = (left.at, left.stride, right.at, right.stride, out.at, out.stride, states.at, states.slot_floats)
    return (Launch(JOIN_CHAINED, shape.grid, (*buffers, runs.runs, runs.lanes, chain, shape.first, shape.width)),)


def join_accept(shape: JoinShape, kept: Rows, states: StatesAt, accepts: int, count: int) -> tuple[Launch, ...]:
    if not shape.width:
        return ()
    grid = (-(-shape.width // JOIN_COLUMNS), count, 1)
    args = (kept.at, kept.stride, states.at, states.slot_floats, accepts, shape.width)
    return (Launch(JOIN_ACCEPT, grid, args),)


def copy_states(at: int, slot_bytes: int, pairs: int, count: int) -> Launch:
    """`pairs`: int32 [count, 2] of (source, target), done in this order. A slot is a multiple of 64 bytes."""
    return Launch(COPY_STATES, (-(-slot_bytes // 4096), 1, 1), (at, slot_bytes, pairs, count))
