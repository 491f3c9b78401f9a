"""How a batch is cut for a card: runs, tiles, shapes, and where its arrays lie."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from backends.base import Batch, Limits
from backends.gpu.batch import MANY_TILE_ROWS, Block, BlockLayout, few_rows_most, runs_of

LIMITS = Limits(rows=300, logit_rows=8, lanes=5, lane_pages=32)


class Pinned:
    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.line = nbytes, "staging"
        self.bytes = np.zeros(nbytes, np.uint8)
        self.address = int(self.bytes.ctypes.data)

    def close(self) -> None:
        pass


class Card:
    """Does uploads at once, to memory of its own."""

    def __init__(self, nbytes: int) -> None:
        self.memory = np.zeros(nbytes, np.uint8)
        self.uploads: list[tuple[int, int]] = []
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1

    def pinned(self, nbytes: int, line: str) -> Pinned:
        return Pinned(nbytes)

    def upload(self, target: int, source: int, nbytes: int) -> None:
        at = target - int(self.memory.ctypes.data)
        assert 0 <= at <= at + nbytes <= self.memory.nbytes
        ctypes.memmove(target, source, nbytes)
        self.uploads.append((at, nbytes))


class Sent:
    """A block over such a card."""

    def __init__(self, groups: int = 2, limits: Limits = LIMITS) -> None:
        self.layout = BlockLayout(limits, groups)
        self.card = Card(self.layout.nbytes)
        self.block = Block(self.card, self.layout, int(self.card.memory.ctypes.data))  # type: ignore[arg-type]

    def there(self, name: str) -> np.ndarray:
        at = self.layout.at[name]
        return self.card.memory.view(np.int32)[at : at + self.layout.sizes[name]]


def batch_of(*pieces: tuple[int, int, int], groups: int = 2, states: bool = False) -> Batch:
    """Rows of (lane, first position, rows)."""
    lanes = np.concatenate([np.full(rows, lane, np.int32) for lane, _, rows in pieces])
    positions = np.concatenate([np.arange(at, at + rows, dtype=np.int32) for _, at, rows in pieces])
    rows = len(lanes)
    tables = np.arange(groups * 5 * 32, dtype=np.int32).reshape(groups, 5, 32)
    slots = np.arange(groups * rows, dtype=np.int32).reshape(groups, rows)
    own = np.arange(5, dtype=np.int32) if states else np.zeros(0, np.int32)
    return Batch(positions + 7, positions, slots, lanes, tables, np.arange(min(rows, 8), dtype=np.int32), own)


def write(sent: Sent, batch: Batch, states: bool = False):
    runs = runs_of(batch.lanes, batch.positions)
    return sent.block.write(batch, runs, batch.logit_rows, states=states)


def test_arrays_do_not_touch_and_the_head_comes_first() -> None:
    layout = BlockLayout(LIMITS, 3)
    ends = 0
    for name, at in layout.at.items():
        assert at >= ends and at % 64 == 0
        ends = at + layout.sizes[name]
        assert (ends <= layout.head) == (not name.startswith(("tables", "accepts", "pairs")))
    assert 4 * ends <= layout.nbytes


def test_rows_of_a_lane_whose_positions_follow_each_other_are_a_run() -> None:
    lanes = np.array([1, 1, 1, 0, 0, 1], np.int32)
    positions = np.array([4, 5, 9, 10, 11, 10], np.int32)
    found = [(run.lane, run.first, run.end) for run in runs_of(lanes, positions)]
    assert found == [(1, 0, 2), (1, 2, 3), (0, 3, 5), (1, 5, 6)]
    assert runs_of(lanes[:0], positions[:0]) == ()


def test_a_batch_has_tiles_of_both_forms() -> None:
    sent = Sent()
    shape = write(sent, batch_of((0, 9, 1), (2, 0, 150), (1, 3, 4), (4, 0, 5)))
    assert (shape.rows, shape.logit_rows, shape.lanes) == (160, 8, 5)
    assert shape.few == (2, 4) and shape.many == (4, MANY_TILE_ROWS)
    assert sent.there("few")[:4].reshape(-1, 2).tolist() == [[0, 1], [151, 4]]
    assert sent.there("many")[:8].reshape(-1, 2).tolist() == [[1, 64], [65, 64], [129, 22], [155, 5]]


def test_more_short_runs_than_lanes_are_tiles_of_many() -> None:
    sent = Sent(limits=Limits(300, 8, 2, 32))
    lanes = np.zeros(3, np.int32)
    batch = batch_of((0, 0, 3))
    batch.lanes, batch.positions = lanes, np.array([5, 3, 1], np.int32)
    batch.tables = batch.tables[:, :2]
    shape = write(sent, batch)
    assert shape.few == (2, 1) and shape.many[0] == 1


@pytest.mark.parametrize(("highest", "lanes"), [(0, 1), (1, 2), (2, 4), (3, 4), (4, 5)])
def test_lanes_of_a_shape_are_powers_of_two(highest: int, lanes: int) -> None:
    assert write(Sent(), batch_of((highest, 0, 1))).lanes == lanes


def test_equal_shapes_for_equal_work_and_other_ones_for_other() -> None:
    sent = Sent()
    first = write(sent, batch_of((0, 0, 1), (1, 4, 1), states=True), states=True)
    assert first == write(sent, batch_of((1, 9, 1), (0, 8, 1), states=True), states=True)
    assert first != write(sent, batch_of((0, 9, 2), states=True), states=True)
    assert (first.chunks, first.single) == (0, 1)
    prompt = write(sent, batch_of((0, 0, 40), (1, 4, 2), states=True), states=True)
    assert (prompt.chunks, prompt.single) == (1, 2)


def test_the_head_goes_up_each_time_and_tables_where_they_changed() -> None:
    sent = Sent()
    batch = batch_of((0, 0, 3), (4, 511, 1))
    write(sent, batch)
    assert sent.card.uploads[0] == (0, 4 * sent.layout.head) and len(sent.card.uploads) == 3
    assert np.array_equal(sent.there("tables 1").reshape(5, 32), batch.tables[1])
    assert sent.there("tokens")[:4].tolist() == [7, 8, 9, 518]
    assert sent.there("slots 1")[:4].tolist() == [4, 5, 6, 7]
    sent.card.uploads.clear()
    batch.tables[1, 2, 7] = batch.tables[1, 3, 9] = 1
    write(sent, batch)
    at = 4 * sent.layout.at["tables 1"]
    assert sent.card.uploads == [(0, 4 * sent.layout.head), (at + 4 * 2 * 32, 4 * 2 * 32)]
    assert np.array_equal(sent.there("tables 1").reshape(5, 32), batch.tables[1])


def test_of_tables_goes_up_what_rows_can_read_and_the_rest_when_they_can() -> None:
    sent = Sent()
    batch = batch_of((1, 30, 4), (3, 5, 1))
    head, at = (0, 4 * sent.layout.head), 4 * sent.layout.at["tables 0"]
    write(sent, batch)
    assert sent.card.uploads[:2] == [head, (at + 4 * 32, 4 * (2 * 32 + 3))]
    there = sent.there("tables 0").reshape(5, 32)
    assert np.array_equal(there[1:4, :3], batch.tables[0, 1:4, :3]) and not there[[0, 4]].any()
    assert not there[3, 3:].any(), "no row is so far"
    sent.card.uploads.clear()
    batch.tables[:, 1, 3] = batch.tables[:, 0, 0] = batch.tables[:, 4, 0] = 9
    write(sent, batch)
    assert sent.card.uploads == [head], "of what changed no row reads anything"
    batch.positions[:4] += 15
    write(sent, batch)
    assert np.array_equal(sent.there("tables 0").reshape(5, 32)[1:4, :4], batch.tables[0, 1:4, :4])


def test_what_the_stream_may_be_reading_is_waited_for_before_it_is_written_again() -> None:
    sent, batch = Sent(), batch_of((0, 0, 3))
    accepts, pairs = np.zeros((1, 4), np.int32), np.zeros((1, 2), np.int32)
    write(sent, batch)
    sent.block.write_accepts(accepts)
    sent.block.write_pairs(pairs)
    assert sent.card.waits == 0, "three places of their own"
    sent.block.write_pairs(pairs)
    assert sent.card.waits == 1, "and behind it none is being read"
    sent.block.write_accepts(accepts)
    write(sent, batch)
    assert sent.card.waits == 1
    write(sent, batch)
    assert sent.card.waits == 2
    sent.block.waited()
    write(sent, batch)
    assert sent.card.waits == 2


def test_a_chain_that_no_op_looks_at_may_have_any_length() -> None:
    sent, batch = Sent(), batch_of((0, 0, 3))
    batch.chain = np.arange(2 * LIMITS.rows, dtype=np.int32)
    write(sent, batch)
    assert sent.there("chain")[:4].tolist() == [0, 1, 2, 0]


def test_more_logits_than_rows_may_be_wanted() -> None:
    sent = Sent(limits=Limits(3, 8, 2, 32))
    batch = batch_of((0, 0, 3))
    batch.tables, batch.logit_rows = batch.tables[:, :2], np.array([0, 1, 2, 0, 1, 2, 0, 1], np.int32)
    assert write(sent, batch).logit_rows == 8
    assert sent.there("logit_rows").tolist() == batch.logit_rows.tolist()


def test_shorter_tables_lie_in_the_lines_of_the_longest() -> None:
    sent = Sent()
    batch = batch_of((0, 60, 1), (2, 0, 2))
    batch.tables = np.ascontiguousarray(batch.tables[:, :3, :4])
    write(sent, batch)
    assert sent.there("tables 0").reshape(5, 32)[:3, :4].tolist() == batch.tables[0].tolist()


def test_few_rows_are_those_of_drafts() -> None:
    assert few_rows_most(LIMITS) == 4
    assert few_rows_most(Limits(64, 64, 4, 8, held_rows=20)) == 5
    assert few_rows_most(Limits(64, 64, 4, 8, held_rows=400)) == 8
