"""Linear layers and embeddings of every weight type against dequantised weights in float64.

Activations of packed types are rounded to int16, and the oracle rounds them the same way: what is left is the order of
a few float additions, so the tolerance is tight enough to see one wrong bit of one weight.
"""

from __future__ import annotations

import kernel_rig as rig
import numpy as np
import pytest

from backends.base import Batch, Buffer, EmbedRows, Linear, LinearPart, TensorView, Weight
from budget.host_lines import packed_tensor_bytes

# Tiles of few rows and of many, on both sides of where one way gives way to the other, and what is left over.
ROW_COUNTS = (1, 2, 3, 5, 12, 29, 75)
MANY = 72  # batch rows from which on every type is unpacked into memory first


def columns_of(kind: str) -> tuple[int, ...]:
    return (256, 768) if kind in rig.K_TYPES else (32, 96, 416) if kind in rig.SIMPLE_TYPES else (1, 7, 64, 200)


def linear(
    level: str, x: rig.F32, parts: list[tuple[TensorView, TensorView | None]], threads: int = 2
) -> list[rig.F32]:
    """Each part's output as a program of its own last part gives it: all parts run, one is read."""
    feed, table, source = rig.feed("x", x)
    outs = []
    for last in range(len(parts)):
        order = parts[:last] + parts[last + 1 :] + [parts[last]]
        op = Linear(
            source,
            tuple(
                LinearPart(
                    Weight(view.name, view.rows, view.cols),
                    Buffer(f"y{index}", view.rows),
                    Weight(bias.name, 1, bias.cols) if bias is not None else None,
                )
                for index, (view, bias) in enumerate(order)
            ),
        )
        weights = [table, *(view for part in parts for view in part if view is not None)]
        program = rig.bind(rig.backend(level, threads), [feed, op], weights, rows=128)
        outs.append(program.run(rig.plain_batch(len(x))).copy())
        program.close()
    return outs


def oracle(kind: str, x: rig.F32, meaning: rig.F32) -> tuple[np.ndarray, np.ndarray]:
    """The product and the sum of its magnitudes."""
    seen = x.astype(np.float64) if kind in rig.FLOAT_TYPES else rig.int16_rounded(x)
    dense = meaning.astype(np.float64)
    return seen @ dense.T, np.abs(seen) @ np.abs(dense).T


@pytest.mark.parametrize("kind", rig.ALL_TYPES)
def test_linear_equals_the_dequantised_product(level: str, kind: str) -> None:
    random = np.random.default_rng(1)
    for cols in columns_of(kind):
        for rows in (16, 40, 129):
            view, meaning = rig.weights_of(kind, rows, cols, seed=rows)
            x = random.standard_normal((MANY, cols)).astype(np.float32)
            want, scale = oracle(kind, x, meaning)
            (got,) = linear(level, x, [(view, None)])
            rig.close_to(got, want, scale, 4e-6)


@pytest.mark.parametrize("kind", rig.ALL_TYPES)
def test_a_row_has_the_same_bits_in_every_batch_and_for_every_thread_count(level: str, kind: str) -> None:
    cols = columns_of(kind)[-1]
    view, _ = rig.weights_of(kind, 200, cols)
    x = np.random.default_rng(2).standard_normal((max(ROW_COUNTS), cols)).astype(np.float32)
    (whole,) = linear(level, x, [(view, None)])
    for threads in (1, 2, 5):
        for count in ROW_COUNTS:
            (got,) = linear(level, x[-count:], [(view, None)], threads)
            assert np.array_equal(rig.bits(got), rig.bits(whole[-count:])), (threads, count)


@pytest.mark.parametrize("kind", rig.ALL_TYPES)
def test_rows_of_several_blocks_and_slices_have_the_bits_of_a_few_rows(level: str, kind: str) -> None:
    """More batch rows, weight rows and columns than many rows take at once (linear.cpp, packed.h): 96, 256 and 512."""
    for rows, cols in ((40, 768), (1600, 256 if kind in rig.K_TYPES else 64)):
        view, _ = rig.weights_of(kind, rows, cols)
        x = np.random.default_rng(4).standard_normal((101, cols)).astype(np.float32)
        (whole,) = linear(level, x, [(view, None)], threads=1)
        for first in (0, 95, 97):
            (got,) = linear(level, x[first : first + 4], [(view, None)])
            assert np.array_equal(rig.bits(got), rig.bits(whole[first : first + 4])), (rows, first)


def test_extreme_weights_and_activations_do_not_saturate(level: str) -> None:
    """Q8_0 at -128 against activations of one magnitude: the largest sums that there are."""
    values = np.full((16, 64), -128, np.int8)
    values[1::2] = 127
    blocks = np.zeros((16, 2, 34), np.uint8)
    blocks[:, :, :2] = np.full((16, 2), 0.01, np.float16)[..., None].view(np.uint8)
    blocks[:, :, 2:] = values.reshape(16, 2, 32).view(np.uint8)
    view = TensorView("extreme", rig.QuantType.Q8_0, 16, 64, blocks.reshape(-1))
    meaning = values.astype(np.float32) * np.float32(np.float16(0.01))
    x = np.stack([np.full(64, 3.0), np.full(64, -3.0), np.where(np.arange(64) % 2, 3.0, -3.0)]).astype(np.float32)
    x = np.tile(x, (MANY // 3, 1))
    want, scale = oracle("Q8_0", x, meaning)
    for count in (3, MANY):
        rig.close_to(linear(level, x[:count], [(view, None)])[0], want[:count], scale[:count], 4e-6)


@pytest.mark.parametrize("kind", tuple(kind for kind in rig.SCALES_AT if kind != "Q8_0"))
def test_all_bits_set_do_not_saturate(level: str, kind: str) -> None:
    view, _ = rig.weights_of(kind, 16, 256)
    quant = rig.QuantType[kind]
    blocks = np.full_like(view.data, 0xFF).reshape(-1, quant.block_bytes)
    for at in rig.SCALES_AT[kind]:
        blocks[:, at : at + 2] = np.full((len(blocks), 1), 0.01, np.float16).view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = 120
    full = TensorView("full", quant, 16, 256, blocks.reshape(-1))
    meaning = rig.gguf.dequantize(blocks.reshape(16, -1), rig.gguf.GGMLQuantizationType[kind]).astype(np.float32)
    x = np.tile(np.stack([np.full(256, 3.0), np.full(256, -3.0), np.zeros(256)]).astype(np.float32), (MANY // 3, 1))
    want, scale = oracle(kind, x, meaning)
    for count in (3, MANY):
        rig.close_to(linear(level, x[:count], [(full, None)])[0], want[:count], scale[:count], 4e-6)


def test_the_largest_products_of_q6_k_just_fit(level: str) -> None:
    """Scale -128 times value -32 times activation 32767, sixteen times, is 65536 short of 2^31."""
    blocks = np.zeros((16, 210), np.uint8)
    blocks[:, 192:208] = 0x80
    blocks[:, 208:] = np.full((16, 1), 0.01, np.float16).view(np.uint8)
    view = TensorView("largest", rig.QuantType.Q6_K, 16, 256, blocks.reshape(-1))
    meaning = rig.gguf.dequantize(blocks, rig.gguf.GGMLQuantizationType.Q6_K).astype(np.float32)
    assert (meaning == np.float32(np.float16(0.01)) * 4096).all()
    x = np.tile(np.stack([np.full(256, 3.0), np.full(256, -3.0)]).astype(np.float32), (MANY // 2, 1))
    want, scale = oracle("Q6_K", x, meaning)
    for count in (2, MANY):
        rig.close_to(linear(level, x[:count], [(view, None)])[0], want[:count], scale[:count], 4e-6)


def test_parts_of_different_types_and_sizes_share_one_input(level: str) -> None:
    x = np.random.default_rng(3).standard_normal((9, 256)).astype(np.float32)
    shapes = (("Q4_K", 64), ("Q6_K", 17), ("F16", 33), ("Q8_0", 100))
    parts, expected = [], []
    for index, (kind, rows) in enumerate(shapes):
        view, meaning = rig.weights_of(kind, rows, 256, seed=index)
        bias = np.random.default_rng(index).standard_normal(rows).astype(np.float32)
        parts.append((view, rig.vector_of(f"bias{index}", bias)))
        want, scale = oracle(kind, x, meaning)
        expected.append((want + bias, scale + np.abs(bias)))
    for got, (want, scale) in zip(linear(level, x, parts), expected, strict=True):
        rig.close_to(got, want, scale, 4e-6)


@pytest.mark.parametrize("kind", rig.ALL_TYPES)
def test_embedding_rows_are_exactly_the_dequantised_ones(level: str, kind: str) -> None:
    view, meaning = rig.weights_of(kind, 37, columns_of(kind)[-1])
    out = Buffer("x", view.cols)
    program = rig.bind(rig.backend(level), [EmbedRows(Weight(view.name, view.rows, view.cols), out)], [view])
    tokens = np.array([36, 0, 15, 16, 31, 7, 36], np.int32)
    batch = rig.plain_batch(len(tokens))
    batch.tokens = tokens
    got = program.run(batch).copy()
    program.close()
    # The oracle multiplies a K block's scales in its own order: one unit in the last place.
    exact = kind not in rig.K_TYPES
    assert np.array_equal(got, meaning[tokens]) if exact else np.allclose(got, meaning[tokens], rtol=3e-7, atol=1e-7)


def test_a_tied_head_uses_the_embedding_table(level: str) -> None:
    view, meaning = rig.weights_of("Q8_0", 50, 64)
    weight, x, y = Weight(view.name, 50, 64), Buffer("x", 64), Buffer("y", 50)
    program = rig.bind(
        rig.backend(level), [EmbedRows(weight, x, scale=2.0), Linear(x, (LinearPart(weight, y),))], [view]
    )
    assert program.memory_lines()["weights"] < 2 * view.data.nbytes
    tokens = np.array([3, 49], np.int32)
    batch = Batch(
        tokens,
        np.arange(2, dtype=np.int32),
        np.arange(2, dtype=np.int32)[None],
        np.zeros(2, np.int32),
        np.zeros((1, 1, 1), np.int32),
        np.zeros(0, np.int32),
    )
    got = program.run(batch).copy()
    program.close()
    want, scale = oracle("Q8_0", 2 * meaning[tokens], meaning)
    rig.close_to(got, want, scale, 4e-6)


def test_every_exponent_of_mxfp4(level: str) -> None:
    """2^-126 to 2^123, as large as floats hold; what is smaller than a normal float may count as nothing."""
    exponents = np.arange(252)
    blocks = np.zeros((252, 1, 17), np.uint8)
    blocks[:, 0, 0] = exponents
    blocks[:, 0, 1:] = 0x7A  # -1 in the low nibbles, 6 in the high ones
    view = TensorView("exponents", rig.QuantType.MXFP4, 252, 32, blocks.reshape(-1))
    meaning = rig.gguf.dequantize(blocks.reshape(252, -1), rig.gguf.GGMLQuantizationType.MXFP4).astype(np.float64)
    assert np.array_equal(meaning[:, 3], -2 * 2.0 ** (exponents - 128))
    x = np.zeros((2, 32), np.float32)
    x[0, 3] = x[1, 20] = 2.0**-10
    (got,) = linear(level, x, [(view, None)])
    assert np.allclose(got, 2.0**-10 * meaning[:, (3, 20)].T, rtol=1e-6, atol=2.0**-126)


def test_packed_types_hold_the_bits_of_the_file_and_no_more(level: str) -> None:
    library = rig.backend(level).library
    for kind in rig.ALL_TYPES:
        quant, cols = rig.QuantType[kind], 256
        for rows, padded in ((48, 48), (33, 48)):
            size = library.hs_packed_bytes(quant.gguf_id, rows, cols)
            assert size == padded * quant.row_bytes(cols)
            assert packed_tensor_bytes(quant.block_bytes, quant.block_len, rows, cols) == -(-size // 64) * 64
