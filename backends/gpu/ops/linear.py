"""Launches of linear layers of a few rows, of dense models and of experts.

    linear_few_<type>_r1|_r2|_r4|_r8     Linear, one matrix a launch
    experts_few_<type>                   a matrix of each chosen expert: Experts' gate, up and down

Packed matrices take quantised activations, matrices of floats float32 rows. How lanes share the work: few_products.h.
"""

from __future__ import annotations

from typing import NamedTuple

from backends.gpu.launch import Launch, Symbol, params
from backends.gpu.ops.buffers import PLANES, Planes, Rows
from backends.gpu.ops.quants import FLOATS, GROUP, MATRICES, blocks, tag
from backends.gpu.planes import FLOATS as FLOAT_SIZES
from backends.quant import QuantType

VARIANTS = (1, 2, 4, 8)
"""Rows of activations that a block takes."""
THREADS = 128
OUTS_OF_TEAM = 2
USUAL_CHOICES = 8
"""Experts of a row, for the choice of teams: what a row gets must not depend on how many there really are."""

_FLOAT_ACTS = "x, i32 x_stride"


Acts = Planes | Rows
"""Of packed types, of floats."""


def _symbol(file: str, op: str, name: str, quant: QuantType, parameters: str) -> Symbol:
    is_float = quant in FLOATS
    acts = _FLOAT_ACTS if is_float else PLANES
    return Symbol(
        name,
        file,
        op,
        params(f"out, w, bias, {acts}, {parameters}"),
        THREADS,
        (quant.name,),
        tag(quant),
        needs=("load128",) if is_float else ("dot4", "load128"),
    )


LINEAR_FEW = {
    (quant, rows): _symbol(
        "linear_few",
        "Linear",
        f"linear_few_{tag(quant)}_r{rows}",
        quant,
        "i32 rows, i32 outs, i32 cols, i32 out_stride, i32 team",
    )
    for quant in MATRICES
    for rows in VARIANTS
}
EXPERTS_FEW = {
    quant: _symbol(
        "experts_few",
        "Experts",
        f"experts_few_{tag(quant)}",
        quant,
        "chosen, i32 share, i32 first_expert, i32 experts, i32 matrix_rows, i32 pitch, i32 first, i32 height, i32 cols,"
        " i32 team",
    )
    for quant in MATRICES
}
SYMBOLS = (*LINEAR_FEW.values(), *EXPERTS_FEW.values())


def team_of(quant: QuantType, outs: int, cols: int) -> int:
    """Lanes for a row of the matrix: few where there are rows enough to fill a card, so that activations are shared and
    few exchanges are needed; but no more than half of what a row has to read for them. From the shape alone: the order
    of a result's additions follows from it, on every card."""
    steps = cols * FLOAT_SIZES[quant] // 16 if quant in FLOATS else cols // GROUP
    team = 8 if outs >= 8192 else 16 if outs >= 4096 else 32
    while team > 8 and steps < 2 * team:
        team //= 2
    return team


def variant_of(rows: int) -> int:
    """The smallest that takes all rows at once, or the largest."""
    return next((each for each in VARIANTS if each >= rows), VARIANTS[-1])


def _numbers(quant: QuantType, acts: Acts) -> tuple[int, ...]:
    if isinstance(acts, Rows) != (quant in FLOATS):
        raise ValueError(f"{quant.name} does not multiply with {type(acts).__name__}")
    return (acts.at, acts.stride) if isinstance(acts, Rows) else acts.addresses


def linear_few(
    quant: QuantType, out: int, w: int, acts: Acts, *, rows: int, outs: int, cols: int,
    bias: int = 0, stride: int = 0, variant: int = 0,
) -> Launch:  # fmt: skip
    """out [rows, outs] = acts [rows, cols] times the matrix's [outs, cols], plus `bias` [outs] where it is not 0."""
    take = variant or variant_of(rows)
    team = team_of(quant, outs, cols)
    grid = (blocks(outs, THREADS // team * OUTS_OF_TEAM), blocks(rows, take), 1)
    args = (out, w, bias, *_numbers(quant, acts), rows, outs, cols, stride or outs, team)
    return Launch(LINEAR_FEW[quant, take], grid, args)


class ExpertRows(NamedTuple):
    """Which rows of a tensor are the experts': those of expert e are (e - held) * pitch + first, ... + height."""

    rows: int
    cols: int
    pitch: int
    first: int
    height: int


def experts_few(
    quant: QuantType, out: int, w: int, acts: Acts, chosen: int, matrix: ExpertRows, *,
    pairs: int, share: int, held: tuple[int, int], bias: int = 0,
) -> Launch:  # fmt: skip
    """out [pairs, height]: of pair p the matrix of expert chosen[p] (int32) times row p // share of the activations.
    `held`: the experts (first, end) that the tensor has; pairs of others get zeros. `bias`: [matrix.rows] or 0."""
    team = team_of(quant, matrix.height * USUAL_CHOICES, matrix.cols)
    grid = (blocks(matrix.height, THREADS // team * OUTS_OF_TEAM), pairs, 1)
    place = (share, held[0], held[1] - held[0], matrix.rows, matrix.pitch, matrix.first, matrix.height, matrix.cols)
    return Launch(EXPERTS_FEW[quant], grid, (out, w, bias, *_numbers(quant, acts), chosen, *place, team))
