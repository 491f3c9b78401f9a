"""Experts on the CPU: how their matrices are stored, what scratch they need, and the record of one op.

Each `ExpertMatrix` is a *stack*: the same rows of every expert, each expert's packed by itself (its rows padded to 16),
one after the other. Two of them may be cut from one tensor (fused gate and up); each is a stack of its own, so that
together they hold what the tensor holds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from backends.base import ExpertMatrix, Experts, Op, TensorView, Weight
from backends.cpu import abi
from backends.cpu.capability import PACKED_TYPES
from backends.cpu.widths import FLOAT_BYTES, padded
from backends.experts import check as check
from backends.experts import held
from backends.experts import matrices_of as matrices_of
from backends.experts import stack_name as stack_name
from backends.experts import vectors_of as vectors_of

if TYPE_CHECKING:
    from backends.cpu.stored import StoredWeight

INT_BYTES = 4

SCRATCH = (
    "scores",
    "chosen",
    "weights",
    "places",
    "pair_rows",
    "starts",
    "active",
    "active_count",
    "gate_out",
    "up_or_down_out",
    "pair_activation",
)
"""The scratch of `hs_experts`, shared by all ops of a program: one runs after the other. When `down` writes, what `up`
wrote is used up: they share theirs."""


def is_packed(weights: Sequence[Weight], types: Mapping[str, TensorView]) -> bool:
    """Whether any of them wants its input as int16."""
    return any(types[weight.name].type in PACKED_TYPES for weight in weights)


def scratch_bytes(
    ops: Sequence[Op], op_rows: Sequence[int], types: Mapping[str, TensorView], library: ctypes.CDLL
) -> dict[str, int]:
    """Bytes of each field of `SCRATCH`: what the largest op needs. `op_rows`: the most rows of each op."""
    most = dict.fromkeys(SCRATCH, 0)
    for op, rows in zip(ops, op_rows, strict=True):
        if isinstance(op, Experts):
            for field, size in _scratch_of(op, rows, types, library).items():
                most[field] = max(most[field], size)
    return most


def _scratch_of(op: Experts, rows: int, types: Mapping[str, TensorView], library: ctypes.CDLL) -> dict[str, int]:
    experts, pairs, inner = op.routing.experts, rows * op.routing.used, op.gate.height
    packed_down = is_packed([op.down.weight], types)
    return {
        "scores": rows * experts * FLOAT_BYTES,
        "chosen": pairs * INT_BYTES,
        "weights": pairs * FLOAT_BYTES,
        "places": pairs * INT_BYTES,
        "pair_rows": pairs * INT_BYTES,
        "starts": (experts + 1) * INT_BYTES,
        "active": experts * INT_BYTES,
        "active_count": INT_BYTES,
        "gate_out": pairs * padded(inner) * FLOAT_BYTES,
        "up_or_down_out": pairs * max(padded(inner), padded(op.out.width)) * FLOAT_BYTES,
        "pair_activation": pairs * library.hs_activation_bytes(inner) if packed_down else 0,
    }


def record(
    op: Experts,
    types: Mapping[str, TensorView],
    scratch: Mapping[str, int],
    stored: Mapping[str, StoredWeight],
) -> abi.Experts:
    """`hs_experts` of an op. `scratch` has the address of each field, `stored` the placed weights."""

    def stack(matrix: ExpertMatrix) -> abi.Stack:
        name = stack_name(matrix)
        own, quant = stored[name], types[matrix.weight.name].type
        return abi.Stack(
            matrix=abi.Matrix(own.address, quant.gguf_id, matrix.height, matrix.weight.cols, own.stored_cols),
            expert_bytes=own.expert_bytes,
            bias=stored[f"{name}.bias"].address if matrix.bias is not None else None,
        )

    routing, (first, end) = op.routing, held(op)
    fields = dict(scratch)
    fields["up_out"] = fields["down_out"] = fields.pop("up_or_down_out")
    if not is_packed([op.down.weight], types):
        del fields["pair_activation"]
    return abi.Experts(
        count=routing.experts,
        used=routing.used,
        func=abi.ROUTES[routing.func],
        normalise=int(routing.normalise),
        scale=routing.scale,
        first=first,
        held=end - first,
        selection=stored[routing.selection.name].address if routing.selection is not None else None,
        gains=stored[routing.gains.name].address if routing.gains is not None else None,
        gate=stack(op.gate),
        up=stack(op.up),
        down=stack(op.down),
        inner_stride=padded(op.gate.height),
        out_stride=padded(op.out.width),
        **fields,
    )
