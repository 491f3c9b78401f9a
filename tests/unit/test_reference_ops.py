"""The oracle against plain loops in double precision, and its promise: a row's result depends on that row alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from backends.base import (
    PAGE_LEN,
    Attention,
    Batch,
    Buffer,
    EmbedRows,
    KvLayer,
    KvPool,
    Limits,
    Linear,
    LinearPart,
    OpenOptions,
    Rope,
    RopeStore,
    TensorView,
    Weight,
)
from backends.quant import QuantType
from backends.reference.backend import ReferenceBackend
from backends.reference.compute import attend, linear, rms_norm, rotate, silu_gate
from backends.reference.dequant import bf16_to_f32, f32_to_bf16
from backends.reference.pools import Pools, slots_of

RNG = np.random.default_rng(20)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def test_linear_is_the_dot_product_of_every_pair() -> None:
    x, weight, bias = normal(3, 40), normal(300, 40), normal(300)
    exact = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
    assert np.abs(linear(x, weight, bias) - exact).max() < 1e-5
    assert np.abs(linear(x, weight) - (exact - bias)).max() < 1e-5


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16])
def test_linear_does_not_depend_on_the_other_rows(rows: int) -> None:
    x, weight = normal(16, 96), normal(530, 96)
    alone = np.concatenate([linear(x[i : i + 1].copy(), weight) for i in range(rows)])
    assert np.array_equal(linear(x[:rows].copy(), weight), alone)


def test_rms_norm() -> None:
    x, weight = normal(2, 24), normal(24)
    for row, got in zip(x, rms_norm(x, weight, 0.25), strict=True):
        root = math.sqrt(sum(float(v) ** 2 for v in row) / 24 + 0.25)
        assert got == pytest.approx(row / root * weight, rel=1e-5)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotate_turns_pairs_and_leaves_the_rest(interleaved: bool) -> None:
    heads = normal(2, 3, 10)
    frequencies = (1.0, 0.25, 0.0625)
    got = rotate(heads, np.array([0, 9], np.int32), frequencies, 1.5, interleaved=interleaved)
    assert np.array_equal(got[0, :, :6], heads[0, :, :6] * np.float32(1.5))
    assert np.array_equal(got[:, :, 6:], heads[:, :, 6:])
    for i, frequency in enumerate(frequencies):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + 3)
        turn = complex(math.cos(9 * frequency), math.sin(9 * frequency)) * 1.5
        turned = (heads[1, :, first] + 1j * heads[1, :, second]) * turn
        assert got[1, :, first] == pytest.approx(turned.real, abs=1e-5)
        assert got[1, :, second] == pytest.approx(turned.imag, abs=1e-5)


def test_rotate_at_a_far_position_keeps_its_digits() -> None:
    heads = np.array([[[1.0, 0.0]]], np.float32)
    got = rotate(heads, np.array([100_003], np.int32), (0.7,), 1.0, interleaved=True)
    assert got[0, 0] == pytest.approx([math.cos(100_003 * 0.7), math.sin(100_003 * 0.7)], abs=1e-6)


def test_attend_is_a_softmax_average_with_grouped_heads() -> None:
    q, k, v = normal(4, 8), normal(5, 2, 8), normal(5, 2, 8)
    got = attend(q, k, v, 0.3)
    for head in range(4):
        group = head // 2
        scores = [0.3 * float(q[head] @ k[j, group]) for j in range(5)]
        weights = [math.exp(score - max(scores)) for score in scores]
        average = sum(w * v[j, group] for j, w in enumerate(weights)) / sum(weights)
        assert got[head] == pytest.approx(average, abs=1e-5)


def test_silu_gate_at_the_ends() -> None:
    gate = np.array([[-1000.0, 0.0, 1.0, 1000.0]], np.float32)
    assert silu_gate(gate, np.full((1, 4), 2, np.float32))[0] == pytest.approx(
        [0.0, 0.0, 2 / (1 + math.exp(-1)), 2000.0]
    )


def test_bf16_rounds_to_nearest_even() -> None:
    exact = np.array([1.0, -2.5, 0.0], np.float32)
    assert np.array_equal(bf16_to_f32(f32_to_bf16(exact)), exact)
    ulp = 2.0**-7
    ties = np.array([1 + ulp / 2, 1 + 3 * ulp / 2, 1 + ulp / 2 + 1e-6], np.float32)
    assert bf16_to_f32(f32_to_bf16(ties)).tolist() == [1.0, 1 + 2 * ulp, 1 + ulp]


@pytest.mark.parametrize(
    ("kind", "error"), [(QuantType.F32, 0.0), (QuantType.F16, 2.0**-11), (QuantType.BF16, 2.0**-8)]
)
def test_pools_round_to_their_type_and_keep_slots_apart(kind: QuantType, error: float) -> None:
    pools = Pools(KvPool((KvLayer(2, 4),), 2 * PAGE_LEN, kind), np.dtype(np.float32))
    k, v = normal(3, 2, 4), normal(3, 2, 4)
    slots = np.array([5, 31, 0], np.int32)
    pools.store(0, slots, k, v)
    for given, got in zip((k, v), pools.rows(0, slots), strict=True):
        assert (np.abs(got - given) <= np.abs(given) * error).all()
        assert error == 0.0 or not np.array_equal(got, given)
    assert not pools.k[0][1].any()
    assert pools.nbytes() == 2 * 2 * PAGE_LEN * 8 * (4 if kind is QuantType.F32 else 2)


def test_slots_of_a_table_follow_its_pages() -> None:
    table = np.array([7, 2], np.int32)
    assert slots_of(table, 14, 18).tolist() == [7 * 16 + 14, 7 * 16 + 15, 2 * 16, 2 * 16 + 1]


# --------------------------------------------------------------------------------- attention of sequences in one batch


HEADS, KV_HEADS, DIM, VOCAB = 4, 2, 8, 30


def one_layer(kind: QuantType = QuantType.F32, dtype: str = "float32", window: int = 0):
    """Embedding, q/k/v, rope, attention: enough that a row's output depends on the rows before it."""
    rng = np.random.default_rng(3)
    shapes = {"embed": (VOCAB, 32), "wq": (32, 32), "wk": (16, 32), "wv": (16, 32)}
    weights = {}
    for name, (rows, cols) in shapes.items():
        values = rng.standard_normal((rows, cols), dtype=np.float32) * 0.3
        weights[name] = TensorView(name, QuantType.F32, rows, cols, np.frombuffer(values.tobytes(), np.uint8))
    x, out = Buffer("x", 32), Buffer("out", 32)
    q, k, v = Buffer("q", 32), Buffer("k", 16), Buffer("v", 16)
    rope = Rope(interleaved=True, frequencies=(1.0, 0.1, 0.01, 0.001))
    parts = tuple(LinearPart(Weight(n, b.width, 32), b) for n, b in (("wq", q), ("wk", k), ("wv", v)))
    ops = [
        EmbedRows(Weight("embed", VOCAB, 32), x),
        Linear(x, parts),
        RopeStore(q, k, v, 0, HEADS, KV_HEADS, DIM, rope),
        Attention(q, out, 0, HEADS, KV_HEADS, DIM, scale=0.4, window=window),
    ]
    backend = ReferenceBackend(OpenOptions(extra={"dtype": dtype}))
    kv = KvPool((KvLayer(KV_HEADS, DIM),), 8 * PAGE_LEN, kind)
    return backend.bind(ops, weights, kv, Limits(64, 64, 3, 2), lambda *_: None)


PAGES = np.array([[3, 0], [6, 1], [2, 5]], np.int32)


def batch(*pieces: tuple[int, int, int]) -> Batch:
    """Rows (lane, first position, end position); the token of a row follows from lane and position."""
    lanes = np.concatenate([np.full(end - first, lane, np.int32) for lane, first, end in pieces])
    positions = np.concatenate([np.arange(first, end, dtype=np.int32) for _, first, end in pieces])
    slots = PAGES[lanes, positions // PAGE_LEN] * PAGE_LEN + positions % PAGE_LEN
    tokens = (positions * 5 + lanes * 11 + 1) % VOCAB
    rows = len(tokens)
    return Batch(
        tokens.astype(np.int32),
        positions,
        slots.astype(np.int32)[None],
        lanes,
        PAGES[None],
        np.arange(rows, dtype=np.int32),
    )


@pytest.mark.parametrize("kind", [QuantType.F32, QuantType.F16, QuantType.BF16])
@pytest.mark.parametrize("window", [0, 5])
def test_rows_do_not_depend_on_the_batch_or_the_chunks(kind: QuantType, window: int) -> None:
    """The same bits: 20 rows at once, in chunks beside other sequences, and one by one."""
    whole = one_layer(kind, window=window).run_from(batch((0, 0, 20)), {})["out"]
    chunked = one_layer(kind, window=window)
    pieces = [
        chunked.run_from(batch((1, 0, 9), (0, 0, 7)), {})["out"][9:],
        chunked.run_from(batch((0, 7, 8), (1, 9, 12), (2, 0, 4)), {})["out"][:1],
        chunked.run_from(batch((2, 4, 20), (0, 8, 20)), {})["out"][16:],
    ]
    assert np.array_equal(np.concatenate(pieces), whole)
    single = one_layer(kind, window=window)
    stepped = [single.run_from(batch((0, at, at + 1)), {})["out"] for at in range(20)]
    assert np.array_equal(np.concatenate(stepped), whole)


def test_a_later_row_is_not_seen() -> None:
    program = one_layer()
    program.run_from(batch((0, 0, 20)), {})
    again = program.run_from(batch((0, 0, 6)), {})["out"]
    assert np.array_equal(again, one_layer().run_from(batch((0, 0, 6)), {})["out"])


def test_double_precision_differs_by_rounding_only() -> None:
    single, double = (one_layer(dtype=d).run_from(batch((0, 0, 20)), {})["out"] for d in ("float32", "float64"))
    assert double.dtype == np.float64
    assert 0 < np.abs(single - double).max() < 1e-5


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        ReferenceBackend(OpenOptions(extra={"dtype": "float16"}))


def test_what_cannot_fit_is_refused_with_the_arithmetic() -> None:
    huge = TensorView("huge", QuantType.F32, 1 << 20, 1 << 30, np.zeros(0, np.uint8))
    ops = [EmbedRows(Weight("huge", 1 << 20, 1 << 30), Buffer("x", 1 << 30))]
    with pytest.raises(MemoryError, match=rf"{1 << 52} bytes of float32 weights \+ 0 of KV pools and states"):
        ReferenceBackend(OpenOptions()).bind(
            ops, {"huge": huge}, KvPool((), 16, QuantType.F32), Limits(1, 1, 1, 1), lambda *_: None
        )


def test_memory_lines_say_what_is_held_and_close_lets_go() -> None:
    program = one_layer()
    held = program.memory_lines()
    assert held["weights"] == 4 * 32 * (VOCAB + 32 + 16 + 16)
    assert held["kv"] == 2 * 8 * PAGE_LEN * KV_HEADS * DIM * 4
    program.close()
    assert program.memory_lines()["weights"] == 0 and program.memory_lines()["kv"] == 0
