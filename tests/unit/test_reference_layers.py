"""The oracle's larger ops against formulas written down once more here, in double precision and without its code.

Attention with caps, sinks, gates and norms over heads; experts under every routing; the delta rule against the chunked
form of it, which shares no step with the recurrence; the rounding of small KV types against every number they hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from backends.base import (
    PAGE_LEN,
    AddGated,
    Attention,
    Batch,
    Buffer,
    DeltaNet,
    ExpertMatrix,
    Experts,
    GatedActivation,
    KvLayer,
    KvPool,
    Limits,
    Linear,
    LinearPart,
    Op,
    OpenOptions,
    Rope,
    RopeStore,
    Routing,
    Scale,
    Softcap,
    StateLayer,
    StatePool,
    TensorView,
    Weight,
)
from backends.quant import QuantType
from backends.reference.backend import ReferenceBackend
from backends.reference.compute import GATES
from backends.reference.pools import round_f8, round_q8_0
from backends.reference.program import ReferenceProgram

EXACT = 1e-12
RNG = np.random.default_rng(31)
PAGES = np.array([[3, 0], [6, 1], [2, 5]], np.int32)
ROWS = 40


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def bound(
    ops: Sequence[Op],
    weights: Mapping[str, np.ndarray],
    kv: KvPool | None = None,
    states: StatePool | None = None,
) -> ReferenceProgram:
    """A program in double precision; vectors of `weights` are taken as `[1, n]`."""
    views = {}
    for name, values in weights.items():
        rows, cols = values.shape if values.ndim == 2 else (1, len(values))
        raw = np.frombuffer(np.ascontiguousarray(values, np.float64).tobytes(), np.uint8)
        views[name] = TensorView(name, QuantType.F64, rows, cols, raw)
    return ReferenceBackend(OpenOptions(extra={"dtype": "float64"})).bind(
        ops,
        views,
        kv or KvPool((), 0, QuantType.F32),
        Limits(ROWS, ROWS, 3, 2),
        lambda *_: None,
        states or StatePool(),
    )


def batch(*pieces: tuple[int, int, int], states: Sequence[int] = (0, 1, 2)) -> Batch:
    """Rows (lane, first position, end position)."""
    lanes = np.concatenate([np.full(end - first, lane, np.int32) for lane, first, end in pieces])
    positions = np.concatenate([np.arange(first, end, dtype=np.int32) for _, first, end in pieces])
    slots = PAGES[lanes, positions // PAGE_LEN] * PAGE_LEN + positions % PAGE_LEN
    rows = np.arange(len(lanes), dtype=np.int32)
    return Batch(rows, positions, slots.astype(np.int32)[None], lanes, PAGES[None], rows, np.array(states, np.int32))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def rms(x: np.ndarray, weight: np.ndarray | float, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


# ------------------------------------------------------------------------------------------------------------ attention

HEADS, KV_HEADS, DIM, SEEN = 4, 2, 8, 20
ROPE = Rope(interleaved=False, frequencies=(1.0, 0.3, 0.02), magnitude=1.2)


def turned(x: np.ndarray, position: int) -> np.ndarray:
    """ROPE on the heads of one position."""
    pairs = len(ROPE.frequencies)
    turn = ROPE.magnitude * np.exp(1j * position * np.array(ROPE.frequencies))
    spun = (x[:, :pairs] + 1j * x[:, pairs : 2 * pairs]) * turn
    return np.concatenate([spun.real, spun.imag, x[:, 2 * pairs :]], axis=1)


@pytest.mark.parametrize(
    ("softcap", "with_sinks", "gated", "window"),
    [
        (0.0, False, False, 0),
        (3.0, False, False, 6),
        (0.0, True, False, 5),
        (0.0, False, True, 0),
        (2.0, True, True, 3),
    ],
)
def test_attention_in_all_its_forms(softcap: float, with_sinks: bool, gated: bool, window: int) -> None:
    step = 2 * DIM if gated else DIM
    q, k, v = Buffer("q", HEADS * step), Buffer("k", KV_HEADS * DIM), Buffer("v", KV_HEADS * DIM)
    out = Buffer("out", HEADS * DIM)
    weights = {"qn": normal(DIM), "kn": normal(DIM), "sinks": normal(HEADS)}
    norms = {"q_norm": Weight("qn", 1, DIM), "k_norm": Weight("kn", 1, DIM), "norm_eps": 0.1}
    sinks = Weight("sinks", 1, HEADS) if with_sinks else None
    ops = [
        RopeStore(q, k, v, 0, HEADS, KV_HEADS, DIM, ROPE, q_step=step, v_norm=gated, **norms),
        Attention(q, out, 0, HEADS, KV_HEADS, DIM, 0.4, window, softcap, sinks, step, gated),
    ]
    kv = KvPool((KvLayer(KV_HEADS, DIM),), 8 * PAGE_LEN, QuantType.F32)
    given = {"q": normal(SEEN, q.width), "k": normal(SEEN, k.width), "v": normal(SEEN, v.width)}
    program = bound(ops, weights, kv)
    got = program.run_from(batch((1, 0, SEEN)), given)["out"].reshape(SEEN, HEADS, DIM)

    both = given["q"].reshape(SEEN, HEADS, step)
    keys = [turned(rms(row, weights["kn"], 0.1), p) for p, row in enumerate(given["k"].reshape(SEEN, KV_HEADS, DIM))]
    values = given["v"].reshape(SEEN, KV_HEADS, DIM)
    values = rms(values, 1.0, 0.1) if gated else values
    for p in range(SEEN):
        queries = turned(rms(both[p, :, :DIM], weights["qn"], 0.1), p)
        for head in range(HEADS):
            seen = [j for j in range(p + 1) if not window or p - j < window]
            scores = np.array([0.4 * queries[head] @ keys[j][head // 2] for j in seen])
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            powers = np.exp(scores)
            total = powers.sum() + (math.exp(weights["sinks"][head]) if with_sinks else 0.0)
            want = powers @ np.stack([values[j, head // 2] for j in seen]) / total
            if gated:
                want = want * sigmoid(both[p, head, DIM:])
            assert np.abs(got[p, head] - want).max() < EXACT


def test_a_large_sink_overflows_nothing() -> None:
    q, k, v, out = Buffer("q", DIM), Buffer("k", DIM), Buffer("v", DIM), Buffer("out", DIM)
    ops = [
        RopeStore(q, k, v, 0, 1, 1, DIM, None),
        Attention(q, out, 0, 1, 1, DIM, 1.0, sinks=Weight("s", 1, 1)),
    ]
    program = bound(ops, {"s": np.array([5000.0])}, KvPool((KvLayer(1, DIM),), 8 * PAGE_LEN, QuantType.F32))
    got = program.run_from(batch((0, 0, 3)), {name: normal(3, DIM) for name in "qkv"})["out"]
    assert np.array_equal(got, np.zeros((3, DIM)))


def test_a_layer_may_read_the_rows_of_another_one() -> None:
    """Without k and v nothing is stored; q is treated all the same."""
    q, k, v, p = Buffer("q", DIM), Buffer("k", DIM), Buffer("v", DIM), Buffer("p", DIM)
    first, second = Buffer("first", DIM), Buffer("second", DIM)
    ops = [
        RopeStore(q, k, v, 0, 1, 1, DIM, ROPE),
        Attention(q, first, 0, 1, 1, DIM, 1.0),
        RopeStore(p, None, None, 0, 1, 1, DIM, ROPE),
        Attention(p, second, 0, 1, 1, DIM, 1.0),
    ]
    kv = KvPool((KvLayer(1, DIM),), 8 * PAGE_LEN, QuantType.F32)
    rows = {name: normal(5, DIM) for name in "qkv"}
    got = bound(ops, {}, kv).run_from(batch((0, 0, 5)), rows | {"p": rows["q"]})
    assert np.array_equal(got["second"], got["first"])
    other = bound(ops, {}, kv).run_from(batch((0, 0, 5)), rows | {"p": normal(5, DIM)})
    assert np.array_equal(other["first"], got["first"]) and not np.allclose(other["second"], got["first"])


# ----------------------------------------------------------------------------------------------- activations, small ops


def act(kind: str, gate: float, up: float) -> float:
    match kind:
        case "silu":
            return gate / (1 + math.exp(-gate)) * up
        case "gelu":
            return 0.5 * gate * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
        case _:
            held, within = min(gate, 7.0), max(-7.0, min(up, 7.0))
            return held / (1 + math.exp(-1.702 * held)) * (within + 1)


@pytest.mark.parametrize("kind", GATES)
def test_activations(kind: str) -> None:
    gate, up, out = (Buffer(name, 9) for name in ("gate", "up", "out"))
    given = {"gate": np.linspace(-9, 9, 18).reshape(2, 9), "up": np.linspace(12, -12, 18).reshape(2, 9)}
    got = bound([GatedActivation(gate, up, out, kind)], {}).run_from(batch((0, 0, 2)), given)["out"]
    want = [act(kind, g, u) for g, u in zip(given["gate"].ravel(), given["up"].ravel(), strict=True)]
    assert np.abs(got.ravel() - want).max() < EXACT


@pytest.mark.parametrize("kind", GATES)
def test_activations_at_the_ends_are_finite(kind: str) -> None:
    far = np.array([[-1e4, 1e4]], np.float32)
    assert np.isfinite(GATES[kind](far, np.ones((1, 2), np.float32))).all()


def test_add_gated_and_softcap() -> None:
    x, update, gate = Buffer("x", 6), Buffer("update", 6), Buffer("gate", 1)
    given = {"x": normal(3, 6), "update": normal(3, 6), "gate": normal(3, 1)}
    ops = [AddGated(update, x, gate), AddGated(update, x), Softcap(x, 1.5)]
    got = bound(ops, {}).run_from(batch((0, 0, 3)), given)["x"]
    summed = given["x"] + given["update"] * (sigmoid(given["gate"]) + 1)
    assert np.abs(got - 1.5 * np.tanh(summed / 1.5)).max() < EXACT


@pytest.mark.parametrize("last", ["linear", "softcap"])
def test_the_logits_are_what_the_last_op_writes(last: str) -> None:
    x, logits = Buffer("x", 6), Buffer("logits", 3)
    ops: list[Op] = [Linear(x, (LinearPart(Weight("w", 3, 6), logits),))]
    ops += [Softcap(logits, 0.5)] if last == "softcap" else []
    weight, rows = normal(3, 6), normal(2, 6)
    program = bound([*ops], {"w": weight})
    got = program.run_from(batch((0, 0, 2)), {"x": rows})["logits"]
    plain = rows @ weight.T
    assert np.abs(got - (0.5 * np.tanh(plain / 0.5) if last == "softcap" else plain)).max() < EXACT
    assert program.memory_lines()["workspace"] == ROWS * 8 * 3


# -------------------------------------------------------------------------------------------------------------- experts

COUNT, USED, WIDTH, HIDDEN = 6, 3, 5, 7


def routed(
    logits: np.ndarray, routing: Routing, selection: np.ndarray | None, gains: np.ndarray | None
) -> dict[int, float]:
    """One row's experts and weights, chosen by sorting pairs."""
    match routing.func:
        case "softmax":
            scores = np.exp(logits) / np.exp(logits).sum()
        case "sigmoid":
            scores = sigmoid(logits)
        case _:
            scores = logits
    ranked = scores if selection is None else scores + selection
    best = sorted(range(len(logits)), key=lambda e: (-ranked[e], e))[: routing.used]
    weights = {e: float(scores[e]) for e in best}
    if routing.func == "chosen":
        total = sum(math.exp(w) for w in weights.values())
        weights = {e: math.exp(w) / total for e, w in weights.items()}
    if routing.normalise:
        total = max(sum(weights.values()), 6.1035e-5)
        weights = {e: w / total for e, w in weights.items()}
    return {e: w * routing.scale * (1.0 if gains is None else float(gains[e])) for e, w in weights.items()}


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "routing",
    [
        Routing(COUNT, USED),
        Routing(COUNT, USED, normalise=False),
        Routing(COUNT, USED, "sigmoid", scale=2.5, selection=Weight("chooser", 1, COUNT)),
        Routing(COUNT, USED, "chosen", normalise=False),
        Routing(COUNT, 1, "softmax", normalise=False, selection=Weight("chooser", 1, COUNT)),
        Routing(COUNT, USED, scale=0.5, gains=Weight("gains", 1, COUNT)),
    ],
    ids=["softmax", "raw", "sigmoid", "chosen", "one", "gains"],
)
def test_experts(routing: Routing, fused: bool, kind: str) -> None:
    src, logits, out = Buffer("src", HIDDEN), Buffer("logits", COUNT), Buffer("out", HIDDEN)
    pitch = 2 * WIDTH if fused else WIDTH
    stack, biases = normal(COUNT * 2 * WIDTH, HIDDEN), normal(COUNT * 2 * WIDTH)
    down, down_bias = normal(COUNT * HIDDEN, WIDTH), normal(COUNT * HIDDEN)
    weights = {"down": down, "down_b": down_bias, "chooser": normal(COUNT), "gains": normal(COUNT)}
    gates, ups, gate_bias, up_bias = (
        part
        for whole in (stack.reshape(COUNT, 2, WIDTH, HIDDEN), biases.reshape(COUNT, 2, WIDTH))
        for part in (whole[:, 0], whole[:, 1])
    )
    if fused:
        weights |= {"gu": stack, "gu_b": biases}
        names = {"gate": ("gu", "gu_b", 0), "up": ("gu", "gu_b", WIDTH)}
    else:
        weights |= {"g": gates.reshape(-1, HIDDEN), "g_b": gate_bias.ravel(), "u": ups.reshape(-1, HIDDEN)}
        weights["u_b"] = up_bias.ravel()
        names = {"gate": ("g", "g_b", 0), "up": ("u", "u_b", 0)}
    gate, up = (
        ExpertMatrix(Weight(name, COUNT * pitch, HIDDEN), WIDTH, pitch, first, Weight(bias, 1, COUNT * pitch))
        for name, bias, first in names.values()
    )
    last = ExpertMatrix(Weight("down", COUNT * HIDDEN, WIDTH), HIDDEN, HIDDEN, 0, Weight("down_b", 1, COUNT * HIDDEN))
    rows = 5
    given = {"src": normal(rows, HIDDEN), "logits": normal(rows, COUNT)}
    given["logits"][1] = 0.25  # All equal: the lower indices win.
    program = bound([Experts(src, logits, out, routing, gate, up, last, kind)], weights)
    got = program.run_from(batch((0, 0, rows)), given)["out"]
    for row in range(rows):
        x, want = given["src"][row], np.zeros(HIDDEN)
        selection = weights["chooser"] if routing.selection else None
        gains = weights["gains"] if routing.gains else None
        for e, weight in routed(given["logits"][row], routing, selection, gains).items():
            g, u = gates[e] @ x + gate_bias[e], ups[e] @ x + up_bias[e]
            inner = np.array([act(kind, a, b) for a, b in zip(g, u, strict=True)])
            want += weight * (down.reshape(COUNT, HIDDEN, WIDTH)[e] @ inner + down_bias.reshape(COUNT, HIDDEN)[e])
        assert np.abs(got[row] - want).max() < EXACT
    alone = [
        program.run_from(batch((0, 0, 1)), {n: values[row : row + 1] for n, values in given.items()})["out"]
        for row in range(rows)
    ]
    assert np.array_equal(np.concatenate(alone), got), "a row's result depends on the other rows"


# ------------------------------------------------------------------------------------------------------------ delta net

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, KERNEL = 2, 6, 4, 3, 4
KEYS, VALUES = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
CHANNELS = 2 * KEYS + VALUES
EPS = 1e-6
LAYER = StateLayer(CHANNELS, KERNEL, VALUE_HEADS, KEY_DIM, VALUE_DIM)
DELTA_WEIGHTS = {
    "conv": normal(CHANNELS, KERNEL),
    "dt": normal(VALUE_HEADS),
    "a": -np.exp(normal(VALUE_HEADS) - 1),
    "norm": normal(VALUE_DIM),
}


def delta_op(tiled: bool, layer: int = 0) -> DeltaNet:
    mixed, z, out = Buffer("mixed", CHANNELS), Buffer("z", VALUES), Buffer("out", VALUES)
    beta, alpha = Buffer("beta", VALUE_HEADS), Buffer("alpha", VALUE_HEADS)
    conv, dt, a = Weight("conv", CHANNELS, KERNEL), Weight("dt", 1, VALUE_HEADS), Weight("a", 1, VALUE_HEADS)
    norm = Weight("norm", 1, VALUE_DIM)
    sizes = (KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, KERNEL, EPS, tiled)
    return DeltaNet(mixed, z, beta, alpha, out, layer, conv, dt, a, norm, *sizes)


def delta_program(tiled: bool = False, slots: int = 4) -> ReferenceProgram:
    return bound([delta_op(tiled)], DELTA_WEIGHTS, states=StatePool((LAYER,), slots))


def delta_rows(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    widths = {"mixed": CHANNELS, "z": VALUES, "beta": VALUE_HEADS, "alpha": VALUE_HEADS}
    return {name: rng.standard_normal((rows, width)) for name, width in widths.items()}


def chunked_rule(given: Mapping[str, np.ndarray], tiled: bool, chunk: int) -> np.ndarray:
    """The whole sequence by the chunked form: triangular systems instead of a recurrence."""
    rows = len(given["mixed"])
    padded = np.concatenate([np.zeros((KERNEL - 1, CHANNELS)), given["mixed"]])
    c = sum(padded[j : j + rows] * DELTA_WEIGHTS["conv"][:, j] for j in range(KERNEL))
    c = c * sigmoid(c)
    q, k = (c[:, at : at + KEYS].reshape(rows, KEY_HEADS, KEY_DIM) for at in (0, KEYS))
    v = c[:, 2 * KEYS :].reshape(rows, VALUE_HEADS, VALUE_DIM)
    q, k = (x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + EPS) for x in (q, k))
    g = np.log1p(np.exp(given["alpha"] + DELTA_WEIGHTS["dt"])) * DELTA_WEIGHTS["a"]
    b = sigmoid(given["beta"])
    out = np.empty((rows, VALUE_HEADS, VALUE_DIM))
    for head in range(VALUE_HEADS):
        key_head = head % KEY_HEADS if tiled else head // (VALUE_HEADS // KEY_HEADS)
        m = np.zeros((KEY_DIM, VALUE_DIM))
        for at in range(0, rows, chunk):
            part = slice(at, min(at + chunk, rows))
            queries, keys, values = q[part, key_head] / math.sqrt(KEY_DIM), k[part, key_head], v[part, head]
            beta, total = np.diag(b[part, head]), np.cumsum(g[part, head])
            decay = np.tril(np.exp(np.minimum(total[:, None] - total[None, :], 0)))
            system = np.eye(len(total)) + np.tril(beta @ (keys @ keys.T) * decay, -1)
            fresh = np.linalg.solve(system, beta @ (values - np.exp(total)[:, None] * (keys @ m)))
            out[part, head] = np.exp(total)[:, None] * (queries @ m) + (queries @ keys.T * decay) @ fresh
            m = math.exp(total[-1]) * m + (np.exp(total[-1] - total)[:, None] * keys).T @ fresh
    z = given["z"].reshape(out.shape)
    return (rms(out, DELTA_WEIGHTS["norm"], EPS) * z * sigmoid(z)).reshape(rows, VALUES)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_the_recurrence_equals_the_chunked_rule(tiled: bool, chunk: int) -> None:
    given = delta_rows(32)
    got = delta_program(tiled).run_from(batch((0, 0, 32)), given)["out"]
    assert np.abs(got - chunked_rule(given, tiled, chunk)).max() < EXACT


def test_tiled_and_grouped_heads_differ() -> None:
    given = delta_rows(5)
    assert not np.allclose(chunked_rule(given, True, 5), chunked_rule(given, False, 5))


def test_chunks_and_neighbours_do_not_change_a_bit() -> None:
    given, other = delta_rows(20), delta_rows(20, seed=1)
    whole = delta_program().run_from(batch((0, 0, 20)), given)["out"]
    program, states = delta_program(), (3, 1, 0)
    pieces = []
    for (first, end), (others, stop) in (((0, 1), (0, 9)), ((1, 8), (9, 10)), ((8, 20), (10, 20))):
        mixed = {n: np.concatenate([other[n][others:stop], given[n][first:end]]) for n in given}
        rows = batch((1, others, stop), (0, first, end), states=states)
        pieces.append(program.run_from(rows, mixed)["out"][stop - others :])
    assert np.array_equal(np.concatenate(pieces), whole)


def test_a_row_at_position_zero_forgets_what_its_slot_held() -> None:
    given, program = delta_rows(6), delta_program()
    first = program.run_from(batch((0, 0, 6)), given)["out"]
    assert np.array_equal(program.run_from(batch((0, 0, 6)), given)["out"], first)


def test_copied_states_continue_as_the_original_would() -> None:
    given, program = delta_rows(12), delta_program()
    whole = delta_program().run_from(batch((0, 0, 12)), given)["out"]
    head, tail = ({n: values[part] for n, values in given.items()} for part in (slice(0, 5), slice(5, 12)))
    program.run_from(batch((0, 0, 5)), head)
    program.copy_states([(0, 2), (2, 3)])
    for slot in (0, 3):
        got = program.run_from(batch((0, 5, 12), states=(slot, 1, 1)), tail)["out"]
        assert np.array_equal(got, whole[5:]), f"slot {slot}"
    assert program.memory_lines()["state"] == 4 * 8 * (3 * CHANNELS + VALUE_HEADS * KEY_DIM * VALUE_DIM)
    program.close()
    assert program.memory_lines()["state"] == 0


def test_states_of_layers_are_apart() -> None:
    given = delta_rows(4)
    ops = [delta_op(False), replace(delta_op(False, layer=1), out=Buffer("again", VALUES))]
    program = bound(ops, DELTA_WEIGHTS, states=StatePool((LAYER, LAYER), 3))
    got = program.run_from(batch((0, 0, 4)), given)
    assert np.array_equal(got["out"], got["again"])
    assert np.array_equal(program.states.conv[1][0], given["mixed"][1:])


# ------------------------------------------------------------------------------------------------- rounding of KV types


def test_f8_is_the_nearest_of_all_its_numbers() -> None:
    exponents, mantissas = np.arange(16), np.arange(8)
    normals = (1 + mantissas / 8) * 2.0 ** (exponents[1:, None] - 7)
    numbers = np.concatenate([mantissas * 2.0**-9, normals.ravel()[:-1]])  # The last code is no number.
    assert numbers.max() == 448.0
    numbers = np.unique(np.concatenate([-numbers, numbers]))
    assert np.array_equal(round_f8(numbers), numbers)
    values = np.concatenate([normal(500) * 10.0 ** RNG.uniform(-4, 3, 500), [1e9, -1e9, 0.0, 2.0**-11]])
    held = np.clip(values, -448, 448)
    nearest = np.abs(held[:, None] - numbers).min(axis=1)
    assert np.array_equal(np.abs(round_f8(values) - held), nearest)
    ties = np.array([17.0, 19.0, 1.0625, 1.1875])
    assert round_f8(ties).tolist() == [16.0, 20.0, 1.0, 1.25]


@pytest.mark.parametrize("dim", [16, 32, 80])
def test_q8_0_holds_whole_steps_of_a_scale_of_its_block(dim: int) -> None:
    rows = normal(3, 2, dim)
    rows[0, 0] = 0
    got = round_q8_0(rows)
    for row, kept in zip(rows.reshape(-1, dim), got.reshape(-1, dim), strict=True):
        for at in range(0, dim, 32):
            block, stored = row[at : at + 32], kept[at : at + 32]
            scale = float(np.float16(np.float32(np.abs(block).max()) / np.float32(127)))
            assert np.abs(stored - block).max() <= 0.51 * scale + 1e-3 * np.abs(block).max()
            assert np.unique(np.round(stored / (scale or 1), 6) % 1).tolist() in ([0.0], [])


@pytest.mark.parametrize("kind", [QuantType.Q8_0, QuantType.F8])
def test_a_pool_gives_back_what_its_type_keeps(kind: QuantType) -> None:
    program = bound([], {}, KvPool((KvLayer(2, 32),), 2 * PAGE_LEN, kind))
    k, v, slots = normal(3, 2, 32), normal(3, 2, 32), np.array([5, 31, 0], np.int32)
    program.pools.store(0, slots, k, v)
    keep = round_q8_0 if kind is QuantType.Q8_0 else round_f8
    for given, got in zip((k, v), program.pools.rows(0, slots), strict=True):
        assert np.array_equal(got, keep(given)) and not np.array_equal(got, given)


def test_scale_multiplies_a_buffer_by_one_weight() -> None:
    x = Buffer("x", 8)
    given = normal(3, 8)
    ops = [Scale(x, Weight("s", 1, 1))]
    got = bound(ops, {"s": np.array([0.75])}).run_from(batch((0, 0, 3)), {"x": given})["x"]
    assert np.array_equal(got, given * 0.75)
