"""Drafting on the oracle: states are held while rows may turn out wrong, and become what plain decoding leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from backends.base import (
    PAGE_LEN,
    Attention,
    Batch,
    Binding,
    Buffer,
    DeltaNet,
    DraftStep,
    EmbedRows,
    JoinHidden,
    KvLayer,
    KvPool,
    Limits,
    Linear,
    LinearPart,
    Norm,
    Op,
    OpenOptions,
    PoolRuns,
    Rope,
    RopeStore,
    SelectRows,
    StateLayer,
    StatePool,
    TensorView,
    Weight,
    WeightHome,
)
from backends.quant import QuantType
from backends.reference.backend import ReferenceBackend
from backends.reference.program import ReferenceProgram

WIDTH, VOCAB, HEADS, DIM, KERNEL, FIRST, END = 12, 9, 2, 3, 3, 2, 9
CHANNELS, DRAFTS = 3 * HEADS * DIM, 4
POOL = StatePool((StateLayer(CHANNELS, KERNEL, HEADS, DIM, DIM), StateLayer(END - FIRST, 2, 0, 0, 0)), 6)
KV = KvPool((KvLayer(HEADS, DIM),), 8 * PAGE_LEN, QuantType.F32)
PAGES = np.array([[3, 0], [6, 1], [2, 5]], np.int32)
STATES = np.array([4, 0, 2], np.int32)
RNG = np.random.default_rng(8)

X, EMBEDDED, NORMED, JOINED = (Buffer(n, w) for n, w in (("x", 12), ("e", 12), ("n", 12), ("joined", 14)))
MIXED, Z, BETA, ALPHA, OUT = (
    Buffer(n, w) for n, w in (("mixed", CHANNELS), ("z", 6), ("beta", 2), ("alpha", 2), ("out", 6))
)
Q, K, V, SEEN, NONE = (Buffer(n, w) for n, w in (("q", 6), ("k", 6), ("v", 6), ("seen", 6), ("none", 0)))
HIDDEN, SELECTED, LOGITS = Buffer("hidden", WIDTH), Buffer("selected", WIDTH), Buffer("logits", VOCAB)
SHAPES = {
    "table": (VOCAB, WIDTH),
    "norm": (1, WIDTH),
    "join": (WIDTH, 14),
    "head": (VOCAB, WIDTH),
    "back": (WIDTH, 6),
    "mixed": (CHANNELS, WIDTH),
    "z": (6, WIDTH),
    "beta": (2, WIDTH),
    "alpha": (2, WIDTH),
    "q": (6, WIDTH),
    "k": (6, WIDTH),
    "v": (6, WIDTH),
    "conv": (CHANNELS, KERNEL),
    "dt": (1, 2),
    "a": (1, 2),
    "own": (1, DIM),
}
VALUES = {name: RNG.standard_normal(shape) / 2 for name, shape in SHAPES.items()}
VALUES["a"] = -np.exp(VALUES["a"])


def weight(name: str) -> Weight:
    return Weight(name, *SHAPES[name])


def to(src: Buffer, *outs: Buffer) -> Linear:
    return Linear(src, tuple(LinearPart(weight(out.name), out) for out in outs))


DELTA = DeltaNet(
    *(MIXED, Z, BETA, ALPHA, OUT, 0, weight("conv"), weight("dt"), weight("a"), weight("own")),
    *(HEADS, HEADS, DIM, DIM, KERNEL, 1e-6),
)
JOIN = JoinHidden(EMBEDDED, HIDDEN, JOINED, 1, FIRST, END)
STORE = RopeStore(NONE, K, V, 0, 0, HEADS, DIM, Rope(False, (1.0,)))
STEP: list[Op] = [
    *(EmbedRows(weight("table"), X), Norm(X, weight("norm"), 1e-6, NORMED), to(NORMED, MIXED, Z, BETA, ALPHA), DELTA),
    *(Linear(OUT, (LinearPart(weight("back"), X),)), Norm(X, weight("norm"), 1e-6, HIDDEN)),
    *(EmbedRows(weight("table"), EMBEDDED), JOIN, Linear(JOINED, (LinearPart(weight("join"), NORMED),))),
    *(to(NORMED, K, V), STORE, SelectRows(HIDDEN, SELECTED), Linear(SELECTED, (LinearPart(weight("head"), LOGITS),))),
]
DRAFT_HIDDEN = Buffer("draft_hidden", WIDTH)
DRAFTED: list[Op] = [
    *(EmbedRows(weight("table"), EMBEDDED), replace(JOIN, right=DRAFT_HIDDEN, chained=True)),
    *(Linear(JOINED, (LinearPart(weight("join"), NORMED),)), to(NORMED, Q, K, V)),
    *(replace(STORE, q=Q, heads=HEADS), Attention(Q, SEEN, 0, HEADS, HEADS, DIM, scale=0.5)),
    *(Linear(SEEN, (LinearPart(weight("back"), X),)), Norm(X, weight("norm"), 1e-6, DRAFT_HIDDEN)),
    Linear(DRAFT_HIDDEN, (LinearPart(weight("head"), LOGITS),)),
]
OPS = [*STEP, DraftStep(), *DRAFTED]
LIMITS = Limits(40, 40, 3, 2, held_rows=3 * (DRAFTS + 1))


def views() -> dict[str, TensorView]:
    return {
        name: TensorView(name, QuantType.F64, *SHAPES[name], np.frombuffer(values.tobytes(), np.uint8))
        for name, values in VALUES.items()
    }


def device() -> ReferenceBackend:
    return ReferenceBackend(OpenOptions(extra={"dtype": "float64"}))


def bound(ops: Sequence[Op] = OPS, limits: Limits = LIMITS) -> ReferenceProgram:
    return device().bind(ops, views(), KV, limits, lambda *_: None, POOL)


def batch(*pieces: tuple[int, int, Sequence[int]], hold: Sequence[int] = (), chain: Sequence[int] = ()) -> Batch:
    """Rows (lane, first position, tokens)."""
    lanes = np.concatenate([np.full(len(tokens), lane, np.int32) for lane, _, tokens in pieces])
    positions = np.concatenate([np.arange(first, first + len(t), dtype=np.int32) for _, first, t in pieces])
    slots = PAGES[lanes, positions // PAGE_LEN] * PAGE_LEN + positions % PAGE_LEN
    tokens = np.concatenate([np.asarray(t, np.int32) for _, _, t in pieces])
    rows = np.arange(len(lanes), dtype=np.int32)
    found = (tokens, positions, slots.astype(np.int32)[None], lanes, PAGES[None], rows, STATES)
    return Batch(*found, hold=np.array(hold, np.int32), chain=np.array(chain, np.int32))


def states(program: ReferenceProgram) -> list[np.ndarray]:
    return [array.copy() for array in (*program.states.conv, *program.states.matrix)]


def same(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


PROMPTS = {0: [1, 2, 3, 4, 5], 1: [6, 7, 8], 2: [2, 2]}
ROWS = {0: [5, 1, 7, 3, 2], 1: [1, 4, 4], 2: [8]}


def begun() -> ReferenceProgram:
    program = bound()
    program.run(batch(*((lane, 0, tokens) for lane, tokens in PROMPTS.items())))
    return program


def plainly(counts: dict[int, int]) -> tuple[list[np.ndarray], dict[int, np.ndarray]]:
    """States and logits after so many rows of each lane, one a run."""
    program, logits = begun(), {}
    for lane, count in counts.items():
        at = len(PROMPTS[lane])
        logits[lane] = [program.run(batch((lane, at + row, ROWS[lane][row : row + 1])))[0] for row in range(count)]
    return states(program), {lane: np.array(each) for lane, each in logits.items()}


@pytest.mark.parametrize("first", range(DRAFTS + 2))
@pytest.mark.parametrize("second", range(4))
def test_accepted_rows_leave_the_states_of_plain_decoding(first: int, second: int) -> None:
    """Lane 2 holds nothing: its state moves on with the run."""
    program = begun()
    before = states(program)
    pieces = [(lane, len(PROMPTS[lane]), ROWS[lane]) for lane in (1, 2, 0)]
    logits = program.run(batch(*pieces, hold=(5, 10, -1))).copy()
    for layer in range(2):
        for slot in (STATES[0], STATES[1]):
            assert np.array_equal(program.states.conv[layer][slot], before[layer][slot])
            assert np.array_equal(program.states.matrix[layer][slot], before[2 + layer][slot])
    program.accept([(0, first), (1, second)])
    wanted, plain = plainly({0: first, 1: second, 2: 1})
    assert same(states(program), wanted)
    assert np.array_equal(logits[3:4], plain[2])
    if second:
        assert np.array_equal(logits[:second], plain[1])
    if first:
        assert np.array_equal(logits[4 : 4 + first], plain[0])


def test_a_held_lane_at_the_start_of_its_sequence_begins_from_zeros() -> None:
    held, plain = bound(), bound()
    for program in (held, plain):
        program.run(batch((0, 0, [8, 8, 8])))
    held.run(batch((0, 0, [1, 2, 3]), hold=(0, -1, -1)))
    held.accept([(0, 2)])
    plain.run(batch((0, 0, [1, 2])))
    assert same(states(held), states(plain))


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        ([(0, 2), (1, 4)], "lane 1 has 3 rows, 4 cannot count"),
        ([(0, 2), (1, -1)], "lane 1 has 3 rows, -1 cannot count"),
        ([(0, 2), (2, 1)], "lane 2 are not held"),
        ([(0, 2), (0, 1)], "lane 0 are not held"),
    ],
)
def test_what_cannot_count_is_refused_before_anything_is_written(kept: list[tuple[int, int]], why: str) -> None:
    program = begun()
    program.run(batch(*((lane, len(PROMPTS[lane]), ROWS[lane]) for lane in range(3)), hold=(0, 5, -1)))
    before = states(program)
    with pytest.raises(ValueError, match=why):
        program.accept(kept)
    assert same(states(program), before)
    program.accept([(0, 2), (1, 3)])
    assert not same(states(program), before)
    with pytest.raises(ValueError, match="lane 0 are not held"):
        program.accept([(0, 2)])


def test_a_run_that_fails_leaves_held_states_as_they_were_and_nothing_to_accept() -> None:
    program = begun()
    program.run(batch((0, 5, [5, 1]), hold=(0, -1, -1)))
    before = states(program)
    whole, lacking = program.weights, dict(program.weights)
    del lacking["head"]
    program.weights = lacking
    with pytest.raises(KeyError):
        program.run(batch((0, 5, [5, 1, 7]), hold=(0, -1, -1)))
    assert same(states(program), before)
    with pytest.raises(ValueError, match="lane 0 are not held"):
        program.accept([(0, 1)])
    program.weights = whole
    program.run(batch((0, 5, ROWS[0]), hold=(0, -1, -1)))
    program.accept([(0, 3)])
    assert same(states(program), plainly({0: 3})[0])


def test_rows_are_held_at_places_of_their_own_within_the_limit() -> None:
    program = begun()
    for hold in ((0, 4, -1), (12, 0, -1)):
        with pytest.raises(AssertionError, match="held"):
            program.run(batch((0, 5, ROWS[0]), (1, 3, ROWS[1]), hold=hold))


def test_a_row_is_joined_with_the_hidden_state_of_the_row_before_it() -> None:
    """However rows come, in chunks or beside others."""
    tokens = [1, 2, 3, 4, 5, 6, 7]
    whole = bound().run_from(batch((1, 0, tokens)), {})
    left, right = whole["e"][:, FIRST:END], whole["hidden"][:, FIRST:END]
    before = np.concatenate([np.zeros((1, END - FIRST)), right[:-1]])
    assert np.array_equal(whole["joined"], np.concatenate([left, before], axis=1))
    program, found = bound(), []
    program.run(batch((1, 0, [8, 8])))
    for first, end in ((0, 1), (1, 5), (5, 7)):
        rows = program.run_from(batch((0, 0, [3, 3]), (1, first, tokens[first:end])), {})
        found.append(rows["joined"][2:])
    assert np.array_equal(np.concatenate(found), whole["joined"])
    assert np.array_equal(program.states.conv[1][STATES[1], 0], right[-1])


def test_drafts_go_on_from_the_row_of_the_step_before_or_from_what_the_slot_has() -> None:
    """Lane 1 drops out after the first step, so the rows of the second lie elsewhere."""
    program = begun()
    before, kept = states(program), program.states.conv[1][STATES, 0].copy()
    first = program.draft(batch((1, 3, [1]), (0, 5, [5]), (2, 2, [8]), chain=(-1, -1, -1))).copy()
    second = program.draft(batch((0, 6, [4]), (2, 3, [7]), chain=(1, 2))).copy()
    assert first.shape == (3, VOCAB) and second.shape == (2, VOCAB)
    assert same(states(program), before)
    for lane, row, tokens in ((0, 1, (5, 4)), (2, 2, (8, 7))):
        alone = begun()
        hidden, at = kept[lane], len(PROMPTS[lane])
        for step, (token, wanted) in enumerate(zip(tokens, (first[row], second[row - 1]), strict=True)):
            logits, hidden = by_hand(alone, lane, at + step, token, hidden)
            assert np.abs(logits - wanted).max() < 1e-6


def by_hand(
    program: ReferenceProgram, lane: int, position: int, token: int, before: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One row of the drafting layer in plain matrix products, its K and V in the pool of `program`; gives logits and
    the hidden state that the next row is joined with, columns FIRST .. END."""
    normed = VALUES["join"] @ np.concatenate([VALUES["table"][token][FIRST:END], before])
    q, k, v = ((VALUES[name] @ normed).reshape(HEADS, DIM) for name in ("q", "k", "v"))
    c, s = np.cos(position), np.sin(position)
    q, k = (np.stack([x[:, 0] * c - x[:, 1] * s, x[:, 0] * s + x[:, 1] * c, x[:, 2]], axis=1) for x in (q, k))
    slots = [PAGES[lane, p // PAGE_LEN] * PAGE_LEN + p % PAGE_LEN for p in range(position + 1)]
    program.pools.k[0][slots[-1]], program.pools.v[0][slots[-1]] = k, v
    scores = np.einsum("hd,shd->hs", q, program.pools.k[0][slots]) * 0.5
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    x = VALUES["back"] @ np.einsum("hs,shd->hd", shares, program.pools.v[0][slots]).reshape(-1)
    hidden = x / np.sqrt((x * x).mean() + 1e-6) * VALUES["norm"][0]
    return VALUES["head"] @ hidden, hidden[FIRST:END]


@pytest.mark.parametrize("between", ["nothing", "a run", "a run that fails", "a step that fails"])
def test_a_chain_names_rows_of_the_step_before_alone(between: str) -> None:
    """Of a step that a run has not come behind, and that did not fail."""
    program = begun()
    two, stale = batch((1, 3, [1]), (0, 5, [5]), chain=(-1, -1)), batch((0, 6, [4]), chain=(0,))
    if between != "nothing":
        program.draft(two)
        program.draft(replace(stale, chain=np.array([1], np.int32)))  # its rows are one
        program.draft(two)
    whole = program.weights
    if between == "a run":
        program.run(batch((0, 5, [5, 1]), hold=(0, -1, -1)))
    elif between.endswith("fails"):
        program.weights = {name: each for name, each in whole.items() if name != "head"}
        with pytest.raises(KeyError):
            (program.run if between.startswith("a run") else program.draft)(two)
        program.weights = whole
    for chain in (0, 1, -2):
        with pytest.raises(ValueError, match=rf"a chain of rows \[{chain}\] behind a step of drafting of 0"):
            program.draft(replace(stale, chain=np.array([chain], np.int32)))
    program.draft(two)
    with pytest.raises(ValueError, match=r"a chain of rows \[2\] behind a step of drafting of 2"):
        program.draft(replace(stale, chain=np.array([2], np.int32)))
    program.draft(replace(stale, chain=np.array([1], np.int32)))


def test_what_was_kept_of_a_lane_is_let_go_of_with_it() -> None:
    """With no row that counts, too."""
    program = begun()
    program.run(batch((0, 5, ROWS[0]), (1, 3, ROWS[1]), hold=(0, 5, -1)))
    assert set(program._held.replays) == {0, 1}
    program.accept([(0, 0), (1, 2)])
    assert not program._held.replays and not program._held.rows


def test_a_first_draft_at_position_zero_is_joined_with_zeros() -> None:
    program = begun()
    got = program.draft(batch((0, 0, [5]), chain=(-1,))).copy()
    assert np.abs(got[0] - by_hand(bound(), 0, 0, 5, np.zeros(END - FIRST))[0]).max() < 1e-6


def test_k_and_v_of_drafts_are_written_over_by_the_next_rows() -> None:
    drafted, plain = begun(), begun()
    drafted.draft(batch((0, 5, [5]), chain=(-1,)))
    drafted.draft(batch((0, 6, [8]), chain=(0,)))
    for program in (drafted, plain):
        program.run(batch((0, 5, [5, 3]), hold=(0, -1, -1)))
    assert np.array_equal(drafted.pools.k[0], plain.pools.k[0])
    assert np.array_equal(drafted.pools.v[0], plain.pools.v[0])


def test_a_store_without_queries_stores_the_same_rows() -> None:
    rows = batch((0, 0, [1, 2, 3, 4]))
    k, v = (RNG.standard_normal((4, 6)) for _ in range(2))
    stored = []
    for op in (STORE, replace(STORE, q=Q, heads=HEADS)):
        program = bound([op, Norm(X, weight("norm"), 1e-6, X)])
        program.run_from(rows, {"k": k, "v": v, "q": np.zeros((4, 6)), "x": np.ones((4, WIDTH))})
        stored.append((program.pools.k[0], program.pools.v[0]))
    assert np.array_equal(stored[0][0], stored[1][0]) and np.array_equal(stored[0][1], stored[1][1])
    assert stored[0][0].any()


def test_what_is_held_is_a_memory_line_of_its_own() -> None:
    numbers = CHANNELS + 6 + 2 + 2 + (END - FIRST)
    lines, without = bound().memory_lines(), bound(limits=replace(LIMITS, held_rows=0)).memory_lines()
    assert lines["drafts"] == 8 * LIMITS.held_rows * numbers
    assert "drafts" not in without and "drafts" not in bound(STEP).memory_lines(), "without a step of drafting too"
    assert lines["state"] == 8 * POOL.slots * (2 * CHANNELS + HEADS * DIM * DIM + (END - FIRST))
    apart = bound(STEP).memory_lines()["workspace"]
    assert lines["workspace"] - apart == 8 * LIMITS.rows * (6 + WIDTH + 6)  # q is made only there


def test_layouts_pack_states_without_heads_and_hold_in_the_active_one() -> None:
    kinds = [Binding(name, OPS, views(), KV, POOL) for name in ("pipeline", "tensor")]

    class Alone:
        rank, ranks = 0, 1

    layouts = device().bind_layouts(kinds, LIMITS, lambda *_: None, Alone(), WeightHome("images", 0, 1))  # type: ignore[arg-type]
    layouts.program.run(batch(*((lane, 0, tokens) for lane, tokens in PROMPTS.items())))
    layouts.program.run(batch((0, 5, ROWS[0]), hold=(0, -1, -1)))
    layouts.program.accept([(0, 3)])
    wanted = plainly({0: 3})[0]
    slots = np.array([0, 2, 4], np.int32)
    both = ((0, ((0, CHANNELS),), ((0, HEADS),)), (1, ((0, END - FIRST),), ()))
    runs = PoolRuns(states=slots, parts=both)
    assert layouts.run_bytes("tensor", PoolRuns(states=slots, parts=both[1:])) == 8 * 3 * (END - FIRST)
    room = bytearray(layouts.run_bytes("pipeline", runs))
    layouts.pack(runs, memoryview(room))
    layouts.release()
    layouts.map("tensor")
    layouts.refill("tensor")
    layouts.activate("tensor")
    layouts.write("tensor", runs, memoryview(room))
    assert same(states(layouts.program), wanted)
    held = 8 * LIMITS.held_rows * (CHANNELS + 10 + END - FIRST)
    assert layouts.memory_lines()["drafts"] == 2 * held
    with pytest.raises(ValueError, match="not held"):
        layouts.program.accept([(0, 1)])


def test_a_rank_that_sends_its_rows_on_has_no_step_of_drafting() -> None:
    program = bound(STEP[:2])
    assert not program.draft_ops
    with pytest.raises(AssertionError, match="no step of drafting"):
        program.draft(batch((0, 0, [1]), chain=(-1,)))
