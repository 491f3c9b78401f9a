"""Parts of tensors: a rank gets exactly the elements of its split, in the order of the file, and none of the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import PartOf, TensorView
from backends.quant import QuantType
from homeserve.checkpoint.safetensors_forms import MadeView, Matrices
from homeserve.layouts.partition import Run
from homeserve.layouts.shards import Split, TensorForm, by_columns, by_rows, copied, joined, once
from homeserve.models.held_views import held_view
from homeserve.models.tensors import TensorSource

few = settings(max_examples=20, deadline=None)


def f32(name: str, rows: int, cols: int) -> TensorView:
    values = np.arange(rows * cols, dtype=np.float32)
    return TensorView(name, QuantType.F32, rows, cols, values.view(np.uint8))


def made(view: TensorView, stack: int) -> MadeView:
    """The same tensor, its matrices made one by one."""
    table = view.data.reshape(stack, -1)
    return MadeView(view.name, view.type, view.rows, view.cols, Matrices(stack, lambda index: table[index]))


def numbers(view: TensorView) -> np.ndarray:
    assert view.data.nbytes == view.nbytes
    return np.frombuffer(view.data.tobytes(), np.float32).reshape(view.rows, view.cols)


def runs(data: st.DataObject, size: int, parts: int) -> list[Run]:
    """Ascending, not empty, not touching."""
    edges = sorted(data.draw(st.sets(st.integers(0, size), min_size=2, max_size=2 * parts)))
    return [Run(a, b) for a, b in zip(edges[::2], edges[1::2], strict=False)]


def picked(whole: np.ndarray, rows: Sequence[Run], cols: Sequence[Run]) -> np.ndarray:
    at = [[index for run in each for index in range(run.first, run.end)] for each in (rows, cols)]
    return whole[np.ix_(*at)]


@few
@given(st.data())
def test_a_part_is_its_rows_and_columns(data: st.DataObject) -> None:
    whole = f32("t", data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)))
    rows, cols = runs(data, whole.rows, 2), runs(data, whole.cols, 2)
    for view in (whole, made(whole, 1)):
        part = held_view(view, "part", rows, cols)
        assert part.name == "part" and np.array_equal(numbers(part), picked(numbers(whole), rows, cols))
        told = PartOf("t", tuple((run.first, run.end) for run in rows), tuple((run.first, run.end) for run in cols))
        assert part.part == told


@few
@given(st.data())
def test_of_a_stack_matrices_are_made_one_by_one(data: st.DataObject) -> None:
    """The same rows of each, or some of them alone; a matrix of which nothing is held is not made."""
    stack, height, width = (data.draw(st.integers(2, 5)) for _ in range(3))
    whole = f32("t", stack * height, width)
    if data.draw(st.booleans()):
        inside = runs(data, height, 2)
        rows = [run.times(1, index * height) for index in range(stack) for run in inside]
    else:
        (some,) = runs(data, stack, 1)
        rows = [some.times(height)]
    cols, asked = runs(data, width, 1), []
    table = whole.data.reshape(stack, -1)

    def matrix(index: int) -> np.ndarray:
        asked.append(index)
        return table[index]

    for view in (whole, MadeView("t", whole.type, whole.rows, width, Matrices(stack, matrix))):
        part = held_view(view, "part", rows, cols, stack)
        right = picked(numbers(whole), rows, cols)
        assert np.array_equal(np.concatenate(list(part.pieces())), np.frombuffer(right.tobytes(), np.uint8))
        assert np.array_equal(numbers(part), right)
    assert set(asked) == {row // height for run in rows for row in range(run.first, run.end)}


def test_rows_in_one_run_are_a_view_of_the_file() -> None:
    whole = f32("t", 8, 4)
    assert np.shares_memory(held_view(whole, "t", [Run(2, 5)], [Run(0, 4)]).data, whole.data)
    assert held_view(whole, "t", [Run(0, 8)], [Run(0, 4)]).data is whole.data


def test_columns_are_whole_blocks() -> None:
    packed = TensorView("t", QuantType.Q8_0, 3, 96, np.arange(3 * 102, dtype=np.uint16).view(np.uint8)[: 3 * 102])
    part = held_view(packed, "t", [Run(0, 3)], [Run(0, 32), Run(64, 96)])
    table = packed.data.reshape(3, 102)
    assert (part.cols, part.nbytes) == (64, 3 * 68)
    assert np.array_equal(part.data.reshape(3, 68), np.concatenate([table[:, :34], table[:, 68:]], axis=1))
    with pytest.raises(ValueError, match="block"):
        held_view(packed, "t", [Run(0, 3)], [Run(8, 40)]).data.tobytes()


# ------------------------------------------------------------------------------------------------------------- a source


def source(view: TensorView, split: Split, rank: int = 1) -> TensorSource:
    return TensorSource({view.name: view}, {view.name: split}, rank)


def form(view: TensorView) -> TensorForm:
    return TensorForm(view.rows, view.cols)


def test_a_fused_projection_is_taken_part_by_part() -> None:
    """Rows q 0..8, k 8..12, v 12..16; rank 1 has q 4..8 and all of k and v."""
    whole = f32("qkv", 16, 3)
    queries = by_rows(form(whole), [[Run(0, 4)], [Run(4, 8)]])
    keys = tuple(tuple(piece for piece in own) for own in copied(TensorForm(8, 3), 2))
    keys = tuple(tuple(type(p)((Run(8, 16),), p.cols, copied=True) for p in own) for own in keys)
    given_ = source(whole, joined(queries, keys))
    q, k = given_.take_rows("qkv", 0, 8, 16, 3), given_.take_rows("qkv", 8, 12, 16, 3)
    assert (q.rows, k.rows) == (4, 4)
    assert np.array_equal(numbers(given_.taken[q.name]), numbers(whole)[4:8])
    assert np.array_equal(numbers(given_.taken[k.name]), numbers(whole)[8:12])
    assert given_.rows_by_rank("qkv", 0, 8) == (4, 4) and given_.rows_by_rank("qkv", 8, 12) is None
    assert given_.cut == {q.name}


def test_what_is_not_held_is_a_weight_without_elements() -> None:
    bias = f32("bias", 1, 6)
    for rank, held in ((0, 6), (1, 0)):
        given_ = source(bias, once(form(bias), 0, 2), rank)
        weight = given_.take("bias", 1, 6)
        assert weight.rows * weight.cols == held
        assert ("bias" in given_.taken) == bool(held) and given_.cut == {"bias"}


def test_gathered_rows_keep_their_order() -> None:
    """Of an order of all rows, those that are held: what the whole would give, without the others."""
    whole = f32("in", 8, 2)
    given_ = source(whole, by_rows(form(whole), [[Run(0, 4)], [Run(4, 8)]]))
    weight = given_.take_reordered("in", "v", [7, 0, 5, 2], 8, 2)
    assert np.array_equal(numbers(given_.taken[weight.name]), numbers(whole)[[7, 5]])


def test_biases_of_experts_become_one_vector() -> None:
    whole = f32("bias", 3, 4)
    by_expert = source(whole, by_rows(form(whole), [[Run(0, 1)], [Run(1, 3)]]))
    assert by_expert.take_flat("bias", 3, 4).cols == 8
    assert numbers(by_expert.taken["bias"]).tolist() == [[4, 5, 6, 7, 8, 9, 10, 11]]
    by_column = source(whole, by_columns(form(whole), [[Run(0, 3)], [Run(3, 4)]]))
    assert by_column.take_flat("bias", 3, 4).cols == 3
    assert numbers(by_column.taken["bias"]).tolist() == [[3, 7, 11]]


def test_a_vector_that_is_scaled_is_never_divided() -> None:
    whole = f32("scale", 1, 4)
    assert source(whole, copied(form(whole), 2)).take_scaled("scale", 4, 2.0).cols == 4
    with pytest.raises(AssertionError, match="divided"):
        source(whole, by_columns(form(whole), [[Run(0, 2)], [Run(2, 4)]])).take_scaled("scale", 4, 2.0)
