"""What a flip moves, in both directions: everything that is live, exactly once, to its place."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budget.vectors import moved_cells
from homeserve.layouts.cut import cut_by_ratio
from homeserve.layouts.owner import OwnerRule
from homeserve.layouts.partition import Run, ffn_columns, key_heads
from homeserve.layouts.shards import Piece, TensorForm, by_columns, by_rows, copied
from homeserve.layouts.transition import (
    KvLive,
    Leg,
    StateForm,
    Toward,
    check_cover,
    kv_legs,
    state_legs,
    tensor_fills,
    totals,
    whole_fill,
)

few = settings(max_examples=20, deadline=None)
CELL_BYTES = 2048
MIB = 1 << 20
ATTENTION = [layer for layer in range(64) if layer % 4 == 3]
LINEAR = [layer for layer in range(64) if layer % 4 != 3]
STAGES = cut_by_ratio((2, 1, 1), 64, {}).held(ATTENTION)


def live_rows(live: KvLive, grain: int) -> dict[tuple[str | int, ...], int]:
    return {("kv", layer): len(set(live.pages)) * grain for layers in live.stages for layer in layers}


def test_e12_golden_cells_of_eighty_slots() -> None:
    live = KvLive(STAGES, tuple(range(1, 81)), dict.fromkeys(ATTENTION, CELL_BYTES))
    rule = OwnerRule((28, 26, 20), 1)
    moved = totals(kv_legs(live, rule, Toward.TENSOR), 3)
    assert [sent // CELL_BYTES for sent in moved.sent] == [368, 216, 240]
    assert [received // CELL_BYTES for received in moved.received] == [272, 312, 240]
    assert (moved.local // CELL_BYTES, moved.total // CELL_BYTES) == (456, 1280)
    assert [round(size / MIB, 2) for size in (moved.sent[0], moved.received[0])] == [0.72, 0.53]
    back = totals(kv_legs(live, rule, Toward.PIPELINE), 3)
    assert (back.sent, back.received, back.local) == (moved.received, moved.sent, moved.local)


def test_golden_bytes_of_a_thousand_slots() -> None:
    live = KvLive(STAGES, tuple(range(1, 1032)), dict.fromkeys(ATTENTION, CELL_BYTES))
    moved = totals(kv_legs(live, OwnerRule((30, 17, 17), 1), Toward.TENSOR), 3)
    assert [round(size / MIB, 1) for size in (moved.sent[0], moved.received[1])] == [8.5, 6.4]


kv_cases = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), min_size=1, max_size=4)


@few
@given(kv_cases, st.sets(st.integers(0, 60)), st.sampled_from((1, 16)), st.booleans())
def test_kv_rows_go_to_their_places_exactly_once(
    ranks: list[tuple[int, int]], pages: set[int], grain: int, unified: bool
) -> None:
    rule = OwnerRule.of([entry for _, entry in ranks], grain)
    first, stages = 0, []
    for count, _ in ranks:
        stages.append(tuple(range(first, first + count)))
        first += count
    live = KvLive(tuple(stages), tuple(sorted(pages)), {layer: 8 + layer for layer in range(first)})
    rows = dict(enumerate(rule.pool_rows(61 * grain)))
    there = kv_legs(live, rule, Toward.TENSOR, unified=unified)
    check_cover(there, live_rows(live, grain), None if unified else rows)
    back = kv_legs(live, rule, Toward.PIPELINE, unified=unified)
    check_cover(back, live_rows(live, grain), None)
    assert back == tuple(leg.turned for leg in there)
    for leg in there:
        (_, layer) = leg.pool
        assert layer in stages[leg.source]
        for slot, row in zip(
            range(leg.source_rows.first, leg.source_rows.end),
            range(leg.target_rows.first, leg.target_rows.end),
            strict=True,
        ):
            owner, place = rule.place(slot)
            assert (leg.target, row) == (owner, slot if unified else place)
    moved = totals(there, len(ranks))
    assert sum(moved.sent) == sum(moved.received)
    assert moved.total == (0 if unified else len(pages) * grain * sum(8 + layer for layer in range(first)))


@few
@given(kv_cases, st.sets(st.integers(0, 60)))
def test_cells_are_those_that_the_budget_counts(ranks: list[tuple[int, int]], pages: set[int]) -> None:
    vector = [entry for _, entry in ranks]
    first, stages = 0, []
    for count, _ in ranks:
        stages.append(tuple(range(first, first + count)))
        first += count
    live = KvLive(tuple(stages), tuple(pages), dict.fromkeys(range(first), 1))
    moved = totals(kv_legs(live, OwnerRule(tuple(vector), 1), Toward.TENSOR), len(ranks))
    counted = moved_cells([count for count, _ in ranks], vector, pages)
    assert (moved.sent, moved.received, moved.local, moved.total) == (
        counted.sent,
        counted.received,
        counted.local,
        counted.total,
    )


def test_b9_unified_memory_moves_nothing_with_the_same_legs() -> None:
    live = KvLive(STAGES, (0, 2, 3, 9), dict.fromkeys(ATTENTION, CELL_BYTES))
    rule = OwnerRule((2, 1, 1))
    discrete = kv_legs(live, rule, Toward.TENSOR)
    unified = kv_legs(live, rule, Toward.TENSOR, unified=True)
    assert totals(discrete, 3).total == 16 * 4 * 16 * CELL_BYTES
    assert totals(unified, 3).total == 0
    assert [(leg.pool, leg.source, leg.source_rows, leg.target) for leg in unified] == [
        (leg.pool, leg.source, leg.source_rows, leg.target) for leg in discrete
    ]
    assert all(leg.source_rows == leg.target_rows for leg in unified)


def test_e16_an_empty_live_set_is_an_ordinary_flip() -> None:
    live = KvLive(STAGES, (), dict.fromkeys(ATTENTION, CELL_BYTES))
    assert kv_legs(live, OwnerRule((2, 1, 1)), Toward.TENSOR) == ()
    check_cover((), live_rows(live, 16), {0: 0, 1: 0, 2: 0})


# -------------------------------------------------------------------------------------------------------------- states


def delta_form(vector: tuple[int, ...]) -> StateForm:
    """16 key heads, 48 value heads of 128 x 128 in 16 bits, tiled; of q, k and v the channels."""
    keys = key_heads(16, 3, 128, True, 256, vector)
    heads = [tuple(run.times(1, 16 * tile) for tile in range(3)) for run in keys.runs]
    channels = [
        (run.times(128), run.times(128, 2048), *(own.times(128, 4096) for own in values))
        for run, values in zip(keys.runs, heads, strict=True)
    ]
    return StateForm(tuple(channels), tuple(heads), 3 * 2, 128 * 128 * 2)


def test_states_of_one_request() -> None:
    """72 MiB in all: rank 0 has half of the layers and half of the heads, so it gives a quarter and gets a quarter."""
    forms = dict.fromkeys(LINEAR, delta_form((30, 17, 17)))
    stages = cut_by_ratio((2, 1, 1), 64, {}).held(LINEAR)
    legs = state_legs(stages, forms, [5], Toward.TENSOR)
    heads = [leg for leg in legs if leg.pool[0] == "heads"]
    moved = totals(heads, 3)
    assert moved.total == 72 * MIB
    assert (moved.sent[0], moved.received[0]) == (18 * MIB, 18 * MIB)
    assert sum(leg.moved_bytes for leg in heads if leg.local and leg.source == 0) == 18 * MIB
    conv = totals([leg for leg in legs if leg.pool[0] == "conv"], 3)
    assert conv.total == 48 * 10240 * 3 * 2


@few
@given(
    st.sampled_from(((2, 1, 1), (30, 17, 17), (28, 26, 20), (1, 30, 1))),
    st.sets(st.integers(0, 9), max_size=3),
    st.booleans(),
)
def test_each_state_moves_exactly_once_and_back(vector: tuple[int, ...], slots: set[int], unified: bool) -> None:
    stages = ((0, 1), (2,), (3,))
    row = StateForm(tuple((run,) for run in ffn_columns(5120, 256, vector).runs), ((), (), ()), 4, 0)
    forms = dict.fromkeys(range(3), delta_form(vector)) | {3: row}
    there = state_legs(stages, forms, slots, Toward.TENSOR, unified=unified)
    live: dict[tuple[str | int, ...], int] = {}
    for slot in slots:
        live[("conv", 3, slot)] = 5120  # of a drafting block: a row without heads
        for layer in range(3):
            live |= {("conv", layer, slot): 10240, ("heads", layer, slot): 48}
    check_cover(there, live, None)
    back = state_legs(stages, forms, slots, Toward.PIPELINE, unified=unified)
    check_cover(back, live, None)
    assert back == tuple(leg.turned for leg in there)
    assert totals(there, 3).total == (0 if unified else len(slots) * (3 * (10240 * 6 + 48 * 128 * 128 * 2) + 5120 * 4))
    for rank in range(3):  # packed without a gap
        for slot in slots:
            own = [leg.target_rows for leg in there if leg.target == rank and leg.pool == ("heads", 2, slot)]
            if not unified:
                assert [run.first for run in own] == [0, *(run.end for run in own[:-1])][: len(own)]


# ------------------------------------------------------------------------------------------------------------- weights


def test_columns_of_a_matrix_are_a_strided_copy() -> None:
    """Blocks of 32 in 18 bytes: columns 64 to 96 and 128 to 160 of each row, side by side in the shard."""
    form = TensorForm(4, 160, 32, 18)
    runs = [[Run(0, 64), Run(96, 128)], [Run(64, 96), Run(128, 160)]]
    fills = [fill for fill in tensor_fills("m", form, by_columns(form, runs)) if fill.rank == 1]
    assert [(fill.rows, fill.first, fill.length, fill.offset, fill.pitch) for fill in fills] == [
        (Run(0, 4), 36, 18, 0, 36),
        (Run(0, 4), 72, 18, 18, 36),
    ]


def test_the_pipeline_layout_fills_a_tensor_whole() -> None:
    fill = whole_fill("m", TensorForm(4, 160, 32, 18), 2)
    assert (fill.rank, fill.nbytes, fill.pitch, fill.offset) == (2, 4 * 90, 90, 0)


@few
@given(st.integers(1, 6), st.integers(1, 6), st.booleans(), st.data())
def test_fills_write_every_byte_of_a_shard_from_its_place(
    rows: int, blocks: int, wide: bool, data: st.DataObject
) -> None:
    form = TensorForm(rows, blocks * 4, 4, 3)
    whole, step = (blocks, 4) if wide else (rows, 1)
    owners = data.draw(st.lists(st.integers(0, 2), min_size=whole, max_size=whole))
    runs = [[Run(step * at, step * at + step) for at in range(whole) if owners[at] == rank] for rank in range(3)]
    split = (by_columns if wide else by_rows)(form, runs)
    extra = (Piece((Run(0, 1),), (Run(0, 4),), copied=True),)
    split = tuple(pieces + extra for pieces in split)
    image = bytes(range(form.nbytes))
    for rank, pieces in enumerate(split):
        shard, written = bytearray(sum(piece.nbytes(form) for piece in pieces)), Counter[int]()
        for fill in tensor_fills("m", form, split):
            if fill.rank != rank:
                continue
            for index in range(fill.rows.size):
                source = (fill.rows.first + index) * form.row_bytes(form.cols) + fill.first
                target = fill.offset + index * fill.pitch
                shard[target : target + fill.length] = image[source : source + fill.length]
                written.update(range(target, target + fill.length))
        assert sorted(written) == list(range(len(shard)))
        assert set(written.values()) <= {1}
        expected = b"".join(
            image[row * blocks * 3 + cols.first // 4 * 3 : row * blocks * 3 + cols.end // 4 * 3]
            for piece in pieces
            for run in piece.rows
            for row in range(run.first, run.end)
            for cols in piece.cols
        )
        assert bytes(shard) == expected


def test_a_copy_is_filled_on_every_rank() -> None:
    form = TensorForm(1, 8)
    assert [fill.nbytes for fill in tensor_fills("m", form, copied(form, 3))] == [32, 32, 32]


# ------------------------------------------------------------------------------------------------------------ the check


def leg(source: Run, target: Run) -> Leg:
    return Leg(("kv", 0), 0, source, 1, target, 4)


@pytest.mark.parametrize(
    ("legs", "message"),
    [
        ([leg(Run(0, 16), Run(0, 16))], "32 rows are live and 16 move"),
        ([leg(Run(0, 32), Run(0, 31))], "32 rows to 31"),
        ([leg(Run(0, 16), Run(0, 16)), leg(Run(16, 32), Run(15, 31))], "row 15 of rank 1 is written twice"),
        ([leg(Run(0, 16), Run(0, 16)), leg(Run(15, 31), Run(16, 32))], "row 15 of rank 0 is read twice"),
        ([leg(Run(0, 32), Run(33, 65))], "rank 1 has 64 rows, needed 65"),
    ],
    ids=str,
)
def test_the_check_sees_what_is_wrong(legs: list[Leg], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_cover(legs, {("kv", 0): 32}, {0: 64, 1: 64})


def test_rows_of_a_pool_that_is_not_live_do_not_move() -> None:
    with pytest.raises(ValueError, match="0 rows are live and 32 move"):
        check_cover([leg(Run(0, 32), Run(0, 32))], {}, None)
