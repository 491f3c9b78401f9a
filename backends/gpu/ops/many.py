"""Launches for many rows: products on matrix cores, experts by groups of rows, sums over ranks.

    halve_rows                     activations as halves with a power of two for each row, once for all that read them
    linear_many_<q>_r32, _r128     out = x W^T + bias in blocks of 32 or 128 rows (many_block.h says when which)
    group_rows                     choices of experts by expert
    experts_many_<q>_r32, _r128    each choice's line through its expert's matrix
    sum_rows                       the sum of ranks' parts, in their order

An expert op of backends/ops.py is: group_rows; halve_rows of src; experts_many for gate and for up (`shared`: all
choices of a row read its one line); the gated activation over all choices; halve_rows of that; experts_many for down;
experts_combine. All memory is float32 but what is said to be other; addresses are multiples of 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backends.gpu.launch import Instruction, Launch, Symbol, params
from backends.gpu.ops.quants import MATRICES, blocks, tag
from backends.quant import QuantType

PAD = 128
"""Halves: lines of `Halved` are a multiple long."""
VARIANTS = (32, 128)
"""Rows of a block."""
WIDE_FROM_ROWS = 65
"""From here on the blocks of 128 rows are ahead."""
THREADS = {32: 128, 128: 256}
MAX_EXPERTS = 1024
SUM_PARTS = 8
BLOCK_NUMBERS = 1024
"""Floats that a block of sum_rows adds."""

LINEAR_PARAMS = params("out, x, scales, w, bias, i32 rows, i32 outs, i32 cols, i32 pitch, i32 out_stride")
EXPERTS_PARAMS = params(
    "out, x, scales, w, bias, order, tiles, i32 used, i32 outs, i32 cols, i32 pitch, i32 out_stride, i32 w_rows,"
    " i32 step, i32 first"
)
HALVE_PARAMS = params("out, scales, src, i32 cols, i32 src_stride, i32 pitch")
GROUP_PARAMS = params("order, tiles, chosen, i32 pairs, i32 first, i32 end, i32 tile_rows, i32 tile_count")
SUM_PARAMS = params("out, p0, p1, p2, p3, p4, p5, p6, p7, i32 ranks, i64 count")
NEEDS: tuple[Instruction, ...] = ("matrix", "load128")


def _symbol(op: str, quant: QuantType, rows: int) -> Symbol:
    which = LINEAR_PARAMS if op == "linear_many" else EXPERTS_PARAMS
    return Symbol(f"{op}_{tag(quant)}_r{rows}", op, op, which, THREADS[rows], (quant.name,), tag(quant), NEEDS)


LINEAR = {(quant, rows): _symbol("linear_many", quant, rows) for quant in MATRICES for rows in VARIANTS}
EXPERTS = {(quant, rows): _symbol("experts_many", quant, rows) for quant in MATRICES for rows in VARIANTS}
HALVE = Symbol("halve_rows", "halve_rows", "halve_rows", HALVE_PARAMS, 256, needs=("load128",))
GROUP = Symbol("group_rows", "group_rows", "group_rows", GROUP_PARAMS, 256)
SUM = Symbol("sum_rows", "sum_rows", "sum_rows", SUM_PARAMS, 256, needs=("load128",))

SYMBOLS = (*LINEAR.values(), *EXPERTS.values(), HALVE, GROUP, SUM)


# --------------------------------------------------------------------------------------------------------------- linear


@dataclass(frozen=True)
class Halved:
    """Rows as halves: `at` 2-byte numbers [rows][pitch], `scales` [rows]."""

    at: int
    scales: int
    cols: int

    @property
    def pitch(self) -> int:
        return padded(self.cols)


@dataclass(frozen=True)
class Matrix:
    """A matrix on the card, as `backends.gpu.planes` lays it out."""

    quant: QuantType
    at: int
    rows: int
    cols: int


def padded(cols: int) -> int:
    """Halves of a line of `Halved`."""
    return blocks(cols, PAD) * PAD


def halved_bytes(rows: int, cols: int) -> int:
    return 2 * rows * padded(cols)


def halve(out: Halved, src: int, rows: int, src_stride: int) -> tuple[Launch, ...]:
    if not rows:
        return ()
    return (Launch(HALVE, (rows, 1, 1), (out.at, out.scales, src, out.cols, src_stride, out.pitch)),)


def block_rows(rows: int) -> int:
    """Rows of the blocks that are ahead for this many."""
    return VARIANTS[rows >= WIDE_FROM_ROWS]


def linear(
    matrix: Matrix, x: Halved, rows: int, out: int, out_stride: int, bias: int = 0, *, block: int = 0
) -> tuple[Launch, ...]:
    """`block`: rows of a block, 0: as `block_rows` says. Raises ValueError where x is not as wide as the matrix."""
    _check_width(matrix, x)
    if not rows:
        return ()
    block = block or block_rows(rows)
    args = (out, x.at, x.scales, matrix.at, bias, rows, matrix.rows, matrix.cols, x.pitch, out_stride)
    return (Launch(LINEAR[matrix.quant, block], (blocks(rows, block), blocks(matrix.rows, block), 1), args),)


def _check_width(matrix: Matrix, x: Halved) -> None:
    if x.cols != matrix.cols:
        raise ValueError(f"rows of {x.cols} for a matrix [{matrix.rows}, {matrix.cols}]")


# -------------------------------------------------------------------------------------------------------------- experts


@dataclass(frozen=True)
class Choices:
    """What rows chose: int32 [rows, used] at `at`, of which experts first .. end-1 are here.

    Raises ValueError for ids of another type: routers give 64-bit ones, which read as 32 bits would be every other a 0.
    """

    at: int
    dtype: np.dtype[np.signedinteger]
    rows: int
    used: int
    first: int
    end: int

    def __post_init__(self) -> None:
        if self.dtype != np.int32:
            raise ValueError(f"experts chosen as {self.dtype}, the kernels read int32")
        if not 0 <= self.first < self.end <= self.first + MAX_EXPERTS:
            raise ValueError(f"experts {self.first} to {self.end}: one to {MAX_EXPERTS} of them can be here")

    @property
    def pairs(self) -> int:
        return self.rows * self.used

    @property
    def held(self) -> int:
        return self.end - self.first


@dataclass(frozen=True)
class Groups:
    """Choices by expert: `order` int32 [pairs], `tiles` int32 [tile_count, 4] for blocks of `block` rows."""

    choices: Choices
    order: int
    tiles: int
    block: int

    @property
    def tile_count(self) -> int:
        return tile_count(self.choices, self.block)


@dataclass(frozen=True)
class Stack:
    """An ExpertMatrix of backends/ops.py on the card: expert first + e has rows e * pitch + first_row .. + height of
    `weights`. `bias` [weights.rows] or 0."""

    weights: Matrix
    height: int
    pitch: int
    first_row: int = 0
    bias: int = 0


def expert_block(choices: Choices) -> int:
    """Rows of the blocks that are ahead: of 128 only where most experts fill them."""
    return block_rows(choices.pairs // choices.held)


def tile_count(choices: Choices, block: int) -> int:
    """The most tiles that choices may need: each expert's last one need not be full."""
    begun = min(choices.held, choices.pairs)
    return (choices.pairs + begun * (block - 1)) // block


def group(groups: Groups) -> tuple[Launch, ...]:
    choices = groups.choices
    if not choices.pairs:
        return ()
    numbers = (choices.pairs, choices.first, choices.end, groups.block, groups.tile_count)
    return (Launch(GROUP, (choices.held, 1, 1), (groups.order, groups.tiles, choices.at, *numbers)),)


def experts(stack: Stack, x: Halved, groups: Groups, out: int, out_stride: int, *, shared: bool) -> tuple[Launch, ...]:
    """Line p of out [pairs] is that of choice p; those of experts that are not here stay as they are. `shared`: x has a
    line for each row, else one for each choice. Raises ValueError for a stack that does not have the experts."""
    weights, choices = stack.weights, groups.choices
    _check_width(weights, x)
    if weights.rows != choices.held * stack.pitch or not 0 <= stack.first_row <= stack.pitch - stack.height:
        raise ValueError(f"{weights.rows} rows for {choices.held} experts of {stack.pitch}")
    if not choices.pairs:
        return ()
    args = (
        *(out, x.at, x.scales, weights.at, stack.bias, groups.order, groups.tiles),
        *(choices.used if shared else 1, stack.height, weights.cols, x.pitch, out_stride),
        *(weights.rows, stack.pitch, stack.first_row),
    )
    grid = (groups.tile_count, blocks(stack.height, groups.block), 1)
    return (Launch(EXPERTS[weights.quant, groups.block], grid, args),)


# ----------------------------------------------------------------------------------------------------------------- sums


def sum_rows(out: int, parts: Sequence[int], count: int) -> tuple[Launch, ...]:
    """out = the sum of the parts in their order, `count` numbers each. `out` may be the first of them."""
    if not parts:
        raise ValueError("the sum of no part")
    if not count:
        return ()
    launches = []
    grid = (blocks(count, BLOCK_NUMBERS), 1, 1)
    now, rest = list(parts[:SUM_PARTS]), list(parts[SUM_PARTS:])
    while True:
        launches.append(Launch(SUM, grid, (out, *now, *[0] * (SUM_PARTS - len(now)), len(now), count)))
        if not rest:
            return tuple(launches)
        now, rest = [out, *rest[: SUM_PARTS - 1]], rest[SUM_PARTS - 1 :]
