"""The part of a tensor that a rank holds, as a tensor of its own: a view where its rows lie in one run, made on access
where they do not.

    rows 4..8 of a matrix        the same bytes, no copy
    columns 64..128              made, row by row
    experts 2..4 of a stack      the same bytes, or the matrices of these alone where the stack itself is made

Whoever reads a stack by `pieces` holds one expert's matrix at a time, whatever part of it is cut out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from backends.base import PartOf, TensorView
from homeserve.checkpoint.safetensors_forms import Bytes, MadeView, Matrices
from homeserve.layouts.partition import Run

Runs = Sequence[Run]


def held_view(whole: TensorView, name: str, rows: Runs, cols: Runs, stack: int = 1) -> TensorView:
    """`rows` x `cols` of a tensor that is `stack` matrices, one behind the other in the order of the file. Runs are
    ascending and not empty; columns are whole blocks. The view says which part of the tensor it shows."""
    part = PartOf(whole.name, tuple((run.first, run.end) for run in rows), tuple((run.first, run.end) for run in cols))
    view = _held(whole, name, rows, cols, stack)
    if isinstance(view, MadeView):
        return MadeView(view.name, view.type, view.rows, view.cols, view.made, part)
    return replace(view, part=part)


def _held(whole: TensorView, name: str, rows: Runs, cols: Runs, stack: int) -> TensorView:
    height, width = sum(run.size for run in rows), sum(run.size for run in cols)
    made = isinstance(whole, MadeView)
    if (height, width) == (whole.rows, whole.cols):
        return _named(whole, name)
    if len(rows) == 1 and width == whole.cols and not made:
        step = whole.type.row_bytes(whole.cols)
        return replace(whole, name=name, rows=height, data=whole.data[rows[0].first * step : rows[0].end * step])
    if stack > 1:
        return _of_stack(whole, name, rows, cols, stack)
    return MadeView(name, whole.type, height, width, lambda: _cut(whole, whole.data, rows, cols))


def _named(whole: TensorView, name: str) -> TensorView:
    if whole.name == name:
        return whole
    if isinstance(whole, MadeView):
        return MadeView(name, whole.type, whole.rows, whole.cols, whole.made)
    return replace(whole, name=name)


def _of_stack(whole: TensorView, name: str, rows: Runs, cols: Runs, stack: int) -> TensorView:
    """Of each matrix the same rows, or some matrices alone."""
    each = whole.rows // stack
    inside = [overlap(rows, Run(index, index + 1).times(each)) for index in range(stack)]
    kept = [index for index, runs in enumerate(inside) if runs]
    local = [tuple(Run(run.first - index * each, run.end - index * each) for run in inside[index]) for index in kept]
    height, width = sum(run.size for run in rows), sum(run.size for run in cols)
    assert len({sum(run.size for run in runs) for runs in local}) == 1, f"{name}: unequal parts of its matrices"
    matrix = matrices_of(whole, stack)
    made = Matrices(len(kept), lambda index: _cut(whole, matrix.make(kept[index]), local[index], cols))
    return MadeView(name, whole.type, height, width, made)


def matrices_of(whole: TensorView, stack: int) -> Matrices:
    """Its matrices one by one, without the others where it is made of them."""
    if isinstance(whole, MadeView) and isinstance(whole.made, Matrices) and whole.made.count == stack:
        return whole.made
    return Matrices(stack, lambda index: whole.data.reshape(stack, -1)[index])


def overlap(runs: Runs, inside: Run) -> tuple[Run, ...]:
    """What of the runs lies in another one."""
    met = (Run(max(run.first, inside.first), min(run.end, inside.end)) for run in runs)
    return tuple(run for run in met if run.size > 0)


def _cut(whole: TensorView, data: Bytes, rows: Runs, cols: Runs) -> Bytes:
    """Of `data`, rows as wide as those of `whole`."""
    size = whole.type.row_bytes
    table = data.reshape(-1, size(whole.cols))
    high = [table[run.first : run.end] for run in rows]
    parts = [[block[:, size(run.first) : size(run.end)] for run in cols] for block in high]
    return np.concatenate([np.concatenate(of_rows, axis=1) for of_rows in parts]).reshape(-1)
