"""Cases of backends.gpu.ops.many: against float64, with what halves round.

The bound of a product. A half is off by at most 2^-11 of its value, or by 2^-25 where it is below the least normal
one. For a weight w that is 2^-11 |w| + 2^-25, for an activation x of a row whose largest is m, 2^-11 |x| + 2^-39 m (the
row is lifted to 2^14 .. 2^15 first). Sums of n products in single precision, in any order, are off by n 2^-24 of the
sum of their sizes. Nothing else is rounded. Sharper: roundings are of either sign, anywhere within their bounds, so
that a sum of independent ones strays by the root of the sum of the squares of these over three; seven times that is not
met in a test's lifetime.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from gpu_weights import matrix

from backends.gpu import planes
from backends.gpu.launch import Launch
from backends.gpu.ops import many
from backends.quant import QuantType
from gpu_cases import Array, Case, Maker, address, aligned, nothing

F64 = npt.NDArray[np.float64]
FLOATS = tuple(planes.FLOATS)


def rounded(x: F64, w: F64) -> F64:
    """What x w^T may be off by. x [rows, cols], w [outs, cols]."""
    x, w = np.abs(x), np.abs(w)
    of_x = 2.0**-11 * x + 2.0**-39 * x.max(axis=1, keepdims=True, initial=0.0)
    of_w = 2.0**-11 * w + 2.0**-25
    sums = (x.shape[1] + 1) * 2.0**-23 * (x @ w.T)
    most = of_x @ w.T + x @ of_w.T + of_x @ of_w.T
    usual = 7 / 3**0.5 * np.sqrt((of_x**2) @ (w**2).T + (x**2) @ (of_w**2).T)
    bound: F64 = np.minimum(most, usual) + sums
    return bound


def activations(rng: np.random.Generator, rows: int, cols: int, stride: int) -> Array:
    """Rows of any size: 1e-3 to 1e5, and one value that no half can hold. What is behind `cols` is no number."""
    x = nothing((rows, stride))
    x[:, :cols] = rng.standard_normal((rows, cols)) * 10.0 ** rng.uniform(-3, 5, (rows, 1))
    x[0, rng.integers(cols)] = 3e5
    return x


@dataclass(frozen=True)
class HalvedRows:
    x: Array
    halves: Array
    scales: Array
    where: many.Halved
    launches: tuple[Launch, ...]

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.x, self.halves, self.scales


def halved(rng: np.random.Generator, rows: int, cols: int) -> HalvedRows:
    x = activations(rng, rows, cols, cols + int(rng.integers(0, 6)))
    halves, scales = nothing((rows, many.padded(cols)), np.uint16), nothing((rows,))
    where = many.Halved(address(halves), address(scales), cols)
    return HalvedRows(x, halves, scales, where, many.halve(where, address(x), rows, x.shape[1]))


def width(rng: np.random.Generator, quant: QuantType) -> int:
    """Columns of a matrix: few, and no multiple of a step's where the type allows."""
    if quant in FLOATS:
        return int(rng.integers(1, 300))
    return quant.block_len * int(rng.integers(1, 1 + max(1, 320 // quant.block_len)))


def _halve(rng: np.random.Generator, warp: int) -> Case:
    rows, cols = int(rng.integers(1, 5)), int(rng.integers(1, 1500))
    all_rows = halved(rng, rows + 2, cols)
    all_rows.x[-1, :cols] = 0
    all_rows.x[-2, :cols] *= 1e-20

    def check() -> None:
        x, scales = all_rows.x[:, :cols].astype(np.float64), all_rows.scales
        got = all_rows.halves.view(np.float16)
        assert not got[:, cols:].any() and np.isfinite(got).all()
        assert (np.frexp(scales)[0] == 0.5).all(), "powers of two"
        largest = np.abs(got[:-1]).max(axis=1)
        assert ((largest >= 2**14) & (largest <= 2**15)).all()
        bound = 2.0**-11 * np.abs(x) + 2.0**-39 * np.abs(x).max(axis=1, keepdims=True)
        assert (np.abs(got[:, :cols] * scales[:, None].astype(np.float64) - x) <= bound).all()

    return Case(all_rows.launches, all_rows.arrays, check)


def _linear(quant: QuantType, block: int, rng: np.random.Generator, warp: int) -> Case:
    rows, outs = rng.integers(1, block + 30, 2)
    return product(quant, block, rng, int(rows), int(outs), width(rng, quant))


def _one(quant: QuantType, block: int, rng: np.random.Generator, warp: int) -> Case:
    return product(quant, block, rng, 1, 1, width(rng, quant))


def product(quant: QuantType, block: int, rng: np.random.Generator, rows: int, outs: int, cols: int) -> Case:
    """A linear layer in blocks of `block` rows."""
    w = matrix(quant, outs, cols, rng)
    dense = w.meaning.astype(np.float64)
    given = halved(rng, rows, cols)
    stride = outs + int(rng.integers(0, 5))
    out, bias = nothing((rows, stride)), aligned(rng.standard_normal(outs).astype(np.float32))
    biased = bool(rng.integers(2))
    launches = many.linear(
        many.Matrix(quant, address(w.planes), outs, cols),
        given.where,
        rows,
        address(out),
        stride,
        address(bias) if biased else 0,
        block=block,
    )

    def check() -> None:
        x = given.x[:, :cols].astype(np.float64)
        want = x @ dense.T + (bias if biased else 0)
        assert (np.abs(out[:, :outs] - want) <= rounded(x, dense) + 2.0**-23 * np.abs(want)).all()
        assert np.isnan(out[:, outs:]).all(), "written past the outputs"

    return Case((*given.launches, *launches), (*given.arrays, w.planes, bias, out), check)


@dataclass(frozen=True)
class Grouped:
    """Random choices of `rows` rows, each of `used` different experts out of `experts`, of which some are here."""

    chosen: Array
    order: Array
    tiles: Array
    groups: many.Groups

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.chosen, self.order, self.tiles

    def mine(self, expert: int) -> npt.NDArray[np.intp]:
        """The choices of an expert, in their order."""
        return np.nonzero(self.chosen.reshape(-1) == expert)[0]


def grouped(rng: np.random.Generator, rows: int, used: int, experts: int, block: int) -> Grouped:
    favourites = rng.permutation(experts)[: max(used, experts // 2)]
    picks = [rng.permutation(favourites if rng.random() < 0.7 else experts)[:used] for _ in range(rows)]
    chosen = aligned(np.array(picks, np.int32))
    first = int(rng.integers(0, experts))
    end = int(rng.integers(first + 1, experts + 1))
    choices = many.Choices(address(chosen), chosen.dtype, rows, used, first, end)
    order = nothing((choices.pairs,), np.int32)
    tiles = nothing((many.tile_count(choices, block), 4), np.int32)
    return Grouped(chosen, order, tiles, many.Groups(choices, address(order), address(tiles), block))


def _group(rng: np.random.Generator, warp: int) -> Case:
    experts = int(rng.integers(2, 12))
    given = grouped(rng, int(rng.integers(1, 150)), int(rng.integers(1, 1 + experts)), experts, 32)
    first, end = given.groups.choices.first, given.groups.choices.end

    def check() -> None:
        lists = [given.mine(expert) for expert in range(first, end)]
        here = sum(map(len, lists))
        np.testing.assert_array_equal(given.order[:here], np.concatenate(lists))
        assert (given.order[here:] == -1).all()
        want, at = [], 0
        for expert, pairs in enumerate(lists):
            want += [(expert, at + t, min(32, len(pairs) - t), 0) for t in range(0, len(pairs), 32)]
            at += len(pairs)
        want += [(0, 0, 0, 0)] * (len(given.tiles) - len(want))
        np.testing.assert_array_equal(given.tiles, np.array(want, np.int32).reshape(-1, 4))

    return Case(many.group(given.groups), given.arrays, check)


def _experts(quant: QuantType, block: int, shared: bool, rng: np.random.Generator, warp: int) -> Case:
    experts, used = int(rng.integers(2, 5)), int(rng.integers(1, 3))
    rows = int(rng.integers(block // 4, block)) // used + 1
    given = grouped(rng, rows, used, experts, block)
    choices, cols = given.groups.choices, width(rng, quant)
    height, first_row = int(rng.integers(1, block + 20)), int(rng.integers(0, 20))
    pitch = height + first_row + int(rng.integers(0, 20))
    w = matrix(quant, choices.held * pitch, cols, rng)
    dense = w.meaning.astype(np.float64)
    bias = aligned(rng.standard_normal(choices.held * pitch).astype(np.float32))
    lines = halved(rng, rows if shared else choices.pairs, cols)
    stride = height + int(rng.integers(0, 5))
    out = nothing((choices.pairs, stride))
    stack = many.Stack(
        many.Matrix(quant, address(w.planes), choices.held * pitch, cols), height, pitch, first_row, address(bias)
    )
    launches = many.experts(stack, lines.where, given.groups, address(out), stride, shared=shared)

    def check() -> None:
        x = lines.x[:, :cols].astype(np.float64)
        x = np.repeat(x, used, axis=0) if shared else x
        rest = np.ones(choices.pairs, np.bool_)
        for expert in range(choices.first, choices.end):
            mine, at = given.mine(expert), (expert - choices.first) * pitch + first_row
            rest[mine] = False
            each = dense[at : at + height]
            want = x[mine] @ each.T + bias[at : at + height]
            assert (np.abs(out[mine, :height] - want) <= rounded(x[mine], each) + 2.0**-23 * np.abs(want)).all()
        assert np.isnan(out[rest]).all() and np.isnan(out[:, height:]).all()

    arrays = (*given.arrays, *lines.arrays, w.planes, bias, out)
    return Case((*many.group(given.groups), *lines.launches, *launches), arrays, check)


def _sum(ranks: int, rng: np.random.Generator, warp: int) -> Case:
    ranks, count = ranks or int(rng.integers(1, 9)), int(rng.integers(1, 3000))
    parts = [aligned(rng.standard_normal(count).astype(np.float32)) for _ in range(ranks)]
    want = np.copy(parts[0])
    for part in parts[1:]:
        want = want + part
    in_place = bool(rng.integers(2))
    out = parts[0] if in_place else nothing((count,))

    def check() -> None:
        np.testing.assert_array_equal(out, want)

    launches = many.sum_rows(address(out), [address(part) for part in parts], count)
    return Case(launches, tuple(parts) if in_place else (*parts, out), check)


def _cases() -> dict[str, Maker]:
    found: dict[str, Maker] = {"halve_rows": _halve, "group_rows": _group}
    found |= {"sum_rows": partial(_sum, 0), "sum_rows:one": partial(_sum, 1), "sum_rows:twenty": partial(_sum, 20)}
    for (quant, block), symbol in many.LINEAR.items():
        found[symbol.name] = partial(_linear, quant, block)
        found[f"{symbol.name}:one"] = partial(_one, quant, block)
    for (quant, block), symbol in many.EXPERTS.items():
        found[symbol.name] = partial(_experts, quant, block, True)
        found[f"{symbol.name}:down"] = partial(_experts, quant, block, False)
    return found


CASES = _cases()
