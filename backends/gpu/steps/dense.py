"""Everything between attention and exchanges that treats each row by itself: embedding, norms, linear layers, and the
ops that change a row in place.

A `Linear` has two forms, and each of its matrices takes the one that is ahead for its type and the batch's rows
(`few_rows_most`):

    few     quantize_rows of src, unless the op before did (`planes`) ─ linear_few for each matrix
    many    halve_rows of src, once ─ linear_many for each matrix

Matrices of floats take the rows as they are in the first form.
"""

from __future__ import annotations

from backends.base import (
    AddGated,
    Buffer,
    EmbedRows,
    GatedActivation,
    Linear,
    LinearPart,
    Norm,
    Op,
    Scale,
    SelectRows,
    Softcap,
    Zero,
)
from backends.gpu.arch import Arch
from backends.gpu.launch import Launch
from backends.gpu.ops import linear, many, mixers, quants
from backends.gpu.ops.buffers import NONE, Planes, Rows
from backends.gpu.steps.base import BatchShape, Context, Places, Stored, quantised, quantised_scratch
from backends.quant import QuantType

HALVES, SCALES = "halves", "halves scales"
"""Scratch of the second form."""


def few_rows_most(quant: QuantType, arch: Arch) -> int:
    """Up to how many rows the few-row form of a linear layer is ahead. Not measured yet: where one block still takes
    all rows, so that the matrix is read once; without matrix cores the other form multiplies as this one does and its
    halves cost more, so there twice as many."""
    most = linear.VARIANTS[-1]
    return 2 * most if arch.matrix == "none" and quant not in quants.FLOATS else most


def is_few(quant: QuantType, arch: Arch, rows: int) -> bool:
    return rows <= few_rows_most(quant, arch)


def wants_planes(op: Op, places: Places, rows: int, src: Buffer) -> bool:
    """Whether an op reads `src` quantised if it has so many rows: a Linear with packed matrices in the first form."""
    if not isinstance(op, Linear) or op.src.name != src.name:
        return False
    return any(_reads_planes(places.matrix(part.weight).quant, places.facts.arch, rows) for part in op.parts)


def _reads_planes(quant: QuantType, arch: Arch, rows: int) -> bool:
    return quant not in quants.FLOATS and is_few(quant, arch, rows)


# ------------------------------------------------------------------------------------------------------------- scratch


def scratch(op: Op, context: Context) -> dict[str, int]:
    if not isinstance(op, Linear):
        return {}
    arch, rows, width = context.facts.arch, context.rows, op.src.width
    found: dict[str, int] = {}
    for quant in dict.fromkeys(context.weights[part.weight.name].type for part in op.parts):
        most = few_rows_most(quant, arch)
        if quant not in quants.FLOATS:
            sizes = quantised_scratch(min(rows, most), width)
            found |= {name: max(found.get(name, 0), size) for name, size in sizes.items()}
        if rows > most:
            found |= {HALVES: many.halved_bytes(rows, width), SCALES: 4 * rows}
    return found


# ------------------------------------------------------------------------------------------------------------ launches


def launches(op: Op, places: Places, shape: BatchShape, planes: Planes | None = None) -> tuple[Launch, ...]:
    """`planes`: where a norm or an activation is to put its result quantised too; of a Linear, where src is so."""
    if isinstance(op, SelectRows):
        return _select(op, places, shape)
    if shape.empty:
        return ()
    match op:
        case EmbedRows():
            return _embed(op, places, shape.rows)
        case Norm():
            src, out = places.rows(op.src), places.rows(op.out)
            add = places.rows(op.add) if op.add is not None else NONE
            return (mixers.norm(shape.rows, op.src.width, src, places.vector(op.weight), op.eps, out, add, planes),)
        case Linear():
            return _linear(op, places, shape.rows, planes)
        case _:
            return _in_place(op, places, shape.rows, planes)


def _in_place(op: Op, places: Places, rows: int, planes: Planes | None) -> tuple[Launch, ...]:
    """Ops on whole rows; nothing where a rank has no column."""
    match op:
        case GatedActivation(gate=gate, up=up, out=out, kind=kind) if out.width:
            both = places.rows(gate), places.rows(up)
            return (mixers.gated_activation(rows, out.width, kind, *both, places.rows(out), planes),)
        case AddGated(src=src, into=into, gate=gate_or_none) if into.width:
            own = places.rows(gate_or_none) if gate_or_none is not None else NONE
            return (mixers.add_gated(rows, into.width, places.rows(src), places.rows(into), own),)
        case Softcap(src=src, cap=cap) if src.width:
            return (mixers.softcap(rows, src.width, places.rows(src), cap),)
        case Scale(src=src, weight=weight) if src.width:
            return (mixers.scale(rows, src.width, places.rows(src), places.vector(weight)),)
        case Zero(out=out) if out.width:
            return (mixers.zero(rows, out.width, places.rows(out)),)
        case _:
            return ()


def _embed(op: EmbedRows, places: Places, rows: int) -> tuple[Launch, ...]:
    table, out, tokens = places.matrix(op.table), places.rows(op.out), places.batch("tokens")
    return (
        quants.embed_rows(
            *(table.quant, out.at, table.at, tokens),
            count=rows,
            rows=table.rows,
            cols=table.cols,
            first=op.first or 0,
            scale=op.scale,
            stride=out.stride,
        ),
    )


def _select(op: SelectRows, places: Places, shape: BatchShape) -> tuple[Launch, ...]:
    if not shape.logit_rows:
        return ()
    add = places.rows(op.add) if op.add is not None else NONE
    indices, out = places.batch("logit_rows"), places.rows(op.out)
    return (mixers.select_rows(shape.logit_rows, op.out.width, places.rows(op.src), indices, out, add),)


def _linear(op: Linear, places: Places, rows: int, planes: Planes | None) -> tuple[Launch, ...]:
    arch, src = places.facts.arch, places.rows(op.src)
    parts = [(part, places.matrix(part.weight)) for part in op.parts if part.out.width]
    found: list[Launch] = []
    if planes is None and any(_reads_planes(matrix.quant, arch, rows) for _, matrix in parts):
        planes = quantised(places)
        found.append(quants.quantize_rows(src, planes, rows, op.src.width))
    halved = None
    if any(not is_few(matrix.quant, arch, rows) for _, matrix in parts):
        halved = many.Halved(places.scratch(HALVES), places.scratch(SCALES), op.src.width)
        found += many.halve(halved, src.at, rows, src.stride)
    for part, matrix in parts:
        if is_few(matrix.quant, arch, rows):
            acts = src if matrix.quant in quants.FLOATS else planes
            assert acts is not None, "quantised above"
            found.append(_few(part, matrix, acts, places, rows))
        else:
            assert halved is not None, "halved above"
            found += _many(part, matrix, halved, places, rows)
    return tuple(found)


def _few(part: LinearPart, matrix: Stored, acts: Planes | Rows, places: Places, rows: int) -> Launch:
    out = places.rows(part.out)
    return linear.linear_few(
        *(matrix.quant, out.at, matrix.at, acts),
        rows=rows,
        outs=matrix.rows,
        cols=matrix.cols,
        bias=places.vector(part.bias),
        stride=out.stride,
    )


def _many(part: LinearPart, matrix: Stored, src: many.Halved, places: Places, rows: int) -> tuple[Launch, ...]:
    out = places.rows(part.out)
    own = many.Matrix(matrix.quant, matrix.at, matrix.rows, matrix.cols)
    return many.linear(own, src, rows, out.at, out.stride, places.vector(part.bias))
