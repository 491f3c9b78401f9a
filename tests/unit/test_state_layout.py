"""Recurrent states by address: where layers lie in a slot, which bytes of them a flip moves, what ops and pools must
agree on. And who is held while rows of drafts are computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from backends import states
from backends.base import Buffer, DeltaNet, DraftStep, JoinHidden, Limits, Op, StateLayer, StatePool, Weight
from backends.held import HeldLane, HeldLanes, held_limit

HEADS, VALUES = 2, 18
LAYERS = (
    StateLayer(2 * 5 + HEADS * VALUES, 4, HEADS, 5, VALUES),
    StateLayer(7, 2, 0, 0, 0),
    StateLayer(46, 1, 2, 5, 18),
)
POOL = StatePool(LAYERS, 3)
MATRIX = 5 * 32
"""Floats of a head: 18 columns are two blocks of 16."""


def test_layers_lie_one_behind_the_other_each_part_padded_to_16_floats() -> None:
    assert [states.window_floats(layer) for layer in LAYERS] == [144, 16, 0]
    assert [states.layer_at(POOL, layer) for layer in range(3)] == [0, 144 + HEADS * MATRIX, 160 + HEADS * MATRIX]
    assert states.slot_bytes(POOL) == 4 * (160 + 4 * MATRIX)
    assert states.slot_bytes(StatePool()) == 0
    assert states.key_heads_of(LAYERS[0]) == 1


def test_parts_are_rows_of_channels_and_then_heads_without_padding() -> None:
    found = states.layer_parts(POOL, 0, ((0, 3), (40, 46)), ((1, 2),))
    rows = [(4 * (46 * row + first), 4 * count) for row in range(3) for first, count in ((0, 3), (40, 6))]
    head = 144 + MATRIX
    tails = [(4 * (head + 5 * 16 + 16 * key), 4 * 2) for key in range(5)]
    assert found == [*rows, (4 * head, 4 * 5 * 16), *tails]
    assert sum(count for _, count in found) == 4 * (3 * 9 + 5 * VALUES)


def test_heads_of_whole_blocks_are_one_run() -> None:
    pool = StatePool((replace(LAYERS[0], value_dim=32, channels=10 + 64),), 1)
    window = states.window_floats(pool.layers[0])
    assert states.layer_parts(pool, 0, (), ((0, 2),)) == [(4 * window, 4 * 2 * MATRIX)]


@pytest.mark.parametrize(
    ("layer", "channels", "heads", "message"),
    [
        (3, (), (), "state layer 3 of 3"),
        (-1, (), (), "state layer -1"),
        (0, ((0, 47),), (), "channels 0 to 47"),
        (0, ((3, 2),), (), "channels 3 to 2"),
        (0, (), ((1, 3),), "heads 1 to 3"),
        (1, (), ((0, 1),), "heads 0 to 1 of state layer 1, which has 0"),
    ],
)
def test_parts_that_there_are_not_are_refused(
    layer: int, channels: states.Runs, heads: states.Runs, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        states.layer_parts(POOL, layer, channels, heads)


def test_slots_that_there_are_not_are_refused() -> None:
    states.check_pairs(POOL, [(0, 2), (2, 2)])
    for wrong in ((0, 3), (-1, 0)):
        with pytest.raises(ValueError, match="state slot"):
            states.check_pairs(POOL, [(0, 1), wrong])


NET = DeltaNet(
    *(Buffer("mixed", 46), Buffer("z", 36), Buffer("beta", 2), Buffer("alpha", 2), Buffer("out", 36), 0),
    conv=Weight("conv", 46, 4),
    dt_bias=Weight("dt", 1, 2),
    a=Weight("a", 1, 2),
    norm=Weight("norm", 1, 18),
    key_heads=1,
    value_heads=2,
    key_dim=5,
    value_dim=18,
    kernel=4,
    eps=1e-6,
)
JOIN = JoinHidden(Buffer("left", 12), Buffer("right", 10), Buffer("joined", 14), 1, 2, 9)
WRONG_OPS: tuple[tuple[Callable[[], Op], str], ...] = (
    (lambda: replace(NET, layer=3), "uses state layer 3 of 3"),
    (lambda: replace(NET, layer=2), "state layer 2 is"),
    (lambda: replace(NET, z=Buffer("z", 35)), "z is 35"),
    (lambda: replace(NET, conv=Weight("conv", 46, 3)), "conv is"),
    (lambda: replace(NET, norm=Weight("norm", 1, 36)), "norm is"),
    (lambda: replace(NET, out=Buffer("z", 36)), "cannot write its own input z"),
    (lambda: replace(JOIN, layer=-1), "uses state layer -1"),
    (lambda: replace(JOIN, end=8), "state layer 1 is"),
    (lambda: replace(JOIN, first=4, end=11), "JoinHidden of columns 4 to 11"),
    (lambda: replace(JOIN, out=Buffer("joined", 7)), "JoinHidden of columns"),
    (lambda: replace(JOIN, out=Buffer("right", 14), right=Buffer("right", 14)), "cannot write its own input right"),
)


def test_ops_that_fit_their_pool_are_taken() -> None:
    states.check((NET, JOIN), POOL)
    with pytest.raises(ValueError, match="0 slots"):
        states.check((NET,), StatePool(LAYERS, 0))


@pytest.mark.parametrize("index", range(len(WRONG_OPS)))
def test_ops_that_do_not_fit_their_pool_are_refused(index: int) -> None:
    make, message = WRONG_OPS[index]
    with pytest.raises(ValueError, match=message):
        states.check((make(),), POOL)


# ---------------------------------------------------------------------------------------------------- held lanes


def held_lanes() -> HeldLanes:
    """Lanes 0 and 2 are held, lane 1 is not; lane 3 is named and has no rows."""
    ints = [
        np.array(each, np.int32) for each in ([5, -1, 0, 9], [7, 8, 6, 1], [2, 2, 1, 0, 0, 0], [4, 5, 0, 9, 10, 11])
    ]
    account = HeldLanes()
    account.note(*ints)
    return account


def test_rows_that_count_are_told_with_slot_place_and_position() -> None:
    account = held_lanes()
    assert account.taken([(2, 1), (0, 3)]) == [HeldLane(6, 0, 1, 4), HeldLane(7, 5, 3, 9)]
    with pytest.raises(ValueError, match="lane 2 are not held"):
        account.taken([(2, 1)])


def test_rows_of_a_lane_without_states_need_not_be_one_run() -> None:
    none, account = np.zeros(0, np.int32), HeldLanes()
    hold, lanes, positions = (np.array(each, np.int32) for each in ([3, -1], [0, 1, 0, 0], [4, 9, 5, 6]))
    account.note(hold, none, lanes, positions)
    assert account.taken([(0, 3)]) == [HeldLane(0, 3, 3, 4)]


def test_a_lane_of_which_nothing_counts_is_taken_all_the_same() -> None:
    account = held_lanes()
    assert account.taken([(0, 0)]) == []
    with pytest.raises(ValueError, match="lane 0 are not held"):
        account.taken([(0, 1)])


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([(0, 1), (1, 1)], "lane 1 are not held"),
        ([(0, 1), (3, 0)], "lane 3 are not held"),
        ([(0, 1), (0, 1)], "lane 0 are not held"),
        ([(2, 1), (0, 4)], "lane 0 has 3 rows, 4 cannot count"),
        ([(2, -1)], "lane 2 has 2 rows, -1 cannot count"),
    ],
)
def test_a_wrong_lane_takes_none_of_them(kept: list[tuple[int, int]], message: str) -> None:
    account = held_lanes()
    with pytest.raises(ValueError, match=message):
        account.taken(kept)
    assert len(account.taken([(0, 1), (2, 2)])) == 2


def test_lanes_are_forgotten() -> None:
    account = held_lanes()
    account.forget()
    with pytest.raises(ValueError, match="not held"):
        account.taken([(0, 1)])


def test_only_what_drafts_holds_rows() -> None:
    limits = Limits(8, 8, 2, 1, 6)
    assert held_limit((NET,), limits) == 0
    assert held_limit((NET, DraftStep()), limits) == 6
