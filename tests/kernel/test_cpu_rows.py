"""The ops that work on rows: norm, gate, selection; whole programs; and batches that must be refused."""

from __future__ import annotations

from dataclasses import replace

import kernel_rig as rig
import numpy as np
import pytest

from backends.base import (
    AddGated,
    Attention,
    Batch,
    Buffer,
    Capability,
    EmbedRows,
    GatedActivation,
    KvLayer,
    KvPool,
    Linear,
    LinearPart,
    Norm,
    Op,
    RopeStore,
    Scale,
    SelectRows,
    Softcap,
    TensorView,
    Unsupported,
    Weight,
)
from backends.cpu import abi
from backends.quant import QuantType

WIDTHS = (1, 16, 50, 576, 1000)


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("width", WIDTHS)
def test_norm_and_residual(level: str, width: int) -> None:
    random = np.random.default_rng(width)
    x, y = (random.standard_normal((9, width)).astype(np.float32) for _ in range(2))
    weight = random.standard_normal(width).astype(np.float32)
    (feed_x, table_x, bx), (feed_y, table_y, by) = rig.feed("x", x), rig.feed("y", y)
    out, again = Buffer("out", width), Buffer("again", width)
    named = Weight("w", 1, width)
    ops: list[Op] = [feed_x, feed_y, Norm(bx, named, 1e-5, out, add=by), Norm(bx, named, 1e-5, again)]
    program = rig.bind(rig.backend(level), ops, [table_x, table_y, rig.vector_of("w", weight)])
    got = program.run(rig.plain_batch(9)).copy()
    program.close()
    want = normed(x.astype(np.float64) + y, weight.astype(np.float64), 1e-5)
    rig.close_to(got, want, np.abs(want) + 1e-3, 2e-6)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(x / 2))


def activated(kind: str, g: np.ndarray, u: np.ndarray) -> np.ndarray:
    match kind:
        case "silu":
            return g * sigmoid(g) * u
        case "gelu":
            return 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u
        case _:
            held = np.minimum(g, 7)
            return held * sigmoid(1.702 * held) * (np.clip(u, -7, 7) + 1)


@pytest.mark.parametrize("kind", abi.GATES)
@pytest.mark.parametrize("width", (1, 40, 520))
def test_gate(level: str, kind: str, width: int) -> None:
    gate = np.linspace(-120, 120, 9 * width).reshape(9, width).astype(np.float32)
    gate[0] *= 0.01
    up = (np.random.default_rng(1).standard_normal((9, width)) * 5).astype(np.float32)
    (feed_g, table_g, bg), (feed_u, table_u, bu) = rig.feed("g", gate), rig.feed("u", up)
    program = rig.bind(rig.backend(level), [feed_g, feed_u, GatedActivation(bg, bu, bg, kind)], [table_g, table_u])
    got = program.run(rig.plain_batch(9)).copy()
    program.close()
    want = activated(kind, gate.astype(np.float64), up.astype(np.float64))
    rig.close_to(got, want, np.abs(want) + (np.abs(up) + 1) * 1e-2, 1e-6)


@pytest.mark.parametrize("kind", abi.GATES)
def test_what_is_no_number_comes_out_of_a_gate(level: str, kind: str) -> None:
    gate, up = np.ones((2, 3, 16), np.float32)
    gate[0, 3] = up[1, 4] = np.nan
    (feed_g, table_g, bg), (feed_u, table_u, bu) = rig.feed("g", gate), rig.feed("u", up)
    program = rig.bind(rig.backend(level), [feed_g, feed_u, GatedActivation(bg, bu, bg, kind)], [table_g, table_u])
    got = program.run(rig.plain_batch(3)).copy()
    program.close()
    assert {tuple(at) for at in np.argwhere(np.isnan(got)).tolist()} == {(0, 3), (1, 4)}


@pytest.mark.parametrize("width", (1, 50, 1040))
def test_softcap(level: str, width: int) -> None:
    random = np.random.default_rng(width)
    x = (random.standard_normal((7, width)) * 10.0 ** random.uniform(-6, 5, (7, 1))).astype(np.float32)
    x[0, 0] = np.nan
    feed, table, buffer = rig.feed("x", x)
    program = rig.bind(rig.backend(level), [feed, Softcap(buffer, 30.0)], [table])
    got = program.run(rig.plain_batch(7)).copy()
    program.close()
    assert np.isnan(got[0, 0])
    got[0, 0] = x[0, 0] = 0.0
    want = 30.0 * np.tanh(x.astype(np.float64) / 30.0)
    rig.close_to(got, want, np.abs(want), 1e-6)
    assert np.abs(got).max() <= 30.0


@pytest.mark.parametrize("kind", (QuantType.F32, QuantType.BF16), ids=lambda kind: kind.name)
@pytest.mark.parametrize("width", (1, 50, 1040))
def test_scale(level: str, width: int, kind: QuantType) -> None:
    x = np.random.default_rng(width).standard_normal((7, width)).astype(np.float32)
    x[0, 0] = np.nan
    feed, table, buffer = rig.feed("x", x)
    factor = np.array([-0.8125], np.float32)
    packed = np.frombuffer(factor.tobytes(), np.uint8)[-kind.block_bytes :]  # a bfloat16 is a float's upper half
    program = rig.bind(
        rig.backend(level), [feed, Scale(buffer, Weight("s", 1, 1))], [table, TensorView("s", kind, 1, 1, packed)]
    )
    got = program.run(rig.plain_batch(7)).copy()
    program.close()
    assert np.array_equal(got, x * factor[0], equal_nan=True)


@pytest.mark.parametrize("threads", (1, 2, 3, 5))
def test_each_part_of_a_step_is_done_once_by_whichever_thread(level: str, threads: int) -> None:
    """Steps of no more parts than threads, of some, and of more than a thread's share can count one by one (team.cpp):
    what is done twice is scaled twice."""
    x = np.random.default_rng(threads).standard_normal((70000, 1)).astype(np.float32)
    feed, table, buffer = rig.feed("x", x)
    ops = [feed, *(Scale(buffer, Weight("s", 1, 1)) for _ in range(3))]
    weights = [table, rig.vector_of("s", np.array([-0.5], np.float32))]
    program = rig.bind(rig.backend(level, threads), ops, weights, rows=len(x), lane_pages=len(x) // 16)
    for rows in (1, 2, 3, 4, 7, 65535, 65536, 70000):
        assert np.array_equal(program.run(rig.plain_batch(rows)), x[:rows] * np.float32(-0.125)), rows
    program.close()


@pytest.mark.parametrize("gated", (True, False))
@pytest.mark.parametrize("width", (1, 50, 1040))
def test_add_gated(level: str, width: int, gated: bool) -> None:
    random = np.random.default_rng(width)
    x, into = (random.standard_normal((7, width)).astype(np.float32) for _ in range(2))
    gate = np.array([[-100], [-5], [-0.1], [0], [0.1], [5], [100]], np.float32)
    feeds = [rig.feed(name, values) for name, values in (("x", x), ("into", into), ("gate", gate))]
    (_, _, bx), (_, _, binto), (_, _, bgate) = feeds
    ops: list[Op] = [*(feed for feed, _, _ in feeds), AddGated(bx, binto, bgate if gated else None)]
    program = rig.bind(rig.backend(level), ops, [table for _, table, _ in feeds])
    got = program.run(rig.plain_batch(7)).copy()
    program.close()
    factor = sigmoid(gate.astype(np.float64)) if gated else 1.0
    rig.close_to(got, into + factor * x.astype(np.float64), np.abs(into) + np.abs(x), 4e-7)


def test_half_precision_vectors_are_norm_weights_too(level: str) -> None:
    x = np.random.default_rng(2).standard_normal((3, 48)).astype(np.float32)
    weight = np.random.default_rng(3).standard_normal(48).astype(np.float32)
    feed, table, source = rig.feed("x", x)
    for kind in ("F16", "BF16"):
        data = rig.gguf.quantize(weight[None], rig.gguf.GGMLQuantizationType[kind])
        meaning = rig.gguf.dequantize(data, rig.gguf.GGMLQuantizationType[kind]).astype(np.float64)
        view = TensorView("w", QuantType[kind], 1, 48, data.view(np.uint8).reshape(-1))
        program = rig.bind(
            rig.backend(level), [feed, Norm(source, Weight("w", 1, 48), 1e-6, Buffer("out", 48))], [table, view]
        )
        got = program.run(rig.plain_batch(3)).copy()
        program.close()
        want = normed(x.astype(np.float64), meaning, 1e-6)
        rig.close_to(got, want, np.abs(want) + 1e-3, 2e-6)


def head_program(level: str, threads: int = 2) -> tuple[object, rig.F32, rig.F32, rig.F32]:
    """embed, select with residual, norm, packed head: what follows SelectRows works on the selected rows alone."""
    random = np.random.default_rng(5)
    x, extra = (random.standard_normal((20, 64)).astype(np.float32) for _ in range(2))
    view, meaning = rig.weights_of("Q8_0", 90, 64)
    (feed_x, table_x, bx), (feed_e, table_e, be) = rig.feed("x", x), rig.feed("e", extra)
    kept, hidden, logits = Buffer("kept", 64), Buffer("hidden", 64), Buffer("logits", 90)
    ops: list[Op] = [
        feed_x,
        feed_e,
        SelectRows(bx, kept, add=be),
        Norm(kept, Weight("w", 1, 64), 1e-5, hidden),
        Linear(hidden, (LinearPart(Weight(view.name, 90, 64), logits),)),
    ]
    weights = [table_x, table_e, view, rig.vector_of("w", np.ones(64, np.float32))]
    return rig.bind(rig.backend(level, threads), ops, weights, rows=20, logit_rows=4), x, extra, meaning


def test_selected_rows_alone_reach_the_head(level: str) -> None:
    program, x, extra, meaning = head_program(level)
    for wanted in ([3], [0, 7, 19], [], [1, 2, 3, 4]):
        got = program.run(rig.plain_batch(20, wanted)).copy()
        assert got.shape == (len(wanted), 90)
        if not wanted:
            continue
        hidden = normed(x[wanted].astype(np.float64) + extra[wanted], np.ones(64), 1e-5)
        seen = rig.int16_rounded(hidden.astype(np.float32))
        rig.close_to(got, seen @ meaning.T.astype(np.float64), np.abs(seen) @ np.abs(meaning.T), 3e-5)
    program.close()


def test_a_batch_outside_its_bounds_is_refused(level: str) -> None:
    program, *_ = head_program(level)
    good = rig.plain_batch(20, [0])

    def spoiled(**fields: np.ndarray) -> Batch:
        batch = rig.plain_batch(20, [0])
        for name, value in fields.items():
            setattr(batch, name, value)
        return batch

    minus, far = np.full(20, -1, np.int32), np.full(20, 20, np.int32)
    for bad in (
        spoiled(tokens=minus),
        spoiled(tokens=far),
        spoiled(logit_rows=np.array([20], np.int32)),
        spoiled(logit_rows=np.arange(5, dtype=np.int32)),
        spoiled(positions=minus),
        rig.plain_batch(21, [0]),
        spoiled(slots=np.zeros(3, np.int32)),
    ):
        with pytest.raises(ValueError):
            program.run(bad)
    assert program.run(good).shape == (1, 90)
    program.close()


def test_a_page_or_slot_outside_the_pool_is_refused(level: str) -> None:
    feed, table, buffer = rig.feed("q", np.ones((4, 32), np.float32))
    ops: list[Op] = [feed, RopeStore(buffer, buffer, buffer, 0, 2, 2, 16, None)]
    ops.append(Attention(buffer, Buffer("out", 32), 0, 2, 2, 16, 1.0))
    program = rig.bind(
        rig.backend(level), ops, [table], KvPool((KvLayer(2, 16),), 32, QuantType.F16), rows=4, lanes=2, lane_pages=2
    )
    zeros = np.zeros(1, np.int32)

    def run(slot: int, lane: int, position: int, page: int) -> None:
        tables = np.full((2, 2), page, np.int32)
        number = [np.array([value], np.int32) for value in (position, slot, lane)]
        number[1] = number[1][None]
        program.run(Batch(zeros, *number, tables[None], np.zeros(0, np.int32)))

    run(31, 1, 31, 1)
    for slot, lane, position, page in (
        (32, 0, 0, 0),
        (-1, 0, 0, 0),
        (0, 2, 0, 0),
        (0, 0, 32, 0),
        (0, 0, 0, 2),
        (0, 0, 0, -1),
    ):
        with pytest.raises(ValueError):
            run(slot, lane, position, page)
    program.close()


def test_everything_that_is_missing_is_named(level: str) -> None:
    feed, table, x = rig.feed("x", np.ones((2, 256), np.float32))
    strange = TensorView("strange", QuantType.IQ1_S, 16, 256, np.zeros(16 * 50, np.uint8))
    whole = TensorView("whole", QuantType.I32, 1, 256, np.zeros(1024, np.uint8))
    ops: list[Op] = [
        feed,
        Norm(x, Weight("whole", 1, 256), 1e-5, x),
        EmbedRows(Weight("strange", 16, 256), x),
        Linear(x, (LinearPart(Weight("strange", 16, 256), Buffer("y", 16)),)),
        GatedActivation(x, x, x, "swish7"),
    ]
    with pytest.raises(Unsupported) as refused:
        rig.bind(rig.backend(level), ops, [table, strange, whole])
    assert {(entry.op, entry.type) for entry in refused.value.missing} == {
        ("Norm", "I32"),
        ("EmbedRows", "IQ1_S"),
        ("Linear", "IQ1_S"),
        ("GatedActivation", "swish7"),
    }
    assert all(entry.ok is not True for entry in refused.value.missing)
    assert Capability("GatedActivation", "swish7", None) in refused.value.missing


def test_memory_that_the_system_refuses_is_an_error_with_arithmetic(level: str) -> None:
    feed, table, q = rig.feed("q", np.ones((2, 16), np.float32))
    pool = KvPool((KvLayer(1, 16),), 2**42, QuantType.F32)
    with pytest.raises(MemoryError, match=r"kv needs \d+ bytes .* = 4398046511104 slots of 128 bytes in 1 layers"):
        rig.bind(rig.backend(level), [feed, RopeStore(q, q, q, 0, 1, 1, 16, None)], [table], pool)


@pytest.mark.parametrize("kind", ("F32", "Q8_0", "Q4_K"))
@pytest.mark.parametrize("first", (0, 17, 100))
def test_tokens_whose_row_is_elsewhere_give_zeros(level: str, kind: str, first: int) -> None:
    """A table of rows `first` .. `first` + 19 of a vocabulary; which tokens there are is checked by nobody here."""
    view, meaning = rig.weights_of(kind, 20, 256)
    embed = EmbedRows(Weight(view.name, 20, 256), Buffer("x", 256), 1.5, first)
    program = rig.bind(rig.backend(level), [embed], [view])
    tokens = np.array(
        [first - 1, first, first + 7, first + 19, first + 20, 10**6, first + 7, 2**31 - 1, -(2**31)], np.int32
    )
    got = program.run(replace(rig.plain_batch(len(tokens)), tokens=tokens)).copy()
    program.close()
    want = np.zeros((len(tokens), 256), np.float32)
    here = (tokens >= first) & (tokens < first + 20)
    assert here.sum() == 4
    want[here] = meaning[tokens[here] - first] * np.float32(1.5)
    assert np.array_equal(got, want)


def test_a_whole_table_beside_a_part_of_one_still_bounds_the_tokens(level: str) -> None:
    view, _ = rig.weights_of("F32", 20, 32)
    other, _ = rig.weights_of("F32", 8, 32, seed=1)
    part = EmbedRows(Weight(other.name, 8, 32), Buffer("y", 32), first=4)
    whole = EmbedRows(Weight(view.name, 20, 32), Buffer("x", 32))
    program = rig.bind(rig.backend(level), [part, whole], [view, other])
    batch = rig.plain_batch(1)
    program.run(replace(batch, tokens=np.array([19], np.int32)))
    for token in (20, -1):
        with pytest.raises(ValueError, match="outside"):
            program.run(replace(batch, tokens=np.array([token], np.int32)))
    program.close()
