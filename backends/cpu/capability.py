"""What the CPU backend can do: the only source for dispatch, for `doctor` and for the support matrix.

Its keys are those of `backends.needs`: an op that reads weights has an entry for each weight type, attention one for
each KV type and each feature, the gate one for each kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from backends.base import (
    Attention,
    Capability,
    DeltaNet,
    Experts,
    Op,
    RopeStore,
    TensorView,
    Unsupported,
    Weight,
)
from backends.cpu import abi
from backends.needs import SHARES
from backends.quant import QuantType

MAX_HEAD_DIM = 512

FLOAT_TYPES = (QuantType.F32, QuantType.F16, QuantType.BF16)
PACKED_TYPES = (
    QuantType.Q4_0,
    QuantType.Q4_1,
    QuantType.Q5_0,
    QuantType.Q5_1,
    QuantType.Q8_0,
    QuantType.Q2_K,
    QuantType.Q3_K,
    QuantType.Q4_K,
    QuantType.Q5_K,
    QuantType.Q6_K,
    QuantType.IQ4_NL,
    QuantType.IQ4_XS,
    QuantType.MXFP4,
)
MATRIX_TYPES = FLOAT_TYPES + PACKED_TYPES
KV_TYPES = (*FLOAT_TYPES, QuantType.Q8_0, QuantType.F8)


def _entries(op: str, types: Sequence[QuantType], why: str) -> list[Capability]:
    return [Capability(op, quant.name, quant in types, "" if quant in types else why) for quant in QuantType]


TABLE: tuple[Capability, ...] = (
    *_entries("EmbedRows", MATRIX_TYPES, "no packed layout for this type yet"),
    *_entries("Linear", MATRIX_TYPES, "no kernel for this type yet"),
    *_entries("Norm", FLOAT_TYPES, "norm weights are floats"),
    *_entries("Bias", FLOAT_TYPES, "biases are floats"),
    *_entries("Scale", FLOAT_TYPES, "a factor is a float"),
    *_entries("RopeStore", KV_TYPES, "the KV pool holds F16, BF16, F32, Q8_0 or F8"),
    Capability("RopeStore", "shared rows", True),
    *_entries("HeadNorm", FLOAT_TYPES, "norm weights are floats"),
    Capability("HeadNorm", "none", True),
    *_entries("Attention", KV_TYPES, "the KV pool holds F16, BF16, F32, Q8_0 or F8"),
    *(Capability("Attention", feature, True) for feature in ("softcap", "sinks", "gated")),
    *(Capability("GatedActivation", kind, True) for kind in abi.GATES),
    *(Capability(op, "F32", True) for op in ("AddGated", "Softcap", "SelectRows")),
    *_entries("Experts", MATRIX_TYPES, "no kernel for this type yet"),
    *(Capability("Experts", kind, True) for kind in abi.GATES),
    *(Capability("Experts", f"routing {func}", True) for func in abi.ROUTES),
    Capability("Experts", "gains", True),
    *(Capability(op, "F32", True) for op in ("DeltaNet", "JoinHidden")),
    *(Capability(*need, True) for need in SHARES),
)


def refuse_shapes(backend: str, ops: Sequence[Op], kv: QuantType) -> None:
    """Raise Unsupported with every head shape that the attention kernel cannot serve, each once."""
    missing: dict[Capability, None] = {}
    for op in ops:
        if not isinstance(op, RopeStore | Attention):
            continue
        name = type(op).__name__
        if op.head_dim > MAX_HEAD_DIM:
            missing[Capability(name, f"head_dim {op.head_dim}", False, f"at most {MAX_HEAD_DIM}")] = None
        if op.head_dim % kv.block_len:
            why = f"{kv.name} rows are blocks of {kv.block_len}"
            missing[Capability(name, f"head_dim {op.head_dim}", False, why)] = None
        if op.heads % op.kv_heads:
            missing[Capability(name, f"{op.heads} heads", False, f"no multiple of {op.kv_heads} KV heads")] = None
    if missing:
        raise Unsupported(backend, tuple(missing))


def refuse_vectors(backend: str, ops: Sequence[Op], weights: Mapping[str, TensorView]) -> None:
    """Raise Unsupported with everything that delta nets and routings want as floats and is not, and every convolution
    that is too long."""
    missing: dict[Capability, None] = {}
    for op in ops:
        vectors: tuple[Weight | None, ...] = ()
        if isinstance(op, DeltaNet):
            vectors = (op.conv, op.dt_bias, op.a, op.norm)
            if op.kernel > abi.DELTA_KERNEL_MOST:
                why = f"at most {abi.DELTA_KERNEL_MOST}"
                missing[Capability("DeltaNet", f"convolution of {op.kernel}", False, why)] = None
        elif isinstance(op, Experts):
            vectors = (op.routing.selection, op.routing.gains)
        for vector in vectors:
            if vector is not None and weights[vector.name].type not in FLOAT_TYPES:
                name = weights[vector.name].type.name
                missing[Capability(type(op).__name__, f"{name} vectors", False, f"{vector.name} must be floats")] = None
    if missing:
        raise Unsupported(backend, tuple(missing))
