"""KV rows of small types as numbers: what is read back is the nearest that the format can hold."""

from __future__ import annotations

import kernel_rig as rig
import numpy as np
import pytest

from backends.base import Attention, Batch, Buffer, KvLayer, KvPool, Op, RopeStore
from backends.quant import QuantType


def stored_values(level: str, kind: str, values: rig.F32) -> rig.F32:
    """Rows of V as attention reads them back: at position 0 of a lane of its own, all weight is on the row itself."""
    rows, dims = values.shape
    feed_q, table_q, q = rig.feed("q", np.zeros((rows, dims), np.float32))
    feed_v, table_v, v = rig.feed("v", values)
    feed_k, table_k, k = rig.feed("k", np.zeros((rows, dims), np.float32))
    ops: list[Op] = [feed_q, feed_v, feed_k, RopeStore(q, k, v, 0, 1, 1, dims, None)]
    ops.append(Attention(q, Buffer("out", dims), 0, 1, 1, dims, 1.0))
    pool = KvPool((KvLayer(1, dims),), rows * 16, QuantType[kind])
    program = rig.bind(rig.backend(level), ops, [table_q, table_v, table_k], pool, rows, 1, 1, rows)
    at = np.arange(rows, dtype=np.int32)
    batch = Batch(at, np.zeros(rows, np.int32), at[None] * 16, at, at[None, :, None], np.zeros(0, np.int32))
    got = program.run(batch).copy()
    program.close()
    return got


def e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if code & 128 else size


def test_f8_keeps_each_of_its_values_and_rounds_to_the_nearest_even(level: str) -> None:
    sizes = np.array([e4m3(code) for code in range(0x7F)])
    assert sizes[-1] == 448 and sizes[1] == 2.0**-9
    middles = (sizes[:-1] + sizes[1:]) / 2
    even = np.where(np.arange(len(middles)) % 2 == 0, sizes[:-1], sizes[1:])
    above = np.nextafter(middles.astype(np.float32), np.float32(1e9))
    below = np.nextafter(middles.astype(np.float32), np.float32(0))
    far = np.array([449.0, 463.9, 480.0, 1e9, np.inf])
    asked = np.concatenate([sizes, middles, above, below, far]).astype(np.float32)
    want = np.concatenate([sizes, even, sizes[1:], sizes[:-1], np.full(5, 448.0)]).astype(np.float32)
    asked, want = (np.concatenate([x, -x, np.zeros(-2 * len(x) % 64, np.float32)]) for x in (asked, want))
    assert np.array_equal(stored_values(level, "F8", asked.reshape(-1, 64)), want.reshape(-1, 64))


def test_q8_0_keeps_what_the_format_says(level: str) -> None:
    random = np.random.default_rng(4)
    values = (random.standard_normal((24, 96)) * 10.0 ** random.uniform(-4, 4, (24, 1))).astype(np.float32)
    values[3, 32:64] = 0.0
    blocks = values.reshape(24, 3, 32)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
    steps = np.rint(blocks / np.where(scale > 0, scale, np.float32(1)))
    want = (steps * scale.astype(np.float16).astype(np.float32)).astype(np.float32).reshape(24, 96)
    assert np.array_equal(stored_values(level, "Q8_0", values), want)


@pytest.mark.parametrize("kind", ("F16", "BF16", "Q8_0"))
def test_what_is_no_number_stays_none(level: str, kind: str) -> None:
    values = np.ones((3, 32), np.float32)
    values[1, 5] = np.nan
    got = stored_values(level, kind, values)
    assert np.isnan(got[1, 5])
    assert np.isfinite(got[[0, 2]]).all()
