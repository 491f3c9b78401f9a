"""What an `Experts` op has, whoever runs it: its matrices and vectors, the experts that are here, and whether all that
fits together."""

from __future__ import annotations

from backends.base import ExpertMatrix, Experts, Weight


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
