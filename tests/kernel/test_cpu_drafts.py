"""Drafting on the CPU: held states and what accepting leaves of them, hidden states beside rows, steps of drafting.

The rule everywhere: not one bit differs from plain decoding, whatever was drafted, held, batched or threaded.
"""

from __future__ import annotations

import os
from dataclasses import replace

import kernel_drafts as drafts
import kernel_rig as rig
import numpy as np
import pytest
from kernel_drafts import HELD, LANES, SLOTS, Hybrid, Net, batch, floats_of, hybrid, state_bits, with_a_step

from backends.acts import ActShape, PeerLate, make_memory
from backends.base import (
    Buffer,
    DeltaNet,
    DraftStep,
    JoinHidden,
    Limits,
    PoolParts,
    PoolRuns,
    RopeStore,
    StateLayer,
    StatePart,
    StatePool,
    SumRows,
)
from backends.cpu.backend import CpuProgram
from backends.cpu.memory import floats_at
from backends.cpu.moves import pieces_of
from backends.cpu.pieces import address_of
from backends.cpu.pools import CpuPools
from backends.digest import digest
from backends.host.collective import HostCollective

SEEDS = (1, 2, 3, 4)
THREADS = (1, 2, 3)
K = 3
PROMPT = batch((1, 0, 7), (0, 0, 2), (2, 0, 1))
HOLDING = {1: 3, 2: 9}
"""Where the rows of two lanes are kept, apart from each other and from the beginning."""


def prompted(model: Hybrid, level: str, threads: int = 2) -> CpuProgram:
    program = model.bind(level, threads)
    program.run(PROMPT)
    return program


def verify(drafted: int = 0) -> rig.F32:
    """Rows of two held lanes, and beside them one of a lane that decodes, and a prompt."""
    return batch((1, 7, K + 1), (0, 2, 1), (2, 1, K + 1), (3, 0, 5), hold=HOLDING, drafts=drafted)


# ------------------------------------------------------------------------------------------------------------- states


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("threads", THREADS)
def test_accepted_rows_leave_the_states_of_plain_decoding(level: str, seed: int, threads: int) -> None:
    """Every accepted count, with rows of wrong drafts behind those that count; and so do the rows that follow."""
    model = hybrid(seed)
    plain, program = prompted(model, level, 1), prompted(model, level, threads)
    for accepted in range(K + 2):
        plain.run(PROMPT)
        plain.run(batch((0, 2, 1), (3, 0, 5)))
        for row in range(accepted):
            plain.run(batch((1, 7 + row, 1), (2, 1 + row, 1)))
        program.run(PROMPT)
        program.run(verify(max(1, accepted)))
        program.accept([(1, accepted), (2, accepted)])
        assert state_bits(program) == state_bits(plain), accepted
        following = batch((1, 7 + accepted, 3), (2, 1 + accepted, 1))
        assert np.array_equal(rig.bits(program.run(following)), rig.bits(plain.run(following))), accepted
    plain.close()
    program.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_are_accepted_each_by_its_own_count(level: str, seed: int) -> None:
    model = hybrid(seed)
    plain, program = prompted(model, level), prompted(model, level)
    plain.run(batch((0, 2, 1), (3, 0, 5), (1, 7, K + 1)))
    program.run(verify())
    program.accept([(2, 0), (1, K + 1)])
    assert state_bits(program) == state_bits(plain)
    plain.close()
    program.close()


@pytest.mark.parametrize("accepted", range(K + 2))
def test_a_lane_may_be_held_from_its_first_position_on(level: str, accepted: int) -> None:
    """Whatever the slot held before."""
    model = hybrid(5)
    plain, program = prompted(model, level), prompted(model, level)
    if accepted:
        plain.run(batch((1, 0, accepted)))
    program.run(batch((1, 0, K + 1), hold={1: 0}))
    program.accept([(1, accepted)])
    assert state_bits(program) == state_bits(plain)
    plain.close()
    program.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_held_run_gives_the_rows_of_a_plain_one_and_leaves_its_states(level: str, seed: int) -> None:
    """Those of other lanes go on beside it."""
    model = hybrid(seed)
    plain, program = prompted(model, level, 1), prompted(model, level, 3)
    before = floats_of(program, "state").reshape(6, -1).copy()
    held = program.run(verify()).copy()
    assert np.array_equal(rig.bits(held), rig.bits(plain.run(replace(verify(), hold=np.zeros(0, np.int32)))))
    after, written = floats_of(program, "state").reshape(6, -1), floats_of(plain, "state").reshape(6, -1)
    for lane, slot in enumerate(SLOTS):
        wanted = before if lane in HOLDING else written
        assert np.array_equal(rig.bits(after[slot]), rig.bits(wanted[slot])), lane
        assert not np.array_equal(rig.bits(before[slot]), rig.bits(written[slot])), lane
    plain.close()
    program.close()


@pytest.mark.parametrize("threads", THREADS)
def test_a_run_of_held_lanes_alone_leaves_all_state_bytes(level: str, threads: int) -> None:
    program = prompted(hybrid(3), level, threads)
    before = state_bits(program)
    program.run(batch((1, 7, K + 1), (2, 1, 1), (0, 2, 2), hold={1: 0, 2: 7, 0: 10}))
    assert state_bits(program) == before
    with pytest.raises(ValueError):
        program.run(batch((1, 7, K + 1), (2, 1, 60), hold={1: 0, 2: 7}))
    assert state_bits(program) == before
    program.close()


def test_a_held_run_that_raises_half_way_leaves_all_state_bytes(level: str) -> None:
    """The peer does not come to an exchange behind the delta nets; what they did is nobody's."""
    model = hybrid(3)
    shape = ActShape(2, 48, 32, 2, ((0, 1),))
    fd = make_memory(shape)
    acts = HostCollective(rig.backend(level).library, fd, shape, 0, timeout_s=0.02, spin_us=5)
    at = next(index for index, op in enumerate(model.step) if isinstance(op, JoinHidden))
    ops = [*model.step[: at + 1], SumRows(Buffer("hidden", model.width), "late")]
    for first in (0, 1):  # the exchange behind everything, or between the delta nets and the hidden states
        limits = Limits(64, 64, LANES, drafts.LANE_PAGES, HELD)
        own = ops if first == 0 else [*ops[:at], ops[-1], ops[at]]
        program = rig.backend(level).bind(
            with_a_step(own), model.views, rig.NO_KV, limits, lambda *_: None, model.states, collective=acts
        )
        before = floats_of(program, "state")
        before[:] = np.random.default_rng(first).standard_normal(before.size)
        bits = state_bits(program)
        with pytest.raises(PeerLate):
            program.run(batch((1, 7, K + 1), (2, 1, 2), hold={1: 0, 2: 7}))
        assert state_bits(program) == bits
        with pytest.raises(ValueError, match="lane 1 are not held"):
            program.accept([(1, 1)])
        program.close()
    acts.close()
    os.close(fd)


@pytest.mark.parametrize("seed", SEEDS)
def test_held_and_accepted_states_are_those_of_the_reference(level: str, seed: int) -> None:
    model = hybrid(seed)
    program, oracle = model.bind(level), model.reference()
    for plan, kept in (
        (PROMPT, ()),
        (verify(2), ((1, 2), (2, 4))),
        (batch((1, 9, 4), (2, 5, 2), (0, 3, 1), hold={1: 0, 2: 20}), ((2, 1), (1, 0))),
        (batch((1, 9, 1), (2, 6, 1)), ()),
    ):
        got, want = program.run(plan), oracle.run(plan).astype(np.float64)
        rig.close_to(got, want, np.full_like(want, np.abs(want).max()), 1e-4)
        for each in (program, oracle):
            each.accept(kept)
        slots, at = floats_of(program, "state").reshape(6, -1), 0
        for layer, shape in enumerate(model.states.layers):
            window, own = (shape.kernel - 1) * shape.channels, oracle.states.conv[layer].reshape(6, -1)
            if shape.heads == 0:
                rig.close_to(slots[:, at : at + window], own, np.full_like(own, np.abs(own).max() + 1e-30), 1e-4)
            else:
                assert np.array_equal(slots[:, at : at + window], own.astype(np.float32)), layer
            at += -(-window // 16) * 16
            blocks = -(-shape.value_dim // 16)
            size = shape.heads * shape.key_dim * blocks * 16
            found = slots[:, at : at + size].reshape(6, shape.heads, blocks, shape.key_dim, 16).transpose(0, 1, 3, 2, 4)
            found = found.reshape(6, shape.heads, shape.key_dim, blocks * 16)[..., : shape.value_dim]
            at += size
            if shape.heads:
                whole = oracle.states.matrix[layer]
                rig.close_to(found, whole, np.full_like(whole, np.abs(whole).max() + 1e-30), 2e-5)
    program.close()


def test_what_cannot_be_accepted_is_refused_before_anything_is_written(level: str) -> None:
    program = prompted(hybrid(2), level)
    before = state_bits(program)
    program.run(verify())
    others = state_bits(program)
    for kept, why in (
        ([(1, 2), (0, 1)], "lane 0 are not held"),
        ([(1, 2), (3, 1)], "lane 3 are not held"),
        ([(1, 2), (LANES, 1)], f"lane {LANES} are not held"),
        ([(1, 2), (2, K + 2)], f"lane 2 has {K + 1} rows, {K + 2} cannot count"),
        ([(1, 2), (2, -1)], "cannot count"),
        ([(1, 2), (1, 2)], "lane 1 are not held"),
    ):
        with pytest.raises(ValueError, match=why):
            program.accept(kept)
        assert state_bits(program) == others
    program.accept([(1, 1)])
    assert state_bits(program) != others
    with pytest.raises(ValueError, match="lane 1 are not held"):
        program.accept([(1, 1)])
    program.run(PROMPT)
    with pytest.raises(ValueError, match="lane 2 are not held"):
        program.accept([(2, 1)])
    assert before != others
    program.close()


def test_after_a_run_that_was_refused_nothing_is_held(level: str) -> None:
    program = prompted(hybrid(2), level)
    program.run(verify())
    with pytest.raises(ValueError):
        program.run(batch((1, 7, 1), slots=(9, 9, 9, 9)))
    with pytest.raises(ValueError, match="lane 1 are not held"):
        program.accept([(1, 1)])
    program.close()


@pytest.mark.parametrize(
    "hold",
    [{1: HELD - K, 2: 0}, {1: 0, 2: K}, {1: 0, 2: 0}, {1: -2}, {1: HELD + 1}, {1: 2**31 - 1}],
    ids=lambda hold: str(hold),
)
def test_places_that_there_are_not_or_are_twice_are_refused(level: str, hold: dict[int, int]) -> None:
    program = prompted(hybrid(2), level)
    before = state_bits(program)
    with pytest.raises(ValueError, match="a batch that points outside"):
        program.run(batch((1, 7, K + 1), (0, 2, 1), (2, 1, K + 1), hold=hold))
    with pytest.raises(ValueError, match="3 places of held lanes for 4 lanes"):
        program.run(replace(verify(), hold=np.full(3, -1, np.int32)))
    assert state_bits(program) == before
    program.run(batch((1, 7, K + 1), (2, 1, K + 1), hold={1: HELD - K - 1, 2: 0, 3: 999}))  # lane 3 has no rows
    program.close()


def test_a_program_that_keeps_no_rows_holds_nothing(level: str) -> None:
    program = hybrid(2).bind(level, held=0)
    assert "drafts" not in program.memory_lines()
    program.run(PROMPT)
    with pytest.raises(ValueError, match="a batch that points outside"):
        program.run(verify())
    program.run(replace(verify(), hold=np.full(LANES, -1, np.int32)))
    program.close()


def test_a_rank_without_states_accepts_what_was_held_elsewhere(level: str) -> None:
    """Every rank is told the same; one that has other layers alone still knows a wrong count."""
    model = hybrid(2)
    feeds = [op for op in model.step if getattr(op, "out", None) == Buffer("left", model.width)]
    limits = Limits(64, 64, LANES, drafts.LANE_PAGES, HELD)
    program = rig.backend(level).bind(feeds, model.views, rig.NO_KV, limits, lambda *_: None)
    plan = verify()
    program.run(replace(plan, slots=plan.slots[:, :], states=np.zeros(0, np.int32)))
    with pytest.raises(ValueError, match="cannot count"):
        program.accept([(1, K + 2)])
    program.accept([(1, 2), (2, 0)])
    program.close()


def test_kept_rows_are_a_line_of_their_own_with_the_bytes_of_the_formula(level: str) -> None:
    net = Net(2, 4, 16, 32, 4, False)
    model = Hybrid([net, net], 48, 0, 48)
    program = model.bind(level, threads=2)
    each = 2 * ((64 + 128 + 16) + 192) + 48
    assert program.memory_lines()["drafts"] == 4 * (HELD * each + 2 * 2 * 16 * 16)
    assert [region.bytes for region in program.memory_regions() if region.line == "drafts"] == [
        program.memory_lines()["drafts"]
    ]
    program.close()


# ------------------------------------------------------------------------------------------------ parts of wider states


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("tiled", [False, True])
def test_parts_of_states_that_ranks_hold_together(level: str, ranks: int, tiled: bool) -> None:
    """Each rank has one or two key heads of a wider layer and a run of columns of the hidden state. Held and accepted,
    its part has the bits of one alone, and no rank touches what another one has."""
    keys = (1, 2, 1)[:ranks]
    whole = Net(sum(keys), 3 * sum(keys), 9, 21, 4, tiled)
    edges = np.cumsum([0, 5, 17, 9])[: ranks + 1].tolist()
    device = rig.backend(level, 2)
    pools = device.pools(rig.NO_KV, StatePool((StateLayer(edges[-1], 2, 0, 0, 0), whole.state), 6), lambda *_: None)
    (region,) = (each for each in pools.memory_regions() if each.line == "state")
    floats = floats_at(region.address, region.bytes // 4)
    floats[:] = np.nan
    for rank in range(ranks):
        own = Net(keys[rank], 3 * keys[rank], 9, 21, 4, tiled)
        model = Hybrid([own], edges[-1], edges[rank], edges[rank + 1], seed=rank)
        parts = PoolParts(pools, (), (StatePart(1, sum(keys[:rank])), StatePart(0, edges[rank])))
        ops = with_a_step([op for op in model.step if not isinstance(op, RopeStore)])
        limits = Limits(64, 64, LANES, drafts.LANE_PAGES, HELD)
        program = device.bind(ops, model.views, rig.NO_KV, limits, lambda *_: None, model.states, parts=parts)
        alone = device.bind(ops, model.views, rig.NO_KV, limits, lambda *_: None, model.states)
        for plan, kept in (
            (PROMPT, ()),
            (verify(2), ((1, 2), (2, 4))),
            (batch((1, 9, 4), (0, 3, 1), hold={1: 0}), ((1, 3),)),
        ):
            others = floats.copy()
            assert np.array_equal(rig.bits(program.run(plan)), rig.bits(alone.run(plan)))
            for each in (program, alone):
                each.accept(kept)
                each.copy_states([(SLOTS[1], 2)])
            changed = np.flatnonzero(rig.bits(floats) != rig.bits(others))
            if plan is PROMPT:
                assert np.isnan(others[changed]).all(), "what another rank has was written"
        mine = np.sort(floats[~np.isnan(floats)]) if rank == 0 else None
        if mine is not None:
            held = floats_of(alone, "state").reshape(6, -1)[[SLOTS[lane] for lane in (0, 1, 2, 3)] + [2]]
            assert np.count_nonzero(held) == np.count_nonzero(mine)
        program.close()
        alone.close()
    pools.close()


@pytest.mark.parametrize(
    ("part", "own"),
    [
        (StatePart(0, 5), StateLayer(12, 2, 0, 0, 0)),
        (StatePart(0, -1), StateLayer(4, 2, 0, 0, 0)),
        (StatePart(0, 0), StateLayer(4, 3, 0, 0, 0)),
        (StatePart(1, 0), StateLayer(4, 2, 0, 0, 0)),
        (StatePart(0, 0), Net(1, 1, 4, 4, 2, False).state),
    ],
)
def test_a_part_that_there_is_not_is_refused(part: StatePart, own: StateLayer) -> None:
    device = rig.backend(rig.tested_levels()[0])
    pools = CpuPools(
        device.library, rig.NO_KV, StatePool((StateLayer(16, 2, 0, 0, 0), Net(2, 2, 4, 4, 2, False).state), 2)
    )
    feed, table, _ = rig.feed("x", np.ones((4, 8), np.float32))
    with pytest.raises(ValueError, match="state layer"):
        device.bind(
            *([feed], {table.name: table}, rig.NO_KV, Limits(4, 4, 1, 1), lambda *_: None, StatePool((own,), 2)),
            parts=PoolParts(pools, (), (part,)),
        )
    pools.close()


def test_rows_without_heads_move_as_channels_do(level: str) -> None:
    """From columns of a full-width layer to a layer of its own, and back."""
    backend = rig.backend(level)
    wide, own = StateLayer(50, 2, 0, 0, 0), StateLayer(13, 2, 0, 0, 0)
    net = Net(1, 2, 4, 8, 3, False).state
    source = CpuPools(backend.library, rig.NO_KV, StatePool((net, wide), 3))
    target = CpuPools(backend.library, rig.NO_KV, StatePool((own, net), 4))
    for seed, pools in enumerate((source, target)):
        pools.commit(backend.team, lambda *_: None)
        (region,) = pools.memory_regions()[-1:]
        floats_at(region.address, region.bytes // 4)[:] = np.random.default_rng(seed).standard_normal(region.bytes // 4)
    there = pieces_of(source, PoolRuns(states=np.array([2, 0], np.int32), parts=((1, ((19, 32),), ()),)))
    here = pieces_of(target, PoolRuns(states=np.array([1, 3], np.int32), parts=((0, ((0, 13),), ()),)))
    assert there.nbytes == here.nbytes == 2 * 13 * 4
    payload, again = bytearray(there.nbytes), bytearray(there.nbytes)
    packed = there.pack(backend.library, backend.team, address_of(memoryview(payload)))
    here.unpack(backend.library, backend.team, address_of(memoryview(payload)))
    assert here.pack(backend.library, backend.team, address_of(memoryview(again))) == packed == digest(payload)
    assert payload == again
    with pytest.raises(ValueError, match="heads 0 to 1 of state layer 0, which has 0"):
        pieces_of(target, PoolRuns(states=np.zeros(1, np.int32), parts=((0, (), ((0, 1),)),)))
    source.close()
    target.close()


# ------------------------------------------------------------------------------------------------------- hidden states


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("threads", THREADS)
def test_a_row_stands_beside_the_row_before_it(level: str, seed: int, threads: int) -> None:
    """Copies: to the bit what the reference joins, over prompts, chunks, held lanes and lanes that begin anew."""
    random = np.random.default_rng(seed)
    width = int(random.integers(1, 80))
    first, end = sorted(random.integers(0, width + 1, 2).tolist())
    feeds = [rig.feed(name, random.standard_normal((drafts.TOKENS, width)).astype(np.float32)) for name in "ab"]
    out = Buffer("out", 2 * (end - first))
    join = JoinHidden(feeds[0][2], feeds[1][2], out, 0, first, end)
    ops = with_a_step([feeds[0][0], feeds[1][0], join])
    views = {view.name: view for _, view, _ in feeds}
    states = StatePool((StateLayer(end - first, 2, 0, 0, 0),), 6)
    limits = Limits(64, 64, LANES, drafts.LANE_PAGES, HELD)
    program = rig.backend(level, threads).bind(ops, views, rig.NO_KV, limits, lambda *_: None, states)
    seen: dict[int, rig.F32] = {}
    a, b = (view.data.view(np.float32).reshape(drafts.TOKENS, width)[:, first:end] for view in views.values())
    for plan, kept in (
        (PROMPT, {}),
        (verify(2), {1: 2, 2: 0}),
        (batch((1, 9, 3), (2, 1, 1), (0, 0, 2), hold={0: 0}), {0: 2}),
        (batch((0, 2, 1), (1, 12, 1), (3, 5, 1)), {}),
    ):
        want = []
        for row, (token, lane) in enumerate(zip(plan.tokens.tolist(), plan.lanes.tolist(), strict=True)):
            before = plan.tokens[row - 1] if row and plan.lanes[row - 1] == lane else None
            old = np.zeros(end - first, np.float32) if plan.positions[row] == 0 else seen.get(lane)
            want.append(np.concatenate([a[token], old if before is None else b[before]]))
        assert np.array_equal(rig.bits(program.run(plan)), rig.bits(np.array(want)))
        for lane in range(LANES):
            rows = np.flatnonzero(plan.lanes == lane)
            count = kept.get(lane, len(rows))
            if count and len(rows):
                seen[lane] = b[plan.tokens[rows[count - 1]]]
        program.accept(list(kept.items()))
    program.close()


# ---------------------------------------------------------------------------------------------------- steps of drafting


def drafted(program: CpuProgram, *lanes: int, steps: int = K) -> list[rig.F32]:
    """Logits `[steps, vocab]` of each lane, behind the prompt; later steps draft the token that comes next."""
    firsts = {1: 7, 0: 2, 2: 1, 3: 0}
    found = []
    for step in range(steps):
        chain = [-1 if step == 0 else row for row in range(len(lanes))]
        rows = [(lane, firsts[lane] + step, 1) for lane in lanes]
        found.append(program.draft(batch(*rows, chain=chain)).copy())
    return list(np.array(found).transpose(1, 0, 2))


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("threads", THREADS)
def test_bits_of_a_draft_do_not_depend_on_who_drafts_beside_it(level: str, kind: str, threads: int) -> None:
    model = hybrid(7, kind)
    program = prompted(model, level, 2)
    alone = {lane: drafted(program, lane)[0] for lane in (0, 1, 2)}
    program.close()
    program = prompted(model, level, threads)
    for lanes in ((1, 2), (2, 0, 1), (0, 1, 2, 3)):
        for lane, got in zip(lanes, drafted(program, *lanes), strict=True):
            assert lane == 3 or np.array_equal(rig.bits(got), rig.bits(alone[lane])), (lanes, lane)
    program.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_of_drafting_equal_the_reference(level: str, seed: int) -> None:
    """Rows that go on from any row of the step before, among them one that begins: a round of two lengths."""
    model = hybrid(seed)
    program, oracle = model.bind(level), model.reference()
    for each in (program, oracle):
        each.run(PROMPT)
    for plan in (
        batch((1, 7, 1), (2, 1, 1), (3, 0, 1), chain=(-1, -1, -1)),
        batch((2, 2, 1), (1, 8, 1), chain=(1, 0)),
        batch((1, 9, 1), (0, 2, 1), chain=(1, -1)),
    ):
        got, want = program.draft(plan), oracle.draft(plan).astype(np.float64)
        rig.close_to(got, want, np.full_like(want, np.abs(want).max()), 1e-4)
    program.close()


def test_drafts_change_no_state_and_no_bit_of_what_is_run(level: str) -> None:
    """Not those of the prompt, nor of the rows that are verified, whatever drafts wrote into their K and V."""
    model = hybrid(4)
    plain, program = prompted(model, level), prompted(model, level)
    before = state_bits(program)
    drafted(program, 0, 1, 2)
    assert state_bits(program) == before
    assert np.array_equal(rig.bits(program.run(verify())), rig.bits(plain.run(verify())))
    for each in (plain, program):
        each.accept([(1, 2), (2, 1)])
    assert state_bits(program) == state_bits(plain)
    following = batch((1, 9, 1), (2, 2, 1), chain=(-1, -1))
    assert np.array_equal(rig.bits(program.draft(following)), rig.bits(plain.draft(following)))
    plain.close()
    program.close()


def test_rows_of_the_pool_behind_the_position_may_hold_anything(level: str) -> None:
    model = hybrid(6)
    plain, program = prompted(model, level), prompted(model, level)
    memory = floats_of(program, "kv")
    memory[memory == 0] = np.nan  # every row that nothing was written to, and the padding of V
    wanted = drafted(plain, 0, 1, 2)
    assert all(np.isfinite(each).all() for each in wanted)
    for got, want in zip(drafted(program, 0, 1, 2), wanted, strict=True):
        assert np.array_equal(rig.bits(got), rig.bits(want))
    plain.close()
    program.close()


def test_states_of_nobody_may_hold_anything(level: str) -> None:
    """What begins reads no slot, in a step of drafting too."""
    model = hybrid(6)
    plain, program = model.bind(level), model.bind(level)
    floats_of(program, "state")[:] = np.nan
    plan = batch((0, 0, 1), (2, 0, 1), chain=(-1, -1))
    assert np.array_equal(rig.bits(program.draft(plan)), rig.bits(plain.draft(plan)))
    assert np.array_equal(rig.bits(program.run(PROMPT)), rig.bits(plain.run(PROMPT)))
    plain.close()
    program.close()


def test_a_step_of_drafting_that_cannot_be_is_refused(level: str) -> None:
    program = prompted(hybrid(2), level)
    two = batch((1, 7, 1), (2, 1, 1), chain=(-1, -1))
    for bad in (
        replace(two, chain=np.zeros(2, np.int32)),  # there was no step before
        replace(two, chain=np.array([-2, -1], np.int32)),
        replace(two, tokens=np.array([0, drafts.TOKENS], np.int32)),
        replace(two, tokens=np.array([-1, 0], np.int32)),
        replace(two, slots=np.array([[0, 4096]], np.int32)),
        replace(two, tables=two.tables + 100),
        replace(two, states=np.array([9, 9, 9, 9], np.int32)),
        batch((1, 7, 2), (2, 1, 2), (0, 2, 1), chain=(-1,) * 5),  # more rows than lanes
    ):
        with pytest.raises(ValueError, match="points outside"):
            program.draft(bad)
    with pytest.raises(ValueError, match="a chain of 0 rows for a step of drafting of 2"):
        program.draft(replace(two, chain=np.zeros(0, np.int32)))
    program.draft(two)
    with pytest.raises(ValueError, match="points outside"):
        program.draft(replace(two, chain=np.array([0, 2], np.int32)))
    with pytest.raises(ValueError, match="points outside"):
        program.draft(replace(two, chain=np.array([0, 1], np.int32)))  # that was no step
    program.draft(two)
    program.run(PROMPT)
    with pytest.raises(ValueError, match="points outside"):
        program.draft(replace(two, chain=np.array([0, 1], np.int32)))  # nor was this
    program.close()


def test_an_exchange_of_a_step_of_drafting_that_fails_is_named(level: str) -> None:
    """The label is that of the step, though the plan's steps have exchanges of their own."""
    model = hybrid(3)
    fd = make_memory(ActShape(2, 48, 32, 2, ((0, 1),)))
    acts = HostCollective(
        rig.backend(level).library, fd, ActShape(2, 48, 32, 2, ((0, 1),)), 0, timeout_s=0.02, spin_us=5
    )
    joined = next(op.out for op in model.draft if isinstance(op, JoinHidden))
    sums = [SumRows(joined, label) for label in ("of the plan", "of a draft")]
    ops = [*model.step[:-2], sums[0], DraftStep(), *model.draft[:2], sums[1]]
    limits = Limits(64, 64, LANES, drafts.LANE_PAGES, HELD)
    bound = (ops, model.views, model.kv, limits, lambda *_: None, model.states)
    program = rig.backend(level).bind(*bound, collective=acts)
    with pytest.raises(PeerLate, match="of a draft") as late:
        program.draft(batch((1, 7, 1), chain=(-1,)))
    assert late.value.label == "of a draft"
    program.close()
    acts.close()
    os.close(fd)


def test_a_program_without_the_mark_drafts_nothing(level: str) -> None:
    """And keeps no rows, whatever limits it has: those of another layout, which drafts."""
    model = hybrid(2)
    program = model.bind(level, ops=model.step)
    with pytest.raises(ValueError, match="no step of drafting"):
        program.draft(batch((1, 7, 1), chain=(-1,)))
    assert "drafts" not in program.memory_lines()
    with pytest.raises(ValueError):
        program.run(batch((1, 7, 2), hold={1: 0}))
    program.close()


def test_rows_of_a_plan_have_the_same_bits_with_and_without_the_mark(level: str) -> None:
    """Nothing is quantised for an op of the other section, and each has its own rope tables."""
    model = hybrid(7, "Q8_0")
    both, plain = model.bind(level), model.bind(level, ops=model.step)
    for plan in (PROMPT, batch((1, 7, 3), (0, 2, 1))):
        assert np.array_equal(rig.bits(both.run(plan)), rig.bits(plain.run(plan)))
        both.draft(batch((2, 40, 1), chain=(-1,)))
    both.close()
    plain.close()


def test_sections_that_cannot_be_are_refused_at_bind() -> None:
    level, model = rig.tested_levels()[0], hybrid(2)
    join = next(op for op in model.step if isinstance(op, JoinHidden))
    net = next(op for op in model.step if isinstance(op, DeltaNet))
    for ops, why in (
        ([DraftStep(), *model.draft], "at least one op"),
        ([*model.step, DraftStep()], "at least one op"),
        ([*model.ops, DraftStep(), *model.draft], "2 marks"),
        ([*model.step, DraftStep(), join, *model.draft], "is chained behind the mark"),
        ([*model.step[:-2], *model.draft], "is chained behind the mark"),
        ([*model.step, DraftStep(), net, *model.draft], "DeltaNet cannot be part"),
        ([*model.step, DraftStep(), *model.step[-2:], *model.draft], "SelectRows cannot be part"),
        ([*model.step, DraftStep()] + model.draft[:1] * 0, "at least one op"),
        ([*model.step, join], "cannot follow SelectRows"),
    ):
        with pytest.raises(ValueError, match=why):
            model.bind(level, ops=ops)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"layer": 7}, "uses state layer 7 of 3"),
        ({"layer": 0}, "JoinHidden wants"),
        ({"first": 1}, "JoinHidden wants"),
        ({"out": Buffer("other", 3)}, "other 3"),
        ({"left": Buffer("narrow", 1)}, "have 1"),
        ({"first": 200, "end": 248}, "JoinHidden of columns 200 to 248"),
    ],
)
def test_a_join_that_does_not_fit_is_refused_at_bind(change: dict[str, object], why: str) -> None:
    model = Hybrid([Net(1, 1, 8, 8, 2, False), Net(1, 1, 8, 8, 2, False)], 48, 0, 48)
    ops = [replace(op, **change) if isinstance(op, JoinHidden) and not op.chained else op for op in model.step]
    with pytest.raises(ValueError, match=why):
        model.bind(rig.tested_levels()[0], ops=ops)
