"""The reference backend's table says yes exactly where the oracle really dequantises."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from backends.base import OpenOptions, TensorView
from backends.quant import QuantType
from backends.reference.backend import ReferenceBackend, capability_table
from backends.reference.dequant import NOT_WEIGHTS, dequantise

TABLE = {(entry.op, entry.type): entry for entry in ReferenceBackend(OpenOptions()).capabilities()}


def packed(kind: QuantType, rows: int = 3, blocks: int = 2) -> TensorView:
    """Random bytes of a type, with small exponents where a byte pair is a scale."""
    size = rows * blocks * kind.block_bytes
    data = np.random.default_rng(kind.gguf_id).integers(0, 60, size, dtype=np.uint8)
    return TensorView("random", kind, rows, blocks * kind.block_len, data)


@pytest.mark.parametrize("kind", list(QuantType), ids=lambda kind: kind.name)
def test_yes_means_that_it_dequantises(kind: QuantType) -> None:
    entry = TABLE["Linear", kind.name]
    assert entry.ok is (kind not in NOT_WEIGHTS)
    if entry.ok:
        dense = dequantise(packed(kind))
        assert dense.shape == (3, 2 * kind.block_len) and dense.dtype == np.float32
        assert np.isfinite(dense).all() and dense.flags.c_contiguous
    else:
        assert entry.why


@pytest.mark.parametrize("kind", [k for k in QuantType if k not in NOT_WEIGHTS], ids=lambda kind: kind.name)
def test_every_op_with_weights_takes_the_same_types(kind: QuantType) -> None:
    assert {TABLE[op, kind.name].ok for op in ("EmbedRows", "Linear", "Norm", "Bias", "HeadNorm", "Experts")} == {True}


def test_plain_types_are_read_as_the_format_package_reads_them() -> None:
    values = np.random.default_rng(1).standard_normal((4, 64), dtype=np.float32)
    for kind in (QuantType.F32, QuantType.F16, QuantType.BF16):
        name = GGMLQuantizationType(kind.gguf_id)
        bytes_ = np.frombuffer(quantize(values, name).tobytes(), np.uint8)
        got = dequantise(TensorView("plain", kind, 4, 64, bytes_))
        exact = dequantize(quantize(values, name), name)
        assert np.array_equal(got, exact)


def test_without_the_format_package_blocked_types_are_refused_with_what_to_install() -> None:
    table = {(entry.op, entry.type): entry for entry in capability_table(has_gguf=False)}
    assert table["Linear", "F32"].ok and table["Linear", "BF16"].ok
    assert table["Linear", "Q4_1"].ok is False and "pip install gguf" in table["Linear", "Q4_1"].why
