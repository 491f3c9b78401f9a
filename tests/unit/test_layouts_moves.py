"""Payloads of a flip: the same rows, bytes and order as the legs of `transition`, in disjoint places of the transit
memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeserve.layouts.cut import cut_by_ratio
from homeserve.layouts.moves import (
    ALIGN,
    FlipGeometry,
    KvHome,
    Live,
    Moves,
    Payload,
    StateHome,
    live_of,
    moves,
)
from homeserve.layouts.owner import OwnerRule
from homeserve.layouts.partition import Run, ffn_columns, key_heads
from homeserve.layouts.share import PIPELINE, TENSOR
from homeserve.layouts.transition import KvLive, Leg, StateForm, Toward, kv_legs, state_legs, totals

few = settings(max_examples=20, deadline=None)
CELL_BYTES = 2048
MIB = 1 << 20
GROUP_PAGES, SLOTS = 41, 6
BOTH = (Toward.TENSOR, Toward.PIPELINE)


def ints(values: object) -> np.ndarray:
    return np.array(sorted(values), np.int32)  # type: ignore[call-overload]


def form_of(vector: tuple[int, ...], heads: int = 6, tiles: int = 2) -> StateForm:
    """`heads` key heads with `tiles` value heads each, in the tiled order; a rank may have none."""
    keys = key_heads(heads, tiles, 8, True, 8, vector).runs
    values = [tuple(run.times(1, tile * heads) for tile in range(tiles)) if run.size else () for run in keys]
    channels = [
        (run.times(4), run.times(4, 4 * heads), *(own.times(8, 8 * heads) for own in value))
        for run, value in zip(keys, values, strict=True)
    ]
    return StateForm(tuple(channels), tuple(values), 12, 4 * 8 * 4)


def columns_of(vector: tuple[int, ...], hidden: int = 5) -> StateForm:
    """A row of `hidden` values and no heads: what a drafting block keeps. A rank may have none of it."""
    columns = ffn_columns(hidden, 1, vector).runs
    return StateForm(tuple((run,) if run.size else () for run in columns), ((),) * len(vector), 4, 0)


@st.composite
def geometries(draw: st.DrawFn) -> FlipGeometry:
    ranks = draw(st.integers(1, 4))
    vector = tuple(draw(st.lists(st.integers(1, 5), min_size=ranks, max_size=ranks)))
    groups = draw(st.integers(1, 3))
    stage = st.integers(0, ranks - 1)
    kv = draw(st.lists(st.tuples(stage, st.integers(0, groups - 1), st.integers(1, 9)), max_size=7))
    states = draw(st.lists(st.tuples(stage, st.booleans()), max_size=4))
    weights = tuple(draw(st.lists(st.integers(1, 9), min_size=ranks, max_size=ranks)))
    return FlipGeometry(
        OwnerRule.of(vector),
        tuple(KvHome(*each) for each in sorted(kv)),
        tuple(StateHome(at, (form_of if heads else columns_of)(weights)) for at, heads in sorted(states)),
        (GROUP_PAGES,) * groups,
        SLOTS if states else 0,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[FlipGeometry, Live]:
    geometry = draw(geometries())
    pages = st.sets(st.integers(0, GROUP_PAGES - 1))
    live = [ints(draw(pages)) for _ in geometry.group_pages]
    slots = draw(st.sets(st.integers(0, SLOTS - 1))) if geometry.state_slots else ()
    return geometry, Live(tuple(live), ints(slots))


def legs_of(geometry: FlipGeometry, live: Live, toward: Toward) -> tuple[Leg, ...]:
    """What `transition` says; a row is a page."""
    rule = OwnerRule(geometry.rule.vector, 1)
    ranks = range(geometry.ranks)
    found: list[Leg] = []
    for group, pages in enumerate(live.pages):
        stages = tuple(
            tuple(at for at, home in enumerate(geometry.kv) if (home.stage, home.group) == (rank, group))
            for rank in ranks
        )
        row_bytes = {at: home.page_bytes for at, home in enumerate(geometry.kv)}
        found += kv_legs(KvLive(stages, tuple(pages.tolist()), row_bytes), rule, toward, unified=geometry.unified)
    stages = tuple(tuple(at for at, home in enumerate(geometry.states) if home.stage == rank) for rank in ranks)
    forms = {at: home.form for at, home in enumerate(geometry.states)}
    found += state_legs(stages, forms, live.states.tolist(), toward, unified=geometry.unified)
    return tuple(found)


Row = tuple[tuple[str | int, ...], int, int, int, int]


def rows_of_legs(legs: tuple[Leg, ...]) -> Iterator[Row]:
    for leg in legs:
        for at in range(leg.source_rows.size):
            yield leg.pool, leg.source, leg.source_rows.first + at, leg.target, leg.target_rows.first + at


def rows_of(payload: Payload, toward: Toward) -> Iterator[Row]:
    there = toward is Toward.TENSOR

    def directed(pool: tuple[str | int, ...], own: int, dealt: int) -> Row:
        before, behind = (own, dealt) if there else (dealt, own)
        return pool, payload.source, before, payload.target, behind

    for each in payload.kv:
        for layer in each.layers:
            for own, dealt in zip(each.own.tolist(), each.dealt.tolist(), strict=True):
                yield directed(("kv", layer), own, dealt)
    for slot in payload.slots.tolist():
        for part in payload.states:
            for kind, full, packed in (
                ("conv", part.channels, part.dealt_channels),
                ("heads", part.heads, part.dealt_heads),
            ):
                for run, to in zip(full, packed, strict=True):
                    for at in range(run.size):
                        yield directed((kind, part.layer, slot), run.first + at, to.first + at)


@few
@given(cases(), st.sampled_from(BOTH), st.booleans())
def test_the_rows_are_those_of_the_legs_and_in_one_order(
    case: tuple[FlipGeometry, Live], toward: Toward, unified: bool
) -> None:
    geometry, live = replace(case[0], unified=unified), case[1]
    legs = legs_of(geometry, live, toward)
    plan = moves(geometry, live, toward)
    found = [row for payload in plan.payloads for row in rows_of(payload, toward)]
    assert sorted(found, key=repr) == sorted(rows_of_legs(legs), key=repr)
    assert all(payload.kv or payload.states for payload in plan.payloads)
    for payload in plan.payloads:  # a payload is what the legs of its pair are, in their order
        kv = [row for row in rows_of(payload, toward) if row[0][0] == "kv"]
        groups = [geometry.kv[int(row[0][1])].group for row in kv]
        assert [(group, row[0][1]) for group, row in zip(groups, kv, strict=True)] == sorted(
            (group, int(row[0][1])) for group, row in zip(groups, kv, strict=True)
        )
        assert payload.rows == len(kv)


@few
@given(cases(), st.sampled_from(BOTH))
def test_bytes_of_each_pair_are_those_of_the_legs(case: tuple[FlipGeometry, Live], toward: Toward) -> None:
    geometry, live = case
    wanted: dict[tuple[int, int], int] = {}
    legs = legs_of(geometry, live, toward)
    for leg in legs:
        pair = leg.source, leg.target
        wanted[pair] = wanted.get(pair, 0) + leg.moved_bytes
    plan = moves(geometry, live, toward)
    assert {(each.source, each.target): each.nbytes for each in plan.payloads} == wanted
    counted = totals(legs, geometry.ranks)
    ranks = range(geometry.ranks)
    assert tuple(plan.sent(rank) for rank in ranks) == counted.sent
    assert tuple(plan.received(rank) for rank in ranks) == counted.received
    assert sum(plan.local(rank) for rank in ranks) == counted.local
    layers = sum(home.page_bytes * len(live.pages[home.group]) for home in geometry.kv)
    assert sum(each.kv_bytes for each in plan.payloads) == layers


@few
@given(cases(), st.sampled_from(BOTH))
def test_payloads_are_disjoint_aligned_and_in_order_of_their_pairs(
    case: tuple[FlipGeometry, Live], toward: Toward
) -> None:
    plan = moves(*case, toward)
    pairs = [(each.source, each.target) for each in plan.payloads]
    assert pairs == sorted(set(pairs))
    assert all(each.offset % ALIGN == 0 and 0 <= each.kv_bytes <= each.nbytes for each in plan.payloads)
    for before, after in pairwise(plan.payloads):
        assert before.offset + before.nbytes <= after.offset < before.offset + before.nbytes + ALIGN
    assert plan.nbytes == max((each.offset + each.nbytes for each in plan.payloads), default=0)
    ranks = range(case[0].ranks)
    assert plan.nbytes <= sum(plan.sent(rank) + plan.local(rank) for rank in ranks) + ALIGN * len(plan.payloads)
    for rank in ranks:
        assert {each.source for each in plan.of_source(rank)} <= {rank}
        assert {each.target for each in plan.of_target(rank)} <= {rank}


@few
@given(cases())
def test_the_way_back_turns_every_payload(case: tuple[FlipGeometry, Live]) -> None:
    there, back = (moves(*case, toward) for toward in BOTH)
    turned = {(each.target, each.source): each for each in back.payloads}
    assert len(turned) == len(there.payloads)
    for each in there.payloads:
        other = turned[each.source, each.target]
        assert (each.nbytes, each.kv_bytes, each.states) == (other.nbytes, other.kv_bytes, other.states)
        assert [rows.layers for rows in each.kv] == [rows.layers for rows in other.kv]
        for one, two in zip(each.kv, other.kv, strict=True):
            assert one.own.tolist() == two.own.tolist() and one.dealt.tolist() == two.dealt.tolist()


@few
@given(cases(), st.sampled_from(BOTH))
def test_b9_unified_memory_has_the_same_payloads_of_no_bytes(case: tuple[FlipGeometry, Live], toward: Toward) -> None:
    geometry, live = case
    discrete, unified = (moves(replace(geometry, unified=each), live, toward) for each in (False, True))
    assert unified.nbytes == 0 and all(each.nbytes == each.kv_bytes == 0 for each in unified.payloads)
    for one, two in zip(discrete.payloads, unified.payloads, strict=True):
        assert (one.source, one.target, one.rows, one.state_count) == (
            two.source,
            two.target,
            two.rows,
            two.state_count,
        )
        assert all(each.own.tolist() == each.dealt.tolist() for each in two.kv)
        assert all((each.heads, each.channels) == (each.dealt_heads, each.dealt_channels) for each in two.states)


@few
@given(geometries(), st.sampled_from(BOTH))
def test_e16_nothing_live_is_an_ordinary_flip(geometry: FlipGeometry, toward: Toward) -> None:
    nothing = Live(tuple(ints(()) for _ in geometry.group_pages), ints(()))
    assert moves(geometry, nothing, toward) == Moves(toward, (), 0)


def golden(vector: tuple[int, ...]) -> FlipGeometry:
    """The rig of the published figures: every fourth of 64 layers attends, stages of 8, 4 and 4 of them."""
    stages = cut_by_ratio((2, 1, 1), 64, {}).held([layer for layer in range(64) if layer % 4 == 3])
    assert [len(layers) for layers in stages] == [8, 4, 4]
    kv = [KvHome(stage, 0, CELL_BYTES) for stage, layers in enumerate(stages) for _ in layers]
    return FlipGeometry(OwnerRule(vector), tuple(kv), (), (3000,))


def test_e12_golden_cells_of_eighty_slots() -> None:
    live = Live((np.arange(1, 81, dtype=np.int32),), ints(()))
    plan = moves(golden((28, 26, 20)), live, Toward.TENSOR)
    cells = [(plan.sent(rank) // CELL_BYTES, plan.received(rank) // CELL_BYTES) for rank in range(3)]
    assert cells == [(368, 272), (216, 312), (240, 240)]
    assert sum(plan.local(rank) for rank in range(3)) == 456 * CELL_BYTES
    assert sum(each.nbytes for each in plan.payloads) == 1280 * CELL_BYTES
    assert [round(size / MIB, 2) for size in (plan.sent(0), plan.received(0))] == [0.72, 0.53]
    back = moves(golden((28, 26, 20)), live, Toward.PIPELINE)
    assert [(back.received(rank), back.sent(rank)) for rank in range(3)] == [
        (plan.sent(rank), plan.received(rank)) for rank in range(3)
    ]


def test_golden_bytes_of_a_thousand_slots() -> None:
    live = Live((np.arange(1, 1032, dtype=np.int32),), ints(()))
    plan = moves(golden((30, 17, 17)), live, Toward.TENSOR)
    assert [round(size / MIB, 1) for size in (plan.sent(0), plan.received(1))] == [8.5, 6.4]


def test_a_rank_without_heads_and_one_without_layers_have_nothing_of_them() -> None:
    form = form_of((1, 1, 30))
    assert form.heads[0] == () and not any(run.size for run in form.channels[0])
    geometry = FlipGeometry(OwnerRule((1, 1, 1)), (KvHome(2, 0, 5),), (StateHome(1, form),), (9,), 4)
    assert [geometry.state_layers(TENSOR, rank) for rank in range(3)] == [(), (), (0,)]
    assert [geometry.state_layers(PIPELINE, rank) for rank in range(3)] == [(), (0,), ()]
    assert [geometry.kv_layers(PIPELINE, rank) for rank in range(3)] == [(), (), (0,)]
    assert [geometry.kv_layers(TENSOR, rank) for rank in range(3)] == [(0,)] * 3
    plan = moves(geometry, Live((ints({0, 4}),), ints({3})), Toward.TENSOR)
    assert [(each.source, each.target, each.rows, each.state_count) for each in plan.payloads] == [
        (1, 2, 0, 1),
        (2, 0, 1, 0),
        (2, 1, 1, 0),
    ]


def test_layers_of_the_tensor_layout_are_counted_where_a_rank_has_a_part_of_them() -> None:
    forms = [form_of((30, 1, 1)), form_of((1, 1, 1))]
    geometry = FlipGeometry(OwnerRule((1, 1, 1)), (), tuple(StateHome(0, form) for form in forms), (1,), 1)
    assert [geometry.state_layers(TENSOR, rank) for rank in range(3)] == [(0, 1), (1,), (1,)]


def test_a_state_without_heads_is_counted_and_moved_by_its_channels() -> None:
    """A drafting block on the last rank: its row is dealt out by columns, and one rank has none of them."""
    form = columns_of((1, 9, 9), 2)
    assert form.channels == ((), (Run(0, 1),), (Run(1, 2),))
    homes = (StateHome(0, form_of((1, 1, 1))), StateHome(2, form))
    geometry = FlipGeometry(OwnerRule((1, 1, 1)), (), homes, (1,), 4)
    assert [geometry.state_layers(TENSOR, rank) for rank in range(3)] == [(0,), (0, 1), (0, 1)]
    assert [geometry.state_layers(PIPELINE, rank) for rank in range(3)] == [(0,), (), (1,)]
    plan = moves(geometry, Live((ints(()),), ints({1, 3})), Toward.TENSOR)
    given = {(each.source, each.target): each for each in plan.payloads if each.source == 2}
    assert set(given) == {(2, 1), (2, 2)}
    (part,) = given[2, 2].states
    assert (part.layer, part.channels, part.dealt_channels, part.heads) == (1, (Run(1, 2),), (Run(0, 1),), ())
    assert given[2, 1].nbytes == given[2, 2].nbytes == 2 * 4


def test_bits_are_read_from_the_lowest() -> None:
    geometry = FlipGeometry(OwnerRule((1, 1)), (), (), (20, 3), 9)
    live = live_of(geometry, (bytes([0b101, 0, 0b1000]), b"\x04"), b"\x00\x01")
    assert [pages.tolist() for pages in live.pages] == [[0, 2, 19], [2]] and live.states.tolist() == [8]
    assert [pages.tolist() for pages in live_of(geometry, (b"", b""), b"").pages] == [[], []]


@pytest.mark.parametrize(
    ("pages", "states", "says"),
    [
        ((b"\x01",), b"", "1 maps of pages for 2 KV groups"),
        ((b"", b"\x08"), b"", "page 3 of KV group 1 is live, there are 3"),
        ((b"\x00\x00\x10", b""), b"", "page 20 of KV group 0 is live, there are 20"),
        ((b"", b""), b"\x00\x02", "state slot 9 is live, there are 9"),
    ],
)
def test_what_is_not_there_cannot_be_live(pages: tuple[bytes, ...], states: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        live_of(FlipGeometry(OwnerRule((1, 1)), (), (), (20, 3), 9), pages, states)


def test_runs_that_are_empty_are_left_out() -> None:
    form = StateForm(((Run(0, 4), Run(4, 4)),), ((Run(0, 0), Run(0, 2)),), 1, 1)
    geometry = FlipGeometry(OwnerRule((1,)), (), (StateHome(0, form),), (1,), 1)
    (payload,) = moves(geometry, Live((ints(()),), ints({0})), Toward.PIPELINE).payloads
    (part,) = payload.states
    assert (part.channels, part.heads) == ((Run(0, 4),), (Run(0, 2),)) and payload.nbytes == 6
