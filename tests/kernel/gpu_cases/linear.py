"""Cases of backends.gpu.ops.linear: products with each type's matrices against dequantised weights in float64."""

from __future__ import annotations

from functools import partial

import gpu_weights as weights
import numpy as np

from backends.gpu.ops import linear as ops
from backends.gpu.ops.quants import MATRICES
from backends.quant import QuantType
from gpu_cases import Case, Maker, address, aligned, nothing


def few_case(quant: QuantType, variant: int, rng: np.random.Generator, warp: int) -> Case:
    """Rows enough for one block or two, of which the last one is not full."""
    rows, outs = int(rng.integers(1, 2 * variant + 1)), int(rng.integers(1, 40))
    cols = weights.cols_of(quant, rng, most=2304)
    whole = weights.matrix(quant, outs, cols, rng)
    acts = weights.acts(quant, aligned(rng.standard_normal((rows, cols)).astype(np.float32)))
    bias = aligned(rng.standard_normal(outs).astype(np.float32))
    biased = bool(rng.integers(2))
    stride = outs + int(rng.integers(0, 3))
    out = nothing((rows, stride))
    launch = ops.linear_few(
        quant, address(out), address(whole.planes), acts.at, rows=rows, outs=outs, cols=cols,
        bias=address(bias) if biased else 0, stride=stride, variant=variant,
    )  # fmt: skip

    def check() -> None:
        weights.close(out[:, :outs], acts.value, whole.meaning, bias if biased else 0.0)
        assert np.isnan(out[:, outs:]).all(), "written past a row's end"

    return Case((launch,), (out, whole.planes, bias, *acts.arrays), check)


def experts_case(quant: QuantType, rng: np.random.Generator, warp: int) -> Case:
    """Six experts of which a rank holds some; their matrix is a part of what lies one after the other (gate and up)."""
    height, first, cols = int(rng.integers(1, 24)), int(rng.integers(0, 3)), weights.cols_of(quant, rng, most=1024)
    pitch, held = first + height + int(rng.integers(0, 3)), (int(rng.integers(0, 3)), int(rng.integers(4, 7)))
    tensor = weights.matrix(quant, (held[1] - held[0]) * pitch, cols, rng)
    rows, used = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    shared = bool(rng.integers(2))
    chosen = aligned(np.stack([rng.permutation(6)[:used] for _ in range(rows)]).astype(np.int32).reshape(-1))
    x = rng.standard_normal((rows if shared else rows * used, cols)).astype(np.float32)
    acts = weights.acts(quant, aligned(x))
    bias = aligned(rng.standard_normal(tensor.rows).astype(np.float32))
    biased = bool(rng.integers(2))
    out = nothing((rows * used, height))
    launch = ops.experts_few(
        quant, address(out), address(tensor.planes), acts.at, address(chosen),
        ops.ExpertRows(tensor.rows, cols, pitch, first, height),
        pairs=rows * used, share=used if shared else 1, held=held, bias=address(bias) if biased else 0,
    )  # fmt: skip

    def check() -> None:
        for pair, expert in enumerate(chosen):
            if not held[0] <= expert < held[1]:
                assert (out[pair] == 0).all()
                continue
            begin = (int(expert) - held[0]) * pitch + first
            mine = slice(begin, begin + height)
            row = acts.value[pair // used if shared else pair]
            weights.close(out[pair : pair + 1], row[None], tensor.meaning[mine], bias[mine] if biased else 0.0)

    return Case((launch,), (out, tensor.planes, bias, chosen, *acts.arrays), check)


CASES: dict[str, Maker] = {
    **{symbol.name: partial(few_case, quant, rows) for (quant, rows), symbol in ops.LINEAR_FEW.items()},
    **{ops.EXPERTS_FEW[quant].name: partial(experts_case, quant) for quant in MATRICES},
}
