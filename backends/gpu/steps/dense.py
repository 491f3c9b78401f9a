"""Everything between attention and exchanges that treats each row by itself: embedding, norms, linear layers, and the
ops that change a row in place.

A `Linear` has three forms, and each of its matrices takes the one that is ahead for its type, its shape and the batch's
rows (backends.gpu.forms):

    few         quantize_rows of src, unless the op before did (`planes`) ─ linear_few for each matrix
    many        halve_rows of src, once ─ linear_many for each matrix
    library     the same halves ─ a library's product (backends.gpu.library_gemm), only where it was measured ahead

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
from backends.gpu import library_gemm
from backends.gpu.forms import FEW_LEAST, FEW_MOST
from backends.gpu.forms import few_rows_most as few_rows_most
from backends.gpu.launch import Launch
from backends.gpu.library_gemm import Work
from backends.gpu.ops import linear, many, mixers, quants
from backends.gpu.ops.buffers import NONE, Planes, Rows
from backends.gpu.steps.base import BatchShape, Context, Places, Stored, quantised, quantised_scratch

HALVES, SCALES = "halves", "halves scales"
"""Scratch of the second form and the third."""


def wants_planes(op: Op, places: Places, rows: int, src: Buffer) -> bool:
    """Whether an op reads `src` quantised if it has so many rows: a Linear with packed matrices in the first form."""
    if not isinstance(op, Linear) or op.src.name != src.name:
        return False
    return any(_reads_planes(places, places.matrix(part.weight), rows) for part in op.parts)


def _reads_planes(places: Places, matrix: Stored, rows: int) -> bool:
    return matrix.quant not in quants.FLOATS and places.forms.is_few(matrix, rows)


# ------------------------------------------------------------------------------------------------------------- scratch


def scratch(op: Op, context: Context) -> dict[str, int]:
    """Whatever form is chosen later."""
    if not isinstance(op, Linear):
        return {}
    rows, width = context.rows, op.src.width
    found: dict[str, int] = {}
    if any(context.weights[part.weight.name].type not in quants.FLOATS for part in op.parts):
        found |= quantised_scratch(min(rows, FEW_MOST), width)
    if rows > FEW_LEAST:
        found |= {HALVES: many.halved_bytes(rows, width), SCALES: 4 * rows}
    return found


# ------------------------------------------------------------------------------------------------------------ launches


def launches(op: Op, places: Places, shape: BatchShape, planes: Planes | None = None) -> tuple[Work, ...]:
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


def _linear(op: Linear, places: Places, rows: int, planes: Planes | None) -> tuple[Work, ...]:
    forms, src = places.forms, places.rows(op.src)
    parts = [(part, places.matrix(part.weight)) for part in op.parts if part.out.width]
    found: list[Work] = []
    if planes is None and any(_reads_planes(places, matrix, rows) for _, matrix in parts):
        planes = quantised(places)
        found.append(quants.quantize_rows(src, planes, rows, op.src.width))
    halved = None
    if any(not forms.is_few(matrix, rows) for _, matrix in parts):
        halved = many.Halved(places.scratch(HALVES), places.scratch(SCALES), op.src.width)
        found += many.halve(halved, src.at, rows, src.stride)
    for part, matrix in parts:
        if forms.is_few(matrix, rows):
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


def _many(part: LinearPart, matrix: Stored, src: many.Halved, places: Places, rows: int) -> tuple[Work, ...]:
    out, bias = places.rows(part.out), places.vector(part.bias)
    own = many.Matrix(matrix.quant, matrix.at, matrix.rows, matrix.cols)
    if places.forms.is_library(matrix, rows):
        return library_gemm.linear(own, src, rows, out.at, out.stride, bias, places.library)
    return many.linear(own, src, rows, out.at, out.stride, bias)
