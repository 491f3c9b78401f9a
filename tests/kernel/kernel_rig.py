"""What kernel tests share: backends per ISA level, random weights of every type, programs of a few ops, oracles.

Activations come in through `EmbedRows` on an F32 table (token r = row r), which is exact; so every op is tested through
the public interface, with no hook into the native code.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

import gguf
import kernel_sanitized
import kernel_simde
import numpy as np
import numpy.typing as npt

from backends.base import (
    NO_STATES,
    Batch,
    Buffer,
    EmbedRows,
    KvPool,
    Limits,
    Op,
    OpenOptions,
    StatePool,
    TensorView,
    Weight,
)
from backends.cpu import levels
from backends.cpu.backend import CpuBackend, CpuProgram
from backends.quant import QuantType
from backends.reference.backend import ReferenceBackend

F32 = npt.NDArray[np.float32]

FLOAT_TYPES = ("F32", "F16", "BF16")
SIMPLE_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
SCALES_AT = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "IQ4_NL": (0,),
    "MXFP4": (),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_XS": (0,),
}
"""Where a block has its half-precision scales. Its other bytes may be anything."""
ALL_TYPES = FLOAT_TYPES + SIMPLE_TYPES + K_TYPES

NO_KV = KvPool((), 0, QuantType.F16)


SIMDE = "simde-"
"""Prefix of a level that runs through SIMDe."""
SANITIZED = os.environ.get(kernel_sanitized.LIBRARY, "")
"""The library of a run under the sanitizers."""


def native_levels() -> tuple[str, ...]:
    """The levels that this CPU has, or the one that HOMESERVE_ISA names."""
    asked = os.environ.get("HOMESERVE_ISA", "")
    available = levels.host_levels()
    return (levels.choose(asked, available),) if asked else available


def tested_levels() -> tuple[str, ...]:
    """Native levels, and through SIMDe the AVX-512 levels that this CPU lacks, where SIMDe is there; in a run under the
    sanitizers the one level of that library."""
    if SANITIZED:
        return (kernel_sanitized.LEVEL,)
    native = native_levels()
    if os.environ.get("HOMESERVE_ISA") or kernel_simde.why_not():
        return native
    return native + tuple(SIMDE + level for level in kernel_simde.LEVELS if level not in native)


@cache
def backend(level: str, threads: int = 2) -> CpuBackend:
    """One backend per level and thread count for the whole run; their threads sleep between calls."""
    name = level.removeprefix(SIMDE)
    if SANITIZED:
        opened = CpuBackend(OpenOptions(threads=threads, extra={"library": SANITIZED}))
    elif name == level:
        opened = CpuBackend(OpenOptions(threads=threads, isa=level))
    else:
        opened = CpuBackend(OpenOptions(threads=threads, extra={"library": str(kernel_simde.libraries()[name])}))
    assert (opened.facts.isa, opened.facts.threads) == (name, threads)
    return opened


def weights_of(kind: str, rows: int, cols: int, seed: int = 0) -> tuple[TensorView, F32]:
    """A random matrix of a type: its packed bytes and, by the `gguf` package, what they mean."""
    random = np.random.default_rng(seed)
    quant = QuantType[kind]
    if kind in K_TYPES or kind in ("IQ4_NL", "MXFP4"):
        data = random_blocks(kind, rows, cols, random)
    else:
        dense = random.standard_normal((rows, cols)).astype(np.float32)
        data = gguf.quantize(dense, gguf.GGMLQuantizationType[kind]).view(np.uint8)
    meaning = gguf.dequantize(data.reshape(rows, -1), gguf.GGMLQuantizationType[kind]).astype(np.float32)
    return TensorView(f"{kind}.{rows}x{cols}.{seed}", quant, rows, cols, data.reshape(-1)), meaning.reshape(rows, cols)


def random_blocks(kind: str, rows: int, cols: int, random: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Any bytes are a valid block as long as its scales are finite."""
    quant = QuantType[kind]
    blocks = random.integers(0, 256, (rows, cols // quant.block_len, quant.block_bytes), dtype=np.uint8)
    for at in SCALES_AT[kind]:
        scales = (random.uniform(0.5, 1.5, blocks.shape[:2]) * 1e-2).astype(np.float16)
        blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[:, :, 0] = random.integers(118, 124, blocks.shape[:2])
    return blocks


def vector_of(name: str, values: F32) -> TensorView:
    return TensorView(
        name, QuantType.F32, 1, values.size, np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1)
    )


def table_of(name: str, values: F32) -> TensorView:
    rows, cols = values.shape
    return TensorView(
        name, QuantType.F32, rows, cols, np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1)
    )


def feed(name: str, values: F32) -> tuple[EmbedRows, TensorView, Buffer]:
    """An op that puts row r of `values` into row r of buffer `name`, its table, and the buffer."""
    buffer = Buffer(name, values.shape[1])
    table = table_of(f"{name}.table", values)
    return EmbedRows(Weight(table.name, *values.shape), buffer), table, buffer


def plain_batch(rows: int, logit_rows: Sequence[int] = ()) -> Batch:
    """Rows of one sequence at positions 0.., token r in row r, slots in order."""
    numbers = np.arange(rows, dtype=np.int32)
    pages = np.arange(max(1, -(-rows // 16)), dtype=np.int32)[None]
    return Batch(numbers, numbers, numbers[None], np.zeros(rows, np.int32), pages[None], np.array(logit_rows, np.int32))


def bind(
    on: CpuBackend,
    ops: Sequence[Op],
    weights: Sequence[TensorView],
    kv: KvPool = NO_KV,
    rows: int = 64,
    logit_rows: int = 64,
    lane_pages: int = 4,
    lanes: int = 8,
    states: StatePool = NO_STATES,
) -> CpuProgram:
    named = {view.name: view for view in weights}
    limits = Limits(rows, logit_rows, lanes, lane_pages)
    return on.bind(ops, named, kv, limits, lambda stage, done, total: None, states)


class Oracle:
    """The same ops on the reference backend in double precision, which keeps its states from run to run."""

    def __init__(
        self, ops: Sequence[Op], weights: Sequence[TensorView], rows: int = 64, states: StatePool = NO_STATES
    ) -> None:
        opened = ReferenceBackend(OpenOptions(extra={"dtype": "float64"}))
        named = {view.name: view for view in weights}
        self.program = opened.bind(ops, named, NO_KV, Limits(rows, rows, 8, 4), lambda stage, done, total: None, states)

    def run(self, batch: Batch, name: str) -> npt.NDArray[np.float64]:
        """Buffer `name` after a batch."""
        return self.program.run_from(batch, {})[name].astype(np.float64)


def int16_rounded(x: F32) -> npt.NDArray[np.float64]:
    """Activations as packed kernels see them: int16 times one scale for each 32 columns (layout.h)."""
    blocks = x.reshape(x.shape[0], -1, 32)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(32767), largest, out=np.zeros_like(largest), where=largest > 0)
    integers = np.rint(blocks * inverse).astype(np.float64)
    value: npt.NDArray[np.float64] = integers * (largest / np.float32(32767)).astype(np.float64)
    return value.reshape(x.shape)


def bits(x: F32) -> npt.NDArray[np.uint32]:
    """Bit patterns, for equality that tells -0 from 0 and compares NaNs."""
    return np.ascontiguousarray(x).view(np.uint32)


def close_to(got: F32, want: npt.NDArray[np.float64], scale: npt.NDArray[np.float64], relative: float) -> None:
    """Assert |got - want| <= relative * scale, where `scale` is the sum of the magnitudes that were added up."""
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    excess = np.abs(got - want) - relative * scale
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    assert excess[worst] <= 0, f"at {worst}: {got[worst]} is not {want[worst]} (magnitudes {scale[worst]})"
