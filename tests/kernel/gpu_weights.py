"""Random matrices of every type for the GPU kernels' tests: the file's bytes, what they mean, how they lie on a card;
and activations quantised as the kernels do it, in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import gguf
import numpy as np
from simt_rig import Array, address, aligned

from backends.gpu import planes
from backends.gpu.ops.buffers import Planes, Rows
from backends.quant import QuantType

HALVES_AT = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "MXFP4": (), "NVFP4": (),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,), "TQ1_0": (52,),
    "TQ2_0": (64,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,),
    "IQ1_M": (),
}  # fmt: skip
"""Where a block has scales of half precision. Its other bytes may be anything, but for the types in `_finite`."""


@dataclass(frozen=True)
class Matrix:
    """`file` as in the checkpoint [rows, row bytes], `meaning` by the `gguf` package, `planes` as on the card."""

    quant: QuantType
    file: Array
    meaning: Array
    planes: Array

    @property
    def rows(self) -> int:
        return int(self.meaning.shape[0])

    @property
    def cols(self) -> int:
        return int(self.meaning.shape[1])


def matrix(quant: QuantType, rows: int, cols: int, rng: np.random.Generator) -> Matrix:
    if quant in planes.FLOATS:
        return of_values(quant, rng.standard_normal((rows, cols)).astype(np.float32))
    blocks = rng.integers(0, 256, (rows, cols // quant.block_len, quant.block_bytes), dtype=np.uint8)
    for at in HALVES_AT[quant.name]:
        scales = (rng.uniform(0.5, 1.5, blocks.shape[:2]) * rng.choice([-1e-2, 1e-2], blocks.shape[:2])).astype(
            np.float16
        )
        blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    _finite(quant, blocks, rng)
    return of_blocks(quant, blocks.reshape(rows, -1), cols)


def _finite(quant: QuantType, blocks: Array, rng: np.random.Generator) -> None:
    """Scales that are no halves."""
    if quant is QuantType.MXFP4:
        blocks[:, :, 0] = rng.integers(118, 124, blocks.shape[:2])
    if quant is QuantType.NVFP4:
        blocks[:, :, :4] = rng.integers(0x18, 0x50, (*blocks.shape[:2], 4))
    if quant is QuantType.IQ1_M:  # a half in the upper four bits of four words
        half = (rng.uniform(0.5, 1.5, blocks.shape[:2]) * 1e-2).astype(np.float16).view(np.uint16)
        for i in range(4):
            part = (half >> (4 * i) & 15).astype(np.uint8)
            blocks[:, :, 49 + 2 * i] = blocks[:, :, 49 + 2 * i] & 15 | part << 4


def of_blocks(quant: QuantType, file: Array, cols: int) -> Matrix:
    rows = len(file)
    meaning = gguf.dequantize(file, gguf.GGMLQuantizationType[quant.name]).astype(np.float32).reshape(rows, cols)
    return Matrix(quant, file, meaning, packed(quant, file, cols))


def packed(quant: QuantType, file: Array, cols: int) -> Array:
    """As on the card."""
    return aligned(planes.pack(quant, file.reshape(-1), len(file), cols))


def of_values(quant: QuantType, values: Array) -> Matrix:
    """A matrix of floats."""
    rows, cols = values.shape
    file = gguf.quantize(values, gguf.GGMLQuantizationType[quant.name]).view(np.uint8).reshape(rows, -1)
    meaning = gguf.dequantize(file, gguf.GGMLQuantizationType[quant.name]).astype(np.float32).reshape(rows, cols)
    return Matrix(quant, file, meaning, packed(quant, file, cols))


def cols_of(quant: QuantType, rng: np.random.Generator, most: int = 1280) -> int:
    """Whole blocks, and for floats any number of columns."""
    if quant in planes.FLOATS:
        return int(rng.integers(1, most // 4))
    return int(rng.integers(1, most // quant.block_len + 1)) * quant.block_len


class Quantised(NamedTuple):
    """Activations as `quantize_rows` leaves them."""

    hi: Array
    lo: Array
    scale: Array
    sum: Array

    @property
    def value(self) -> Array:
        """float64 [rows, cols]: what products see."""
        v = 256.0 * self.hi.astype(np.float64) + self.lo
        return v * np.repeat(self.scale.astype(np.float64), 32, axis=1)

    @property
    def at(self) -> Planes:
        return Planes(*map(address, self))


def quantised(x: Array) -> Quantised:
    """Blocks of 32 columns: v = round(x / s), s = max |x| / 32512, v = 256 hi + lo; sums of s v over 16 columns."""
    rows, cols = x.shape
    blocks = x.reshape(rows, cols // 32, 32)
    most = np.abs(blocks).max(axis=2, keepdims=True)
    live = np.isfinite(most) & (most > np.float32(1e-30))
    inverse = np.divide(np.float32(32512), most, out=np.zeros_like(most), where=live)
    v = np.rint(np.where(live, blocks, 0) * inverse).astype(np.int32)
    hi = v + 128 >> 8
    scale = (most / np.float32(32512)).astype(np.float32)
    with np.errstate(invalid="ignore"):  # zeros times an infinite scale: not a number, as it should be
        sums = scale * v.reshape(rows, cols // 32, 2, 16).sum(axis=3).astype(np.float32)
    whole = (rows, cols)
    return Quantised(
        aligned(hi.astype(np.int8).reshape(whole)),
        aligned((v - 256 * hi).astype(np.int8).reshape(whole)),
        aligned(scale.reshape(rows, -1)),
        aligned(sums.astype(np.float32).reshape(rows, -1)),
    )


class Acts(NamedTuple):
    """What a matrix of a type multiplies with: launch's argument, the arrays behind it, and their value in float64."""

    at: Planes | Rows
    arrays: tuple[Array, ...]
    value: Array


def acts(quant: QuantType, x: Array) -> Acts:
    if quant in planes.FLOATS:
        return Acts(Rows(address(x), x.shape[1]), (x,), x.astype(np.float64))
    made = quantised(x)
    return Acts(made.at, tuple(made), made.value)


def close(got: Array, acts: Array, meaning: Array, bias: Array | float = 0.0, relative: float = 4e-6) -> None:
    """got = acts meaning^T + bias, up to `relative` of the sum of the magnitudes that were added."""
    wide = meaning.astype(np.float64)
    want = acts @ wide.T + bias
    room = np.abs(acts) @ np.abs(wide).T + np.abs(bias)
    wrong = np.abs(got - want) > relative * room + 1e-30
    assert not (wrong | ~np.isfinite(got)).any(), f"{wrong.sum()} of {wrong.size}: {np.argwhere(wrong)[:5].tolist()}"
