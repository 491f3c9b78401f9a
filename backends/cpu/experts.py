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


def matrices_of(op: Experts) -> tuple[ExpertMatrix, ExpertMatrix, ExpertMatrix]:
    return op.gate, op.up, op.down


def held(op: Experts) -> tuple[int, int]:
    """Experts [first, end) whose matrices the op has."""
    return op.held or (0, op.routing.experts)


def vectors_of(op: Experts) -> tuple[Weight, ...]:
    """Of the routing: one number for each expert."""
    return tuple(vector for vector in (op.routing.selection, op.routing.gains) if vector is not None)


def stack_name(matrix: ExpertMatrix) -> str:
    """What a stack is stored under: its tensor and the rows that it takes of each expert."""
    return f"{matrix.weight.name}[{matrix.first}:{matrix.first + matrix.height} of {matrix.pitch}]"


def check(op: Experts) -> None:
    """Raise ValueError where the shapes of an op do not fit each other."""
    experts, used = op.routing.experts, op.routing.used
    if not 0 < used <= experts:
        raise ValueError(f"{used} of {experts} experts cannot be chosen")
    first, end = held(op)
    if not 0 <= first < end <= experts:
        raise ValueError(f"experts {first} to {end} of {experts} cannot be held")
    if op.logits.width != experts:
        raise ValueError(f"logits {op.logits.name} are {op.logits.width} wide for {experts} experts")
    for vector in vectors_of(op):
        if (vector.rows, vector.cols) != (1, experts):
            raise ValueError(f"{vector.name} is [{vector.rows}, {vector.cols}], want [1, {experts}]")
    for matrix in matrices_of(op):
        weight = matrix.weight
        if weight.rows != (end - first) * matrix.pitch or not 0 <= matrix.first <= matrix.pitch - matrix.height:
            raise ValueError(f"{stack_name(matrix)} has {weight.rows} rows for {end - first} experts")
        if matrix.bias is not None and (matrix.bias.rows, matrix.bias.cols) != (1, weight.rows):
            raise ValueError(f"{matrix.bias.name} is [{matrix.bias.rows}, {matrix.bias.cols}], want [1, {weight.rows}]")
    inner = op.gate.height
    shapes = (op.gate.weight.cols, op.up.weight.cols, op.down.weight.cols, op.up.height, op.down.height)
    if shapes != (op.src.width, op.src.width, inner, inner, op.out.width):
        raise ValueError(
            f"experts of {op.gate.weight.name}: gate, up and down do not lead from {op.src.width} to {op.out.width}"
        )


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
