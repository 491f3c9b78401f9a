"""Cases of backends.gpu.ops.quants: each type packed, dequantised, embedded, against the `gguf` package."""

from __future__ import annotations

from functools import partial

import gpu_weights as weights
import numpy as np

from backends.gpu.ops import quants as ops
from backends.gpu.ops.buffers import Rows
from backends.quant import QuantType
from gpu_cases import Array, Case, Maker, address, aligned, nothing


def pack_case(quant: QuantType, rng: np.random.Generator, warp: int) -> Case:
    """A matrix comes in pieces: two runs of rows, each of two runs of columns where there are blocks enough."""
    rows, cols = int(rng.integers(2, 9)), weights.cols_of(quant, rng)
    whole = weights.matrix(quant, rows, cols, rng)
    row, col = int(rng.integers(1, rows)), int(rng.integers(0, cols // quant.block_len)) * quant.block_len
    out = aligned(np.zeros_like(whole.planes))
    staged: list[Array] = []
    launches = []
    for first_row, count in ((0, row), (row, rows - row)):
        for first_col, width in ((0, col), (col, cols - col)):
            if width:
                begin, end = (quant.row_bytes(each) for each in (first_col, first_col + width))
                source = np.ascontiguousarray(whole.file[first_row : first_row + count, begin:end])
                staged.append(aligned(np.concatenate([np.zeros(1, np.uint8), source.reshape(-1)])))
                part = ops.Part(first_row, first_col, count, width)
                launches.append(ops.pack(quant, address(out), address(staged[-1]) + 1, rows, cols, part))

    def check() -> None:
        np.testing.assert_array_equal(out, whole.planes)

    return Case(tuple(launches), (out, *staged), check)


def dequantize_case(quant: QuantType, half: bool, rng: np.random.Generator, warp: int) -> Case:
    rows, cols = int(rng.integers(2, 9)), weights.cols_of(quant, rng)
    whole = weights.matrix(quant, rows, cols, rng)
    first = int(rng.integers(0, rows))
    stride = cols + int(rng.integers(0, 9))
    out = nothing((rows - first, stride), np.float16 if half else np.float32)
    launch = ops.dequantize(
        quant,
        address(out),
        address(whole.planes),
        rows,
        cols,
        first=first,
        count=rows - first,
        half=half,
        stride=stride,
    )

    def check() -> None:
        np.testing.assert_array_equal(out[:, :cols], whole.meaning[first:].astype(out.dtype))
        assert np.isnan(out[:, cols:]).all(), "written past a row's end"

    return Case((launch,), (out, whole.planes), check)


def embed_case(quant: QuantType, rng: np.random.Generator, warp: int) -> Case:
    rows, cols, first = int(rng.integers(2, 9)), weights.cols_of(quant, rng), int(rng.integers(0, 100))
    table = weights.matrix(quant, rows, cols, rng)
    tokens = aligned(rng.integers(first - 2, first + rows + 2, 5).astype(np.int32))
    tokens[:2] = first, first + rows - 1
    out = nothing((5, cols))
    launch = ops.embed_rows(
        quant,
        address(out),
        address(table.planes),
        address(tokens),
        count=5,
        rows=rows,
        cols=cols,
        first=first,
        scale=1.7,
    )

    def check() -> None:
        here = (tokens >= first) & (tokens < first + rows)
        rows_of = table.meaning[np.clip(tokens - first, 0, rows - 1)] * np.float32(1.7)
        np.testing.assert_array_equal(out, np.where(here[:, None], rows_of, 0))

    return Case((launch,), (out, table.planes, tokens), check)


def quantize_case(rng: np.random.Generator, warp: int, x: Array | None = None) -> Case:
    if x is None:
        x = rng.standard_normal((int(rng.integers(1, 4)), 32 * int(rng.integers(1, 40)))).astype(np.float32)
        x *= np.float32(10.0) ** rng.integers(-20, 20, x.shape[1]).repeat(1).astype(np.float32)
        x[-1, :32] = 0
    x = aligned(x)
    want = weights.quantised(x)
    got = weights.Quantised(*(nothing(each.shape, each.dtype) for each in want))
    launch = ops.quantize_rows(Rows(address(x), x.shape[1]), got.at, *x.shape)

    def check() -> None:
        for mine, theirs in zip(got, want, strict=True):
            np.testing.assert_array_equal(mine, theirs)

    return Case((launch,), (x, *got), check)


CASES: dict[str, Maker] = {
    **{ops.PACK[quant].name: partial(pack_case, quant) for quant in ops.MATRICES},
    **{ops.DEQUANTIZE["f32"][quant].name: partial(dequantize_case, quant, False) for quant in ops.MATRICES},
    **{ops.DEQUANTIZE["f16"][quant].name: partial(dequantize_case, quant, True) for quant in ops.MATRICES},
    **{ops.EMBED_ROWS[quant].name: partial(embed_case, quant) for quant in ops.MATRICES},
    "quantize_rows": quantize_case,
}
