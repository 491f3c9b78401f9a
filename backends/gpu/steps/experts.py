"""Experts as launches: which ones a row runs, their gate, up and down matrices, and the weighted sum.

With few rows each choice goes through its expert's matrices by itself, and so a matrix that two choices share is read
twice, the second time from the cache. With many the choices are grouped, and each matrix goes over all of its own:

    few     route ─ quantize_rows ─────────────── experts_few x 2 ── activation, quantised ─── experts_few ─── combine
    many    route ─ group_rows ─ halve_rows ───── experts_many x 2 ─ activation ─ halve_rows ─ experts_many ── combine

A *pair* is a choice of a row; pair row * used + choice has a line in the scratch from gate to down. Lines of experts
that other ranks have are zeros or what was there before: the sum at the end does not read them. Matrices of floats take
the rows as they are; each of the three may be of a type of its own, and gate and up rows of one tensor.
"""

from __future__ import annotations

import numpy as np

from backends import experts
from backends.base import ExpertMatrix, Experts
from backends.gpu.launch import Launch
from backends.gpu.ops import linear, many, mixers
from backends.gpu.ops.buffers import NONE, Planes, Rows
from backends.gpu.ops.quants import FLOATS, quantised_bytes, quantize_rows
from backends.gpu.states import FLOAT_BYTES, padded
from backends.gpu.steps.base import BatchShape, Context, Places

IDS, WEIGHTS, GATE, UP = "experts ids", "experts weights", "experts gate", "experts up"
PLANES = ("experts hi", "experts lo", "experts scale", "experts sum")
HALVES, SCALES, ORDER, TILES = "experts halves", "experts scales", "experts order", "experts tiles"
"""Scratch. Lines of `UP` become those of down once the activation has read them; those of `GATE` the activation."""

INT_BYTES, TILE_BYTES = 4, 16
GRID_ROWS = 65535
"""Rows that one launch of a row kernel takes: the most of a grid's second dimension."""
FEW_ROWS = linear.VARIANTS[-1]


def is_few(rows: int) -> bool:
    """Whether so many rows go choice by choice."""
    return rows <= FEW_ROWS


def check(op: Experts) -> None:
    """Raise ValueError where the shapes of an op do not fit each other, or routing is more than a kernel takes."""
    experts.check(op)
    mixers.route(1, op.routing, NONE, 0, 0)
    _choices(op, 1, 0)


# ------------------------------------------------------------------------------------------------------------- scratch


def scratch(op: Experts, context: Context) -> dict[str, int]:
    """For batches of any number of rows up to `context.rows`. Raises ValueError, as `check` does."""
    check(op)
    rows, inner, width = context.rows, op.gate.height, op.out.width
    pairs = rows * op.routing.used
    found = {
        IDS: pairs * INT_BYTES,
        WEIGHTS: pairs * FLOAT_BYTES,
        GATE: pairs * padded(inner) * FLOAT_BYTES,
        UP: pairs * padded(max(inner, width)) * FLOAT_BYTES,
    }
    found |= _few_scratch(op, context, min(rows, FEW_ROWS))
    return found if is_few(rows) else found | _many_scratch(op, rows)


def _few_scratch(op: Experts, context: Context, rows: int) -> dict[str, int]:
    sizes = [(0, 0, 0, 0)]
    if any(context.weights[each.weight.name].type not in FLOATS for each in (op.gate, op.up)):
        sizes.append(quantised_bytes(rows, op.src.width))
    if context.weights[op.down.weight.name].type not in FLOATS:
        sizes.append(quantised_bytes(rows * op.routing.used, op.gate.height))
    return {name: max(each) for name, each in zip(PLANES, zip(*sizes, strict=True), strict=True)}


def _many_scratch(op: Experts, rows: int) -> dict[str, int]:
    choices = _choices(op, rows, 0)
    halves = many.halved_bytes(rows, op.src.width), many.halved_bytes(choices.pairs, op.gate.height)
    return {
        HALVES: max(halves),
        SCALES: choices.pairs * FLOAT_BYTES,
        ORDER: choices.pairs * INT_BYTES,
        TILES: many.tile_count(choices, many.VARIANTS[0]) * TILE_BYTES,  # no fewer than of larger blocks
    }


# ------------------------------------------------------------------------------------------------------------ launches


def launches(op: Experts, places: Places, shape: BatchShape, planes: Planes | None = None) -> tuple[Launch, ...]:
    """`planes`: where `src` lies quantised already."""
    if shape.empty:
        return ()
    routing = op.routing
    vectors = places.vector(routing.selection), places.vector(routing.gains)
    ids, weights = places.scratch(IDS), places.scratch(WEIGHTS)
    routed = mixers.route(shape.rows, routing, places.rows(op.logits), ids, weights, *vectors)
    if is_few(shape.rows):
        parts, work = _few(op, places, shape.rows, planes)
    else:
        parts, work = _many(op, places, shape.rows)
    out = places.rows(op.out)
    total = mixers.experts_combine(shape.rows, op.out.width, routing, parts, ids, weights, out, experts.held(op))
    return (routed, *work, total)


def _few(op: Experts, places: Places, rows: int, planes: Planes | None) -> tuple[Rows, tuple[Launch, ...]]:
    """Where the result of each pair lies, and what computes it."""
    pairs, inner, src = rows * op.routing.used, op.gate.height, places.rows(op.src)
    own = Planes(*(places.scratch(name) for name in PLANES))
    gate, up, down = Rows(places.scratch(GATE), inner), Rows(places.scratch(UP), inner), places.scratch(UP)
    work: list[Launch] = []
    if planes is None and not (_is_float(places, op.gate) and _is_float(places, op.up)):
        work.append(quantize_rows(src, own, rows, op.src.width))
    for matrix, out in ((op.gate, gate), (op.up, up)):
        work.append(_one_by_one(op, places, matrix, out.at, src, planes or own, rows, share=op.routing.used))
    floats = _is_float(places, op.down)
    work.append(
        mixers.gated_activation(*(pairs, inner, op.kind, gate, up), gate if floats else NONE, None if floats else own)
    )
    work.append(_one_by_one(op, places, op.down, down, gate, own, rows, share=1))
    return Rows(down, op.out.width), tuple(work)


def _one_by_one(
    op: Experts, places: Places, matrix: ExpertMatrix, out: int, floats: Rows, planes: Planes, rows: int, *, share: int
) -> Launch:
    """A matrix of each pair's expert; lines of `out` one behind the other."""
    stored = places.matrix(matrix.weight)
    return linear.experts_few(
        *(stored.quant, out, stored.at, floats if stored.quant in FLOATS else planes, places.scratch(IDS)),
        linear.ExpertRows(stored.rows, stored.cols, matrix.pitch, matrix.first, matrix.height),
        pairs=rows * op.routing.used,
        share=share,
        held=experts.held(op),
        bias=places.vector(matrix.bias),
    )


def _many(op: Experts, places: Places, rows: int) -> tuple[Rows, tuple[Launch, ...]]:
    """The same, grouped by expert."""
    choices = _choices(op, rows, places.scratch(IDS))
    groups = many.Groups(choices, places.scratch(ORDER), places.scratch(TILES), many.expert_block(choices))
    inner, src = op.gate.height, places.rows(op.src)
    halves, scales = places.scratch(HALVES), places.scratch(SCALES)
    given, within = many.Halved(halves, scales, op.src.width), many.Halved(halves, scales, inner)
    gate, up = Rows(places.scratch(GATE), padded(inner)), Rows(places.scratch(UP), padded(inner))
    down = Rows(places.scratch(UP), padded(op.out.width))
    work = [*many.group(groups), *many.halve(given, src.at, rows, src.stride)]
    for matrix, out in ((op.gate, gate), (op.up, up)):
        work += many.experts(_stack(places, matrix), given, groups, out.at, out.stride, shared=True)
    work += _activation(op, choices.pairs, gate, up)
    work += many.halve(within, gate.at, choices.pairs, gate.stride)
    work += many.experts(_stack(places, op.down), within, groups, down.at, down.stride, shared=False)
    return down, tuple(work)


def _activation(op: Experts, pairs: int, gate: Rows, up: Rows) -> list[Launch]:
    """Over the gate's lines, as many launches as a grid's limit asks for."""
    found = []
    for first in range(0, pairs, GRID_ROWS):
        count = min(GRID_ROWS, pairs - first)
        gates, ups = (Rows(each.at + first * each.stride * FLOAT_BYTES, each.stride) for each in (gate, up))
        found.append(mixers.gated_activation(count, op.gate.height, op.kind, gates, ups, gates))
    return found


def _stack(places: Places, matrix: ExpertMatrix) -> many.Stack:
    stored = places.matrix(matrix.weight)
    weights = many.Matrix(stored.quant, stored.at, stored.rows, stored.cols)
    return many.Stack(weights, matrix.height, matrix.pitch, matrix.first, places.vector(matrix.bias))


def _choices(op: Experts, rows: int, at: int) -> many.Choices:
    return many.Choices(at, np.dtype(np.int32), rows, op.routing.used, *experts.held(op))


def _is_float(places: Places, matrix: ExpertMatrix) -> bool:
    return places.matrix(matrix.weight).quant in FLOATS
