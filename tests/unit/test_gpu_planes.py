"""How matrices lie on a card: no bit is lost, no byte is added but at the ends of planes, shards are runs."""

from __future__ import annotations

import numpy as np
import pytest

from backends.gpu import planes
from backends.gpu.ops import linear, quants
from backends.gpu.ops.buffers import Planes, Rows
from backends.quant import QuantType

packed = pytest.mark.parametrize("quant", quants.PACKED, ids=quants.tag)


def random_file(quant: QuantType, rows: int, cols: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, rows * quant.row_bytes(cols), dtype=np.uint8)


@packed
def test_planes_have_every_bit_of_a_block_once(quant: QuantType) -> None:
    order = sorted(bit for plane in planes.ORDERS[quant]() for bit in plane)
    assert order == list(range(8 * quant.block_bytes))


@packed
def test_a_matrix_comes_back_from_its_planes(quant: QuantType) -> None:
    rows, cols = 3, 3 * quant.block_len
    file = random_file(quant, rows, cols)
    assert (planes.unpack(quant, planes.pack(quant, file, rows, cols), rows, cols) == file).all()


@packed
def test_a_matrix_takes_the_files_bytes_and_the_planes_alignment(quant: QuantType) -> None:
    rows, cols = 5, 7 * quant.block_len
    lie = planes.planes(quant, rows, cols)
    assert sum(rows * plane.row_bytes for plane in lie) == rows * quant.row_bytes(cols)
    assert all(plane.at % planes.PLANE_ALIGN == 0 for plane in lie)
    assert planes.matrix_bytes(quant, rows, cols) - rows * quant.row_bytes(cols) < planes.PLANE_ALIGN * len(lie)


@packed
def test_a_shard_of_rows_is_a_run_of_each_plane(quant: QuantType) -> None:
    rows, cols = 6, 2 * quant.block_len
    whole = planes.pack(quant, random_file(quant, rows, cols), rows, cols)
    lines = random_file(quant, rows, cols).reshape(rows, -1)
    shard = planes.pack(quant, lines[2:5].reshape(-1), 3, cols)
    runs = [whole[at : at + length] for at, length in planes.row_runs(quant, rows, cols, 2, 3)]
    for plane, run in zip(planes.planes(quant, 3, cols), runs, strict=True):
        assert (shard[plane.at : plane.at + 3 * plane.row_bytes] == run).all()


@packed
def test_a_shard_of_columns_is_a_run_of_each_row_of_each_plane(quant: QuantType) -> None:
    rows, cols, first, width = 3, 5 * quant.block_len, 2 * quant.block_len, 2 * quant.block_len
    file = random_file(quant, rows, cols)
    cut = file.reshape(rows, -1)[:, quant.row_bytes(first) : quant.row_bytes(first + width)]
    whole, shard = planes.pack(quant, file, rows, cols), planes.pack(quant, cut.reshape(-1), rows, width)
    for wide, narrow in zip(planes.planes(quant, rows, cols), planes.planes(quant, rows, width), strict=True):
        lines = whole[wide.at : wide.at + rows * wide.row_bytes].reshape(rows, -1)
        begin = wide.row_bytes // 5 * 2
        mine = shard[narrow.at : narrow.at + rows * narrow.row_bytes].reshape(rows, -1)
        assert (lines[:, begin : begin + narrow.row_bytes] == mine).all()


@pytest.mark.parametrize("quant", quants.FLOATS, ids=quants.tag)
def test_rows_of_floats_begin_at_multiples_of_sixteen_bytes(quant: QuantType) -> None:
    file = random_file(quant, 3, 5)
    lie = planes.planes(quant, 3, 5)
    assert len(lie) == 1 and lie[0].row_bytes % 16 == 0
    card = planes.pack(quant, file, 3, 5)
    lines = card[: 3 * lie[0].row_bytes].reshape(3, -1)
    assert (lines[:, 5 * planes.FLOATS[quant] :] == 0).all()
    assert (planes.unpack(quant, card, 3, 5) == file).all()


def test_what_is_no_whole_number_of_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="Q4_K blocks of 256"):
        planes.planes(QuantType.Q4_K, 2, 128)
    with pytest.raises(ValueError, match="column 32 is within a block of Q4_K"):
        quants.pack(QuantType.Q4_K, 0, 0, 2, 512, quants.Part(0, 32, 2, 256))
    with pytest.raises(ValueError, match="no part of a matrix of 2 times 512"):
        quants.pack(QuantType.Q4_K, 0, 0, 2, 512, quants.Part(0, 256, 2, 512))
    with pytest.raises(ValueError, match="rows of 40 columns"):
        quants.quantize_rows(Rows(0, 40), Planes(hi=16), 1, 40)


def test_activations_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="Q4_K does not multiply with Rows"):
        linear.linear_few(QuantType.Q4_K, 0, 0, Rows(0, 256), rows=1, outs=1, cols=256)
    with pytest.raises(ValueError, match="BF16 does not multiply with Planes"):
        linear.linear_few(QuantType.BF16, 0, 0, Planes(), rows=1, outs=1, cols=256)


def test_lanes_for_a_row_follow_from_the_shape_alone() -> None:
    def team(outs: int, cols: int) -> int:
        return linear.team_of(QuantType.Q4_K, outs, cols)

    assert [team(outs, 4096) for outs in (1024, 4096, 8192)] == [32, 16, 8]
    assert [team(1024, cols) for cols in (256, 768, 1024, 2048)] == [8, 8, 16, 32]
    assert [linear.variant_of(rows) for rows in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, 8]


def test_a_launch_covers_all_outputs_and_rows() -> None:
    for outs in (1, 7, 16, 4097, 9000):
        for rows in (1, 3, 8, 19):
            launch = linear.linear_few(QuantType.Q8_0, 0, 0, Planes(), rows=rows, outs=outs, cols=2048)
            per_block = linear.THREADS // linear.team_of(QuantType.Q8_0, outs, 2048) * linear.OUTS_OF_TEAM
            take = linear.variant_of(rows)
            assert (launch.grid[0] - 1) * per_block < outs <= launch.grid[0] * per_block
            assert (launch.grid[1] - 1) * take < rows <= launch.grid[1] * take
